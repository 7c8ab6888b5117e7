"""Linear layers for inference: no gradient, the norm inside, and in fused mode one exchange per half block.

A half block is a norm, a column-parallel layer, and a row-parallel layer whose output is added to the residual. With
sequence parallelism it all-gathers and reduce-scatters. In **fused mode** the row-parallel layer combines all steps
between two products into one exchange: reduce-scatter, residual, the next layer's norm, all-gather. The result is in
the group's symmetric memory, where the next column-parallel layer reads it (``skip_norm_and_all_gather``). With plain
collectives the exchange is one all-reduce: each rank first adds its shard of the residual to its rows of its partial
sum. The sum is then the whole new residual, the same on every rank, and the norm is local.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.communication.agreement import gather_objects
from shardwise.core.communication.collectives import all_gather, all_reduce
from shardwise.core.communication.context import context_of
from shardwise.core.communication.symmetric_memory import GlobalSymmetricMemoryBuffer, StoredOutput, symmetric_buffer_of
from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import ParamLayout, balanced_range, balanced_sizes
from shardwise.kernels.norms import fused_reduce_norm_, runs_fused
from shardwise.nn.column import ColumnLinear
from shardwise.nn.linear import LinearParallelism
from shardwise.nn.norm import Normalization, NormFunction
from shardwise.nn.row import RowLinear

M = TypeVar("M", bound=nn.Module)


def sharing(module: nn.Module, kind: type[M], **attributes: Any) -> M:
    """Return a module of class ``kind`` that shares the parameters, buffers and children of ``module``.

    ``__init__`` is not called. ``attributes`` override those of ``module``, which is not modified.
    """
    view = kind.__new__(kind)
    # The new module has separate containers of parameters, children and hooks; their entries are shared.
    vars(view).update(
        (name, value.copy() if isinstance(value, dict | set) else value) for name, value in vars(module).items()
    )
    for name, value in attributes.items():
        setattr(view, name, value)
    view.training = False
    return view


def _check_input(input_: Tensor, weight: Tensor) -> None:
    """Raise before any communication if the input would make a later step fail."""
    if input_.dim() < 2:
        raise ShardingError(f"the input has shape {list(input_.shape)}; give it a sequence and features, [s, ..., i]")
    if input_.dtype != weight.dtype and not torch.is_autocast_enabled(input_.device.type):
        raise ConfigError(
            f"the input is {input_.dtype} and the layer's weight {weight.dtype}; convert one of them, with .to(dtype)"
        )
    if not input_.dtype.is_floating_point:
        raise ConfigError(f"the layer's weight is {weight.dtype}; inference layers take floating-point numbers")


class InferenceColumnLinear(ColumnLinear):
    """``ColumnLinear`` without gradient.

    Attributes:
        skip_norm_and_all_gather: whether to take the whole normed input that the previous row-parallel layer, in fused
            mode, left in symmetric memory. ``input_`` is then the output of that layer. No effect on one rank.
    """

    skip_norm_and_all_gather = False

    def _normed(self, input_: Tensor) -> Tensor:
        return input_

    @torch.no_grad()
    def _multiply(
        self,
        input_: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sequence: SequenceView | None = None,
        parallelism: LinearParallelism | None = None,
    ) -> Tensor:
        _check_input(input_, weight)
        if self.group.size() == 1 or not (self._gathers or self.skip_norm_and_all_gather):
            return self._products.linear(self._normed(input_), weight, bias)
        # A subclass that overrides a step accepts only Megatron's arguments.
        given = {} if sequence is None else {"sequence": sequence}
        buffer = self._maybe_allocate_symmetric_buffer(input_, **given)
        whole: Tensor | None = None
        if self.skip_norm_and_all_gather and buffer["handle"] is not None:
            whole = self._left_by_row_layer(input_)
        if whole is None:
            whole = self._all_gather(self._normed(input_), buffer, **given)
        return self._products.linear(whole, weight, bias)

    def _maybe_allocate_symmetric_buffer(self, x: Tensor, *, sequence: SequenceView | None = None) -> dict[str, Any]:
        """Return memory for the whole input, ``{"tensor": [s, b, i], "handle": ...}``; values are None if too small."""
        shape = list(x.shape)
        if self._gathers:
            shape[0] = (sequence or SequenceView.of(x, self.group)).length
        return symmetric_buffer_of(self.group, x.device).maybe_get_tensor(shape, x.dtype)

    def _all_gather(
        self, x: Tensor, symm_mem_buffer: dict[str, Any], *, sequence: SequenceView | None = None
    ) -> Tensor:
        """Gather the whole input ``[s, b, i]`` from the ranks' shards; no-op without sequence parallelism."""
        if not self._gathers:
            return x
        sizes = None if sequence is None else sequence.sizes_to_gather(x)
        return all_gather(x, group=self.group, dim=0, sizes=sizes, buffer=context_of(self.group).buffers)

    @property
    def _gathers(self) -> bool:
        return self.parallelism is LinearParallelism.COLUMN_SEQUENCE

    def _left_by_row_layer(self, input_: Tensor) -> Tensor | None:
        """Return the whole normed input from the previous row-parallel layer; None if it had no memory for it."""
        left = symmetric_buffer_of(self.group, input_.device).take()
        if left is None:
            raise ConfigError(
                "skip_norm_and_all_gather is set, and no row-parallel layer of this group has left a normed input for "
                "this call; give the row-parallel layer before this one the weight of this one's norm, or set "
                "skip_norm_and_all_gather to False"
            )
        self._check_norm(left.weight)
        whole = left.normed
        if whole is None:
            return None
        t, rank = self.group.size(), self.group.rank()
        size = balanced_sizes(whole.size(0), t)[rank] if self._gathers else whole.size(0)
        if (size, *whole.shape[1:]) != tuple(input_.shape) or whole.dtype != input_.dtype:
            raise ShardingError(
                f"the row-parallel layer before this one left a normed input of shape {list(whole.shape)} and "
                f"{whole.dtype}; rank {rank} of {t} is given {list(input_.shape)} of {input_.dtype}: pass what that "
                "layer returned"
            )
        return whole

    def _check_norm(self, weight: Tensor) -> None:
        """Raise ConfigError if the previous row-parallel layer applied a norm with a weight other than this layer's."""


