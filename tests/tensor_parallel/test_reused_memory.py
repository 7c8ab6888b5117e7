"""With sequence parallelism every layer gathers into the same memory, and nothing that is still needed lies there."""

import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_bit_equal
from torch import nn

from shardwise.core.communication.context import context_of
from shardwise.core.initialization import init_method_normal
from shardwise.core.sharding import balanced_sizes
from shardwise.megatron.config import ModelParallelConfig
from shardwise.nn.recompute import recomputed
from shardwise.tensor_parallel import ColumnParallelLinear, RowParallelLinear

HIDDEN, SEQUENCE = 6, 9


class Blocks(nn.Module):
    """Blocks of different widths, so that the shared memory has to grow."""

    def __init__(self, group, widths):
        super().__init__()
        made = {
            "config": ModelParallelConfig(sequence_parallel=True, params_dtype=torch.float64),
            "init_method": init_method_normal(0.3),
            "tp_group": group,
        }
        self.up = nn.ModuleList(ColumnParallelLinear(HIDDEN, width, **made) for width in widths)
        self.down = nn.ModuleList(
            RowParallelLinear(width, HIDDEN, bias=True, input_is_parallel=True, skip_bias_add=False, **made)
            for width in widths
        )

    def forward(self, x, sequence):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(x, sequence_length=sequence)[0]))[0]
        return x


def shard(group, sequence):
    whole = torch.randn(sequence, 2, HIDDEN, dtype=torch.float64)
    return whole.split(balanced_sizes(sequence, group.size()))[group.rank()].requires_grad_()


def gradients(model, x, sequence, between=lambda: None, through=lambda model, *args: model(*args)):
    output = through(model, x, sequence)
    between()
    return torch.autograd.grad(output.square().sum(), [x, *model.parameters()])


@pytest.mark.ranks(2, 3)
def test_one_memory_for_all_layers(group):
    context_of(group).buffers.buffer.clear()
    model = Blocks(group, [5, 8, 11])
    gradients(model, shard(group, SEQUENCE), SEQUENCE)
    (held,) = context_of(group).buffers.buffer.values()
    assert held.numel() == SEQUENCE * 2 * HIDDEN
    pointer = held.data_ptr()
    gradients(model, shard(group, SEQUENCE), SEQUENCE)
    assert next(iter(context_of(group).buffers.buffer.values())).data_ptr() == pointer


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("recompute", [False, True])
def test_other_work_between_forward_and_backward_changes_nothing(group, recompute):
    model, other = Blocks(group, [5, 8]), Blocks(group, [7])
    x, longer = shard(group, SEQUENCE), shard(group, 2 * SEQUENCE)
    expected = gradients(model, x, SEQUENCE)

    def use_the_memory():
        with torch.no_grad():
            other(longer, 2 * SEQUENCE)
        gradients(other, longer, 2 * SEQUENCE)

    through = (lambda model, *args: recomputed(model, *args)) if recompute else (lambda model, *args: model(*args))
    for ours, theirs in zip(gradients(model, x, SEQUENCE, use_the_memory, through), expected, strict=True):
        assert_bit_equal(ours, theirs)
