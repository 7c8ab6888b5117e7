"""Named random streams: which numbers the ranks share, and which are each rank's own.

A stream is a state of PyTorch's default generators. ``fork(name)`` switches to it for the length of a block, so that
whatever draws inside (dropout, say) draws from that stream. The streams work on whatever device the program computes
on: the CPU's generator and, once CUDA is in use, the current GPU's are switched together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shardwise.errors import ConfigError, TopologyError

DATA_PARALLEL_STREAM = "data-parallel-rng"
TENSOR_PARALLEL_STREAM = "model-parallel-rng"

# From the reference's rule, so that programs find the numbers they know.
_TENSOR_PARALLEL_OFFSET = 2718

_DEFAULT = "default"

StreamState = dict[str, Tensor]
"""Generator states by device type."""


def _cuda_is_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _live_state() -> StreamState:
    state = {"cpu": torch.get_rng_state()}
    if _cuda_is_in_use():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_live_state(state: StreamState) -> None:
    torch.set_rng_state(state["cpu"])
    if not _cuda_is_in_use():
        return
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    else:
        # The state is older than the use of CUDA; its numbers there begin where its seed would have them begin.
        torch.cuda.manual_seed(torch.default_generator.initial_seed())


class RandomStreams:
    """A set of named streams.

    A stream forked inside itself goes on where it was, and a stream forked inside another is kept apart from it: no
    number is drawn twice.
    """

    def __init__(self) -> None:
        self._states: dict[str, StreamState] = {}
        # The streams entered and not yet left, outermost first; the last one is live.
        self._entered: list[str] = []

    def is_initialized(self) -> bool:
        """Whether there is any stream."""
        return bool(self._states)

    def reset(self) -> None:
        """Forget all streams.

        Raises:
            ConfigError: a stream is in use.
        """
        if self._entered:
            raise ConfigError(f"cannot reset the random streams while {self._entered[-1]!r} is in use")
        self._states.clear()

    def get_states(self) -> dict[str, StreamState]:
        """A copy of every stream's state."""
        if self._entered:
            self._store_live()
        return {name: dict(state) for name, state in self._states.items() if name != _DEFAULT}

    def set_states(self, states: dict[str, StreamState]) -> None:
        """Replace every stream's state."""
        if self._entered:
            raise ConfigError(f"cannot set the random streams while {self._entered[-1]!r} is in use")
        self._states = {name: dict(state) for name, state in states.items()}

    def add(self, name: str, seed: int) -> None:
        """Make a stream.

        Raises:
            ConfigError: there is one of that name.
        """
        if name in self._states or name == _DEFAULT:
            raise ConfigError(f"there is a random stream {name!r} already; choose another name or reset() first")
        before = _live_state()
        # Not torch.manual_seed, which would start devices that the program may not use.
        torch.default_generator.manual_seed(seed)
        if "cuda" in before:
            torch.cuda.manual_seed(seed)
        self._states[name] = _live_state()
        _set_live_state(before)

    @contextmanager
    def fork(self, name: str = TENSOR_PARALLEL_STREAM) -> Iterator[None]:
        """Draw from stream ``name`` inside the block.

        Raises:
            TopologyError: there is no stream of that name.
        """
        if name not in self._states:
            raise TopologyError(
                f"there is no random stream {name!r} among {sorted(self._states)}; "
                "call model_parallel_cuda_manual_seed() first"
            )
        if self._entered and self._entered[-1] == name:
            yield
            return
        self._store_live()
        self._entered.append(name)
        _set_live_state(self._states[name])
        try:
            yield
        finally:
            self._store_live()
            self._entered.pop()
            _set_live_state(self._states[self._entered[-1] if self._entered else _DEFAULT])
            if not self._entered:
                del self._states[_DEFAULT]

    def _store_live(self) -> None:
        name = self._entered[-1] if self._entered else _DEFAULT
        self._states[name] = _live_state()


_STREAMS = RandomStreams()


def streams() -> RandomStreams:
    """The ambient streams."""
    return _STREAMS


def seed_streams(seed: int, tp_rank: int) -> None:
    """Make the data-parallel and the tensor-parallel stream anew; the default generators are left alone.

    Args:
        seed: the data-parallel stream's seed, the same on every rank of a tensor-parallel group; the tensor-parallel
            stream takes ``seed + 2718 + tp_rank``.
        tp_rank: this rank in its tensor-parallel group.
    """
    _STREAMS.reset()
    _STREAMS.add(DATA_PARALLEL_STREAM, seed)
    _STREAMS.add(TENSOR_PARALLEL_STREAM, seed + _TENSOR_PARALLEL_OFFSET + tp_rank)
