"""The protocol of shared memory: slots, and flags that tell their state.

A message is cut into chunks; chunk number ``n`` of the group goes through slot ``n % NUM_SLOTS`` of each rank. Three
numbers per rank and slot are the whole state::

    ready[rank, slot]   the last chunk that the rank put there, written after the data
    read[rank, slot]    the last chunk that the rank has taken out of all ranks' slots; a slot that all ranks have read
                        is used again
    call[rank, slot]    a hash of operation, dtype and shape, which detects disagreements at no cost

The channel uses no locks, because each number has one writer. It requires that stores become visible in program order,
as on x86-64. A waiting rank first spins, then yields if there is a core for each rank of the group, then sleeps for
short intervals. It checks periodically that the other ranks are alive, and it raises at the group's timeout, so that it
never hangs.
"""

from __future__ import annotations

import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.communication.agreement import Wait, layer_of
from shardwise.core.communication.transports.transport import Pending
from shardwise.core.errors import DesyncError, LaunchError, ShardwiseError
from shardwise.core.processes import Process

NUM_SLOTS = 4
# A chunk and its result fit into a core's L2 cache.
SLOT_BYTES = 1 << 19

_CACHE_LINE_WORDS = 8
_NOTE_BYTES = 256
_FLAGS_PER_RANK = 3 * NUM_SLOTS + 1
_WORDS_PER_RANK = _FLAGS_PER_RANK + (-_FLAGS_PER_RANK) % _CACHE_LINE_WORDS
_PAGE = 4096

_SPINS = 200
_YIELD_SECONDS = 2e-3
_SHORTEST_NAP_SECONDS = 5e-5
_LONGEST_NAP_SECONDS = 2e-3
_SECONDS_BETWEEN_LOOKS = 0.1
# All ranks detect a disagreement at the same chunk, as soon as they are scheduled.
_SECONDS_FOR_NOTES = 20.0


def channel_bytes(t: int) -> int:
    """Size in bytes of the shared memory of a channel of ``t`` ranks."""
    return _slots_offset(t) + NUM_SLOTS * t * SLOT_BYTES


def _notes_offset(t: int) -> int:
    return t * _WORDS_PER_RANK * 8


def _slots_offset(t: int) -> int:
    end = _notes_offset(t) + t * _NOTE_BYTES
    return end + (-end) % _PAGE


