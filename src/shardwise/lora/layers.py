"""Tensor-parallel linear layers with low-rank adapters: exact at every number of ranks, and cheap on the wire.

==================== ================= ================= ==============================================================
layer                A                 B                 communication beside the layer's own
==================== ================= ================= ==============================================================
column               whole             split like ``W``  all-reduce of the gradient of ``z = A x``
column, sequence     whole, gradient   split like ``W``  all-gather of ``z``, reduce-scatter of its gradient
parallel             partial
row, also sequence   split like ``W``  whole, gradient   none: ``B z`` joins the partial sum before the layer's own
parallel                               partial           reduction
==================== ================= ================= ==============================================================

``z`` has ``r`` features, so what travels per token is ``r / hidden_size`` of what the layer itself sends. Gradients
marked partial are summed once per step by ``finalize_gradients_``. A replicated ``A`` sees its whole gradient on every
rank, because the sum over ranks is taken of the gradient of ``z`` already.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import init

from shardwise.communication import moves
from shardwise.communication.collectives import all_reduce
from shardwise.dropout import sharded_dropout
from shardwise.errors import ConfigError
from shardwise.layers import ColumnLinear, LinearParallelism, RowLinear, ShardedModule
from shardwise.layers.linear import reduce_product
from shardwise.layers.parallel_linear import ParallelLinear
from shardwise.lora.config import LoraConfig
from shardwise.lora.sections import local_places, section_layout
from shardwise.sharding import ParamLayout, balanced_sizes, uneven_sizes

# PEFT initialises A as nn.Linear does its weight, uniformly within 1 / sqrt(fan in).
_INIT_A = functools.partial(init.kaiming_uniform_, a=math.sqrt(5))
_REDUCED_PRECISION = (torch.float16, torch.bfloat16)


class LoraAdapter(ShardedModule):
    """The two factors for one Hugging Face linear layer.

    Factors of a layer in half precision are kept in fp32, so that small updates are not lost, and multiplied in the
    layer's dtype.

    Args:
        layer: the linear layer beside which they stand.
        config: rank.
        section: which rows of a column-parallel layer's output they add to, in their order; all in order if None.

    Attributes:
        r, scaling: rank, and factor of the product.
        lora_A: ``[r, i]`` of a column-parallel layer, ``[r, i/t]`` of a row-parallel one.
        lora_B: ``[o/t, r]`` of a column-parallel layer, ``[o, r]`` of a row-parallel one; starts as 0.
        lora_magnitude_vector: with ``use_dora``, ``[o/t]`` or ``[o]``: the lengths of the weight's rows, which are what
            they start as.
        places: ``[o/t]``, the rows of the rank's part of the layer's output; None if these are all, in order.
    """

    places: Tensor | None

    def __init__(self, layer: ParallelLinear, config: LoraConfig, section: Tensor | None = None) -> None:
        assert layer.weight is not None
        weight_layout = layer.param_layouts["weight"]
        super().__init__(
            layer.group,
            device=layer.weight.device,
            dtype=torch.float32 if layer.weight.dtype in _REDUCED_PRECISION else layer.weight.dtype,
            # The factors are initialised even if the weight was read from a file.
            initialize=True,
            init_on_cpu=layer.init_on_cpu,
        )
        t, rank = self.group.size(), self.group.rank()
        output_size, input_size = weight_layout.global_shape
        places: Tensor | None = None
        if isinstance(layer, ColumnLinear):
            if section is None:
                section = torch.arange(output_size)
            layout_a = ParamLayout.replicated((config.r, input_size), t)
            layout_b = section_layout(section, weight_layout, config.r)
            partial_a, partial_b = layer.sequence_parallel, False
            places = local_places(section, weight_layout, rank)
        else:
            layout_a = ParamLayout((config.r, input_size), 1, weight_layout.intervals, t, weight_layout.stride)
            layout_b = ParamLayout.replicated((output_size, config.r), t)
            partial_a, partial_b = False, t > 1
        self.r, self.scaling = config.r, config.scaling
        self._make_parameter("lora_A", layout_a, _INIT_A, partial_gradient=partial_a)
        self._make_parameter("lora_B", layout_b, init.zeros_, partial_gradient=partial_b)
        self.lora_A: nn.Parameter
        self.lora_B: nn.Parameter
        if config.use_dora:
            layout_m = ParamLayout(
                layout_b.global_shape[:1], layout_b.dim, layout_b.intervals, layout_b.world_size, layout_b.stride
            )
            lengths = row_lengths(layer, layer.weight.detach())
            own = lengths if places is None else lengths[places.to(lengths.device)]
            self._make_parameter("lora_magnitude_vector", layout_m, init.zeros_, partial_gradient=partial_b)
            self.lora_magnitude_vector: nn.Parameter
            with torch.no_grad():
                self.lora_magnitude_vector.copy_(own)
        self.register_buffer("places", None if places is None else places.to(layer.weight.device), persistent=False)

    def extra_repr(self) -> str:
        layout = self.param_layouts
        (r, in_features), out_features = layout["lora_A"].global_shape, layout["lora_B"].global_shape[0]
        return (
            f"in_features={in_features}, out_features={out_features}, r={r}, tp={self.group.rank()}/{self.group.size()}"
        )


class LoraLinear(ParallelLinear):
    """What column- and row-parallel layers with adapters share.

    Not made by itself: ``add`` turns a layer into one with adapters, in place, so that its parameters keep their names.

    Attributes:
        lora: the adapters, by the last part of their Hugging Face names.
        lora_config: rank, strength, dropout.
        lora_enabled: whether the adapters take part in ``forward``.
        lora_merged: whether their product is part of ``weight`` now.
    """

    weight: nn.Parameter
    lora: nn.ModuleDict
    lora_config: LoraConfig
    lora_enabled: bool
    lora_merged: bool
    lora_row_factors: Tensor

    @staticmethod
    def add(
        layer: nn.Module,
        config: LoraConfig,
        sections: Mapping[str, Tensor | None],
        paths: Mapping[str, str] | None = None,
    ) -> LoraLinear:
        """Give a linear layer adapters, in place. With ``config.use_dora`` collective over the layer's group.

        Args:
            layer: a ColumnLinear or a RowLinear, or of a class derived from one of them.
            config: rank, strength and dropout.
            sections: for each adapter's name the rows of the layer's output that it adds to; None for all in order.
            paths: for each adapter's name its path in Hugging Face's model, of which the patterns of the config are.

        Returns:
            ``layer``, now of a class with adapters.

        Raises:
            ConfigError: the layer has adapters, or is of a kind that cannot have any.
        """
        if isinstance(layer, LoraLinear):
            raise ConfigError(f"the layer has adapters already: {', '.join(layer.lora)}; remove them first")
        if not isinstance(layer, ColumnLinear | RowLinear):
            raise ConfigError(f"a {type(layer).__name__} cannot have adapters; only tensor-parallel linear layers can")
        if layer.weight is None:
            raise ConfigError("the layer has no weight of its own, so it cannot have adapters")
        if layer.parallelism is LinearParallelism.LOCAL and layer.group.size() > 1:
            raise ConfigError("the layer leaves its communication to its caller, so it cannot have adapters")
        adapters = {
            name: LoraAdapter(layer, config.at(name if paths is None else paths[name]), section)
            for name, section in sections.items()
        }
        adapted: Any = layer
        plain: Any = type(layer)
        adapted.__class__ = _with_adapters(plain)
        adapted.lora = nn.ModuleDict(adapters)
        adapted.lora_config = config
        adapted.lora_enabled = True
        adapted.lora_merged = False
        result: LoraLinear = adapted
        return result

    def remove(self) -> None:
        """Take the adapters away, in place; a merged product stays in the weight."""
        plain: Any = self
        del plain.lora, plain.lora_config, plain.lora_enabled, plain.lora_merged
        plain.__class__ = type(self).__bases__[1]

    @property
    def _is_active(self) -> bool:
        return self.lora_enabled and not self.lora_merged

    def _adapters(self) -> list[LoraAdapter]:
        return [adapter for adapter in self.lora.values() if isinstance(adapter, LoraAdapter)]

    def _low_rank(self, input_: Tensor, *, dim: int | None, sizes: Sequence[int] | None) -> Tensor:
        """``A x`` of all adapters side by side, ``[..., ranks]``; ``dim`` and ``sizes`` say how ``x`` is split."""
        adapters, p = self._adapters(), self.lora_config.lora_dropout
        if not self.training or p == 0:
            return F.linear(input_, _side_by_side([adapter.lora_A for adapter in adapters], 0).to(input_.dtype))
        parts = []
        for adapter in adapters:
            kept = sharded_dropout(input_, p, dim=dim, group=self.group, sizes=sizes)
            parts.append(F.linear(kept, adapter.lora_A.to(input_.dtype)))
        return _side_by_side(parts, -1)

    def _up(self) -> Tensor:
        """``B`` of all adapters as one matrix ``[o/t, ranks]`` over the layer's output, 0 where an adapter has none.

        Those with another strength than the first are multiplied by the ratio of both.
        """
        columns, adapters = [], self._adapters()
        for adapter in adapters:
            factor: Tensor = adapter.lora_B
            if adapter.scaling != adapters[0].scaling:
                factor = factor * (adapter.scaling / adapters[0].scaling)
            if adapter.places is not None:
                whole = factor.new_zeros(self.weight.size(0), factor.size(1))
                factor = whole.index_copy(0, adapter.places, factor)
            columns.append(factor)
        return _side_by_side(columns, 1)

    def _add_up(self, output: Tensor, low_rank: Tensor) -> Tensor:
        """``output + scaling * B z``, in one product."""
        up = self._up().to(output.dtype)
        flat = torch.addmm(
            output.flatten(0, -2), low_rank.flatten(0, -2).to(output.dtype), up.t(), alpha=self._adapters()[0].scaling
        )
        return flat.view(output.shape)

    def _row_factors(self) -> Tensor:
        """With ``use_dora``, ``m / n`` of each of this rank's rows, ``[o/t]``; 1 where there is no adapter."""
        with torch.no_grad():
            lengths = row_lengths(self, self.weight + self.delta())
        factors = torch.ones_like(lengths)
        for adapter in self._adapters():
            if adapter.places is None:
                return adapter.lora_magnitude_vector / lengths
            factors = factors.index_copy(0, adapter.places, adapter.lora_magnitude_vector / lengths[adapter.places])
        return factors

    @torch.no_grad()
    def delta(self) -> Tensor:
        """This rank's part of what the adapters add to the weight, ``scaling * B A``, in fp32 or wider."""
        down = _side_by_side([adapter.lora_A for adapter in self._adapters()], 0)
        wide = torch.promote_types(down.dtype, torch.float32)
        return self._adapters()[0].scaling * (self._up().to(wide) @ down.to(wide))

    @torch.no_grad()
    def merge_(self) -> None:
        """Add the adapters' product to the weight, in place; afterwards ``forward`` costs what it did without them.

        With ``use_dora`` rows get their learned lengths too. Collective then, of a row-parallel layer.
        """
        if not self.lora_merged:
            whole = self.weight + self.delta()
            if self.lora_config.use_dora:
                # Kept, because the lengths before cannot be told from the product.
                self.lora_row_factors = self._row_factors()
                whole = whole * self.lora_row_factors[:, None]
            self.weight.copy_(whole)
            self.lora_merged = True

    @torch.no_grad()
    def unmerge_(self) -> None:
        """Subtract the product again, in place: the weight is what it was up to one rounding."""
        if self.lora_merged:
            whole: Tensor = self.weight
            if self.lora_config.use_dora:
                whole = whole / self.lora_row_factors[:, None]
                del self.lora_row_factors
            self.weight.copy_(whole - self.delta())
            self.lora_merged = False


