"""Killed at any moment of a save: the disk always holds a whole checkpoint, and the next save goes on from it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_states import assert_states_equal, empty_state, full_state
from harness import pool
from torch.distributed import ProcessGroup

from shardwise.storage.checkpoint import PendingSave, Snapshot, latest, load, read_meta, save, verify

STEPS = [100, 200, 200, 300, 150, 200]
"""The steps that are saved one after the other: new ones, the same again, and back."""

KEEP = 2


def save_nth(root: Path, step: int, number: int, group: ProcessGroup, snapshot: Snapshot | None) -> None:
    """Save as ``step`` a state that tells the number, which is changed while a thread writes it, if one does."""
    rank, tp = dist.get_rank(group), dist.get_world_size(group)
    state = full_state(tp, rank, seed=number)
    pending = PendingSave(root, step, state, {"number": number}, group=group, keep=KEEP, snapshot=snapshot)
    for shard in state.values():
        shard.data.zero_()
    pending.complete()


def assert_holds(path: Path, number: int, group: ProcessGroup) -> None:
    """The checkpoint is bit for bit what the save of that number had."""
    rank, tp = dist.get_rank(group), dist.get_world_size(group)
    loaded = empty_state(tp, rank)
    assert load(path, loaded, group=group) == {"number": number}
    assert_states_equal(loaded, full_state(tp, rank, seed=number))


def copy_unless_gone(source: str, target: str) -> None:
    """The other rank goes on writing while the picture is taken."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy(source, target)


class Photographer:
    """Copies a folder before each call that changes it: what a process killed there would leave."""

    def __init__(self, root: Path, album: Path) -> None:
        self.root = root
        self.album = album
        self.current = 0
        self._busy = False
        # A thread deletes checkpoints while the next save begins.
        self._lock = threading.RLock()
        self.pictures: list[tuple[Path, int, bool]] = []
        """Each picture, the number of the save that it shows, and whether that save had returned."""

    def take(self, *, returned: bool = False) -> None:
        with self._lock:
            picture = self.album / f"{len(self.pictures):03d}"
            self._busy = True
            shutil.copytree(self.root, picture, copy_function=copy_unless_gone)
            self._busy = False
            self.pictures.append((picture, self.current, returned))

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("mkdir", "rename", "unlink", "rmdir", "fsync"):
            monkeypatch.setattr(os, name, self._watched(getattr(os, name)))

    def _watched(self, call):
        def photographed(*args, **kwargs):
            with self._lock:
                # Taking a picture makes folders itself.
                if not self._busy:
                    self.take()
                return call(*args, **kwargs)

        return photographed


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_killed_between_any_two_changes_of_the_disk(
    group: ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    rank = dist.get_rank(group)
    alone = [dist.new_group([member]) for member in range(2)][rank]
    root = tmp_path / "run"
    root.mkdir(exist_ok=True)
    snapshot = Snapshot() if asynchronous else None
    photographer = Photographer(root, tmp_path / f"album{rank}")
    with monkeypatch.context() as patch:
        if rank == 0:
            photographer.watch(patch)
        for number in range(len(STEPS)):
            photographer.current = number
            save_nth(root, STEPS[number], number, group, snapshot)
            if rank == 0:
                photographer.take(returned=True)
    if rank != 0:
        return
    assert len(photographer.pictures) > 60
    hidden = 0
    for picture, number, returned in photographer.pictures:
        # Under a name that is ever read there is nothing half written or half deleted.
        for entry in [*picture.glob("step-*"), *picture.glob(".*.replaced")]:
            verify(entry)
        path = latest(picture)
        if path is None:
            assert (number, returned) == (0, False)
            continue
        verify(path)
        shown = read_meta(path)["number"]
        # The save that was killed either has not happened or has happened; one that returned has.
        assert shown in ([number] if returned else [number - 1, number])
        hidden += path.name.startswith(".")
        assert_holds(path, shown, alone)
        # Going on from there leaves nothing behind.
        going_on = save(picture, 400, full_state(1, 0), {"number": -1}, group=alone, keep=KEEP)
        assert latest(picture) == going_on
        assert not [entry for entry in picture.iterdir() if entry.name.startswith(".")]
    # The window between the two renames of a replaced step was among them.
    assert hidden > 0


def step_of(number: int) -> int:
    """Each step is saved twice, so that every second save replaces a checkpoint."""
    return 10 * (number // 2)


def save_until_killed(rank: int, root: Path, store: Path, connection: Connection) -> None:
    """One of two ranks: load the newest checkpoint, compare it, say its number, and save without end.

    Every other save is written by a thread.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    number = -1
    if path := latest(root):
        number = read_meta(path)["number"]
        assert_holds(path, number, group)
    connection.send(number)
    snapshot = Snapshot()
    while True:
        number += 1
        save_nth(root, step_of(number), number, group, snapshot if number % 2 else None)
        connection.send(number)


@pytest.mark.slow
def test_twenty_kills(tmp_path: Path) -> None:
    pool._start_fork_server()
    context = multiprocessing.get_context("forkserver")
    choose = random.Random(0)
    root = tmp_path / "run"
    newest, awaited, interrupted, save_time = -1, -1, 0, 0.05
    for kill in range(21):
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        ranks = [
            context.Process(target=save_until_killed, args=(rank, root, tmp_path / f"store{kill}", pipes[rank][1]))
            for rank in range(2)
        ]
        for process, (_, theirs) in zip(ranks, pipes, strict=True):
            process.start()
            theirs.close()
        try:
            # What they resumed from is what was there after the last kill, and they have compared every bit of it.
            assert [ours.recv() for ours, _ in pipes] == [newest, newest]
            # Let some saves return, then kill within the time of another, however busy the machine is.
            for _ in range(choose.randrange(4)):
                begun = time.monotonic()
                awaited = pipes[0][0].recv()
                save_time = time.monotonic() - begun
            time.sleep(choose.uniform(0, save_time))
        finally:
            for process in choose.sample(ranks, 2):
                process.kill()
                time.sleep(choose.choice([0, 0.02]))
            for process in ranks:
                process.join()
        returned = max([newest, awaited, *all_received(pipes[0][0]), *all_received(pipes[1][0])])
        interrupted += any(entry.name.startswith(".") for entry in root.iterdir()) if root.exists() else 0
        path = latest(root)
        assert path is not None or returned == -1
        if path is not None:
            verify(path)
            newest = read_meta(path)["number"]
        # The save that was killed either has not happened or has happened; one that returned has.
        assert newest in (returned, returned + 1)
    # The kills did meet saves.
    assert interrupted >= 5


def all_received(connection: Connection) -> list[int]:
    """What was sent before the sender was killed."""
    numbers = []
    with connection:
        while connection.poll():
            try:
                numbers.append(connection.recv())
            except EOFError:
                break
    return numbers
