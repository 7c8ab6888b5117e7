"""Tensor-parallel linear layers with low-rank adapters: exact at every number of ranks, with little communication.

==================== ================= ================= ==============================================================
layer                A                 B                 communication besides the layer's own
==================== ================= ================= ==============================================================
column               whole             split like ``W``  all-reduce of the gradient of ``z = A x``
column, sequence     whole, gradient   split like ``W``  all-gather of ``z``, reduce-scatter of its gradient
parallel             partial
row, also sequence   split like ``W``  whole, gradient   none: ``B z`` joins the partial sum before the layer's own
parallel                               partial           reduction
==================== ================= ================= ==============================================================

``z`` has ``r`` features, so its traffic is ``r / hidden_size`` of the layer's own. ``finalize_gradients_`` sums partial
gradients once per step. Every rank has the whole gradient of a replicated ``A``, because the gradient of ``z`` is
summed over the ranks. With exact arithmetic (``core.communication.trees``) no gradient is partial, and ``z`` of a
row-parallel layer is summed over the ranks, too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.communication import moves
from shardwise.core.errors import ConfigError
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import local_parts
from shardwise.exact.products import ExactProducts
from shardwise.exact.strategies import linear_by_rows
from shardwise.models.adapters.adapter import Adapter, LoraAdapter, row_lengths
from shardwise.models.adapters.config import LoraConfig
from shardwise.nn import ColumnLinear, LinearParallelism, RowLinear, ShardedModule
from shardwise.nn.dropout import sharded_dropout
from shardwise.nn.linear import reduce_product, tensor_parallel_linear
from shardwise.nn.parallel_linear import ParallelLinear
from shardwise.nn.quantization import QuantizedTensor


class LoraLayer(ShardedModule):
    """Base of layers with adapters.

    Do not construct it directly. ``add`` adds adapters to a layer in place, so that its parameters keep their names.

    Attributes:
        lora: the adapters, by the last part of their Hugging Face names.
        lora_config: rank, strength, dropout.
        lora_enabled: whether ``forward`` uses the adapters.
        lora_merged: whether ``weight`` includes their product.
        layer_number: number of the transformer layer, for the random stream of dropout; None outside of layers.
        addition: name of the addition to the plain layer, for messages of code that does not import adapters.
    """

    addition = "adapters"
    layer_number: int | None = None
    weight: Any
    lora: nn.ModuleDict
    lora_config: LoraConfig
    lora_enabled: bool
    lora_merged: bool
    lora_row_factors: Tensor

    @classmethod
    def _turn(cls, layer: nn.Module, adapters: Mapping[str, Adapter], config: LoraConfig) -> Any:
        """Turn a plain layer into an instance of this class, in place."""
        adapted: Any = layer
        base: Any = cls
        adapted.__class__ = _with_adapters(base, adapted.__class__)
        adapted.lora = nn.ModuleDict(adapters)
        adapted.lora_config = config
        adapted.lora_enabled = True
        adapted.lora_merged = False
        return adapted

    def remove(self) -> None:
        """Remove the adapters, in place. A merged product stays in the weight."""
        plain: Any = self
        vars(plain).pop("layer_number", None)
        del plain.lora, plain.lora_config, plain.lora_enabled, plain.lora_merged
        adapted: Any = type(self)
        plain.__class__ = _without_adapters(adapted)

    @property
    def _is_active(self) -> bool:
        return self.lora_enabled and not self.lora_merged

    def delta(self) -> Tensor:
        """Return this rank's part of the adapters' product, in the weight's shape and in fp32 or wider."""
        raise NotImplementedError

    def _scaled(self, weight: Tensor, factors: Tensor) -> Tensor:
        """Multiply the weight by the factors of ``use_dora``."""
        return weight * factors[:, None]

    def _factors(self) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def merge_(self) -> None:
        """Add the adapters' product to the weight, in place, so that ``forward`` has the cost of the plain layer.

        With ``use_dora`` the rows also get their learned lengths; this is collective if the layer's rows are split.

        Raises:
            ConfigError: the weight is quantised.
        """
        if isinstance(self.weight, QuantizedTensor):
            raise ConfigError(
                f"adapters cannot be merged into a base in {self.weight.kind}, whose codes have no room for them: save "
                "the adapters, and merge them into the model loaded without quantisation"
            )
        if not self.lora_merged:
            whole = self.weight + self.delta()
            if self.lora_config.use_dora:
                # Kept for unmerge_, because the merged weight does not determine the earlier lengths.
                self.lora_row_factors = self._factors()
                whole = self._scaled(whole, self.lora_row_factors)
            self.weight.copy_(whole)
            self.lora_merged = True

    @torch.no_grad()
    def unmerge_(self) -> None:
        """Subtract the product again, in place. This restores the weight up to one rounding."""
        if self.lora_merged:
            whole: Tensor = self.weight
            if self.lora_config.use_dora:
                whole = self._scaled(whole, 1 / self.lora_row_factors)
                del self.lora_row_factors
            self.weight.copy_(whole - self.delta())
            self.lora_merged = False