class Channel:
    """The shared memory of one process group, seen by one rank.

    Args:
        memory: ``channel_bytes(t)`` bytes, zero at first, the same memory on every rank.
        processes: the ranks' processes, in rank order.
        timeout: seconds that a rank waits for another.
        global_ranks: the ranks in the world, in rank order.
    """

    def __init__(
        self, rank: int, memory: Tensor, processes: Sequence[Process], timeout: float, global_ranks: list[int]
    ) -> None:
        self.rank, self.t, self.global_ranks = rank, len(processes), global_ranks
        self._processes, self._timeout = processes, timeout
        self._others = [other for other in range(self.t) if other != rank]
        # If ranks share cores, a spinning rank can occupy the core that the other rank needs.
        self._yield_seconds = _YIELD_SECONDS if self.t <= len(os.sched_getaffinity(0)) else 0.0
        words = _notes_offset(self.t)
        # Reading a number through a memoryview takes a tenth of the time of a tensor or an array.
        self._words = memoryview(cast(Any, memory[:words].view(torch.int64).numpy()))
        self._notes = memoryview(cast(Any, memory[words : words + self.t * _NOTE_BYTES].numpy()))
        self._slots = memory[_slots_offset(self.t) : channel_bytes(self.t)].view(NUM_SLOTS, self.t, SLOT_BYTES)
        self._next = 1
        # For each slot of this rank: the message whose chunk has not been read yet.
        self._in_flight: list[Message | None] = [None] * NUM_SLOTS
        self._rows: dict[tuple[int, torch.dtype, Sequence[int]], tuple[Tensor, ...]] = {}
        self._broken: ShardwiseError | None = None

    def rows(self, slot: int, dtype: torch.dtype, shape: torch.Size | tuple[int, ...]) -> tuple[Tensor, ...]:
        """Return every rank's row of a slot as a tensor of ``shape``, in rank order, followed by the stack of all."""
        key = (slot, dtype, shape)
        rows = self._rows.get(key)
        if rows is None:
            if len(self._rows) >= 4096:
                self._rows.clear()
            count = math.prod(shape)
            # A view created in inference mode cannot be written to outside inference mode.
            with torch.inference_mode(False):
                stacked = self._slots[slot].view(dtype)[:, :count].view(self.t, *shape)
                rows = self._rows[key] = (*stacked.unbind(0), stacked)
        return rows

    def take_slot(self, message: Message) -> tuple[int, int]:
        """Return a slot that all ranks have read, and the number of the chunk to write into it."""
        if self._broken is not None:
            raise self._broken
        while (holder := self._in_flight[self._next % NUM_SLOTS]) is not None:
            # The message was started and is still pending. Every rank gets here in the same call.
            holder.finish()
        number = self._next
        slot = number % NUM_SLOTS
        self._wait(NUM_SLOTS + slot, number - NUM_SLOTS, message)
        self._next = number + 1
        self._in_flight[slot] = message
        return slot, number

    def post(self, slot: int, number: int, call: int) -> None:
        """Signal that this rank has written the slot."""
        own = self.rank * _WORDS_PER_RANK + slot
        self._words[own + 2 * NUM_SLOTS] = call
        self._words[own] = number

    def wait_ready(self, slot: int, number: int, message: Message) -> None:
        """Wait until every rank has written chunk ``number`` into its slot.

        Raises:
            DesyncError: a rank makes a different call, or does not arrive within the timeout.
            LaunchError: a rank has died.
        """
        self._wait(slot, number, message)
        words, call = self._words, message.call
        for other in self._others:
            if words[other * _WORDS_PER_RANK + 2 * NUM_SLOTS + slot] != call:
                raise self._disagreement(message)

    def release(self, slot: int, number: int) -> None:
        """Signal that this rank has read the slot."""
        self._words[self.rank * _WORDS_PER_RANK + NUM_SLOTS + slot] = number
        self._in_flight[slot] = None

    def _wait(self, flag: int, number: int, message: Message) -> None:
        words = self._words
        for other in self._others:
            place = other * _WORDS_PER_RANK + flag
            if words[place] >= number:
                continue
            for _ in range(_SPINS):
                if words[place] >= number:
                    break
            else:
                self._wait_longer(place, number, other, message)

    def _wait_longer(self, place: int, number: int, other: int, message: Message) -> None:
        flag = place - other * _WORDS_PER_RANK

        def missing() -> list[int]:
            return [
                self.global_ranks[each] for each in self._others if self._words[each * _WORDS_PER_RANK + flag] < number
            ]

        name, shape, dtype, *_ = message.description
        with Wait(name, self.global_ranks, (shape, dtype), missing):
            self._wait_for_flag(place, number, other, message)

    def _wait_for_flag(self, place: int, number: int, other: int, message: Message) -> None:
        words = self._words
        start = time.monotonic()
        look = start + _SECONDS_BETWEEN_LOOKS
        now = start
        while words[place] < number:
            waited = now - start
            if waited < self._yield_seconds:
                os.sched_yield()
            else:
                # The sleep lengthens the wait by at most 1 %.
                time.sleep(min(max(_SHORTEST_NAP_SECONDS, waited / 100), _LONGEST_NAP_SECONDS))
            now = time.monotonic()
            if now < look:
                continue
            look = now + _SECONDS_BETWEEN_LOOKS
            if not self._processes[other].runs() and words[place] < number:
                self._broken = LaunchError(
                    f"{self._named(other)} died; rank {self.global_ranks[self.rank]} was waiting for it in {message}"
                )
                raise self._broken
            if now - start > self._timeout:
                layer = layer_of(threading.get_ident())
                self._broken = DesyncError(
                    f"{self._named(other)} did not join rank {self.global_ranks[self.rank]} in {message}"
                    f"{layer and f' of {layer}'} within {self._timeout:g} s; every rank of a group must make the same "
                    "calls in the same order"
                )
                raise self._broken

    def _named(self, other: int) -> str:
        """Name a rank by its number in the run, because a group's number is another."""
        return f"rank {self.global_ranks[other]} of {dist.get_world_size()} (process {self._processes[other].pid})"

    def _disagreement(self, message: Message) -> DesyncError:
        """Build the error for ranks that make different calls, with the same text on every rank."""
        text = str(message).encode()[:_NOTE_BYTES]
        start = self.rank * _NOTE_BYTES
        self._notes[start : start + len(text)] = text
        self._words[self.rank * _WORDS_PER_RANK + 3 * NUM_SLOTS] = len(text)
        end = time.monotonic() + _SECONDS_FOR_NOTES
        calls = []
        for rank in range(self.t):
            place = rank * _WORDS_PER_RANK + 3 * NUM_SLOTS
            while not self._words[place] and time.monotonic() < end:
                time.sleep(_SHORTEST_NAP_SECONDS)
            note = bytes(self._notes[rank * _NOTE_BYTES : rank * _NOTE_BYTES + self._words[place]])
            calls.append(f"rank {self.global_ranks[rank]} is in {note.decode(errors='replace') or 'an unknown call'}")
        self._broken = DesyncError(
            f"ranks disagree: {', '.join(calls)}; every rank of a group must make the same calls in the same order, "
            "with the same shapes and dtypes"
        )
        return self._broken


