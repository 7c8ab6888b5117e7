"""Target ``dtensor``: PyTorch's own ``parallelize_module``, ``loss_parallel``, data parallelism and ring attention."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from shardwise.conformance.dense import IGNORED, Batch, backward_of_mean, num_labels
from shardwise.conformance.dense_checks import Reference
from shardwise.conformance.dense_comparison import Synchronised, summed
from shardwise.conformance.targets.dtensor_models import (
    context_model as context_model,
    language_model as language_model,
    mesh_of,
)
from shardwise.core.topology import Groups

versions: dict[str, str] = {}
uneven = ignored_labels = one_draw = True

_loss_parallel: list[AbstractContextManager[Any]] = []


def start(groups: Groups) -> None:
    # The backward of the loss must be inside the context too.
    _loss_parallel.append(loss_parallel())
    _loss_parallel[0].__enter__()


def stop() -> None:
    _loss_parallel.pop().__exit__(None, None, None)


def sizes(n: int, t: int) -> list[int]:
    """Return the sizes of ``torch.chunk``."""
    each = -(-n // t)
    return [max(min(each, n - rank * each), 0) for rank in range(t)]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.size(1), weight.size(0), bias is not None, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


def column_linear(
    weight: Tensor,
    bias: Tensor | None,
    groups: Groups,
    *,
    gather_output: bool = False,
    sequence_length: int | None = None,
) -> nn.Module:
    style = ColwiseParallel(
        input_layouts=Replicate() if sequence_length is None else Shard(0),
        output_layouts=Replicate() if gather_output else Shard(-1),
    )
    return parallelize_module(_linear(weight, bias), mesh_of(groups), style)


def row_linear(
    weight: Tensor,
    bias: Tensor | None,
    groups: Groups,
    *,
    input_is_parallel: bool = True,
    sequence_length: int | None = None,
) -> nn.Module:
    style = RowwiseParallel(
        input_layouts=Shard(-1) if input_is_parallel else Replicate(),
        output_layouts=Replicate() if sequence_length is None else Shard(0),
    )
    return parallelize_module(_linear(weight, bias), mesh_of(groups), style)


def norm(weight: Tensor, bias: Tensor, groups: Groups) -> nn.Module:
    layer = nn.LayerNorm(weight.numel(), dtype=weight.dtype)
    layer.load_state_dict({"weight": weight, "bias": bias})
    return parallelize_module(layer, mesh_of(groups), SequenceParallel(sequence_dim=0, use_local_output=True))


class _SequenceFirst(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.inner = nn.Embedding(weight.size(0), weight.size(1), dtype=weight.dtype)
        self.inner.load_state_dict({"weight": weight})
        self.transposed = False

    def forward(self, ids: Tensor) -> Any:
        return self.inner(ids.t() if self.transposed else ids)


def embedding(weight: Tensor, groups: Groups, *, sequence_length: int | None = None) -> nn.Module:
    layer = _SequenceFirst(weight)
    layer.transposed = sequence_length is not None
    style = RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Replicate() if sequence_length is None else Shard(0)
    )
    parallelize_module(layer.inner, mesh_of(groups), style)
    return layer


def cross_entropy(logits: Tensor, labels: Tensor, groups: Groups, *, vocab: int) -> Tensor:
    shape = (labels.numel(), vocab)
    split = DTensor.from_local(
        logits.flatten(0, -2), mesh_of(groups), [Shard(-1)], shape=torch.Size(shape), stride=(vocab, 1)
    )
    losses: Any = F.cross_entropy(split, labels.flatten(), ignore_index=IGNORED, reduction="none")
    local: Tensor = losses.to_local() if isinstance(losses, DTensor) else losses
    return local.view(labels.shape)


def _moved(tensor: Tensor, groups: Groups, before: Any, after: Any, gradient: Any = None) -> Tensor:
    moved = DTensor.from_local(tensor, mesh_of(groups), [before]).redistribute(placements=[after])
    return moved.to_local(grad_placements=None if gradient is None else [gradient])


def copy(tensor: Tensor, groups: Groups) -> Tensor:
    return _moved(tensor, groups, Replicate(), Replicate(), Partial())


def reduce(tensor: Tensor, groups: Groups) -> Tensor:
    return _moved(tensor, groups, Partial(), Replicate())


def gather_sequence(tensor: Tensor, groups: Groups) -> Tensor:
    return _moved(tensor, groups, Shard(0), Replicate(), Partial())


def scatter_sequence(tensor: Tensor, groups: Groups) -> Tensor:
    return _moved(tensor, groups, Replicate(), Shard(0))


def reduce_scatter_sequence(tensor: Tensor, groups: Groups) -> Tensor:
    return _moved(tensor, groups, Partial(), Shard(0))


def finalize_gradients(module: nn.Module, groups: Groups) -> None:
    """Do nothing: a gradient that is a partial sum says so in its placement."""


def whole_of(tensor: Tensor) -> Tensor:
    """Return a whole tensor; of a replicated one this rank's values, so that a difference between ranks shows."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    if all(isinstance(each, Replicate) for each in tensor.placements):
        return tensor.to_local().detach().clone()
    return tensor.full_tensor().detach().clone()


def _by_name(module: nn.Module, tensor_of: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    named = module.named_parameters()
    return {name.removeprefix("inner."): whole_of(tensor_of(param)) for name, param in named}


def whole_gradients(module: nn.Module, groups: Groups) -> dict[str, Tensor]:
    return _by_name(module, lambda param: torch.zeros_like(param) if param.grad is None else param.grad)


def whole_parameters(module: nn.Module, groups: Groups) -> dict[str, Tensor]:
    return _by_name(module, lambda param: param.detach())


def number_of(norm: Tensor) -> float:
    """Return a norm, which may be a DTensor, as a number."""
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def grad_norm(module: nn.Module, groups: Groups) -> float:
    return number_of(torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]))


def clip(module: nn.Module, max_norm: float, groups: Groups) -> float:
    return number_of(torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm))


def data_parallel(module: nn.Module, groups: Groups) -> Synchronised:
    ddp = DistributedDataParallel(module, process_group=groups.dp, find_unused_parameters=True, bucket_cap_mb=0.0001)
    return Synchronised(ddp, ddp.no_sync, lambda: None)


def accumulate(model: nn.Module, batches: Sequence[Batch], groups: Groups) -> Tensor:
    assert groups.dp is not None
    return summed(backward_of_mean(model, batches, num_labels(batches, groups)), groups.dp)


class _Optimizer(Reference):
    def num_state_elements(self) -> int:
        kept = [each[name] for each in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return sum((each.to_local() if isinstance(each, DTensor) else each).numel() for each in kept)


def optimizer(model: nn.Module, groups: Groups, *, split_state: bool = False) -> _Optimizer:
    """Make the optimizer. FSDP splits the parameters of a context model, and so the state."""
    return _Optimizer(model)


def seed(seed: int, groups: Groups) -> None:
    torch.manual_seed(seed)


def initial(kind: str, rows: int, columns: int, groups: Groups) -> Tensor:
    weight = torch.empty(rows, columns).normal_()
    if kind == "embedding":
        layer = embedding(weight, groups)
    else:
        layer = (column_linear if kind == "column" else row_linear)(weight, None, groups)
    return whole_parameters(layer, groups)["weight"]
