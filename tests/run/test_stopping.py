"""A signal waits for the step; what diverged is not saved; nothing after the last checkpoint fails a run."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from run.test_run import losses, open_tiny
from run.tiny import tiny_settings

from shardwise.core.errors import CheckpointError, DivergenceError
from shardwise.run import checkpoint_writer, run
from shardwise.run.checkpoint_writer import finish
from shardwise.run.checkpoints import first_not_finite, run_state
from shardwise.run.metrics import Progress
from shardwise.run.processes import stopping
from shardwise.run.processes.stopping import Interrupted, signals_postponed
from shardwise.run.run import train
from shardwise.run.settings import ParallelSettings
from shardwise.run.unfinished import resume_hint
from shardwise.storage import checkpoint
from shardwise.storage.checkpoint import latest, read_meta


def at_step(trainer, number, act):
    """Have ``act()`` happen while step ``number`` is at work."""
    original = trainer.train_step

    def train_step(step, loader, *hooks):
        if step == number:
            act()
        return original(step, loader, *hooks)

    trainer.train_step = train_step


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_signal_to_one_rank_ends_all_after_the_step_and_nothing_is_lost(group, tmp_path, monkeypatch, number):
    options = {"tp": 2, "model": {"dropout": 0.1}, "steps": 5}
    whole = tiny_settings(tmp_path, **options)
    train(open_tiny(dataclasses.replace(whole, out=str(tmp_path / "whole")), monkeypatch, tmp_path))
    session = open_tiny(whole, monkeypatch, tmp_path)
    if group.rank() == 1:
        at_step(session.trainer, 3, lambda: signal.raise_signal(number))
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as caught:
        train(session)
    assert (caught.value.signal, caught.value.agreed, caught.value.exit_code) == (number, True, 128 + number)
    assert signal.getsignal(number) is before
    assert stopping.current() is None
    newest = latest(session.checkpoints)
    assert newest is not None
    assert newest.name == "step-00000003"
    dist.barrier(group=group)
    train(open_tiny(dataclasses.replace(whole, resume="auto"), monkeypatch, tmp_path))
    dist.barrier(group=group)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "run")) == 5


@pytest.mark.ranks(1)
def test_a_signal_in_the_first_step_or_during_a_save(group, tmp_path, monkeypatch):
    session = open_tiny(tiny_settings(tmp_path), monkeypatch, tmp_path)
    at_step(session.trainer, 0, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Interrupted):
        train(session)
    assert latest(session.checkpoints) is None

    session = open_tiny(tiny_settings(tmp_path, save_every=2), monkeypatch, tmp_path)
    saved = []

    def begin_save(session, step, snapshot):
        saved.append(step)
        pending = original(session, step, snapshot)
        signal.raise_signal(signal.SIGTERM)
        return pending

    original = checkpoint_writer.begin_save
    monkeypatch.setattr(checkpoint_writer, "begin_save", begin_save)
    with pytest.raises(Interrupted):
        train(session)
    # Not another one after a further step, and what was being written is there.
    assert saved == [2]
    newest = latest(session.checkpoints)
    assert newest is not None
    assert newest.name == "step-00000002"


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_the_first_ranks_clock_says_when_to_save(group, tmp_path, monkeypatch):
    """One hour passes in each step there, none on the other rank: every step is saved after the first."""
    session = open_tiny(tiny_settings(tmp_path, tp=2, steps=4, keep_checkpoints=9), monkeypatch, tmp_path)
    clock = iter(range(10**6))
    hour = 3600.0 if group.rank() == 0 else 0.0
    # In this module alone: waits for other ranks go by the real one.
    own = SimpleNamespace(monotonic=lambda: hour * next(clock), perf_counter=time.perf_counter)
    monkeypatch.setattr(run, "time", own)
    train(session)
    steps = sorted(int(path.name[5:]) for path in session.checkpoints.iterdir())
    assert steps == [1, 2, 3, 4]
    assert session.settings.training.save_minutes == 10
    never = open_tiny(tiny_settings(tmp_path, tp=2, steps=3, save_minutes=0, resume="restart"), monkeypatch, tmp_path)
    train(never)
    assert [path.name for path in session.checkpoints.iterdir()] == ["step-00000003"]


def test_a_second_signal_is_not_made_to_wait(monkeypatch):
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append("ended"))
    # However long it takes from one signal to the next here.
    monkeypatch.setattr(stopping, "SAME_REQUEST_SECONDS", math.inf)
    try:
        with signals_postponed() as postponed:
            signal.raise_signal(signal.SIGTERM)
            assert postponed.signum == signal.SIGTERM
            # A terminal and a launcher, or two shells, may both send the one that a user sent.
            signal.raise_signal(signal.SIGTERM)
            assert received == []
            monkeypatch.setattr(stopping, "SAME_REQUEST_SECONDS", 0.0)
            signal.raise_signal(signal.SIGTERM)
            assert received == ["ended"]
            assert stopping.current() is None
            postponed.agreed = True
        # What came too late for a step takes effect at the end.
        with signals_postponed():
            signal.raise_signal(signal.SIGTERM)
        assert received == ["ended", "ended"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signals_that_are_ignored_stay_so_and_other_threads_change_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_postponed() as postponed:
            signal.raise_signal(signal.SIGHUP)
            assert postponed.signum == 0
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    seen = []

    def body():
        with signals_postponed() as postponed:
            seen.append((postponed.signum, stopping.current()))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(0, None)]


def test_a_step_has_its_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    postponed = stopping.Postponed()
    assert not postponed.overdue()
    postponed.receive(signal.SIGTERM)
    now[0] += 24
    assert not postponed.overdue()
    now[0] += 2
    assert postponed.overdue()
    with postponed.unhurried():
        assert not postponed.overdue()
    postponed.step_took(20)
    assert not postponed.overdue()
    now[0] += 40
    assert postponed.overdue()


def test_the_way_on_is_true():
    assert resume_hint(None) == "no checkpoint was saved; run the same command again to start anew"
    assert resume_hint(Path("runs/x/step-00000007")) == (
        "the run stopped at step 7; add --resume auto to its command to go on"
    )


@pytest.mark.sample(2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", ["tp", pytest.param("dp", marks=pytest.mark.slow), "pp"])
@pytest.mark.parametrize("value", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)])
def test_a_gradient_that_is_not_finite_on_one_rank_stops_all_before_the_update(
    group, tmp_path, monkeypatch, where, value
):
    """At step 3, when 2 is the last checkpoint; from it the run goes on to what it would have been."""
    parallel = {"tp": ParallelSettings(tp=2), "dp": ParallelSettings(), "pp": ParallelSettings(pp=2)}[where]
    options = {"steps": 4, "save_every": 2, "optimizer": {"clip_grad_norm": 0.0}}
    settings = dataclasses.replace(tiny_settings(tmp_path, **options), parallel=parallel)
    session = open_tiny(settings, monkeypatch, tmp_path)
    trainer = session.trainer
    params = list(trainer.model.parameters())
    matrix = [param for param in params if param.dim() == 2][-1]
    if group.rank() == 1:

        def spoil():
            matrix.register_hook(lambda grad: torch.full_like(grad, value))

        at_step(trainer, 3, spoil)
    after_two = []

    def remember():
        after_two.extend(param.detach().clone() for param in params)

    at_step(trainer, 3, remember)
    with pytest.raises(DivergenceError) as caught:
        train(session)
    newest = session.checkpoints / "step-00000002"
    assert "norm of the gradient is " in str(caught.value)
    assert f"the last good checkpoint is {newest}; go on from it with --resume auto" in str(caught.value)
    assert all(torch.equal(now, then) for now, then in zip(params, after_two, strict=True))
    dist.barrier(group=group)
    assert latest(session.checkpoints) == newest
    train(open_tiny(dataclasses.replace(settings, resume="auto"), monkeypatch, tmp_path))
    assert len(losses(tmp_path / "run")) == 4


@pytest.mark.ranks(2)
def test_weights_that_are_not_finite_are_never_published(group, tmp_path, monkeypatch):
    """An update may break what a finite gradient did not; here after the last step, on one rank alone."""
    session = open_tiny(tiny_settings(tmp_path, tp=2, steps=2), monkeypatch, tmp_path)
    monkeypatch.setattr(session.trainer, "evaluate", lambda windows: {"held_out_bits_per_byte": 1.0})
    if group.rank() == 1:
        update = session.trainer.optimizer.step

        def spoiling_step():
            update()
            next(iter(session.trainer.model.parameters())).data.view(-1)[-1] = math.inf

        monkeypatch.setattr(session.trainer.optimizer, "step", spoiling_step)
        at_step(session.trainer, 0, lambda: monkeypatch.setattr(session.trainer.optimizer, "step", update))
        at_step(session.trainer, 1, lambda: monkeypatch.setattr(session.trainer.optimizer, "step", spoiling_step))
    with pytest.raises(DivergenceError, match=r"has values that are not finite after 2 steps; no checkpoint was saved"):
        train(session)
    dist.barrier(group=group)
    assert latest(session.checkpoints) is None


@pytest.mark.ranks(2)
def test_a_checkpoint_of_a_run_that_had_diverged_is_refused(group, tmp_path, monkeypatch):
    """As an earlier version left them."""
    settings = tiny_settings(tmp_path, tp=2, steps=1)
    session = open_tiny(settings, monkeypatch, tmp_path)
    train(session)
    state = run_state(session)
    assert first_not_finite(state) is None
    name = sorted(state)[-1]
    if group.rank() == 1:
        state[name].data.detach().view(-1)[0] = math.nan
    assert first_not_finite(state) == (name if group.rank() == 1 else None)
    meta = read_meta(session.checkpoints / "step-00000001")
    checkpoint.save(session.checkpoints, 1, state, meta, group=group, extra_files=session.data.tokenizer.save)
    with pytest.raises(CheckpointError, match=r"step-00000001 is of a run that had diverged: .* remove it to go on"):
        train(open_tiny(dataclasses.replace(settings, resume="auto"), monkeypatch, tmp_path))


class Exits:
    """What exits when it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "matplotlib":
            sys.exit(3)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_what_comes_after_the_last_checkpoint_cannot_fail_the_run(group, tmp_path, monkeypatch):
    session = open_tiny(tiny_settings(tmp_path, tp=2, steps=1), monkeypatch, tmp_path)
    outcome = train(session)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Exits(), *sys.meta_path])
    monkeypatch.setattr(checkpoint_writer, "compressed_bits_per_byte", lambda _: 1 / 0)
    if group.rank() == 0:
        (session.out / "sample.txt").mkdir()
    finished = finish(session, outcome)
    assert finished.references == {}
    assert finished.checkpoint == outcome.checkpoint
    assert finished.notes[0] == "no comparison: ZeroDivisionError: division by zero"
    if group.rank() == 0:
        assert finished.notes[1].startswith("no picture: matplotlib cannot be imported (3)")
        assert finished.notes[2].startswith("no sample: UnwritableError: ")


