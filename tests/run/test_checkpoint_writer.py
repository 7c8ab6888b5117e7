"""Checkpoints that a thread writes while the run trains on: the same bits, complete or absent, errors on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import math
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from run.test_run import losses, open_tiny
from run.test_stopping import at_step
from run.tiny import tiny_settings

from shardwise.core.errors import CheckpointError, DivergenceError
from shardwise.core.tensor_files import TensorFile
from shardwise.run import out_of_memory
from shardwise.run.checkpoint_writer import CheckpointWriter
from shardwise.run.processes.stopping import Interrupted
from shardwise.run.run import train
from shardwise.storage import checkpoint
from shardwise.storage.checkpoint import latest, saving
from shardwise.storage.checkpoint.storage import BoxData


class Gate:
    """Holds the writing threads of this process before their files are written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.waited = 0
        write_parts = saving.write_parts

        def waiting(*args, **kwargs):
            if threading.current_thread() is not threading.main_thread():
                self.waited += 1
                self.opened.wait()
            return write_parts(*args, **kwargs)

        monkeypatch.setattr(saving, "write_parts", waiting)


def written(saves: CheckpointWriter) -> None:
    """Wait until this rank's thread has ended, so that the next step publishes what it wrote."""
    assert saves._pending is not None
    saves._pending.wait()


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_what_is_saved_is_the_state_of_its_step_whatever_comes_while_it_is_written(group, tmp_path, monkeypatch):
    """Begun at step 2 and written after step 4, it is bit for bit the checkpoint of a run that waited."""
    options = {"tp": 2, "steps": 6, "save_every": 2, "keep_checkpoints": 9, "model": {"dropout": 0.1}}
    whole = tiny_settings(tmp_path, **options, asynchronous_saves=False)
    train(open_tiny(dataclasses.replace(whole, out=str(tmp_path / "whole")), monkeypatch, tmp_path))
    session = open_tiny(tiny_settings(tmp_path, **options), monkeypatch, tmp_path)
    gate = Gate(monkeypatch)
    seen = []

    def open_gate():
        dist.barrier(group=group)
        seen.append((sorted(path.name for path in session.checkpoints.glob("step-*")), gate.waited))
        gate.opened.set()

    at_step(session.trainer, 4, open_gate)
    train(session)
    # Training went on for two steps, while nothing was seen of it.
    assert seen == [([], 1)]
    names = sorted(path.name for path in session.checkpoints.iterdir())
    assert names == ["step-00000002", "step-00000004", "step-00000006"]
    if dist.get_rank(group) == 0:
        for name in names:
            checkpoint.verify(session.checkpoints / name)
            for path in sorted((session.checkpoints / name).glob("*.safetensors")):
                assert path.read_bytes() == (tmp_path / "whole" / "checkpoints" / name / path.name).read_bytes()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.ranks(2)
def test_an_interrupt_waits_for_the_writing(group, tmp_path, monkeypatch):
    session = open_tiny(tiny_settings(tmp_path, tp=2, save_every=2, keep_checkpoints=9), monkeypatch, tmp_path)
    gate = Gate(monkeypatch)
    if dist.get_rank(group) == 1:
        at_step(session.trainer, 3, lambda: signal.raise_signal(signal.SIGTERM))
    original = CheckpointWriter.complete

    def complete(saves):
        gate.opened.set()
        original(saves)

    monkeypatch.setattr(CheckpointWriter, "complete", complete)
    with pytest.raises(Interrupted):
        train(session)
    dist.barrier(group=group)
    assert sorted(path.name for path in session.checkpoints.iterdir()) == ["step-00000002", "step-00000003"]
    assert not saving_threads()


