"""One process at a time in a folder, whatever happened to the one before."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest
from harness.program import Program

from shardwise.core.atomic_files import check_folder
from shardwise.core.errors import ConfigError
from shardwise.core.folder_lock import LOCK_NAME, FolderLock, check_free

HOLD = """
import sys, time
from pathlib import Path
from shardwise.core.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", lock.left_by, flush=True)
time.sleep(1000)
"""


def holder(folder: Path) -> dict:
    return json.loads((folder / LOCK_NAME).read_text())


def test_nothing_is_left_of_a_lock(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "a" / "b") as lock:
        assert holder(tmp_path / "a" / "b")["pid"] == os.getpid()
        assert lock.left_by is None
        # Its own process is refused too.
        with pytest.raises(ConfigError, match=rf"is in use by process {os.getpid()} on host "):
            FolderLock(tmp_path / "a" / "b")
    lock.release()
    assert list(tmp_path.iterdir()) == []
    with FolderLock(tmp_path / "a" / "b"):
        (tmp_path / "a" / "file").touch()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file"]


def test_another_process_is_named_until_it_is_killed(tmp_path: Path) -> None:
    with Program("-c", HOLD, tmp_path) as first:
        first.wait_for_line("held None")
        said = rf"{re.escape(str(tmp_path))} is in use by process {first.pid} on host .*; wait for it to end"
        for attempt in (FolderLock, check_free):
            with pytest.raises(ConfigError, match=said):
                attempt(tmp_path)
        first.kill()
        first.finish(exit_code=-9)
    assert holder(tmp_path)["pid"] == first.pid
    check_free(tmp_path)
    with FolderLock(tmp_path) as lock:
        assert lock.left_by is not None
        assert f"process {first.pid} on host" in lock.left_by


@pytest.mark.parametrize("missing", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(missing, os.strerror(missing))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with FolderLock(tmp_path), pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        FolderLock(tmp_path)
    own = {"host": "here"} | {key: holder_of(tmp_path)[key] for key in ("machine", "pid", "started")}
    # Of this machine, and gone: a later process has its number.
    (tmp_path / LOCK_NAME).write_text(json.dumps(own | {"started": "1"}))
    FolderLock(tmp_path).release()
    # Of another host, whose processes nobody here can ask.
    (tmp_path / LOCK_NAME).write_text(json.dumps(own | {"host": "there", "machine": "00000000"}))
    said = (
        f"on host there; if that run has ended, remove {re.escape(str(tmp_path / LOCK_NAME))}, or choose another --out"
    )
    with pytest.raises(ConfigError, match=said):
        FolderLock(tmp_path)
    (tmp_path / LOCK_NAME).unlink()
    FolderLock(tmp_path).release()


def test_a_lock_that_only_files_for_writing_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS 4, where the file of a killed run on another host is free."""
    lock = fcntl.flock

    def refuse(descriptor: int, operation: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / LOCK_NAME).write_text(json.dumps({"host": "there", "machine": "00000000", "pid": 1, "started": "1"}))
    check_free(tmp_path)


def holder_of(folder: Path) -> dict:
    """What this process writes into a lock of ``folder``."""
    with FolderLock(folder):
        return holder(folder)


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to("loop")
    for name, said in {
        "file": "file is a file",
        "file/deeper/still": "file is a file",
        "nowhere": "nowhere is a link to nothing",
        "loop/x": "loop is a link to nothing",
        "x" * 300: "File name too long",
    }.items():
        for attempt in (check_folder, check_free, FolderLock):
            with pytest.raises(ConfigError, match=rf"^cannot write to .*{said}; choose another --out or free it$"):
                attempt(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop", "nowhere"]
    check_folder(tmp_path / "new" / "deeper")


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / LOCK_NAME).symlink_to(victim)
    with pytest.raises(ConfigError, match=rf"cannot write to .*: {tmp_path / 'out' / LOCK_NAME}: "):
        FolderLock(tmp_path / "out")
    assert victim.read_text() == "precious"


@pytest.mark.skipif(not sys.platform.startswith("linux") or os.getuid() != 0, reason="needs a user without rights")
def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from shardwise.core.atomic_files import check_folder;"
        "os.setgid(65534); os.setuid(65534); check_folder(Path(sys.argv[1]))"
    )
    # Those of pytest lie in one that nobody else may enter.
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        with Program("-c", code, folder / "new") as program:
            program.finish(exit_code=1)
    finally:
        folder.rmdir()
    assert f"{folder} has no permission to be written to" in program.stderr