@pytest.mark.parametrize("steps", [1, 250])
def test_progress_without_a_terminal_is_lines(capsys, monkeypatch, steps):
    now = [0.0]
    monkeypatch.setattr("shardwise.run.metrics.time.monotonic", lambda: now[0])
    with Progress(steps, 0, visible=True) as progress:
        for _ in range(steps):
            now[0] += 0.1
            speeds = {"tokens_per_second": 12345.6, "computed_tokens_per_second": 20000.0}
            progress.update({"loss": 2.5, "bits_per_byte": 1.25}, speeds | {"learned_tokens_per_second": 12345.6})
    text = capsys.readouterr().err
    assert "\r" not in text
    lines = text.splitlines()
    assert text.endswith("\n")
    assert (
        lines[-1] == f"step {steps}/{steps}: loss 2.500, 1.250 bits/byte, 12,346 tokens/s (20,000 computed), 00:00 left"
    )
    # Every five seconds, the first and the last.
    assert len(lines) == {1: 1, 250: 6}[steps]
    with Progress(steps, 0, visible=False) as progress:
        progress.update({"loss": 2.5, "bits_per_byte": 1.25}, {"tokens_per_second": 1.0})
    assert capsys.readouterr().err == ""


def test_progress_on_a_terminal_is_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress(2, 0, visible=True) as progress:
        for _ in range(2):
            progress.update({"loss": 2.5, "bits_per_byte": 1.25}, {"tokens_per_second": 1.0})
    text = capsys.readouterr().err
    assert "\r" in text
    assert "step 2/2" in text
    assert text.endswith("\n")
    assert os.linesep == "\n"
