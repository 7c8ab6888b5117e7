"""Who is connected to this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from torch.distributed import ProcessGroup

from shardwise.core.errors import TopologyError
from shardwise.core.sockets import own_inodes, refuse_strangers, sockets
from shardwise.core.topology import Topology


@pytest.fixture(params=[("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)], ids=["4", "6"])
def connection(request: pytest.FixtureRequest) -> Iterator[tuple[set[str], socket.socket]]:
    """The sockets before there was one that listens, and the other end of a connection to it."""
    address, family = request.param
    before = own_inodes()
    with ExitStack() as stack:
        try:
            listening = stack.enter_context(closing(socket.create_server((address, 0), family=family)))
        except OSError:
            pytest.skip(f"no address {address} here")
        caller = stack.enter_context(closing(socket.socket(family)))
        caller.connect(listening.getsockname()[:2])
        stack.enter_context(closing(listening.accept()[0]))
        yield before, caller


def test_a_connection_of_another_user_is_refused(connection, monkeypatch):
    before, _ = connection
    refuse_strangers(before)
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    with pytest.raises(TopologyError, match=rf"^user {me} on this machine connected to this rank"):
        refuse_strangers(before)
    # What listened before has other callers.
    refuse_strangers(own_inodes())


def test_so_is_one_whose_user_is_not_known_any_more(connection):
    before, caller = connection
    caller.close()
    with pytest.raises(
        TopologyError, match=r"^a rank or another process that has ended on this machine connected to this rank"
    ):
        refuse_strangers(before)


def test_addresses_and_users_are_those_of_the_kernel(connection):
    _, caller = connection
    here, there = ((str(each[0]), each[1]) for each in next(
        (each.here, each.there) for each in sockets() if each.here[1] == caller.getsockname()[1]
    ))  # fmt: skip
    assert (here, there) == (caller.getsockname()[:2], caller.getpeername()[:2])


@pytest.mark.ranks(2)
def test_a_rank_with_a_stranger_ends_the_set_up_on_every_rank(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch):
    me = os.getuid()
    # gloo lets one of the two ranks connect to the other: both look at the one that was connected to.
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    with pytest.raises(TopologyError, match=f"user {me} on this machine"):
        Topology.create(tp=2)
    monkeypatch.undo()
    Topology.create(tp=2).destroy()
