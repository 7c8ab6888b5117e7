"""Hypothesis on several ranks: every rank draws the same examples, and a failure is reported once and immediately."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


class FailedExample(BaseException):
    """An example failed.

    It is not an Exception, so that hypothesis does not catch it. To shrink or replay the example, one rank would call
    collectives that no other rank calls.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(cause)
        self.cause = cause


def draw_alike(test: Callable[..., None]) -> None:
    """Prepare a test with ``@given`` for several ranks; other tests are not modified.

    Examples depend only on the test's source (no random seed, no database), and nothing depends on a rank's speed.
    """
    if "hypothesis" not in sys.modules:
        return
    from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings
    from hypothesis.errors import HypothesisException

    function: Any = getattr(test, "__func__", test)
    if not is_hypothesis_test(function) or hasattr(function.hypothesis.inner_test, "_passes_failures"):
        return
    own = getattr(function, "_hypothesis_internal_use_settings", None) or settings()
    function._hypothesis_internal_use_settings = settings(
        own,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[phase for phase in own.phases if phase in (Phase.explicit, Phase.generate)],
        suppress_health_check=[*own.suppress_health_check, HealthCheck.too_slow, HealthCheck.differing_executors],
    )
    function.hypothesis.inner_test = _passing_failures(function.hypothesis.inner_test, HypothesisException)


def _passing_failures(body: Callable[..., None], control: type[Exception]) -> Callable[..., None]:
    """Wrap ``body`` to raise errors as FailedExample, except errors of type ``control``, which steer hypothesis."""

    @functools.wraps(body)
    def run_example(*args: Any, **kwargs: Any) -> None:
        try:
            body(*args, **kwargs)
        except control:
            raise
        except Exception as error:
            example = ", ".join(f"{name}={value!r}" for name, value in kwargs.items() if name != "group")
            error.add_note(f"Falsifying example: {body.__name__}({example})")
            raise FailedExample(error) from error

    run_example._passes_failures = True  # type: ignore[attr-defined]
    return run_example
