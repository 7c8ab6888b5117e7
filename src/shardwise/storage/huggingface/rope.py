"""Rotary positions in ``config.json``: ``rope_theta`` and ``rope_scaling`` as files up to 2025 have them, or the one
``rope_parameters`` of transformers 5.
"""

import itertools
from collections.abc import Mapping
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.models.transformer.rotary_scaling import RotaryScaling
from shardwise.storage.huggingface.description import ModelDescription
from shardwise.storage.huggingface.fields import Fields

# By kind, the fields that must be there, and those that may be missing or null.
_CONTEXT = "original_max_position_embeddings"
_YARN = ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", _CONTEXT)
_SCALINGS = {
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (_CONTEXT,)),
    "yarn": ((), _YARN),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor", _CONTEXT)),
}
_KINDS: dict[str, Any] = {_CONTEXT: int, "truncate": bool}
_LISTS = ("short_factor", "long_factor")
_OLD_KINDS = {"su": "longrope"}


def read_rope(
    fields: Fields, longest: int, *, theta: float = 10000.0, theta_name: str = "rope_theta", share: float | None = None
) -> dict[str, Any]:
    """The fields of a ``ModelDescription`` about rotary positions.

    Args:
        fields: the fields of the ``config.json``.
        longest: the longest sequence, by ``max_position_embeddings``.
        theta: the base where none is given.
        theta_name: the name of the base in files without ``rope_parameters``.
        share: the share of a head that is rotated where none is given; None if the architecture rotates whole heads.

    Raises:
        ConfigError: a kind of scaling that is not offered, or one of its values is missing or wrong.
    """
    name = next((name for name in ("rope_scaling", "rope_parameters") if fields.values.get(name)), "rope_parameters")
    values = fields.values.get(name) or {}
    if not isinstance(values, Mapping):
        raise fields.error(name, values, "an object, or null")
    rope = Fields(values, f"{fields.where}: {name}")
    base = rope.get(float, "rope_theta", default=fields.get(float, theta_name, "rope_theta", default=theta))
    percent = 1.0
    if share is not None:
        stated = fields.get(float, "partial_rotary_factor", "rotary_pct", default=share)
        percent = rope.get(float, "partial_rotary_factor", default=stated)
    else:
        # These architectures rotate whole heads, as transformers does.
        for each in (rope, fields):
            if each.values.get("partial_rotary_factor") is not None:
                each.require("partial_rotary_factor", 1.0)
    kind = rope.get(str, "rope_type", "type", default="default")
    kind = _OLD_KINDS.get(kind, kind)
    if kind not in ("default", *_SCALINGS):
        raise rope.error("rope_type", kind, f"one of default, {', '.join(_SCALINGS)}")
    return {
        "position_embedding_type": "rope",
        "rotary_base": base,
        "rotary_percent": percent,
        "rope_scaling": None if kind == "default" else _read_scaling(kind, rope, fields, longest),
    }


def _read_scaling(kind: str, rope: Fields, fields: Fields, longest: int) -> RotaryScaling:
    rope = Fields(rope.values, f"{rope.where} of type {kind!r}")
    required, optional = _SCALINGS[kind]
    given = [name for name in optional if rope.values.get(name) is not None]
    names = [name for name in (*required, *given) if name not in _LISTS]
    values: dict[str, Any] = {name: rope.get(_KINDS.get(name, float), name) for name in names}
    values |= {name: _numbers(rope, name) for name in _LISTS if name in required}
    if kind == "dynamic":
        values[_CONTEXT] = longest
    if _CONTEXT in optional:
        original = fields.optional(int, _CONTEXT) or values.get(_CONTEXT) or longest
        values = {"factor": longest / max(original, 1), **values, _CONTEXT: original}
    try:
        # The kind is a key of the table, which lists exactly the supported kinds.
        return RotaryScaling(kind=kind, **values)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{rope.where}: {error}") from error


def _numbers(rope: Fields, name: str) -> tuple[float, ...]:
    found = rope.values.get(name)
    if not isinstance(found, list) or not all(isinstance(each, int | float) for each in found):
        raise rope.error(name, found, "a list of numbers")
    return tuple(map(float, found))


def rope_json(description: ModelDescription) -> dict[str, Any]:
    """The fields of ``config.json``, in the old form and the new one: each is all that some readers know."""
    old: dict[str, Any] | None = None
    scaling = description.rope_scaling
    if scaling is not None:
        # Every reader truncates by default, and old readers do not know the field.
        old = {"rope_type": scaling.kind} | {
            name: list(value) if isinstance(value, tuple) else value
            for name in itertools.chain(*_SCALINGS[scaling.kind])
            if (value := getattr(scaling, name)) is not None and (name, value) != ("truncate", True)
        }
    new: dict[str, Any] = {"rope_type": "default", **(old or {}), "rope_theta": description.rotary_base}
    share: dict[str, Any] = {}
    if description.rotary_percent != 1.0:
        share = {"partial_rotary_factor": description.rotary_percent}
    return {
        "rope_theta": description.rotary_base,
        "rope_scaling": old,
        "rope_parameters": new | share,
        **share,
    }
