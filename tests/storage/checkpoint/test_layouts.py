"""Saved from any layout, loaded into any other, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_states import (
    assert_states_equal,
    empty_state,
    full_state,
    layouts,
    shared_out,
    stored_tensors,
    whole_tensors,
)
from torch.distributed import ProcessGroup

from shardwise.core.errors import CheckpointError
from shardwise.core.sharding import ParamLayout
from shardwise.storage.checkpoint import ParamShard, latest, load, read_meta, save, verify

META = {"model": {"hidden_size": 6}, "loss": 0.1, "note": "naïve", "none": None}


@pytest.mark.sample(2)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "saved_tp", [pytest.param(1, marks=pytest.mark.slow), 2, 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_any_layout_to_any_layout(group: ProcessGroup, tmp_path: Path, saved_tp: int) -> None:
    rank = dist.get_rank(group)
    groups = {tp: dist.new_group(range(tp)) for tp in (1, 2, 3, 4)}
    if rank < saved_tp:
        path = save(tmp_path, 100, full_state(saved_tp, rank), META, group=groups[saved_tp])
        assert path == tmp_path / "step-00000100"
    dist.barrier(group)
    path = tmp_path / "step-00000100"
    verify(path)
    for tp in (1, 2, 3, 4):
        if rank < tp:
            loaded = empty_state(tp, rank)
            assert load(path, loaded, group=groups[tp]) == META
            assert_states_equal(loaded, full_state(tp, rank))
    dist.barrier(group)


@pytest.mark.sample(1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("tp", [1, 2])
def test_data_parallel_copies_share_the_writing(group: ProcessGroup, tmp_path: Path, tp: int) -> None:
    rank = dist.get_rank(group)
    path = save(tmp_path, 1, full_state(tp, rank % tp), {}, group=group)
    # Each value of each tensor is stored once, and more ranks than one tensor-parallel group has done it.
    stored = stored_tensors(path)
    assert sum(t.numel() for t in stored.values()) == sum(t.numel() for t in whole_tensors().values())
    assert len(list(path.glob("*.safetensors"))) > tp
    loaded = empty_state(4, rank)
    load(path, loaded, group=group)
    assert_states_equal(loaded, full_state(4, rank))


@pytest.mark.sample(1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("tp", [1, 2])
def test_parts_that_data_parallel_ranks_share_out(group: ProcessGroup, tmp_path: Path, tp: int) -> None:
    """Saved as intervals of elements and loaded as whole parts at any layout; and the other way round."""
    rank = dist.get_rank(group)

    def mine(tp: int, state: dict[str, ParamShard]) -> dict[str, ParamShard]:
        return shared_out(state, 4 // tp, rank // tp)

    path = save(tmp_path, 1, mine(tp, full_state(tp, rank % tp)), META, group=group)
    stored = stored_tensors(path)
    assert sum(t.numel() for t in stored.values()) == sum(t.numel() for t in whole_tensors().values())
    assert len(list(path.glob("*.safetensors"))) == 4
    three = dist.new_group(range(3))
    if rank < 3:
        loaded = empty_state(3, rank)
        load(path, loaded, group=three)
        assert_states_equal(loaded, full_state(3, rank))
        save(tmp_path, 2, full_state(3, rank), META, group=three)
    dist.barrier(group)
    for step in (1, 2):
        for other in {tp, 3 - tp}:
            loaded = mine(other, empty_state(other, rank % other))
            assert load(tmp_path / f"step-{step:08}", loaded, group=group) == META
            assert_states_equal(loaded, mine(other, full_state(other, rank % other)))


@pytest.mark.ranks(3)
def test_files_can_be_read_without_shardwise(group: ProcessGroup, tmp_path: Path) -> None:
    rank = dist.get_rank(group)
    path = save(tmp_path, 1, full_state(3, rank), META, group=group)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    # Put together from names alone, as a stranger would: "name[start:stop, ...]".
    whole = whole_tensors()
    rebuilt = {name: torch.full_like(tensor, 99) for name, tensor in whole.items()}
    for key, tensor in stored_tensors(path).items():
        name, _, box = key.partition("[")
        if not box:
            rebuilt[name] = tensor
            continue
        bounds = [tuple(map(int, part.split(":"))) for part in box.removesuffix("]").split(", ")]
        rebuilt[name][tuple(slice(*bound) for bound in bounds)] = tensor
    for name, tensor in whole.items():
        assert torch.equal(rebuilt[name], tensor), name
    meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    assert (meta["step"], meta["version"], meta["meta"]) == (1, 2, META)
    assert meta["tensors"]["embedding.weight"]["shape"] == [101, 6]
    assert meta["tensors"]["mlp.gate_up.weight"]["dtype"] == "bfloat16"
    layout = dataclasses.asdict(layouts(3)["kv.weight"][0])
    assert meta["tensors"]["kv.weight"]["layout"] == json.loads(json.dumps(layout))


@pytest.mark.ranks(1)
def test_one_rank_stores_each_tensor_under_its_own_name(group: ProcessGroup, tmp_path: Path) -> None:
    path = save(tmp_path, 1, full_state(1, 0), {}, group=group)
    stored = stored_tensors(path)
    whole = whole_tensors()
    assert stored.keys() == whole.keys()
    assert all(torch.equal(stored[name], whole[name]) for name in whole)


def counted_by_the_kernel(name: str, what: str) -> int:
    """A number of ``/proc/self``: bytes read, or kilobytes of memory."""
    lines = Path("/proc/self", name).read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1])


@pytest.mark.ranks(4)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel does not tell")
def test_a_rank_reads_and_holds_no_more_than_it_needs(group: ProcessGroup, tmp_path: Path) -> None:
    """Four ranks load what one saved: runs of rows, of columns, of sections, and a replica, 24 MB in all."""
    rank = dist.get_rank(group)
    shape = (512, 2048)

    def state(tp: int, tp_rank: int) -> dict[str, ParamShard]:
        layouts = {
            "rows": ParamLayout.split(shape, 0, tp),
            "columns": ParamLayout.split(shape, 1, tp, sizes=[2048] if tp == 1 else [511, 513, 512, 512]),
            "more columns": ParamLayout.split(shape, 1, tp),
            "sections": ParamLayout.split(shape, 0, tp, stride=2),
            "more rows": ParamLayout.split((511, 2048), 0, tp),
            "more sections": ParamLayout.split(shape, 0, tp, stride=4),
            "norm": ParamLayout.replicated((2048,), tp),
        }
        whole = {
            name: torch.arange(math.prod(layout.global_shape), dtype=torch.float32).view(layout.global_shape)
            for name, layout in layouts.items()
        }
        return {
            name: ParamShard(name, layout.take(whole[name], tp_rank).clone(), layout, tp_rank)
            for name, layout in layouts.items()
        }

    path = tmp_path / "step-00000001"
    alone = dist.new_group([0])
    if rank == 0:
        save(tmp_path, 1, state(1, 0), {}, group=alone)
    dist.barrier(group)
    # What only a first load does, such as reading code from the disk, is none of its cost.
    small = ParamLayout.replicated((3,), 4)
    first = {"small": ParamShard("small", torch.zeros(3), small, rank)}
    load(save(tmp_path / "small", 1, first, group=group), first, group=group)
    loaded = state(4, rank)
    for part in loaded.values():
        part.data.fill_(-1)
    shard, largest = sum(part.data.nbytes for part in loaded.values()), math.prod(shape) * 4
    read_before = counted_by_the_kernel("io", "rchar")
    # Sets the high-water mark to what is held now.
    Path("/proc/self/clear_refs").write_text("5")
    held_before = counted_by_the_kernel("status", "VmRSS")
    load(path, loaded, group=group)
    grown = 1024 * (counted_by_the_kernel("status", "VmHWM") - held_before)
    read = counted_by_the_kernel("io", "rchar") - read_before
    assert_states_equal(loaded, state(4, rank))
    assert shard <= read < 1.1 * shard
    assert shard + grown < 1.3 * (shard + largest)


@pytest.mark.ranks(2)
def test_views_parameters_and_tied_weights(group: ProcessGroup, tmp_path: Path) -> None:
    """What a real model's state is made of: leaves that require gradients, strided views, two names for one memory."""
    rank = dist.get_rank(group)
    layout = ParamLayout.split((6, 5), 0, 2)
    parameter = torch.nn.Parameter(torch.arange(15.0).reshape(3, 5) + 100 * rank)
    columns = torch.arange(30.0).reshape(5, 6).t()[3 * rank : 3 * rank + 3]
    flat = torch.arange(40.0) + 100 * rank
    state = {
        "embedding": ParamShard("embedding", parameter, layout, rank),
        "output": ParamShard("output", parameter, layout, rank),
        "columns": ParamShard("columns", columns, layout, rank),
        "flat": ParamShard("flat", flat, ParamLayout.split((80,), 0, 2), rank),
        "part of flat": ParamShard("part of flat", flat[20:].view(4, 5), ParamLayout.split((8, 5), 0, 2), rank),
    }
    expected = {name: shard.data.clone() for name, shard in state.items()}
    path = save(tmp_path, 1, state, {}, group=group)
    with torch.no_grad():
        for tensor in (parameter, columns, flat):
            tensor.zero_()
    load(path, state, group=group)
    for name, shard in state.items():
        assert torch.equal(shard.data, expected[name]), name
    assert parameter.requires_grad
    assert torch.equal(parameter.detach(), expected["embedding"])


