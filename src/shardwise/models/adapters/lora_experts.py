"""Experts and routers with low-rank adapters.

Each expert has its own two factors for its up and for its down projection, ``W + scaling * B A``. Like the weights, a
factor is one tensor with the rows of all experts one after the other, divided between ranks by experts. Where ranks
split an expert, one factor's rows are those of the weight, and split like them. The ``r`` rows of the other factor are
split over the same ranks, which gather them for each product. So no rank holds a copy, and every gradient is complete.

A router's factors are whole on every rank, and their gradients are partial like that of its weight.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import init

from shardwise.core.communication import moves
from shardwise.core.errors import ConfigError
from shardwise.core.sharding import ParamLayout, Replicas
from shardwise.core.sharding.balanced import balanced_sizes
from shardwise.kernels.grouped import grouped_linear
from shardwise.models.adapters.adapter import INIT_A, Adapter
from shardwise.models.adapters.config import LoraConfig
from shardwise.models.adapters.lora_layers import LoraLayer
from shardwise.models.experts.exact_moe import ExactExperts
from shardwise.models.experts.moe import ExpertWeights
from shardwise.models.experts.router import Router
from shardwise.nn.arithmetic import arithmetic_of


class ExpertAdapter(Adapter):
    """The two factors of each expert for one of the weights ``up`` and ``down``.

    The factors for ``down`` are stored transposed, like the weight. ``e`` is the number of this rank's experts, ``i/t``
    the number of rows that it holds of each in the weight, and ``r/t`` its share of the rank.

    Attributes:
        r, scaling: rank, and factor of the product.
        lora_A: ``[e * r/t, h]`` for ``up``, ``[e * i/t, r]`` for ``down``.
        lora_B: ``[e * i/t, r]`` for ``up``, ``[e * r/t, h]`` for ``down``; starts at 0.
        section: of each output row of an expert in ``peft``'s parameter, the row here; None if all are the same.
    """

    def __init__(self, layer: ExpertWeights, weight: str, config: LoraConfig, section: Tensor | None = None) -> None:
        param: Tensor = getattr(layer, weight)
        super().__init__(layer, param, config)
        of_weight = layer.param_layouts[weight]
        rows, hidden = of_weight.global_shape
        self.is_transposed, self.num, self._num_own = weight == "down", layer.num, layer.num_own
        self._expert_tp, self.section = layer.expert_tp, section
        split = ParamLayout((rows, config.r), 0, of_weight.intervals, of_weight.world_size)
        gathered = layer.layout_of(1, config.r, hidden)
        bound = (rows // layer.num if self.is_transposed else hidden) ** -0.5
        layout_a, layout_b = (split, gathered) if self.is_transposed else (gathered, split)
        self._make_parameter("lora_A", layout_a, functools.partial(init.uniform_, a=-bound, b=bound))
        self._make_parameter("lora_B", layout_b, init.zeros_)
        self.lora_A: nn.Parameter
        self.lora_B: nn.Parameter
        self.param_replicas = dict.fromkeys(self.param_layouts, Replicas(same_over=("expert_dp",)))

    def forward(self, input_: Tensor, counts: Tensor) -> Tensor:
        """Return ``scaling * B A x`` of this rank's part of each expert; arguments are those of ``grouped_linear``."""
        down, up = self._matrices()
        if self.is_transposed:
            down, up = down.transpose(1, 2), up.transpose(1, 2)
        low_rank = grouped_linear(input_, down.to(input_.dtype), counts)
        return self.scaling * grouped_linear(low_rank, up.to(input_.dtype), counts)

    def delta(self) -> Tensor:
        """Return this rank's part of the product, in the weight's shape and in fp32 or wider.

        Collective over the ranks that split an expert.
        """
        wide = torch.promote_types(self.lora_A.dtype, torch.float32)
        first, second = (each.to(wide) for each in self._matrices())
        product = first @ second if self.is_transposed else second @ first
        return self.scaling * product.flatten(0, 1)

    def to_file(self, name: str, whole: Tensor) -> Tensor:
        """Return a whole factor as ``peft`` stores it: ``A`` as ``[num * r, i]``, ``B`` as ``[o, r * num]``."""
        matrices: Tensor = whole.unflatten(0, (self.num, -1))
        if self.is_transposed:
            matrices = matrices.transpose(1, 2)
        if name == "lora_A":
            return matrices.flatten(0, 1).contiguous()
        stored = matrices.permute(1, 2, 0).flatten(1)
        return stored.contiguous() if self.section is None else stored[self.section]

    def from_file(self, name: str, stored: Tensor) -> Tensor:
        matrices: Tensor
        if name == "lora_A":
            matrices = stored.unflatten(0, (self.num, -1))
        else:
            ordered = stored if self.section is None else stored[self.section.argsort()]
            matrices = ordered.unflatten(1, (-1, self.num)).permute(2, 0, 1)
        return (matrices.transpose(1, 2) if self.is_transposed else matrices).flatten(0, 1)

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """Return ``A`` and ``B`` as they are stored, ``[e, rows, columns]``, with all rows of the gathered one."""
        factors = [factor.unflatten(0, (self._num_own, -1)) for factor in (self.lora_A, self.lora_B)]
        if self._expert_tp.size() > 1:
            place, sizes = int(self.is_transposed), balanced_sizes(self.r, self._expert_tp.size())
            factors[place] = moves.gather_for_parts(factors[place], dim=1, group=self._expert_tp, sizes=sizes)
        return factors[0], factors[1]


