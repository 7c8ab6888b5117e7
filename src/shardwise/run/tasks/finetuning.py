"""Fine-tuning: from a Hugging Face folder to a fine-tuned one, or to its adapters."""

import dataclasses
import hashlib
import math
import os
import shutil
from collections.abc import Sequence
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch

from shardwise.core.communication.agreement import agree
from shardwise.core.errors import ConfigError, DataError
from shardwise.core.files import write_atomically
from shardwise.core.topology import Groups
from shardwise.data import Example, ExampleEncoder, example_of, read_records
from shardwise.data.examples import has_text, is_plain_text
from shardwise.data.json_records import Record
from shardwise.data.pair_rows import is_preference
from shardwise.data.reading import corpus_of
from shardwise.data.tokenizer import ChatTemplate, PaddedTokenizer
from shardwise.models.adapters import LoraConfig
from shardwise.models.description import ModelChunks, ModelDescription
from shardwise.models.transformer_model import TransformerModel
from shardwise.run.build import config_fields
from shardwise.run.processes.ranks import Ranks
from shardwise.run.settings import FinetuneSettings, LoraSettings, SampleSettings
from shardwise.run.tasks.model_card import model_card
from shardwise.run.tasks.recipe import Recipe, Session
from shardwise.run.tasks.samples import Documents, Examples, as_examples, prepare_samples
from shardwise.run.tasks.texts import STDLIB, Texts, TrainingData, encode_texts, read_data, share_texts
from shardwise.storage.adapters import (
    add_lora_,
    load_adapter_,
    merge_lora_,
    read_adapter_config,
    remove_lora_,
    save_adapter,
)
from shardwise.storage.adapters.config_file import CONFIG_NAME as ADAPTER_CONFIG_NAME
from shardwise.storage.huggingface import BaseQuantization, load_pretrained, save_pretrained
from shardwise.storage.huggingface.pretrained import CONFIG_NAME
from shardwise.storage.huggingface.pretrained_folder import PretrainedFolder
from shardwise.storage.huggingface.tensor_folder import README_NAME, copy_companion_files
from shardwise.training.bounds import DEFAULT_SEQUENCE

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
            copy_companion_files(self.source, target, beside_card=True)
        except OSError as error:
            raise ConfigError(f"cannot write to {target}: {error.strerror or error}") from error


