"""A recorded routing is the same at every layout, and runs that replay it are the same at every layout."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from run.tiny_layouts import ONE, VOCAB, trainer_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise.core.errors import ConfigError, DataError, ShardingError, UnwritableError
from shardwise.core.topology import Groups, Topology
from shardwise.data import Batch
from shardwise.doctor import RoutingRecorder, RoutingReplay
from shardwise.run.settings import ParallelSettings, RecomputeSettings
from shardwise.training.trainer import Trainer

STEPS, BATCH, LENGTH = 2, 8, 11
EXPERTS = {"num_layers": 4, "num_experts": 8, "num_experts_per_tok": 3, "expert_ffn_hidden_size": 10}
LAYOUTS: dict[str, tuple[ParallelSettings, RecomputeSettings | None]] = {
    "tp 2, ep 4, recomputed": (
        ParallelSettings(tp=2, ep=4, etp=1, sequence_parallel=True),
        RecomputeSettings(granularity="full"),
    ),
    "tp 2, ep 2, zero": (ParallelSettings(tp=2, ep=2, zero=1), None),
    "cp 2, ep 2": (ParallelSettings(cp=2, ep=2), None),
    "pp 2, ep 2, recomputed": (ParallelSettings(pp=2, ep=2), RecomputeSettings(granularity="full")),
    "pp 2, chunks": (ParallelSettings(pp=2, pipeline_schedule="interleaved", virtual_stages=2), None),
    "ep 2, fsdp": (ParallelSettings(ep=2, fsdp=True), RecomputeSettings(granularity="full")),
}


def trainer(
    folder: Path, layout: str | None = None, *, micro_batch_size: int = 2, seed: int = 1, **model: Any
) -> Trainer:
    parallel, recompute = (ONE, None) if layout is None else LAYOUTS[layout]
    groups = None
    if layout is not None:
        axes = {name: getattr(parallel, name) for name in ("tp", "pp", "cp", "ep", "etp")}
        groups = Groups.of(Topology.create(**axes))
    options: dict[str, Any] = {"dtype": "float64", "micro_batch_size": micro_batch_size, "global_batch_size": BATCH}
    return trainer_of(folder, parallel, recompute, groups=groups, model=EXPERTS | model, seed=seed, **options)


def curve(
    trainer: Trainer, routing: RoutingRecorder | RoutingReplay | None, *, first: int = 0, length: int = LENGTH
) -> Tensor:
    """Losses and norms of steps on random tokens."""
    own = BATCH // trainer.num_sample_ranks
    mine = slice(trainer.sample_rank * own, (trainer.sample_rank + 1) * own)
    results = []
    for step in range(first, first + STEPS):
        ids = torch.randint(VOCAB, (BATCH, length + 1), generator=torch.Generator().manual_seed(step))[mine]
        size = trainer.settings.micro_batch_size(trainer.num_sample_ranks)
        batches = list(map(Batch, ids[:, :-1].split(size), ids[:, 1:].split(size)))
        with nullcontext() if routing is None else routing.step(step):
            result = trainer.step(step, batches)
        results.append((result.loss, result.grad_norm))
    return torch.tensor(results, dtype=torch.float64)


@pytest.mark.sample(3)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_records_and_replays_one_routing(layout, group, tmp_path):
    """Replayed by weights of another seed, whose choices are others."""
    alone = tmp_path / f"alone {group.rank()}"
    recorded = curve(one := trainer(tmp_path), RoutingRecorder(one.model, alone))
    split = trainer(tmp_path, layout)
    own = curve(split, RoutingRecorder(split.model, tmp_path / "split"))
    torch.testing.assert_close(own, recorded, rtol=1e-10, atol=0)
    for step in range(STEPS):
        name = f"step_{step:08d}.safetensors"
        expected, actual = load_file(alone / name), load_file(tmp_path / "split" / name)
        assert set(expected) == {"1", "2", "3", "4", "samples"}
        assert expected["1"].shape == (BATCH, LENGTH, 3)
        for key, tensor in expected.items():
            assert torch.equal(actual[key], tensor), key
    other = trainer(tmp_path, seed=2, micro_batch_size=4)
    replayed = curve(other, RoutingReplay(other.model, tmp_path / "split"))
    assert not torch.allclose(replayed, curve(trainer(tmp_path, seed=2), None), rtol=1e-4)
    split = trainer(tmp_path, layout, seed=2)
    torch.testing.assert_close(curve(split, RoutingReplay(split.model, alone)), replayed, rtol=1e-10, atol=0)


@pytest.mark.ranks(2)
def test_exact_ranks_that_route_the_same_tokens(group, tmp_path):
    found = []
    for tp in (1, 2):
        parallel = ParallelSettings(tp=tp, ep=tp, exact=True, exact_parts=2)
        groups = Groups.of(Topology.create(tp=tp, ep=tp, etp=1))
        groups = groups if tp > 1 else Groups.alone(groups.tp)
        options: dict[str, Any] = {"dtype": "float32", "micro_batch_size": 4, "global_batch_size": BATCH}
        exact = trainer_of(tmp_path, parallel, groups=groups, model=EXPERTS, seed=1, **options)
        folder = tmp_path / ("split" if tp > 1 else f"alone {group.rank()}")
        curve(exact, RoutingRecorder(exact.model, folder), length=10)
        found.append(load_file(folder / "step_00000000.safetensors"))
    assert found[0].keys() == found[1].keys()
    for key, tensor in found[0].items():
        assert torch.equal(found[1][key], tensor), key


@pytest.mark.ranks(2)
def test_padding_on_the_left_keeps_the_places_of_tokens(group, tmp_path):
    """Without context parallelism, a model would move it behind the tokens."""
    ids = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    is_token = torch.arange(LENGTH) >= torch.tensor([[0], [4]])
    found = []
    for parallel, folder in ((ONE, tmp_path / f"{group.rank()}"), (ParallelSettings(cp=2), tmp_path / "cp")):
        groups = None if parallel == ONE else Groups.of(Topology.create(cp=2))
        model = trainer_of(tmp_path, parallel, groups=groups, model=EXPERTS, dtype="float64").model
        with RoutingRecorder(model, folder).step(0):
            model(ids, attention_mask=is_token.long())
        found.append(load_file(folder / "step_00000000.safetensors"))
    for layer in ("1", "4"):
        assert torch.equal(*(each[layer][is_token] for each in found))


@pytest.mark.ranks(2)
def test_samples_that_ranks_cannot_share(group, tmp_path):
    one, folder = trainer(tmp_path), tmp_path / f"{group.rank()}"
    with RoutingRecorder(one.model, folder).step(0):
        one.model(torch.zeros(3, LENGTH, dtype=torch.int64))
    split = trainer_of(tmp_path, groups=Groups.of(Topology.create()), model=EXPERTS)
    replay = RoutingReplay(split.model, folder).step(0)
    with pytest.raises(ConfigError, match="has 3 samples, which 2 data-parallel ranks cannot share"):
        replay.__enter__()


@pytest.mark.ranks(1)
def test_evaluation_is_not_recorded(group, tmp_path):
    model = trainer(tmp_path).model
    ids = torch.randint(VOCAB, (2, LENGTH))
    with RoutingRecorder(model, tmp_path / "routing").step(0):
        model.eval()(ids)
        model.train()(ids[:1])
    assert load_file(tmp_path / "routing" / "step_00000000.safetensors")["2"].shape == (1, LENGTH, 3)


@pytest.mark.ranks(1)
def test_what_cannot_be_recorded_or_replayed(group, tmp_path):
    folder, one = tmp_path / "routing", trainer(tmp_path)
    recorder = RoutingRecorder(one.model, folder)
    curve(one, recorder)
    for size, message in (
        ({"num_experts": 7}, "8 experts, 3 of a token, in layers 1, 2, 3, 4, and this model has 7 experts"),
        ({"num_layers": 3}, "in layers 1, 2, 3, 4, and this model has 8 experts, 3 of a token, in layers 1, 2, 3;"),
    ):
        for kind in (RoutingRecorder, RoutingReplay):
            with pytest.raises(ConfigError, match=message):
                kind(trainer(tmp_path, **size).model, folder)
    with pytest.raises(ConfigError, match="no experts, so there is no routing"):
        RoutingRecorder(trainer_of(tmp_path).model, folder)
    with pytest.raises(ConfigError, match=r"step_00000001\.safetensors exists already; record into another folder"):
        recorder.check_steps(range(1, 3))
    with pytest.raises(DataError, match=r"routing\.json cannot be read"):
        RoutingReplay(one.model, tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(UnwritableError, match="cannot write to"):
        RoutingRecorder(one.model, tmp_path / "file" / "folder")
    replay = RoutingReplay(one.model, folder)
    with pytest.raises(ConfigError, match="no routing of step 2; replay fewer steps"):
        curve(one, replay, first=1)
    ids = torch.randint(VOCAB, (BATCH, LENGTH))

    def replayed(*batches: Tensor, routing: RoutingRecorder | RoutingReplay = replay, step: int = 0) -> None:
        with routing.step(step):
            for tokens in batches:
                one.model(tokens)

    with pytest.raises(ConfigError, match="the tokens of a batch are not those"):
        replayed(ids)
    with pytest.raises(ConfigError, match=r"samples 1 to 8 of a rank, of length 10, and .* of length 11"):
        replayed(ids[:, :-1])
    with pytest.raises(ConfigError, match="samples 1 to 9 of a rank"):
        replayed(ids[[0, *range(8)]])
    with pytest.raises(ConfigError, match=r"had 0 samples on a rank, and the routing in .* is of 8"):
        replayed()
    with pytest.raises(ShardingError, match=r"step 9 has \[2\] samples of lengths \[10, 11\]"):
        replayed(ids[:1], ids[:1, 1:], routing=recorder, step=9)


NO_EXPERTS = "names experts that the model does not have: they are 0 to 7"
TWICE = "has an expert twice for one token"
SHAPE = "layer 3 is .*; it must be integers"
DAMAGE: dict[str, tuple[Any, str]] = {
    "too many": (lambda layer: layer + 6, NO_EXPERTS),
    "negative": (lambda layer: layer.long() - 3, NO_EXPERTS),
    "largest": (lambda layer: torch.full_like(layer, (1 << 63) - 1, dtype=torch.int64), NO_EXPERTS),
    "twice": (lambda layer: layer[..., :1].expand_as(layer), TWICE),
    "twice, not next to each other": (lambda layer: layer[..., [0, 1, 0]], TWICE),
    "zeros": (torch.zeros_like, "has expert 0 twice for a token"),
    "floats": (lambda layer: layer.float(), SHAPE),
    "a column less": (lambda layer: layer[..., :2], SHAPE),
    "one dimension": (lambda layer: layer.flatten(), SHAPE),
    "a scalar": (lambda layer: layer.flatten()[0], SHAPE),
    "shorter": (lambda layer: layer[:, 1:], SHAPE),
    "fewer samples": (lambda layer: layer[1:], SHAPE),
    "none": (lambda layer: None, "it lacks '3'"),
}


def recorded(folder: Path) -> tuple[Trainer, Path]:
    """Return a trainer and a folder with the routing of its steps."""
    one = trainer(folder)
    curve(one, RoutingRecorder(one.model, folder / "routing"))
    return one, folder / "routing"


@pytest.mark.ranks(1)
def test_a_damaged_step(group, tmp_path):
    one, folder = recorded(tmp_path)
    path = folder / "step_00000000.safetensors"
    tensors = load_file(path)
    others = {name: tensor for name, tensor in tensors.items() if name != "3"}
    for change, said in DAMAGE.values():
        layer = change(tensors["3"])
        save_file(others | ({} if layer is None else {"3": layer.contiguous().clone()}), path)
        wanted = rf"step_00000000\.safetensors is damaged: .*{said}.*; record the routing again"
        with pytest.raises(DataError, match=wanted):
            curve(one, RoutingReplay(one.model, folder))


@pytest.mark.ranks(1)
def test_damaged_files(group, tmp_path):
    one, folder = recorded(tmp_path)
    replay = RoutingReplay(one.model, folder)
    first, second = (folder / f"step_{step:08d}.safetensors" for step in (0, 1))
    tensors = load_file(first)
    save_file(tensors | {"samples": tensors["samples"].float()}, first)
    second.write_bytes(b"no")
    for step, said in ((0, "'samples' is F32 of shape"), (1, "truncated or not a safetensors file")):
        with pytest.raises(DataError, match=f"step_0000000{step}.*{said}"):
            replay.step(step).__enter__()
    save_file({name: tensor[:1].clone() for name, tensor in tensors.items()}, first)
    with pytest.raises(ConfigError, match=r"the routing in .* is of 1 a rank"):
        curve(one, replay)
    second.unlink()
    os.mkfifo(second)
    with pytest.raises(DataError, match="named pipe"):
        replay.step(1).__enter__()
    for facts, said in (
        ({"num": 8}, "per_token is missing"),
        ({"num": "x", "per_token": 3, "layers": [1]}, 'num is "x"; it must be an integer'),
        ({"num": 8, "per_token": 3, "layers": 5}, "layers is 5; it must be a list"),
        ({"num": 8, "per_token": 3, "layers": [1, None]}, r"layers\[1\] is null"),
        ({"num": -8, "per_token": 3, "layers": []}, "num is -8"),
    ):
        (folder / "routing.json").write_text(json.dumps(facts))
        with pytest.raises(DataError, match=rf"routing\.json is damaged: its {said}"):
            RoutingReplay(one.model, folder)


@pytest.mark.ranks(1)
def test_experts_are_recorded_in_ascending_order(group, tmp_path):
    _, folder = recorded(tmp_path)
    for layer in ("1", "4"):
        experts = load_file(folder / "step_00000001.safetensors")[layer].int()
        assert (experts.diff(dim=-1) > 0).all()


@pytest.mark.ranks(1)
def test_a_resumed_run_records_its_steps_again(group, tmp_path):
    one, folder = recorded(tmp_path)
    (folder / "step_notes.txt").write_text("not a step")
    recorder = RoutingRecorder(one.model, folder)
    recorder.resume(1)
    assert {path.name for path in folder.iterdir()} == {"routing.json", "step_00000000.safetensors", "step_notes.txt"}
    recorder.check_steps(range(1, 9))
    with pytest.raises(ConfigError, match=r"step_00000000\.safetensors exists already"):
        recorder.check_steps(range(2))
