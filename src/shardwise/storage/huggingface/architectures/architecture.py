"""A Hugging Face architecture: its fields and tensors, and the corresponding ones here."""

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.models.config import ModelConfig
from shardwise.storage.huggingface.fields import ACTIVATIONS, Fields
from shardwise.storage.huggingface.mapping import Shape, Table

# A larger size is a mistake. It raises an error before it takes time or memory.
_LARGEST = {
    **dict.fromkeys(("num_layers", "num_attention_heads", "num_query_groups"), 1 << 16),
    **dict.fromkeys(("hidden_size", "kv_channels", "ffn_hidden_size", "vocab_size", "max_sequence_length"), 1 << 30),
}
# Values that most architectures have, and a new config has not.
_USUAL = {"attention_bias": False, "add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0}

ExpertNames = Literal["separate", "fused"]
"""A tensor for each expert, as on the hub, or one for all experts of a layer, as in modules of transformers 5."""


@dataclass(frozen=True)
class Setting:
    """A field of ``config.json``, its default and type, and a ``synonym`` that is read first but not written."""

    name: str
    default: int | float | bool | str
    synonym: str | None = None

    def read(self, fields: Fields) -> Any:
        """Return the description's value; raise ConfigError if the field's type or value is not supported."""
        names = (self.name,) if self.synonym is None else (self.synonym, self.name)
        kind: Any = type(self.default)
        return fields.get(kind, *names, default=self.default)

    def write(self, value: Any) -> Any:
        """Return the field's value; raise ConfigError if Hugging Face has no such value."""
        return value


class ActivationSetting(Setting):
    """Field with the name of the activation."""

    def read(self, fields: Fields) -> Callable[[Tensor], Tensor]:
        name: str = super().read(fields)
        if name not in ACTIVATIONS:
            raise fields.error(self.name, name, f"one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def write(self, value: Callable[[Tensor], Tensor]) -> str:
        # Prefer the architecture's default to other names of the same activation.
        for theirs in (str(self.default), *ACTIVATIONS):
            if ACTIVATIONS[theirs] == value:
                return theirs
        raise ConfigError(f"activation {value!r} has no name in Hugging Face")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One ``model_type``: its configuration and its table of tensors.

    Attributes:
        model_type: value of the field in ``config.json``.
        classes: names of the classes in ``architectures``.
        settings: field of ``config.json`` for each field of the description.
        fixed: fields of the description that are the same for all models of the architecture.
        required: fields of ``config.json`` with only one supported value.
        prefix: start of tensor names that files of a model without a head omit.
        table: tensors of each parameter, including tied ones.
        tied: tensors that are copies of a tied weight, with their originals.
        ignored: regular expressions for names of tensors that are not parameters, such as buffers.
        has_mtp: whether folders may have layers for multi-token prediction (MTP) after the last layer,
            ``num_nextn_predict_layers`` of them, which are not read.
        copies: tensors that are copies even in an untied model, with their originals; either may be missing.
        renamed: pairs of an old ending of names and the current ending.
        longer_starts: pairs of a longer start of names and the start of the table.
        quantizations: values of ``quant_method`` in ``quantization_config`` that are read, dequantised.
        parameters: names in the modules of ``transformers`` 5 of the parameters of routers and experts, which ``peft``
            adapts as parameters; with the placeholder ``{layer}``.
        module_targets: names that linear layers of routers and experts had in ``transformers`` 4, and for each the
            parameter of version 5 that ``peft`` adapts if it is a target. Layers of dense MLPs with these names can
            have no adapters in ``peft``'s files.
    """

    model_type: str
    classes: tuple[str, ...]
    settings: Mapping[str, Setting]
    fixed: Mapping[str, Any]
    required: Mapping[str, Any] = field(default_factory=dict)
    prefix: str
    table: Table
    tied: Mapping[str, str]
    ignored: tuple[str, ...] = ()
    has_mtp: bool = False
    copies: Mapping[str, str] = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    longer_starts: tuple[tuple[str, str], ...] = ()
    quantizations: tuple[str, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    module_targets: Mapping[str, str] = field(default_factory=dict)

    def read(self, fields: Fields) -> ModelConfig:
        """Read the description of a model from a ``config.json``.

        Raises:
            ConfigError: a value is not supported, or values contradict each other.
        """
        for name, value in self.required.items():
            fields.require(name, value)
        values = {name: setting.read(fields) for name, setting in self.settings.items()}
        # Others are read with lists of all layers, and with functions of sizes.
        for name in ("num_layers", "num_attention_heads", "hidden_size"):
            if name in values and not 1 <= values[name] <= _LARGEST[name]:
                raise fields.error(self.settings[name].name, values[name], f"from 1 to {_LARGEST[name]:,}")
        values = {**_USUAL, **self.fixed, **values, **self.read_others(fields, values)}
        for name, largest in _LARGEST.items():
            if not 1 <= values[name] <= largest:
                raise ConfigError(f"{name} is {values[name]}; it must be from 1 to {largest}")
        for name in ("layernorm_epsilon", "rotary_base"):
            if not 0 < values.get(name, 1.0) < math.inf:
                raise ConfigError(f"{name} is {values[name]}; it must be positive")
        description = ModelConfig(**values)
        if not 0 <= description.rotary_percent <= 1:
            share = f"the share of a head that is rotated is {description.rotary_percent}"
            raise ConfigError(f"{fields.where}: {share}; it must be from 0 to 1")
        for heads in description.kinds_of_heads:
            rotated = int(heads.width * description.rotary_percent)
            if description.position_embedding_type == "rope" and description.latent is None and rotated % 2:
                raise ConfigError(
                    f"{fields.where}: {rotated} of the {heads.width} features of a head are rotated; it must be an "
                    "even number, since they are rotated in pairs"
                )
        return description

    def needs_transformers(self, fields: Fields) -> bool:
        """Return whether a file asks for layers of this type that are not ours, and that transformers computes."""
        return False

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a ``config.json`` for ``model``; raise ConfigError if a value has no field."""
        values = {setting.name: setting.write(getattr(model, name)) for name, setting in self.settings.items()}
        return values | self.write_others(model)

    @property
    def fused(self) -> Table:
        """Rows that replace those of ``table`` for fused names of experts; none if there is no choice of names."""
        return {}

    def table_with(self, expert_names: ExpertNames | None) -> Table:
        """Return ``table`` with the names of experts that are wanted; raise ConfigError if there is no choice."""
        if expert_names is not None and not self.fused:
            raise ConfigError(
                f"expert_names is {expert_names!r}, and {self.model_type} folders have no choice of names of experts; "
                "leave it out"
            )
        return {**self.table, **self.fused} if expert_names == "fused" else self.table

    def table_of(self, folder: Mapping[str, Shape]) -> Table:
        """Return ``table`` with the names of experts that a folder has; ``folder`` has its tensors' shapes."""
        is_fused = self.fused and any(name.endswith(".experts.gate_up_proj") for name in folder)
        return self.table_with("fused" if is_fused else None)

    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return further fields of the description; here the number of key-value heads and the size of a head."""
        heads, hidden = values["num_attention_heads"], values["hidden_size"]
        if heads < 1 or hidden % heads != 0:
            name, width = (self.settings[key].name for key in ("num_attention_heads", "hidden_size"))
            raise fields.error(name, heads, f"a divisor of {width}, {hidden}")
        return {"num_query_groups": heads, "kv_channels": hidden // heads}

    def write_others(self, model: ModelConfig) -> dict[str, Any]:
        """Return fields of ``config.json`` that are not in ``settings``; none here."""
        return {}

    def class_of(self, model: ModelConfig) -> str:
        """Return the name to write to ``architectures``."""
        return self.classes[0]

    def untied(self, model: ModelConfig) -> ModelConfig:
        """Return the description of the same model with a separate output layer."""
        return replace(model, share_embeddings_and_output_weights=False)

    def with_vocabulary(self, model: ModelConfig, size: int) -> ModelConfig:
        """Return the description of the same model with another number of ids; raise ConfigError if it has no such."""
        return replace(model, vocab_size=size)

    def is_of_vocabulary(self, model: ModelConfig, key: str) -> bool:
        """Return whether the parameter of this name has a row for each id."""
        return key.startswith(("embedding.word_embeddings.", "output_layer."))

    def adapt(self, model: ModelConfig, stored: Set[str]) -> ModelConfig:
        """Return the description, corrected by the names of the stored tensors."""
        return model
