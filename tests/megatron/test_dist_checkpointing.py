"""Megatron's save and load: plain values and tensors come back at any layout, and other libraries' folders are told."""

import pytest
import torch
from harness.parity import assert_bit_equal

from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.core.topology import Topology
from shardwise.megatron.dist_checkpointing import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    check_is_distributed_checkpoint,
    load,
    load_common_state_dict,
    load_content_metadata,
    save,
)

WHOLE = torch.arange(24.0).view(3, 8)


def shard(rank, size, data):
    part = WHOLE.view(3, size, 8 // size)[:, rank].clone()
    return ShardedTensor.from_rank_offsets("w", part if data else torch.zeros_like(part), (1, rank, size))


@pytest.mark.ranks(2)
def test_a_state_comes_back_at_another_layout(group, tmp_path):
    folder = tmp_path / "ckpt"
    bias = ShardedTensor.from_rank_offsets("b", torch.ones(2) * 3)
    stacked = ShardedTensor.from_rank_offsets(
        "layers", torch.full((2,), 1.0 + group.rank()), (0, group.rank(), 2), prepend_axis_num=1
    )
    state = {
        "model": {"w": shard(group.rank(), 2, True), "b": bias, "layers": stacked},
        "iteration": 7,
        "schedule": [{"lr": 0.5}, "cosine"],
        "own": LocalNonpersistentObject(object()),
    }
    for _ in range(2):
        # A second one takes the first's place.
        save(state, folder, content_metadata={"of": "a test"})
    assert check_is_distributed_checkpoint(folder)
    assert not check_is_distributed_checkpoint(tmp_path)
    assert load_common_state_dict(folder)["iteration"] == 7
    assert load_content_metadata(folder) == {"of": "a test"}
    # On each rank alone.
    alone, own = Topology.create(tp=1), object()
    wanted = {"model": {"w": shard(0, 1, False)}, "own": LocalNonpersistentObject(own)}
    loaded = load(wanted, folder, process_group=alone.group("tp"))
    assert_bit_equal(loaded["model"]["w"], WHOLE)
    assert (loaded["iteration"], loaded["schedule"], loaded["own"]) == (7, [{"lr": 0.5}, "cosine"], own)
    with pytest.raises(CheckpointError, match="of another model"):
        load(wanted, folder, strict="raise_unexpected", process_group=alone.group("tp"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("metadata.json", "Megatron"),
        (".metadata", "torch.distributed.checkpoint"),
        ("model.safetensors", "Hugging Face"),
    ],
)
def test_a_folder_of_another_library_is_told_on_every_rank(group, tmp_path, name, library):
    (tmp_path / name).touch()
    for act in (load, save):
        with pytest.raises(CheckpointError, match=f"holds a checkpoint of {library}"):
            act({"w": shard(group.rank(), 2, True)}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


@pytest.mark.ranks(2)
def test_what_cannot_be_stored_is_told_on_every_rank(group, tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        load({}, tmp_path)
    # On one rank alone.
    state = {"w": shard(group.rank(), 2, True), "rng": {"cuda": object() if group.rank() else 1}}
    with pytest.raises(CheckpointError, match=r"'rng\.cuda' is a object; give tensors as ShardedTensor"):
        save(state, tmp_path)
    with pytest.raises(CheckpointError, match="'w' is a Tensor"):
        save({"w": torch.ones(2)}, tmp_path)
    with pytest.raises(ConfigError, match="async_sharded_save is True"):
        save({}, tmp_path, async_sharded_save=True)
    with pytest.raises(ConfigError, match="strict is 'log_all'; it must be one of assume_ok_unexpected"):
        load({}, tmp_path, strict="log_all")
    with pytest.raises(ConfigError, match="'rng' would be stored pickled"):
        ShardedObject("rng", object(), (1,), (0,))
    assert list(tmp_path.iterdir()) == []
