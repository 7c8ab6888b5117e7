"""A Hugging Face folder: its ``config.json``, and the stored name of each tensor of the architecture."""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from shardwise.core.atomic_files import no_folder
from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.core.json_text import first_of
from shardwise.core.tensor_files import some_tensors
from shardwise.data.json_records import counted
from shardwise.models.by_plan import library
from shardwise.models.config import ModelConfig
from shardwise.storage.huggingface.architectures import ARCHITECTURES, Architecture
from shardwise.storage.huggingface.architectures.by_plan import by_plan
from shardwise.storage.huggingface.architectures.mixtures import WithExperts
from shardwise.storage.huggingface.fields import Fields
from shardwise.storage.huggingface.gguf.folder import GgufFolder, is_gguf
from shardwise.storage.huggingface.mapping import Table
from shardwise.storage.huggingface.megatron.arguments import MEGATRON
from shardwise.storage.huggingface.megatron.folder import MegatronFolder, is_megatron
from shardwise.storage.huggingface.mxfp4 import Mxfp4Folder
from shardwise.storage.huggingface.tensor_folder import (
    TensorFolder,
    is_weight_dtype,
    own_file,
    read_json,
    same_values,
    weight_dtype,
)

CONFIG_NAME = "config.json"

Implementation = Literal["auto", "shardwise", "transformers"]
"""Library that computes a folder's model: ``"shardwise"``, by a table of its ``model_type``; ``"transformers"``, split
by the model's own plan; ``"auto"`` takes a table if there is one."""

_DTYPES = {
    str(each).removeprefix("torch."): each for each in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}


@dataclass(frozen=True)
class PretrainedConfig:
    """Content of a ``config.json``; ``dtype`` is None if the file does not state it, ``values`` are all fields."""

    architecture: Architecture
    description: ModelConfig
    dtype: torch.dtype | None
    values: Mapping[str, Any]


_NUM_REASONS = 3


def read_config(folder: str | Path, implementation: Implementation = "auto") -> PretrainedConfig:
    """Read the ``config.json`` of a Hugging Face folder, or what stands for it; see ``config_from_json``.

    Raises:
        CheckpointError: the file is missing or is not a JSON object; the message says what to give instead.
    """
    if is_gguf(Path(folder)):
        return config_from_json(GgufFolder(Path(folder)).config, where=str(folder), implementation=implementation)
    if is_megatron(Path(folder)):
        return config_from_json(MegatronFolder(Path(folder)).config, where=str(folder), implementation=implementation)
    path = Path(folder) / CONFIG_NAME
    if os.path.isdir(folder) and not os.path.lexists(path):
        to_do = "give the folder of a model, as save_pretrained of transformers and shardwise export-hf write it"
        if (Path(folder) / "checkpoints").is_dir():
            to_do = f"it is a run; write its model with: shardwise export-hf {folder} --out MODEL_DIR"
        raise CheckpointError(f"{folder} has no {CONFIG_NAME}; {to_do}")
    return config_from_json(read_json(path), where=str(path), implementation=implementation)


def own_config(folder: Path) -> dict[str, Any] | None:
    """Read the fields of ``config.json`` that a result may keep; None if there is no such file (see ``own_file``)."""
    path = own_file(folder, CONFIG_NAME)
    return None if path is None else read_json(path)


