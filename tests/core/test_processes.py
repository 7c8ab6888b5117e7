"""Calls of a function on all cores of a process."""

from __future__ import annotations

import gc
import os
from functools import partial

import pytest
import torch.distributed as dist

from shardwise.core.processes import call_in_fresh_process, in_forks


def tenfold(number):
    if number == 13:
        raise LookupError("there is no 13")
    return 10 * number, os.getpid()


@pytest.mark.slow
def test_results_have_the_order_of_the_arguments(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    results = in_forks(tenfold, range(8))
    assert [number for number, _ in results] == [0, 10, 20, 30, 40, 50, 60, 70]
    assert os.getpid() not in {process for _, process in results}
    # The function is not pickled.
    unpicklable = open(os.devnull)  # noqa: SIM115
    with unpicklable:
        results = in_forks(partial(lambda _, number: tenfold(number), unpicklable), [1, 2])
    assert [number for number, _ in results] == [10, 20]


@pytest.mark.slow
def test_an_error_of_a_process_is_raised(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(LookupError, match="there is no 13"):
        in_forks(tenfold, [1, 13, 3])


def no_autograd(parent, number):
    if os.getpid() != parent:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")
    return number, parent


@pytest.mark.slow
def test_where_autograd_refuses_forks_this_process_calls(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert in_forks(partial(no_autograd, os.getpid()), [4, 5]) == [(4, os.getpid()), (5, os.getpid())]


def test_one_core_or_one_argument_needs_no_process(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert in_forks(tenfold, [1, 2]) == [(10, os.getpid()), (20, os.getpid())]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert in_forks(tenfold, [1]) == [(10, os.getpid())]
    assert in_forks(tenfold, []) == []


@pytest.mark.ranks(1)
def test_a_rank_calls_the_function_itself(group):
    assert in_forks(tenfold, [1, 2]) == [(10, os.getpid()), (20, os.getpid())]


def collected(number):
    gc.collect()
    return number


def left_process_group():
    """A process group in a cycle, which only a collection ends."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cycle = [dist.group.WORLD]
    cycle.append(cycle)
    dist.destroy_process_group()
    return cycle


@pytest.mark.parametrize("reachable", [False, True])
def test_a_fork_does_not_end_a_process_group_whose_threads_it_lacks(reachable):
    gc.disable()
    try:
        kept = [left_process_group()]
        if not reachable:
            kept.clear()
        assert in_forks(partial(collected_without, kept), [1, 2]) == [1, 2]
    finally:
        gc.enable()


def collected_without(kept, number):
    # What this process still held, the fork drops.
    kept.clear()
    return collected(number)


def test_a_fresh_process_leaves_modules_of_the_folder_alone(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise SystemExit('the module of the folder')")
    monkeypatch.chdir(tmp_path)
    assert call_in_fresh_process("os:getcwd") == str(tmp_path)
