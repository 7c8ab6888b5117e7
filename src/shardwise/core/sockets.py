"""TCP sockets of this process, and who is at their other ends, as Linux lists them.

gloo takes any process that connects and sends a small number for a rank, and ranks send each other pickles. Every user
of a machine can connect to its loopback interface. Therefore a rank checks who is connected before it reads from a
group.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import sys
from dataclasses import dataclass
from typing import Any

from shardwise.core.errors import TopologyError

_LISTENS, _CLOSED = "0A", ("06", "07")


@dataclass(frozen=True)
class Socket:
    """A TCP socket of this machine.

    ``here`` and ``there`` are address and port of this end and of the other end, zeros if it listens. ``state`` is the
    kernel's number, ``uid`` the user who made it, and ``inode`` its number in the descriptors.
    """

    here: tuple[Any, int]
    there: tuple[Any, int]
    state: str
    uid: int
    inode: str

    @property
    def listens(self) -> bool:
        """True if the socket waits for connections."""
        return self.state == _LISTENS


def sockets() -> list[Socket]:
    """Return the TCP sockets of this machine; an empty list where the system is not Linux."""
    found = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{name}", encoding="ascii") as table:
            for row in list(table)[1:]:
                words = row.split()
                if words[3] not in _CLOSED:
                    found.append(Socket(_address(words[1]), _address(words[2]), words[3], int(words[7]), words[9]))
    return found


def own_inodes(pid: int | str = "self") -> set[str]:
    """Return the inodes of the sockets that a process has open."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                kind, _, inode = os.readlink(f"/proc/{pid}/fd/{descriptor}").partition(":")
                if kind == "socket":
                    found.add(inode.strip("[]"))
    return found


def refuse_strangers(since: set[str]) -> None:
    """Raise TopologyError if another user of this machine is connected to a socket of this process.

    Nothing is checked where the system is not Linux. Connections of other machines are not checked, and neither are
    those to the listening sockets of the inodes ``since``.
    """
    everyone, own = sockets(), own_inodes()
    ports = {each.here[1] for each in everyone if each.listens and each.inode in own - since}
    by_ends = {(each.here, each.there): each for each in everyone}
    found = set()
    for each in everyone:
        if each.inode in own and not each.listens and each.here[1] in ports:
            other = by_ends.get((each.there, each.here))
            if other is not None and other.inode != "0":
                found |= {f"user {other.uid}"} - {f"user {os.getuid()}"}
            elif other is not None or each.there[0].is_loopback:
                # The kernel does not know the user of a socket that its process has closed.
                found.add("a rank or another process that has ended")
    if found:
        raise TopologyError(
            f"{', '.join(sorted(found))} on this machine connected to this rank while the ranks connected to each "
            "other, and could be taken for a rank; find out what connects to ports of this machine, and start again"
        )


def _address(text: str) -> tuple[Any, int]:
    """Parse "0100007F:1F90". The kernel prints an address as numbers of 32 bits of this machine's byte order."""
    number, _, port = text.partition(":")
    raw = bytes.fromhex(number)
    if sys.byteorder == "little":
        raw = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
    address = ipaddress.ip_address(raw)
    return getattr(address, "ipv4_mapped", None) or address, int(port, 16)