def config_from_json(
    values: Mapping[str, Any], *, where: str = CONFIG_NAME, implementation: Implementation = "auto"
) -> PretrainedConfig:
    """Interpret the fields of a ``config.json``; fields that do not affect results are ignored.

    Raises:
        ConfigError: the architecture or a value is not supported; the message names field and value.
    """
    fields = Fields(values, where)
    model_type = fields.get(str, "model_type")
    known_types = {**ARCHITECTURES, MEGATRON.model_type: MEGATRON}
    architecture = None if implementation == "transformers" else known_types.get(model_type)
    if architecture is not None and implementation == "auto" and architecture.needs_transformers(fields):
        architecture = None
    if architecture is None and implementation == "shardwise":
        raise fields.error("model_type", model_type, f"one of {', '.join(ARCHITECTURES)}")
    classes = values.get("architectures")
    if "Classification" in str(classes):
        raise ConfigError(
            f"{where}: architectures is {classes}, a model that labels texts; Shardwise trains models that continue or "
            "fill in texts, so use transformers for this one (its Trainer, its pipelines)"
        )
    if architecture is not None and classes and (classes not in [[each] for each in architecture.classes]):
        raise fields.error("architectures", classes, f"one of {', '.join(architecture.classes)}")
    quantized, readable = values.get("quantization_config"), getattr(architecture, "quantizations", ())
    if quantized is not None and not (isinstance(quantized, dict) and quantized.get("quant_method") in readable):
        ways = "".join(f", or of quant_method {each}" for each in readable)
        if isinstance(quantized, dict) and "quant_method" in quantized:
            # First, because the text of a long value is cut.
            quantized = {"quant_method": quantized["quant_method"]} | quantized
        remedy = f"null: weights must not be quantized{ways}; use a folder whose weights are bf16, fp16 or fp32"
        raise fields.error("quantization_config", quantized, remedy)
    name = next((name for name in ("dtype", "torch_dtype") if values.get(name) not in (None, "auto")), None)
    dtype = None
    if name is not None:
        dtype = _DTYPES.get(fields.get(str, name).removeprefix("torch."))
        if dtype is None:
            raise fields.error(name, values[name], f"one of {', '.join(_DTYPES)}")
    if architecture is None:
        description = library.describe(values, where)
        return PretrainedConfig(by_plan(description), description, dtype, values)
    try:
        description = architecture.read(fields)
    except ConfigError as error:
        # The error of valid fields that contradict each other does not name the file yet.
        if str(error).startswith(where):
            raise
        raise ConfigError(f"{where}: {error}") from error
    return PretrainedConfig(architecture, description, dtype, values)


