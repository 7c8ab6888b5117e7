"""Messages between a pool and its ranks.

Messages are plain pickles between processes of one test session; none is written to disk.
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
        path: file of the test module.
        qualname: qualified name of the function in the module, such as ``TestClass.test_name``.
        sys_path: ``sys.path`` of pytest, for the imports of the module.
        folder: working directory of pytest.
        traceback_style: pytest's ``--tb``, a style that ``ExceptionInfo.getrepr`` supports.
        warning_filters: pickle of the ``warnings.filters`` for the test.
        arguments: pickle of the function's arguments by name, separate because they may contain classes of the test
            module, which the rank must import first.
        environment: pytest's environment variables that start with ``SHARDWISE_``, set during the test.
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
    """Clean up after a test. Sent when every rank has ended the test, because others may still need a group."""


@dataclass(frozen=True)
class Leave:
    """End the process."""


Command = RunTest | CleanUp | Leave


@dataclass(frozen=True)
class Reply:
    """Result of a command on one rank."""

    outcome: Outcome
    time: float
    summary: str = ""
    traceback: str = ""
    reusable: bool = True
