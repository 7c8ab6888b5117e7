"""A Hugging Face architecture: its fields, tensors and classification heads, and the corresponding ones here."""

import dataclasses
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from shardwise.core.errors import ConfigError
from shardwise.models.classification import Classification, HeadTask
from shardwise.models.description import ModelDescription
from shardwise.models.transformer.heads import Heads
from shardwise.storage.huggingface.fields import ACTIVATION_NAMES, Fields
from shardwise.storage.huggingface.mapping import Table, whole

PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")

ExpertNames = Literal["separate", "fused"]
"""A tensor for each expert, as on the hub, or one for all experts of a layer, as in modules of transformers 5."""

_USUAL_NUM_LABELS = 2
_USUAL_DROPOUT = 0.1


@dataclass(frozen=True)
class ClassifierFormat:
    """An architecture's class with a classification head.

    Attributes:
        task: task of the head: labels of sequences or of tokens.
        class_name: name of the class in ``architectures``.
        tensor: name of the head in files.
        bias: whether the head has a bias.
        dropout: names of fields with the dropout before the head, 0.1 if all are missing; None if there is no dropout.
        pads: whether a head of sequences reads the last token that is not padding.
    """

    task: HeadTask
    class_name: str
    tensor: str
    bias: bool
    dropout: tuple[str, ...] | None = None
    pads: bool = True

    def read(self, fields: Fields) -> Classification:
        """Read the head from a ``config.json``.

        Raises:
            ConfigError: a value is not supported, or the label names contradict their number.
        """
        names = self.dropout
        dropout = 0.0 if names is None else fields.get(float, *names, default=_USUAL_DROPOUT, within=(0, 1))
        problem_type: Any = fields.optional(str, "problem_type")
        if problem_type not in (None, *PROBLEM_TYPES):
            raise fields.error("problem_type", problem_type, f"null or one of {', '.join(PROBLEM_TYPES)}")
        problem_type = problem_type if self.task == "sequence-classification" else None
        pad = fields.optional(int, "pad_token_id")
        return self.head(len(label_names(fields)), problem_type=problem_type, pad_token_id=pad, dropout=dropout)

    def head(
        self, num_labels: int, *, problem_type: Any = None, pad_token_id: int | None = None, dropout: float = 0.0
    ) -> Classification:
        """Make this class's head for ``num_labels`` labels."""
        pad = pad_token_id if self.pads and self.task == "sequence-classification" else None
        return Classification(self.task, num_labels, problem_type, self.bias, pad, dropout)

    def write(self, head: Classification) -> dict[str, Any]:
        """Return the fields of a head, without label names; raise ConfigError if the class has no such head."""
        if head.bias != self.bias:
            raise ConfigError(
                f"{self.class_name} has a head {'with' if self.bias else 'without'} a bias, and this one is otherwise"
            )
        fields: dict[str, Any] = {"problem_type": head.problem_type}
        if self.pads and head.task == "sequence-classification":
            fields["pad_token_id"] = head.pad_token_id
        if self.dropout is not None:
            fields["classifier_dropout"] = head.dropout
        return fields


def classifiers(
    name: str,
    *,
    of_tokens: bool = True,
    token_tensor: str = "score",
    token_dropout: tuple[str, ...] = ("classifier_dropout", "hidden_dropout"),
) -> tuple[ClassifierFormat, ...]:
    """Return a causal model's usual classes, ``NameForSequenceClassification`` and ``NameForTokenClassification``."""
    of_sequences = ClassifierFormat("sequence-classification", f"{name}ForSequenceClassification", "score", bias=False)
    tokens = ClassifierFormat(
        "token-classification", f"{name}ForTokenClassification", token_tensor, bias=True, dropout=token_dropout
    )
    return (of_sequences, tokens) if of_tokens else (of_sequences,)


def label_names(fields: Fields) -> list[str]:
    """Return the label names of ``id2label`` in order; if it is missing, ``num_labels`` (or two) default names.

    Raises:
        ConfigError: ``id2label`` is invalid, or its length is not ``num_labels``.
    """
    given = fields.optional(int, "num_labels")
    table = fields.values.get("id2label")
    if table is None:
        count = _USUAL_NUM_LABELS if given is None else given
        if not 1 <= count <= 1 << 20:
            raise fields.error("num_labels", count, f"from 1 to {1 << 20}")
        return usual_names(count)
    names = table if isinstance(table, dict) else {}
    wanted = {str(index) for index in range(len(names))}
    if not names or names.keys() != wanted or not all(isinstance(name, str) for name in names.values()):
        raise fields.error("id2label", table, 'an object that names each label: {"0": ..., "1": ...}')
    if given not in (None, len(names)):
        raise fields.error("num_labels", given, f"the number of labels in id2label, {len(names)}")
    return [names[str(index)] for index in range(len(names))]


def usual_names(count: int) -> list[str]:
    """Return default names of labels."""
    return [f"LABEL_{index}" for index in range(count)]


