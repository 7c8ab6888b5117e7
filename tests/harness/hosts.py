"""Two hosts on this machine, joined by a cable that can be cut: network namespaces and a pair of virtual interfaces.

Each host has its own interfaces, its own name and its own ``/etc/hosts``, but shares files and processes with this
machine. Needs root, and the commands of util-linux and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from harness.program import Program

ADDRESSES = ("192.0.2.1", "192.0.2.2")
"""Addresses of the hosts, from a network for documentation (RFC 5737), so that no other host has them."""

NAMES = ("first", "second")
"""Names of the hosts. As on Debian, each host resolves its own name to its loopback address 127.0.1.1."""

_INTERFACE = "eth0"
_TOOLS = ("unshare", "nsenter", "ip", "mount")


class Host:
    """One of the two hosts; ``program`` runs programs on it."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name = NAMES[number]
        self.address = ADDRESSES[number]
        # The namespaces last as long as this process.
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "sh", "-c", "echo made; exec sleep 100000"],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._keeper.pid
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != "made\n":
            self.close()
            raise OSError("this process may not make namespaces")
        hosts = folder / f"hosts-{self.name}"
        other = 1 - number
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n{ADDRESSES[other]} {NAMES[other]}\n")
        self.call("mount", "--bind", str(hosts), "/etc/hosts")
        self.call(sys.executable, "-c", f"import socket; socket.sethostname({self.name!r})")
        self.call("ip", "link", "set", "lo", "up")

    def inside(self, *command: str) -> list[str]:
        """Return the command line that runs ``command`` on this host."""
        return ["nsenter", "--target", str(self.pid), "--net", "--mount", "--uts", *command]

    def call(self, *command: str) -> None:
        """Run a command on this host and wait for its end."""
        subprocess.run(self.inside(*command), check=True, capture_output=True, text=True)

    def program(self, *command: str | os.PathLike[str], **variables: str | os.PathLike[str] | None) -> Program:
        """Start Python with these arguments on this host."""
        # There is no name server here. Without the variable, processes of one machine would use shared memory.
        network = {"RES_OPTIONS": "timeout:1 attempts:1", "SHARDWISE_SHARED_MEMORY": "0"}
        return Program(*self.inside(sys.executable), *command, **{**network, **variables})

    def cut(self) -> None:
        """Disconnect the cable: nothing arrives any more, and neither host is notified."""
        self.call("ip", "link", "set", _INTERFACE, "down")

    def close(self) -> None:
        self._keeper.kill()
        self._keeper.wait()
        assert self._keeper.stdout is not None
        self._keeper.stdout.close()


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[Sequence[Host]]:
    """Create two hosts that reach each other; if this is impossible, skip the test with the reason."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"two hosts take root, and {', '.join(missing or ['nothing else'])} of util-linux and iproute2")
    with contextlib.ExitStack() as stack:
        hosts = []
        try:
            for number in range(2):
                hosts.append(Host(number, folder))
                stack.callback(hosts[-1].close)
            cable = ["ip", "link", "add", _INTERFACE, "type", "veth", "peer", "name", _INTERFACE]
            hosts[0].call(*cable, "netns", str(hosts[1].pid))
            for host in hosts:
                host.call("ip", "address", "add", f"{host.address}/24", "dev", _INTERFACE)
                host.call("ip", "link", "set", _INTERFACE, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or error
            pytest.skip(f"no network namespaces can be made here: {reason}")
        yield hosts
