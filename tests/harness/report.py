"""Describe the failure of a test of several ranks."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from harness.messages import Outcome, Reply


@dataclass(frozen=True)
class RankState:
    """State of one rank at the end of a command.

    A rank with a reply has ended the command. A rank with only an exit code died before that. A rank with neither was
    still running, at the position in ``stack``.
    """

    reply: Reply | None = None
    exit_code: int | None = None
    stack: str = ""

    @property
    def died(self) -> bool:
        return self.reply is None and self.exit_code is not None

    @property
    def running(self) -> bool:
        return self.reply is None and self.exit_code is None

    @property
    def failed(self) -> bool:
        return self.reply is not None and self.reply.outcome is Outcome.FAILED


def describe_failure(states: Sequence[RankState], timeout: float, doing: str) -> str | None:
    """Describe a failure, the root cause first; None if there is no failure.

    A rank that died is the cause of all other failures, because its peers fail in their next collective. Otherwise the
    rank that failed first is the cause. A waiting rank is the cause only if no other rank has failed.
    """
    size = len(states)
    died = [rank for rank, state in enumerate(states) if state.died]
    failed = sorted(
        (state.reply.time, rank) for rank, state in enumerate(states) if state.reply is not None and state.failed
    )
    running = [rank for rank, state in enumerate(states) if state.running]
    details = []
    if died:
        headline = f"rank {died[0]} of {size} {_death(states[died[0]].exit_code)} during {doing}"
    elif failed:
        reply = states[failed[0][1]].reply
        assert reply is not None
        headline = f"rank {failed[0][1]} of {size} failed in {doing}: {_first_line(reply.summary)}"
    elif running:
        noun = "rank" if len(running) == 1 else "ranks"
        names = ", ".join(map(str, running))
        headline = f"{noun} {names} of {size} still in {doing} at its time limit of {timeout:g} s"
    elif len({state.reply.outcome for state in states if state.reply is not None}) > 1:
        headline = f"the {size} ranks disagree on {doing}"
    else:
        return None
    details += [f"  rank {rank}: {_line(state, failed)}" for rank, state in enumerate(states)]
    details += [f"\nstack of rank {rank} when it died:\n{states[rank].stack}" for rank in died if states[rank].stack]
    if failed:
        first = states[failed[0][1]].reply
        assert first is not None
        details.append(f"\ntraceback of rank {failed[0][1]}:\n{first.traceback}")
    elif not died:
        details += [f"\nstack of rank {rank}:\n{states[rank].stack}" for rank in running]
    return "\n".join([headline, *details])


def _death(exit_code: int | None) -> str:
    assert exit_code is not None
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended its process with exit code {exit_code}"


def _line(state: RankState, failed: Sequence[tuple[float, int]]) -> str:
    if state.died:
        return _death(state.exit_code)
    if state.reply is None:
        # The innermost frames of a waiting rank are in torch.distributed. The first other frame shows the test's call.
        frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', state.stack)
        ours = [frame for frame in frames if "site-packages" not in frame[0] and "/lib/python" not in frame[0]]
        place = "".join(f", at {path}:{line} in {name}" for path, line, name in (ours or frames)[:1])
        return f"still running{place}"
    summary = _first_line(state.reply.summary)
    if state.failed and len(failed) > 1:
        later = state.reply.time - failed[0][0]
        return f"failed {f'{later * 1000:.0f} ms later' if later else 'first'}: {summary}"
    return f"{state.reply.outcome.value}{f': {summary}' if summary else ''}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
