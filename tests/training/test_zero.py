"""Optimizer state split over data-parallel ranks: the same training, in less memory, in checkpoints of any layout."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal, assert_close_to
from run.test_run import open_tiny
from run.tiny import tiny_settings
from run.tiny_layouts import ONE, batches_of, curve, trainer_of, whole_weights

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.sharded_state import sharded_state_dict
from shardwise.core.topology import Groups, Topology
from shardwise.run.banner import banner
from shardwise.run.checkpoints import run_state, start_or_resume
from shardwise.run.run import train
from shardwise.run.settings import ParallelSettings, RecomputeSettings
from shardwise.training.optimizer.optimizer import optimizer_state, stored_weights

STEPS = 4
ZERO = ParallelSettings(zero=1)


def made(folder, parallel=ONE, **options):
    """A trainer of micro-batches of one sample; on each rank alone without a layout."""
    return trainer_of(folder, parallel, **{"dtype": "float64", "steps": STEPS, "micro_batch_size": 1} | options)


def assert_trains_alike(trainer, reference, rtol):
    actual, expected = curve(trainer, STEPS), curve(reference, STEPS)
    assert ((actual - expected) / expected).abs().max() <= rtol
    wholes = whole_weights(reference)
    for name, weight in whole_weights(trainer).items():
        assert_close_to(weight, wholes[name], rtol_of_norm=rtol, name=name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_two_ranks_train_as_one(group, tmp_path, name, dtype):
    # The gradient of a key's bias, which gpt has, is nothing but rounding in fp32.
    architecture = "gpt" if dtype == "float64" else "llama"
    options = {"dtype": dtype, "optimizer": {"name": name}, "model": {"architecture": architecture}}
    reference = made(tmp_path, **options)
    trainer = made(tmp_path, ZERO, **options)
    assert_trains_alike(trainer, reference, 1e-10 if dtype == "float64" else 1e-5)


LAYOUTS = {
    "dp 4": (ZERO, {}),
    "tp 2, sequence parallel, copies of a head, tied": (
        dataclasses.replace(ZERO, tp=2, sequence_parallel=True),
        {"model": {"num_query_groups": 1, "hidden_size": 20, "num_heads": 2, "ffn_hidden_size": 13}},
    ),
    "pp 2, tied": (dataclasses.replace(ZERO, pp=2), {}),
    "pp 2 in chunks": (
        dataclasses.replace(ZERO, pp=2, pipeline_schedule="interleaved", virtual_stages=2),
        {"model": {"num_layers": 4}},
    ),
    "tp 2, recomputed, gpt": (
        dataclasses.replace(ZERO, tp=2),
        {"recompute": RecomputeSettings(granularity="full"), "model": {"architecture": "gpt", "tie_embeddings": False}},
    ),
    "tp 2, Muon": (dataclasses.replace(ZERO, tp=2), {"optimizer": {"name": "muon"}}),
    "pp 2, Muon": (dataclasses.replace(ZERO, pp=2), {"optimizer": {"name": "muon"}}),
}


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks_train_as_one(group, tmp_path, layout):
    parallel, options = LAYOUTS[layout]
    reference = made(tmp_path, **options)
    assert_trains_alike(made(tmp_path, parallel, **options), reference, 1e-10)


def elements_of(state):
    return sum(shard.data.numel() for shard in state.values())


@pytest.mark.ranks(4)
def test_state_and_copies_are_split_and_half_of_the_gradients_travels(group, tmp_path):
    """What each rank holds and sends in a step, with and without."""

    def held(parallel, dtype):
        trainer = made(tmp_path, parallel, dtype=dtype, groups=Groups.of(Topology.create()))
        for step, batches in batches_of(trainer, 2):
            with CollectiveCounter() as counter:
                trainer.step(step, batches)
        trainer.wait_for_weights()
        weights = sharded_state_dict(trainer.model, group=trainer.tp_group)
        state, kept = optimizer_state(weights, trainer.optimizer), stored_weights(weights, trainer.optimizer)
        sent = {}
        for launch in counter.launches:
            if launch.num_bytes > 64:
                sent[launch.name] = sent.get(launch.name, 0) + launch.num_bytes
        numbers = torch.tensor([elements_of(state), elements_of(kept), elements_of(weights)])
        dist.all_reduce(numbers, group=group)
        return trainer, elements_of(state), elements_of(kept), numbers.tolist(), sent

    trainer, state, kept, numbers, sent = held(ZERO, "bfloat16")
    whole = sum(param.numel() for param in trainer.model.parameters())
    assert numbers == [2 * whole, whole, 4 * whole]
    padded = sum(bucket.data.numel() for bucket in trainer.gradients.buckets)
    assert padded < 1.05 * whole
    assert state <= 2 * padded / 4
    assert kept <= padded / 4
    assert sent == {"reduce_scatter": 4 * padded, "all_gather": 2 * padded // 4}
    *_, without = held(ParallelSettings(), "bfloat16")
    assert without == {"all_reduce": 4 * padded}


@pytest.mark.ranks(2)
def test_an_overflow_where_one_rank_owns_it_is_skipped_by_all(group, tmp_path):
    trainer = made(tmp_path, ZERO, dtype="float16")
    before = whole_weights(trainer)
    for step, batches in batches_of(trainer, 3):
        if step == 1:
            trained = whole_weights(trainer)
            gradients = trainer.gradients
            finish = gradients.finish

            def overflowing(finish=finish, gradients=gradients):
                finish()
                if dist.get_rank() == 1:
                    bucket = gradients.buckets[0]
                    bucket.own(bucket.data)[0] = float("inf")

            gradients.finish = overflowing
        result = trainer.step(step, batches)
        assert result.is_skipped == (step == 1)
        if step == 1:
            del gradients.finish
            after = whole_weights(trainer)
            assert all(torch.equal(after[name], trained[name]) for name in trained)
            assert any(not torch.equal(after[name], before[name]) for name in before)
        trainer.wait_for_weights()
    assert (trainer.num_skipped, trainer.loss_scale.scale) == (1, 32768.0)


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_fp32_copies_and_tied_stages_are_loaded_bit_for_bit(group, tmp_path, monkeypatch):
    """Saved at tp 2 x dp 2 by owners; loaded by the owners of other layouts and by ranks that hold all."""
    settings = tiny_settings(tmp_path, steps=3, dtype="bfloat16", model={"num_query_groups": 1})
    first = dataclasses.replace(settings, parallel=dataclasses.replace(ZERO, tp=2, sequence_parallel=True))
    saved = open_tiny(first, monkeypatch, tmp_path)
    train(saved)
    expected = whole_weights(saved.trainer)
    dist.barrier(group=group)
    loaded = {}
    for name, parallel in {
        "zero": ZERO,
        "stages": dataclasses.replace(ZERO, pp=2),
        "plain": ParallelSettings(),
    }.items():
        session = open_tiny(dataclasses.replace(settings, resume="auto", parallel=parallel), monkeypatch, tmp_path)
        assert start_or_resume(session)[0] == 3
        weights = whole_weights(session.trainer)
        assert expected.keys() >= weights.keys()
        for key, weight in weights.items():
            assert_bit_equal(weight, expected[key], name=f"{name}: {key}")
        loaded[name] = run_state(session)
    for name in ("zero", "stages"):
        # Each element is written once, also of a weight that two stages have.
        pieces = (view for shard in loaded[name].values() for _, view in shard.written_pieces())
        number = torch.tensor(sum(view.numel() for view in pieces))
        dist.all_reduce(number, group=group)
        assert number == elements_of(loaded["plain"]), name
    assert loaded["zero"].keys() == loaded["plain"].keys()
    for key, shard in loaded["zero"].items():
        start, stop = shard.interval
        assert_bit_equal(shard.data, loaded["plain"][key].data.detach().flatten()[start:stop], name=key)


@pytest.mark.ranks(1)
def test_one_rank_hears_that_it_does_nothing(group, tmp_path, monkeypatch):
    settings = tiny_settings(tmp_path, zero=1, sequence_parallel=True, optimizer={"warmup_steps": 9})
    session = open_tiny(settings, monkeypatch, tmp_path)
    lines = banner(session).splitlines()
    assert "data parallel 1 (--zero 1 does nothing with one data-parallel rank)" in lines[2]
    assert "sequence parallel" not in lines[2]
    assert lines[3] == "note   --sequence-parallel does nothing with one tensor-parallel rank"
    assert lines[4] == (
        "note   the warm-up takes 9 steps and the run 8, so the learning rate stays below 0.01; see "
        "--optimizer.warmup-steps"
    )
    assert lines[-1] == "attn   flash attention"
    assert session.trainer.zero is None


@pytest.mark.ranks(1)
def test_a_run_hears_which_parts_are_whole_on_more_ranks(group, tmp_path, monkeypatch):
    def notes(vocab_size, groups, parts):
        model = {"vocab_size": vocab_size, "num_heads": 8, "num_query_groups": groups, "ffn_hidden_size": 64}
        settings = tiny_settings(tmp_path, model=model, global_batch_size=8)
        parallel = ParallelSettings(exact=True, exact_parts=parts)
        session = open_tiny(dataclasses.replace(settings, parallel=parallel), monkeypatch, tmp_path)
        return [line for line in banner(session).splitlines() if line.startswith("note   --exact")]

    # 301 tokens in 8 parts are 38 five times and 37 three times, and two ranks have 151 and 150 of them.
    assert notes(301, 4, 8) == [
        "note   --exact-parts 8 ties this run to tp 1: other numbers of ranks hold no whole parts; "
        "a new run may take --exact-parts 4 for tp 1 or 2 or 4, --exact-parts 2 for tp 1 or 2"
    ]
    # Eight ranks have a part each, four and two no whole ones.
    (note,) = notes(301, 8, 8)
    assert "ties this run to tp 1 or 8:" in note
    assert notes(301, 4, 4) == notes(304, 4, 8) == notes(301, 1, 8) == []