def check_experts(layer: ExpertWeights, config: LoraConfig) -> None:
    """Raise ConfigError if experts cannot have such adapters."""
    config.check_parameters()
    if isinstance(layer, ExactExperts):
        raise ConfigError("an adapter on experts has no exact products; leave it out, or exact_parts (--exact)")
    splits = layer.expert_tp.size()
    if config.r < splits:
        raise ConfigError(
            f"the LoRA rank {config.r} of experts is less than the {splits} ranks that split each expert (etp); raise "
            "the rank, or lower etp"
        )


class LoraExperts(LoraLayer, ExpertWeights):
    """ExpertWeights with adapters; see ``LoraLayer``. There is neither dropout nor DoRA, as in ``peft``."""

    @staticmethod
    def add(
        layer: nn.Module, configs: Mapping[str, LoraConfig], sections: Mapping[str, Tensor | None] | None = None
    ) -> LoraExperts:
        """Add adapters to experts, in place.

        Args:
            layer: an ExpertWeights, or an instance of a subclass.
            configs: rank and strength for each adapted weight, ``"up"`` or ``"down"``.
            sections: see ``ExpertAdapter.section``, for each weight that has one; None for none.

        Raises:
            ConfigError: the layer has adapters already, is no ExpertWeights, or cannot have these.
        """
        if isinstance(layer, LoraExperts):
            raise ConfigError(f"the experts have adapters already: {', '.join(layer.lora)}; remove them first")
        if not isinstance(layer, ExpertWeights):
            raise ConfigError(f"a {type(layer).__name__} is no ExpertWeights, whose experts could have adapters")
        for config in configs.values():
            check_experts(layer, config)
        sections = sections or {}
        adapters = {name: ExpertAdapter(layer, name, config, sections.get(name)) for name, config in configs.items()}
        result: LoraExperts = LoraExperts._turn(layer, adapters, next(iter(configs.values())))
        return result

    def _raise(self, tokens: Tensor, counts: Tensor) -> Tensor:
        return self._with_adapter("up", super()._raise(tokens, counts), tokens, counts)

    def _lower(self, inner: Tensor, counts: Tensor) -> Tensor:
        return self._with_adapter("down", super()._lower(inner, counts), inner, counts)

    def _with_adapter(self, name: str, output: Tensor, input_: Tensor, counts: Tensor) -> Tensor:
        if not self._is_active or name not in self.lora:
            return output
        added: Tensor = self.lora[name](input_, counts)
        return output + added

    @torch.no_grad()
    def _add_deltas_(self, sign: int) -> None:
        for name, adapter in self.lora.items():
            assert isinstance(adapter, ExpertAdapter)
            weight: Tensor = getattr(self, name)
            weight.copy_(weight + sign * adapter.delta())
        self.lora_merged = sign > 0

    def merge_(self) -> None:
        """Add the adapters' products to the weights, in place. Collective over the ranks that split an expert."""
        if not self.lora_merged:
            self._add_deltas_(1)

    def unmerge_(self) -> None:
        """Subtract the products again, in place; collective like ``merge_``."""
        if self.lora_merged:
            self._add_deltas_(-1)


class RouterAdapter(Adapter):
    """The two factors for a router.

    Attributes:
        r, scaling: rank, and factor of the product.
        lora_A: ``[r, h]``.
        lora_B: ``[num, r]``; starts at 0.
    """

    def __init__(self, layer: Router, config: LoraConfig) -> None:
        super().__init__(layer, layer.weight, config)
        num, hidden = layer.param_layouts["weight"].global_shape
        t = self.group.size()
        layout_a, layout_b = (ParamLayout.replicated(shape, t) for shape in ((config.r, hidden), (num, config.r)))
        self._make_parameter("lora_A", layout_a, INIT_A, partial_gradient=t > 1)
        self._make_parameter("lora_B", layout_b, init.zeros_, partial_gradient=t > 1)
        self.lora_A: nn.Parameter
        self.lora_B: nn.Parameter

    def forward(self, dtype: torch.dtype) -> Tensor:
        """Return ``scaling * B A``, ``[num, h]`` in ``dtype``."""
        return self.scaling * (self.lora_B.to(dtype) @ self.lora_A.to(dtype))


class LoraRouter(LoraLayer, Router):
    """A Router with an adapter; see ``LoraLayer``. There is neither dropout nor DoRA, as in ``peft``."""

    weight: Tensor

    @staticmethod
    def add(layer: nn.Module, config: LoraConfig) -> LoraRouter:
        """Add an adapter to a router, in place.

        Raises:
            ConfigError: the layer has an adapter already, is no Router, or cannot have this one.
        """
        if isinstance(layer, LoraRouter):
            raise ConfigError("the router has an adapter already; remove it first")
        if not isinstance(layer, Router):
            raise ConfigError(f"a {type(layer).__name__} is no Router, which could have an adapter")
        config.check_parameters()
        arithmetic_of(layer.group).refuse(
            "an adapter on a router has no exact sums; leave it out, or exact_parts (--exact)"
        )
        result: LoraRouter = LoraRouter._turn(layer, {"weight": RouterAdapter(layer, config)}, config)
        return result

    def _matrix(self, dtype: torch.dtype) -> Tensor:
        matrix = super()._matrix(dtype)
        return matrix + self.lora["weight"](dtype) if self._is_active else matrix

    @torch.no_grad()
    def delta(self) -> Tensor:
        """Return the adapter's product, ``scaling * B A``, in fp32 or wider."""
        product: Tensor = self.lora["weight"](torch.promote_types(self.weight.dtype, torch.float32))
        return product
