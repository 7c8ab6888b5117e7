"""``torch.distributed.checkpoint`` by itself, with its own planners and storage, takes what layers return."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_states import assert_states_equal, empty_state, full_state, stored_tensors, whole_tensors
from harness.parity import assert_bit_equal
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from shardwise.core.errors import ShardingError
from shardwise.core.sharding import ParamLayout
from shardwise.storage.checkpoint import ParamShard


def assert_written_once(folder: Path, expected: dict[str, torch.Size]) -> None:
    """Each tensor's stored chunks have as many elements as it has, and each was written by one rank."""
    metadata = FileSystemReader(folder).read_metadata()
    assert {name: tensor.size for name, tensor in metadata.state_dict_metadata.items()} == expected
    for name, tensor in metadata.state_dict_metadata.items():
        assert sum(math.prod(chunk.sizes) for chunk in tensor.chunks) == math.prod(tensor.size), name
    chunks = sum(len(tensor.chunks) for tensor in metadata.state_dict_metadata.values())
    places = {(place.relative_path, place.offset) for place in metadata.storage_data.values()}
    assert len(places) == chunks


@pytest.mark.ranks(3)
def test_any_layout_to_any_layout(group: ProcessGroup, tmp_path: Path) -> None:
    """Balanced, strided, explicit and overlapping shards, replicas, nothing at all, and numbers."""
    rank = dist.get_rank(group)
    groups = {tp: dist.new_group(range(tp)) for tp in (1, 2, 3)}
    for saved_tp in (1, 2, 3):
        folder = tmp_path / str(saved_tp)
        if rank < saved_tp:
            state = full_state(saved_tp, rank)
            dcp.save(state, storage_writer=FileSystemWriter(folder), process_group=groups[saved_tp])
            assert_states_equal(state, full_state(saved_tp, rank))
        dist.barrier(group)
        assert_written_once(folder, {name: tensor.shape for name, tensor in whole_tensors().items()})
        for tp in (1, 2, 3):
            if rank < tp:
                loaded = empty_state(tp, rank)
                dcp.load(loaded, storage_reader=FileSystemReader(folder), process_group=groups[tp])
                assert_states_equal(loaded, full_state(tp, rank))
    dist.barrier(group)


@pytest.mark.ranks(2)
def test_a_nested_state_and_an_asynchronous_save(group: ProcessGroup, tmp_path: Path) -> None:
    """The copy that ``async_save`` makes is of the values at the call, not of those that training writes meanwhile."""
    rank = dist.get_rank(group)
    # The writer makes the copy itself; without one, the default stager does.
    for folder, how in ((tmp_path / "a", {"storage_writer": FileSystemWriter(tmp_path / "a")}), (tmp_path / "b", {})):
        state = {"model": full_state(2, rank), "step": 3}
        saving = dcp.async_save(state, checkpoint_id=folder, process_group=group, **how)
        for shard in state["model"].values():
            shard.data.fill_(5)
        saving.result()
        loaded = {"model": empty_state(2, rank), "step": 0}
        dcp.load(loaded, storage_reader=FileSystemReader(folder), process_group=group)
        assert loaded["step"] == 3
        assert_states_equal(loaded["model"], full_state(2, rank))


@pytest.mark.ranks(2)
def test_hugging_face_storage_takes_one_run_per_rank(group: ProcessGroup, tmp_path: Path) -> None:
    """Consolidated into whole tensors, as that writer offers; and read again into another layout."""
    rank = dist.get_rank(group)
    names = ["embedding.weight", "mlp.down.weight", "explicit.weight", "norm.weight"]
    state = {name: shard for name, shard in full_state(2, rank).items() if name in names}
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True, enable_consolidation=True)
    dcp.save(state, storage_writer=writer, process_group=group)
    dist.barrier(group)
    whole = whole_tensors()
    stored = stored_tensors(tmp_path)
    assert stored.keys() == set(names)
    for name in names:
        assert_bit_equal(stored[name], whole[name], name=name)
    loaded = {name: shard for name, shard in empty_state(2, rank).items() if name in names}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(tmp_path)), process_group=group)
    assert_states_equal(loaded, state)


@pytest.mark.ranks(2)
def test_layers_in_a_stack(group: ProcessGroup, tmp_path: Path) -> None:
    """Each of two stages has one layer of a stack; a stage with several would have to give them one name."""
    rank = dist.get_rank(group)
    whole = ParamLayout.replicated((2, 3), 1)
    state = {"layers.w": ParamShard("layers.w", torch.full((2, 3), float(rank)), whole, 0, ((0, rank, 2),))}
    dcp.save({"model": state}, storage_writer=FileSystemWriter(tmp_path), process_group=group)
    other = {"layers.w": ParamShard("layers.w", torch.full((2, 3), 9.0), whole, 0, ((0, 1 - rank, 2),))}
    dcp.load({"model": other}, storage_reader=FileSystemReader(tmp_path), process_group=group)
    assert_bit_equal(other["layers.w"].data, torch.full((2, 3), float(1 - rank)))
    named = {"layers.0.w": state["layers.w"]}
    with pytest.raises(
        dcp.CheckpointException, match=r"'layers.0.w' is one of several tensors stacked under 'layers.w'"
    ):
        dcp.save(named, storage_writer=FileSystemWriter(tmp_path / "named"), process_group=group)


def test_an_entry_has_a_shape_and_no_values() -> None:
    layout = ParamLayout.split((5, 3), 0, 2)
    part = torch.nn.Parameter(torch.zeros(3, 3, dtype=torch.bfloat16))
    shard = ParamShard("w", part, layout, 0)
    assert (shard.shape, shard.dtype, shard.device) == (torch.Size([5, 3]), torch.bfloat16, torch.device("cpu"))
    assert shard.data is part
    assert not shard.requires_grad
    assert shard == shard
    assert shard != ParamShard("w", part, layout, 0)
    with pytest.raises(ShardingError, match=r"aten.add.Tensor of a ParamShard: .* has no values itself"):
        shard + 1


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings(
    "ignore:`_get_pg_default_device` will be deprecated", "ignore:Multiple backends are registered"
)
def test_what_is_on_the_meta_device_is_allocated(group: ProcessGroup, tmp_path: Path) -> None:
    """As torch.distributed.checkpoint does with other tensors: the filled one stands in the dict."""
    rank = dist.get_rank(group)
    dcp.save(full_state(2, rank), checkpoint_id=tmp_path, process_group=group)
    state = {name: shard.with_data(shard.data.to("meta")) for name, shard in full_state(2, rank).items()}
    dcp.load(state, checkpoint_id=tmp_path, process_group=group)
    assert_states_equal(state, full_state(2, rank))
