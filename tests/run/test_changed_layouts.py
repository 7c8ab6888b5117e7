"""A run goes on at another layout: its state has the same bits, and its losses are those of the run that went on."""

from __future__ import annotations

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.parity import assert_bit_equal
from run.tiny_layouts import assert_relative, losses_of, state_of, trainer_of
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from shardwise.core.sharded_state import gather_parameter
from shardwise.core.topology import Groups, Topology
from shardwise.run.settings import ParallelSettings
from shardwise.storage import checkpoint

DONE, LEFT = 4, 10
SAVED = ParallelSettings(tp=4, sequence_parallel=True)
LAYOUTS = [ParallelSettings(tp=2, pp=2), ParallelSettings(zero=1), ParallelSettings(tp=2, fsdp=True)]


def assert_holds(trainer, whole, name):
    """Every tensor of the run, weights and what the optimizer keeps, is that part of the whole one."""
    state = state_of(trainer)
    for key, shard in state.items():
        for offset, view in shard.pieces():
            box = tuple(slice(start, start + size) for start, size in zip(offset, view.shape, strict=True))
            assert_bit_equal(view, whole[key][box], name=f"{name}: {key}")
    return state


@pytest.mark.sample(1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_saved_at_one_layout_and_resumed_at_another(group, tmp_path, optimizer):
    options = {"optimizer": {"name": optimizer}, "model": {"num_query_groups": 2}}
    source = trainer_of(tmp_path, SAVED, **options)
    losses_of(source, DONE)
    state = state_of(source)
    whole = {key: gather_parameter(shard.data, shard.layout, group=source.tp_group) for key, shard in state.items()}
    assert all(tensor.any() for tensor in whole.values())
    path = checkpoint.save(tmp_path / "first", DONE, state, {}, group=group)
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "dcp"), process_group=group)
    expected = losses_of(source, LEFT, first=DONE)
    for parallel in LAYOUTS:
        name = str(parallel)
        trainer = trainer_of(tmp_path, parallel, **options)
        if parallel.pp == 2:
            dcp.load(state_of(trainer), storage_reader=FileSystemReader(tmp_path / "dcp"), process_group=group)
            assert_holds(trainer, whole, f"{name} by PyTorch's own")
        checkpoint.load(path, state_of(trainer), group=group)
        trainer.optimizer.set_step_(DONE)
        # What it saves is what it has loaded, for those who go on at the first layout again.
        again = checkpoint.save(tmp_path / "again", DONE, assert_holds(trainer, whole, name), {}, group=group)
        back = trainer_of(tmp_path, SAVED, **options)
        checkpoint.load(again, state_of(back), group=group)
        assert_holds(back, whole, f"{name} and back")
        assert_relative(losses_of(trainer, LEFT, first=DONE), expected, 1e-5, name)

    three = dist.new_group([0, 1, 2])
    alone = Topology.create(tp=1).group("tp")
    if group.rank() < 3:
        trainer = trainer_of(tmp_path, ParallelSettings(tp=3), groups=Groups(tp=three, dp=alone), **options)
        checkpoint.load(path, state_of(trainer), group=three)
        trainer.optimizer.set_step_(DONE)
        assert_holds(trainer, whole, "tp 3")
        assert_relative(losses_of(trainer, LEFT, first=DONE), expected, 1e-5, "tp 3")
    dist.barrier(group=group)
