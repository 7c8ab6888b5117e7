"""A Hugging Face model, or adapters for it, as the source of a run."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from shardwise.core.atomic_files import open_regular, read_regular
from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.core.json_text import MAX_CONFIG_BYTES
from shardwise.core.topology import Groups
from shardwise.data.tokenizer import PaddedTokenizer
from shardwise.models.adapters import LoraConfig
from shardwise.models.by_plan import library
from shardwise.models.config import ModelConfig
from shardwise.models.description import ModelChunks
from shardwise.models.language_model import LanguageModel
from shardwise.models.transformer_model import TransformerModel
from shardwise.run.build import config_fields
from shardwise.run.settings import FinetuneSettings, LoraSettings, RunSettings
from shardwise.run.tasks.task_data import TaskData
from shardwise.storage.adapters import adapters_vocab_size, add_lora_, load_adapter_, read_adapter_config
from shardwise.storage.adapters.config_file import CONFIG_NAME as ADAPTER_CONFIG_NAME
from shardwise.storage.adapters.targets import named_outer_paths
from shardwise.storage.huggingface import BaseQuantization, load_pretrained
from shardwise.storage.huggingface.architectures import Architecture
from shardwise.storage.huggingface.generation_config import eos_ids_of, write_eos_ids
from shardwise.storage.huggingface.megatron.arguments import MEGATRON
from shardwise.storage.huggingface.pretrained import (
    CONFIG_NAME,
    PretrainedConfig,
    PretrainedFolder,
    config_to_json,
)
from shardwise.storage.huggingface.tensor_folder import copy_companion_files
from shardwise.training.bounds import DEFAULT_SEQUENCE, refuse

_LOOKED_AT_BYTES = 1 << 20

# Readers look for the first file first, so that a partially emptied folder counts as a folder without a model.
MODEL_FILES = (CONFIG_NAME, "model*.safetensors", "model*.safetensors.index.json")
ADAPTER_FILES = (ADAPTER_CONFIG_NAME, "adapter_model*.safetensors")

S = TypeVar("S", bound=FinetuneSettings)


class FolderTokenizer(PaddedTokenizer):
    """The tokenizer of a Hugging Face folder; saving copies its files."""

    source: Path
    learned_ends: tuple[int, ...] = ()

    def new_eos_ids(self) -> list[int]:
        """Return the ``eos_token_id`` of the result, learned tokens first; empty if the folder's own stays."""
        own = eos_ids_of(self.source)
        ids = list(dict.fromkeys((*self.learned_ends, *own)))
        return ids if self.learned_ends and ids != own else []

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Copy the tokenizer's files, and write the ends of what is learned into ``generation_config.json``."""
        target = Path(folder)
        try:
            target.mkdir(parents=True, exist_ok=True)
            copy_companion_files(self.source, target, beside_card=True)
            if eos_ids := self.new_eos_ids():
                write_eos_ids(target, eos_ids)
        except OSError as error:
            raise ConfigError(f"cannot write to {target}: {error.strerror or error}") from error


