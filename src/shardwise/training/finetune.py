"""A whole fine-tuning run on one rank: from a Hugging Face folder to a fine-tuned one, or to its adapters."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.communication.agreement import agree, barrier
from shardwise.errors import ConfigError
from shardwise.huggingface import load_pretrained, save_pretrained
from shardwise.huggingface.folder import PretrainedFolder
from shardwise.huggingface.pretrained import CONFIG_NAME
from shardwise.huggingface.saving import COPIED_FILES
from shardwise.lora import LoraConfig, add_lora_, merge_lora_, remove_lora_, save_adapter
from shardwise.lora.adapter_files import CONFIG_NAME as ADAPTER_CONFIG_NAME
from shardwise.models.chunks import ModelChunks
from shardwise.models.gpt import GPT
from shardwise.tokenizer import PaddedTokenizer
from shardwise.topology import Groups, Topology
from shardwise.training.build import config_fields
from shardwise.training.finetune_settings import FinetuneSettings
from shardwise.training.ranks import Ranks
from shardwise.training.run import run
from shardwise.training.session import Session, assemble_session, share_texts, trainer_of
from shardwise.training.texts import Texts, encode_texts, read_data
from shardwise.training.trainer import Trainer

_USUAL_SEQUENCE_LENGTH = 512
_LOOKED_AT_BYTES = 1 << 20


class FolderTokenizer(PaddedTokenizer):
    """The tokenizer of a Hugging Face folder, whose files are copied as they are."""

    source: Path

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Copy the tokenizer's files.

        Raises:
            ConfigError: the folder cannot be written to.
        """
        target = Path(folder)
        try:
            target.mkdir(parents=True, exist_ok=True)
            for name in COPIED_FILES:
                if (self.source / name).is_file():
                    shutil.copyfile(self.source / name, target / name)
        except OSError as error:
            raise ConfigError(f"cannot write to {target}: {error.strerror or error}") from error


@dataclass(frozen=True)
class Base:
    """The model that a run starts from, before any tensor is read.

    Attributes:
        folder: open for reading.
        tokenizer: of the folder.
        sha256: of what tells the folder from others: its configuration, and the beginning and end of each file of
            weights.
    """

    folder: PretrainedFolder
    tokenizer: FolderTokenizer
    sha256: str

    @classmethod
    def open(cls, path: Path) -> Base:
        """Look at a folder.

        Raises:
            ConfigError: a model that is no GPT, an unknown architecture, a tokenizer that does not fit the model.
            CheckpointError: files that are missing or damaged.
            DataError: no tokenizer, or one that cannot be read.
        """
        folder = PretrainedFolder(path)
        description = folder.description
        if description.kind != "gpt":
            raise ConfigError(f"{path} is a {folder.architecture.model_type} model; only causal models are fine-tuned")
        tokenizer = FolderTokenizer.load(path)
        assert isinstance(tokenizer, FolderTokenizer)
        tokenizer.source = path
        if tokenizer.vocab_size > description.vocab_size:
            raise ConfigError(
                f"the tokenizer of {path} has {tokenizer.vocab_size} ids, more than the {description.vocab_size} of "
                "the model's vocabulary; it is another model's"
            )
        return cls(folder, tokenizer, _digest(folder))

    def resolve(self, settings: FinetuneSettings) -> FinetuneSettings:
        """The settings with what the folder decides.

        Raises:
            ConfigError: samples longer than the model's longest sequence, or ``out`` is no place for this run.
        """
        longest = self.folder.description.max_sequence_length
        length = settings.model.sequence_length or min(_USUAL_SEQUENCE_LENGTH, longest)
        if length > longest:
            raise ConfigError(
                f"model.sequence-length {length} is more than {longest}, the longest sequence of {self.folder.path}"
            )
        _check_out(Path(settings.out), self.folder.path)
        return dataclasses.replace(settings, model=dataclasses.replace(settings.model, sequence_length=length))


def _digest(folder: PretrainedFolder) -> str:
    digest = hashlib.sha256((folder.path / CONFIG_NAME).read_bytes())
    for path in sorted({tensor.file for tensor in folder.tensors.tensors.values()}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_LOOKED_AT_BYTES))
            file.seek(max(0, size - _LOOKED_AT_BYTES))
            digest.update(file.read())
    return digest.hexdigest()


def _check_out(out: Path, base: Path) -> None:
    """Refuse to write into a folder that is somebody's model."""
    if out.exists() and out.resolve() == base.resolve():
        raise ConfigError(f"--out {out} is the model's own folder; choose another")
    if (out / "settings.json").exists():
        return
    for name in (CONFIG_NAME, ADAPTER_CONFIG_NAME):
        if (out / name).exists():
            raise ConfigError(f"--out {out} has a {name}, which no run put there; choose another folder")


