"""The artificial load: it is there while the command runs, and not after."""

import os
import re
import signal
import sys
from collections import Counter

import pytest
from harness import under_load
from harness.program import Program, run
from harness.watchdog import wait_until_ended

COMMAND = [sys.executable, "-c", "import os, time; print('begun', os.getpid(), flush=True); time.sleep(1000)"]


def test_the_commands_exit_code_is_handed_on():
    done = run(sys.executable, under_load.__file__, "2", sys.executable, "-c", "print('ran'); exit(7)", exit_code=7)
    assert re.fullmatch(r"2 busy processes in the sessions \d+, \d+, on \d+ cores\nran\n", done.stdout)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_the_load_ends_with_the_program(number):
    with Program(sys.executable, under_load.__file__, "7", *COMMAND) as program:
        command = int(program.wait_for_line(r"^begun (\d+)$")[1])
        program.wait_until(lambda: len(program.processes()) == 9, "all seven run")
        busy = set(program.processes()) - {command, program.pid}
        # As if others had started them: none shares the time of the tests' session.
        sessions = Counter(os.getsid(pid) for pid in busy)
        assert sorted(sessions.values()) == [1, 1, 1, 2, 2]
        assert program.pid not in sessions
        program.send(number)
        assert program.wait() == (130 if number is signal.SIGTERM else -signal.SIGKILL)
        wait_until_ended(*busy)


def test_without_a_command_it_says_what_it_wants():
    assert "the number of busy processes and a command" in run(sys.executable, under_load.__file__, exit_code=2).stderr
