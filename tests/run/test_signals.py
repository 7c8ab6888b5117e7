"""What a process does on a signal, at whatever moment it comes."""

from __future__ import annotations

import signal
import threading
import weakref

import pytest
from harness.watchdog import WATCHDOG_SECONDS

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
