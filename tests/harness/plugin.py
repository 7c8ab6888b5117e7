"""The mark ``ranks``: run the body of a test on several ranks at once.

::

    @pytest.mark.ranks(4)                # once, on four ranks
    @pytest.mark.ranks(1, 2, 4)          # once for each size; ids start with tp1, tp2, tp4
    @pytest.mark.ranks(4, timeout=2)     # for a test that hangs: the seconds that its ranks may sleep, see ``pool``
    @pytest.mark.ranks(1, 2, 4, slow=(1, 4))  # some sizes also have the mark `slow` (see below)

Without ``slow`` in the mark, all of several sizes are slow except one: 2, else 3, else the smallest. So of 1, 2, 3 and
4, the slow sizes are 1, 3 and 4. A single size of four or more is also slow.

The mark ``matrix`` is for cases that ``make test`` leaves to ``make test-all``. In addition to cases marked by hand,
the plugin marks sizes of four and more in tests that also have two or three ranks, and, in tests with three parameters
or more, the cases that are not needed to cover every pair of two parameters' values. In a test with the mark
``sample(n)`` it marks all cases but ``n``, which lie at equal distances in the order of the parameters.

The body runs in the ranks; everything else runs in pytest's process: collection, fixtures, set-up methods.
Values of fixtures and parameters are pickled and sent, the same to every rank (so ``tmp_path`` is one folder).
Each rank has its own values of two arguments: ``group``, its default process group, and ``monkeypatch``.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import warnings
from itertools import combinations
from typing import Any, Literal

import pytest
import torch

from harness.messages import Outcome, RunTest
from harness.pool import TEST_TIMEOUT, Pools, RankError

_POOLS = pytest.StashKey[Pools]()
_SIZE = "_num_ranks"
_Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two parameters of a case, each with name and value."""

# gloo sometimes fails to connect the sockets of a new group, about once in several runs of all tests, without an error
# of a rank. If it fails twice in a row, the test is the cause.
_NOT_CONNECTED = "Gloo connectFullMesh failed"


def pytest_configure(config: pytest.Config) -> None:
    """Compute on one thread here, as in the ranks: waiting threads spin, and the ranks need the cores."""
    torch.set_num_threads(1)


class GroupOfRanks:
    """Placeholder for ``group`` until each rank replaces it with its own group."""


# Session scope, because hypothesis rejects function-scoped fixtures with @given.
@pytest.fixture(scope="session")
def group() -> GroupOfRanks:
    """Default process group of the rank that runs the test."""
    return GroupOfRanks()