class Finetuning(Recipe):
    """A run that trains the model of a Hugging Face folder, or adapters of it, and leaves one.

    Args:
        settings: of the run.

    Attributes:
        folder: of the model that the run starts from, open for reading; no tensor is read yet.
        tokenizer: of the folder.

    Raises:
        ConfigError: a model of another kind, an unknown architecture, a tokenizer that does not fit the model, samples
            longer than its longest sequence, or ``out`` is no place for this run.
        CheckpointError: files that are missing or damaged.
        DataError: no tokenizer, or one that cannot be read.
    """

    settings: FinetuneSettings

    def __init__(self, settings: FinetuneSettings) -> None:
        path = Path(settings.base)
        self.folder, self.settings_base = PretrainedFolder(path), path
        description = self.folder.description
        self.check_model(description)
        self.tokenizer = FolderTokenizer.load(path)
        assert isinstance(self.tokenizer, FolderTokenizer)
        self.tokenizer.source = path
        if self.tokenizer.vocab_size > description.vocab_size:
            raise ConfigError(
                f"the tokenizer of {path} has {self.tokenizer.vocab_size} ids, more than the {description.vocab_size} "
                "of the model's vocabulary; it is another model's"
            )
        settings.check_effect(description.num_layers)
        self.identity = {"base_sha256": digest_of(self.folder)}
        longest = description.max_sequence_length
        length = settings.model.sequence_length or min(DEFAULT_SEQUENCE, longest)
        if length > longest:
            raise ConfigError(f"model.sequence-length {length} is more than {longest}, the longest sequence of {path}")
        settings.parallel.check_length(length)
        _check_out(Path(settings.out), path)
        if (quantization := base_quantization(settings.lora)) is not None:
            quantization.check()
        self.trains_weights = not settings.lora.is_on
        model = dataclasses.replace(settings.model, sequence_length=length)
        super().__init__(dataclasses.replace(settings, model=model))

    def check_model(self, description: ModelDescription) -> None:
        """Raise ConfigError unless the run can start from such a model."""
        path, kind = self.settings_base, self.folder.architecture.model_type
        if description.kind != "gpt":
            raise ConfigError(
                f"{path} is a {kind} model, which does not continue texts; --task sequence-classification labels them"
            )
        if (head := description.classification) is not None:
            raise ConfigError(
                f"{path} is a model for {head.task} and has no head to continue texts; add --task {head.task}"
            )

    def read_texts(self, ranks: Ranks) -> TrainingData:
        """The text or the samples, split and encoded by the model's tokenizer; see ``Recipe``."""
        texts: TrainingData = share_texts(self._prepare, ranks)
        settings = self.settings
        if settings.samples.epochs is not None:
            num_samples = settings.samples.epochs * texts.loader(settings).schedule.num_samples
            steps = max(1, math.ceil(num_samples / settings.training.global_batch_size))
            self.settings = dataclasses.replace(
                settings,
                training=dataclasses.replace(settings.training, steps=steps),
                samples=dataclasses.replace(settings.samples, epochs=None),
            )
        return texts

    def encoder(self) -> ExampleEncoder:
        """What turns examples into tokens. Raises DataError if the folder's chat template is none."""
        settings = self.settings
        return ExampleEncoder(
            self.tokenizer,
            ChatTemplate.load(self.folder.path),
            mask_prompts=settings.samples.mask_prompts,
            parse_special=settings.special_tokens,
        )

    def reference_identity(self) -> dict[str, str]:
        """What says which model the run begins with, its adapters and their base included."""
        return {
            "base_sha256": str(self.identity["base_sha256"]),
            "adapters_sha256": _adapters_digest(self.settings.lora.lora_from),
            "base_quantization": self.settings.lora.base_quantization,
        }

    def to_show(self) -> list[Example] | Texts:
        """What is trained on, in its order: examples, or one stream of texts. Raises as a run."""
        data = self._read()
        if not isinstance(data, Documents):
            return data.examples
        return as_examples(data.corpus) if self.settings.samples.packing else self._stream(data)

    def _records(self, paths: Sequence[str]) -> tuple[str, list[Record]]:
        return read_records(paths, has_text=partial(has_text, text_key=self.settings.corpus.text_key))

    def _read(self) -> Documents | Examples:
        """The data: documents, if all of it is plain text."""
        settings, key = self.settings, self.settings.corpus.text_key
        measured = settings.samples.held_out
        if STDLIB in (*settings.data, *measured):
            held_out = read_data(measured, settings.corpus) if measured else None
            return Documents(read_data(settings.data, settings.corpus), held_out)
        name, records = self._records(settings.data)
        for record in records:
            # Some data sets have what their preferences are made of beside them.
            if is_preference(record) and is_plain_text(record) and key not in record.value:
                raise DataError(f"{record.where}: a preference ('chosen' and 'rejected'); use shardwise dpo")
        others = self._records(measured)[1] if measured else None
        if all(is_plain_text(record) for record in (*records, *(others or ()))):
            return Documents(
                corpus_of(name, records, key), None if others is None else corpus_of("held out", others, key)
            )
        return Examples(
            name,
            [example_of(record, key) for record in records],
            None if others is None else [example_of(record, key) for record in others],
        )

    def _prepare(self) -> TrainingData:
        settings, data = self.settings, self._read()
        if isinstance(data, Documents):
            if not settings.samples.packing:
                return self._stream(data)
            train, held_out = data.split(settings.corpus)
            data = Examples(data.corpus.name, as_examples(train), as_examples(held_out))
        return prepare_samples(
            *data,
            self.encoder(),
            settings.samples,
            sequence_length=settings.sequence_length,
            held_out_fraction=settings.corpus.held_out_fraction,
            # Exact sums over a sequence are of equal parts.
            multiple_of=settings.parallel.exact_parts if settings.parallel.exact else 1,
        )

    def _stream(self, documents: Documents) -> Texts:
        settings, too_long = self.settings, self.settings.samples.too_long
        if too_long != SampleSettings.too_long:
            raise ConfigError(
                f"--too-long {too_long} is for samples of their own, and plain texts are one stream, cut where a "
                "sample is full; add --packing, which keeps texts apart, or leave it out"
            )
        return encode_texts(
            documents.corpus,
            self.tokenizer,
            settings.corpus,
            parse_special=settings.special_tokens,
            held_out=documents.held_out,
        )

    def describe(self, vocab_size: int) -> ModelDescription:
        """The folder's model, with the dropout of the settings."""
        description, dropout = self.folder.description, self.settings.model.dropout
        if dropout is None:
            return description
        return dataclasses.replace(description, hidden_dropout=dropout, attention_dropout=dropout)

    def build_model(  # type: ignore[override]  # a method in place of a function that needs no recipe
        self, settings: FinetuneSettings, vocab_size: int, *, groups: Groups, device: torch.device
    ) -> TransformerModel | ModelChunks:
        """The base model on this rank, with adapters if asked; every rank calls."""
        fields = config_fields(settings, groups)
        fields["sequence_parallel"] &= groups.tp.size() > 1
        if (dropout := settings.model.dropout) is not None:
            fields |= {"hidden_dropout": dropout, "attention_dropout": dropout}
        # Of which a new head starts.
        torch.default_generator.manual_seed(settings.training.seed)
        loaded = self.load(groups=groups, device=device, quantization=base_quantization(settings.lora), **fields)
        model = ModelChunks(loaded) if isinstance(loaded, list) else loaded
        lora = settings.lora
        if lora.is_on:
            assert isinstance(model, TransformerModel)
            torch.default_generator.manual_seed(settings.training.seed)
            if lora.lora_from is None:
                add_lora_(model, self.adapters(), self.folder.architecture)
            else:
                load_adapter_(model, lora.lora_from, self.folder.architecture)
        return model

    def load(self, **options: Any) -> TransformerModel | ModelChunks:
        """The folder's model; see ``load_pretrained``."""
        return load_pretrained(self.folder.path, **options)

    def adapters(self) -> LoraConfig:
        """The adapters of a run that makes new ones."""
        return self.settings.lora.config()

    def beside_adapters(self, model: TransformerModel, out: Path) -> None:
        """Write what goes with the adapters' files; called on the first rank."""

    @property
    def fields(self) -> dict[str, Any]:
        """More of the ``config.json`` to write."""
        return {}

    def after(self, session: Session) -> None:
        """Write the fine-tuned model, or its adapters, into the run's folder; every rank calls.

        ``config.json`` (``adapter_config.json``) comes last: where it stands, all else does.

        Raises:
            CheckpointError, ConfigError: it cannot be written (no permission, disk full).
        """
        settings, model, out = self.settings, session.trainer.model, session.out
        control, architecture = session.ranks.control, self.folder.architecture
        if settings.lora.is_on:
            assert isinstance(model, TransformerModel)
            if not settings.lora.lora_merge:
                # Beside a model of an earlier run they would be taken for that one's.
                agree(lambda: _remove(out, _MODEL_FILES) if session.ranks.is_first else None, group=control)
                # Absolute, so that they find it from any folder.
                save_adapter(model, out, architecture, base_model=os.path.abspath(settings.base))
                agree(lambda: self.beside_adapters(model, out) if session.ranks.is_first else None, group=control)
                agree(lambda: self._leave_card(session) if session.ranks.is_first else None, group=control)
                return
            # Not at the top: PyTorch's part of it is slow to import.
            from shardwise.training.gradients.fully_sharded import whole_parts

            for part in whole_parts(model):
                merge_lora_(part)
            remove_lora_(model)
        partial = out / "export.partial"
        agree(lambda: shutil.rmtree(partial, ignore_errors=True) if session.ranks.is_first else None, group=control)
        save_pretrained(
            list(model) if isinstance(model, ModelChunks) else model,  # type: ignore[arg-type]
            partial,
            source=self.folder.path,
            architecture=architecture.model_type,
            dtype=self.folder.dtype,
            fields=self.fields,
            card=agree(lambda: self._card(session), group=control),
        )
        agree(lambda: _move_into_place(partial, out) if session.ranks.is_first else None, group=control)

    def _card(self, session: Session) -> str:
        lora, task = self.settings.lora, self.settings.labels.task
        return model_card(
            self.settings,
            session.out,
            model_name=self.settings.model_name,
            layout={kind: session.topology.size(kind) for kind in ("tp", "pp", "dp")},
            data=session.texts.name,
            base=self.folder.path,
            is_adapter=lora.is_on and not lora.lora_merge,
            # By the hub's name.
            task="text-classification" if task == "sequence-classification" else task,
        )

    def _leave_card(self, session: Session) -> None:
        try:
            write_atomically(session.out / README_NAME, methodcaller("write", self._card(session).encode()))
        except OSError as error:
            raise ConfigError(f"cannot write to {session.out}: {error.strerror or error}") from error


