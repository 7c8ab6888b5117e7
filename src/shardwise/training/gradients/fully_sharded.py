"""Shard parameters and gradients over the data-parallel ranks with PyTorch's ``fully_shard``.

Each transformer layer is a unit, and so are the experts of a layer, and an embedding that is not tied to the output
layer. The parameters of a unit are all-gathered before its forward and before its backward, and its gradients are
reduce-scattered after its backward. All other parameters are gathered from the start of a forward to the end of its
backward. Experts are sharded over the ranks that hold the same parts of them, which may be one.

PyTorch cuts the first dim of each tensor-parallel shard into runs of ``ceil(n / ranks)`` rows. The last ranks may hold
fewer rows, or none.

Source: Zhao et al. 2023 (arXiv:2304.11277); Liang et al. 2024 (arXiv:2410.06511), section 2.1.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import Parameter

from shardwise.core.communication.collectives import all_gather, reduce_scatter
from shardwise.core.sharding.balanced import first_row, intervals_of_rows, is_sharded, local_rows, set_group_of_rows_
from shardwise.core.validation import on_host
from shardwise.models.language_model import LanguageModel
from shardwise.models.transformer.layer import TransformerLayer
from shardwise.training.gradients.base import Gradients
from shardwise.training.gradients.parameter_buffers import Division


class FullyShardedModel(Gradients):
    """Shards a model over the data-parallel ranks, and sums its gradients over them.

    Outside of forward and backward, each parameter is a ``DTensor`` with the shape of the tensor-parallel shard, of
    which this rank holds some rows. Its ``grad``, the sum over the ranks, is a ``DTensor`` too. Attributes of a
    parameter are preserved.

    All backward passes of a step except the last run inside ``no_sync()``: there the gradients of whole layers
    accumulate, and only parameters are communicated.

    Args:
        chunks: the model, or a pipeline stage's chunks of it; their parameters are replaced.
        group: the ranks that see different samples; more than one.
        other_groups: other groups that sum gradients, by parameter; for all parameters of a module or none.
        dtype: dtype of stored 16-bit parameters and of gradient sums; forward and backward stay in 16 bits. None keeps
            each parameter's dtype.

    Attributes:
        shards: this rank's rows of each trained parameter, in the same memory.
        replaced: the same, keyed by the parameters before sharding, whose values are freed.
        divisions: elements of each rank, keyed by the parameters before sharding.
    """

    def __init__(
        self,
        chunks: Sequence[LanguageModel],
        *,
        group: ProcessGroup,
        other_groups: Mapping[Parameter, ProcessGroup] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.shards: dict[Parameter, Parameter] = {}
        self.replaced: dict[Parameter, Parameter] = {}
        self.divisions: dict[Parameter, Division] = {}
        self._group, self._other_groups = group, dict(other_groups or {})
        self._dtype = dtype
        self._roots = [self._shard(chunk) for chunk in chunks]
        self._params = [param for chunk in chunks for param in chunk.parameters() if param.requires_grad]

    def _shard(self, chunk: LanguageModel) -> FSDPModule:
        for module in list(chunk.modules()):
            own = next(module.parameters(recurse=False), None)
            if own in self._other_groups:
                self._shard_unit(module, self._other_groups[own])
        units: list[nn.Module] = [module for module in chunk.modules() if isinstance(module, TransformerLayer)]
        if chunk.pre_process and not chunk.share_embeddings_and_output_weights:
            units.append(chunk.get_submodule("embedding"))
        for unit in units:
            self._shard_unit(unit, self._group)
        root = self._shard_unit(chunk, self._group)
        chunk.register_forward_hook(_reshard_without_backward)
        return root

    def _shard_unit(self, unit: nn.Module, group: ProcessGroup) -> FSDPModule:
        before = {name: param for name, param in unit.named_parameters() if not is_sharded(param)}
        device = next(unit.parameters()).device
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        for param in before.values():
            if self._dtype is not None and param.requires_grad and param.dtype != self._dtype:
                policy = MixedPrecisionPolicy(param.dtype, reduce_dtype=self._dtype, cast_forward_inputs=False)
                param.data = param.detach().to(self._dtype)
        sharded = fully_shard(unit, mesh=on_host(DeviceMesh.from_group)(group, device.type), mp_policy=policy)
        for name, param in before.items():
            new = unit.get_parameter(name)
            vars(new).update(vars(param))
            set_group_of_rows_(new, group)
            if param.requires_grad:
                self.shards[new] = self.replaced[param] = Parameter(local_rows(new).detach())
                self.divisions[param] = Division(group, intervals_of_rows(new))
            # Free the memory of the old parameter even if an optimizer still refers to it.
            param.data = torch.empty(0, dtype=param.dtype, device=device)
        # Sum the gradients: the loss is already divided by the number of tokens of the whole batch.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        if device.type == "cpu":
            # PyTorch's base classes are not public, but their required methods are.
            sharded.set_custom_all_gather(cast(Any, _AllGather()))
            sharded.set_custom_reduce_scatter(cast(Any, _ReduceScatter()))
        return sharded

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        for root in self._roots:
            root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for root in self._roots:
                root.set_requires_gradient_sync(True)

    def finish(self) -> None:
        """Do nothing: gradients are complete when the last backward ends."""

    def zero_(self) -> None:
        for param in self._params:
            param.grad = None


def whole_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a model whose parameters are gathered together; the model itself if it is not sharded.

    The parameters of a part are unsharded until the next part is requested. Writes to frozen parameters persist.
    Collective over the data-parallel ranks.
    """
    units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    if not units:
        yield model
    # Nested units come first.
    for unit in reversed(units):
        assert isinstance(unit, nn.Module)
        shards = {name: param for name, param in unit.named_parameters() if is_sharded(param)}
        unit.unshard()
        try:
            yield unit
            for name, param in shards.items():
                whole, rows = unit.get_parameter(name), local_rows(param)
                if not param.requires_grad and not is_sharded(whole):
                    rows.copy_(whole.detach().narrow(0, first_row(param), rows.size(0)))
        finally:
            unit.reshard()


def _reshard_without_backward(module: Any, inputs: Any, output: Any) -> None:
    # If a backward follows, its end reshards the model.
    if not torch.is_grad_enabled():
        module.reshard()


class _Collective:
    """Our collectives for FSDP on CPU ranks; they use shared memory and report the ranks that they wait for."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        all_gather(input_tensor, group=group, buffer=output_tensor)


class _ReduceScatter(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM
        output_tensor.copy_(reduce_scatter(input_tensor, group=group, may_overwrite=True))
