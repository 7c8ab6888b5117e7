"""How our parameters are made of Hugging Face's tensors: a small language for tables.

A table's row says for one parameter, or for its weight and bias alike (``*``), which tensors its rows come from::

    "decoder.layers.{layer}.mlp.linear_fc1.*": stacked("model.layers.{layer}.mlp.gate_proj.*",
                                                       "model.layers.{layer}.mlp.up_proj.*"),

For a parameter of known shape a row becomes a ``Composition``; tensors are read, written and checked by it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.models.transformer.heads import Heads

Shape = tuple[int, ...]


class Piece(NamedTuple):
    """Consecutive rows of a parameter, and where they are stored.

    Attributes:
        tensor: name of the tensor.
        start: first row in it, in the parameter's orientation.
        rows: number of rows.
    """

    tensor: str
    start: int
    rows: int


@dataclass(frozen=True)
class Composition:
    """A whole parameter in terms of stored tensors.

    Attributes:
        shape: shape of the parameter.
        pieces: the stored rows that make up its rows, in order; together every row of every tensor, once.
        transposed: the stored matrices are ``[in, out]``.
    """

    shape: Shape
    pieces: tuple[Piece, ...]
    transposed: bool = False

    @property
    def stored_shapes(self) -> dict[str, Shape]:
        """The shape that each tensor has in a file."""
        rows: dict[str, int] = {}
        for piece in self.pieces:
            rows[piece.tensor] = rows.get(piece.tensor, 0) + piece.rows
        return {name: self._oriented((count, *self.shape[1:])) for name, count in rows.items()}

    @property
    def starts(self) -> list[int]:
        """The parameter's row at which each piece begins."""
        return [0, *accumulate(piece.rows for piece in self.pieces)][:-1]

    def take_apart(self, whole: Tensor) -> dict[str, Tensor]:
        """The tensors as they are stored, contiguous, from the whole parameter, which is not modified."""
        if len(self.pieces) == 1 and not self.turns:
            return {self.pieces[0].tensor: whole.contiguous()}
        result = {name: whole.new_empty(shape) for name, shape in self.stored_shapes.items()}
        for start, piece in zip(self.starts, self.pieces, strict=True):
            target = result[piece.tensor].t() if self.turns else result[piece.tensor]
            target[piece.start : piece.start + piece.rows].copy_(whole[start : start + piece.rows])
        return result

    @property
    def turns(self) -> bool:
        """Whether it is stored with rows and columns exchanged: a matrix of a transposed composition."""
        return self.transposed and len(self.shape) == 2

    def _oriented(self, shape: Shape) -> Shape:
        return shape[::-1] if self.turns else shape


Source = Callable[[Shape, Heads, Mapping[str, str]], Composition]
"""From a parameter's global shape, the model's heads, and the values of the placeholders in names."""

Table = Mapping[str, Source]
"""A source for each name of a parameter, with the placeholders ``{layer}`` (from 0) and ``*`` (weight or bias)."""


def whole(name: str, *, transposed: bool = False) -> Source:
    """One tensor; ``transposed`` if it is stored as ``[in, out]``."""

    def compose(shape: Shape, heads: Heads, values: Mapping[str, str]) -> Composition:
        return Composition(shape, (Piece(_filled(name, values), 0, shape[0]),), transposed)

    return compose


def stacked(*names: str) -> Source:
    """Tensors of equal size, one under the other."""

    def compose(shape: Shape, heads: Heads, values: Mapping[str, str]) -> Composition:
        rows = shape[0] // len(names)
        return Composition(shape, tuple(Piece(_filled(name, values), 0, rows) for name in names))

    return compose


def separate_qkv(query: str, key: str, value: str) -> Source:
    """Blocks of queries, key and value, one for each key-value head, from a tensor for each of the three."""

    def compose(shape: Shape, heads: Heads, values: Mapping[str, str]) -> Composition:
        names = [_filled(name, values) for name in (query, key, value)]
        return Composition(shape, _qkv_blocks(heads, names, (0, 0, 0)))

    return compose


def joint_qkv(name: str, *, transposed: bool = False) -> Source:
    """The same from one tensor: all queries, then all keys, then all values."""

    def compose(shape: Shape, heads: Heads, values: Mapping[str, str]) -> Composition:
        keys, all_values = heads.queries * heads.width, (heads.queries + heads.groups) * heads.width
        return Composition(shape, _qkv_blocks(heads, [_filled(name, values)] * 3, (0, keys, all_values)), transposed)

    return compose


def _qkv_blocks(heads: Heads, names: Sequence[str], offsets: tuple[int, int, int]) -> tuple[Piece, ...]:
    rows = (heads.queries // heads.groups * heads.width, heads.width, heads.width)
    return tuple(
        Piece(name, offset + group * count, count)
        for group in range(heads.groups)
        for name, offset, count in zip(names, offsets, rows, strict=True)
    )


def _filled(name: str, values: Mapping[str, str]) -> str:
    return name.replace("{layer}", values.get("layer", "")).replace("*", values.get("*", ""))


_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
_LEAF = re.compile(r"(weight|bias)$")


def compose(table: Table, key: str, shape: Shape, heads: Heads) -> Composition:
    """The composition of the parameter called ``key``, of global shape ``shape``.

    Raises:
        ConfigError: the table has no row for it: the architecture has no such parameter.
    """
    layer, leaf = _LAYER.search(key), _LEAF.search(key)
    pattern = _LAYER.sub("{layer}", key)
    values = {"layer": layer[0] if layer else "", "*": leaf[0] if leaf else ""}
    source = table.get(pattern) or table.get(_LEAF.sub("*", pattern))
    if source is None:
        raise ConfigError(f"parameter {key!r} of shape {list(shape)} has no place in this Hugging Face architecture")
    return source(shape, heads, values)