class PretrainedModel:
    """Source that trains the weights of a Hugging Face model, or adapters for it.

    Args:
        settings: settings of the run.

    Attributes:
        settings: settings of the run, with the sequence length filled in.
        folder: folder of the model, opened without reading tensors but copies of tied ones.
        tokenizer: tokenizer of the model.
        identity, trains_weights: see ``Source``.

    Raises:
        ConfigError: the model is of another kind, the architecture is unknown, the tokenizer does not fit the model,
            the sequence length is above the model's maximum, or ``out`` cannot be used for this run.
        CheckpointError: a file is missing or damaged.
        DataError: the tokenizer is missing or cannot be read.
    """

    def __init__(self, settings: FinetuneSettings) -> None:
        path = Path(settings.base)
        self.folder = PretrainedFolder(path, settings.model.implementation)
        check_continues_texts(self.folder.config, path)
        _check_can_be_written(self.folder, settings)
        check_by_plan(settings, self.folder.description)
        tokenizer = FolderTokenizer.load(self.folder.path)
        assert isinstance(tokenizer, FolderTokenizer)
        tokenizer.source = self.folder.path
        self.tokenizer = tokenizer
        num_rows = self.folder.description.vocab_size
        if (adapters := settings.lora.lora_from) is not None:
            num_rows = adapters_vocab_size(adapters, self.folder.architecture, num_rows)
            _check_tokenizer(Path(adapters), tokenizer)
        self.folder.change_vocabulary_(with_new_tokens(settings, num_rows, tokenizer.vocab_size))
        self.identity: Mapping[str, Any] = {"base_sha256": digest_of(self.folder)}
        self.settings = resolved(settings, self.folder.description, path)
        _check_out(Path(settings.out), path)
        # Of new adapters or of those in a folder; None without any.
        self.adapters = adapters_of(settings.lora, self.folder.config, self.folder.new_ids)
        if (quantization := self._quantization()) is not None:
            quantization.check()
        self.trains_weights = not settings.lora.is_on

    def digests(self) -> dict[str, str]:
        """Return hex digests that identify the model and its adapters."""
        lora = self.settings.lora
        return {
            **self.identity,
            "adapters_sha256": _adapters_digest(lora.lora_from),
            "base_quantization": lora.base_quantization,
        }

    def describe(self, data: TaskData) -> ModelConfig:
        """Describe the folder's model with the dropout of the settings."""
        return with_dropout(self.folder.description, self.settings.model.dropout)

    def build(
        self, settings: RunSettings, data: TaskData, *, groups: Groups, device: torch.device
    ) -> LanguageModel | ModelChunks:
        """Build the folder's model on this rank, with adapters if the settings ask for them; every rank calls."""
        fields, lora, architecture = config_fields(settings, groups), self.settings.lora, self.folder.architecture
        fields["sequence_parallel"] &= groups.tp.size() > 1
        if (dropout := self.settings.model.dropout) is not None:
            fields |= {"hidden_dropout": dropout, "attention_dropout": dropout}
        loaded = load_pretrained(
            self.folder,
            groups=groups,
            device=device,
            quantization=self._quantization(),
            **fields,
        )
        model = ModelChunks(loaded) if isinstance(loaded, list) else loaded
        if lora.is_on:
            assert isinstance(model, TransformerModel)
            torch.default_generator.manual_seed(settings.training.seed)
            if lora.lora_from is None:
                assert self.adapters is not None
                add_lora_(model, self.adapters, architecture)
            else:
                load_adapter_(model, lora.lora_from, architecture)
        return model

    def _quantization(self) -> BaseQuantization | None:
        """Return the quantization of the base model's linear layers, except layers that are trained."""
        kind = self.settings.lora.base_quantization
        if kind == "none" or self.adapters is None:
            return None
        is_resized = self.folder.description.vocab_size != self.folder.new_ids.start
        return BaseQuantization(kind, unquantized(self.adapters, self.folder.architecture, is_resized=is_resized))


def check_continues_texts(config: PretrainedConfig, path: Path) -> None:
    """Raise ConfigError unless the model in a folder continues texts."""
    if config.description.kind != "gpt":
        raise ConfigError(f"{path} is a {config.architecture.model_type} model, which does not continue texts")


def check_by_plan(settings: FinetuneSettings, model: ModelConfig) -> None:
    """Raise ConfigError for a setting that needs a table of Shardwise if transformers computes the model."""
    if model.transformers_config is None:
        return
    parallel, lora, dropout = settings.parallel, settings.lora, settings.model.dropout
    own = max(model.hidden_dropout, model.attention_dropout)
    refuse(
        f"{settings.base} is computed by {library.name_of(model)}, because Shardwise has no table for it or "
        "--model.implementation asks for it, and such a model cannot be used with {}",
        (parallel.exact, "--exact; leave it out"),
        (parallel.sequence_parallel and parallel.tp > 1, "--sequence-parallel; leave it out"),
        (parallel.pp > 1, f"--pp {parallel.pp}; use --tp, or more data-parallel ranks with --zero 1"),
        (parallel.cp > 1, f"--cp {parallel.cp}; use --tp, or a shorter --model.sequence-length"),
        (parallel.ep > 1, f"--ep {parallel.ep}; --tp splits each expert"),
        (parallel.fsdp, "--fsdp; use --tp, or --zero 1"),
        (
            settings.recompute.granularity != "none" and not settings.recompute.is_of_each_layer,
            f"--recompute {settings.recompute}; use --recompute.granularity full alone",
        ),
        (lora.is_on, "adapters; leave out the --lora flags, which trains all weights"),
        (settings.record_routing or settings.replay_routing, "--record-routing and --replay-routing; leave them out"),
        (dropout not in (None, 0.0, own), f"--model.dropout {dropout}; use 0, or leave it out for {own:g}"),
        (
            parallel.tp > 1 and (own if dropout is None else dropout) > 0,
            f"dropout ({own:g} in its config.json) over --tp {parallel.tp} ranks; use --model.dropout 0",
        ),
    )


def with_new_tokens(settings: FinetuneSettings, num_rows: int, num_tokens: int) -> int:
    """Return the model's number of ids in a run of ``settings``, for a folder's numbers of rows and of tokens.

    Rows beyond the tokens stay, because many published models have some.

    Raises:
        ConfigError: there are more tokens than rows, and the settings do not add rows.
    """
    if num_tokens > num_rows and not settings.resize_vocab:
        raise ConfigError(
            f"the tokenizer of {settings.base} has {num_tokens} ids, and its model rows for {num_rows}: if tokens were "
            "added to the tokenizer, --resize-vocab gives the model rows for them; if not, it is another model's"
        )
    return max(num_rows, num_tokens)


def resolved(settings: S, model: ModelConfig, path: Path) -> S:
    """Return the settings of a run that starts from the model in a folder, with the sequence length filled in."""
    settings.check_effect(model.num_layers)
    longest = model.max_sequence_length
    length = settings.model.sequence_length or min(DEFAULT_SEQUENCE, longest)
    if length > longest:
        raise ConfigError(f"model.sequence-length {length} is more than {longest}, the longest sequence of {path}")
    settings.parallel.check_length(length)
    return dataclasses.replace(settings, model=dataclasses.replace(settings.model, sequence_length=length))


def with_dropout(model: ModelConfig, dropout: float | None) -> ModelConfig:
    """Return the model with another dropout, unless it is None."""
    return model if dropout is None else dataclasses.replace(model, hidden_dropout=dropout, attention_dropout=dropout)


def adapters_of(lora: LoraSettings, folder: PretrainedConfig, new_ids: Sequence[int]) -> LoraConfig | None:
    """Return the configuration of a run's adapters, in a folder or new; None if it has none.

    Args:
        lora: settings of the run.
        folder: configuration of the base model.
        new_ids: ids that the run's model has and the base model has not.

    Raises:
        ConfigError: the rows of new ids are to be trained, and there are none.
    """
    if not lora.is_on:
        return None
    if lora.lora_from is not None:
        return read_adapter_config(lora.lora_from)
    config = lora.config()
    if not lora.train_new_tokens:
        return config
    names = [path.rpartition(".")[2] for path in named_outer_paths(folder.architecture)]
    if not new_ids:
        raise ConfigError(
            f"--train-new-tokens: the model has rows for all tokens of its tokenizer, {folder.description.vocab_size}, "
            f"so none is new; leave it out, or train the rows of all tokens: --lora-modules-to-save {' '.join(names)}"
        )
    if folder.description.share_embeddings_and_output_weights:
        names = names[:1]
    return dataclasses.replace(config, trainable_token_indices=dict.fromkeys(names, tuple(new_ids)))


def unquantized(config: LoraConfig, architecture: Architecture, *, is_resized: bool) -> Callable[[str], bool]:
    """Return whether the module at a path keeps its dtype: it is trained, or its rows are stored with the adapters."""
    outer = named_outer_paths(architecture).keys() if is_resized else ()
    return lambda path: path in outer or config.trains(path)


def _check_tokenizer(adapters: Path, tokenizer: FolderTokenizer) -> None:
    """Raise ConfigError if adapters were trained with other tokens than those of the base model's folder."""
    if not (adapters / "tokenizer.json").exists():
        return
    of_adapters = PaddedTokenizer.load(adapters).vocab_size
    if of_adapters != tokenizer.vocab_size:
        raise ConfigError(
            f"the adapters of {adapters} have a tokenizer of {of_adapters} ids, and {tokenizer.source} one of "
            f"{tokenizer.vocab_size}; copy the adapters' tokenizer files into a copy of {tokenizer.source}, and give it"
        )


def digest_of(folder: PretrainedFolder) -> str:
    """Return a hex digest of a model's config and of the first and last bytes of its weight files."""
    if folder.architecture is MEGATRON:
        digest = hashlib.sha256(json.dumps(folder.config.values, sort_keys=True).encode())
    else:
        digest = hashlib.sha256(read_regular(folder.path / CONFIG_NAME, limit=MAX_CONFIG_BYTES))
    for path in sorted({tensor.file for tensor in folder.tensors.tensors.values()}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open_regular(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
            digest.update(file.read(_LOOKED_AT_BYTES))
            file.seek(max(0, size - _LOOKED_AT_BYTES))
            digest.update(file.read())
    return digest.hexdigest()


def _check_can_be_written(folder: PretrainedFolder, settings: FinetuneSettings) -> None:
    """Raise ConfigError if what is learned from a checkpoint of Megatron would have no form at the end."""
    if folder.architecture is not MEGATRON:
        return
    if settings.lora.is_on:
        raise ConfigError(
            f"{folder.path} is a checkpoint of Megatron, and adapters have the names of a Hugging Face model; make one "
            f"first: shardwise import-megatron {folder.path} --out run, shardwise export-hf run --out model"
        )
    config_to_json(folder.description)


def _adapters_digest(folder: str | None) -> str:
    """Return a hex digest of the adapters in a folder; None stands for no adapters."""
    digest = hashlib.sha256()
    for path in [] if folder is None else sorted(Path(folder).glob("adapter_*")):
        try:
            with open_regular(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
                while part := file.read(_LOOKED_AT_BYTES):
                    digest.update(part)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


def _check_out(out: Path, base: Path) -> None:
    """Raise ConfigError if ``out`` has a model that was not written by a run."""
    if out.exists() and out.resolve() == base.resolve():
        raise ConfigError(f"--out {out} is the model's own folder; choose another")
    if (out / "settings.json").exists():
        return
    for pattern in (*MODEL_FILES, *ADAPTER_FILES):
        for name in sorted(path.name for path in out.glob(pattern)):
            article = "an" if name[0] in "aeiou" else "a"
            raise ConfigError(f"--out {out} has {article} {name}, which no run put there; choose another folder")
