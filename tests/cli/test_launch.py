"""Ranks on this machine: how they start, and how they all end when something goes wrong."""

import json
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness.program import Program
from harness.watchdog import is_alive, wait_until_ended

from shardwise.cli.launch import launch_ranks, physical_cores, shardwise_command

PROGRAM = str(Path(__file__).with_name("rank_program.py"))
HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}


def launch(behaviour, folder, nproc=2, **options):
    return launch_ranks(nproc, [sys.executable, PROGRAM, behaviour, str(folder)], command="shardwise train", **options)


@pytest.mark.slow
def test_every_rank_gets_its_place_and_the_arguments_as_they_are(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    awkward = ["$HOME", "$$", "${local_rank}", "two words", ""]
    before = dict(os.environ)
    command = [sys.executable, PROGRAM, "succeed", str(tmp_path), *awkward]
    assert launch_ranks(2, command) == 0
    said, complaints = capfd.readouterr()
    # PyTorch, loaded here before `main` could quiet it, says this where no name is answered (offline).
    complaints = [line for line in complaints.splitlines() if "hostname of the client socket" not in line]
    assert (said, complaints) == ("", [])
    assert dict(os.environ) == before
    assert {number: signal.getsignal(number) for number in HANDLERS} == HANDLERS
    for rank in range(2):
        report = json.loads((tmp_path / f"rank{rank}.json").read_text())
        environment = report["environment"]
        assert report["argv"] == ["succeed", str(tmp_path), *awkward]
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "2"
        assert Path(environment["SHARDWISE_RANK_STORE"]).parent == Path(environment["SHARDWISE_RANK_REPORTS"])
        assert environment["OMP_NUM_THREADS"] == str(max(1, physical_cores() // 2))
        assert environment["GLOO_SOCKET_IFNAME"].startswith("lo")


@pytest.mark.slow
def test_the_users_own_thread_count_stands(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert launch("succeed", tmp_path, nproc=1) == 0
    assert json.loads((tmp_path / "rank0.json").read_text())["environment"]["OMP_NUM_THREADS"] == "7"


def test_a_mistake_that_all_ranks_find_is_said_once(tmp_path, capfd):
    assert launch("all_mistaken", tmp_path) == 2
    assert capfd.readouterr() == ("", "shardwise train: error: the corpus is empty\n")


@pytest.mark.slow
def test_debug_shows_the_stack_trace_first(tmp_path, capfd):
    assert launch("all_mistaken", tmp_path, debug=True) == 2
    error = capfd.readouterr().err
    assert "Traceback (most recent call last):" in error
    assert "in all_mistaken" in error
    assert error.endswith("shardwise train: error: the corpus is empty\n")


@pytest.mark.slow
def test_a_rank_that_breaks_alone_is_named_and_the_waiting_ones_end(tmp_path, capfd):
    assert launch("one_breaks", tmp_path) == 1
    assert capfd.readouterr() == (
        "",
        "shardwise train: error: rank 1: ZeroDivisionError: division by zero; "
        "run again with --debug for the stack trace\n",
    )


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_waiting_ones_end(tmp_path, capfd):
    assert launch("one_is_killed", tmp_path, resume_hint=lambda: "the way on") == 1
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)]
    assert capfd.readouterr() == (
        "",
        f"shardwise train: error: rank 1 (pid {pids[1]}) was killed by SIGKILL, by hand or for lack of memory; "
        "the way on\n",
    )
    assert not any(is_alive(pid) for pid in pids)


def test_the_killed_rank_is_the_cause_and_not_those_that_lost_it(tmp_path, capfd):
    assert launch("peers_notice", tmp_path, nproc=3) == 1
    error = capfd.readouterr().err
    assert error.startswith("shardwise train: error: rank 1 (pid ")
    assert error.endswith("was killed by SIGKILL, by hand or for lack of memory\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("one_breaks_among_collectives", "rank 1: ZeroDivisionError: division by zero; run again with --debug"),
        ("one_is_killed_among_collectives", "rank 1 (pid "),
    ],
)
def test_gloo_ranks_end_with_one_line_too(tmp_path, capfd, behaviour, message):
    assert launch(behaviour, tmp_path) == 1
    output, error = capfd.readouterr()
    assert output == ""
    assert error.startswith(f"shardwise train: error: {message}")
    assert error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "end"),
    [
        ("one_exits", "ended with exit code 7 and no message"),
        ("one_is_told_to_end", "was ended by SIGTERM"),
        ("one_gets_a_signal_without_a_name", f"was killed by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_a_rank_that_ends_without_a_word_is_named(tmp_path, capfd, behaviour, end):
    assert launch(behaviour, tmp_path) == 1
    error = capfd.readouterr().err
    assert error.startswith("shardwise train: error: rank 1 (pid ")
    assert error.endswith(f" {end}\n")


@pytest.mark.slow
def test_a_closed_output_is_quiet(tmp_path, capfd):
    assert launch("output_closed", tmp_path) == 141
    said, complaints = capfd.readouterr()
    # PyTorch, loaded here before `main` could quiet it, says this where no name is answered (offline).
    complaints = [line for line in complaints.splitlines() if "hostname of the client socket" not in line]
    assert (said, complaints) == ("", [])


@pytest.mark.slow
def test_a_program_that_is_not_there_is_one_line(tmp_path):
    from shardwise.core.errors import LaunchError

    with pytest.raises(LaunchError, match=r"could not start 2 ranks: .*no-such-program.*: No such file or directory"):
        launch_ranks(2, [str(tmp_path / "no-such-program")])


def test_ranks_run_this_interpreter_without_the_current_folder(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/usr/bin", *sys.path])
    assert shardwise_command("train", "--nproc", "2") == [
        sys.executable, "-P", "-m", "shardwise", "train", "--nproc", "2",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "path", [os.getcwd(), *sys.path])
    assert shardwise_command("env") == [sys.executable, "-m", "shardwise", "env"]


LAUNCHER = f"""
import sys
from shardwise.cli.launch import launch_ranks
from shardwise.cli.reporting import run_command
argv = [sys.executable, {PROGRAM!r}, "rank_0_sleeps", sys.argv[1]]
sys.exit(run_command("shardwise train", lambda: launch_ranks(2, argv)))
"""


@pytest.fixture(scope="module")
def launchers(tmp_path_factory):
    """Four launchers with two ranks each, started together because each takes seconds to import PyTorch."""
    with ExitStack() as stack:
        folders = {name: tmp_path_factory.mktemp(name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGKILL")}
        yield {name: (stack.enter_context(Program("-c", LAUNCHER, folder)), folder) for name, folder in folders.items()}


def ranks_of(launcher, folder):
    files = [folder / f"pid{rank}" for rank in range(2)]
    launcher.wait_until(lambda: all(file.exists() and file.read_text() for file in files), "both ranks run")
    return [int(file.read_text()) for file in files]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_ends_the_ranks_and_says_how_to_continue(launchers, name, code):
    launcher, folder = launchers[name]
    ranks = ranks_of(launcher, folder)
    launcher.interrupt(signal.Signals[name])
    launcher.finish(exit_code=code)
    assert (launcher.stdout, launcher.stderr) == ("", "shardwise train: interrupted\n")
    assert not any(is_alive(pid) for pid in ranks)
    assert (folder / "tidied").exists()


@pytest.mark.slow
def test_ranks_whose_launcher_is_killed_end_by_themselves(launchers):
    launcher, folder = launchers["SIGKILL"]
    ranks = ranks_of(launcher, folder)
    launcher.kill()
    wait_until_ended(*ranks)
    assert (folder / "tidied").exists()