class LoraLinear(LoraLayer, ParallelLinear):
    """Base of column- and row-parallel layers with adapters; see ``LoraLayer``."""

    weight: nn.Parameter
    # Whether the bias of each of the rank's rows is trained, as bools; None if all or none are.
    lora_bias_rows: Tensor | None

    @staticmethod
    def add(
        layer: nn.Module,
        config: LoraConfig,
        sections: Mapping[str, Tensor | None],
        paths: Mapping[str, str] | None = None,
    ) -> LoraLinear:
        """Add adapters to a linear layer, in place. With ``config.use_dora`` collective over the layer's group.

        Args:
            layer: a ColumnLinear or a RowLinear, or an instance of a subclass.
            config: rank, strength and dropout.
            sections: each adapter's section, by name: the output features that it adds to; None for all, in order.
            paths: each adapter's path in the Hugging Face model, by name, for the config's patterns.

        Returns:
            ``layer``, now an instance of a class with adapters.

        Raises:
            ConfigError: the layer has adapters already, or cannot have any.
        """
        if isinstance(layer, LoraLinear):
            raise ConfigError(f"the layer has adapters already: {', '.join(layer.lora)}; remove them first")
        if not isinstance(layer, ColumnLinear | RowLinear):
            raise ConfigError(f"a {type(layer).__name__} cannot have adapters; only tensor-parallel linear layers can")
        if layer.weight is None:
            raise ConfigError("the layer has no weight, so it cannot have adapters")
        if layer.parallelism is LinearParallelism.LOCAL and layer.group.size() > 1:
            raise ConfigError("the layer leaves its communication to its caller, so it cannot have adapters")
        adapters = {
            name: LoraAdapter(layer, config.at(name if paths is None else paths[name]), section)
            for name, section in sections.items()
        }
        is_column, is_exact = isinstance(layer, ColumnLinear), isinstance(layer._products, ExactProducts)
        columns, rows = (ExactLoraColumn, ExactLoraRow) if is_exact else (LoraColumn, LoraRow)
        result: LoraLinear = (columns if is_column else rows)._turn(layer, adapters, config)
        result.register_buffer("lora_bias_rows", None, persistent=False)
        result._check_sums()
        return result

    @property
    def is_one_product(self) -> bool:
        return not self._is_active and super().is_one_product

    def _check_sums(self) -> None:
        """Raise ConfigError if the layer's arithmetic does not support its adapters."""

    @property
    def lora_widths(self) -> set[int]:
        """Inner widths of the products: each adapter's rank, and the sum of the ranks."""
        ranks = [adapter.r for adapter in self._adapters()]
        return {*ranks, sum(ranks)}

    def remove(self) -> None:
        del self.lora_bias_rows
        super().remove()

    def _adapters(self) -> list[LoraAdapter]:
        return [adapter for adapter in self.lora.values() if isinstance(adapter, LoraAdapter)]

    def _low_rank(
        self, input_: Tensor, sequence: SequenceView | None, *, dim: int | None, sizes: Sequence[int] | None
    ) -> Tensor:
        """Return ``A x`` of all adapters, ``[..., ranks]``. The ranks split ``x`` along ``dim`` by ``sizes``."""
        adapters, p = self._adapters(), self.lora_config.lora_dropout
        if not self.training or p == 0:
            return self._down(input_, _side_by_side([adapter.lora_A for adapter in adapters], 0))
        options: dict[str, Any] = {"dim": dim, "group": self.group, "sizes": sizes, "layer_number": self.layer_number}
        parts = []
        for adapter in adapters:
            kept = sharded_dropout(input_, p, context=None if sequence is None else sequence.context, **options)
            parts.append(self._down(kept, adapter.lora_A))
        return _side_by_side(parts, -1)

    def _down(self, input_: Tensor, factor: Tensor) -> Tensor:
        """Return ``A x``, for a row-parallel layer a partial sum."""
        return F.linear(input_, factor.to(input_.dtype))

    def _up(self) -> Tensor:
        """Return ``B`` of all adapters, ``[o/t, ranks]``, relative to the first scaling; 0 outside of sections."""
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
        """Return ``output + scaling * B z``, in one product."""
        up = self._up().to(output.dtype)
        flat = torch.addmm(
            output.flatten(0, -2), low_rank.flatten(0, -2).to(output.dtype), up.t(), alpha=self._adapters()[0].scaling
        )
        return flat.view(output.shape)

    @property
    def _is_dora(self) -> bool:
        return self._is_active and self.lora_config.use_dora

    def _adapted(self, output: Tensor, low_rank: Tensor, bias: Tensor | None) -> Tensor:
        """Add the adapters' product to the output. With DoRA the bias is added last, so its factors do not scale it."""
        output = self._add_up(output, low_rank)
        if not self._is_dora:
            return output
        output = output * self._factors().to(output.dtype)
        return output if bias is None else output + bias.to(output.dtype)

    def _factors(self) -> Tensor:
        """Return ``m / n`` of ``use_dora`` for each of this rank's rows, ``[o/t]``; 1 for rows without an adapter."""
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
        """Return this rank's part of the adapters' product, ``scaling * B A``, in fp32 or wider."""
        down = _side_by_side([adapter.lora_A for adapter in self._adapters()], 0)
        wide = torch.promote_types(down.dtype, torch.float32)
        return self._adapters()[0].scaling * (self._up().to(wide) @ down.to(wide))