def _sizes(mark: pytest.Mark) -> tuple[int, ...]:
    if (
        not mark.args
        or any(not isinstance(size, int) or size < 1 for size in mark.args)
        or mark.kwargs.keys() - {"timeout", "slow"}
        or not set(mark.kwargs.get("slow", ())) < set(mark.args)
    ):
        raise pytest.UsageError(
            f"{mark} must be ranks(size, ...), also with timeout=seconds, and slow=(size, ...) of some of its sizes"
        )
    return mark.args


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test once for each size of its mark."""
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is not None and len(sizes := _sizes(mark)) > 1:
        metafunc.fixturenames.append(_SIZE)
        # Two or three ranks find nearly all errors that other sizes would find.
        fast = min((size for size in sizes if 1 < size < 4), default=min(sizes))
        slow = mark.kwargs.get("slow", [size for size in sizes if size != fast])
        marks = {size: [pytest.mark.slow] if size in slow else [] for size in sizes}
        if fast in (2, 3):
            for size in sizes:
                marks[size] += [pytest.mark.matrix] if size >= 4 else []
        params = [pytest.param(size, id=f"tp{size}", marks=marks[size]) for size in sizes]
        metafunc.parametrize(_SIZE, params)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests with four or more ranks as slow: they take turns on the cores, and need another pool."""
    mark = item.get_closest_marker("ranks")
    if mark is not None and "slow" not in mark.kwargs and len(mark.args) == 1 and mark.args[0] >= 4:
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that a cover of pairs does not need, before the command line selects tests by marks."""
    cases: dict[str, list[tuple[pytest.Item, frozenset[_Pair]]]] = {}
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("matrix") is None:
            values = sorted((name, repr(value)) for name, value in item.callspec.params.items())
            pairs = frozenset(combinations(values, 2))
            cases.setdefault(item.nodeid.split("[")[0], []).append((item, pairs))
    for several in cases.values():
        for item in _beyond_a_cover(several):
            item.add_marker(pytest.mark.matrix)
        sample = several[0][0].get_closest_marker("sample")
        left = [item for item, _ in several if item.get_closest_marker("matrix") is None]
        if sample is not None:
            (number,) = sample.args
            chosen = {round((place + 0.5) * len(left) / number - 0.5) for place in range(number)}
            for place, item in enumerate(left):
                if place not in chosen:
                    item.add_marker(pytest.mark.matrix)


def _beyond_a_cover(cases: list[tuple[pytest.Item, frozenset[_Pair]]]) -> list[pytest.Item]:
    """Return the cases that a greedy cover leaves out: it takes the case with the most new pairs until none is new."""
    missing = frozenset[_Pair]().union(*(pairs for _, pairs in cases))
    left = list(cases) if missing else []
    while missing:
        best = max(left, key=lambda case: len(case[1] & missing))
        left.remove(best)
        missing -= best[1]
    return [item for item, _ in left]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Literal[True] | None:
    """Run the body of a test with the mark ``ranks`` on a pool of ranks."""
    mark = pyfuncitem.get_closest_marker("ranks")
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    if mark is None:
        if any(isinstance(value, GroupOfRanks) for value in arguments.values()):
            pytest.fail("a test that takes `group` needs the mark ranks: @pytest.mark.ranks(2)", pytrace=False)
        return None
    size: Any = pyfuncitem.callspec.params.get(_SIZE) if hasattr(pyfuncitem, "callspec") else None
    if size is None:
        (size,) = _sizes(mark)
    pools = pyfuncitem.config.stash.setdefault(_POOLS, Pools())
    command, timeout = _command(pyfuncitem, arguments), mark.kwargs.get("timeout", TEST_TIMEOUT)
    try:
        try:
            reply = pools.run(size, command, timeout)
        except RankError as error:
            if _NOT_CONNECTED not in str(error):
                raise
            pyfuncitem.add_report_section("call", "ranks", f"run again on new ranks, for the first time {error}")
            reply = pools.run(size, command, timeout)
    except RankError as error:
        failure = str(error)
    else:
        if reply.outcome is Outcome.SKIPPED:
            # Report the location of the test, not of this line.
            raise pytest.skip.Exception(reply.summary, _use_item_location=True)
        if reply.outcome is Outcome.XFAILED:
            pytest.xfail(reply.summary)
        return True
    pytest.fail(failure, pytrace=False)


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, as in the ranks."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close the pools, also after Ctrl-C."""
    pools = config.stash.get(_POOLS, None)
    if pools is not None:
        pools.close()


def _command(item: pytest.Function, arguments: dict[str, Any]) -> RunTest:
    own = {"group", "monkeypatch"}
    sent = {name: None if name in own else value for name, value in arguments.items()}
    _check_picklable(sent)
    style = item.config.getoption("tbstyle")
    return RunTest(
        module=item.module.__name__,
        path=str(item.path),
        qualname=f"{item.cls.__qualname__}.{item.originalname}" if item.cls else item.originalname,
        sys_path=list(sys.path),
        folder=os.getcwd(),
        # pytest's default would quote whole functions of torch.distributed.
        traceback_style="short" if style == "auto" else style,
        # The current filters of pytest, from its configuration, its command line and the test's marks.
        warning_filters=pickle.dumps(list(warnings.filters)),
        arguments=pickle.dumps(sent),
        environment={name: value for name, value in os.environ.items() if name.startswith("SHARDWISE_")},
    )


def _check_picklable(arguments: dict[str, Any]) -> None:
    failure = None
    for name, value in arguments.items():
        try:
            pickle.dumps(value)
        # Pickling can raise any error, depending on the value.
        except Exception as reason:
            failure = (
                f"argument {name!r} of a test on ranks cannot be sent to them ({reason}); make it in the body of the "
                "test, or name something that the test module defines"
            )
    if failure is not None:
        pytest.fail(failure, pytrace=False)
