"""Logits that stay split over the vocabulary until an operation needs all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map_only

from shardwise.core.communication import moves
from shardwise.core.communication.collectives import split_for_rank
from shardwise.core.errors import ConfigError
from shardwise.nn.loss.cross_entropy import vocab_parallel_cross_entropy

_METADATA = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point),
}
# The other arguments are numbers or dtypes.
_ELEMENTWISE = {
    *(Tensor.tanh, torch.tanh, Tensor.mul, torch.mul, Tensor.__mul__, Tensor.__rmul__),
    *(Tensor.div, torch.div, Tensor.__truediv__, Tensor.float, Tensor.double, Tensor.to, Tensor.detach),
}
_RESHAPING = {Tensor.view, Tensor.reshape, Tensor.flatten, torch.reshape, torch.flatten}


class _Split(Function):
    """Whole logits without memory, for the operations that autograd records of them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup, sizes: Sequence[int]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        logits: Tensor = Tensor._make_wrapper_subclass(
            SplitLogits, (*part.shape[:-1], sum(sizes)), dtype=part.dtype, device=part.device
        )
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return split_for_rank(grad, dim=-1, group=ctx.group, sizes=ctx.sizes), None, None


class SplitLogits(Tensor):
    """Logits ``[..., v]``, of which each rank holds ``[..., v/t]``.

    Layout V for elementwise operations with numbers, reshaping that keeps the vocabulary, and ``F.cross_entropy``,
    which is then ``vocab_parallel_cross_entropy``. Any other operation gathers the logits once, V -> I, so all ranks
    must call it; from then on they are whole. Hooks and ``retain_grad`` act only on what reads them afterwards.
    """

    _part: Tensor
    _whole: Tensor | None
    _alias_of: tuple[SplitLogits, Callable[[Tensor], Tensor]] | None
    _group: ProcessGroup
    _sizes: Sequence[int]

    @staticmethod
    def of(
        part: Tensor,
        group: ProcessGroup,
        sizes: Sequence[int],
        alias_of: tuple[SplitLogits, Callable[[Tensor], Tensor]] | None = None,
    ) -> SplitLogits:
        """Return the logits of which this rank holds ``part``.

        Args:
            part: ``[..., v/t]``.
            group: the ranks that hold the other parts.
            sizes: size of the part of each rank.
            alias_of: logits of the same memory, and the view of them that these are.
        """
        logits: Any = _Split.apply(part, group, sizes)
        logits._part, logits._whole, logits._alias_of = part, None, alias_of
        logits._group, logits._sizes = group, sizes
        return logits  # type: ignore[no-any-return]

    @property
    def is_split(self) -> bool:
        """True if no operation has gathered the logits."""
        return self._whole is None if self._alias_of is None else self._alias_of[0].is_split

    def whole(self) -> Tensor:
        """Return all logits, as a plain tensor. Collective the first time."""
        # A program may read them without gradients first.
        with torch.enable_grad():
            if self._whole is None and self._alias_of is not None:
                base, view = self._alias_of
                self._whole = view(base.whole())
            elif self._whole is None:
                self._whole = moves.gather(self._part, dim=-1, group=self._group, sizes=self._sizes)
            return self._whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first, *others = args or (None,)
        if isinstance(first, SplitLogits) and first.is_split:
            found = _on_parts(func, first, others, kwargs)
            if found is not None:
                return found
        args, kwargs = tree_map_only(SplitLogits, SplitLogits.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Only code that PyTorch does not let subclasses see arrives here.
        if func.namespace != "aten" or func._schema.is_mutable:
            raise ConfigError(f"{func} may write into logits that are split over the ranks; pass logits.clone()")
        args, kwargs = tree_map_only(SplitLogits, lambda each: each.whole().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


def _on_parts(func: Any, logits: SplitLogits, others: list[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the result of an operation on each rank's part; None if the operation needs whole logits."""
    part = logits._part
    if func is F.cross_entropy:
        return _cross_entropy(logits, *others, **kwargs)
    if func in _ELEMENTWISE:
        if not all(isinstance(each, int | float | torch.dtype) for each in (*others, *kwargs.values())):
            return None
        result = func(part, *others, **kwargs)
        is_alias = result is part or func is Tensor.detach
    elif func in _RESHAPING:
        like = func(torch.empty(logits.shape, dtype=logits.dtype, device="meta"), *others, **kwargs)
        # In row-major order, rows of the same length are the same rows.
        if like.shape[-1:] != logits.shape[-1:] or like.dtype != logits.dtype:
            return None
        result, is_alias = part.reshape(*like.shape[:-1], part.size(-1)), True
    else:
        return None
    alias_of = (logits, lambda whole: func(whole, *others, **kwargs)) if is_alias else None
    return SplitLogits.of(result, logits._group, logits._sizes, alias_of)


def _cross_entropy(
    logits: SplitLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    is_plain = weight is None and size_average is None and reduce is None and label_smoothing == 0
    if not is_plain or logits.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        return None
    losses = vocab_parallel_cross_entropy(
        logits._part, target, group=logits._group, vocab_size=sum(logits._sizes), ignore_index=ignore_index
    )
    if reduction != "none":
        losses = losses.sum()
    if reduction == "mean":
        losses = losses / (target != ignore_index).sum()
    return losses.to(logits.dtype)
