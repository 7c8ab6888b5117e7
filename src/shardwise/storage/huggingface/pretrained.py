"""A Hugging Face folder: what its ``config.json`` says, before any tensor is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.core.errors import ConfigError
from shardwise.models.description import ModelDescription
from shardwise.storage.huggingface.architectures import ARCHITECTURES, Architecture
from shardwise.storage.huggingface.architectures.architecture import with_label_fields
from shardwise.storage.huggingface.fields import Fields
from shardwise.storage.huggingface.tensor_folder import read_json

CONFIG_NAME = "config.json"

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class PretrainedConfig:
    """What a ``config.json`` says.

    Attributes:
        architecture: the model's architecture.
        description: the model.
        dtype: dtype of the weights; None if the file does not say.
        values: all fields, as read.
    """

    architecture: Architecture
    description: ModelDescription
    dtype: torch.dtype | None
    values: Mapping[str, Any]


_NUM_REASONS = 3


def read_config(folder: str | Path) -> PretrainedConfig:
    """Read the ``config.json`` of a Hugging Face folder.

    Raises:
        CheckpointError: there is none, or it is no JSON object.
        ConfigError: see ``config_from_json``.
    """
    path = Path(folder) / CONFIG_NAME
    return config_from_json(read_json(path), where=str(path))


def config_from_json(values: Mapping[str, Any], *, where: str = CONFIG_NAME) -> PretrainedConfig:
    """What the fields of a ``config.json`` mean.

    Fields that no number depends on, and fields that transformers does not read either, are passed over.

    Args:
        values: the fields as they were read.
        where: the file's name, for messages.

    Raises:
        ConfigError: an unknown architecture, or a value that is not offered; the message names field and value.
    """
    fields = Fields(values, where)
    model_type = fields.get(str, "model_type")
    if model_type not in ARCHITECTURES:
        raise fields.error("model_type", model_type, f"one of {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[model_type]
    classes = values.get("architectures") or [architecture.classes[0]]
    known = (*architecture.classes, *(format.class_name for format in architecture.classifiers))
    if not isinstance(classes, list) or len(classes) != 1 or classes[0] not in known:
        raise fields.error("architectures", classes, f"one of {', '.join(known)}")
    if values.get("quantization_config") is not None:
        raise fields.error("quantization_config", values["quantization_config"], "null: weights must not be quantized")
    name = next((name for name in ("dtype", "torch_dtype") if values.get(name) not in (None, "auto")), None)
    dtype = None
    if name is not None:
        dtype = _DTYPES.get(fields.get(str, name).removeprefix("torch."))
        if dtype is None:
            raise fields.error(name, values[name], f"one of {', '.join(_DTYPES)}")
    try:
        description = architecture.read(fields)
    except ConfigError as error:
        # Fields that are each valid may contradict each other; that error does not name the file yet.
        if str(error).startswith(where):
            raise
        raise ConfigError(f"{where}: {error}") from error
    return PretrainedConfig(architecture, description, dtype, values)


def config_to_json(
    description: ModelDescription,
    *,
    architecture: str | None = None,
    dtype: torch.dtype | None = None,
    base: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The ``config.json`` of a model.

    Args:
        description: the model's description.
        architecture: its ``model_type``; if None that of ``base``, or else the first that can say all that the
            description does.
        dtype: dtype of the weights.
        base: a ``config.json`` whose other fields (ids of special tokens, for one) are kept.

    Raises:
        ConfigError: the architecture is unknown, or has no way to say all that the description does.
    """
    chosen = architecture or (base or {}).get("model_type")
    if chosen is not None and chosen not in ARCHITECTURES:
        raise ConfigError(f"architecture {chosen!r} is unknown; it must be one of {', '.join(ARCHITECTURES)}")
    attempts: dict[str, str] = {}
    for candidate in ARCHITECTURES.values() if chosen is None else [ARCHITECTURES[chosen]]:
        try:
            return _written_as(candidate, description, dtype, base)
        except ConfigError as error:
            attempts[candidate.model_type] = str(error)
    # The shortest reasons are those of the architectures that come closest.
    closest = sorted(attempts, key=lambda name: len(attempts[name]))
    reasons = "; ".join(f"{name}: {attempts[name]}" for name in closest[:_NUM_REASONS])
    others = f"; nor as {', '.join(closest[_NUM_REASONS:])}" if len(closest) > _NUM_REASONS else ""
    raise ConfigError(f"the model cannot be written as a Hugging Face architecture ({reasons}{others})")


def _written_as(
    architecture: Architecture, description: ModelDescription, dtype: torch.dtype | None, base: Mapping[str, Any] | None
) -> dict[str, Any]:
    values = {"architectures": [architecture.class_name(description)], "model_type": architecture.model_type}
    head = description.classification
    if dtype is not None:
        # Every reader knows this name; transformers 5 writes "dtype" instead.
        values["torch_dtype"] = str(dtype).removeprefix("torch.")
    if base is not None and base.get("model_type") == architecture.model_type:
        kept = {name: value for name, value in base.items() if name not in ("dtype", "torch_dtype", "architectures")}
        kept = kept if head is None else with_label_fields(kept, head.num_labels)
        if _describes(architecture, kept | values, description):
            return kept | values
        values = kept | values
    values |= architecture.write(description)
    values = values if head is None else with_label_fields(values, head.num_labels)
    meant = architecture.read(Fields(values))
    if different := description.differences(meant):
        text = ", ".join(f"{name} {mine!r} (it would be {theirs!r})" for name, (mine, theirs) in different.items())
        raise ConfigError(f"it has no way to say {text}")
    return values


def _describes(architecture: Architecture, values: Mapping[str, Any], description: ModelDescription) -> bool:
    try:
        return not description.differences(architecture.read(Fields(values)))
    except ConfigError:
        return False
