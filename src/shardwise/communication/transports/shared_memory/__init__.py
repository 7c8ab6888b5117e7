"""Collectives between CPU ranks of one machine, through memory that they share.

gloo sends even between two processes of one machine through sockets and its own threads: a small collective takes
hundreds of microseconds, most of them waiting for a thread to wake. Here every rank copies its part into a slot of
shared memory, raises a flag, waits for the flags of the others and reads their slots.

``channel`` is the protocol (slots, flags, waiting), ``messages`` the collectives on top of it, ``opening`` finds
out whether the ranks of a group can share memory and gives each group its channel.
"""

from shardwise.communication.transports.shared_memory.channel import Channel, Message
from shardwise.communication.transports.shared_memory.messages import (
    MOVABLE,
    SUMMABLE,
    AllGather,
    AllReduce,
    AllToAll,
    ReduceScatter,
    check_exchange,
)
from shardwise.communication.transports.shared_memory.opening import SWITCH, channel_of, close_channel, why_not_here

__all__ = [
    "MOVABLE",
    "SUMMABLE",
    "SWITCH",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Channel",
    "Message",
    "ReduceScatter",
    "channel_of",
    "check_exchange",
    "close_channel",
    "why_not_here",
]