def config_to_json(
    description: ModelConfig,
    *,
    architecture: str | None = None,
    dtype: torch.dtype | None = None,
    base: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the ``config.json`` of a model.

    Args:
        architecture: the ``model_type``; None for the one of ``base``, or without it the first that can express the
            model.
        dtype: dtype of the weights.
        base: a ``config.json`` whose other fields, such as ids of special tokens, are kept.

    Raises:
        ConfigError: the architecture is unknown or cannot express the model.
    """
    chosen = architecture or (base or {}).get("model_type")
    if description.transformers_config is not None:
        own = by_plan(description)
        if chosen not in (None, own.model_type):
            raise ConfigError(f"architecture is {chosen!r}, and the model is of {own.model_type}; leave it out")
        return own.written(description, dtype)
    if chosen is not None and chosen not in ARCHITECTURES:
        raise ConfigError(f"architecture {chosen!r} is unknown; it must be one of {', '.join(ARCHITECTURES)}")
    attempts: dict[str, str] = {}
    for candidate in ARCHITECTURES.values() if chosen is None else [ARCHITECTURES[chosen]]:
        try:
            return written_as(candidate, description, dtype, base)
        except ConfigError as error:
            attempts[candidate.model_type] = str(error)
    # The closest architectures have experts if the model has, and the shortest reasons.
    has_experts = description.experts is not None
    closest = sorted(
        attempts, key=lambda name: (isinstance(ARCHITECTURES[name], WithExperts) != has_experts, len(attempts[name]))
    )
    reasons = "; ".join(f"{name}: {attempts[name]}" for name in closest[:_NUM_REASONS])
    others = f"; nor as {', '.join(closest[_NUM_REASONS:])}" if len(closest) > _NUM_REASONS else ""
    raise ConfigError(f"the model cannot be written as a Hugging Face architecture ({reasons}{others})")


def written_as(
    architecture: Architecture, description: ModelConfig, dtype: torch.dtype | None, base: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the fields of one architecture; raise ConfigError if it cannot express the model."""
    values: dict[str, Any] = {
        "architectures": [architecture.class_of(description)],
        "model_type": architecture.model_type,
    }
    if dtype is not None:
        # All readers know this name; transformers 5 writes "dtype" instead.
        values["torch_dtype"] = str(dtype).removeprefix("torch.")
    if base is not None and base.get("model_type") == architecture.model_type:
        # Weights are written in the stated dtype, whether or not those of the folder were quantised.
        left_out = ("dtype", "torch_dtype", "architectures", "quantization_config")
        kept = {name: value for name, value in base.items() if name not in left_out}
        with contextlib.suppress(ConfigError):
            if not description.differences(architecture.read(Fields(kept | values))):
                return kept | values
        values = kept | values
    values |= architecture.write(description)
    meant = architecture.read(Fields(values))
    if different := description.differences(meant):
        text = ", ".join(f"{name} {mine!r} (it would be {theirs!r})" for name, (mine, theirs) in different.items())
        raise ConfigError(f"it has no way to say {text}")
    return values


def architecture_of(description: ModelConfig, model_type: str) -> Architecture:
    """Return the architecture of a model: its table, or the names of transformers."""
    return ARCHITECTURES[model_type] if description.transformers_config is None else by_plan(description)


class PretrainedFolder:
    """A Hugging Face folder, a GGUF file, or a folder of Megatron's checkpoints, open for reading.

    Attributes:
        path: the folder; of a GGUF file, a temporary one with the files that it stands for.
        description: the model to load, with the requested changes.
        notes: contradictions of the folder that the user should see, one line each.

    Raises:
        ConfigError, CheckpointError: as for ``load_pretrained``.
    """

    def __init__(self, folder: str | Path, implementation: Implementation = "auto") -> None:
        self.path = Path(folder)
        if is_gguf(self.path):
            self.tensors: TensorFolder = GgufFolder(self.path)
            self.path = self.tensors.folder
            values = read_json(self.path / CONFIG_NAME)
            self.config = config_from_json(values, where=str(folder), implementation=implementation)
        elif is_megatron(self.path):
            self.tensors = MegatronFolder(self.path)
            self.config = config_from_json(
                self.tensors.config, where=f"{self.path}: the arguments", implementation=implementation
            )
        else:
            check_model_folder(self.path)
            self.config = read_config(self.path, implementation)
            is_quantized = self.config.values.get("quantization_config") is not None
            self.tensors = Mxfp4Folder(self.path) if is_quantized else TensorFolder(self.path)
        self.architecture = self.config.architecture
        self.description = self.architecture.adapt(self.config.description, self.tensors.tensors.keys())
        self.notes: list[str] = []
        self._mtp = self._find_mtp()
        self._check_copies()
        self._stored_vocab_size = self.description.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights from ``config.json``, or else of the first weight."""
        stored = list(self.tensors.tensors.values())
        # Old files also store integer positions, so take the first floating-point tensor. If there is none, the error
        # names the first tensor's dtype.
        first = next((tensor for tensor in stored if is_weight_dtype(tensor)), next(iter(stored), None))
        if self.config.dtype is not None or first is None:
            return self.config.dtype or torch.float32
        return weight_dtype(first)

    @property
    def table(self) -> Table:
        """Stored tensors of each parameter, by the names of experts that the folder has."""
        return self.architecture.table_of({name: stored.shape for name, stored in self.tensors.tensors.items()})

    def change_vocabulary_(self, size: int) -> None:
        """Set the size of the vocabulary, at least 1: the folder's first ids; ids that it lacks get the mean row."""
        if size < 1:
            raise ConfigError(f"vocab_size is {size}; a vocabulary needs at least 1 id")
        self.description = self.architecture.with_vocabulary(self.description, size)

    @property
    def new_ids(self) -> range:
        """Ids of the vocabulary that the folder has no rows for."""
        return range(self._stored_vocab_size, self.description.vocab_size)

    def stored_shape(self, key: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape in the folder of the parameter ``key``, which has ``shape`` in the model."""
        is_of_vocabulary = self.architecture.is_of_vocabulary(self.config.description, key)
        return (self._stored_vocab_size, *shape[1:]) if is_of_vocabulary else tuple(shape)

    def stored_names(self, expected: Set[str]) -> dict[str, str]:
        """Return the stored name of each ``expected`` tensor; raise CheckpointError if one is missing or unexpected."""
        found: dict[str, str] = {}
        extra = []
        copies = self.copies()
        for stored in self.tensors.tensors:
            name = self._todays_name(stored, expected)
            if name in found:
                raise CheckpointError(f"{self.path} holds tensor {name!r} twice, also as {stored!r}")
            if name in expected or name in copies:
                found[name] = stored
            elif stored not in self._mtp and not any(re.search(f"{each}$", name) for each in self.architecture.ignored):
                extra.append(stored)
        for copy, original in copies.items():
            if copy in found:
                found.setdefault(original, found[copy])
        if missing := sorted(expected - found.keys()):
            lacks = f"{self.path} lacks {some_tensors(missing)}, which its config.json asks for"
            if sources := library.unread_sources(self.config.description, missing[0]):
                lacks += f"; transformers makes it of {first_of(sources)}, which is not done here"
            raise CheckpointError(lacks + self._wrapper_hint(missing))
        if extra:
            raise CheckpointError(
                f"{self.path} holds {some_tensors(extra)}, for which a model of its config.json has no place"
            )
        return found

    def _wrapper_hint(self, missing: Sequence[str]) -> str:
        """Return the hint that a wrapper of the model added a word to the names; empty if it is not that."""
        stored = self.tensors.tensors
        names = {_WRAPPER.sub("", each) for each in stored}
        if not all({name, name.removeprefix(self.architecture.prefix)} & names for name in missing):
            return ""
        word = next(match[0] for match in map(_WRAPPER.search, stored) if match)
        return (
            f"; its names have {word!r}, which {_WRAPPERS[word[:-1]]} adds: save the model inside of the wrapper "
            f"(model.{word[:-1]}), or take {word!r} out of the names"
        )

    def _find_mtp(self) -> frozenset[str]:
        """Find the tensors of layers for multi-token prediction, which are stored after the last layer; note them."""
        if not self.architecture.has_mtp:
            return frozenset()
        fields = Fields(self.config.values, str(self.path / CONFIG_NAME))
        count = fields.get(int, "num_nextn_predict_layers", "num_mtp_layers", default=1, within=(0, 1 << 16))
        pattern = re.compile(rf"(?:{re.escape(self.architecture.prefix)})?layers\.(\d{{1,9}})\.")
        layers: dict[int, list[str]] = {}
        for name in self.tensors.tensors:
            number = int(match[1]) - self.description.num_layers if (match := pattern.match(name)) else -1
            if 0 <= number < count:
                layers.setdefault(number, []).append(name)
        # A further layer of the model itself, whose config asks for fewer, has no such projection.
        found = [names for names in layers.values() if any(name.endswith(".eh_proj.weight") for name in names)]
        if found:
            self.notes.append(
                f"{self.path} has {counted(len(found), 'layer')} for multi-token prediction (MTP) after the "
                f"{self.description.num_layers} of the model; left out, as in transformers"
            )
        return frozenset(chain.from_iterable(found))

    def copies(self) -> dict[str, str]:
        """Return tensors that are copies, with their originals."""
        tied = self.architecture.tied if self.description.share_embeddings_and_output_weights else {}
        return {**self.architecture.copies, **tied}

    def _check_copies(self) -> None:
        """Compare copies with their originals: an output layer that differs from the embedding is not tied to it."""
        can_untie = not self.architecture.required.get("tie_word_embeddings", False)
        for copy, original in self.copies().items():
            found = {self._todays_name(name, {copy, original}): each for name, each in self.tensors.tensors.items()}
            if not {copy, original} <= found.keys() or same_values(found[original], found[copy], self.dtype):
                continue
            differ = (
                f"{self.path} has tensors {found[original].name!r} and {found[copy].name!r}, which differ, but its "
                "config.json says that they are one"
            )
            if copy in self.architecture.copies or not can_untie:
                raise CheckpointError(f"{differ}, as in every {self.architecture.model_type} model")
            self.description = self.architecture.untied(self.description)
            self.notes.append(f"{differ} (tie_word_embeddings): they are read as two weights")

    def _todays_name(self, stored: str, expected: Set[str]) -> str:
        name = stored
        for old, new in self.architecture.renamed:
            if name.endswith(old):
                name = name.removesuffix(old) + new
        for longer, start in self.architecture.longer_starts:
            if name not in expected and name.startswith(longer):
                name = start + name.removeprefix(longer)
        with_prefix = self.architecture.prefix + name
        return with_prefix if name not in expected and with_prefix in expected else name


_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "module": "DistributedDataParallel",
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
    "_checkpoint_wrapped_module": "checkpoint_wrapper",
}
"""Modules of PyTorch that hold a model, by the word that they add to the names of its tensors."""

_WRAPPER = re.compile(rf"(?<![^.])(?:{'|'.join(_WRAPPERS)})\.")

ADAPTER_CONFIG_NAME = "adapter_config.json"
"""Name of the file that marks a folder of adapters of the ``peft`` library."""


def check_model_folder(folder: Path) -> None:
    """Raise CheckpointError, with a remedy, if the folder is missing or has only adapters."""
    if not os.path.isdir(folder):
        raise CheckpointError(no_folder(folder))
    if holds_adapters_alone(folder):
        raise CheckpointError(
            f"{folder} holds adapters and no model; give the folder of the model that they were trained on, and "
            f"where a command takes both (generate, chat, eval) --adapter {folder}"
        )


def holds_adapters_alone(folder: Path) -> bool:
    """True if the folder has adapters and no model, even if it has a copy of the model's configuration."""
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    return (folder / ADAPTER_CONFIG_NAME).exists() and all(file.name.startswith("adapter_") for file in weights)
