"""One rank's part of a named parameter: what checkpoints store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shardwise.errors import ShardingError
from shardwise.sharding.layout import ParamLayout, segments

ShardedOffset = tuple[int, int, int]
"""``(axis, index, count)``: a tensor is number ``index`` of ``count`` along a new leading ``axis``."""


@dataclass(frozen=True, eq=False)
class ParamShard:
    """One rank's part of a named parameter: what a layer's ``sharded_state_dict`` returns and a checkpoint stores.

    Attributes:
        key: name of the parameter in the checkpoint; parameters that ``sharded_offsets`` stack share it.
        data: this rank's part, shape ``layout.local_shape(rank)``; the parameter itself, not a copy.
        layout: where each rank's part lies in the whole.
        rank: this rank among those that ``layout`` is about.
        sharded_offsets: leading axes that stack parameters of one name, such as the layers of a model; axis numbers
            count from 0.
        allow_shape_mismatch: on load the stored parameter may have another size along the split dimension, as a
            vocabulary does that is padded otherwise; what it lacks stays as it is, what it has too much is left out.

    Raises:
        ShardingError: the rank is not one of the layout's, ``data`` is not of the shape that the layout gives it, or
            the offsets' axes are not 0, 1...
    """

    key: str
    data: Tensor = field(repr=False)
    layout: ParamLayout
    rank: int
    sharded_offsets: tuple[ShardedOffset, ...] = ()
    allow_shape_mismatch: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.layout.world_size:
            raise ShardingError(f"{self.key}: rank {self.rank} is not one of the layout's {self.layout.world_size}")
        expected = self.layout.local_shape(self.rank)
        if tuple(self.data.shape) != expected:
            raise ShardingError(
                f"{self.key}: rank {self.rank} should hold shape {list(expected)} of {list(self.layout.global_shape)}, "
                f"got {list(self.data.shape)}"
            )
        for axis, (stated, index, count) in enumerate(self.sharded_offsets):
            if stated != axis or not 0 <= index < count:
                raise ShardingError(
                    f"{self.key}: sharded_offsets {list(self.sharded_offsets)} must be (axis, index, count) with axes "
                    "0, 1, ... and each index under its count"
                )

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, leading axes included."""
        return (*(count for _, _, count in self.sharded_offsets), *self.layout.global_shape)

    @property
    def is_replica(self) -> bool:
        """Whether a rank before this one holds the same values: every rank but the first, of what is not split."""
        return self.layout.dim is None and self.rank > 0

    def accepts(self, stored_shape: Sequence[int]) -> bool:
        """Whether a whole parameter of ``stored_shape`` can be loaded: one of the same shape, or of another size along
        the split dimension with ``allow_shape_mismatch``.
        """
        stored, here = list(stored_shape), list(self.global_shape)
        # The sections of a strided dimension would not lie where they lay.
        if self.allow_shape_mismatch and self.layout.dim is not None and self.layout.stride == 1:
            resized = len(self.sharded_offsets) + self.layout.dim
            del stored[resized : resized + 1], here[resized]
        return stored == here

    def pieces(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """Each run of indices that this rank holds: its offset in the whole, and the view of ``data`` that holds it.

        Pieces of any two ranks are the same part of the whole or have nothing in common. Views have the leading axes
        too, of size 1.

        Raises:
            ShardingError: the rank holds an index twice.
        """
        lead = tuple(index for _, index, _ in self.sharded_offsets)
        data = self.data.detach()[(None,) * len(lead)] if lead else self.data.detach()
        dim = self.layout.dim
        if dim is None:
            return [(lead + (0,) * len(self.layout.global_shape), data)]
        return [
            (
                lead + tuple(start if d == dim else 0 for d in range(len(self.layout.global_shape))),
                data.narrow(len(lead) + dim, local_start, length),
            )
            for start, length, local_start in segments(self.layout, self.rank)
        ]
