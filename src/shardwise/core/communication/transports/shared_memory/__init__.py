"""Collectives between CPU ranks of one machine, through memory that they share.

gloo sends even between two processes of one machine through sockets and its own threads: a small collective takes
hundreds of microseconds, most of them waiting for a thread to wake. Here every rank copies its part into a slot of
shared memory, raises a flag, waits for the flags of the others and reads their slots.

``channel`` is the protocol (slots, flags, waiting), ``exchanges`` has the collectives on top of it and the transport
that the rest of the library calls; ``opening`` finds out whether the ranks of a group can share memory.
"""

from shardwise.core.communication.transports.shared_memory.exchanges import CARRIED, REDUCTIONS, SharedMemory
from shardwise.core.communication.transports.shared_memory.opening import (
    SWITCH,
    channel_of,
    close_channel,
    why_not_here,
)

__all__ = ["CARRIED", "REDUCTIONS", "SWITCH", "SharedMemory", "channel_of", "close_channel", "why_not_here"]
