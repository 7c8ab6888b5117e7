"""Which pieces of a state are written and read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_states import assert_states_equal
from torch.distributed import ProcessGroup

from shardwise.core.errors import CheckpointError
from shardwise.core.sharding import ParamLayout
from shardwise.storage.checkpoint import ParamShard, load, save
from shardwise.storage.checkpoint.storage import tensors_of


def test_entries_that_share_key_and_memory_are_one() -> None:
    layout = ParamLayout.split((6, 2), 0, 2, stride=3)
    weight = torch.zeros(3, 2)
    tied = {name: ParamShard("w", weight, layout, 1) for name in ("embedding", "output")}
    assert len(tensors_of(tied)["w"].pieces()) == 3
    for other in (weight.clone(), weight.as_strided((3, 2), (1, 3))):
        tied["output"] = ParamShard("w", other, layout, 1)
        with pytest.raises(CheckpointError, match=r"entry 'output' and one before it are both .* 'w' at \[1, 0\]"):
            tensors_of(tied)


@pytest.mark.ranks(2)
def test_one_key_for_two_tensors_is_refused_on_every_rank(group: ProcessGroup, tmp_path: Path) -> None:
    rank = dist.get_rank(group)
    layout = ParamLayout.replicated((2,), 2)
    state = {"a": ParamShard("w", torch.zeros(2), layout, rank)}
    if rank == 1:
        state["b"] = ParamShard("w", torch.ones(2), layout, rank)
    with pytest.raises(CheckpointError, match="entry 'b' and one before it are both the part of tensor 'w'"):
        save(tmp_path, 1, state, group=group)
    assert list(tmp_path.iterdir()) == []
    if rank == 1:
        state["b"] = ParamShard("w", torch.ones(2, dtype=torch.float64), layout, rank)
    with pytest.raises(
        CheckpointError, match=r"disagreement about tensor 'w': entry 'b' has torch.float64 .*entry 'a'"
    ):
        save(tmp_path, 1, state, group=group)


@pytest.mark.ranks(3)
def test_layers_stacked_under_one_key(group: ProcessGroup, tmp_path: Path) -> None:
    """Five layers, of which each of two pipeline stages has some, saved at tp 3 and loaded at tp 1 and 2."""
    rank = dist.get_rank(group)
    whole = torch.randn(5, 7, 4, generator=torch.Generator().manual_seed(3))

    def stack(tp: int, tp_rank: int, layers: range, *, empty: bool) -> dict[str, ParamShard]:
        layout = ParamLayout.split((7, 4), 0, tp)
        parts = {i: layout.take(whole[i], tp_rank).clone() for i in layers}
        return {
            f"layers.{i}.w": ParamShard("layers.w", part.zero_() if empty else part, layout, tp_rank, ((0, i, 5),))
            for i, part in parts.items()
        }

    path = save(tmp_path, 1, stack(3, rank, range(5), empty=False), group=group)
    for layers in (range(5), range(3, 5) if rank == 1 else range(3)):
        for tp in (1, 2):
            # One rank holds what two share otherwise; the third has a copy of the first's.
            loaded = stack(tp, rank % tp, layers, empty=True)
            load(path, loaded, group=group)
            assert_states_equal(loaded, stack(tp, rank % tp, layers, empty=False))
    six = {"w": ParamShard("layers.w", torch.zeros(7, 4), ParamLayout.replicated((7, 4), 3), rank, ((0, 5, 6),))}
    with pytest.raises(CheckpointError, match=r"'layers.w' has shape \[5, 7, 4\] in it, \[6, 7, 4\] here"):
        load(path, six, group=group)