def label_fields(names: list[str]) -> dict[str, Any]:
    """Return ``id2label`` and ``label2id``."""
    return {
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


def with_label_fields(values: Mapping[str, Any], num_labels: int) -> dict[str, Any]:
    """Return ``values`` with ``num_labels`` label names: their own if the number is right, else default names."""
    kept = {name: value for name, value in values.items() if name != "num_labels"}
    table = values.get("id2label")
    return (
        kept if isinstance(table, dict) and len(table) == num_labels else kept | label_fields(usual_names(num_labels))
    )


@dataclass(frozen=True)
class Setting:
    """A field of ``config.json`` that corresponds to one field of the description.

    Attributes:
        name: name of the field.
        default: value if the field is missing; its type is the field's type.
        synonym: another name, which is read but not written, and takes precedence.
    """

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

    def read(self, fields: Fields) -> str:
        name: str = super().read(fields)
        if name not in ACTIVATION_NAMES:
            raise fields.error(self.name, name, f"one of {', '.join(ACTIVATION_NAMES)}")
        return ACTIVATION_NAMES[name]

    def write(self, value: str) -> str:
        # Prefer the architecture's default to other names of the same activation.
        for theirs in (str(self.default), *ACTIVATION_NAMES):
            if ACTIVATION_NAMES[theirs] == value:
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
        copies: tensors that are copies even in an untied model, with their originals; either may be missing.
        renamed: pairs of an old ending of names and the current ending.
        classifiers: classes with a classification head.
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
    copies: Mapping[str, str] = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    classifiers: tuple[ClassifierFormat, ...] = ()
    quantizations: tuple[str, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    module_targets: Mapping[str, str] = field(default_factory=dict)

    def read(self, fields: Fields) -> ModelDescription:
        """Read the description of a model from a ``config.json``.

        Raises:
            ConfigError: a value is not supported, or values contradict each other.
        """
        for name, value in self.required.items():
            fields.require(name, value)
        values = {name: setting.read(fields) for name, setting in self.settings.items()}
        description = ModelDescription(**{**self.fixed, **values, **self.read_others(fields, values)})
        width = description.kv_channels or description.hidden_size // description.num_attention_heads
        rotated = int(width * description.rotary_percent)
        if description.position_embedding_type == "rope" and description.latent is None and rotated % 2:
            raise ConfigError(
                f"{fields.where}: {rotated} of the {width} features of a head are rotated; it must be an even number, "
                "since they are rotated in pairs"
            )
        for format in self.classifiers:
            if fields.values.get("architectures") == [format.class_name]:
                return self.with_head(description, format.read(fields))
        return description

    def write(self, model: ModelDescription) -> dict[str, Any]:
        """Return the fields of a ``config.json`` for ``model``; raise ConfigError if a value has no field."""
        values = {setting.name: setting.write(getattr(model, name)) for name, setting in self.settings.items()}
        values |= self.write_others(model)
        if model.classification is not None:
            values |= self.classifier_of(model.classification.task).write(model.classification)
        return values

    def classifier_of(self, task: HeadTask) -> ClassifierFormat:
        """Return the class for a task, or raise ConfigError."""
        for format in self.classifiers:
            if format.task == task:
                return format
        others = ", ".join(format.task for format in self.classifiers) or "no head for labels"
        raise ConfigError(f"{self.model_type} models in Hugging Face have no head for {task}, but {others}")

    def with_head(self, model: ModelDescription, head: Classification) -> ModelDescription:
        """Return the same model with another head."""
        return dataclasses.replace(model, classification=head, add_binary_head=False)

    @property
    def fused(self) -> Table:
        """Rows that replace those of ``table`` for fused names of experts; none if there is no choice of names."""
        return {}

    def table_of(self, head: Classification | None, expert_names: ExpertNames | None = None) -> Table:
        """Return ``table``, with a row for the classification head, if any, and the names of experts that are wanted.

        Raises:
            ConfigError: names are given, and the architecture has no choice of them.
        """
        if expert_names is not None and not self.fused:
            raise ConfigError(
                f"expert_names is {expert_names!r}, and {self.model_type} folders have no choice of names of experts; "
                "leave it out"
            )
        table = {**self.table, **self.fused} if expert_names == "fused" else self.table
        if head is None:
            return table
        return {**table, "classifier.*": whole(f"{self.classifier_of(head.task).tensor}.*")}

    @property
    def tensors_of_heads(self) -> set[str]:
        """Names of the tensors of all heads."""
        found = {f"{format.tensor}.{leaf}" for format in self.classifiers for leaf in ("weight", "bias")}
        for pattern, source in self.table.items():
            if pattern.startswith(("output_layer.", "lm_head.", "binary_head.", "pooler.")):
                for leaf in ("weight", "bias"):
                    found |= source((1, 1), Heads(1, 1, 1), {"*": leaf}).stored_shapes.keys()
        return found

    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return further fields of the description; here the number of key-value heads and the size of a head."""
        heads, hidden = values["num_attention_heads"], values["hidden_size"]
        if heads < 1 or hidden % heads != 0:
            name, width = (self.settings[key].name for key in ("num_attention_heads", "hidden_size"))
            raise fields.error(name, heads, f"a divisor of {width}, {hidden}")
        return {"num_query_groups": heads, "kv_channels": hidden // heads}

    def write_others(self, model: ModelDescription) -> dict[str, Any]:
        """Return fields of ``config.json`` that are not in ``settings``; none here."""
        return {}

    def class_of(self, model: ModelDescription) -> str:
        """Return the name to write to ``architectures``."""
        return self.classes[0]

    def class_name(self, model: ModelDescription) -> str:
        """Return the class of the classification head, or else ``class_of``."""
        head = model.classification
        return self.class_of(model) if head is None else self.classifier_of(head.task).class_name

    def adapt(self, model: ModelDescription, stored: Set[str]) -> ModelDescription:
        """Return the description, corrected by the names of the stored tensors."""
        return model
