"""Entries of layers and programs in checkpoints: a vocabulary padded otherwise, and layers that programs stack."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from checkpoint_states import stored_tensors
from harness.parity import assert_bit_equal
from torch import nn

from shardwise.core.sharding import ParamLayout
from shardwise.megatron.config import ModelParallelConfig
from shardwise.megatron.utils import make_tp_sharded_tensor_for_checkpoint
from shardwise.storage.checkpoint import load, save
from shardwise.tensor_parallel.layers import VocabParallelEmbedding


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
