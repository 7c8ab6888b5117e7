"""The router of a layer of experts: the choice of experts for each token, losses that balance them, and metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.collectives import all_reduce
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import ParamLayout, ParamShard, ShardedOffset, is_copy_by
from shardwise.core.topology import Groups
from shardwise.models.config import ModelConfig
from shardwise.models.experts.spec import Experts
from shardwise.models.transformer.mlp import layer_arguments
from shardwise.nn.arithmetic import arithmetic_of
from shardwise.nn.module import ShardedModule

Reroute = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""Function that returns the experts of tokens, ``[n, k]``, from the layer of experts, the choices of its router, and
the tokens' samples in the batch and positions in whole sequences, both ``[n]``.
"""


@dataclass(frozen=True)
class RoutedBatch:
    """Data that layers of experts read and record in one forward pass.

    Attributes:
        view: positions of this rank.
        is_token: ``[b, s]`` bools, False for padding, of the whole sequences that ranks share; None without padding.
        choices: for a balance loss of all layers together, the choices of experts that each layer appends; None for a
            loss of each layer.
        reroute: function that records or replaces the experts that routers choose; None for none. A recomputation calls
            it again.
    """

    view: SequenceView
    is_token: Tensor | None = None
    choices: list[Tensor] | None = None
    reroute: Reroute | None = None


class Routing(NamedTuple):
    """The choice of experts for a rank's tokens.

    Attributes:
        experts: ``[n, k]`` int64, the experts of each token, ascending.
        weights: ``[n, k]``, their weights.
        scores: ``[n, num]``, scores of all experts, in fp32 at least.
        logits: ``[n, num]``, in fp32 at least.
    """

    experts: Tensor
    weights: Tensor
    scores: Tensor
    logits: Tensor


class Sequences(NamedTuple):
    """The sequences of a rank's tokens.

    Attributes:
        of_tokens: ``[n]`` int64, the sequence of each token; for padding their number, ``b``.
        lengths: ``[b]`` int64, number of tokens of each sequence on all ranks, without padding.
    """

    of_tokens: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, hidden: Tensor, batch: RoutedBatch, first: int, stop: int) -> Sequences:
        """Create those of the tokens from ``first`` to ``stop`` of ``hidden.flatten(0, 1)``, ``[s, b, h]``."""
        b, view, is_token = hidden.size(1), batch.view, batch.is_token
        numbers = torch.arange(first, stop, device=hidden.device) % b
        if is_token is None:
            return cls(numbers, numbers.new_full((b,), view.whole_length))
        own = is_token if view.context is None else view.context.own(is_token, dim=1)
        own = own[:, slice(*view.interval)].t().flatten()[first:stop]
        return cls(numbers.where(own, b), is_token.sum(dim=1))

    @property
    def joined(self) -> Sequences:
        """All sequences as one."""
        return Sequences(self.of_tokens.eq(len(self.lengths)).long(), self.lengths.sum().view(1))

    def sums(self, values: Tensor) -> Tensor:
        """Sum values ``[n, ...]`` of this rank's tokens over each sequence, without padding, ``[b, ...]``."""
        total = values.new_zeros(len(self.lengths) + 1, *values.shape[1:])
        return total.index_add(0, self.of_tokens, values)[:-1]