class LoraColumn(LoraLinear):
    """A ColumnLinear with adapters."""

    sequence_parallel: bool

    def _multiply(
        self,
        input_: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sequence: SequenceView | None = None,
        parallelism: LinearParallelism | None = None,
    ) -> Tensor:
        if bias is not None and self.lora_bias_rows is not None:
            bias = torch.where(self.lora_bias_rows, bias, bias.detach())
        output = super()._multiply(input_, weight, None if self._is_dora else bias, sequence, parallelism)
        if not self._is_active:
            return output
        sizes = sequence.sizes_to_gather(input_) if self.sequence_parallel and sequence is not None else None
        low_rank = self._low_rank(input_, sequence, dim=0 if self.sequence_parallel else None, sizes=sizes)
        if self.sequence_parallel:
            low_rank = moves.gather_for_parts(low_rank, dim=0, group=self.group, sizes=sizes)
        elif self.group.size() > 1:
            low_rank = moves.copy(low_rank, group=self.group)
        return self._adapted(output, low_rank, bias)


class LoraRow(LoraLinear):
    """A RowLinear with adapters; their product is added before the sum over ranks."""

    sequence_parallel: bool
    _input_sizes: list[int]

    def _multiply(
        self,
        input_: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sequence: SequenceView | None = None,
        parallelism: LinearParallelism | None = None,
    ) -> Tensor:
        if not self._is_active:
            return super()._multiply(input_, weight, bias, sequence, parallelism)
        own_bias = None if self._is_dora else bias
        output = super()._multiply(input_, weight, own_bias, parallelism=LinearParallelism.LOCAL)
        low_rank = self._low_rank(input_, sequence, dim=-1, sizes=self._input_sizes)
        output = self._adapted(output, low_rank, bias)
        return reduce_product(output, self.parallelism, self.group)