def finetune(settings: FinetuneSettings) -> None:
    """Fine-tune as ``settings`` say; every rank calls, and ends with the same error if one cannot go on."""
    base: list[Base] = []

    def opened(settings: FinetuneSettings, ranks: Ranks) -> Session:
        session, read = open_finetuning(settings, ranks)
        base.append(read)
        return session

    run(settings, opened, after=lambda session: export(session, base[0]))


def open_finetuning(settings: FinetuneSettings, ranks: Ranks) -> tuple[Session, Base]:
    """Set up a run, and read the model that it starts from; every rank calls.

    Raises:
        ShardwiseError: see ``Base`` and ``assemble_session``; the same on every rank.
    """
    base = agree(lambda: Base.open(Path(settings.base)), group=ranks.control)
    resolved = agree(lambda: base.resolve(settings), group=ranks.control)

    def prepare() -> Texts:
        corpus = read_data(resolved.data, resolved.corpus)
        return encode_texts(corpus, base.tokenizer, resolved.corpus, parse_special=resolved.special_tokens)

    session = assemble_session(
        resolved,
        ranks,
        share_texts(prepare, ranks),
        lambda topology: build_trainer(resolved, base, topology, ranks.device),
        base={"base_sha256": base.sha256},
    )
    return session, base


def build_trainer(settings: FinetuneSettings, base: Base, topology: Topology, device: torch.device) -> Trainer:
    """The base model on this rank, with adapters if asked, and an optimizer of what is trained; every rank calls."""
    groups, dropout = Groups.of(topology), settings.model.dropout
    fields = config_fields(settings, groups)
    fields["sequence_parallel"] &= topology.size("tp") > 1
    if dropout is not None:
        fields |= {"hidden_dropout": dropout, "attention_dropout": dropout}
    loaded = load_pretrained(base.folder.path, groups=groups, device=device, **fields)
    model: Any = ModelChunks(loaded) if isinstance(loaded, list) else loaded
    lora = settings.lora
    if lora.lora_rank is not None:
        assert isinstance(model, GPT)
        torch.default_generator.manual_seed(settings.training.seed)
        config = LoraConfig(
            r=lora.lora_rank,
            lora_alpha=2 * lora.lora_rank if lora.lora_alpha is None else lora.lora_alpha,
            lora_dropout=lora.lora_dropout,
            target_modules=lora.lora_targets,
            use_rslora=lora.lora_rslora,
        )
        add_lora_(model, config, base.folder.architecture)
    return trainer_of(settings, model, topology)


def export(session: Session, base: Base) -> None:
    """Write the fine-tuned model, or its adapters, into the run's folder; every rank calls.

    ``config.json`` (``adapter_config.json``) comes last: where it stands, all else does.

    Raises:
        CheckpointError, ConfigError: it cannot be written (no permission, disk full).
    """
    settings, model = session.settings, session.trainer.model
    assert isinstance(settings, FinetuneSettings)
    control = session.ranks.control
    out, architecture = session.out, base.folder.architecture
    if settings.lora.lora_rank is not None:
        assert isinstance(model, GPT)
        if not settings.lora.lora_merge:
            # Beside a model of an earlier run they would be taken for that one's.
            agree(lambda: _remove(out, _MODEL_FILES) if session.ranks.is_first else None, group=control)
            # Absolute, so that they find it from any folder.
            save_adapter(model, out, architecture, base_model=os.path.abspath(settings.base))
            barrier("the adapters' files", group=control)
            return
        merge_lora_(model)
        remove_lora_(model)
    partial = out / "export.partial"
    agree(lambda: shutil.rmtree(partial, ignore_errors=True) if session.ranks.is_first else None, group=control)
    save_pretrained(
        list(model) if isinstance(model, ModelChunks) else model,  # type: ignore[arg-type]
        partial,
        source=base.folder.path,
        architecture=architecture.model_type,
        dtype=base.folder.dtype,
    )
    agree(lambda: _move_into_place(partial, out) if session.ranks.is_first else None, group=control)


# What a reader looks for first comes first, so that a folder half emptied is one without a model.
_MODEL_FILES = (CONFIG_NAME, "model*.safetensors", "model*.safetensors.index.json")
_ADAPTER_FILES = ("adapter_config.json", "adapter_model*.safetensors")


def _remove(out: Path, patterns: Sequence[str]) -> None:
    """Remove what an earlier run left in ``out``."""
    try:
        for stale in [path for pattern in patterns for path in out.glob(pattern)]:
            stale.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot remove the files of an earlier run from {out}: {error.strerror or error}") from error


def _move_into_place(partial: Path, out: Path) -> None:
    """Replace an earlier export, or adapters, by the one in ``partial``."""
    _remove(out, (*_ADAPTER_FILES, *_MODEL_FILES))
    try:
        for path in sorted(partial.iterdir(), key=lambda path: path.name == CONFIG_NAME):
            path.replace(out / path.name)
        partial.rmdir()
    except OSError as error:
        raise ConfigError(f"cannot move the model from {partial} to {out}: {error.strerror or error}") from error
