"""A small state with every kind of layout, of which each value is known, for the tests of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from shardwise.core.sharding import ParamLayout, balanced_range
from shardwise.storage.checkpoint import ParamShard


def layouts(tp: int) -> dict[str, tuple[ParamLayout, torch.dtype]]:
    """Each tensor's layout and dtype at the given tensor-parallel size. Most sizes are divisible by nothing."""
    # Five heads of two rows; a rank holds those that its two of eight query heads need: runs overlap in part.
    heads = [balanced_range(8, tp, rank) for rank in range(tp)]
    overlapping = tuple(((2 * (a * 5 // 8), 2 * ((b - 1) * 5 // 8 + 1)),) for a, b in heads)
    sizes = [1] * (tp - 1) + [11 - (tp - 1)]
    return {
        "embedding.weight": (ParamLayout.split((101, 6), 0, tp), torch.float32),
        "mlp.gate_up.weight": (ParamLayout.split((14, 3), 0, tp, stride=2), torch.bfloat16),
        "mlp.down.weight": (ParamLayout.split((3, 7), 1, tp), torch.float16),
        "explicit.weight": (ParamLayout.split((2, 11, 2), 1, tp, sizes=sizes), torch.float64),
        "kv.weight": (ParamLayout((10, 3), 0, overlapping, tp), torch.float32),
        "fewer.rows.than.ranks": (ParamLayout.split((2, 2), 0, tp), torch.float32),
        "norm.weight": (ParamLayout.replicated((6,), tp), torch.float32),
        "nothing": (ParamLayout.split((0, 4), 0, tp), torch.float32),
        "random.state": (ParamLayout.replicated((7,), tp), torch.uint8),
        "optimizer.step": (ParamLayout.replicated((), tp), torch.int64),
    }


def whole_tensors(seed: int = 0) -> dict[str, Tensor]:
    """The global tensors; no two of their values repeat by chance."""
    whole = {}
    for position, (name, (layout, dtype)) in enumerate(layouts(1).items()):
        generator = torch.Generator().manual_seed(1000 * seed + position)
        values = torch.randint(0, 128, (math.prod(layout.global_shape),), generator=generator)
        whole[name] = values.reshape(layout.global_shape).to(dtype)
    return whole


def full_state(tp: int, rank: int, seed: int = 0) -> dict[str, ParamShard]:
    """``rank``'s part of ``whole_tensors(seed)``."""
    whole = whole_tensors(seed)
    return {
        name: ParamShard(name, layout.take(whole[name], rank).clone(), layout, rank)
        for name, (layout, _) in layouts(tp).items()
    }


def shared_out(state: Mapping[str, ParamShard], dp: int, dp_rank: int) -> dict[str, ParamShard]:
    """What one of ``dp`` ranks that share out a part holds of it; each tensor-parallel rank cuts at other places."""
    result = {}
    for name, shard in state.items():
        flat = shard.data.reshape(-1)
        inner = sorted((7 * (shard.rank + 1) * (k + 1) + flat.numel() // 2) % (flat.numel() + 1) for k in range(dp - 1))
        cuts = [0, *inner, flat.numel()]
        interval = (cuts[dp_rank], cuts[dp_rank + 1])
        result[name] = shard.with_interval(interval, flat[slice(*interval)].clone())
    return result


def empty_state(tp: int, rank: int) -> dict[str, ParamShard]:
    """The same state with other values, to be loaded into."""
    state = full_state(tp, rank)
    for shard in state.values():
        shard.data.fill_(113)
    return state


def assert_states_equal(found: Mapping[str, ParamShard], expected: Mapping[str, ParamShard]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name, shard in expected.items():
        assert found[name].data.dtype == shard.data.dtype
        assert torch.equal(found[name].data, shard.data), name


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """All that the safetensors files of a checkpoint hold, read without Shardwise; no name may be there twice."""
    stored: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        assert not stored.keys() & tensors.keys()
        stored |= tensors
    return stored
