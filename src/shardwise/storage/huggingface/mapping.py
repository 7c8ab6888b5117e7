"""Composition of our parameters from Hugging Face's tensors, as rows of tables.

A row of a table states which tensors contain a parameter's rows; ``*`` stands for both weight and bias::

    "decoder.layers.{layer}.mlp.linear_fc1.*": stacked("model.layers.{layer}.mlp.gate_proj.*",
                                                       "model.layers.{layer}.mlp.up_proj.*"),

With a parameter's shape, a row gives a ``Composition`` for reading, writing and checking tensors.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.models.model_fields import TransformerFields
from shardwise.models.transformer.heads import Heads

Shape = tuple[int, ...]


class Piece(NamedTuple):
    """Consecutive rows of a parameter, and their place of storage: ``rows`` rows from ``start`` on, in its orientation.

    ``step`` is the distance of one row from the next in the tensor, and ``block`` the index of the expert in the first
    dimension of a tensor of all experts.
    """

    tensor: str
    start: int
    rows: int
    step: int = 1
    block: int | None = None


@dataclass(frozen=True)
class Composition:
    """Composition of a whole parameter from stored tensors.

    Attributes:
        shape: shape of the parameter.
        pieces: stored rows in the order of the parameter's rows; every row of every tensor occurs once.
        transposed: whether stored matrices are ``[in, out]``.
    """

    shape: Shape
    pieces: tuple[Piece, ...]
    transposed: bool = False

    @property
    def stored_shapes(self) -> dict[str, Shape]:
        """Shape of each tensor in a file."""
        rows: dict[str, dict[int | None, int]] = {}
        for piece in self.pieces:
            blocks = rows.setdefault(piece.tensor, {})
            blocks[piece.block] = blocks.get(piece.block, 0) + piece.rows
        return {
            name: (() if None in blocks else (len(blocks),)) + self._oriented((max(blocks.values()), *self.shape[1:]))
            for name, blocks in rows.items()
        }

    @property
    def starts(self) -> list[int]:
        """Row of the parameter at which each piece begins."""
        return [0, *accumulate(piece.rows for piece in self.pieces)][:-1]

    def to_stored(self, whole: Tensor) -> dict[str, Tensor]:
        """Split the whole parameter, which is not modified, into contiguous tensors as stored."""
        if len(self.pieces) == 1 and not self.turns:
            return {name: whole.contiguous().view(shape) for name, shape in self.stored_shapes.items()}
        result = {name: whole.new_empty(shape) for name, shape in self.stored_shapes.items()}
        for start, piece in zip(self.starts, self.pieces, strict=True):
            self.rows_of(piece, result[piece.tensor]).copy_(whole[start : start + piece.rows])
        return result

    def rows_of(self, piece: Piece, stored: Tensor) -> Tensor:
        """Return the rows of a piece, in the parameter's orientation, as a view of the piece's whole tensor."""
        rows = stored if piece.block is None else stored[piece.block]
        return (rows.t() if self.turns else rows)[piece.start :: piece.step][: piece.rows]

    @property
    def turns(self) -> bool:
        """Whether the parameter is stored transposed: a matrix of a transposed composition."""
        return self.transposed and len(self.shape) == 2

    def _oriented(self, shape: Shape) -> Shape:
        return shape[::-1] if self.turns else shape


class Box(NamedTuple):
    """A stored tensor with the indices of a parameter from ``offsets`` on, ``sizes`` of them in each dimension.

    ``is_of_expert``: the tensor has no dimension for the one expert in it.
    """

    tensor: str
    offsets: Shape
    sizes: Shape
    is_of_expert: bool = False

    @property
    def shape(self) -> Shape:
        """Shape of the tensor in a file."""
        return self.sizes[1:] if self.is_of_expert else self.sizes


@dataclass(frozen=True)
class Boxes(Composition):
    """A parameter of any number of dimensions that is stored as boxes, in its own orientation; ``pieces`` is empty."""

    boxes: tuple[Box, ...] = ()

    @property
    def stored_shapes(self) -> dict[str, Shape]:
        return {box.tensor: box.shape for box in self.boxes}

    def to_stored(self, whole: Tensor) -> dict[str, Tensor]:
        stored = {}
        for box in self.boxes:
            part = whole
            for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                part = part.narrow(dim, start, size)
            stored[box.tensor] = part.reshape(box.shape).contiguous()
        return stored


Source = Callable[[Shape, Heads, Mapping[str, str]], Composition]
"""Function from a parameter's global shape, the model's heads, and the values of the placeholders in names."""

Table = Mapping[str, Source]
"""Source for each parameter name, with the placeholders ``{layer}`` (from 0) and ``*`` (weight or bias)."""


def whole(name: str, *, transposed: bool = False) -> Source:
    """Make a parameter of one tensor; ``transposed`` if it is stored as ``[in, out]``."""

    def compose(shape: Shape, heads: Heads, values: Mapping[str, str]) -> Composition:
        return Composition(shape, (Piece(_filled(name, values), 0, shape[0]),), transposed)

    return compose


def stacked(*names: str) -> Source:
    """Stack the rows of tensors of equal size."""

    def compose(shape: Shape, heads: Heads, values: Mapping[str, str]) -> Composition:
        rows = shape[0] // len(names)
        return Composition(shape, tuple(Piece(_filled(name, values), 0, rows) for name in names))

    return compose


def stacked_experts(*names: str, transposed: bool = False) -> Source:
    """Stack, for each expert, the rows of its tensors of equal size; names have the placeholder ``{expert}``."""

    def compose(shape: Shape, heads: Heads, values: Mapping[str, str]) -> Composition:
        number = int(values["experts"])
        rows = shape[0] // (number * len(names))
        filled = (_filled(name, values).replace("{expert}", str(expert)) for expert in range(number) for name in names)
        return Composition(shape, tuple(Piece(name, 0, rows) for name in filled), transposed)

    return compose


def joint_experts(name: str, *, sections: int = 1, transposed: bool = False) -> Source:
    """Stack the rows of all experts of one tensor ``[experts, rows, ...]``; rows of ``sections`` sections alternate."""

    def compose(shape: Shape, heads: Heads, values: Mapping[str, str]) -> Composition:
        number, filled = int(values["experts"]), _filled(name, values)
        rows = shape[0] // (number * sections)
        pieces = (Piece(filled, at, rows, sections, expert) for expert in range(number) for at in range(sections))
        return Composition(shape, tuple(pieces), transposed)

    return compose


def separate_qkv(query: str, key: str, value: str) -> Source:
    """Make blocks of queries, key and value, one for each key-value head, from three tensors."""

    def compose(shape: Shape, heads: Heads, values: Mapping[str, str]) -> Composition:
        names = [_filled(name, values) for name in (query, key, value)]
        # Without rows of values, keys are the values.
        has_values = shape[0] == (heads.queries + 2 * heads.groups) * heads.width
        return Composition(shape, _qkv_blocks(heads, names[: 2 + has_values], (0, 0, 0)))

    return compose


def joint_qkv(name: str, *, transposed: bool = False) -> Source:
    """Make the same blocks from one tensor: all queries, then all keys, then all values."""

    def compose(shape: Shape, heads: Heads, values: Mapping[str, str]) -> Composition:
        keys, all_values = heads.queries * heads.width, (heads.queries + heads.groups) * heads.width
        return Composition(shape, _qkv_blocks(heads, [_filled(name, values)] * 3, (0, keys, all_values)), transposed)

    return compose


def _qkv_blocks(heads: Heads, names: Sequence[str], offsets: tuple[int, int, int]) -> tuple[Piece, ...]:
    rows = (heads.queries // heads.groups * heads.width, heads.width, heads.width)
    return tuple(
        Piece(name, offset + group * count, count)
        for group in range(heads.groups)
        for name, offset, count in zip(names, offsets, rows, strict=False)
    )


def _filled(name: str, values: Mapping[str, str]) -> str:
    return name.replace("{layer}", values.get("layer", "")).replace("*", values.get("*", ""))


_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
_LEAF = re.compile(r"(weight|bias)$")


def compose(table: Table, key: str, shape: Shape, config: TransformerFields) -> Composition:
    """Return the composition of a model's parameter by its name and shape; raise ConfigError without a row for it."""
    layer, leaf = _LAYER.search(key), _LEAF.search(key)
    pattern = _LAYER.sub("{layer}", key)
    values = {"layer": layer[0] if layer else "", "*": leaf[0] if leaf else "", "experts": str(config.num_experts)}
    source = table.get(key) or table.get(pattern) or table.get(_LEAF.sub("*", pattern))
    if source is None:
        raise ConfigError(f"parameter {key!r} of shape {list(shape)} has no place in this Hugging Face architecture")
    return source(shape, config.heads_of(int(layer[0]) + 1) if layer else config.heads, values)
