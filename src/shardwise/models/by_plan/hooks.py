"""Hooks that move inputs and outputs of planned modules between layouts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.communication import moves
from shardwise.core.layout import I, P, R
from shardwise.core.sharding import ParamLayout
from shardwise.models.by_plan.logits import SplitLogits
from shardwise.models.by_plan.styles import SPLIT, Style


class SharedCopies:
    """The move I -> R, once for all modules that read one tensor in a row: its backward is then one all-reduce."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._last: tuple[weakref.ref[Tensor], Tensor] | None = None

    def __deepcopy__(self, memo: Any) -> SharedCopies:
        return self

    def copy(self, tensor: Any) -> Any:
        """Return a tensor that needs a gradient with layout R, and any other value unchanged."""
        if not (isinstance(tensor, Tensor) and torch.is_grad_enabled() and tensor.requires_grad):
            return tensor
        if self._last is None or self._last[0]() is not tensor:
            self._last = weakref.ref(tensor), moves.copy(tensor, group=self._group)
        return self._last[1]

    def forget(self, *_: Any) -> None:
        """Free the last result: a hook after the forward of the model."""
        self._last = None


class Hooks:
    """The moves of one module; ``install_`` registers them.

    Args:
        style: layouts outside and inside the module.
        copies: the moves I -> R of the model.
        layout: layout of the weight; None if the style needs none.
        rotary_width: width of the rotary part of the output, which only ``mla_kv_a_proj`` reads.
        splits_logits: says at each call whether the output, gathered otherwise, may be ``SplitLogits``; None means no.
    """

    def __init__(
        self,
        style: Style,
        group: ProcessGroup,
        copies: SharedCopies,
        layout: ParamLayout | None = None,
        rotary_width: int = 0,
        splits_logits: Callable[[], bool] | None = None,
    ) -> None:
        self._group, self._copies, self._rotary_width = group, copies, rotary_width
        self._splits_logits = splits_logits
        self._interval, self._sizes = (0, 0), [0]
        if layout is not None and layout.dim is not None:
            self._interval = layout.intervals[group.rank()][0]
            self._sizes = [layout.local_size(rank) for rank in range(group.size())]
        self._elsewhere: Tensor | None = None
        moves_in = {(I, R): self._copy, (I, SPLIT): self._scatter, (R, P): self._divide}
        moves_out = {(P, I): self._reduce, (SPLIT, I): self._gather, (I, R): self._copy_rotary}
        self._enter = moves_in.get(style.source) if style.source else None
        self._leave = moves_out.get(style.target) if style.target else None

    def __deepcopy__(self, memo: Any) -> Hooks:
        return self

    def install_(self, module: nn.Module, *, sums: bool = False) -> None:
        """Register the moves; ``sums`` is True for a module that sums its own output over the ranks."""
        if self._enter is not None:
            module.register_forward_pre_hook(self._before, with_kwargs=True)
        if self._leave is not None and not sums:
            module.register_forward_hook(self._after)

    def install_vocabulary_(self, module: Any) -> None:
        """Register the lookup in this rank's rows of an embedding."""
        start, stop = self._interval
        if module.padding_idx is not None:
            own = module.padding_idx % sum(self._sizes) - start
            module.padding_idx = own if 0 <= own < stop - start else None
        # Compared with the ids, for a row that is a separate parameter.
        if type(own := getattr(module, "eoi_token_index", None)) is int:
            module.eoi_token_index = own - start if start <= own < stop else -1
        module.register_forward_pre_hook(self._own_ids)
        module.register_forward_hook(self._sum_rows)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        assert self._enter is not None
        enter = self._enter
        return tuple(enter(value) for value in args), {name: enter(value) for name, value in kwargs.items()}

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        assert self._leave is not None
        return self._leave(output)

    def _own_ids(self, module: nn.Module, args: Any) -> Any:
        start, stop = self._interval
        local = args[0] - start
        self._elsewhere = (local < 0) | (local >= stop - start)
        return (local.masked_fill(self._elsewhere, 0), *args[1:])

    def _sum_rows(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        elsewhere, self._elsewhere = self._elsewhere, None
        assert elsewhere is not None
        # Not 0.0: 0.0 + -0.0 is 0.0, so a sum over ranks would lose the sign of a -0.0.
        return moves.reduce(output.masked_fill(elsewhere.unsqueeze(-1), -0.0), group=self._group)

    def _copy(self, value: Any) -> Any:
        return self._copies.copy(value)

    def _scatter(self, value: Any) -> Any:
        return moves.scatter(value, dim=-1, group=self._group, sizes=self._sizes)

    def _divide(self, value: Any) -> Any:
        return value / self._group.size()

    def _reduce(self, value: Any) -> Any:
        return moves.reduce(value, group=self._group)

    def _gather(self, value: Any) -> Any:
        if self._splits_logits and self._splits_logits() and not torch.compiler.is_compiling():
            return SplitLogits.of(value, self._group, self._sizes)
        return moves.gather(value, dim=-1, group=self._group, sizes=self._sizes)

    def _copy_rotary(self, value: Tensor) -> Tensor:
        plain, rotary = value.split([value.size(-1) - self._rotary_width, self._rotary_width], dim=-1)
        return torch.cat([plain, moves.copy(rotary, group=self._group)], dim=-1)
