"""Named random streams: which numbers the ranks share, and which are each rank's own.

A stream is a state of PyTorch's default generators. ``fork(name)`` switches to it for the length of a block, so that
whatever draws inside (dropout, say) draws from that stream. The streams work on whatever device the program computes
on: the CPU's generator and, once CUDA is in use, the current GPU's are switched together, so that no part of a program
has to say where it computes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from shardwise.errors import ConfigError, TopologyError

DATA_PARALLEL_STREAM = "data-parallel-rng"
TENSOR_PARALLEL_STREAM = "model-parallel-rng"
EXPERT_PARALLEL_STREAM = "expert-parallel-rng"
GLOBAL_STREAM = "global-rng"

Rule = Literal["per_rank", "global"]
"""Whose numbers a shard's dropout draws: the rank's own, or its slice of numbers that belong to the whole tensor."""

# From Megatron's rule, so that programs find the numbers they know.
_TENSOR_PARALLEL_OFFSET = 2718
_EXPERT_PARALLEL_OFFSET = 1024
_EXPERT_STEP = 100

_DEFAULT = "default"

StreamState = dict[str, Any]
"""Generator states by device type. What ``set_states`` was given that is no state stands under "given"."""


def _cuda_is_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _live_state() -> StreamState:
    state = {"cpu": torch.get_rng_state()}
    if _cuda_is_in_use():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_live_state(state: StreamState) -> None:
    # A state may know one device only, being older than the use of CUDA or given to `set_states`. The other's numbers
    # begin where the same seed would have them begin.
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if _cuda_is_in_use():
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])
        else:
            torch.cuda.manual_seed(torch.default_generator.initial_seed())
        if "cpu" not in state:
            torch.default_generator.manual_seed(torch.cuda.initial_seed())


def _state_of(given: object) -> StreamState:
    if isinstance(given, torch.Generator):
        given = given.get_state()
    if not isinstance(given, Tensor):
        return {"given": given}
    kind = "cpu" if given.numel() == torch.default_generator.get_state().numel() else "cuda"
    return {kind: given.clone()}


def _one_of(state: StreamState) -> Any:
    """The state on the device that the program computes on."""
    for kind in ("cuda", "cpu"):
        if kind in state:
            return state[kind].clone()
    return state["given"]


def generator_in(state: Tensor) -> torch.Generator:
    """A generator in the given state, of the device that the state is of."""
    (kind,) = _state_of(state)
    generator = torch.Generator(kind)
    generator.set_state(state)
    return generator


@dataclass(frozen=True)
class RandomState:
    """All that decides what will be drawn: the default generators and the streams; see ``RandomStreams.snapshot``."""

    live: StreamState
    states: dict[str, StreamState]
    entered: tuple[str, ...]
    seeds: frozenset[int]


class RandomStreams:
    """A set of named streams.

    A stream forked inside itself goes on where it was, and a stream forked inside another is kept apart from it: no
    number is drawn twice.

    Args:
        use_cudagraphable_rng: not offered where CUDA is in use; elsewhere ``get_states`` returns ``torch.Generator``
            objects in place of tensors, as programs that capture graphs expect.
        is_inference_rng_tracker: make no streams: ``add``, ``set_states`` and ``fork`` do nothing.

    Raises:
        ConfigError: streams that a CUDA graph can capture are asked for where CUDA is in use.
    """

    def __init__(self, use_cudagraphable_rng: bool = False, is_inference_rng_tracker: bool = False) -> None:
        if use_cudagraphable_rng and _cuda_is_in_use():
            raise ConfigError(
                "use_cudagraphable_rng=True: random streams cannot be switched inside a captured CUDA graph; "
                "capture without them (dropout 0), or leave use_cudagraphable_rng False"
            )
        self.use_cudagraphable_rng = use_cudagraphable_rng
        self.is_inference_rng_tracker = is_inference_rng_tracker
        self._states: dict[str, StreamState] = {}
        self._seeds: set[int] = set()
        # The streams entered and not yet left, outermost first; the last one is live.
        self._entered: list[str] = []

    @property
    def rule(self) -> Rule:
        """Whose numbers a shard's dropout draws; see ``shardwise.dropout``."""
        return "global" if GLOBAL_STREAM in self._states else "per_rank"

    def is_initialized(self) -> bool:
        """Whether there is any stream."""
        return any(name != _DEFAULT for name in self._states)

    def reset(self) -> None:
        """Forget all streams.

        Raises:
            ConfigError: a stream is in use.
        """
        if self._entered:
            raise ConfigError(f"cannot reset the random streams while {self._entered[-1]!r} is in use")
        self._states.clear()
        self._seeds.clear()

    def get_states(self) -> dict[str, Any]:
        """A copy of every stream's state: that of the GPU's generator if the stream has one, else of the CPU's."""
        if self._entered:
            self._store_live()
        states = {name: _one_of(state) for name, state in self._states.items() if name != _DEFAULT}
        if self.use_cudagraphable_rng:
            return {name: generator_in(state) for name, state in states.items()}
        return states

    @property
    def states_(self) -> Mapping[str, Any]:
        """``get_states()`` for reading only, under the name by which programs know it; ``set_states`` sets them."""
        return MappingProxyType(self.get_states())

    @property
    def seeds_(self) -> frozenset[int]:
        """The seeds that ``add`` was given since the last ``reset`` or ``set_states``."""
        return frozenset(self._seeds)

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Replace every stream by those of ``get_states``.

        Raises:
            ConfigError: a stream is in use.
        """
        if self._entered:
            raise ConfigError(f"cannot set the random streams while {self._entered[-1]!r} is in use")
        if self.is_inference_rng_tracker:
            return
        self._states = {name: _state_of(state) for name, state in states.items()}
        self._seeds.clear()

    def add(self, name: str, seed: int) -> None:
        """Make a stream, in the state of a default generator that is seeded with ``seed``.

        Raises:
            ConfigError: there is one of that name, or of that seed.
        """
        if self.is_inference_rng_tracker:
            return
        if name in self._states or name == _DEFAULT:
            raise ConfigError(f"there is a random stream {name!r} already; choose another name or reset() first")
        if seed in self._seeds:
            raise ConfigError(
                f"random stream {name!r}: there is a stream with seed {seed} already, and the two would draw the same "
                "numbers; choose another seed or reset() first"
            )
        before = _live_state()
        # Not torch.manual_seed, which would start devices that the program may not use.
        torch.default_generator.manual_seed(seed)
        if "cuda" in before:
            torch.cuda.manual_seed(seed)
        self._states[name] = _live_state()
        self._seeds.add(seed)
        _set_live_state(before)

    @contextmanager
    def fork(self, name: str = TENSOR_PARALLEL_STREAM) -> Iterator[None]:
        """Draw from stream ``name`` inside the block.

        Raises:
            TopologyError: there is no stream of that name.
            ConfigError: the stream was given to ``set_states`` as something that is no generator's state.
        """
        if self.is_inference_rng_tracker:
            yield
            return
        if name not in self._states or name == _DEFAULT:
            raise TopologyError(
                f"there is no random stream {name!r} among {sorted(self._states.keys() - {_DEFAULT})}; "
                "call model_parallel_cuda_manual_seed() first"
            )
        if self._entered and self._entered[-1] == name:
            yield
            return
        if "given" in self._states[name]:
            raise ConfigError(
                f"random stream {name!r} was set to {self._states[name]['given']!r}, which is no generator's state; "
                "give set_states() what get_states() returns"
            )
        self._store_live()
        _set_live_state(self._states[name])
        self._entered.append(name)
        try:
            yield
        finally:
            self._store_live()
            self._entered.pop()
            _set_live_state(self._states[self._entered[-1] if self._entered else _DEFAULT])
            if not self._entered:
                del self._states[_DEFAULT]

    def snapshot(self) -> RandomState:
        """The state of the default generators and of all streams, on every device, and which streams are in use."""
        # States are replaced and never written to, so that a shallow copy is enough.
        return RandomState(_live_state(), dict(self._states), tuple(self._entered), frozenset(self._seeds))

    def restore(self, state: RandomState) -> None:
        """Go back to ``snapshot``'s state."""
        self._states = dict(state.states)
        self._entered = list(state.entered)
        self._seeds = set(state.seeds)
        _set_live_state(state.live)

    def _store_live(self) -> None:
        name = self._entered[-1] if self._entered else _DEFAULT
        self._states[name] = _live_state()


