"""What a pool and its ranks say to each other.

Messages are plain pickles between processes of one test session; nothing of them reaches a disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """How one rank ended a command."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    XFAILED = "xfailed"


@dataclass(frozen=True)
class RunTest:
    """Run the body of one test.

    Attributes:
        module: name of the test module.
        path: its file.
        qualname: the function in the module, as ``TestClass.test_name``.
        sys_path: ``sys.path`` of pytest, from which the module's own imports are found.
        folder: working directory of pytest.
        traceback_style: pytest's ``--tb``, one of those that ``ExceptionInfo.getrepr`` knows.
        warning_filters: pickle of ``warnings.filters`` as they shall be.
        arguments: pickle of the function's arguments by name. They are pickles of their own because they may name
            classes of the test module, which the rank must import first.
        environment: pytest's environment variables that start with ``SHARDWISE_``, in force during the test.
    """

    module: str
    path: str
    qualname: str
    sys_path: list[str]
    folder: str
    traceback_style: str
    warning_filters: bytes
    arguments: bytes
    environment: dict[str, str]


@dataclass(frozen=True)
class CleanUp:
    """Remove what a test left behind. Sent when every rank has ended the test, as others may still need a group."""


@dataclass(frozen=True)
class Leave:
    """End the process."""


Command = RunTest | CleanUp | Leave


@dataclass(frozen=True)
class Reply:
    """How a command ended on one rank.

    Attributes:
        outcome: how.
        time: when, in seconds of the monotonic clock that all processes of a machine share.
        summary: one line: the error, or the reason of a skip.
        traceback: the error's traceback as text; empty unless it failed.
        reusable: the rank's default process group is still the pool's.
    """

    outcome: Outcome
    time: float
    summary: str = ""
    traceback: str = ""
    reusable: bool = True