class Message(Pending, ABC):
    """A collective in flight, divided into chunks. A subclass computes the result from all ranks' rows of each slot.

    Args:
        channel: the group's shared memory.
        description: operation, shape and dtype, for errors.
        call: a number that is the same on all ranks that make the same call.
        sent: this rank's tensor; or a list of flat tensors, one for each rank, which share a row as its lanes.
        count: elements of the longest tensor sent by any rank; the same on every rank.
    """

    __slots__ = ("_channel", "_num_chunks", "_per_chunk", "_posted", "_sent", "_taken", "call", "description", "result")

    result: Tensor

    def __init__(
        self,
        channel: Channel,
        description: tuple[str, torch.Size, torch.dtype, *tuple[str, ...]],
        call: int,
        sent: Tensor | list[Tensor],
        count: int,
    ) -> None:
        self._channel = channel
        self.description = description
        self.call = call
        self._per_chunk = SLOT_BYTES // description[2].itemsize // (channel.t if isinstance(sent, list) else 1)
        self._num_chunks = -(-count // self._per_chunk)
        self._sent = sent if self._num_chunks <= 1 or isinstance(sent, list) else sent.reshape(-1)
        self._posted: list[tuple[int, int]] = []
        self._taken = 0

    def start(self) -> None:
        """Write one chunk into each slot. This waits only for ranks that are ``NUM_SLOTS`` chunks behind."""
        for _ in range(min(NUM_SLOTS, self._num_chunks)):
            self._post_next()

    def wait(self) -> Tensor:
        self.finish()
        return self.result

    def finish(self) -> None:
        """Read all ranks' chunks. A second call is a no-op."""
        channel = self._channel
        while self._taken < self._num_chunks:
            slot, number = self._posted[self._taken]
            channel.wait_ready(slot, number, self)
            self._read(self._taken, slot)
            channel.release(slot, number)
            self._taken += 1
            if len(self._posted) < self._num_chunks:
                self._post_next()

    def _post_next(self) -> None:
        slot, number = self._channel.take_slot(self)
        self._write(len(self._posted), slot)
        self._channel.post(slot, number, self.call)
        self._posted.append((slot, number))

    def _piece(self, flat: Tensor, chunk: int) -> Tensor:
        """Return the elements of ``flat`` that belong to a chunk."""
        return flat if self._num_chunks == 1 else flat[chunk * self._per_chunk : (chunk + 1) * self._per_chunk]

    def _write(self, chunk: int, slot: int) -> None:
        channel, sent = self._channel, self._sent
        if not isinstance(sent, list):
            piece = self._piece(sent, chunk)
            channel.rows(slot, piece.dtype, piece.shape)[channel.rank].copy_(piece)
            return
        lanes = channel.rows(slot, sent[0].dtype, (channel.t, self._per_chunk))[channel.rank]
        for lane, part in zip(lanes.unbind(0), sent, strict=True):
            piece = self._piece(part, chunk)
            lane[: piece.numel()].copy_(piece)

    @abstractmethod
    def _read(self, chunk: int, slot: int) -> None:
        """Compute this rank's part of the result from all ranks' rows of the slot."""

    def __str__(self) -> str:
        name, shape, dtype, *rest = self.description
        return " ".join([f"{name} of {list(shape)} {str(dtype).removeprefix('torch.')}", *rest])
