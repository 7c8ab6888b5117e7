"""Each move against its dense formula and its own adjoint, along every dimension."""

import pytest
import torch
from harness.layouts import assert_moves, drawn_moves
from harness.parity import assert_bit_equal
from hypothesis import given, settings

from shardwise.core.communication import moves
from shardwise.core.errors import ShardingError

ALONG = {move.__name__: move for move in (moves.scatter, moves.gather, moves.gather_for_parts, moves.reduce_scatter)}
WHOLE = {move.__name__: move for move in (moves.copy, moves.reduce)}


def test_the_table_of_moves():
    """What the two tests below compare with the values that really flow."""
    table = {name: (move.source.kind, move.target.kind) for name, move in (ALONG | WHOLE).items()}
    assert table == {
        "copy": ("I", "R"),
        "reduce": ("P", "I"),
        "scatter": ("I", "V"),
        "gather": ("V", "I"),
        "gather_for_parts": ("V", "R"),
        "reduce_scatter": ("P", "V"),
    }
    # A gradient goes back through the adjoint move.
    for move in (ALONG | WHOLE).values():
        kinds = (move.target.gradient.kind, move.source.gradient.kind)
        assert kinds in {*table.values(), ("I", "I")}


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("name", ALONG)
@settings(max_examples=10)
@given(drawn=drawn_moves())
def test_a_move_along_a_dimension(group, name, dim, drawn):
    move = ALONG[name]
    layouts = move.source.kind, move.target.kind
    assert_moves(lambda x, sizes: move(x, dim=dim, group=group, sizes=sizes), *layouts, drawn, dim=dim, group=group)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", WHOLE)
@settings(max_examples=10)
@given(drawn=drawn_moves())
def test_a_move_of_whole_tensors(group, name, drawn):
    move = WHOLE[name]
    layouts = move.source.kind, move.target.kind
    assert_moves(lambda x, _: move(x, group=group), *layouts, drawn, dim=None, group=group)


@pytest.mark.ranks(2, 3)
def test_all_to_all_and_its_inverse(group):
    t, me = group.size(), group.rank()
    rows = [[(r + 2 * s) % 3 for s in range(t)] for r in range(t)]
    received = [rows[r][me] for r in range(t)]
    x = torch.randn(sum(rows[me]), 2, dtype=torch.float64, requires_grad=True)
    y = moves.all_to_all(x, group=group, output_sizes=received, input_sizes=rows[me])
    y.backward(y.detach())
    # What was sent comes back to where it was.
    assert_bit_equal(x.grad, x.detach())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["copy", *ALONG])
def test_no_activation_is_kept_and_no_second_derivative_given(group, name):
    kept = []
    x = torch.ones(4, 4, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = moves.copy(x, group=group) if name == "copy" else ALONG[name](x, dim=0, group=group)
    assert kept == []
    (gradient,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.ranks(2)
def test_sizes_that_do_not_fit(group):
    x = torch.ones(5, 5)
    for move in (moves.scatter, moves.reduce_scatter):
        with pytest.raises(ShardingError, match=r"sizes \[3, 3\] must be 2 counts, one per rank, that sum to 5"):
            move(x, dim=0, group=group, sizes=[3, 3])
        with pytest.raises(ShardingError, match=r"shape \[5, 5\] has no dimension 2"):
            move(x, dim=2, group=group)
    with pytest.raises(ShardingError, match=r"sizes \[4, 4\] do not fit a shard of 5"):
        moves.gather(x, dim=1, group=group, sizes=[4, 4])
