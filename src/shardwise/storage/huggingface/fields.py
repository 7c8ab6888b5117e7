"""Fields of a ``config.json``: defaults, synonyms, types, unsupported values, and rotary positions.

Files up to 2025 have ``rope_theta`` and ``rope_scaling``; files of transformers 5 have ``rope_parameters``.
"""

import itertools
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.core.json_text import shown
from shardwise.models.config import ModelConfig
from shardwise.models.transformer.mlp import gelu_tanh, quick_gelu, squared_relu
from shardwise.models.transformer.rotary import RotaryScaling

_T = TypeVar("_T", int, float, bool, str)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"), gelu_tanh),
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "relu2": squared_relu,
    "silu": F.silu,
    "swish": F.silu,
}
"""The function of each of Hugging Face's names of activations."""


class Fields:
    """Fields of a ``config.json``, and the file's name for messages (``where``)."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def get(
        self,
        kind: type[_T],
        *names: str,
        default: _T | None = None,
        within: tuple[float, float] = (-math.inf, math.inf),
    ) -> _T:
        """Return the value of the first of the synonyms ``names`` that is present and not null, or else ``default``.

        An integer is accepted as a float. Raises ConfigError if the value has another type or is not ``within`` the
        range, or none is present and there is no default.
        """
        name = next((name for name in names if self.values.get(name) is not None), None)
        if name is None:
            if default is None:
                raise ConfigError(f"{self.where} lacks {' or '.join(names)}")
            return default
        value = self.values[name]
        accepted: Any = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            article = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[kind]
            raise self.error(name, value, article)
        # A JSON file may hold integers too long for a float.
        if kind is float and not abs(value) <= sys.float_info.max:
            raise self.error(name, value, "a finite number")
        if kind is not str and not within[0] <= value <= within[1]:
            raise self.error(name, value, f"from {within[0]:,} to {within[1]:,}")
        return kind(value)

    def optional(self, kind: type[_T], name: str, default: _T | None = None) -> _T | None:
        """Return the value as ``get`` does, but None for null, and ``default`` if the field is missing."""
        if name not in self.values:
            return default
        return None if self.values[name] is None else self.get(kind, name)

    def require(self, name: str, value: object) -> None:
        """Raise ConfigError unless the field is missing or is ``value``, the default and only supported value."""
        found = self.values.get(name, value)
        if found != value:
            raise self.error(name, found, f"{shown(value)}, the only value that is supported")

    def error(self, name: str, found: object, expected: str) -> ConfigError:
        """Make an error that names the field and its value."""
        return ConfigError(f"{self.where}: {name} is {shown(found)}; it must be {expected}")


# For each kind, the required fields, and the fields that may be missing or null.
_CONTEXT = "original_max_position_embeddings"
_YARN = ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", _CONTEXT)
_SCALINGS = {
    "linear": (("factor",), ()),
    "proportional": ((), ("factor", "partial_rotary_factor")),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (_CONTEXT,)),
    "yarn": ((), _YARN),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor", _CONTEXT)),
}
_KINDS: dict[str, Any] = {_CONTEXT: int, "truncate": bool}
_LISTS = ("short_factor", "long_factor")
_OLD_KINDS = {"su": "longrope"}


def read_rope(
    fields: Fields,
    longest: int,
    *,
    theta: float = 10000.0,
    theta_name: str = "rope_theta",
    share: float | None = None,
    share_name: str = "partial_rotary_factor",
    old_kinds: Mapping[str, str] = _OLD_KINDS,
) -> dict[str, Any]:
    """Return the fields of a ``ModelConfig`` about rotary positions.

    ``longest`` is the maximum sequence length; ``theta`` and ``share`` are the defaults of the base and of the rotated
    fraction of a head (None: whole heads), with the names that they have outside of ``rope_parameters`` and
    ``rope_scaling``, whose own are preferred; ``old_kinds`` are kinds of scaling by their old names.

    Raises:
        ConfigError: the kind of scaling is not supported, or a value is missing or wrong.
    """
    name = next((name for name in ("rope_scaling", "rope_parameters") if fields.values.get(name)), "rope_parameters")
    values = fields.values.get(name) or {}
    if not isinstance(values, Mapping):
        raise fields.error(name, values, "an object, or null")
    rope = Fields(values, f"{fields.where}: {name}")
    if (nested := next((key for key, value in values.items() if isinstance(value, Mapping)), None)) is not None:
        raise rope.error(nested, values[nested], "left out: all layers have the same rotary positions")
    base = rope.get(float, "rope_theta", default=fields.get(float, theta_name, default=theta))
    kind = rope.get(str, "rope_type", "type", default="default")
    kind = old_kinds.get(kind, kind)
    percent = 1.0
    if share is not None:
        if kind == "proportional":
            raise rope.error("rope_type", kind, "another kind: a fraction of each head is rotated")
        percent = rope.get(float, "partial_rotary_factor", default=fields.get(float, share_name, default=share))
    else:
        # These architectures rotate whole heads, also in transformers.
        for each in (fields,) if kind == "proportional" else (rope, fields):
            if each.values.get("partial_rotary_factor") is not None:
                each.require("partial_rotary_factor", 1.0)
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
    if kind == "yarn" and rope.values.get("truncate", True) is None:
        # For transformers, null is false.
        values["truncate"] = False
    if _CONTEXT in optional:
        original = fields.optional(int, _CONTEXT) or values.get(_CONTEXT) or longest
        factor = longest / max(original, 1)
        # Below 1, LongRoPE's factor has no effect.
        values = {"factor": max(1.0, factor) if kind == "longrope" else factor, **values, _CONTEXT: original}
    try:
        # The kind is a key of the table, which has exactly the supported kinds.
        return RotaryScaling(kind=kind, **values)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{rope.where}: {error}") from error


def _numbers(rope: Fields, name: str) -> tuple[float, ...]:
    found = rope.values.get(name)
    if not isinstance(found, list) or not all(isinstance(each, int | float) for each in found):
        raise rope.error(name, found, "a list of numbers")
    return tuple(map(float, found))


def rope_json(description: ModelConfig) -> dict[str, Any]:
    """Return the fields of ``config.json`` in both the old and the new form, because readers may know only one."""
    old: dict[str, Any] | None = None
    scaling = description.rope_scaling
    if scaling is not None:
        # All readers truncate by default, and old readers do not know the field.
        old = {"rope_type": scaling.kind} | {
            name: list(value) if isinstance(value, tuple) else value
            for name in itertools.chain(*_SCALINGS[scaling.kind])
            if (value := getattr(scaling, name)) is not None and (name, value) != ("truncate", True)
        }
    new: dict[str, Any] = {"rope_type": "default", **(old or {}), "rope_theta": description.rotary_base}
    share: dict[str, Any] = {}
    if description.rotary_percent != 1.0:
        share = {"partial_rotary_factor": description.rotary_percent}
    return {"rope_theta": description.rotary_base, "rope_scaling": old, "rope_parameters": new | share, **share}


def read_rope_by_kind(fields: Fields, longest: int, *, theta: float, window_theta: float | None) -> dict[str, Any]:
    """Return the fields of a ``ModelConfig`` about rotary positions that layers with a window have otherwise.

    ``theta`` and ``window_theta`` are the default bases of layers without and with a window; None for a base that the
    file must state. Only the positions of layers without a window may be scaled.

    Raises:
        ConfigError: see ``read_rope``.
    """
    nested, scaling = (fields.values.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    if not isinstance(nested, Mapping) or not all(isinstance(each, Mapping | None) for each in nested.values()):
        raise fields.error("rope_parameters", nested, "an object for each kind of layer")
    if not isinstance(scaling, Mapping):
        raise fields.error("rope_scaling", scaling, "an object, or null")
    full, local = (nested.get(name) or {} for name in ("full_attention", "sliding_attention"))
    # transformers adds ``rope_scaling`` to the values of layers without a window.
    own = {**(full if nested else {"rope_type": "default"}), **scaling}
    kind = own.get("rope_type") or own.get("type") or "default"
    if "rope_type" not in scaling and scaling.get("type") not in (None, kind):
        raise ConfigError(
            f"{fields.where}: rope_scaling has type {shown(scaling['type'])} and no rope_type, which transformers "
            f"5 reads as {shown(kind)}; name it rope_type, or leave it out"
        )
    if kind != "default":
        fields.require("partial_rotary_factor", 1.0)
        # transformers does not read it.
        Fields(own, f"{fields.where}: rope_parameters.full_attention").require("truncate", True)
    others = Fields(local, f"{fields.where}: rope_parameters.sliding_attention")
    for name in ("rope_type", "type") if local.get("rope_type") is None else ("rope_type",):
        if local.get(name) is not None:
            others.require(name, "default")
    own = {"rope_theta": fields.get(float, "rope_theta", default=theta), **own}
    return {
        **read_rope(Fields({"rope_parameters": own}, fields.where), longest),
        "window_rotary_base": others.get(float, "rope_theta", default=window_theta),
    }


def rope_json_by_kind(description: ModelConfig) -> dict[str, Any]:
    """Return the fields of ``config.json`` that ``read_rope_by_kind`` reads, also in the old form."""
    written = rope_json(description)
    # If all layers have the same base, the file has it twice.
    local = description.rotary_base if description.window_rotary_base is None else description.window_rotary_base
    return {
        "rope_theta": written["rope_theta"],
        "rope_scaling": written["rope_scaling"],
        "rope_parameters": {
            "full_attention": written["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }
