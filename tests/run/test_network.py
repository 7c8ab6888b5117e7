"""Which network interface reaches the other hosts."""

import socket

import pytest
import torch.distributed as dist

from shardwise.core.errors import ConfigError, LaunchError
from shardwise.run.processes import ranks
from shardwise.run.processes.ranks import addresses_towards, interface_of, meet, ranks_of_host

LOOPBACK = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def test_the_interface_of_an_address():
    assert addresses_towards("127.0.0.1") == ("127.0.0.1", "127.0.0.1")
    assert interface_of("127.0.0.1") == LOOPBACK
    # Documentation's own network (RFC 5737), of which no host is.
    assert interface_of("192.0.2.1") is None
    assert interface_of("fe80::1%eth7") is None


@pytest.fixture
def environment(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "first")
    return monkeypatch


@pytest.mark.parametrize(
    ("towards_master", "others_use", "chosen"),
    [
        (("10.0.0.2", "10.0.0.1"), "", "eth0"),
        # On the master, whose own name points to the loopback address: as the others call it.
        (("127.0.0.1", "127.0.1.1"), "10.0.0.1", "eth1"),
        (("127.0.0.1", "127.0.0.1"), "", "lo"),
        (("10.0.0.9", "10.0.0.1"), "", None),
    ],
)
def test_the_interface_is_that_which_reaches_the_master(environment, towards_master, others_use, chosen):
    interfaces = {"10.0.0.2": "eth0", "10.0.0.1": "eth1", "127.0.0.1": "lo"}
    environment.setattr(ranks, "addresses_towards", lambda host: towards_master)
    environment.setattr(ranks, "interface_of", interfaces.get)
    store = dist.HashStore()
    store.set("shardwise/master-address/1", others_use)
    ranks._choose_interface(store, 0, 2)
    assert ranks.os.environ.get("GLOO_SOCKET_IFNAME") == chosen
    assert ranks.os.environ.get("NCCL_SOCKET_IFNAME") == chosen


def test_what_the_user_chose_stands(environment):
    environment.setenv("GLOO_SOCKET_IFNAME", "ib0")
    environment.setattr(ranks, "addresses_towards", lambda host: ("10.0.0.2", "10.0.0.1"))
    environment.setattr(ranks, "interface_of", lambda address: "eth0")
    ranks._choose_interface(dist.HashStore(), 0, 2)
    assert ranks.os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    assert ranks.os.environ["NCCL_SOCKET_IFNAME"] == "eth0"


def test_who_cannot_join_is_told_of_the_variable(environment):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        environment.setenv(name, value)

    def refuse(*_, **__):
        raise RuntimeError("connect: Connection refused")

    environment.setattr(dist, "rendezvous", refuse)
    with pytest.raises(LaunchError, match=r"rank 1 of 2 could not join the others at 127.0.0.1:9 .*GLOO_SOCKET_IFNAME"):
        meet(1, 2, ranks.datetime.timedelta(seconds=1))


def test_without_the_number_of_ranks_of_a_host_the_ranks_compare_hosts(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    # A launcher that reserves one GPU for each rank may call it 0 everywhere.
    monkeypatch.setenv("LOCAL_RANK", "0")
    store = dist.HashStore()
    for rank, host in enumerate(["one", "two", "one", "two", "one"]):
        store.set(f"shardwise/host/{rank}", host)
    monkeypatch.setattr(ranks, "machine", lambda: "one")
    assert [*ranks_of_host(store, 2, 5)] == [0, 2, 4]
    monkeypatch.setattr(ranks, "machine", lambda: "two")
    assert [*ranks_of_host(store, 3, 5)] == [1, 3]
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert [*ranks_of_host(store, 3, 5)] == [2, 3]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2, but ranks of a host count from 0"):
        ranks_of_host(store, 3, 5)
    # Left by something else: one rank may have any number.
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert 0 in ranks_of_host(store, 0, 1)
