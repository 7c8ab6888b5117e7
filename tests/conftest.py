"""Teaches pytest the mark ``ranks``; see ``harness/plugin.py``."""

import signal

from harness.plugin import (
    group,
    pytest_collection_finish,
    pytest_configure,
    pytest_generate_tests,
    pytest_itemcollected,
    pytest_pyfunc_call,
    pytest_unconfigure,
)

__all__ = [
    "group",
    "pytest_collection_finish",
    "pytest_configure",
    "pytest_generate_tests",
    "pytest_itemcollected",
    "pytest_pyfunc_call",
    "pytest_unconfigure",
]

# A shell that starts the tests in the background lets them ignore Ctrl-C, and so all programs that they start; tests
# send it to some of these.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
