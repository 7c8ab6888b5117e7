"""Programs that tests start: what their waits end with, and that nothing outlives them."""

import signal
from pathlib import Path

import pytest
from harness import program, watchdog
from harness.program import Program, run
from harness.watchdog import is_alive, wait_until_ended

SLEEPS = """
import subprocess, sys, time
def outer():
    code = "def inner(): print('ready', flush=True); time.sleep(1000)"
    child = subprocess.Popen([sys.executable, "-c", f"import time\\n{code}\\ninner()"])
    print("child", child.pid, flush=True)
    time.sleep(1000)
outer()
"""


def test_what_it_prints_and_how_it_ends():
    code = (
        "import os, sys; print('ä\\rb'); print(os.environ['GIVEN'], os.environ.get('HOME'), file=sys.stderr); exit(3)"
    )
    done = run("-c", code, exit_code=3, GIVEN="given", HOME=None)
    assert (done.stdout, done.stderr, done.returncode) == ("ä\rb\n", "given None\n", 3)
    assert run("true").returncode == 0
    with pytest.raises(AssertionError, match=r"(?s)expected exit code 0\n.*exit code 3\n.*stderr.*given None"):
        run("-c", code, GIVEN="given", HOME=None)


def test_waits_end_with_the_event(tmp_path):
    code = "import time, pathlib; print('step 1\\nstep 2', flush=True); pathlib.Path('made').touch(); time.sleep(1000)"
    with Program("-c", code, folder=tmp_path) as process:
        assert process.wait_for_line(r"step (\d)")[1] == "1"
        assert process.wait_for_line(r"step (\d)", times=2)[1] == "2"
        process.wait_for_file(tmp_path / "made")
        process.interrupt(signal.SIGTERM)
        process.finish(exit_code=-signal.SIGTERM)


def test_a_wait_ends_when_the_program_does():
    with Program("-c", "print('something else')") as process:
        with pytest.raises(AssertionError, match=r"ended before it prints 'wanted'(?s:.*)something else"):
            process.wait_for_line("wanted")
        process.wait_for_line("else")


def test_the_watchdog_shows_where_all_processes_stand(monkeypatch):
    with Program("-c", SLEEPS) as process:
        child = int(process.wait_for_line(r"child (\d+)")[1])
        process.wait_for_line("ready")
        monkeypatch.setattr(watchdog, "WATCHDOG_SECONDS", 0.5)
        with pytest.raises(AssertionError) as info:
            process.finish()
    text = str(info.value)
    assert text.startswith("waited 0.5 s in vain until the program and what it started end\n")
    assert f"--- process {process.pid}\n" in text
    assert f"--- process {child}\n" in text
    assert "in outer\n" in text
    assert "in inner\n" in text


def test_nothing_outlives_it():
    with Program("-c", SLEEPS) as process:
        child = int(process.wait_for_line(r"child (\d+)")[1])
        assert process.children() == [child]
        assert process.processes() == [process.pid, child]
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert process.processes() == [child]
        assert is_alive(child)
    assert not is_alive(child)
    assert not process._files.exists()
    wait_until_ended(child, process.pid)


def test_a_program_that_is_not_there_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(program.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        Program(str(tmp_path / "none"))
    assert list(Path(tmp_path).iterdir()) == []
