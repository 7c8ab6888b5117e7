"""Folders that several runs want, that a killed run left, or that cannot be written to."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.program import Program
from harness.watchdog import wait_until
from made_files import Folders

from shardwise.cli import main as main_module
from shardwise.cli.main import run_subcommand
from shardwise.core.errors import ConfigError
from shardwise.core.folder_lock import LOCK_NAME, FolderLock, check_free
from shardwise.run.processes.ranks import open_ranks

SMALL = (
    "--model.num-layers=1", "--model.hidden-size=16", "--model.num-heads=2", "--model.vocab-size=300",
    "--model.sequence-length=16", "--training.global-batch-size=2", "--training.save-every=1", "--device=cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Made under a umask that lets the group read."""
    before = os.umask(0o027)
    try:
        with open_ranks("cpu"):
            made = Folders(tmp_path_factory.mktemp("made"))
    finally:
        os.umask(before)
    return made


def is_free(folder: Path) -> bool:
    try:
        check_free(folder)
    except ConfigError:
        return False
    return True


def test_two_runs_and_a_killed_launcher(tmp_path: Path) -> None:
    text, out, temporary = tmp_path / "text.txt", tmp_path / "out", tmp_path / "tmp"
    text.write_text("def eins(zwei):\n    return zwei  # drei\n" * 400)
    temporary.mkdir()
    memory_before = set(os.listdir("/dev/shm"))

    def training(steps: int, *more: str) -> Program:
        return Program(
            "-m", "shardwise", "train", "--data", text, "--out", out, "--parallel.tp", "2", *SMALL,
            f"--training.steps={steps}", *more,
            SHARDWISE_CACHE=tmp_path / "cache", TMPDIR=temporary, OMP_NUM_THREADS="1",
            TEST_WITHOUT_MODULES="matplotlib",
        )  # fmt: skip

    with training(100_000) as first:
        first.wait_for_file(out / "checkpoints" / "step-00000002")
        with training(3, "--resume", "auto") as second:
            second.finish(exit_code=2)
        assert re.fullmatch(
            rf"shardwise train: error: {out} is in use by process \d+ on host .*; wait for it to end, or .*\n",
            second.stderr,
        )
        # Refused by the launcher: nothing was read, and no rank was started.
        assert second.stdout == ""
        # The launcher and the rank that holds the folder, neither of which can tidy up; the other rank ends by itself.
        os.kill(first.pid, signal.SIGSTOP)
        os.kill(json.loads((out / LOCK_NAME).read_text())["pid"], signal.SIGKILL)
        first.kill()
        first.finish(exit_code=-9)
        wait_until(lambda: is_free(out), "the kernel gives the lock back")
    assert list(temporary.glob("shardwise-ranks-*"))
    assert (out / LOCK_NAME).exists()
    (out / "checkpoints" / ".step-00000009.0123abcd.partial").mkdir()
    newest = max(int(path.name[5:]) for path in (out / "checkpoints").glob("step-*"))
    with training(newest + 1, "--resume", "auto") as third:
        third.finish(exit_code=0)
    assert f"resumed at step {newest}" in third.stdout
    assert re.search(r"note +process \d+ on host .* was in .*out and was killed", third.stdout)
    assert [path.name for path in out.rglob(".*")] == []
    assert list(temporary.glob("shardwise*")) == []
    # Ranks of other tests at work have memory, too.
    left = {name for name in os.listdir("/dev/shm") if name.startswith("shardwise-memory")} - memory_before
    assert [name for name in left if not os.path.exists(f"/proc/{name.split('-')[3]}")] == []


COMMANDS: dict[str, Callable[[str], list[str]]] = {
    "train": lambda out: ["--data", "stdlib", "--out", out, "--parallel.tp", "2"],
    "finetune": lambda out: ["MODEL", "--data", "stdlib", "--out", out, "--tp", "2"],
    "demo": lambda out: ["--out", out],
    "import-hf": lambda out: ["MODEL", "--out", out, "--nproc", "2"],
    "export-hf": lambda out: ["STEP", "--out", out, "--nproc", "2"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_out_that_cannot_be_is_said_before_anything_else(
    command: str, folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_yet(*args: object, **kwargs: object) -> int:
        raise AssertionError("it went on")

    monkeypatch.setattr(main_module, "launch_ranks", not_yet)
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    held = tmp_path / "held"
    # An export's folder appears when it is complete: what is held is a name beside it.
    lock = {"folder": tmp_path, "name": ".held.lock"} if command == "export-hf" else {"folder": held}
    places = {"": r"out is (empty|'')", "file/below": "file is a file", "loop/below": "loop is a link to nothing"}
    with FolderLock(**lock):
        for place, said in (places | {"held": f"held is in use by process {os.getpid()}"}).items():
            arguments = COMMANDS[command](str(tmp_path / place) if place else "")
            arguments = [{"MODEL": str(folders.model), "STEP": str(folders.step)}.get(word, word) for word in arguments]
            with pytest.raises(ConfigError, match=said):
                run_subcommand(command, arguments)


def test_what_killed_imports_and_exports_left(folders: Folders, tmp_path: Path) -> None:
    out, exported = tmp_path / "out", tmp_path / "exported"
    left = out / "checkpoints" / ".step-00000000.0123abcd.partial"
    left.mkdir(parents=True)
    (left / "rank-00000.safetensors").write_bytes(b"x" * 100)
    (out / LOCK_NAME).write_text('{"pid": 1, "host": "here"}')
    assert run_subcommand("import-hf", [str(folders.model), "--out", str(out)]) == 0
    assert [path.name for path in out.rglob(".*")] == []

    (tmp_path / ".exported.0123abcd.partial").mkdir()
    (tmp_path / ".exported.0123abcd.partial" / "model.safetensors").touch()
    (tmp_path / ".exported.lock").touch()
    (tmp_path / ".exported.of.another.partial.txt").touch()
    assert run_subcommand("export-hf", [str(out), "--out", str(exported)]) == 0
    assert sorted(path.name for path in tmp_path.glob(".*")) == [".exported.of.another.partial.txt"]


def test_all_files_have_one_mode(folders: Folders) -> None:
    for folder in (folders.step, folders.model, folders.adapter):
        modes = {path.name: stat.filemode(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}
        assert set(modes.values()) == {"-rw-r-----"}, modes