class InferenceNormColumnLinear(InferenceColumnLinear):
    """A norm over the input's features, followed by ``InferenceColumnLinear``.

    Args:
        in_features, out_features, bias: as for ``ColumnLinear``.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        eps: constant added to the variance.
        zero_centered: whether the norm's weight is stored minus 1.
        options: as for ``ColumnLinear``.

    Attributes:
        weight, bias: as for ``ColumnLinear``.
        layer_norm_weight: ``[i]``, whole on every rank.
        layer_norm_bias: ``[i]``, or None for RMSNorm.
        eps, normalization, zero_centered: the arguments.

    Raises:
        ConfigError: ``normalization`` is neither of the two.
    """

    layer_norm_weight: Tensor
    layer_norm_bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: ProcessGroup,
        normalization: Normalization = "LayerNorm",
        eps: float = 1e-5,
        zero_centered: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, group=group, **options)
        self._make_norm(normalization, eps, zero_centered)

    @classmethod
    def of(cls, norm: nn.Module, linear: nn.Module) -> InferenceNormColumnLinear:
        """Return a layer that computes ``linear(norm(x))`` and shares their parameters.

        Raises:
            ConfigError: ``norm`` is not in ``nn.norm.NORMS``, or ``linear`` is not a plain ``ColumnLinear``.
        """
        function = NormFunction.of(norm)
        view = sharing(_plain(linear, ColumnLinear), cls)
        # Plain attributes, because these parameters belong to the norm.
        vars(view).update(
            layer_norm_weight=function.weight,
            layer_norm_bias=function.bias,
            eps=function.eps,
            normalization=function.normalization,
            zero_centered=function.zero_centered,
        )
        return view

    def _make_norm(self, normalization: Normalization, eps: float, zero_centered: bool) -> None:
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise ConfigError(f"normalization is {normalization!r}; it must be 'LayerNorm' or 'RMSNorm'")
        self.normalization, self.eps, self.zero_centered = normalization, eps, zero_centered
        layout = ParamLayout.replicated((self.in_features,), self.group.size())
        ones = nn.init.zeros_ if zero_centered else nn.init.ones_
        self._make_parameter("layer_norm_weight", layout, ones, partial_gradient=self.sequence_parallel)
        bias_layout = None if normalization == "RMSNorm" else layout
        self._make_parameter("layer_norm_bias", bias_layout, nn.init.zeros_, partial_gradient=self.sequence_parallel)

    @property
    def norm(self) -> NormFunction:
        """The norm, for the previous row-parallel layer to apply."""
        return NormFunction(
            self.layer_norm_weight, self.layer_norm_bias, self.eps, self.normalization, self.zero_centered
        )

    def _normed(self, input_: Tensor) -> Tensor:
        return self.norm(input_)

    def _check_norm(self, weight: Tensor) -> None:
        if weight is not self.layer_norm_weight and weight.data_ptr() != self.layer_norm_weight.data_ptr():
            raise ConfigError(
                "the row-parallel layer before this one has applied another norm than this one's; give it this layer's "
                "layer_norm_weight, or set skip_norm_and_all_gather to False"
            )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, normalization={self.normalization}, eps={self.eps}"


