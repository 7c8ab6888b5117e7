"""What an architecture of Hugging Face's is to us."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from shardwise.errors import ConfigError
from shardwise.huggingface.description import ModelDescription
from shardwise.huggingface.fields import ACTIVATION_NAMES, Fields
from shardwise.huggingface.mapping import Table


@dataclass(frozen=True)
class Architecture:
    """One ``model_type``: its configuration and its table of tensors.

    Attributes:
        model_type: as in ``config.json``.
        classes: names in ``architectures`` that are this one.
        prefix: what files of the model without its head lack in front of their names.
        table: for each parameter, tied ones included, the tensors that it is made of.
        tied: for a parameter that shares another's weight, the tensor that files may hold a copy in.
        read: the description that a ``config.json`` gives.
        write: the fields of a ``config.json`` that give the description again.
        class_of: the name in ``architectures`` to write.
        ignored: regular expressions for names of tensors that are no parameters, such as buffers.
        copies: tensors that are the same as another, whatever is tied: either may be missing.
        adapt: the description corrected by the names of the stored tensors.
        renamed: pairs of an old ending of names and today's.
    """

    model_type: str
    classes: tuple[str, ...]
    prefix: str
    table: Table
    tied: Mapping[str, str]
    read: Callable[[Fields], ModelDescription]
    write: Callable[[ModelDescription], dict[str, Any]]
    class_of: Callable[[ModelDescription], str]
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    adapt: Callable[[ModelDescription, Set[str]], ModelDescription] = lambda model, stored: model
    renamed: tuple[tuple[str, str], ...] = ()


def activation_json(description: ModelDescription, *, prefer: str | None = None) -> str:
    """Hugging Face's name of the activation; ``prefer`` where it means the same."""
    if prefer is not None and ACTIVATION_NAMES[prefer] == description.activation:
        return prefer
    for theirs, ours in ACTIVATION_NAMES.items():
        if ours == description.activation:
            return theirs
    raise ConfigError(f"activation {description.activation!r} has no name in Hugging Face")
