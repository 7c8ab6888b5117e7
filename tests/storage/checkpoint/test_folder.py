"""Which checkpoints a folder keeps, and which is the newest."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoint_states import assert_states_equal, empty_state, full_state
from torch.distributed import ProcessGroup

from shardwise.core.errors import CheckpointError
from shardwise.storage.checkpoint import (
    PendingSave,
    Snapshot,
    folder as folders,
    latest,
    load,
    manifest,
    read_meta,
    save,
    verify,
)
from shardwise.storage.checkpoint.folder import clear, held, held_latest, publish, remove_unless_held, step_path


def published(root: Path) -> list[int]:
    assert not [entry for entry in root.iterdir() if entry.name.startswith(".")]
    return sorted(int(entry.name.removeprefix("step-")) for entry in root.iterdir())


def save_steps(root: Path, group: ProcessGroup, *steps: int, keep: int | None = 3) -> None:
    for step in steps:
        rank, tp = dist.get_rank(group), dist.get_world_size(group)
        save(root, step, full_state(tp, rank, seed=step), {"step": step}, group=group, keep=keep)


def test_nothing_there(tmp_path: Path) -> None:
    assert latest(tmp_path / "run") is None
    assert latest(tmp_path) is None
    (tmp_path / "notes.txt").write_text("step-00000001")
    (tmp_path / "step-1").mkdir()
    assert latest(tmp_path) is None


@pytest.mark.ranks(2)
def test_the_last_few_are_kept(group: ProcessGroup, tmp_path: Path) -> None:
    save_steps(tmp_path, group, 0, 100, 200, 300, 400)
    assert published(tmp_path) == [200, 300, 400]
    assert latest(tmp_path) == tmp_path / "step-00000400"
    save_steps(tmp_path, group, 500, keep=None)
    assert published(tmp_path) == [200, 300, 400, 500]
    save_steps(tmp_path, group, 600, keep=1)
    assert published(tmp_path) == [600]
    dist.barrier(group)
    save_steps(tmp_path, group, 123_456_789)
    assert latest(tmp_path) == tmp_path / "step-123456789"


@pytest.mark.ranks(1)
def test_a_thread_deletes_the_oldest_after_a_save_of_a_thread(
    group: ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmtree, may_delete = shutil.rmtree, threading.Event()
    monkeypatch.setattr(shutil, "rmtree", lambda *given: (may_delete.wait(), rmtree(*given)))
    for step in (1, 2):
        PendingSave(tmp_path, step, full_state(1, 0), group=group, keep=1, snapshot=Snapshot()).complete()
    # The save has returned, and nobody reads the files that are still there.
    hidden, visible = sorted(entry.name for entry in tmp_path.iterdir())
    assert (hidden.endswith(".partial"), visible) == (True, "step-00000002")
    (thread,) = (each for each in threading.enumerate() if each.name == "shardwise-remove-step-00000001")
    may_delete.set()
    thread.join()
    assert published(tmp_path) == [2]


@pytest.mark.ranks(1)
def test_the_newest_is_what_was_published_last(group: ProcessGroup, tmp_path: Path) -> None:
    """A run that goes back, or a new one in a used folder, is resumed from its own checkpoint and keeps it."""
    save_steps(tmp_path, group, 100, 200, 300)
    save_steps(tmp_path, group, 50)
    assert latest(tmp_path) == tmp_path / "step-00000050"
    assert published(tmp_path) == [50, 200, 300]
    save_steps(tmp_path, group, 200)
    assert latest(tmp_path) == tmp_path / "step-00000200"
    assert published(tmp_path) == [50, 200, 300]
    save_steps(tmp_path, group, 60, 70)
    assert published(tmp_path) == [60, 70, 200]


@pytest.mark.ranks(2)
def test_a_step_is_saved_again_at_another_size(group: ProcessGroup, tmp_path: Path) -> None:
    rank = dist.get_rank(group)
    save_steps(tmp_path, group, 100)
    alone = dist.new_group([0])
    path = step_path(tmp_path, 100)
    if rank == 0:
        save(tmp_path, 100, full_state(1, 0, seed=7), {"again": True}, group=alone)
        assert sorted(file.name for file in path.iterdir()) == ["meta.json", "rank-00000.safetensors"]
    dist.barrier(group)
    loaded = empty_state(2, rank)
    assert load(path, loaded, group=group) == {"again": True}
    assert_states_equal(loaded, full_state(2, rank, seed=7))
    assert published(tmp_path) == [100]


@pytest.mark.ranks(1)
def test_what_a_killed_save_left_is_cleared(group: ProcessGroup, tmp_path: Path) -> None:
    save_steps(tmp_path, group, 100)
    left = tmp_path / ".step-00000200.0123abcd.partial"
    left.mkdir()
    (left / "rank-00000.safetensors").write_bytes(b"half of it")
    other = tmp_path / ".cache"
    other.mkdir()
    assert latest(tmp_path) == tmp_path / "step-00000100"
    save_steps(tmp_path, group, 300)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".cache", "step-00000100", "step-00000300"]


@pytest.mark.ranks(1)
def test_killed_while_replacing(group: ProcessGroup, tmp_path: Path) -> None:
    """Between the two renames the step stands under its hidden name, and gets its own back at the next save."""
    save_steps(tmp_path, group, 50, 100)
    hidden = tmp_path / ".step-00000100.replaced"
    os.rename(tmp_path / "step-00000100", hidden)
    assert latest(tmp_path) == hidden
    verify(hidden)
    loaded = empty_state(1, 0)
    assert load(hidden, loaded, group=group) == {"step": 100}
    assert_states_equal(loaded, full_state(1, 0, seed=100))
    save_steps(tmp_path, group, 200)
    assert published(tmp_path) == [50, 100, 200]
    assert read_meta(tmp_path / "step-00000100") == {"step": 100}


@pytest.mark.ranks(1)
def test_killed_just_after_replacing(group: ProcessGroup, tmp_path: Path) -> None:
    save_steps(tmp_path, group, 100)
    os.rename(tmp_path / "step-00000100", tmp_path / ".step-00000100.replaced")
    other = tmp_path / "other"
    save_steps(other, group, 99, 100)
    publish(other / "step-00000100", tmp_path / "step-00000100")
    assert latest(tmp_path) == tmp_path / "step-00000100"
    save_steps(tmp_path / ".." / tmp_path.name, group, 200)
    assert not (tmp_path / ".step-00000100.replaced").exists()
    assert latest(tmp_path) == tmp_path / "step-00000200"


@pytest.mark.ranks(2)
def test_a_manifest_that_is_too_long_to_be_read_is_not_published(
    group: ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, group, 100)
    monkeypatch.setattr(manifest, "_MAX_BYTES", (tmp_path / "step-00000100" / "meta.json").stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"meta\.json would have \d+ bytes for \d+ pieces of tensors, and"):
        save_steps(tmp_path, group, 200)
    assert published(tmp_path) == [100]


@pytest.mark.ranks(1)
def test_a_checkpoint_that_is_read_is_deleted_by_a_later_save(group: ProcessGroup, tmp_path: Path) -> None:
    save_steps(tmp_path, group, 1, keep=1)
    with held(tmp_path / "step-00000001") as there:
        assert there
        save_steps(tmp_path, group, 2, 3, keep=1)
        assert published(tmp_path) == [1, 3]
    save_steps(tmp_path, group, 4, keep=1)
    assert published(tmp_path) == [4]
    with held(tmp_path / "step-00000003") as there:
        assert not there


@pytest.mark.ranks(1)
def test_the_newest_checkpoint_is_held(group: ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a run publishes the next one, and deletes it, after it was found."""
    save_steps(tmp_path, group, 1, keep=1)
    found = [latest(tmp_path)]
    save_steps(tmp_path, group, 2, keep=1)
    monkeypatch.setattr(folders, "latest", lambda root: found.pop() if found else latest(root))
    with held_latest(tmp_path) as path:
        assert path == tmp_path / "step-00000002"
        assert not found
        remove_unless_held(path)
        assert published(tmp_path) == [2]
    with held_latest(tmp_path / "none") as path:
        assert path is None


@pytest.mark.ranks(1)
def test_a_checkpoint_that_is_replaced_while_it_is_looked_for(
    group: ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has listed the folder, or read the manifest, when a run publishes the next step."""

    def replacing(patch: pytest.MonkeyPatch, name: str, step: int) -> None:
        own = getattr(manifest.Manifest, name)

        def call(*given: Any) -> Any:
            patch.undo()
            save_steps(tmp_path, group, step, keep=1)
            return own(*given)

        patch.setattr(manifest.Manifest, name, call)

    save_steps(tmp_path, group, 1, keep=1)
    for step, name in ((2, "read"), (3, "check_sizes")):
        with monkeypatch.context() as patch:
            replacing(patch, name, step)
            assert latest(tmp_path) == step_path(tmp_path, step)


def test_a_restart_removes_checkpoints_alone(tmp_path: Path) -> None:
    for name in ("step-00000001", ".step-00000001.replaced", ".step-00000002.0a1b.partial", "step-mine"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    clear(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step-mine", "notes.txt"}
    clear(tmp_path / "nothing")
