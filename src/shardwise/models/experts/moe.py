"""Layer of experts: router, experts that are split over ranks, and shared experts.

Each rank routes its own tokens: with sequence parallelism its part of the sequence, otherwise a part of the tokens that
all tensor-parallel ranks have. ``token_dispatch`` sends them to the ranks of the group ``experts`` that hold their
experts. No result depends on the layout beyond rounding. No token is dropped, unless experts have a capacity.

A router's gradient is the sum over the tokens of all ranks: over tensor-parallel ranks, which route different tokens,
and over data-parallel ones. An expert's gradient is complete on the ranks that hold it for all tokens that were sent to
them; the sum is over ``expert_dp``, the ranks that hold the same part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup

from shardwise.core.communication import moves
from shardwise.core.errors import ConfigError
from shardwise.core.initialization import CounterNormal
from shardwise.core.layout import Layout, hidden_layout
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import ParamLayout, Replicas, intervals_of_sizes
from shardwise.core.sharding.balanced import balanced_sizes
from shardwise.core.topology import Groups
from shardwise.core.typed import computed_locally
from shardwise.kernels.grouped import Delay, grouped_linear
from shardwise.models.config import ModelConfig
from shardwise.models.experts.capacity import taken
from shardwise.models.experts.router import RoutedBatch, Router, Routing, Sequences
from shardwise.models.experts.spec import Experts
from shardwise.models.experts.token_dispatch import Dispatcher, dispatcher_of
from shardwise.models.transformer.mlp import MLP, activated, layer_arguments
from shardwise.nn.module import GroupModule, ShardedModule
from shardwise.nn.recompute import in_backward
from shardwise.nn.weight_gradient import DelayedRuns


class ExpertWeights(ShardedModule):
    """This rank's parts of its experts: for each a column-parallel up and a row-parallel down projection.

    The rows of all experts follow each other in both weights, so that a checkpoint opens at any number of ranks.

    Args:
        config: config of the model.
        experts: the experts.
        group: the ranks that hold all experts.
        expert_tp: the ranks that split an expert.

    Attributes:
        num: number of experts of all ranks.
        up: ``[e * p * f, h]`` with ``e`` experts of this rank, ``p`` 2 with a gate (gate first) and else 1, and ``f``
            of each expert's inner features.
        down: ``[e * f, h]``, transposed.
        up_bias: ``[e * p * f]``, or None.
        down_bias: ``[e * h/t]``, or None: the ``t`` ranks that split an expert add the bias to different features.
        num_own: number of experts of this rank, ``e``.
        delayed: gradients of ``up`` and ``down`` that ``backward_dw`` computes; None without ``delay_wgrad_compute``.

    Raises:
        ConfigError: the number of experts is no multiple of the ranks between which they are divided.
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None

    def __init__(self, config: ModelConfig, experts: Experts, group: ProcessGroup, expert_tp: ProcessGroup) -> None:
        super().__init__(**layer_arguments(config, group=group, linear=False))
        self.expert_tp, splits = expert_tp, expert_tp.size()
        parallel = group.size() // splits
        if experts.num % parallel:
            raise ConfigError(
                f"experts: num {experts.num} is not a multiple of the {parallel} ranks that divide them (ep)"
            )
        if experts.ffn_hidden_size < splits:
            raise ConfigError(
                f"experts: ffn_hidden_size {experts.ffn_hidden_size} is less than the {splits} ranks that split each"
            )
        self.num, self.num_own = experts.num, experts.num // parallel
        self.first_own = group.rank() // splits * self.num_own
        sections = 2 if config.gated_linear_unit else 1
        assert config.init_method is not None
        assert config.output_layer_init_method is not None
        h, f = config.hidden_size, experts.ffn_hidden_size
        up, down = partial(self.layout_of, sections, f), partial(self.layout_of, 1)
        zeros, down_init = torch.nn.init.zeros_, config.output_layer_init_method
        if experts.init_scale != 1.0:
            if not isinstance(down_init, CounterNormal):
                raise ConfigError(
                    f"experts: init_scale {experts.init_scale} is a factor of init_method_std, and this model has "
                    "another output_layer_init_method; use one of them"
                )
            down_init = dataclasses.replace(down_init, std=down_init.std * experts.init_scale)
        for name, layout, init in (
            ("up", up(h), config.init_method),
            ("down", down(f, h), down_init),
            ("up_bias", up() if experts.biases else None, zeros),
            ("down_bias", down(h) if experts.biases else None, zeros),
        ):
            self._make_parameter(name, layout, init)
            self.param_replicas[name] = Replicas(same_over=("expert_dp",))
        # Features of the output to which this rank adds its part of the biases.
        self._features = intervals_of_sizes(balanced_sizes(h, splits))[group.rank() % splits]
        self._activate = experts.gate or activated(config, group)
        self.delayed: nn.ModuleDict | None = None
        if config.delay_wgrad_compute:
            self.delayed = nn.ModuleDict(
                {name: DelayedRuns(self, name, transposed=name == "down") for name in ("up", "down")}
            )

    def layout_of(self, parts: int, inner: int, *row: int) -> ParamLayout:
        """Return the layout of ``[num * parts * inner, *row]``; each part of an expert is split."""
        splits = self.expert_tp.size()
        places = intervals_of_sizes(balanced_sizes(inner, splits))
        intervals = []
        for rank in range(self.group.size()):
            low, high = places[rank % splits]
            first = rank // splits * self.num_own * parts
            own = [
                ((first + part) * inner + low, (first + part) * inner + high) for part in range(self.num_own * parts)
            ]
            intervals.append(((own[0][0], own[-1][1]),) if splits == 1 else tuple(own))
        return ParamLayout((self.num * parts * inner, *row), 0, tuple(intervals), self.group.size())

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Compute this rank's part of the experts' outputs.

        Args:
            tokens: ``[n, h]``, those of one expert after those of another.
            counts: ``[e]`` int64, number of each expert's tokens.

        Returns:
            ``[n, h]``, to be summed over the ranks that split an expert.
        """
        return self._lower(self._activate(self._raise(tokens, counts)), counts)

    def _raise(self, tokens: Tensor, counts: Tensor) -> Tensor:
        bias = None if self.up_bias is None else self.up_bias.unflatten(0, (self.num_own, -1))
        up = self.up.unflatten(0, (self.num_own, -1))
        return grouped_linear(tokens, up, counts, bias, delay=self._delay("up"))

    def _lower(self, inner: Tensor, counts: Tensor) -> Tensor:
        down, bias = self.down.unflatten(0, (self.num_own, -1)), None
        if self.down_bias is not None:
            start, stop = self._features
            bias = F.pad(self.down_bias.view(self.num_own, stop - start), (start, down.size(-1) - stop))
        return grouped_linear(inner, down.transpose(1, 2), counts, bias, delay=self._delay("down"))

    def backward_dw(self) -> None:
        """Compute the gradients of ``up`` and ``down`` that ``delay_wgrad_compute`` left out of the backward."""
        for module in () if self.delayed is None else self.delayed.values():
            assert isinstance(module, DelayedRuns)
            module.backward_dw()

    def _delay(self, name: str) -> Delay | None:
        delayed: Any = None if self.delayed is None else self.delayed[name]
        return delayed.add if delayed is not None and delayed.delays_weight_gradients else None


class _WithLoss(Function):
    """Identity of an output, whose backward also gives what a loss depends on the gradient that ``slopes`` returns."""

    spmd_typecheck = computed_locally("output", "term")

    @staticmethod
    def forward(ctx: Any, output: Tensor, term: Tensor, slopes: Callable[[], Tensor]) -> Tensor:
        ctx.slopes = slopes
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, ctx.slopes(), None


class MoELayer(GroupModule):
    """Router and experts instead of an MLP, with an MLP for all tokens if there is a shared expert.

    Args:
        config: config of the model, with ``experts``.
        groups: process groups; without ``experts`` the tensor-parallel group holds and splits all experts.
        router: function that creates the router, with the arguments of ``Router``.
        experts: function that creates this rank's experts, with the arguments of ``ExpertWeights``.

    Attributes:
        router: ``Router``.
        experts: ``ExpertWeights``.
        shared: ``MLP`` or None.
        shared_gate: weight of the shared expert's gate, or None.
        loss_scale: factor of the gradient of the auxiliary losses, which ``begin`` sets.
        statistics: ``[num + 3]`` in fp64, sums over this rank's tokens, without padding, since ``begin``: those that
            chose each expert, choices that the expert did not take, the entropy of the scores in nats, and the
            auxiliary losses of micro-batches; None without training steps.

    Source: Lepikhin et al. 2020 (arXiv:2006.16668); Megatron-LM's all-to-all dispatcher.
    """

    def __init__(
        self,
        config: ModelConfig,
        groups: Groups,
        *,
        router: Callable[..., Router] = Router,
        experts: Callable[..., ExpertWeights] = ExpertWeights,
    ) -> None:
        super().__init__()
        assert config.experts is not None
        self.spec = config.experts
        self._tp_group, self._sequence_parallel = groups.tp, config.sequence_parallel
        self._group = groups.tp if groups.experts is None else groups.experts
        expert_tp = groups.expert_tp or groups.tp
        self.router = router(config, self.spec, groups.tp, groups)
        self.experts = experts(config, self.spec, self._group, expert_tp)
        self._dispatch: Dispatcher = dispatcher_of(self.spec, self._group, expert_tp.size(), config.ep_comm_type)
        self.loss_scale = 1.0
        self.statistics: Tensor | None = None
        self.shared: MLP | None = None
        self.shared_gate: SharedGate | None = None
        if self.spec.shared_ffn_hidden_size is not None:
            self.shared = MLP(config, groups.tp, ffn_hidden_size=self.spec.shared_ffn_hidden_size)
            if self.spec.shared_gate:
                self.shared_gate = SharedGate(config, groups.tp)

    def begin(self, loss_scale: float) -> None:
        """Begin a step.

        Args:
            loss_scale: that of the loss, divided by the number of micro-batches of the step on all data-parallel ranks.
        """
        self.loss_scale = loss_scale
        self.statistics = torch.zeros(self.spec.num + 3, dtype=torch.float64, device=self.router.weight.device)

    @property
    def input_layout(self) -> Layout:
        """Layout of hidden states, I or V(dim=0)."""
        return hidden_layout(sequence_parallel=self._sequence_parallel)

    @property
    def output_layout(self) -> Layout:
        """Layout of the result, which has the input's shape."""
        return self.input_layout

    def forward(
        self, hidden: Tensor, *, sequence: SequenceView | None = None, batch: RoutedBatch | None = None
    ) -> Tensor:
        """Map ``[s, b, h]`` (``[s/t, b, h]`` with sequence parallelism) to the same shape.

        ``batch`` has the view ``sequence``, or is None without padding; both are None if all ranks hold the same number
        of positions.
        """
        if batch is None:
            group = self._tp_group if self._sequence_parallel else None
            batch = RoutedBatch(sequence or SequenceView.of(hidden, group))
        output = self._routed(hidden, batch)
        if self.shared is None:
            return output
        shared = self.shared(hidden, sequence=sequence)
        if self.shared_gate is not None:
            shared = self.shared_gate(hidden) * shared
        total: Tensor = output + shared
        return total

    def _routed(self, hidden: Tensor, batch: RoutedBatch) -> Tensor:
        """Return the experts' output for the tokens of ``hidden``, of its shape."""
        tokens = hidden.reshape(-1, hidden.size(-1))
        splits = self._tp_group.size() > 1 and not self._sequence_parallel
        sizes = balanced_sizes(len(tokens), self._tp_group.size()) if splits else (len(tokens),)
        start, _ = intervals_of_sizes(sizes)[self._tp_group.rank() if splits else 0]
        if splits:
            tokens = moves.scatter(tokens, dim=0, group=self._tp_group, sizes=sizes)
        of_ranks = sizes if splits else [each * hidden.size(1) for each in batch.view.sizes]
        output = self._mixed(tokens, hidden, batch, start, of_ranks)
        if splits:
            output = moves.gather(output, dim=0, group=self._tp_group, sizes=sizes)
        return output.view(hidden.shape)

    def _mixed(self, tokens: Tensor, hidden: Tensor, batch: RoutedBatch, first: int, of_ranks: Sequence[int]) -> Tensor:
        """Return the experts' output for tokens ``[n, h]``, and give them the losses.

        The tokens are those of ``hidden``, ``[s, b, h]``, from number ``first`` on. Ranks that share sequences route
        ``of_ranks`` tokens.
        """
        b, stop = hidden.size(1), first + len(tokens)
        routing, fits = self._route(tokens, self._reroute(batch, b, first, stop)), None
        if self.training and self.spec.capacity_factor is not None:
            fits = taken(routing, self.spec, batch, b, self._tp_group, of_ranks)
        output = self._dispatch(self.experts, tokens, routing, fits)
        if not self.training:
            return output
        sequences = Sequences.of(hidden, batch, first, stop)
        loss = self.router.auxiliary_loss(routing, sequences)
        if loss.requires_grad:
            output = _WithLoss.apply(output, loss, partial(torch.full_like, loss.detach(), self.loss_scale))
        if self.spec.pools_layers:
            output = self._with_pooled_loss(output, routing, sequences, batch.choices)
        if self.statistics is not None and not in_backward():
            self.router.count_(self.statistics, routing, sequences, loss, fits)
        return output

    def _with_pooled_loss(
        self, output: Tensor, routing: Routing, sequences: Sequences, pool: list[Tensor] | None
    ) -> Tensor:
        """Give the scores the gradient of a loss that depends on all layers' choices, which a backward knows."""
        scores, choices = self.router.to_balance(routing, sequences)
        pool = [] if pool is None else pool
        if not in_backward():
            pool.append(choices)
        scale, statistics, values = self.loss_scale, self.statistics, scores.detach()

        def slopes() -> Tensor:
            found = self.router.balance_slopes(torch.stack(pool).sum(0))
            if statistics is not None:
                statistics[-1] += (found * values).sum()
            return found * scale

        pooled: Tensor = _WithLoss.apply(output, scores, slopes)
        return pooled

    def _route(self, tokens: Tensor, reroute: Callable[[Tensor], Tensor] | None) -> Routing:
        routing: Routing = self.router(tokens, reroute)
        return routing

    def _reroute(self, batch: RoutedBatch, b: int, first: int, stop: int) -> Callable[[Tensor], Tensor] | None:
        """Return what replaces the choices of the tokens from ``first`` to ``stop`` of ``[s, b]``; None for nothing."""
        spec, device, given = self.router.experts, self.router.weight.device, batch.reroute
        if given is None and not spec.forces_balance:
            return None
        numbers = torch.arange(first, stop, device=device)
        samples, positions = numbers % b, batch.view.positions(device)[numbers // b]

        def reroute(chosen: Tensor) -> Tensor:
            if spec.forces_balance:
                every = positions.unsqueeze(1) * spec.per_token + torch.arange(spec.per_token, device=device)
                chosen = every % spec.num
            return chosen if given is None else given(self, chosen, samples, positions)

        return reroute


class SharedGate(ShardedModule):
    """Sigmoid of a projection of each token, which multiplies the shared expert's output.

    Attributes:
        weight: ``[1, h]``.
    """

    weight: Tensor

    def __init__(self, config: ModelConfig, group: ProcessGroup) -> None:
        super().__init__(**layer_arguments(config, group=group, linear=False))
        assert config.init_method is not None
        layout = ParamLayout.replicated((1, config.hidden_size), group.size())
        is_partial = config.sequence_parallel and group.size() > 1
        self._make_parameter("weight", layout, config.init_method, partial_gradient=is_partial)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[..., h]`` to ``[..., 1]``."""
        return F.linear(hidden, self.weight).sigmoid()
