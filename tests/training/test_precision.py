"""Training in 16 bits: fp32 copies keep small steps, and an overflow is skipped by all ranks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal
from run.test_run import interrupted_at, losses, open_tiny
from run.tiny import tiny_settings
from training.test_trainer import batches, curve, make_trainer

from shardwise.core.errors import DivergenceError
from shardwise.core.topology import Topology
from shardwise.data import Batch
from shardwise.run.run import train
from shardwise.storage import checkpoint
from shardwise.training.optimizer.optimizer import MasterWeights


def trainers(folder, dtypes, **options):
    """Of the same initial weights, which all dtypes hold."""
    topology = Topology.create(tp=2)
    made = {
        dtype: make_trainer(
            folder, topology, topology.group("dp"), sequence_parallel=True, architecture="llama", dtype=dtype, **options
        )
        for dtype in dtypes
    }
    for trainer in made.values():
        rounded = made[dtypes[0]].model.parameters()
        for param, other in zip(trainer.model.parameters(), rounded, strict=True):
            param.data.copy_(other.detach().to(torch.bfloat16))
        if isinstance(trainer.optimizer, MasterWeights):
            for param in trainer.model.parameters():
                trainer.optimizer.weight_of(param).copy_(param.detach())
    return made


@pytest.mark.ranks(2)
def test_fp32_copies_keep_the_steps_that_bf16_loses(group, tmp_path):
    """At rates of fine-tuning; distances are those of the weights from those that fp32 gets to, in 200 steps."""
    optimizer = {"learning_rate": 3e-5, "weight_decay": 0.0}
    made = trainers(tmp_path, ("float32", "bfloat16", "pure-bfloat16"), steps=200, optimizer=optimizer)
    distance = {}
    for trainer in made.values():
        curve(trainer)
    for dtype, trainer in made.items():
        kept = (
            [trainer.optimizer.weight_of(param) for param in trainer.model.parameters()]
            if dtype == "bfloat16"
            else [param.detach() for param in trainer.model.parameters()]
        )
        pairs = zip(kept, made["float32"].model.parameters(), strict=True)
        distance[dtype] = torch.stack([(own.float() - other.detach()).norm() for own, other in pairs]).norm()
    assert 0 < distance["bfloat16"] <= 0.2 * distance["pure-bfloat16"], distance


@pytest.mark.sample(1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_loss_curve_is_that_of_fp32_within_rounding(group, tmp_path, dtype):
    made = trainers(tmp_path, ("float32", dtype), steps=20)
    expected, actual = (curve(trainer, micro_batch_size=1)[:, 0] for trainer in made.values())
    assert expected[-1] < expected[0] - 0.2
    assert ((actual - expected) / expected).abs().max() < 5e-3
    param = next(made[dtype].model.parameters())
    assert (param.dtype, param.main_grad.dtype, param.grad) == (getattr(torch, dtype), torch.float32, None)


@pytest.mark.ranks(4)
def test_an_overflow_on_one_rank_is_skipped_by_all_and_the_run_ends_where_fp32_does(group, tmp_path):
    made = trainers(tmp_path, ("float32", "float16"), steps=12)
    exact, trainer = made.values()
    start = [param.detach().clone() for param in exact.model.parameters()]
    last, broken = dist.get_rank() == 3, 2
    weight = trainer.model.decoder.layers[1].mlp.linear_fc1.weight
    for step, (tokens, labels) in enumerate(batches(trainer.settings)):
        handle = None
        if last and step == broken:
            output = trainer.model.decoder.layers[1].mlp.linear_fc2
            handle = output.register_full_backward_hook(lambda *_: (torch.full_like(_[1][0], torch.inf),))
        before = weight.detach().clone()
        rows = slice(trainer.dp_group.rank() * 2, trainer.dp_group.rank() * 2 + 2)
        result = trainer.step(step, [Batch(tokens[rows], labels[rows])])
        assert result.is_skipped == (step == broken)
        assert result.loss_scale == (65536.0 if step <= broken else 32768.0)
        assert torch.equal(weight, before) == (step == broken)
        if handle is not None:
            handle.remove()
        if step != broken:
            exact.step(step, [Batch(tokens[rows], labels[rows])])
    assert trainer.num_skipped == 1
    ends = zip(trainer.model.parameters(), exact.model.parameters(), start, strict=True)
    differences = [(trainer.optimizer.weight_of(param) - end, end - begin) for param, end, begin in ends]
    apart, way = (torch.stack([each.norm() for each in some]).norm() for some in zip(*differences, strict=True))
    assert apart < 0.02 * way


@pytest.mark.ranks(2)
def test_overflows_without_end_stop_the_run(group, tmp_path):
    trainer = trainers(tmp_path, ("float16",), steps=50)["float16"]
    weights = copy.deepcopy(list(trainer.model.parameters()))
    trainer.loss_scale.most_skipped = 3
    trainer.loss_scale.scale = 2.0**80
    with pytest.raises(DivergenceError, match=r"overflow in each of the last 3 steps, now at loss scale 3\.02"):
        curve(trainer)
    for param, before in zip(trainer.model.parameters(), weights, strict=True):
        assert_bit_equal(param, before, name="weights")


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_resumed_run_has_the_same_bits(group, tmp_path, monkeypatch):
    """With two skipped steps before the checkpoint, which count neither for the optimizer nor against the scale."""
    options = {"tp": 2, "dtype": "float16", "steps": 7, "save_every": 4, "asynchronous_saves": False}

    def started(folder, **changes):
        settings = dataclasses.replace(tiny_settings(tmp_path, **options), out=str(tmp_path / folder), **changes)
        session = open_tiny(settings, monkeypatch, tmp_path)
        session.trainer.loss_scale.scale = 2.0**21
        return session

    train(started("whole"))
    broken = started("broken")
    interrupted_at(5, broken)
    dist.barrier(group=group)
    train(started("broken", resume="auto"))
    dist.barrier(group=group)
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert 0 < sum(row["skipped"] for row in rows) < 5
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    meta = checkpoint.read_meta(tmp_path / "whole" / "checkpoints" / "step-00000007")
    assert meta == checkpoint.read_meta(tmp_path / "broken" / "checkpoints" / "step-00000007") | {
        "settings": meta["settings"]
    }


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_runs_go_on_in_another_precision(group, tmp_path, monkeypatch):
    """fp32 weights are kept; where a checkpoint has none, they are made from what it has, and it is said."""
    steps, before = 0, None
    for number, dtype in enumerate(["float32", "bfloat16", "float16", "pure-bfloat16", "bfloat16", "float32"]):
        steps += 2
        settings = tiny_settings(tmp_path, tp=2, dtype=dtype, steps=steps, resume="auto")
        session = open_tiny(settings, monkeypatch, tmp_path)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            train(session)
        dist.barrier(group=group)
        said = "has no fp32 weights: they are made from its bfloat16 ones" in printed.getvalue()
        assert said == (number == 4 and dist.get_rank() == 0), dtype
        changed = f"note   the run was in {before}, and goes on in {dtype} (--training.dtype)" in printed.getvalue()
        assert changed == (number > 0 and dist.get_rank() == 0), dtype
        before = dtype
    assert len(losses(tmp_path / "run")) == steps
