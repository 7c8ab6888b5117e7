"""One rank's part of a parameter: where its pieces lie in the whole."""

from __future__ import annotations

import pytest
import torch
from harness.parity import assert_bit_equal
from hypothesis import given, strategies as st

from shardwise.core.errors import ShardingError
from shardwise.core.sharding import Interval, ParamLayout, ParamShard, segments


def test_one_rank_holds_one_segment_whatever_the_stride() -> None:
    layout = ParamLayout.split((12, 2), 0, 1, stride=3)
    assert segments(layout, 0) == [(0, 12, 0)]


def test_sections_are_segments_of_their_own() -> None:
    layout = ParamLayout.split((10,), 0, 2, stride=2)
    assert segments(layout, 1) == [(3, 2, 0), (8, 2, 2)]


def test_segments_are_cut_where_another_rank_begins() -> None:
    layout = ParamLayout((6,), 0, (((0, 4),), ((2, 6),)), 2)
    assert segments(layout, 0) == [(0, 2, 0), (2, 2, 2)]
    assert segments(layout, 1) == [(2, 2, 0), (4, 2, 2)]


def test_an_index_held_twice_is_refused() -> None:
    layout = ParamLayout((4,), 0, (((0, 4), (0, 2)),), 1)
    with pytest.raises(ShardingError, match="holds an index twice"):
        segments(layout, 0)


@st.composite
def layouts_with_overlaps(draw: st.DrawFn) -> ParamLayout:
    length = draw(st.integers(1, 12))
    per_rank: list[tuple[Interval, ...]] = []
    for _ in range(draw(st.integers(1, 4))):
        edges = sorted(draw(st.lists(st.integers(0, length), max_size=6)))
        runs = list(zip(edges[::2], edges[1::2], strict=False))
        per_rank.append(tuple(draw(st.permutations(runs))))
    per_rank.append(((0, length),))
    return ParamLayout((length,), 0, tuple(per_rank), len(per_rank))


@given(layouts_with_overlaps())
def test_segments_tell_where_each_local_index_lies_and_never_overlap_in_part(layout: ParamLayout) -> None:
    whole = torch.arange(layout.global_shape[0])
    seen: dict[int, int] = {}
    for rank in range(layout.world_size):
        local = layout.take(whole, rank) if layout.intervals[rank] else whole[:0]
        rebuilt = torch.full_like(local, -1)
        for start, length, local_start in segments(layout, rank):
            rebuilt[local_start : local_start + length] = whole[start : start + length]
            assert seen.setdefault(start, length) == length
        assert torch.equal(rebuilt, local)
    # Each index is in one segment only, of whichever rank.
    assert sum(seen.values()) == layout.global_shape[0]


def test_pieces_are_views_with_their_offsets_in_the_stack():
    weight = torch.nn.Parameter(torch.arange(10.0).reshape(5, 2))
    # Rows 2 to 4 are held by both ranks.
    layout = ParamLayout((6, 2), 0, (((0, 5),), ((2, 6),)), 2)
    shard = ParamShard("w", weight, layout, 0, ((0, 1, 3),))
    assert shard.global_shape == (3, 6, 2)
    first, second = shard.pieces()
    assert (first[0], second[0]) == ((1, 0, 0), (1, 2, 0))
    assert_bit_equal(first[1], weight.detach()[None, :2])
    assert_bit_equal(second[1], weight.detach()[None, 2:])
    second[1].fill_(7)
    assert_bit_equal(weight.detach()[2:], torch.full((3, 2), 7.0))


