"""Dispatch of tokens to the ranks of their experts, and the sum of the experts' outputs for each token.

``AllToAll`` sends each choice of a token to the ranks that hold the expert. ``AllGather`` sends every token to all
ranks, which is less if a token has more choices than there are ranks. A rank adds a token's outputs in the order of the
experts: the token's own rank those of all experts, or each rank those of its experts, which a reduce-scatter adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from shardwise.core.communication import moves
from shardwise.core.communication.collectives import all_gather, all_to_all
from shardwise.core.layout import R, V
from shardwise.core.typed import check_move, computed_locally
from shardwise.kernels.fake_device import counts_on_host
from shardwise.models.config import ExpertWay
from shardwise.models.experts.router import Routing, counts_of
from shardwise.models.experts.spec import Experts


class ExpertFunction(Protocol):
    """Experts of this rank."""

    def __call__(self, tokens: Tensor, counts: Any) -> Tensor:
        """Map ``[n, h]`` tokens, those of one expert after those of another, to this rank's part of their outputs."""


@dataclass(frozen=True)
class Dispatcher:
    """Applies experts of all ranks to the tokens of this rank.

    Args:
        spec: the experts.
        group: the ranks that hold all experts.
        num_splits: number of ranks that split each expert.
    """

    spec: Experts
    group: ProcessGroup
    num_splits: int

    @property
    def num_own(self) -> int:
        """Number of experts that this rank holds, or holds a part of."""
        return self.spec.num * self.num_splits // self.group.size()

    def __call__(self, experts: ExpertFunction, tokens: Tensor, routing: Routing, fits: Tensor | None) -> Tensor:
        """Return the weighted sum of the experts' outputs for each token.

        Args:
            experts: this rank's experts, or its parts of them.
            tokens: ``[n, h]``, tokens of this rank.
            routing: their experts and weights.
            fits: ``[n, k]``, False for the choices that get no output; None if all get one.

        Returns:
            ``[n, h]``.
        """
        raise NotImplementedError


def dispatcher_of(spec: Experts, group: ProcessGroup, num_splits: int, way: ExpertWay) -> Dispatcher:
    """Choose how tokens reach their experts.

    Args:
        spec: the experts.
        group: the ranks that hold all experts.
        num_splits: number of ranks that split each expert.
        way: ``config.ep_comm_type``.
    """
    kind = AllGather if gathers_tokens(way, group.size(), spec.per_token * num_splits) else AllToAll
    return kind(spec, group, num_splits)


def gathers_tokens(way: ExpertWay, num_ranks: int, num_copies: int) -> bool:
    """Whether all ranks get all tokens, if ``num_ranks`` hold the experts, and a token has ``num_copies`` otherwise.

    Of the copies, those for experts of other ranks are sent, ``num_copies * (num_ranks - 1) / num_ranks`` with even
    loads. A gather sends ``num_ranks - 1``.
    """
    return num_ranks > 1 and (way == "all_gather" or (way == "auto" and num_ranks < num_copies))


class _Reordered(Function):
    """Rows in another order. The backward needs no sum, unlike that of an index."""

    spmd_typecheck = computed_locally("rows", "order", "back")

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (back,) = ctx.saved_tensors
        return grad.index_select(0, back), None, None