@dataclass
class _Ambient:
    """All that this module remembers."""

    streams: RandomStreams
    # Whether a program has said which kind it wants.
    chosen: bool = False


_AMBIENT = _Ambient(RandomStreams())


def streams() -> RandomStreams:
    """The ambient streams."""
    return _AMBIENT.streams


def choose_streams(
    *, use_cudagraphable_rng: bool = False, is_inference_rng_tracker: bool = False, force_reset: bool = False
) -> None:
    """Make ambient streams of the given kind, unless a program has chosen before.

    Args:
        use_cudagraphable_rng: see ``RandomStreams``.
        is_inference_rng_tracker: see ``RandomStreams``.
        force_reset: make new ones in any case.
    """
    held = _AMBIENT.streams
    wanted = (use_cudagraphable_rng, is_inference_rng_tracker)
    is_another_kind = wanted != (held.use_cudagraphable_rng, held.is_inference_rng_tracker)
    if force_reset or (is_another_kind and not _AMBIENT.chosen):
        _AMBIENT.streams = RandomStreams(*wanted)
    _AMBIENT.chosen = True


def _mixed_seed(*values: object) -> int:
    """A seed of 62 bits that no sum of small numbers hits."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8], "big") >> 2


def expert_seed(seed: int, ep_rank: int, etp_rank: int) -> int:
    """The expert stream's seed: ``seed + 1024 + 100 * ep_rank + etp_rank``, unless another rank may have that one.

    From offset 2718 on the sum runs into the tensor-parallel streams' seeds (rank 6 there has that of expert rank 17),
    and from 100 ranks that share an expert on into the next expert's. Those seeds are mixed from all the values.
    """
    offset = _EXPERT_PARALLEL_OFFSET + _EXPERT_STEP * ep_rank + etp_rank
    if offset < _TENSOR_PARALLEL_OFFSET and etp_rank < _EXPERT_STEP:
        return seed + offset
    return _mixed_seed(EXPERT_PARALLEL_STREAM, seed, ep_rank, etp_rank)


def seed_streams(
    seed: int, tp_rank: int, *, ep_rank: int = 0, etp_rank: int | None = None, rng: Rule = "per_rank"
) -> None:
    """Make the ambient streams anew; the default generators are left alone.

    Args:
        seed: the data-parallel stream's seed, the same on every rank of a tensor-parallel group; the tensor-parallel
            stream takes ``seed + 2718 + tp_rank``, the expert stream ``expert_seed``.
        tp_rank: this rank in its tensor-parallel group.
        ep_rank: this rank in its expert-parallel group.
        etp_rank: this rank in its expert-tensor group; ``tp_rank`` if None.
        rng: "global" adds a stream that is the same on every rank of a tensor-parallel group, from which
            ``shardwise.dropout`` draws the same mask at every number of ranks.

    Raises:
        ConfigError: ``rng`` is neither; a stream is in use.
    """
    if rng not in ("per_rank", "global"):
        raise ConfigError(f"rng is {rng!r}; it must be 'per_rank' or 'global'")
    ambient = streams()
    ambient.reset()
    ambient.add(DATA_PARALLEL_STREAM, seed)
    ambient.add(TENSOR_PARALLEL_STREAM, seed + _TENSOR_PARALLEL_OFFSET + tp_rank)
    ambient.add(EXPERT_PARALLEL_STREAM, expert_seed(seed, ep_rank, tp_rank if etp_rank is None else etp_rank))
    if rng == "global":
        ambient.add(GLOBAL_STREAM, _mixed_seed(GLOBAL_STREAM, seed))