class Router(ShardedModule):
    """Scores of the experts for each token, and the choice among them, in fp32 at least.

    Args:
        config: config of the model.
        experts: the experts.
        group: tensor-parallel group, whose ranks route different tokens.
        groups: process groups of the model; None if the tensor-parallel ranks alone route tokens.

    Attributes:
        weight: ``[num, h]``.
        bias: ``[num]``, or None.
        selection_bias: ``[num]`` in fp32, a buffer, or None.
        num_position_ranks: number of ranks that share the positions of a sample, and its losses.
    """

    weight: Tensor
    bias: Tensor | None
    selection_bias: Tensor | None

    def __init__(
        self, config: ModelConfig, experts: Experts, group: ProcessGroup, groups: Groups | None = None
    ) -> None:
        super().__init__(**layer_arguments(config, group=group, linear=False))
        self.experts = experts
        self._activation = arithmetic_of(group).activation
        groups, is_global = groups or Groups(group), experts.balances == "global"
        # The ranks whose tokens are balanced together: those of ``group``, and others.
        self._balanced_in: ProcessGroup | None = group
        self.num_position_ranks = groups.data.ranks_of_sample
        self._balanced_with = groups.dp if is_global else groups.data.group
        self._num_together = groups.data.samples[1] if is_global else 1
        bias = torch.zeros(experts.num, dtype=torch.float32, device=self._device()) if experts.selection_bias else None
        self.register_buffer("selection_bias", bias)
        layout = ParamLayout.replicated((experts.num, config.hidden_size), group.size())
        assert config.init_method is not None
        self._make_parameter("weight", layout, config.init_method, partial_gradient=group.size() > 1)
        layout_of_bias = ParamLayout.replicated((experts.num,), group.size()) if experts.biases else None
        self._make_parameter("bias", layout_of_bias, torch.nn.init.zeros_, partial_gradient=group.size() > 1)

    def forward(self, tokens: Tensor, reroute: Callable[[Tensor], Tensor] | None = None) -> Routing:
        """Choose the experts of tokens ``[n, h]``; ``reroute`` may replace the choices ``[n, k]``."""
        wide = torch.promote_types(tokens.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        return self.choose(self._project(tokens.to(wide), self._matrix(wide), bias), reroute)

    def choose(self, logits: Tensor, reroute: Callable[[Tensor], Tensor] | None = None) -> Routing:
        """Choose the experts by logits ``[n, num]``, in fp32 at least."""
        spec = self.experts
        sigmoid = spec.scores == "sigmoid"
        scores = self._activation(torch.sigmoid, logits) if sigmoid else self._activation.softmax(logits)
        considered = logits if spec.softmax_after_choice else scores
        if self.selection_bias is not None:
            considered = considered.detach() + self.selection_bias
        if spec.groups_per_token < spec.num_groups:
            considered = considered.masked_fill(~self._of_best_groups(considered.detach()), -torch.inf)
        chosen = considered.detach().topk(spec.per_token, dim=-1).indices
        if reroute is not None:
            chosen = reroute(chosen)
        # In ascending order, so that the sum over a token's experts has the same order at every layout.
        chosen = chosen.sort(dim=-1).values
        if spec.softmax_after_choice:
            weights = self._activation.softmax(logits.gather(1, chosen))
        else:
            weights = scores.gather(1, chosen)
        if spec.normalizes_weights and spec.per_token > 1:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + torch.finfo(logits.dtype).tiny)
        if spec.weight_scale != 1.0:
            weights = weights * spec.weight_scale
        return Routing(chosen, weights, scores, logits)

    def _project(self, tokens: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(tokens, matrix, bias)

    def _matrix(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)

    @torch.no_grad()
    def balance_(self, loads: Tensor) -> None:
        """Move the bias of each expert by ``bias_rate``, up if its load is under the mean; ``loads`` are ``[num]``."""
        if self.selection_bias is not None and self.experts.bias_rate:
            signs = (loads.mean() - loads).sign()
            if self.experts.centers_bias:
                signs = signs - signs.mean()
            self.selection_bias += self.experts.bias_rate * signs.float()

    def reset_parameters(self) -> None:
        """Set the parameters to their initial values, and the bias of the choice to 0."""
        super().reset_parameters()
        if self.selection_bias is not None:
            self.selection_bias = torch.zeros_like(self.selection_bias, device=self.weight.device)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[ShardedOffset] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ParamShard]:
        """Like ``ShardedModule.sharded_state_dict``, with the bias of the choice."""
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.selection_bias is not None:
            key, offsets = f"{prefix}selection_bias", tuple(sharded_offsets)
            layout = ParamLayout.replicated(self.selection_bias.shape, self.group.size())
            entries[key] = ParamShard(
                key, self.selection_bias, layout, self.group.rank(), offsets, is_copy=is_copy_by(metadata)
            )
        return entries

    def auxiliary_loss(self, routing: Routing, sequences: Sequences) -> Tensor:
        """Return this rank's part of the auxiliary losses of a layer and a micro-batch, a scalar."""
        spec = self.experts
        loss = routing.logits.new_zeros(())
        if spec.aux_loss and not spec.pools_layers:
            scores, choices = self.to_balance(routing, sequences)
            loss = loss + (self.balance_slopes(choices) * scores).sum()
        if spec.z_loss:
            squares = sequences.sums(self._log_sums(routing.logits).square())
            loss = loss + spec.z_loss * (squares / sequences.lengths.clamp(min=1)).mean()
        return loss

    def to_balance(self, routing: Routing, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Return what is balanced together: sums of this rank's scores, and all ranks' choices, both ``[n, num]``."""
        over = sequences if self.experts.balances == "sequence" else sequences.joined
        scores = self._distributions(routing)
        choices = over.sums(torch.zeros_like(scores).scatter_(1, self._balanced(routing, scores), 1.0))
        for group in (self._balanced_in, self._balanced_with):
            if group is not None and group.size() > 1:
                choices = all_reduce(choices, group=group)
        return over.sums(scores), choices

    def balance_slopes(self, choices: Tensor) -> Tensor:
        """Return the gradient ``[n, num]`` of the balance loss by the scores of ``to_balance``.

        The loss is linear in the scores, so that it is the sum of the products.
        """
        spec = self.experts
        # A sequence of padding alone has a loss of 0.
        total = choices.sum(dim=1, keepdim=True).clamp(min=1)
        per_token = spec.per_token**2 if spec.pools_layers else spec.per_token
        return choices / total * (spec.aux_loss * spec.num * per_token * self._num_together / len(choices) / total)

    @torch.no_grad()
    def count_(
        self, statistics: Tensor, routing: Routing, sequences: Sequences, loss: Tensor, fits: Tensor | None
    ) -> None:
        """Add to ``MoELayer.statistics`` those of a micro-batch, with its auxiliary losses."""
        num, is_padding = self.experts.num, sequences.of_tokens.eq(len(sequences.lengths)).unsqueeze(1)
        statistics[:num] += counts_of(routing.experts.masked_fill(is_padding, num).flatten(), num + 1)[:num]
        if fits is not None:
            statistics[-3] += (~(fits | is_padding)).sum()
        entropies = self._activation(torch.special.entr, self._distributions(routing))
        statistics[-2] += sequences.sums(entropies).sum()
        statistics[-1] += loss

    def _log_sums(self, logits: Tensor) -> Tensor:
        return logits.logsumexp(dim=-1)

    def _balanced(self, routing: Routing, scores: Tensor) -> Tensor:
        """Return the experts ``[n, k]`` whose shares the balance loss counts."""
        return routing.experts

    def _distributions(self, routing: Routing) -> Tensor:
        """Return each token's scores divided by their sum."""
        scores = routing.scores
        return scores / scores.sum(dim=-1, keepdim=True) if self.experts.scores == "sigmoid" else scores

    def _of_best_groups(self, scores: Tensor) -> Tensor:
        """Return, for each token and expert, whether its group is one of the best."""
        spec = self.experts
        # A rank may have no tokens, so no size is left to be derived.
        groups = scores.view(len(scores), spec.num_groups, spec.num // spec.num_groups)
        best = (
            groups.topk(min(2, groups.size(2)), dim=-1).values.sum(-1) if spec.scores == "sigmoid" else groups.amax(-1)
        )
        chosen = best.topk(spec.groups_per_token, dim=-1).indices
        mask = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, True)
        return mask.unsqueeze(-1).expand_as(groups).flatten(1)


METRICS = ("expert_load_max", "expert_load_min", "dropped_tokens", "router_entropy", "auxiliary_loss")
"""Names of ``metrics_of``."""


def metrics_of(statistics: Tensor, experts: Experts, num_micro_batches: int) -> Tensor:
    """Return the metrics of a step.

    Args:
        statistics: ``[layers, num + 3]``, sums of ``MoELayer.statistics`` over all ranks; zeros for a layer without
            experts.
        num_micro_batches: number of micro-batches of the step on all data-parallel ranks.

    Returns:
        ``[5]``: the largest and the smallest load of any layer's expert, divided by the mean of the layer's experts;
        the number of choices that experts did not take; the entropy of scores, the mean over tokens and layers, in
        nats; the auxiliary losses, summed over layers, the mean over micro-batches.
    """
    loads = statistics[:, :-3]
    choices = loads.sum(dim=1, keepdim=True)
    # Of a layer without experts, an even load.
    shares = torch.where(choices > 0, loads * loads.size(1) / choices.clamp(min=1.0), 1.0)
    entropy = statistics[:, -2].sum() * experts.per_token / choices.sum().clamp(min=1.0)
    dropped, losses = statistics[:, -3].sum(), statistics[:, -1].sum() / num_micro_batches
    return torch.stack([shares.amax(), shares.amin(), dropped, entropy, losses])


def counts_of(numbers: Tensor, stop: int) -> Tensor:
    """Count each number below ``stop``, ``[stop]`` int64; unlike ``bincount`` without waiting for a GPU."""
    return torch.zeros(stop, dtype=torch.int64, device=numbers.device).scatter_add_(
        0, numbers, torch.ones_like(numbers)
    )