class InferenceRowLinear(RowLinear):
    """``RowLinear`` without gradient. In fused mode its one exchange also adds the residual and applies a norm.

    Attributes:
        next_norm: norm of the next column-parallel layer, which puts this layer in fused mode; or None.
        residual: residual of the next call in fused mode only, for callers that cannot pass it to ``forward``.
    """

    next_norm: NormFunction | None = None
    residual: Tensor | None = None

    @classmethod
    def of(cls, linear: nn.Module, **attributes: Any) -> InferenceRowLinear:
        """Return a layer that shares the parameters of ``linear``; ``attributes`` override those of ``linear``.

        Raises:
            ConfigError: ``linear`` is not a plain ``RowLinear``; it has adapters, for example.
        """
        return sharing(_plain(linear, RowLinear), cls, **attributes)

    def forward(
        self, input_: Tensor, residual: Tensor | None = None, *, sequence: SequenceView | None = None
    ) -> Tensor:
        """Apply the layer.

        Args:
            input_: ``[s, b, i/t]``, this rank's features; not modified.
            residual: added to the output, and of its shape; not modified.
            sequence: ignored, because there is no dropout.

        Returns:
            ``[s, b, o]``, the same on every rank; ``[s/t, b, o]`` with sequence parallelism, by the balanced rule. In
            fused mode the output is the new residual, and its whole norm is in the group's symmetric memory.

        Raises:
            ShardingError: the input or the residual does not have the shape that the layer needs.
            ConfigError: their dtype differs from that of the layer, or fused mode has no residual.
        """
        return self._infer(input_, residual, self.bias)

    @torch.no_grad()
    def _infer(self, input_: Tensor, residual: Tensor | None, bias: Tensor | None) -> Tensor:
        if input_.shape[-1:] != (self.local_features,):
            raise self._wrong_width(input_, self.local_features)
        _check_input(input_, self.weight)
        if self.next_norm is not None:
            return self._matmul_reduce_scatter(input_, residual)
        if residual is not None:
            residual = self._checked_residual(input_, residual)
        if self.group.size() == 1:
            output = self._apply_linear(input_, bias)
        else:
            output = self._matmul_reduce_scatter(input_)
            if bias is not None:
                output = output + bias.to(output.dtype)
        return output if residual is None else output + residual

    def _checked_residual(self, input_: Tensor, residual: Tensor | None) -> Tensor:
        if residual is None:
            residual, self.residual = self.residual, None
        if residual is None:
            raise ConfigError(
                "the row-parallel layer has the weight of the next layer's norm, so it adds the residual before that "
                "norm, and there is none; pass it to forward, or call _set_residual before"
            )
        t, rank = self.group.size(), self.group.rank()
        size = balanced_sizes(input_.size(0), t)[rank] if self._scatters else input_.size(0)
        shape = (size, *input_.shape[1:-1], self.out_features)
        if tuple(residual.shape) != shape:
            raise ShardingError(
                f"the residual has shape {list(residual.shape)}; rank {rank} of {t} needs {list(shape)} for an input "
                f"of shape {list(input_.shape)}"
            )
        if residual.dtype != input_.dtype and not torch.is_autocast_enabled(input_.device.type):
            raise ConfigError(f"the residual is {residual.dtype} and the input {input_.dtype}; convert one of them")
        return residual

    @property
    def _scatters(self) -> bool:
        return self.parallelism is LinearParallelism.ROW_SEQUENCE

    def _matmul_reduce_scatter(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute the product and sum it over the ranks; in fused mode, return the new residual, bias included."""
        if self.next_norm is None:
            return self._apply_linear(x, None)
        if self.parallelism is LinearParallelism.LOCAL and self.group.size() > 1:
            raise ConfigError(
                "the layer's output stays a partial sum, which has no norm; leave out the next norm's weight"
            )
        residual = self._checked_residual(x, residual)
        if self.group.size() == 1:
            return self._apply_linear(x, self.bias) + residual
        memory = symmetric_buffer_of(self.group, x.device)
        memory.store(None)
        buffer = memory.maybe_get_tensor((*x.shape[:-1], self.out_features), residual.dtype)
        if buffer["tensor"] is None:
            output = self._apply_linear(x, None) + residual
            memory.store(StoredOutput(None, self.next_norm.weight))
            return output if self.bias is None else output + self.bias.to(output.dtype)
        reduce_and_norm = self._reduce_and_norm
        if self._scatters and self._all_run_fused(memory, buffer["tensor"]):
            reduce_and_norm = self._reduce_and_norm_in_symmetric_memory
        output = reduce_and_norm(x, residual, buffer["tensor"])
        memory.store(StoredOutput(buffer["tensor"], self.next_norm.weight))
        return output

    def _reduce_and_norm(self, x: Tensor, residual: Tensor, out: Tensor) -> Tensor:
        """Return the new residual; write the norm of the whole residual into ``out``."""
        assert self.next_norm is not None
        partial = self._products.linear(x, self.weight).to(residual.dtype)
        # Each row belongs to exactly one rank, so the sum contains residual and bias once.
        start, stop = balanced_range(x.size(0), self.group.size(), self.group.rank())
        own = partial[start:stop]
        own += residual if self._scatters else residual[start:stop]
        if self.bias is not None:
            own += self.bias
        whole = all_reduce(partial, group=self.group, may_overwrite=True)
        out.copy_(self.next_norm(whole))
        return whole[start:stop] if self._scatters else whole

    def _all_run_fused(self, memory: GlobalSymmetricMemoryBuffer, out: Tensor) -> bool:
        """Return whether the kernel runs on every rank. Collective in the first call for a dtype and width."""
        if not memory.is_symmetric or out.numel() == 0 or torch.is_autocast_enabled(out.device.type):
            return False
        key = out.dtype, self.out_features
        if key not in memory.fused:
            memory.fused[key] = all(gather_objects(runs_fused(out), "how to reduce and norm", group=self.group))
        return memory.fused[key]

    def _reduce_and_norm_in_symmetric_memory(self, x: Tensor, residual: Tensor, out: Tensor) -> Tensor:
        """Run ``_reduce_and_norm`` as one kernel. All ranks can access ``out``, which first holds the product."""
        assert self.next_norm is not None
        memory, norm = symmetric_buffer_of(self.group, x.device), self.next_norm
        torch.mm(x.reshape(-1, self.local_features), self.weight.t(), out=out.view(-1, self.out_features))
        start, _ = balanced_range(x.size(0), self.group.size(), self.group.rank())
        first_row = start * x.shape[1:-1].numel()
        weight = norm.whole_weight
        return fused_reduce_norm_(
            memory.handle, memory.addresses, first_row, residual, self.bias, weight, norm.bias, norm.eps
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, exchange={self.exchange}"

    @property
    def exchange(self) -> str:
        """Description of the communication between this layer's product and the next layer's input."""
        if self.group.size() == 1:
            return "none"
        if self.next_norm is None:
            return self.parallelism.value
        # Allocating the memory would be collective, so only look it up.
        memory = context_of(self.group).symmetric_buffers.get(self.weight.device)
        if memory is None:
            return "fused, chosen in the first call"
        runs = self._scatters and memory.fused.get((self.weight.dtype, self.out_features), False)
        return "fused, in symmetric memory" if runs else "fused, one all-reduce"


def _plain(linear: nn.Module, kind: type[M]) -> M:
    if (addition := getattr(linear, "addition", None)) is not None:
        raise ConfigError(
            f"layers for inference have no {addition}, and this model has; merge them into it, or use the training "
            "layers"
        )
    # A subclass that computes as a plain layer says so, for itself alone.
    if not isinstance(linear, kind) or vars(type(linear)).get("computes_as", type(linear)) is not kind:
        raise ConfigError(
            f"an inference layer is made from a {kind.__name__}, and this layer is of another class, "
            f"{type(linear).__name__}; use the training layers for this model"
        )
    return linear
