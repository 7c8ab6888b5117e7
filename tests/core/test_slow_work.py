"""Lines about work that takes long."""

from __future__ import annotations

import logging
import threading

from shardwise.core import slow_work
from shardwise.core.slow_work import told_if_slow


def test_long_work_is_told_with_what_is_done(monkeypatch):
    lines: list[str] = []
    heard = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            heard.set()

    monkeypatch.setattr(slow_work, "_FIRST_SECONDS", 0.01)
    logger, listener = logging.getLogger("shardwise"), Listener()
    logger.addHandler(listener)
    try:
        with told_if_slow("reading a.jsonl", lambda: "3 records"):
            heard.wait()
    finally:
        logger.removeHandler(listener)
    assert lines[0].startswith("reading a.jsonl: 3 records, ")
    assert not [each for each in threading.enumerate() if each.name == "shardwise-slow-work"]