class _ExactLora(LoraLinear):
    """Adapters with exact arithmetic: split factors use the same exact sums as the weight."""

    def _check_sums(self) -> None:
        if self.lora_config.use_dora:
            raise ConfigError(
                "use_dora has no exact form: the lengths of rows are sums over what ranks split; leave it out, or "
                "exact_parts (--exact)"
            )
        for name, adapter in self.lora.items():
            assert isinstance(adapter, LoraAdapter)
            for factor, layout in adapter.param_layouts.items():
                if layout.dim is not None:
                    what = f"{factor} of the adapter {name!r}"
                    local_parts(layout, self.group.rank(), self._exact_products.num_parts, what=what)

    @property
    def _exact_products(self) -> ExactProducts:
        assert isinstance(self._products, ExactProducts)
        return dataclasses.replace(self._products, is_narrow=True)

    def _split_product(self, input_: Tensor, factor: Tensor, parallelism: LinearParallelism) -> Tensor:
        """Multiply by a factor that is split like the weight."""
        return tensor_parallel_linear(
            input_, factor, None, parallelism=parallelism, group=self.group, products=self._exact_products
        )

    def _add(self, output: Tensor, product: Tensor) -> Tensor:
        # Two operations, because a fused one may round the last elements of a tensor differently.
        return output + product * self._adapters()[0].scaling


class ExactLoraColumn(_ExactLora, LoraColumn):
    """``LoraColumn`` with exact arithmetic."""

    def _down(self, input_: Tensor, factor: Tensor) -> Tensor:
        return linear_by_rows(input_, factor, group=self.group, sequence_parallel=self.sequence_parallel)

    def _add_up(self, output: Tensor, low_rank: Tensor) -> Tensor:
        up = self._up().to(output.dtype)
        return self._add(output, self._split_product(low_rank, up, LinearParallelism.LOCAL))


class ExactLoraRow(_ExactLora, LoraRow):
    """``LoraRow`` with exact arithmetic: the ranks sum ``A x``, and multiply the sum by ``B``."""

    def _multiply(
        self,
        input_: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sequence: SequenceView | None = None,
        parallelism: LinearParallelism | None = None,
    ) -> Tensor:
        output = super(LoraRow, self)._multiply(input_, weight, bias, sequence, parallelism)
        if not self._is_active:
            return output
        low_rank = self._low_rank(input_, sequence, dim=-1, sizes=self._input_sizes)
        up = linear_by_rows(low_rank, self._up(), group=self.group, sequence_parallel=self.sequence_parallel)
        return self._add(output, up)

    def _down(self, input_: Tensor, factor: Tensor) -> Tensor:
        return self._split_product(input_, factor.to(input_.dtype), self.parallelism)


@functools.cache
def _with_adapters(base: Any, plain: Any) -> Any:
    """Return the class of a ``plain`` layer with adapters."""
    own = {"__doc__": f"A {plain.__name__} with adapters.", "plain": plain}
    return type(f"Lora{plain.__name__}", (base, plain), own)


@functools.cache
def _without_adapters(adapted: Any) -> Any:
    """Undo ``_with_adapters``, also below a class that ``fully_shard`` made of the result."""
    if "plain" in vars(adapted):
        plain: type = vars(adapted)["plain"]
        return plain
    bases = tuple(_without_adapters(base) if issubclass(base, LoraLayer) else base for base in adapted.__bases__)
    own = {name: value for name, value in vars(adapted).items() if name not in ("__dict__", "__weakref__")}
    name = adapted.__name__
    for before, after in zip(adapted.__bases__, bases, strict=True):
        name = name.replace(before.__name__, after.__name__)
    return type(name, bases, own)


def _side_by_side(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
