"""Models of the target ``dtensor``: the dense one with a plan, as PyTorch's tutorial and torchtitan write it.

On a CPU, ``context_parallel`` of PyTorch 2.13 refuses causal attention. Its ring, which it calls on a GPU, takes the
attention to one rank's keys as an argument; here that is the CPU's.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.experimental._context_parallel import _attention as ring, _HeadTailLoadBalancer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from shardwise.conformance.dense import DenseBlock, DenseModel, Sizes
from shardwise.core.topology import Groups


def mesh_of(groups: Groups) -> DeviceMesh:
    """Return the mesh of the tensor-parallel ranks."""
    return DeviceMesh.from_group(groups.tp, "cpu")


def _replicated(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make the parameters of a module that every rank applies to the same tensor DTensors, as torchtitan does."""

    def give(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return (DTensor.from_local(inputs[0], mesh, [Replicate()]),)

    def take(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.to_local()

    distribute_module(module, mesh, input_fn=give, output_fn=take)


def language_model(
    sizes: Sizes, weights: dict[str, Tensor], groups: Groups, *, sequence_parallel: bool = False
) -> nn.Module:
    if groups.tp.size() != dist.get_world_size():
        raise NotImplementedError("tensor parallelism alone")
    model = DenseModel(sizes)
    model.load_state_dict(weights)
    return _parallelized(model, mesh_of(groups), sequence_parallel)


def _parallelized(model: DenseModel, mesh: DeviceMesh, sequence_parallel: bool = False) -> DenseModel:
    sizes, ranks = model.sizes, mesh.size()
    if sizes.tied:
        raise NotImplementedError("tied weights")
    if sizes.heads % ranks or sizes.kv_heads % ranks:
        raise NotImplementedError("heads that the ranks do not divide")
    positions = Shard(1) if sequence_parallel else Replicate()
    column, row = ColwiseParallel(input_layouts=positions), RowwiseParallel(output_layouts=positions)
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=positions),
        "head": ColwiseParallel(input_layouts=positions, output_layouts=Replicate()),
    }
    for number in range(sizes.layers):
        plan |= {f"layers.{number}.{name}": column for name in ("q", "k", "v", "gate", "up")}
        plan |= {f"layers.{number}.{name}": row for name in ("o", "down")}
        if sizes.qk_norm:
            # Their input is split by heads.
            heads = SequenceParallel(sequence_dim=2, use_local_output=True)
            plan |= {f"layers.{number}.{name}": heads for name in ("q_norm", "k_norm")}
    norms = ["norm", *(f"layers.{number}.{name}" for number in range(sizes.layers) for name in ("norm1", "norm2"))]
    if sequence_parallel:
        plan |= {name: SequenceParallel(use_local_output=True) for name in norms}
    else:
        for name in norms:
            _replicated(model.get_submodule(name), mesh)
    parallelize_module(model, mesh, plan)
    return model


class _RingAttention(torch.autograd.Function):
    """Causal attention of this rank's queries ``[b, heads, n, width]`` to the keys of all ranks."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, logsumexp = ring._templated_ring_attention(group, 2, attention, q, k, v, is_causal=True)
        ctx.group = group
        ctx.save_for_backward(q, k, v, output, logsumexp)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, output, logsumexp = ctx.saved_tensors
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return None, *ring._templated_ring_attention_backward(
            ctx.group, 2, attention, grads[0], "grad_out", q, k, v, output, logsumexp, is_causal=True, dropout_p=0.0
        )


class _RingBlock(DenseBlock):
    """A layer for some positions of each sample; the model states them before each forward."""

    def __init__(self, group: ProcessGroup, sizes: Sizes, number: int) -> None:
        super().__init__(sizes, number)
        self.group = group
        self.positions = torch.arange(0)

    def angles(self, s: int, documents: Tensor | None) -> Tensor:
        whole = super().angles(s * self.group.size(), documents)
        return whole[:, self.positions]

    def attended(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        out: Tensor = _RingAttention.apply(self.group, *(each.transpose(1, 2) for each in (q, k, v)))
        return out.transpose(1, 2)


class _ContextModel(nn.Module):
    """A model whose samples are cut as PyTorch cuts them: in halves from both ends, if the ranks divide the halves."""

    def __init__(self, inner: DenseModel, group: ProcessGroup) -> None:
        super().__init__()
        self.inner = inner
        self._mesh = DeviceMesh.from_group(group, "cpu")

    def forward(self, ids: Tensor, labels: Tensor, *masks: Tensor | None) -> tuple[Tensor, Tensor]:
        if any(each is not None for each in masks):
            raise NotImplementedError("documents and padding")
        s, ranks = ids.size(1), self._mesh.size()
        balancer = None if s % (2 * ranks) else _HeadTailLoadBalancer(s, ranks, "cpu")
        cut: Any = ring._context_parallel_shard(self._mesh, [ids, labels, torch.arange(s)], [1, 1, 0], balancer)
        ids, labels, positions = cut
        for layer in self.inner.layers:
            layer.positions = positions
        return self.inner(ids, labels), positions


def context_model(sizes: Sizes, weights: dict[str, Tensor], groups: Groups) -> nn.Module:
    """Make a model with ring attention, whose parameters and gradients FSDP splits over all samples and positions."""
    assert groups.cp is not None
    assert groups.dp is not None
    # Parts of an fp64 softmax are merged in fp32 otherwise.
    ring._cp_options.convert_to_f32 = False
    model = DenseModel(sizes, functools.partial(_RingBlock, groups.cp))
    model.load_state_dict(weights)
    size = groups.tp.size()
    ranks = torch.arange(dist.get_world_size()).view(-1, size)
    mesh = DeviceMesh.from_group([groups.dp, groups.tp], "cpu", ranks, mesh_dim_names=("dp", "tp"))
    if size > 1:
        model = _parallelized(model, mesh["tp"])
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp"])
        # The loss is divided by the labels of all ranks, so that gradients are summed.
        module.set_gradient_divide_factor(1.0)
    return _ContextModel(model, groups.cp)
