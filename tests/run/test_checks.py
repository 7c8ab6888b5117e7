"""What `shardwise env --check` finds before a run fails."""

from __future__ import annotations

import json
import os
import shutil
import socket
from types import SimpleNamespace

import pytest
import torch

from shardwise.cli.main import main
from shardwise.run.processes import checks
from shardwise.run.processes.checks import _is_chosen, find_problems


@pytest.fixture
def machine(monkeypatch):
    """A machine on which nothing is wrong; a test changes it."""
    for name in ("MASTER_ADDR", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(checks, "_DRIVERS", {})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 30))
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")])
    return monkeypatch


def gpus(machine, number, apart=()):
    machine.setattr(torch.cuda, "is_available", lambda: number > 0)
    machine.setattr(torch.cuda, "device_count", lambda: number)
    machine.setattr(torch.cuda, "can_device_access_peer", lambda *pair: pair not in apart)


def only_problem():
    (problem,) = find_problems()
    return problem


def test_nothing_is_wrong(machine, capsys):
    assert find_problems() == []
    assert main(["env", "--check"]) == 0
    assert capsys.readouterr().out == "nothing found that would make a run fail here\n"
    gpus(machine, 2)
    machine.setattr(checks, "find_spec", lambda _: object())
    machine.setattr(checks, "why_no_compiler", lambda: None)
    assert find_problems() == []


def test_gpus_that_pytorch_does_not_use(machine, tmp_path):
    machine.setattr(checks, "_DRIVERS", {"NVIDIA's": str(tmp_path)})
    gpus(machine, 0)
    machine.setattr(torch.version, "cuda", None)
    machine.setattr(torch.version, "hip", None)
    assert "built without support for them: install the build that PyTorch's installation page names" in only_problem()
    machine.setattr(torch.version, "cuda", "13.0")
    assert "finds none: check the driver and CUDA_VISIBLE_DEVICES" in only_problem()


def test_no_compiler(machine):
    gpus(machine, 1)
    machine.setattr(checks, "find_spec", lambda _: None)
    assert "no package triton" in only_problem()
    machine.setattr(checks, "find_spec", lambda _: object())
    machine.setattr(checks, "why_no_compiler", lambda: "there is none")
    assert only_problem().endswith("and there is none: install gcc or set CC")


def test_little_shared_memory(machine):
    machine.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=8 << 20))
    assert "/dev/shm has 8.00 MiB left, and 8 CPU ranks may need " in only_problem()
    machine.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=512 << 20))
    assert find_problems() == []
    gpus(machine, 2)
    machine.setattr(checks, "find_spec", lambda _: object())
    machine.setattr(checks, "why_no_compiler", lambda: None)
    assert (
        "512.0 MiB left, and NCCL between GPUs may need 1.00 GiB: free some, or start the container with"
        in only_problem()
    )


def test_gpus_without_access_to_each_other(machine):
    machine.setattr(checks, "find_spec", lambda _: object())
    machine.setattr(checks, "why_no_compiler", lambda: None)
    gpus(machine, 4, apart={(0, 2), (0, 3), (1, 2), (1, 3)})
    assert only_problem().startswith("GPUs 0 and 2, 0 and 3, 1 and 2, 1 and 3 cannot access each other's memory")
    gpus(machine, 8, apart={(0, other) for other in range(1, 8)})
    assert only_problem().startswith("GPUs 0 and 1, 0 and 2, 0 and 3, 0 and 4, ... cannot")


@pytest.mark.parametrize("variable", ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def test_interfaces(machine, variable, capsys):
    machine.setenv(variable, "wlan0")
    assert only_problem() == f"{variable}=wlan0 names no network interface of this machine: use one of lo, eth0, ib0"
    machine.setenv(variable, "ib0")
    assert find_problems() == []
    machine.setenv("MASTER_ADDR", "node1")
    machine.setattr(checks, "interface_of", lambda _: "eth0")
    # On node1 itself, whose own name may be loopback.
    machine.setattr(checks, "addresses_towards", lambda _: ("127.0.0.1", "127.0.1.1"))
    assert find_problems() == []
    machine.setattr(checks, "addresses_towards", lambda _: ("10.0.0.2", "10.0.0.1"))
    assert only_problem() == f"{variable}=ib0 does not reach MASTER_ADDR node1: use eth0"
    assert main(["env", "--check", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == find_problems()
    assert main(["env", "--check"]) == 1
    assert capsys.readouterr().out == f"problem: {only_problem()}\n"


def test_a_master_that_is_nowhere(machine):
    machine.setenv("MASTER_ADDR", "no-such-host.invalid")

    def nowhere(host):
        raise OSError(f"{host} is unknown")

    machine.setattr(checks, "addresses_towards", nowhere)
    assert "MASTER_ADDR no-such-host.invalid cannot be reached (no-such-host.invalid is unknown)" in only_problem()


@pytest.mark.parametrize(
    ("value", "name", "exactly", "expected"),
    [
        ("eth", "eth0", False, True),
        ("eth", "eth0", True, False),
        ("ib,eth", "eth1", False, True),
        ("=eth", "eth0", False, False),
        ("=eth0", "eth0", False, True),
        ("^docker,lo", "eth0", False, True),
        ("^docker,lo", "docker0", False, False),
        ("^=lo", "lo", False, False),
        ("^=lo", "lo0", False, True),
    ],
)
def test_names_as_nccl_reads_them(value, name, exactly, expected):
    assert _is_chosen(value, name, exactly=exactly) == expected


def test_this_machine_is_asked(monkeypatch):
    """The functions that other tests replace are there, and answer."""
    asked = []
    for module, name in ((shutil, "disk_usage"), (socket, "if_nameindex")):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, own=own, name=name: (asked.append(name), own(*given))[1])
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    assert all(isinstance(each, str) for each in find_problems())
    assert {*asked} == {"disk_usage", "if_nameindex"}
    assert checks._DRIVERS
    assert os.path.isdir(checks.SHARED_MEMORY_FOLDER)
