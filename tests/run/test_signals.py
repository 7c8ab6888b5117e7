"""What a process does on a signal, at whatever moment it comes."""

from __future__ import annotations

import importlib
import signal
import sys
import threading
import weakref

import pytest
from harness.program import Program
from harness.watchdog import WATCHDOG_SECONDS

from shardwise.cli.main import SignalsNoted
from shardwise.run.processes.stopping import Interrupted, signals_raise


class Thing:
    """Something that can be referred to weakly."""


@pytest.mark.parametrize("once", [False, True])
def test_a_signal_within_a_callback_is_not_lost(once, capfd):
    things = {Thing()}
    # Out of the callback of a weak reference nothing is raised; Python says "Exception ignored" and goes on.
    reference = weakref.ref(next(iter(things)), lambda _: signal.raise_signal(signal.SIGTERM))

    def wait_for_the_signal() -> None:
        things.clear()
        assert reference() is None
        threading.Event().wait(timeout=WATCHDOG_SECONDS)

    with pytest.raises(Interrupted, match="ended by SIGTERM"), signals_raise(once=once):
        wait_for_the_signal()
    assert capfd.readouterr().err == ""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Return a function that makes a module of a text and returns its name."""

    def make(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return name

    monkeypatch.syspath_prepend(tmp_path)
    modules = set(sys.modules)
    yield make
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.mark.parametrize("once", [False, True])
def test_a_signal_within_an_import_is_acted_on_after_it(once, module):
    inner = module("inner_of_signals", "import signal\nsignal.raise_signal(signal.SIGINT)\nis_whole = True\n")
    outer = module("outer_of_signals", f"import {inner}\nis_whole = True\n")

    def import_and_wait() -> None:
        importlib.import_module(outer)
        threading.Event().wait(timeout=WATCHDOG_SECONDS)

    with pytest.raises(Interrupted, match="ended by SIGINT"), signals_raise(once=once):
        import_and_wait()
    assert sys.modules[inner].is_whole
    assert sys.modules[outer].is_whole


def test_a_command_within_an_import_is_interrupted_all_the_same(module):
    text = """
import signal
from shardwise.run.processes.stopping import Interrupted, signals_raise
try:
    with signals_raise(once=False):
        signal.raise_signal(signal.SIGINT)
        seen = None
except Interrupted as error:
    seen = error.signal
"""
    assert importlib.import_module(module("command_of_signals", text)).seen == signal.SIGINT


def test_signals_are_noted_and_ignored_ones_stay_ignored():
    before = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    lines = []

    def receive() -> None:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        lines.append("the block goes on")

    try:
        with pytest.raises(SystemExit) as caught, SignalsNoted():
            receive()
        assert caught.value.code == 143, "the first signal that is not ignored"
        assert signal.getsignal(signal.SIGTERM) == before[0]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        # The handlers of a block inside act on the noted signal, at a moment that the block chooses.
        with SignalsNoted() as noted:
            noted.hand_over()
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(Interrupted, match="SIGTERM"), signals_raise(once=False):
                noted.hand_over()
    finally:
        signal.signal(signal.SIGHUP, before[1])
    assert lines == ["the block goes on"]


BUSY = """
import ctypes
from shardwise.cli.main import guarded
from shardwise.run.processes.stopping import signals_raise
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
with signals_raise(once=False):
    with guarded("shardwise train"):
        pass
    with guarded("shardwise train"):
        library.pthread_mutex_lock(mutex)
        print("busy", flush=True)
        library.pthread_mutex_lock(mutex)
"""


def test_a_command_of_one_rank_ends_while_it_is_busy_in_c():
    with Program("-c", BUSY) as program:
        program.wait_for_line("busy")
        program.interrupt(signal.SIGTERM)
        program.finish(exit_code=143)
    assert program.stderr == "shardwise train: interrupted\n"


TRAIN = ["train", "--data", "stdlib", "--tp", "2", "--device", "cpu", "--out"]


@pytest.mark.parametrize(
    ("command", "process", "imported", "name", "code"),
    [
        (["env"], "launcher", "shardwise.cli.arguments", "SIGINT", 130),
        (["--version"], "launcher", "shardwise.cli.launch", "SIGTERM", 143),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                # PyTorch's library imports both. The signal was lost, and the next import failed.
                (["env"], "launcher", "numpy", "SIGINT", 130),
                (["env"], "launcher", "numpy.dtypes", "SIGTERM", 143),
                (TRAIN, "launcher", "numpy", "SIGINT", 130),
                (TRAIN, "rank", "shardwise.cli.arguments", "SIGINT", 130),
                (TRAIN, "rank", "numpy.dtypes", "SIGTERM", 143),
            ]
        ),
    ],
)
def test_a_signal_while_modules_are_imported(tmp_path, command, process, imported, name, code):
    """An exception in the middle of PyTorch's import was lost, or crashed the process."""
    words = [*command, tmp_path / "run"] if command is TRAIN else command
    with Program("-m", "shardwise", *words, TEST_SIGNAL_AT_IMPORT=f"{name} {imported} {process}") as program:
        program.finish(exit_code=code)
    assert "Traceback" not in program.stderr
    assert program.stdout == ""
