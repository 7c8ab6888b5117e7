"""Megatron's autograd functions of the moves: ``apply``, and what programs call besides."""

from dataclasses import dataclass

import pytest
import torch
from harness.layouts import GRADIENTS, VALUES, Held, drawn_by_all, taken_by_rank
from harness.parity import assert_bit_equal, assert_unmodified

from shardwise.core.communication.context import GlobalMemoryBuffer
from shardwise.megatron.errors import NotInitializedError
from shardwise.tensor_parallel import regions


@dataclass(frozen=True)
class Move:
    """One row of the table of layouts."""

    function: type
    source: str
    target: str
    dim: int | None = None
    arguments: tuple = ()


MOVES = {
    "copy": Move(regions._CopyToModelParallelRegion, "I", "R"),
    "reduce": Move(regions._ReduceFromModelParallelRegion, "P", "I"),
    "scatter": Move(regions._ScatterToModelParallelRegion, "I", "V", -1),
    "gather": Move(regions._GatherFromModelParallelRegion, "V", "I", -1),
    "scatter sequence": Move(regions._ScatterToSequenceParallelRegion, "I", "V", 0),
    "gather sequence": Move(regions._GatherFromSequenceParallelRegion, "V", "R", 0, (True,)),
    "gather sequence to I": Move(regions._GatherFromSequenceParallelRegion, "V", "I", 0, (False,)),
    "reduce-scatter sequence": Move(regions._ReduceScatterToSequenceParallelRegion, "P", "V", 0),
    "all-gather last": Move(regions._AllGatherFromTensorParallelRegion, "V", "R", -1),
    "reduce-scatter last": Move(regions._ReduceScatterToTensorParallelRegion, "P", "V", -1),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", MOVES)
def test_static_methods_as_programs_call_them(group, name):
    """With a context that has nothing but what the program gave it."""

    class Context:
        group = None
        tensor_parallel_output_grad = name != "gather sequence to I"
        output_split_sizes = None
        input_split_sizes = None

    class BareContext:
        group = None

    Context.group = BareContext.group = group
    move, t, me = MOVES[name], group.size(), group.rank()
    dim = 0 if move.dim is None else move.dim
    shape, sizes = (2 * t, 2 * t), [2] * t
    inputs, together = drawn_by_all(VALUES[move.source], shape, dim, sizes, t)
    gradients, gradient = drawn_by_all(GRADIENTS[move.target], shape, dim, sizes, t)
    expected = taken_by_rank(VALUES[move.target], together, dim, sizes, me).contiguous()
    with assert_unmodified(inputs[me]):
        assert_bit_equal(move.function.symbolic(None, inputs[me], group, *move.arguments), expected)
        assert_bit_equal(move.function.forward(BareContext(), inputs[me], group, *move.arguments), expected)
    # What a context does not say is as the function's default.
    context = Context() if name == "gather sequence to I" else BareContext()
    back = gradient if GRADIENTS[move.source] is Held.SAME else gradient.split(sizes, dim)[me]
    with assert_unmodified(gradients[me]):
        result = move.function.backward(context, gradients[me])
    assert_bit_equal(result[0], back.contiguous())
    # One for each argument that the program knows, as many as it unpacks.
    known = {"gather sequence": 5, "gather sequence to I": 5, "reduce-scatter sequence": 4}.get(name, 2)
    assert result[1:] == (None,) * (known - 1)


@pytest.mark.ranks(2, 3)
def test_all_to_all_and_its_inverse(group):
    t, me = group.size(), group.rank()
    rows = [[(r + 2 * s) % 3 for s in range(t)] for r in range(t)]
    received = [rows[r][me] for r in range(t)]
    every = [torch.randn(sum(rows[r]), 2, dtype=torch.float64) for r in range(t)]
    gradients = [torch.randn(sum(rows[r][s] for r in range(t)), 2, dtype=torch.float64) for s in range(t)]
    x = every[me].clone().requires_grad_()
    with assert_unmodified(x, gradients[me]):
        y = regions._AllToAll.apply(group, x, received, rows[me])
        y.backward(gradients[me])
    assert_bit_equal(y.detach(), torch.cat([every[r].split(rows[r])[me] for r in range(t)]))
    back = [gradients[s].split([rows[r][s] for r in range(t)])[me] for s in range(t)]
    assert_bit_equal(x.grad, torch.cat(back))

    class Context:
        pass

    context = Context()
    equal = torch.randn(2 * t, 3)
    sent = regions._AllToAll.forward(context, group, equal)
    assert_bit_equal(regions._AllToAll.symbolic(None, group, equal), sent)
    assert_bit_equal(regions._AllToAll.backward(context, sent)[1], equal)
    bare = Context()
    bare.group = group
    assert_bit_equal(regions._AllToAll.backward(bare, sent)[1], equal)


@pytest.mark.ranks(2)
def test_a_buffer_may_be_given(group):
    x, buffer = torch.ones(2, 3), GlobalMemoryBuffer()
    for move, arguments in (
        (regions._GatherFromSequenceParallelRegion, (True, None)),
        (regions._ReduceScatterToSequenceParallelRegion, (None,)),
    ):
        with pytest.raises(NotInitializedError, match="model parallelism is not initialised"):
            move.symbolic(None, x, group, *arguments, True)
        held = move.symbolic(None, x, group, *arguments, buffer)
        assert held.data_ptr() == buffer.get_tensor((1,), x.dtype, "mpu").data_ptr()
