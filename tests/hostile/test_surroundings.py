"""A home that cannot be written, variables that something left, outputs that are closed."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from harness.forked import run_forked
from harness.program import Program
from run.run_processes import run_command

from shardwise.cli.main import main

SMALL = (
    "--model.num-layers=1", "--model.hidden-size=16", "--model.num-heads=2", "--model.vocab-size=300",
    "--model.sequence-length=16", "--training.global-batch-size=2", "--training.steps=3", "--device=cpu",
)  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("def eins(zwei):\n    return zwei  # drei\n" * 400)
    return path


def arguments(text: Path, *more: str) -> list[str]:
    return ["train", "--data", str(text), "--out", str(text.parent / "out"), *SMALL, *more]


def train(text: Path, *more: str, program: tuple[str, ...] = ("-m", "shardwise"), **options: Any) -> Program:
    # The picture is of no matter here, and takes as long as all the rest.
    variables = {"OMP_NUM_THREADS": "1", "TEST_WITHOUT_MODULES": "matplotlib"}
    variables |= {"SHARDWISE_CACHE": str(text.parent / "cache")} | options
    return Program(*program, *arguments(text, *more), **variables)


def live_in(home: Path) -> None:
    for name in ("SHARDWISE_CACHE", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)
    os.environ["HOME"] = str(home)


def test_a_home_that_cannot_be_written(text: Path) -> None:
    home = text.parent / "home"
    home.touch()
    argv = arguments(text, "--parallel.tp", "2")
    printed, _ = run_command(text.parent, 2, *argv, changed=partial(live_in, home))
    assert f"nothing is kept for the next run: cannot write to '{home}/.cache/shardwise': {home} is a file" in printed
    assert (text.parent / "out" / "checkpoints" / "step-00000003").is_dir()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "RANK=0 and WORLD_SIZE=2 but no MASTER_ADDR, which a launcher sets too; unset",
        ),
        ({"RANK": "0", "WORLD_SIZE": "3", "tp": "2"}, "WORLD_SIZE=3 is in the environment; unset it and RANK if no"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "x"}, "LOCAL_RANK=x, which only a launcher sets, to a number"),
        ({"RANK": "0", "WORLD_SIZE": "1", "SHARDWISE_LAUNCHER_PID": "x"}, "SHARDWISE_LAUNCHER_PID=x, which only a"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"},
            "MASTER_PORT=x, which is no port",
        ),
    ],
)
def test_variables_that_something_left(text: Path, variables: dict[str, str], said: str | None) -> None:
    variables = {"SHARDWISE_CACHE": str(text.parent / "cache")} | variables
    tp = variables.pop("tp", "1")
    argv = arguments(text, "--parallel.tp", tp, "--training.global-batch-size=6")
    ((code, printed),) = run_forked(shardwise_with, [(variables, argv)], text.parent)
    assert code == (0 if said is None else 2), printed
    if said is not None:
        assert said in printed
        assert printed.count("\n") == 1, printed


def shardwise_with(variables: dict[str, str], argv: list[str]) -> NoReturn:
    os.environ.update(variables)
    sys.exit(main(argv))


CLOSED = """
import os, sys
for number in map(int, sys.argv[1].split(",")):
    os.close(number)
os.execv(sys.executable, [sys.executable, "-m", "shardwise", *sys.argv[2:]])
"""


def close_output() -> None:
    """As Python starts with a closed output."""
    os.close(1)
    sys.stdout = None  # type: ignore[assignment]


@pytest.mark.parametrize("closed", ["1", "0,1,2"])
def test_closed_outputs(text: Path, closed: str) -> None:
    if closed == "1":
        out, error = run_command(text.parent, 1, *arguments(text), changed=close_output)
    else:
        with train(text, program=("-c", CLOSED, closed)) as program:
            program.finish(exit_code=0)
        out, error = program.stdout, program.stderr
    assert out == ""
    assert "Traceback" not in error
    files = [path for path in (text.parent / "out").rglob("*") if path.suffix in (".jsonl", ".json", ".safetensors")]
    assert len(files) > 4
    # What was printed did not go where a closed output's number went.
    assert all(b"bits per byte" not in path.read_bytes() for path in files)


def lose_reader() -> None:
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)
    os.close(write)


def test_a_reader_that_ends_does_not_end_the_run(text: Path) -> None:
    _, error = run_command(text.parent, 2, *arguments(text, "--parallel.tp", "2"), changed=lose_reader)
    assert error.count("standard output cannot be written any more (Broken pipe); the run goes on") == 1
    assert (text.parent / "out" / "checkpoints" / "step-00000003").is_dir()


def fill_disk() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    os.dup2(full, 2)
    os.close(full)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_output_on_a_full_disk(text: Path) -> None:
    run_command(text.parent, 1, *arguments(text), changed=fill_disk)
    assert (text.parent / "out" / "checkpoints" / "step-00000003").is_dir()
