"""The block with Shardwise's layers and with PyTorch's DTensor, from the same weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from blocks.problem import Block, Candidate, Problem
from shardwise.core.initialization import Normal
from shardwise.megatron.config import ModelParallelConfig
from shardwise.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, named_param_layouts


class _ShardwiseBlock(nn.Module):
    def __init__(
        self, column: ColumnParallelLinear, between: Callable[[Tensor], Tensor], row: RowParallelLinear
    ) -> None:
        super().__init__()
        self.column = column
        self.between = between
        self.row = row

    def forward(self, x: Tensor) -> Tensor:
        inner, _ = self.column(x)
        output: Tensor = self.row(self.between(inner))[0]
        return output


def make_ours(problem: Problem, group: ProcessGroup, *, sequence_parallel: bool = False) -> Candidate:
    """Create the block with Shardwise's layers."""
    sizes, block = problem.sizes, problem.block
    config = ModelParallelConfig(
        tensor_model_parallel_size=group.size(), sequence_parallel=sequence_parallel, perform_initialization=False
    )
    column = ColumnParallelLinear(
        sizes.hidden_size,
        sizes.column_size(block),
        config=config,
        init_method=Normal(1.0),
        bias=sizes.bias,
        tp_group=group,
    )
    row = RowParallelLinear(
        sizes.row_size(block),
        sizes.hidden_size,
        config=config,
        init_method=Normal(1.0),
        bias=sizes.bias,
        input_is_parallel=True,
        skip_bias_add=False,
        tp_group=group,
    )
    module = _ShardwiseBlock(column, sizes.between(block), row)
    with torch.no_grad():
        for name, param, layout in named_param_layouts(module, group.size()):
            param.copy_(layout.take(problem.weights[name], group.rank()))
    partial = [name for name, param in module.named_parameters() if getattr(param, "sequence_parallel", False)]
    return Candidate(module, problem, group, sequence_parallel=sequence_parallel, partial=partial)


def make_dtensor(problem: Problem, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> Candidate:
    """Create the block with ``parallelize_module`` on plain linear layers, and local tensors between them."""
    sizes = problem.sizes
    module = Block(
        nn.Linear(sizes.hidden_size, sizes.column_size(problem.block), bias=sizes.bias),
        sizes.between(problem.block),
        nn.Linear(sizes.row_size(problem.block), sizes.hidden_size, bias=sizes.bias),
    )
    module.load_state_dict(problem.weights)
    outside = Shard(0) if sequence_parallel else Replicate()
    plan = {"column": ColwiseParallel(input_layouts=outside), "row": RowwiseParallel(output_layouts=outside)}
    parallelize_module(module, mesh, plan)
    return Candidate(module, problem, mesh.get_group(), sequence_parallel=sequence_parallel)
