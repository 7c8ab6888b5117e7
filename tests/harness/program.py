"""Programs started by a test, which waits for their output, files and end, and which they never outlive."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.stacks import stacks
from harness.watchdog import WATCHDOG_SECONDS, is_alive, wait_until

_IN_EVERY_PROGRAM = Path(__file__).with_name("in_every_program")
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Program:
    """A process, and all processes that it starts.

    ::

        with Program("-m", "shardwise", "train", "--data", text, SHARDWISE_CACHE=cache) as program:
            program.wait_for_file(out / "checkpoints/step-00000010")
            program.interrupt()
            program.finish(exit_code=130)
        assert "interrupted" in program.stderr

    Every wait ends with its event, or with an AssertionError as soon as the program has ended without it. The watchdog
    (``TEST_WATCHDOG_SECONDS``) is only for hangs; its message has the output, and the stacks of all Python processes
    that the program started. At the end of the block all of these processes are ended.
    """

    def __init__(
        self,
        *command: str | os.PathLike[str],
        folder: str | os.PathLike[str] | None = None,
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = subprocess.PIPE,
        stderr: Any = subprocess.PIPE,
        **variables: str | os.PathLike[str] | None,
    ) -> None:
        words = [os.fspath(word) for word in command]
        self.command = [sys.executable, *words] if words[0].startswith("-") else words
        self._files = Path(tempfile.mkdtemp(prefix="shardwise-stacks-"))
        environment = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCHER}
        for name, value in variables.items():
            environment.pop(name, None)
            if value is not None:
                environment[name] = os.fspath(value)
        environment["TEST_STACKS"] = str(self._files)
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(_IN_EVERY_PROGRAM), environment.get("PYTHONPATH")])
        )
        try:
            self._process = subprocess.Popen(
                self.command,
                env=environment,
                cwd=folder,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        except BaseException:
            shutil.rmtree(self._files)
            raise
        self.pid = self._process.pid
        self._printed = {"stdout": bytearray(), "stderr": bytearray()}
        self._readers = []
        for name, pipe in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
            if pipe is not None:
                reader = threading.Thread(target=self._read, args=(pipe.fileno(), self._printed[name]), daemon=True)
                reader.start()
                self._readers.append(reader)

    @property
    def stdin(self) -> Any:
        """Pipe to the standard input, if the program was created with ``stdin=subprocess.PIPE``."""
        return self._process.stdin

    @property
    def stdout(self) -> str:
        """Standard output up to now, including carriage returns."""
        return self._printed["stdout"].decode(errors="replace")

    @property
    def stderr(self) -> str:
        """Standard error up to now."""
        return self._printed["stderr"].decode(errors="replace")

    @property
    def returncode(self) -> int | None:
        """Exit code, or the negative number of a signal; None while the program runs."""
        return self._process.poll()

    def wait_for_line(self, pattern: str, *, times: int = 1) -> re.Match[str]:
        """Wait until ``times`` whole lines of either output match the regular expression, and return the last match."""
        __tracebackhide__ = True
        found: list[re.Match[str]] = []

        def is_printed() -> bool:
            found[:] = [
                match
                for text in (self.stdout, self.stderr)
                for line in re.split(r"[\r\n]", text)[:-1]
                if (match := re.search(pattern, line))
            ]
            return len(found) >= times

        self.wait_until(is_printed, f"it prints {pattern!r}" + (f" {times} times" if times > 1 else ""))
        return found[times - 1]

    def wait_for_file(self, path: str | os.PathLike[str]) -> None:
        """Wait until a file or folder of this name exists."""
        __tracebackhide__ = True
        self.wait_until(Path(path).exists, f"there is {os.fspath(path)}")

    def wait_until(self, happened: Any, what: str) -> None:
        """Wait until ``happened()`` while the program runs; ``what`` describes the event, for the message."""
        __tracebackhide__ = True

        def happened_or_ended() -> bool:
            # In this order, because the event may come just before the end. Output is complete when the readers end.
            ended = self.returncode is not None and not any(reader.is_alive() for reader in self._readers)
            if happened():
                return True
            if ended:
                raise AssertionError(f"the program ended before {what}\n{self.report()}")
            return False

        wait_until(happened_or_ended, what, report=self.report)

    def finish(self, *, exit_code: int | None = 0) -> Program:
        """Wait until the program and all processes with its output pipes have ended."""
        __tracebackhide__ = True
        wait_until(
            lambda: self.returncode is not None and not any(reader.is_alive() for reader in self._readers),
            "the program and what it started end",
            report=self.report,
        )
        if exit_code is not None and self.returncode != exit_code:
            raise AssertionError(f"expected exit code {exit_code}\n{self.report()}")
        return self

    def wait(self) -> int:
        """Wait until the program itself has ended, but not its children, and return its exit code."""
        __tracebackhide__ = True
        wait_until(lambda: self.returncode is not None, "the program ends", report=self.report)
        return self._process.returncode

    def send(self, number: int) -> None:
        """Send a signal to the process itself, but not to its children."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process itself with SIGKILL, but not its children."""
        self._process.kill()

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        """Send a signal to all processes of the group, as a terminal does on Ctrl-C."""
        os.killpg(self.pid, number)

    def children(self) -> list[int]:
        """Return the running processes that the program started directly."""
        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        pairs = (tuple(map(int, line.split())) for line in listing.splitlines())
        return sorted(child for child, parent in pairs if parent == self.pid and is_alive(child))

    def processes(self) -> list[int]:
        """Return the program and all processes that it started, at any depth, if they still run."""
        mark, found = os.fsencode(f"TEST_STACKS={self._files}"), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            # Most other processes belong to another user, and some end in the meantime.
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b"\0") and is_alive(int(path.parent.name)):
                    found.append(int(path.parent.name))
        return sorted(found)

    def report(self) -> str:
        """Describe the program: last output, exit code, and the stack of each of its processes."""
        code = self.returncode
        lines = [f"command: {' '.join(self.command)}", "still running" if code is None else f"exit code {code}"]
        for name, text in (("stdout", self.stdout), ("stderr", self.stderr)):
            lines += [f"--- {name}, its last 4000 characters", text[-4000:]]
        where = stacks({pid: self._files / str(pid) for pid in self.processes()})
        return "\n".join([*lines, *(f"--- process {pid}\n{text or 'no stack'}" for pid, text in where.items())])

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Repeat while there are any, because one of them may have started another.
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join(WATCHDOG_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        shutil.rmtree(self._files, ignore_errors=True)

    def _read(self, pipe: int, printed: bytearray) -> None:
        while block := os.read(pipe, 1 << 16):
            printed += block


def run(*command: str | os.PathLike[str], exit_code: int | None = 0, **options: Any) -> Program:
    """Run a program to its end; the arguments are those of ``Program`` and ``Program.finish``."""
    __tracebackhide__ = True
    with Program(*command, **options) as program:
        return program.finish(exit_code=exit_code)
