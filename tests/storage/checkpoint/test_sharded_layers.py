"""What layers say of their parameters is enough to save them at one tensor-parallel size and load them at another."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from checkpoint_states import stored_tensors
from harness.parity import assert_bit_equal
from torch import nn

from shardwise.core.errors import CheckpointError
from shardwise.core.sharded_state import sharded_state_dict
from shardwise.core.sharding import ParamLayout
from shardwise.megatron.config import ModelParallelConfig
from shardwise.megatron.utils import make_tp_sharded_tensor_for_checkpoint
from shardwise.storage.checkpoint import load, save
from shardwise.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding


def layers(group, seed):
    """A gated column layer, a row layer and an embedding, of sizes that no group divides."""
    torch.manual_seed(seed)
    config = ModelParallelConfig(params_dtype=torch.float32)
    init = nn.init.normal_
    made = {
        "column": ColumnParallelLinear(7, 26, config=config, init_method=init, stride=2, tp_group=group),
        "row": RowParallelLinear(
            13, 5, config=config, init_method=init, bias=True, input_is_parallel=True, skip_bias_add=False,
            tp_group=group,
        ),
        "embedding": VocabParallelEmbedding(101, 6, init_method=init, config=config, tp_group=group),
    }  # fmt: skip
    with torch.no_grad():
        for layer in made.values():
            for name, param in layer.named_parameters():
                if name == "bias":
                    layout = layer.param_layouts[name]
                    noise = torch.randn(layout.global_shape, generator=torch.Generator().manual_seed(seed))
                    param.copy_(layout.take(noise, group.rank()))
    return made


def state_of(made):
    state = {}
    for name, layer in made.items():
        state |= layer.sharded_state_dict(f"{name}.")
    return state


def embedding(vocab, group):
    config = ModelParallelConfig(params_dtype=torch.float64)
    return VocabParallelEmbedding(vocab, 3, init_method=nn.init.normal_, config=config, tp_group=group)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("tp", "vocab"), [(3, 15), (3, 10), (3, 11), (2, 15), (1, 10), (1, 20)])
def test_a_vocabulary_padded_otherwise(group, tmp_path, tp, vocab):
    """Ten ids padded to 12 at tp 2: what both have is loaded, what else there is stays as it is."""
    groups = {n: dist.new_group(range(n)) for n in (1, 2, 3)}
    path = tmp_path / "step-00000000"
    rows = torch.arange(36.0, dtype=torch.float64).view(12, 3)
    if group.rank() < 2:
        saved = embedding(12, groups[2])
        with torch.no_grad():
            saved.weight.copy_(saved.param_layouts["weight"].take(rows, group.rank()))
        save(tmp_path, 0, saved.sharded_state_dict("embedding."), group=groups[2])
    dist.barrier(group)
    if group.rank() < tp:
        loaded = embedding(vocab, groups[tp])
        with torch.no_grad():
            loaded.weight.fill_(-1)
        load(path, loaded.sharded_state_dict("embedding."), group=groups[tp])
        expected = torch.full((vocab, 3), -1.0, dtype=torch.float64)
        expected[:12] = rows[:vocab]
        assert_bit_equal(loaded.weight.detach(), loaded.param_layouts["weight"].take(expected, group.rank()))
    dist.barrier(group)


@pytest.mark.ranks(2)
def test_no_other_size_may_differ(group, tmp_path):
    path = save(tmp_path, 0, state_of(layers(group, seed=1)), group=group)
    made = layers(group, seed=2)
    made["row"] = ColumnParallelLinear(
        13, 6, config=ModelParallelConfig(), init_method=nn.init.normal_, tp_group=group
    )  # fmt: skip
    before = made["row"].weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"'row.weight' has shape \[5, 13\] in it, \[6, 13\] here"):
        load(path, state_of(made), group=group)
    assert_bit_equal(made["row"].weight.detach(), before)


@pytest.mark.ranks(2)
def test_sharded_tensors_of_programs(group, tmp_path):
    """``make_tp_sharded_tensor_for_checkpoint``, with layers that programs stack themselves."""
    whole = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1))
    layout = ParamLayout.split((4, 5), 1, 2)

    def entries(values):
        return {
            f"layer {i}": make_tp_sharded_tensor_for_checkpoint(
                values[i], "layers.w", tp_axis=1, prepend_offsets=((0, i, 3),), tp_group=group, sizes=(3, 2)
            )
            for i in range(3)
        }

    parts = [layout.take(layer, group.rank()).contiguous() for layer in whole]
    path = save(tmp_path, 7, entries(parts), group=group)
    stored = stored_tensors(path)
    assert sum(tensor.numel() for tensor in stored.values()) == whole.numel()
    found = [torch.zeros_like(part) for part in parts]
    load(path, entries(found), group=group)
    for value, part in zip(found, parts, strict=True):
        assert_bit_equal(value, part)


@pytest.mark.ranks(2)
def test_a_model_by_its_walk(group, tmp_path):
    """Tensor-parallel layers, a norm, a buffer, and a parameter that two modules share."""

    class Model(nn.Module):
        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.layers = nn.ModuleDict(layers(group, seed))
            self.norm = nn.LayerNorm(5)
            self.head = nn.Linear(5, 3)
            self.tied_head = self.head
            self.register_buffer("scale", torch.randn(()))
            self.register_buffer("scratch", torch.randn(2), persistent=False)

    model, other = Model(1), Model(2)
    path = save(tmp_path, 0, sharded_state_dict(model, "model.", group=group), group=group)
    load(path, sharded_state_dict(other, "model.", group=group), group=group)
    for (name, tensor), wanted in zip(other.state_dict().items(), model.state_dict().values(), strict=True):
        assert_bit_equal(tensor, wanted, name=name)
    assert not torch.equal(other.scratch, model.scratch)