def saving_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("shardwise-save")]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("broken", [0, 1])
def test_a_full_disk_in_the_thread_ends_all_ranks_at_the_next_step(group, tmp_path, monkeypatch, broken):
    """With the checkpoint before as it was, and nothing of the new one left."""
    session = open_tiny(tiny_settings(tmp_path, tp=2, save_every=2), monkeypatch, tmp_path)
    steps = []
    original = CheckpointWriter.save

    def save(saves, step, *, at_once):
        if step == 4 and dist.get_rank(group) == broken:
            monkeypatch.setattr(TensorFile, "_write_all", full_disk)
        original(saves, step, at_once=at_once)
        steps.append(step)
        written(saves)

    def full_disk(file, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(CheckpointWriter, "save", save)
    with pytest.raises(CheckpointError) as caught:
        train(session)
    root = session.checkpoints
    assert str(caught.value).startswith(f"cannot save a checkpoint in {root}: cannot write {root}/.step-00000004.")
    assert f"rank-0000{broken}.safetensors: No space left on device" in str(caught.value)
    assert str(caught.value).endswith("earlier ones are untouched")
    assert steps == [2, 4]
    dist.barrier(group=group)
    assert [path.name for path in root.iterdir()] == ["step-00000002"]
    newest = latest(root)
    assert newest is not None
    checkpoint.verify(newest)
    assert not saving_threads()


@pytest.mark.ranks(2)
def test_what_is_not_finite_is_found_in_the_thread_and_never_published(group, tmp_path, monkeypatch):
    session = open_tiny(tiny_settings(tmp_path, tp=2, save_every=2), monkeypatch, tmp_path)
    original = CheckpointWriter.save

    def save(saves, step, *, at_once):
        last = next(iter(session.trainer.optimizer.state.values()))["exp_avg"].view(-1)[-1:]
        value = last.clone()
        if step == 4 and dist.get_rank(group) == 1:
            last.fill_(math.inf)
        original(saves, step, at_once=at_once)
        # The run itself goes on well: nothing but the thread can find it.
        last.copy_(value)
        written(saves)

    monkeypatch.setattr(CheckpointWriter, "save", save)
    with pytest.raises(DivergenceError) as caught:
        train(session)
    newest = session.checkpoints / "step-00000002"
    said = f"has values that are not finite after 4 steps; the last good checkpoint is {newest}"
    assert said in str(caught.value)
    dist.barrier(group=group)
    assert [path.name for path in session.checkpoints.iterdir()] == [newest.name]


@pytest.mark.ranks(2)
def test_a_run_that_diverges_publishes_what_it_was_writing(group, tmp_path, monkeypatch):
    session = open_tiny(tiny_settings(tmp_path, tp=2, save_every=2), monkeypatch, tmp_path)
    gate = Gate(monkeypatch)
    matrix = [param for param in session.trainer.model.parameters() if param.dim() == 2][-1]

    def spoil():
        matrix.register_hook(lambda grad: torch.full_like(grad, math.nan))
        gate.opened.set()

    at_step(session.trainer, 3, spoil)
    with pytest.raises(DivergenceError, match=r"the last good checkpoint is .*step-00000002; go on from it"):
        train(session)
    dist.barrier(group=group)
    assert [path.name for path in session.checkpoints.iterdir()] == ["step-00000002"]


@pytest.mark.ranks(2)
def test_where_memory_does_not_suffice_the_rank_writes_at_once_and_says_so(group, tmp_path, monkeypatch):
    session = open_tiny(tiny_settings(tmp_path, tp=2, steps=5, save_every=2), monkeypatch, tmp_path)
    if dist.get_rank(group) == 1:

        def take(snapshot, parts):
            raise MemoryError("none left")

        monkeypatch.setattr(checkpoint.Snapshot, "take", take)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train(session)
    dist.barrier(group=group)
    assert sorted(path.name for path in session.checkpoints.iterdir()) == ["step-00000004", "step-00000005"]
    for path in session.checkpoints.iterdir():
        checkpoint.verify(path)
    note = "note   rank 1 trains on only when it has written, for want of memory: MemoryError: none left\n"
    assert said.getvalue() == (note if dist.get_rank(group) == 0 else "")


def test_copies_stay_within_a_budget():
    parts = [BoxData(key, key, (0,), torch.ones(length)) for key, length in (("a", 10), ("b", 5))]
    allowed = [59]
    snapshot = checkpoint.Snapshot(lambda: allowed[0])
    with pytest.raises(MemoryError, match="copies of 60 bytes are more than the 59 bytes that a rank may take"):
        snapshot.take(parts)
    allowed[0] = 60
    assert [copy.data.tolist() for copy in snapshot.take(parts)] == [[1.0] * 10, [1.0] * 5]
    # What is there already is used again.
    allowed[0] = 0
    snapshot.take(parts)
    with pytest.raises(MemoryError, match="copies of 24 bytes"):
        snapshot.take([parts[0], dataclasses.replace(parts[1], data=torch.ones(6))])


def test_the_ranks_of_a_host_share_half_of_what_is_free(monkeypatch):
    files = {"/proc/meminfo": "MemTotal: 900 kB\nMemAvailable:    400 kB\n"}
    monkeypatch.setattr(out_of_memory, "_read", lambda path: files.get(path, ""))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert out_of_memory.memory_for_copies() == 400 * 1024 // 2 // 4
    files |= {"/sys/fs/cgroup/memory.max": "max\n", "/sys/fs/cgroup/memory.current": "9\n"}
    assert out_of_memory.memory_for_copies() == 400 * 1024 // 2 // 4
    files |= {"/sys/fs/cgroup/memory.max": "1000\n", "/sys/fs/cgroup/memory.current": "900\n"}
    files["/sys/fs/cgroup/memory.stat"] = "anon 600\nfile 300\n"
    assert out_of_memory.memory_for_copies() == 400 // 2 // 4
    files.clear()
    assert out_of_memory.memory_for_copies() is None


@pytest.mark.ranks(2)
def test_a_rank_that_leaves_alone_lets_no_thread_write_on(group, tmp_path, monkeypatch):
    session = open_tiny(tiny_settings(tmp_path, tp=2, save_every=2), monkeypatch, tmp_path)
    gate = Gate(monkeypatch)

    def leave():
        gate.opened.set()
        raise KeyboardInterrupt

    at_step(session.trainer, 3, leave)
    with pytest.raises(KeyboardInterrupt):
        train(session)
    assert not saving_threads()
    dist.barrier(group=group)
    assert latest(session.checkpoints) is None
    # What is left of it is removed by the next.
    again = tiny_settings(tmp_path, tp=2, save_every=2, resume="auto")
    train(open_tiny(again, monkeypatch, tmp_path))
    dist.barrier(group=group)
    assert not [path for path in session.checkpoints.iterdir() if path.name.startswith(".")]