def test_an_interval_of_a_part_consists_of_pieces_that_the_first_holder_writes():
    # Rank 1 holds rows 2 to 5, of which it shares 2 and 3 with rank 0; of its 12 elements it holds 2 to 11.
    layout = ParamLayout((6, 3), 0, (((0, 4),), ((2, 6),)), 2)
    whole = torch.arange(18.0).view(6, 3)
    shard = ParamShard("w", layout.take(whole, 1), layout, 1, ((0, 1, 2),))
    part = shard.with_interval((2, 11), layout.take(whole, 1).flatten()[2:11].clone())
    assert part.global_shape == (2, 6, 3)
    pieces = dict(part.pieces())
    assert {offset: tuple(view.shape) for offset, view in pieces.items()} == {
        (1, 2, 2): (1, 1, 1),
        (1, 3, 0): (1, 1, 3),
        (1, 4, 0): (1, 1, 3),
        (1, 5, 0): (1, 1, 2),
    }
    for (_, row, column), view in pieces.items():
        assert_bit_equal(view[0], whole[row : row + 1, column : column + view.size(2)])
    assert [offset for offset, _ in part.written_pieces()] == [(1, 4, 0), (1, 5, 0)]
    assert part.with_interval((2, 11), part.data, is_copy=True).written_pieces() == []
    # What every rank has whole the first one writes.
    norm = ParamLayout.replicated((5,), 2)
    for rank in range(2):
        held = ParamShard("n", torch.zeros(2), norm, rank, interval=(3, 5))
        assert [offset for offset, _ in held.pieces()] == [(3,)]
        assert len(held.written_pieces()) == 1 - rank
    # Nothing of a part, and a tensor that has no elements.
    assert ParamShard("n", torch.zeros(0), norm, 0, interval=(3, 3)).pieces() == []
    empty = ParamShard("e", torch.zeros(0), ParamLayout.split((0, 4), 0, 2), 1, interval=(0, 0))
    assert [(offset, tuple(view.shape)) for offset, view in empty.pieces()] == [((0, 0), (0, 4))]
    with pytest.raises(ShardingError, match=r"n: the interval \[3, 6\] does not lie in the 5 elements of rank 0"):
        ParamShard("n", torch.zeros(3), norm, 0, interval=(3, 6))
    with pytest.raises(ShardingError, match=r"n: rank 0 should hold shape \[2\] of \[5\], got \[5\]"):
        ParamShard("n", torch.zeros(5), norm, 0, interval=(3, 5))


def test_what_a_whole_parameter_may_be_loaded_from():
    layout = ParamLayout.split((12, 4), 0, 2)
    part = torch.zeros(6, 4)
    strict = ParamShard("w", part, layout, 0)
    assert strict.accepts((12, 4))
    assert not any(strict.accepts(shape) for shape in [(10, 4), (12, 5), (12,), (2, 12, 4)])
    lenient = ParamShard("w", part, layout, 0, allow_shape_mismatch=True)
    assert lenient.accepts((12, 4))
    assert lenient.accepts((10, 4))
    assert not any(lenient.accepts(shape) for shape in [(12, 5), (10,), (4,), (4, 12), (2, 12, 4), ()])
    stacked = ParamShard("w", part, layout, 0, ((0, 1, 3),), allow_shape_mismatch=True)
    assert stacked.accepts((3, 10, 4))
    assert not any(stacked.accepts(shape) for shape in [(4, 12, 4), (12, 4), (3, 12, 5)])
    # Rows of another number of rows would be of other sections; and what is not split has no such dimension.
    sections = ParamShard("w", part, ParamLayout.split((12, 4), 0, 2, stride=2), 0, allow_shape_mismatch=True)
    whole = ParamShard("w", part, ParamLayout.replicated((6, 4), 2), 0, allow_shape_mismatch=True)
    assert sections.accepts((12, 4))
    assert whole.accepts((6, 4))
    assert not sections.accepts((10, 4))
    assert not whole.accepts((5, 4))


def test_what_cannot_be_is_refused():
    layout = ParamLayout.split((5,), 0, 2)
    with pytest.raises(ShardingError, match=r"w: rank 1 should hold shape \[2\] of \[5\], got \[3\]"):
        ParamShard("w", torch.zeros(3), layout, 1)
    with pytest.raises(ShardingError, match="w: rank 2 is not one of the layout's 2"):
        ParamShard("w", torch.zeros(2), layout, 2)
    twice = ParamShard("w", torch.zeros(6), ParamLayout((4,), 0, (((0, 4), (0, 2)),), 1), 0)
    with pytest.raises(ShardingError, match="holds an index twice"):
        twice.pieces()


def test_its_text_is_short():
    assert "tensor(" not in repr(ParamShard("w", torch.zeros(3), ParamLayout.split((5,), 0, 2), 0))
