"""Runs in pipeline stages go on at other layouts, and prove parity; their steps are in ``test_ten_layouts.py``."""

from __future__ import annotations

import dataclasses

import pytest
import torch.distributed as dist
from run.test_run import interrupted_at, open_tiny
from run.tiny import tiny_settings

from shardwise.core.communication import overlap
from shardwise.core.communication.transports.transport import Pending
from shardwise.core.errors import ParityError
from shardwise.run.banner import banner
from shardwise.run.exact.parity import check_exact_parity
from shardwise.run.metrics import read_metrics
from shardwise.run.parity import check_parity
from shardwise.run.run import train
from shardwise.run.settings import ParallelSettings
from shardwise.training.pipeline import Pipeline


def staged_settings(folder, parallel, **training):
    settings = tiny_settings(
        folder,
        model={"num_layers": 4, "tie_embeddings": True},
        resume="auto",
        dtype="float64",
        **{"steps": 6, "eval_every": 3, **training},
    )
    return dataclasses.replace(settings, parallel=parallel)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_run_goes_on_at_other_stages(group, tmp_path, monkeypatch):
    """Two steps each at pp 2, tp 2, interleaved and as data parallelism: the curve of one run, to rounding."""
    layouts = [
        ParallelSettings(pp=2, pipeline_schedule="zero-bubble"),
        ParallelSettings(tp=2),
        ParallelSettings(pp=2, pipeline_schedule="interleaved", virtual_stages=2),
        ParallelSettings(),
    ]
    whole = dataclasses.replace(staged_settings(tmp_path, ParallelSettings(), steps=8), out=str(tmp_path / "whole"))
    reference = train(open_tiny(whole, monkeypatch, tmp_path))
    numbers = set()
    for done, parallel in zip((2, 4, 6, 8), layouts, strict=True):
        # Saved at 2, 4 and 6 by a run that was to take 8.
        saves = {"save_every": 2, "asynchronous_saves": False}
        session = open_tiny(staged_settings(tmp_path, parallel, steps=8, **saves), monkeypatch, tmp_path)
        numbers.add((session.num_parameters, session.num_trained))
        if done < 8:
            # What was reached at `done` is saved when one more step has found it good.
            interrupted_at(done + 1, session)
        else:
            outcome = train(session)
        dist.barrier(group=group)
    assert len(numbers) == 1
    assert outcome.held_out_bits_per_byte == pytest.approx(reference.held_out_bits_per_byte, rel=1e-9)
    rows = {name: read_metrics(tmp_path / name / "metrics.jsonl") for name in ("run", "whole")}
    for name in ("loss", "grad_norm"):
        curves = {of: [row[name] for row in rows[of]] for of in rows}
        assert len(curves["run"]) == 8
        assert curves["run"] == pytest.approx(curves["whole"], rel=1e-9)
    # One layout measures what another does, also while it trains.
    measured = {
        of: [row["held_out_bits_per_byte"] for row in rows[of] if "held_out_bits_per_byte" in row] for of in rows
    }
    assert measured["run"] == pytest.approx(measured["whole"], rel=1e-9)
    assert len(measured["run"]) == 3


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_parity_is_proved_in_stages_too(group, tmp_path, monkeypatch):
    session = open_tiny(staged_settings(tmp_path, ParallelSettings(pp=2)), monkeypatch, tmp_path)
    settings = dataclasses.replace(session.settings, parallel=ParallelSettings(pp=2, exact_parts=2))
    session = dataclasses.replace(session, settings=settings)
    parity = check_parity(session, steps=2)
    assert parity.line().startswith("tp=1 pp=2 equals tp=1 over 2 steps")
    training = dataclasses.replace(settings.training, dtype="float32")
    narrower = dataclasses.replace(session, settings=dataclasses.replace(settings, training=training))
    assert check_exact_parity(narrower, steps=2).line() == (
        "tp=1 pp=2 has the bits of tp=1 over 2 steps: loss 0 apart, gradient norm 0, updated weights 0"
    )
    assert "tensor parallel 1, 2 stages (1f1b), data parallel 1" in banner(session)
    # A mistake on one stage alone is found.
    if group.rank() == 1:
        monkeypatch.setattr(Pipeline, "run", halved(Pipeline.run))
    with pytest.raises(ParityError, match="more than rounding explains"):
        check_parity(session, steps=2)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_run_that_overlaps_equals_one_rank_and_says_how(group, tmp_path, monkeypatch):
    parallel = ParallelSettings(tp=2, sequence_parallel=True, tp_comm_overlap=True)
    settings = dataclasses.replace(tiny_settings(tmp_path), parallel=parallel)
    session = open_tiny(settings, monkeypatch, tmp_path)
    assert check_parity(session, steps=2).line().startswith("tp=2 equals tp=1 over 2 steps")
    lines = [line for line in banner(session).splitlines() if line.startswith("layers ")]
    assert lines == [
        "layers in parts: column forward, row forward, row backward (symmetric memory is memory of CUDA devices, and "
        "this is a cpu)",
        f"layers in parts: column backward ({dict(session.overlap)['column backward'].why})",
    ]
    # Lose what the other rank adds.
    monkeypatch.setattr(overlap, "multiply_and_scatter", halved_sums(overlap.multiply_and_scatter))
    with pytest.raises(ParityError, match="more than rounding explains"):
        check_parity(session, steps=2)


def halved_sums(multiply_and_scatter):
    """``multiply_and_scatter`` whose sums are of half of their terms."""

    def wrong(*arguments, **options):
        pending = multiply_and_scatter(*arguments, **options)
        return Pending(None, lambda: pending.wait() / 2)

    return wrong


def halved(run):
    """``Pipeline.run`` whose gradients on this stage are wrong."""

    def wrong(self, *arguments, **options):
        result = run(self, *arguments, **options)
        for chunk in self.chunks:
            for param in chunk.parameters():
                if param.grad is not None:
                    param.grad.mul_(0.5)
        return result

    return wrong