@pytest.mark.ranks(2)
def test_ranks_may_hold_different_tensors(group: ProcessGroup, tmp_path: Path) -> None:
    rank = dist.get_rank(group)
    layout = ParamLayout.replicated((3,), 1)
    state = {f"stage{rank}.weight": ParamShard(f"stage{rank}.weight", torch.full((3,), float(rank)), layout, 0)}
    path = save(tmp_path, 1, state, {}, group=group)
    other = {f"stage{1 - rank}.weight": ParamShard(f"stage{1 - rank}.weight", torch.full((3,), 9.0), layout, 0)}
    load(path, other, group=group)
    assert torch.equal(other[f"stage{1 - rank}.weight"].data, torch.full((3,), float(1 - rank)))


@pytest.mark.ranks(2)
def test_part_of_a_checkpoint_can_be_loaded(group: ProcessGroup, tmp_path: Path) -> None:
    rank = dist.get_rank(group)
    path = save(tmp_path, 1, full_state(2, rank), META, group=group)
    loaded = empty_state(2, rank)
    del loaded["optimizer.step"], loaded["random.state"]
    load(path, loaded, group=group, allow_extra=True)
    expected = full_state(2, rank)
    assert_states_equal(loaded, {name: expected[name] for name in loaded})


@pytest.mark.ranks(2)
def test_extra_files_belong_to_the_checkpoint(group: ProcessGroup, tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocabulary.txt").write_text("a\nb\n")

    path = save(tmp_path, 1, full_state(2, dist.get_rank(group)), {}, group=group, extra_files=write)
    verify(path)
    recorded = json.loads((path / "meta.json").read_text())["files"]
    assert recorded["tokenizer/vocabulary.txt"]["size"] == 4
    assert recorded.keys() == {
        "config.json", "rank-00000.safetensors", "rank-00001.safetensors", "tokenizer/vocabulary.txt",
    }  # fmt: skip
    assert latest(tmp_path) == path


@pytest.mark.ranks(1)
def test_meta_comes_back_as_json(group: ProcessGroup, tmp_path: Path) -> None:
    meta = {"pair": (1, 2), "pi": math.pi, "large": 2**70}
    path = save(tmp_path, 1, {}, meta, group=group)
    assert read_meta(path) == {"pair": [1, 2], "pi": math.pi, "large": 2**70}
    assert load(path, {}, group=group) == read_meta(path)


@pytest.mark.ranks(2)
def test_numbers_are_converted_where_that_is_asked_for(group: ProcessGroup, tmp_path: Path) -> None:
    rank = dist.get_rank(group)
    whole = torch.linspace(-3, 3, 35, dtype=torch.float64).view(7, 5)
    saved, wanted = ParamLayout.split((7, 5), 0, 2), ParamLayout.split((7, 5), 1, 2)

    def state(layout: ParamLayout, dtype: torch.dtype) -> dict[str, ParamShard]:
        return {"w": ParamShard("w", layout.take(whole, rank).to(dtype).clone(), layout, rank)}

    path = save(tmp_path, 1, state(saved, torch.float32), {}, group=group)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        loaded = {"w": ParamShard("w", torch.zeros(wanted.local_shape(rank), dtype=dtype), wanted, rank)}
        with pytest.raises(CheckpointError, match=f"as torch.float32, here it is {dtype}"):
            load(path, loaded, group=group)
        load(path, loaded, group=group, convert=True)
        assert torch.equal(loaded["w"].data, wanted.take(whole.float().to(dtype), rank))
    counts = {"w": ParamShard("w", torch.zeros(wanted.local_shape(rank), dtype=torch.int64), wanted, rank)}
    with pytest.raises(CheckpointError, match=r"here it is torch\.int64"):
        load(path, counts, group=group, convert=True)
