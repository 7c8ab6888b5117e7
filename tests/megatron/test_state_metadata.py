"""What a program says in ``sharded_state_dict(metadata=)``, and what a checkpoint then has."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.parity import assert_bit_equal

from shardwise import parallel_state
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.storage.checkpoint import load, save
from shardwise.storage.checkpoint.storage import tensors_of


def gpt(seed, tp=1):
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=3, hidden_size=12, num_attention_heads=2, params_dtype=torch.float64, tensor_model_parallel_size=tp
    )
    return GPTModel(config, TransformerLayerSpec(), 23, 8)


def to_write(state):
    """How many pieces this rank offers to write, of each tensor as it is and as a checkpoint gathers them."""
    gathered = tensors_of(state)
    counts = {name: len(shard.__create_write_items__(name, None)) for name, shard in state.items()}
    assert sum(counts.values()) == sum(len(each.__create_write_items__(key, None)) for key, each in gathered.items())
    return counts


@pytest.mark.ranks(2)
def test_the_first_of_the_ranks_that_hold_the_same_writes_it(group, tmp_path):
    parallel_state.initialize_model_parallel()
    copies = parallel_state.get_data_parallel_group(with_context_parallel=True)
    assert copies.size() == 2
    model = gpt(3)
    state = model.sharded_state_dict(metadata={"dp_cp_group": copies})
    assert set(to_write(state).values()) == ({0} if group.rank() else {1})
    assert all(shard.is_replica == (group.rank() > 0) for shard in state.values())
    # As in Megatron, the program finds the group in its own dict.
    metadata = {"other": 1}
    assert to_write(model.sharded_state_dict("", (), metadata)) == to_write(state)
    assert metadata == {"other": 1, "dp_cp_group": copies}
    # Without it each rank offers all, and the planner chooses.
    assert set(to_write(model.sharded_state_dict()).values()) == {1}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    dist.barrier()
    written = {path.name[:3] for path in (tmp_path / "dcp").glob("*.distcp") if path.stat().st_size}
    assert written == {"__0"}
    for folder, read in (
        ("dcp", lambda state: dcp.load(state, checkpoint_id=tmp_path / "dcp")),
        ("own", lambda state: load(save(tmp_path / "own", 1, model.sharded_state_dict(
            metadata={"dp_cp_group": copies}), group=group), state, group=group)),
    ):  # fmt: skip
        other = gpt(4)
        read(other.sharded_state_dict(metadata={"dp_cp_group": copies}))
        for (name, mine), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
            assert_bit_equal(mine.data, theirs.data, name=f"{folder} {name}")


@pytest.mark.ranks(2)
def test_helpers_for_entries_take_the_group_too(group):
    parallel_state.initialize_model_parallel()
    copies, alone = parallel_state.get_data_parallel_group(), parallel_state.get_tensor_model_parallel_group()
    for make in (make_tp_sharded_tensor_for_checkpoint, make_sharded_tensor_for_checkpoint):
        shard = make(torch.ones(3, 2), "x", tp_group=alone, dp_cp_group=copies)
        assert len(shard.__create_write_items__("x", None)) == 1 - group.rank()
        assert len(make(torch.ones(3, 2), "x").__create_write_items__("x", None)) == 1


@pytest.mark.ranks(2)
def test_layers_of_one_kind_are_stacked_if_a_program_says_so(group, tmp_path):
    parallel_state.initialize_model_parallel(2)
    model = gpt(3, tp=2)
    plain = model.sharded_state_dict()
    stacked = model.sharded_state_dict(metadata={"non_homogeneous_layers": False})
    assert stacked.keys() == plain.keys()
    keys = {name: shard.key for name, shard in stacked.items()}
    assert keys["decoder.layers.2.mlp.linear_fc1.weight"] == "decoder.layers.mlp.linear_fc1.weight"
    assert keys["output_layer.weight"] == "output_layer.weight"
    weight = stacked["decoder.layers.2.mlp.linear_fc1.weight"]
    assert weight.sharded_offsets == ((0, 2, 3),)
    assert weight.global_shape == (3, 48, 12)
    folder = save(tmp_path, 1, stacked, group=group)
    other = gpt(4, tp=2)
    load(folder, other.sharded_state_dict(metadata={"non_homogeneous_layers": False}), group=group)
    for (name, mine), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
        assert_bit_equal(mine.data, theirs.data, name=name)