class LoraColumn(LoraLinear):
    """What a ColumnLinear becomes with adapters."""

    sequence_parallel: bool

    def _multiply(
        self,
        input_: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sequence_length: int | None = None,
        parallelism: LinearParallelism | None = None,
    ) -> Tensor:
        is_dora = self._is_active and self.lora_config.use_dora
        # The factors of DoRA are not of the bias.
        output = super()._multiply(input_, weight, None if is_dora else bias, sequence_length, parallelism)
        if not self._is_active:
            return output
        t, sizes = self.group.size(), None
        if self.sequence_parallel and sequence_length is not None:
            sizes = balanced_sizes(sequence_length, t)
        low_rank = self._low_rank(input_, dim=0 if self.sequence_parallel else None, sizes=sizes)
        if self.sequence_parallel:
            uneven = None if sequence_length is None else uneven_sizes(sequence_length, t)
            low_rank = moves.gather(low_rank, dim=0, group=self.group, sizes=uneven, partial_gradient=True)
        elif t > 1:
            low_rank = moves.copy(low_rank, group=self.group)
        output = self._add_up(output, low_rank)
        if is_dora:
            output = output * self._row_factors().to(output.dtype)
            output = output if bias is None else output + bias.to(output.dtype)
        return output


class LoraRow(LoraLinear):
    """What a RowLinear becomes with adapters: their product is added before the sum over ranks."""

    _input_sizes: list[int]

    def _multiply(
        self,
        input_: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sequence_length: int | None = None,
        parallelism: LinearParallelism | None = None,
    ) -> Tensor:
        if not self._is_active:
            return super()._multiply(input_, weight, bias, sequence_length, parallelism)
        is_dora = self.lora_config.use_dora
        output = super()._multiply(input_, weight, None if is_dora else bias, parallelism=LinearParallelism.LOCAL)
        output = self._add_up(output, self._low_rank(input_, dim=-1, sizes=self._input_sizes))
        if is_dora:
            output = output * self._row_factors().to(output.dtype)
            output = output if bias is None else output + bias.to(output.dtype)
        return reduce_product(output, self.parallelism, self.group)


@functools.cache
def _with_adapters(plain: type[nn.Module]) -> type[nn.Module]:
    """The class of a ``plain`` layer with adapters."""
    base = LoraColumn if issubclass(plain, ColumnLinear) else LoraRow
    return type(f"Lora{plain.__name__}", (base, plain), {"__doc__": f"A {plain.__name__} with adapters."})


def row_lengths(layer: ParallelLinear, weight: Tensor) -> Tensor:
    """The 2-norm of each of this rank's rows of a weight of ``layer``'s layout, ``[o/t]`` or ``[o]``, in fp32 or wider.

    Of a row-parallel layer a row is split over the ranks, and its squares are summed over them.
    """
    squares = weight.to(torch.promote_types(weight.dtype, torch.float32)).square().sum(dim=1)
    if isinstance(layer, RowLinear) and layer.group.size() > 1:
        squares = all_reduce(squares, group=layer.group)
    return squares.sqrt()


def _side_by_side(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
