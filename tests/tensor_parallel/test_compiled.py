"""``torch.compile(fullgraph=True)`` over layers, moves and loss: no graph break, and the numbers of eager mode."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_close_to
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.initialization import init_method_normal
from shardwise.core.sharding import balanced_sizes
from shardwise.megatron.config import ModelParallelConfig
from shardwise.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    mappings,
    vocab_parallel_cross_entropy,
)

# The compiler itself does what these warnings of PyTorch's warn of.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning", "ignore:`torch.jit:DeprecationWarning"
)
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")

HIDDEN, WIDE = 7, 13

OPERATORS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather_into_tensor",
    # On a CPU an exchange and a sum.
    "reduce_scatter": "all_to_all_single",
    "all_to_all": "all_to_all_single",
}


def options(sequence_parallel=False):
    return {
        "config": ModelParallelConfig(sequence_parallel=sequence_parallel, params_dtype=torch.float64),
        "init_method": init_method_normal(0.3),
    }


class Block(nn.Module):
    """Column, GELU, row; sizes that no number of ranks here divides."""

    def __init__(self, group, sequence_parallel):
        super().__init__()
        made = options(sequence_parallel)
        self.up = ColumnParallelLinear(HIDDEN, WIDE, tp_group=group, **made)
        self.down = RowParallelLinear(
            WIDE, HIDDEN, bias=True, input_is_parallel=True, skip_bias_add=False, tp_group=group, **made
        )

    def forward(self, x, sequence_length):
        return self.down(F.gelu(self.up(x, sequence_length=sequence_length)[0]))[0]


def results(function, x, params):
    """Output, input gradient and parameter gradients, under a loss that weighs every element differently."""
    x = x.clone().requires_grad_()
    output = function(x)
    weights = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view(output.shape)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), [x, *params])]


def assert_same(function, x, params, backend="graphs"):
    with CollectiveCounter() as eager_calls:
        expected = results(function, x, params)
    launched = []

    def compiler(graph, inputs):
        names = [str(node.target) for node in graph.graph.nodes if "_c10d_functional." in str(node.target)]
        launched.extend(name.split(".")[1] for name in names if "wait_tensor" not in name)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(
        function, fullgraph=True, backend=aot_autograd(fw_compiler=compiler) if backend == "graphs" else backend
    )
    for ours, theirs in zip(results(compiled, x, params), expected, strict=True):
        assert_close_to(ours, theirs, rtol_of_norm=1e-13)
    if backend == "graphs":
        assert sorted(OPERATORS[call.name] for call in eager_calls.launches) == sorted(launched)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("backend", "sequence_parallel"),
    [
        pytest.param("graphs", False, id="graphs-tp"),
        pytest.param("graphs", True, id="graphs-sp", marks=pytest.mark.slow),
        pytest.param("inductor", False, id="inductor-tp", marks=[pytest.mark.matrix, NEEDS_COMPILER]),
        pytest.param("inductor", True, id="inductor-sp", marks=[pytest.mark.slow, NEEDS_COMPILER]),
    ],
)
def test_a_block_is_one_graph(group, sequence_parallel, backend):
    block = Block(group, sequence_parallel)
    sequence = 9
    x = torch.randn(sequence, 2, HIDDEN, dtype=torch.float64)
    if sequence_parallel:
        x = x.split(balanced_sizes(sequence, 2))[group.rank()]
    assert_same(lambda x: block(x, sequence), x, list(block.parameters()), backend)


@pytest.mark.slow
@pytest.mark.ranks(3)
def test_moves_are_one_graph(group):
    sizes = balanced_sizes(HIDDEN, 3)

    def chain(x):
        x = mappings.copy_to_tensor_model_parallel_region(x, group)
        x = mappings.reduce_from_tensor_model_parallel_region(x * 2, group)
        x = mappings.scatter_to_sequence_parallel_region(x, group)
        x = mappings.gather_from_sequence_parallel_region(x, group=group, output_split_sizes=sizes)
        x = mappings.reduce_scatter_to_sequence_parallel_region(x, group)
        x = mappings.gather_from_sequence_parallel_region(x, False, group=group, output_split_sizes=sizes)
        x = mappings.scatter_to_tensor_model_parallel_region(x, group)
        x = mappings.gather_from_tensor_model_parallel_region(x, group)
        x = mappings.reduce_scatter_last_dim_to_tensor_parallel_region(x, group)
        x = mappings.all_gather_last_dim_from_tensor_parallel_region(x, group)
        return mappings.all_to_all(group, x[:6])

    assert_same(chain, torch.randn(HIDDEN, 6, dtype=torch.float64), [])


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_embedding_and_loss_are_one_graph(group):
    vocabulary = 11
    made = options()
    embedding = VocabParallelEmbedding(vocabulary, HIDDEN, tp_group=group, **made)
    head = ColumnParallelLinear(HIDDEN, vocabulary, bias=False, tp_group=group, **made)
    ids = torch.randint(vocabulary, (2, 5))

    def loss(shift):
        logits, _ = head(embedding(ids).transpose(0, 1) + shift)
        return vocab_parallel_cross_entropy(logits, ids.t().contiguous(), tp_group=group, vocab_size=vocabulary)

    shift = torch.zeros(HIDDEN, dtype=torch.float64)
    assert_same(loss, shift, [*embedding.parameters(), *head.parameters()])