class _Copied(Function):
    """A row for each choice of a token; the backward adds the choices of a token in order.

    Layout R -> V if the choices are those of one rank of ``group``, which all have the same tokens.
    """

    @staticmethod
    def spmd_typecheck(
        outputs: Any, *, tokens: Tensor, of_rows: Tensor, places: Tensor, group: ProcessGroup | None
    ) -> None:
        check_move(outputs, group, V(), (tokens, R), of_rows=of_rows, places=places)

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, of_rows: Tensor, places: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(places)
        return tokens.index_select(0, of_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        return _summed(grad, places), None, None, None


class _Summed(Function):
    """Adjoint of ``_Copied``."""

    spmd_typecheck = computed_locally("rows", "of_rows", "places")

    @staticmethod
    def forward(ctx: Any, rows: Tensor, of_rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(of_rows)
        return _summed(rows, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (of_rows,) = ctx.saved_tensors
        return grad.index_select(0, of_rows), None, None


def _summed(rows: Tensor, places: Tensor) -> Tensor:
    """Add for each token the rows at ``places [n, k]``, those of number ``len(rows)`` being 0, in fp32 at least."""
    if places.numel() > len(rows):
        rows = F.pad(rows, (0, 0, 0, 1))
    first, *others = places.unbind(dim=1)
    total = rows.index_select(0, first).to(torch.promote_types(rows.dtype, torch.float32))
    for place in others:
        total += rows.index_select(0, place)
    return total.to(rows.dtype)


@dataclass(frozen=True)
class _Choices:
    """Choices of experts in the order of the experts.

    Attributes:
        of_rows: ``[m]``, the token of each choice that gets an output.
        order: ``[m]``, numbers of these choices among ``[n, k]``.
        places: ``[n, k]``, place of each choice in ``order``; ``m`` for one without an output.
        group: the ranks that have the same tokens, each with other choices; None if the tokens are this rank's.
    """

    of_rows: Tensor
    order: Tensor
    places: Tensor
    group: ProcessGroup | None

    @classmethod
    def of(cls, keys: Tensor, number: int, group: ProcessGroup | None = None) -> _Choices:
        """Sort choices by ``keys [n, k]``; the ``number`` lowest get outputs."""
        order = keys.flatten().argsort(stable=True)
        places = _inverse(order).clamp(max=number).view(keys.shape)
        return cls(order[:number] // keys.size(1), order[:number], places, group)

    def rows_of(self, tokens: Tensor, weights: Tensor | None) -> Tensor:
        """Return the tokens of the choices, ``[m, h]``, times ``weights [n, k]``."""
        rows: Tensor = _Copied.apply(tokens, self.of_rows, self.places, self.group)
        return rows if weights is None else rows * self._of_rows(weights)

    def sums_of(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Return for each token the sum of its choices' rows, ``[n, h]``, times ``weights [n, k]``."""
        if weights is not None:
            rows = rows * self._of_rows(weights)
        total: Tensor = _Summed.apply(rows, self.of_rows, self.places)
        return total

    def _of_rows(self, weights: Tensor) -> Tensor:
        return weights.flatten().index_select(0, self.order).unsqueeze(1)


class AllToAll(Dispatcher):
    """Sends each choice of a token to the ranks that hold its expert, and their outputs back.

    Three all-to-alls in the forward, of counts, rows and outputs, and two in the backward; none with one rank.
    """

    def __call__(self, experts: ExpertFunction, tokens: Tensor, routing: Routing, fits: Tensor | None) -> Tensor:
        keys, number = routing.experts, routing.experts.numel()
        if fits is not None:
            # Choices that do not fit come after all others.
            keys = keys.masked_fill(~fits, self.spec.num)
            (number,) = counts_on_host(fits.sum().view(1), number)
        choices = _Choices.of(keys, number)
        counts = counts_of(keys.flatten(), self.spec.num + 1)[:-1]
        weights, on_input = routing.weights.to(tokens.dtype), self.spec.weighs_input
        rows = choices.rows_of(tokens, weights if on_input else None)
        return choices.sums_of(self._applied(experts, rows, counts), None if on_input else weights)

    def _applied(self, experts: ExpertFunction, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the outputs of all ranks' experts for rows that are ordered by expert."""
        return experts(rows, counts) if self.group.size() == 1 else self._exchanged(experts, rows, counts)

    def _exchanged(self, experts: ExpertFunction, rows: Tensor, counts: Tensor) -> Tensor:
        group, splits, own = self.group, self.num_splits, self.num_own
        # Each rank that holds a part of an expert gets all of its tokens.
        sent = counts.view(-1, own).repeat_interleave(splits, dim=0)
        received = all_to_all(sent, group=group)
        totals = torch.stack([sent.sum(1), received.sum(1)])
        input_sizes, output_sizes = counts_on_host(totals, splits * len(rows))
        if splits > 1:
            blocks = rows.split(input_sizes[::splits])
            rows = torch.cat([block for block in blocks for _ in range(splits)])
        rows = moves.all_to_all(rows, group=group, output_sizes=output_sizes, input_sizes=input_sizes)
        expert = torch.arange(own, device=rows.device).repeat(group.size())
        order = expert.repeat_interleave(received.flatten(), output_size=len(rows)).argsort(stable=True)
        back = _inverse(order)
        outputs = experts(_Reordered.apply(rows, order, back), received.sum(0))
        rows = _Reordered.apply(outputs, back, order)
        rows = moves.all_to_all(rows, group=group, output_sizes=input_sizes, input_sizes=output_sizes)
        if splits == 1:
            return rows
        parts = rows.split(input_sizes)
        return torch.cat([_sum(parts[first : first + splits]) for first in range(0, len(parts), splits)])


class AllGather(Dispatcher):
    """Sends all tokens to all ranks, which add the outputs of their experts.

    Three all-gathers in the forward, of counts, tokens and choices, and a reduce-scatter of sums; in the backward the
    adjoints of the last three. Each rank holds the tokens of all ranks for a time.
    """

    def __call__(self, experts: ExpertFunction, tokens: Tensor, routing: Routing, fits: Tensor | None) -> Tensor:
        spec, group, own, (n, k) = self.spec, self.group, self.num_own, routing.experts.shape
        first = group.rank() // self.num_splits * own
        keys = routing.experts if fits is None else routing.experts.masked_fill(~fits, spec.num)
        # The last count is that of choices that do not fit, so each rank's counts add up to ``k`` times its tokens.
        counts = all_gather(counts_of(keys.flatten(), spec.num + 1).unsqueeze(0), dim=0, group=group)
        for_us = counts[:, first : first + own]
        totals = torch.stack([counts.sum(1) // k, for_us.sum(1)])
        sizes, received = counts_on_host(totals, group.size() * n, n * k * self.num_splits)
        sent = torch.cat([routing.weights, keys.to(routing.weights.dtype)], dim=1)
        tokens = moves.gather_for_parts(tokens, dim=0, group=group, sizes=sizes)
        weights, keys = moves.gather_for_parts(sent, dim=0, group=group, sizes=sizes).chunk(2, dim=1)
        keys = keys.detach().long() - first
        choices = _Choices.of(keys.masked_fill((keys < 0) | (keys >= own), own), sum(received), group)
        weights = weights.to(tokens.dtype)
        rows = choices.rows_of(tokens, weights if spec.weighs_input else None)
        total = choices.sums_of(experts(rows, for_us.sum(0)), None if spec.weighs_input else weights)
        return moves.reduce_scatter(total, dim=0, group=group, sizes=sizes)


def _inverse(order: Tensor) -> Tensor:
    """Return the order that undoes ``order``, without a sort."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _sum(parts: Any) -> Tensor:
    total: Tensor = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
