"""Runs cases on a target, in another process (``shardwise.conformance.rank_program``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardwise.conformance.case import Case, cases_like
from shardwise.conformance.outcomes import Report, Result
from shardwise.conformance.targets import check_target
from shardwise.core.errors import ConfigError, LaunchError
from shardwise.core.processes import loopback_interface


def run(
    target: str | Path,
    cases: str | Sequence[str] | None = None,
    *,
    seconds: float | None = None,
    on_result: Callable[[Result], None] | None = None,
) -> Report:
    """Run the cases of the catalogue on a target.

    A case that does not end within its time, or ends a rank, has failed, and the others run all the same.

    Args:
        target: name of a target, or path of a file of Python with functions of ``protocol.Target``.
        cases: pattern, or patterns, of the cases' names; all cases if None.
        seconds: time limit of each case; that of the case if None.
        on_result: callback for each result, as soon as it is known.

    Returns:
        The results, in the order of the catalogue.

    Raises:
        ConfigError: there is no such target or case, or the target cannot be imported.
        LaunchError: the process with the ranks did not start, or ended.
    """
    name = str(target)
    check_target(name)
    chosen = cases_like(cases)
    results = []
    with tempfile.TemporaryDirectory(prefix="shardwise-conformance-", ignore_cleanup_errors=True) as folder:
        ranks = _Ranks(name, Path(folder))
        try:
            for each in chosen:
                missing = [needed for needed in each.needs if not ranks.offers(needed)]
                results.append(Result(each, "not offered", ", ".join(missing)) if missing else ranks.run(each, seconds))
                if on_result is not None:
                    on_result(results[-1])
        finally:
            ranks.end()
    return Report(name, ranks.versions, tuple(results))


class _Ranks:
    """The process that has imported the target and starts the ranks."""

    def __init__(self, target: str, folder: Path) -> None:
        self._target, self._log = target, folder / "log"
        # A folder of Python's path in front of the others could hide modules: -P leaves out the current one.
        program = [sys.executable, *([] if "" in sys.path[:1] else ["-P"]), "-m", "shardwise.conformance.rank_program"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*program, target, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(),
                text=True,
            )
        try:
            first = self._reply()
            if "error" in first:
                raise ConfigError(f"the target {target} cannot be imported: {first['error']}; install what it imports")
        except BaseException:
            self.end()
            raise
        self.offered: frozenset[str] = frozenset(first["offered"])
        self.versions: dict[str, str] = first["versions"]

    def offers(self, needed: str) -> bool:
        """Return whether the target offers a name, or a function with an argument."""
        function, _, argument = needed.partition(".")
        return not {needed, f"{function}.*" if argument else needed}.isdisjoint(self.offered)

    def run(self, case: Case, seconds: float | None) -> Result:
        began = time.monotonic()
        assert self._process.stdin is not None
        print(json.dumps({"case": case.name, "seconds": seconds or case.seconds}), file=self._process.stdin, flush=True)
        reply = self._reply()
        return Result(case, reply["outcome"], reply["message"], time.monotonic() - began)

    def _reply(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
            raise LaunchError(f"the process with the ranks of target {self._target} ended: {said[-1]}")
        return json.loads(line)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait()


def _environment() -> dict[str, str]:
    """Return the environment of a rank: one thread unless the user has set another number, the loopback interface."""
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    loopback = loopback_interface()
    return defaults | os.environ | ({} if loopback is None else {"GLOO_SOCKET_IFNAME": loopback})
