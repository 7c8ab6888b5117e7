"""Megatron's layer of experts, router and experts: the engine's classes, with Megatron's arguments and state keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import ConfigError
from shardwise.core.initialization import initialize_shard_
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import ParamLayout
from shardwise.core.topology import Groups
from shardwise.kernels.grouped import grouped_linear
from shardwise.megatron.absent import absent_names
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection, _group_of, _groups_of
from shardwise.megatron.core.tensor_parallel.module import mark_parameter, mark_replicas
from shardwise.megatron.core.transformer.expert_parameters import LinearOfEach
from shardwise.megatron.core.transformer.layer_parts import MLPSubmodules, _check_part, _refuse
from shardwise.megatron.core.transformer.module import MegatronModule, build_module, get_module
from shardwise.megatron.core.transformer.router_replay import RouterReplay, RouterReplayAction as RouterReplayAction
from shardwise.megatron.core.transformer.transformer_config import TransformerConfig
from shardwise.megatron.surface import offer
from shardwise.models.experts import Experts, moe, router
from shardwise.nn.module import ShardedModule


class TopKRouter(router.Router, MegatronModule):
    """The engine's ``Router`` with Megatron's arguments and results.

    Losses that balance the experts are added by ``MoELayer``.

    Args:
        config: config with experts.
        pg_collection: collection with the group ``tp``, and with ``cp`` and ``dp_cp`` if positions are split; None
            means the ambient topology's.

    Attributes:
        weight: ``[num_moe_experts, h]``.
        expert_bias: ``[num_moe_experts]`` in fp32, or None.
        router_replay: with ``config.moe_enable_routing_replay``, the record and replay of its choices; else None.

    Raises:
        ConfigError: the config has no experts.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        self.tp_group = _group_of(pg_collection, "tp")
        given = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        cp = getattr(given, "cp", None)
        is_split = cp is not None and cp.size() > 1
        shared = {"dp": _group_of(pg_collection, "dp_cp"), "cp": cp} if is_split else {}
        groups = Groups(self.tp_group, **shared)
        super().__init__(config, _experts_of(config), self.tp_group, groups)
        mark_replicas(self)
        self.config = config
        config.note_read()
        self.router_replay = RouterReplay() if config.moe_enable_routing_replay else None

    @property
    def experts(self) -> Experts:
        """The config's experts, with coefficients that the program has changed since, as in Megatron."""
        return self._experts_at_first if self.config is None else _experts_of(self.config)

    @experts.setter
    def experts(self, experts: Experts) -> None:
        self._experts_at_first = experts

    @property
    def expert_bias(self) -> Tensor | None:
        return self.selection_bias

    def forward(  # type: ignore[override]  # Megatron's routers return pairs.
        self, input: Tensor, padding_mask: None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose the experts of tokens ``[..., h]``.

        Returns:
            ``[n, num_moe_experts]``: the weight of each expert for each token, 0 unless it is chosen, in fp32 at least;
            and whether it is chosen.

        Raises:
            ConfigError: there is a ``padding_mask``.
        """
        _refuse(padding_mask=padding_mask)
        return self._weights_of(self._routed(input.flatten(0, -2)))

    def routing(self, logits: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:
        """Choose the experts by logits ``[..., num_moe_experts]``; returns what ``forward`` does."""
        _refuse(padding_mask=padding_mask)
        wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
        return self._weights_of(self.choose(wide, self._rerouted(None)))

    def _routed(self, tokens: Tensor, reroute: Callable[[Tensor], Tensor] | None = None) -> router.Routing:
        return super().forward(tokens, self._rerouted(reroute))

    def _rerouted(self, reroute: Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], Tensor] | None:
        replay = self.router_replay
        if replay is None:
            return reroute
        return replay.reroute if reroute is None else lambda chosen: replay.reroute(reroute(chosen))

    @staticmethod
    def _weights_of(routing: router.Routing) -> tuple[Tensor, Tensor]:
        is_chosen = torch.zeros_like(routing.logits, dtype=torch.bool).scatter_(1, routing.experts, True)
        return torch.zeros_like(routing.logits).scatter(1, routing.experts, routing.weights), is_chosen

    def _balanced(self, routing: router.Routing, scores: Tensor) -> Tensor:
        # Megatron counts the experts of the highest scores, without bias and groups.
        return scores.topk(self.experts.per_token, dim=-1).indices

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if self.selection_bias is not None:
            self.selection_bias = self.selection_bias.float()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        _rename_(destination, prefix, "selection_bias", "expert_bias")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        _rename_(state_dict, prefix, "expert_bias", "selection_bias")
        super()._load_from_state_dict(state_dict, prefix, *args)


class _MegatronExperts(moe.ExpertWeights, MegatronModule):
    """The engine's experts, whose state has the keys and shapes of one of Megatron's classes."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None
    ) -> None:
        groups = _groups_of(pg_collection)
        experts, expert_tp = groups.experts or groups.tp, groups.expert_tp or groups.tp
        # As in Megatron, False where gradients are summed over other ranks than those of dense layers.
        self._allreduce = (experts.size(), expert_tp.size()) == (groups.tp.size(), groups.tp.size())
        self.tp_group, self.dp_group = expert_tp, groups.expert_dp
        super().__init__(config, _experts_of(config), experts, expert_tp)
        self.config = config
        config.note_read()
        if num_local_experts != self.num_own:
            raise ConfigError(
                f"num_local_experts is {num_local_experts}, and each rank has {self.num_own} of the {self.num} experts "
                f"here; pass {self.num_own}"
            )
        self.num_local_experts = num_local_experts

    def _made(self, name: str) -> None:
        self._mark(getattr(self, name), self.param_layouts[name])

    def _mark(self, param: Any, layout: ParamLayout) -> None:
        mark_parameter(param, layout)
        param.allreduce, param.sequence_parallel = self._allreduce, False

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor | None = None
    ) -> Any:
        """Compute this rank's part of its experts' outputs.

        Args:
            permuted_local_hidden_states: ``[n, h]``, the tokens of one expert after those of another.
            tokens_per_expert: ``[num_local_experts]`` int64.
            permuted_probs: ``[n]``, weights of the tokens; None for weights of 1.

        Returns:
            ``[n, h]`` and None, a pair; the tensor alone without ``permuted_probs``.
        """
        if permuted_probs is None:
            return super().forward(permuted_local_hidden_states, tokens_per_expert)
        hidden, weights = permuted_local_hidden_states, permuted_probs.unsqueeze(-1)
        if self.config.moe_apply_probs_on_input:
            return super().forward((hidden * weights).to(hidden.dtype), tokens_per_expert), None
        return (super().forward(hidden, tokens_per_expert) * weights).to(hidden.dtype), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Like ``ShardedModule.sharded_state_dict``; each expert is written by the first rank that holds it."""
        if metadata is not None and metadata.get("dp_cp_group") is not None and not self._allreduce:
            metadata = {**metadata, "dp_cp_group": self.dp_group}
        return super().sharded_state_dict(prefix, sharded_offsets, metadata)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        up, down = (destination.pop(prefix + name).unflatten(0, (self.num_own, -1)) for name in ("up", "down"))
        destination.update({prefix + name: tensor for name, tensor in self._to_state(up, down)})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        empty = self.up.new_empty((self.num_own, 1, 1), device="meta")
        names = [prefix + name for name, _ in self._to_state(empty, empty)]
        if all(name in state_dict for name in names):
            up, down = self._from_state([state_dict.pop(name) for name in names])
            state_dict[f"{prefix}up"], state_dict[f"{prefix}down"] = up.flatten(0, 1), down.flatten(0, 1)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _to_state(self, up: Tensor, down: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield Megatron's names and tensors of ``up`` and ``down``, ``[e, rows, h]``."""
        raise NotImplementedError

    def _from_state(self, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Undo ``_to_state``."""
        raise NotImplementedError


class GroupedMLP(_MegatronExperts):
    """The engine's ``ExpertWeights`` with Megatron's arguments, and the state keys ``weight1`` and ``weight2``.

    Args:
        num_local_experts: number of experts of this rank.
        config: config with experts.
        pg_collection: collection with ``tp``, ``tp_ep``, ``expt_tp`` and ``expt_dp``; None means the ambient
            topology's.

    Attributes:
        up, down: as in ``ExpertWeights``. In ``state_dict`` they are ``weight1``, a copy in Megatron's shape, and
            ``weight2``.

    Raises:
        ConfigError: the config has no experts, or the ranks cannot divide them like this.
    """

    def _to_state(self, up: Tensor, down: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield "weight1", up.transpose(1, 2).reshape(up.size(2), -1)
        yield "weight2", down.flatten(0, 1)

    def _from_state(self, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        first, second = tensors
        shape = (self.num_own, first.size(0), -1)
        return first.reshape(shape).transpose(1, 2), second.unflatten(0, (self.num_own, -1))


class SequentialMLP(_MegatronExperts):
    """The engine's ``ExpertWeights`` with Megatron's arguments, and the state keys of an MLP for each expert.

    Args:
        num_local_experts, config, pg_collection: as in ``GroupedMLP``.
        submodules: the default parts of each MLP.

    Attributes:
        up, down: as in ``ExpertWeights``. In ``state_dict`` they are ``local_experts.N.linear_fc1.weight`` and
            ``local_experts.N.linear_fc2.weight``.

    Raises:
        ConfigError: other parts, no experts in the config, or ranks that cannot divide them like this.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        (submodules or MLPSubmodules()).check()
        super().__init__(num_local_experts, config, pg_collection)

    def _to_state(self, up: Tensor, down: Tensor) -> Iterator[tuple[str, Tensor]]:
        for index, (first, second) in enumerate(zip(up, down, strict=True)):
            yield f"local_experts.{index}.linear_fc1.weight", first
            yield f"local_experts.{index}.linear_fc2.weight", second.t()

    def _from_state(self, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        return torch.stack(tensors[::2]), torch.stack([second.t() for second in tensors[1::2]])


class TEGroupedMLP(_MegatronExperts):
    """The engine's ``ExpertWeights`` with Megatron's arguments, and one parameter for each expert and projection.

    Each forward copies the weights to one tensor. A checkpoint has the keys of ``GroupedMLP``.

    Args:
        num_local_experts, config, pg_collection: as in ``GroupedMLP``.
        submodules: no effect.

    Attributes:
        linear_fc1: ``weight0`` and so on, ``[p * f, h]``, with ``p`` 2 with a gate (gate first) and else 1.
        linear_fc2: ``weight0`` and so on, ``[h, f]``.

    Raises:
        ConfigError: the config has no experts, or ``delay_wgrad_compute``, or the ranks cannot divide them like this.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: Any = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        if config.delay_wgrad_compute:
            raise ConfigError(
                "TEGroupedMLP computes each gradient at once, and delay_wgrad_compute is True; "
                "use GroupedMLP (get_gpt_layer_local_spec)"
            )
        super().__init__(num_local_experts, config, pg_collection)
        self.linear_fc1, self.linear_fc2 = LinearOfEach(self, "up"), LinearOfEach(self, "down")
        self.register_parameter("up", None)
        self.register_parameter("down", None)

    def reset_parameters(self) -> None:
        """Set the parameters to their initial values, those of ``GroupedMLP``."""
        for linear in (self.linear_fc1, self.linear_fc2):
            layout = self.param_layouts[linear.key]
            whole = torch.empty(layout.local_shape(self.group.rank()), dtype=self._made_as[1], device=self._device())
            initialize_shard_(whole, layout, self.group.rank(), self._init_methods[linear.key], on_cpu=self.init_on_cpu)
            linear.fill_(self, whole)

    def _raise(self, tokens: Tensor, counts: Tensor) -> Tensor:
        return grouped_linear(tokens, self.linear_fc1.whole(), counts)

    def _lower(self, inner: Tensor, counts: Tensor) -> Tensor:
        return grouped_linear(inner, self.linear_fc2.whole(), counts)

    # The parameters are those of the two parts.
    _save_to_state_dict = ShardedModule._save_to_state_dict
    _load_from_state_dict = ShardedModule._load_from_state_dict


@dataclass
class MoESubmodules:
    """Parts of ``MoELayer``.

    Attributes:
        experts: ``GroupedMLP``, ``SequentialMLP`` or ``TEGroupedMLP``; None means the config's ``moe_grouped_gemm``
            decides.
        shared_experts: None; the config's ``moe_shared_expert_intermediate_size`` makes a shared expert.
        router: ``TopKRouter``.
    """

    experts: Any = None
    shared_experts: Any = None
    router: Any = TopKRouter

    def check(self) -> None:
        """Raise ConfigError for other parts."""
        _check_part(self, "router", TopKRouter)
        _check_part(self, "shared_experts", None)
        if get_module(self.experts) not in (GroupedMLP, SequentialMLP, TEGroupedMLP, None):
            raise ConfigError(
                f"experts of MoESubmodules is {self.experts!r}; give GroupedMLP, SequentialMLP or TEGroupedMLP"
            )


class MoELayer(moe.MoELayer, MegatronModule):
    """The engine's ``MoELayer`` with Megatron's arguments and state keys.

    Args:
        config: config with experts.
        submodules: parts of the layer.
        layer_number: stored as an attribute.
        pg_collection: collection with ``tp``, ``tp_ep``, ``expt_tp`` and ``expt_dp``, and with ``cp`` and ``dp_cp`` if
            positions are split; None means the ambient topology's. Without ``tp_ep`` the tensor-parallel ranks hold
            and split all experts.

    Attributes:
        router, experts: ``TopKRouter``, and ``GroupedMLP``, ``SequentialMLP`` or ``TEGroupedMLP``.
        shared_experts: the MLP for all tokens, or None.
        num_local_experts, local_expert_indices: number of experts of this rank, and their numbers in the layer.
        loss_scale: factor of the gradients of the balance losses, which ``get_forward_backward_func`` sets.

    Raises:
        ConfigError: other parts, no experts in the config, or ranks that cannot divide them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        parts = submodules or MoESubmodules()
        parts.check()
        _experts_of(config)
        groups = _groups_of(pg_collection)
        self.tp_group = groups.tp
        kind = parts.experts or (GroupedMLP if config.moe_grouped_gemm else SequentialMLP)
        super().__init__(
            config,
            groups,
            router=lambda *_: TopKRouter(config, pg_collection),
            experts=partial(_built_experts, kind, pg_collection),
        )
        mark_replicas(self)
        self.config, self.layer_number = config, layer_number
        config.note_read()
        self.num_local_experts = self.experts.num_own
        first = self.experts.first_own
        self.local_expert_indices = list(range(first, first + self.num_local_experts))
        self.register_state_dict_post_hook(_name_as_megatron_)

    @property
    def spec(self) -> Experts:
        """The config's experts, as ``TopKRouter.experts``."""
        return self._spec_at_first if self.config is None else _experts_of(self.config)

    @spec.setter
    def spec(self, spec: Experts) -> None:
        self._spec_at_first = spec

    @property
    def shared_experts(self) -> nn.Module | None:
        return self.shared

    def set_layer_number(self, layer_number: int) -> None:
        """Store the number of the layer."""
        self.layer_number = layer_number

    def forward(  # type: ignore[override]  # Megatron's modules return pairs.
        self,
        hidden_states: Tensor,
        intermediate_tensors: None = None,
        padding_mask: None = None,
        *,
        sequence: SequenceView | None = None,
        batch: router.RoutedBatch | None = None,
    ) -> tuple[Tensor, None]:
        """Map ``[s, b, h]`` (``[s/t, b, h]`` with sequence parallelism) to the same shape; return it and None.

        Raises:
            ConfigError: ``intermediate_tensors`` or ``padding_mask`` is given.
        """
        _refuse(intermediate_tensors=intermediate_tensors, padding_mask=padding_mask)
        if self.training and self.spec.bias_rate and self.statistics is None:
            self.begin(self.loss_scale)
        return super().forward(hidden_states, sequence=sequence, batch=batch), None

    def _route(self, tokens: Tensor, reroute: Callable[[Tensor], Tensor] | None) -> router.Routing:
        own: Any = self.router
        routing: router.Routing = own._routed(tokens, reroute)
        return routing

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for own, megatrons in _SHARED:
            _rename_(state_dict, prefix, megatrons, own)
        super()._load_from_state_dict(state_dict, prefix, *args)


# Beginnings of the engine's and of Megatron's state keys; the gate comes first, because it is a part of the latter.
_SHARED = (("shared_gate.weight", "shared_experts.gate_weight"), ("shared.", "shared_experts."))


def _built_experts(
    kind: Any, pg_collection: ProcessGroupCollection | None, config: TransformerConfig, spec: Experts, *groups: Any
) -> Any:
    num_own = spec.num * groups[1].size() // groups[0].size()
    return build_module(kind, num_own, config, pg_collection=pg_collection)


def _experts_of(config: TransformerConfig) -> Experts:
    config.check_complete()
    if config.experts is None:
        raise ConfigError("num_moe_experts of the config is None; a layer of experts needs a number of them")
    return config.experts


def _name_as_megatron_(module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
    for own, megatrons in _SHARED:
        _rename_(state_dict, prefix, own, megatrons)


def _rename_(state_dict: Any, prefix: str, before: str, after: str) -> None:
    """Replace the beginning ``before`` of keys below ``prefix``."""
    for key in [key for key in state_dict if key.startswith(prefix + before)]:
        state_dict[prefix + after + key.removeprefix(prefix + before)] = state_dict.pop(key)


__getattr__ = absent_names(
    "transformer.moe.moe_layer", "transformer.moe.experts", "transformer.moe.router", implemented={"Router": TopKRouter}
)
offer(globals())
