"""Teaches pytest the mark ``ranks`` (see ``harness/plugin.py``) and the fixture ``pretended_gpu``."""

import os
import signal

import pytest
from harness.plugin import (
    group,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_generate_tests,
    pytest_itemcollected,
    pytest_pyfunc_call,
    pytest_unconfigure,
)
from harness.pretended_gpu import pretended_gpu
from harness.short_samples import shorten_samples
from hypothesis import HealthCheck, settings

from shardwise.core import slow_work

__all__ = [
    "group",
    "pretended_gpu",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_generate_tests",
    "pytest_itemcollected",
    "pytest_pyfunc_call",
    "pytest_unconfigure",
]

# A machine without a GPU could only skip them: `make gpu` runs them, benchmarks/test_gpu_benchmark.py rehearses them.
collect_ignore = [] if os.environ.get("SHARDWISE_GPU_TESTS") else ["gpu"]

# A shell that starts the tests in the background lets them ignore Ctrl-C, nohup SIGHUP, and so all programs that they
# start; tests send both to some of these.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_tests(tmp_path_factory):
    """Keep the user's cache as it is, and let nothing in it hide a fault."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_lines_about_slow_work():
    """How long a command takes says how busy the machine is: what it prints should not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slow_work, "_FIRST_SECONDS", 1e6)
        yield


@pytest.fixture(scope="session", autouse=True)
def _short_samples():
    shorten_samples()


# How long an example takes says how busy the machine is.
settings.register_profile("no limits", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no limits")
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # The tests themselves go on; a program that is started has the default again.
    signal.signal(signal.SIGHUP, lambda *_: None)
