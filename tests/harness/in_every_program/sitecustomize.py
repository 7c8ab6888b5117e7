"""Imported by Python at start-up, in every program that ``harness.program`` starts and in their child programs.

On SIGUSR1 the process writes the stacks of all its threads to its own file in ``$TEST_STACKS``, even if it is stuck in
C code. It cannot import the modules named in ``$TEST_WITHOUT_MODULES``. ``$TEST_SIGNAL_AT_IMPORT`` has the names of a
signal and of a module, and ``launcher`` or ``rank``: when such a process begins to import the module, it sends itself
the signal, and a rank also its launcher.
"""

import faulthandler
import os
import signal
import sys


def _answer_signals() -> None:
    path = os.path.join(os.environ["TEST_STACKS"], str(os.getpid()))
    # A descriptor, because an unclosed file object would cause a warning when the program ends.
    file = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    # The final name shows that the signal has a handler now and no longer ends the process.
    os.rename(f"{path}.new", path)


if os.path.isdir(os.environ.get("TEST_STACKS", "")):
    _answer_signals()
    os.register_at_fork(after_in_child=_answer_signals)

# None as an entry of sys.modules makes the import of that module fail.
sys.modules.update(dict.fromkeys(os.environ.get("TEST_WITHOUT_MODULES", "").split()))  # type: ignore[arg-type]


def _signal_at_import(name: str, module: str, process: str) -> None:
    own, launcher = os.getpid(), os.environ.get("SHARDWISE_LAUNCHER_PID")
    sent: list[int] = []

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event == "import" and arguments[0] == module and os.getpid() == own and not sent:
            sent.extend([int(launcher), own] if launcher else [own])
            for pid in sent:
                os.kill(pid, signal.Signals[name])

    if (process == "rank") == ("RANK" in os.environ):
        sys.addaudithook(watch)


if "TEST_SIGNAL_AT_IMPORT" in os.environ:
    _signal_at_import(*os.environ["TEST_SIGNAL_AT_IMPORT"].split())
