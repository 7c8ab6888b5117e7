"""Which pieces of a tensor a rank writes and reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_states import assert_states_equal, empty_state, full_state
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import ProcessGroup

from shardwise.checkpoint import TensorShard
from shardwise.checkpoint.tensor_shard import segments
from shardwise.errors import ShardingError
from shardwise.sharding import Interval, ParamLayout


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


def test_a_shard_is_seen_with_its_global_shape_and_holds_the_memory_it_was_given() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    shard = TensorShard(weight, ParamLayout.split((5, 2), 0, 2), 0)
    assert (shard.shape, shard.dtype, shard.device.type) == ((5, 2), torch.float32, "cpu")
    shard.local.fill_(7)
    assert torch.equal(weight.detach(), torch.full((3, 2), 7.0))
    assert repr(shard) == "TensorShard(shape=[5, 2], local=[3, 2], dtype=torch.float32, rank=0)"


def test_computing_with_a_shard_is_refused() -> None:
    shard = TensorShard(torch.zeros(3), ParamLayout.split((5,), 0, 2), 0)
    with pytest.raises(NotImplementedError, match="only describes"):
        shard + 1


def test_a_local_tensor_of_another_shape_is_refused() -> None:
    with pytest.raises(ShardingError, match=r"rank 1 should hold shape \[2\] of a tensor of shape \[5\], got \[3\]"):
        TensorShard(torch.zeros(3), ParamLayout.split((5,), 0, 2), 1)
    with pytest.raises(ShardingError, match="rank 2 is not one of the layout's 2 ranks"):
        TensorShard(torch.zeros(2), ParamLayout.split((5,), 0, 2), 2)


@pytest.mark.ranks(1, 3)
def test_pytorchs_own_storage_accepts_shards(group: ProcessGroup, tmp_path: Path) -> None:
    """``dcp.save`` and ``dcp.load`` with all their defaults, not our storage."""
    tp, rank = dist.get_world_size(group), dist.get_rank(group)
    dcp.save(dict(full_state(tp, rank)), checkpoint_id=tmp_path, process_group=group)
    loaded = empty_state(tp, rank)
    dcp.load(dict(loaded), checkpoint_id=tmp_path, process_group=group)
    assert_states_equal(loaded, full_state(tp, rank))
