"""Parameters of Transformer Engine's experts: one for each expert and projection, cut out of that of all experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shardwise.core.sharding import Interval, ParamLayout, ParamShard, is_copy_by
from shardwise.core.sharding.pieces import Piece, shape_only
from shardwise.nn.module import ShardedModule


class LinearOfEach(ShardedModule):
    """Weights of one projection of this rank's experts, ``weight0`` and so on, which take turns in ``whole``.

    Args:
        experts: the layer of experts.
        name: ``"up"`` or ``"down"``, its parameter whose values are taken.
    """

    def __init__(self, experts: Any, name: str) -> None:
        super().__init__(experts.group)
        self.key, self.is_transposed = name, name == "down"
        whole = experts.param_layouts[name]
        for i in range(experts.num_own):
            self.param_layouts[f"weight{i}"] = self._layout_of(whole, i, experts.num_own)
            self.param_replicas[f"weight{i}"] = experts.param_replicas[name]
            self.register_parameter(f"weight{i}", None)
        self.fill_(experts, getattr(experts, name))

    def _layout_of(self, whole: ParamLayout, i: int, num: int) -> ParamLayout:
        """Return the layout of each rank's expert ``i``, of ``num``, in the weight of all experts."""
        intervals: list[tuple[Interval, ...]] = []
        for runs in whole.intervals:
            if len(runs) == 1:
                start, size = runs[0][0], (runs[0][1] - runs[0][0]) // num
                intervals.append(((start + i * size, start + (i + 1) * size),))
            else:
                intervals.append(runs[i * len(runs) // num : (i + 1) * len(runs) // num])
        shape = whole.global_shape[::-1] if self.is_transposed else whole.global_shape
        return ParamLayout(shape, int(self.is_transposed), tuple(intervals), whole.world_size)

    def fill_(self, experts: Any, whole: Tensor) -> None:
        """Set the weights to the parts of ``whole``, ``[e * rows, h]``; make those that are not on its device."""
        for (name, old), part in zip(self.weights(), whole.detach().chunk(experts.num_own), strict=True):
            part = part.t() if self.is_transposed else part
            if old is not None and old.device == part.device:
                old.data.copy_(part)
            else:
                param: Any = Parameter(part.clone(memory_format=torch.contiguous_format))
                setattr(self, name, param)
                experts._mark(param, self.param_layouts[name])

    def reset_parameters(self) -> None:
        """Do nothing: the layer of experts fills the weights."""

    def weights(self) -> list[tuple[str, Any]]:
        """Return name and parameter of each expert's weight."""
        return [(name, getattr(self, name)) for name in self.param_layouts]

    def whole(self) -> Tensor:
        """Return ``[e, rows, columns]``."""
        return torch.stack([weight for _, weight in self.weights()])

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return this rank's part of each weight; in a checkpoint it is a part of that of all experts."""
        key = prefix.removesuffix("linear_fc1.").removesuffix("linear_fc2.") + self.key
        kind = _TransposedShard if self.is_transposed else _ShardOfExpert
        options: dict[str, Any] = {"is_copy": is_copy_by(metadata), "sharded_offsets": tuple(sharded_offsets)}
        return {
            prefix + name: kind(
                key, weight, self.param_layouts[name], self.group.rank(), replicas=self.param_replicas[name], **options
            )
            for name, weight in self.weights()
        }


class _ShardOfExpert(ParamShard):
    """A part of an expert's matrix in that of all experts."""

    @property
    def description(self) -> Any:
        dtype, shape, layout = super().description
        return dtype, shape, replace(layout, intervals=())

    def with_layout(self, key: str, layout: ParamLayout) -> ParamShard:
        return self._but(key=key, layout=layout, is_copy=False)


class _TransposedShard(_ShardOfExpert):
    """The same, which a checkpoint stores transposed."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        shard = super().__new__(cls, *args, **options)
        *lead, rows, columns = shard.shape
        turned = shape_only(cls, (*lead, columns, rows), shard.dtype, shard.device)
        vars(turned).update(vars(shard))
        return turned

    def pieces(self) -> list[Piece]:
        pieces = super().pieces()
        return [*map(_turned, pieces)] if self.interval is None else pieces

    def _pieces_of_interval(self, interval: Interval) -> list[tuple[Piece, bool]]:
        return [(_turned(piece), is_first) for piece, is_first in super()._pieces_of_interval(interval)]


def _turned(piece: Piece) -> Piece:
    (*lead, row, column), view = piece
    return (*lead, column, row), view.transpose(-1, -2)