def base_quantization(lora: LoraSettings) -> BaseQuantization | None:
    """What becomes of the base's linear layers: those that are trained whole stay as they are."""
    if lora.base_quantization == "none":
        return None
    config = lora.config() if lora.lora_from is None else read_adapter_config(lora.lora_from)
    return BaseQuantization(lora.base_quantization, config.saves)


def digest_of(folder: PretrainedFolder) -> str:
    """Hex digest of a model's config, and of the beginnings and ends of its files of weights."""
    digest = hashlib.sha256((folder.path / CONFIG_NAME).read_bytes())
    for path in sorted({tensor.file for tensor in folder.tensors.tensors.values()}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_LOOKED_AT_BYTES))
            file.seek(max(0, size - _LOOKED_AT_BYTES))
            digest.update(file.read())
    return digest.hexdigest()


def _adapters_digest(folder: str | None) -> str:
    """Of the adapters in a folder; of none if None."""
    digest = hashlib.sha256()
    for path in [] if folder is None else sorted(Path(folder).glob("adapter_*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _check_out(out: Path, base: Path) -> None:
    """Refuse to write into a folder that is somebody's model."""
    if out.exists() and out.resolve() == base.resolve():
        raise ConfigError(f"--out {out} is the model's own folder; choose another")
    if (out / "settings.json").exists():
        return
    for name in (CONFIG_NAME, ADAPTER_CONFIG_NAME):
        if (out / name).exists():
            article = "an" if name[0] in "aeiou" else "a"
            raise ConfigError(f"--out {out} has {article} {name}, which no run put there; choose another folder")


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
