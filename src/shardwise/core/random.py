"""Named random streams, which are either shared by the ranks or separate on each rank.

A stream is a state of PyTorch's default generators. ``fork(name)`` switches to this state for the duration of a block,
so that dropout, for example, draws from the stream there. The generators of the CPU and, once CUDA is in use, of the
current GPU are switched together, so that callers need not specify a device.
"""

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from shardwise.core.errors import ConfigError, TopologyError

DATA_PARALLEL_STREAM = "data-parallel-rng"
TENSOR_PARALLEL_STREAM = "model-parallel-rng"
EXPERT_PARALLEL_STREAM = "expert-parallel-rng"
GLOBAL_STREAM = "global-rng"

Rule = Literal["per_rank", "global"]
"""Rules of a shard's dropout: each rank draws its own mask, or uses its slice of the whole tensor's mask."""

# The offsets follow Megatron's rule, so that ported programs draw the same numbers.
_TENSOR_PARALLEL_OFFSET = 2718
_EXPERT_PARALLEL_OFFSET = 1024
_EXPERT_STEP = 100

_DEFAULT = "default"

StreamState = dict[str, Any]
"""Generator states by device type: tensors, or the GPU's ``torch.Generator`` for streams that a CUDA graph captures.
A value passed to ``set_states`` that is not a state is stored under "given"."""


def _cuda_is_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _gpu_generator() -> Any:
    return torch.cuda.default_generators[torch.cuda.current_device()]


def _seed_gpu(seed: int, graphable: bool) -> None:
    """Seed the GPU's generator in place, or a new generator if a CUDA graph has registered the current one."""
    if graphable:
        own = _gpu_generator().clone_state()
        own.manual_seed(seed)
        _gpu_generator().graphsafe_set_state(own)
    else:
        torch.cuda.manual_seed(seed)


def _live_state(graphable: bool) -> StreamState:
    state: StreamState = {"cpu": torch.get_rng_state()}
    if _cuda_is_in_use():
        state["cuda"] = _gpu_generator().graphsafe_get_state() if graphable else torch.cuda.get_rng_state()
    return state


def _set_live_state(state: StreamState, graphable: bool) -> None:
    # A state that was saved before CUDA was in use, or that was passed to `set_states`, may have one device only. The
    # other device then starts from the same seed.
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if _cuda_is_in_use():
        if "cuda" not in state:
            _seed_gpu(torch.default_generator.initial_seed(), graphable)
        elif isinstance(state["cuda"], torch.Generator):
            _gpu_generator().graphsafe_set_state(state["cuda"])
        else:
            torch.cuda.set_rng_state(state["cuda"])
        if "cpu" not in state:
            torch.default_generator.manual_seed(torch.cuda.initial_seed())


def _state_of(given: object, graphable: bool) -> StreamState:
    if isinstance(given, torch.Generator):
        if graphable and given.device.type == "cuda":
            return {"cuda": given}
        given = given.get_state()
    if not isinstance(given, Tensor):
        return {"given": given}
    kind = "cpu" if given.numel() == torch.default_generator.get_state().numel() else "cuda"
    return {kind: given.clone()}


def _one_of(state: StreamState, graphable: bool) -> Any:
    """Return the state on the compute device, as a generator for streams that a CUDA graph captures."""
    value = next(state[kind] for kind in ("cuda", "cpu", "given") if kind in state)
    if "given" in state or isinstance(value, torch.Generator):
        return value
    return generator_in(value) if graphable else value.clone()


def default_state(device: Any = "cuda", *, graphable: bool = False) -> Any:
    """Return the state of the default generator of the compute device: the GPU ``device``, if CUDA is in use.

    If ``graphable``, it is a ``torch.Generator``. On a GPU this is the default generator itself, which advances as
    numbers are drawn.
    """
    with torch.cuda.device(device) if _cuda_is_in_use() else nullcontext():
        return _one_of(_live_state(graphable), graphable)


def set_default_state(state: Tensor | torch.Generator, device: Any = "cuda") -> None:
    """Set the default generator of the state's device to a state of ``default_state``."""
    ((kind, value),) = _state_of(state, graphable=True).items()
    if kind == "given":
        raise ConfigError(f"the state of a generator is a tensor or a torch.Generator, not {type(value).__name__}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"a state of {value.numel()} bytes is not one of the CPU's generator, and there is no GPU; give what "
            "torch.get_rng_state() returns"
        )
    if kind == "cpu":
        torch.set_rng_state(value)
    elif isinstance(value, torch.Generator):
        with torch.cuda.device(device):
            _gpu_generator().graphsafe_set_state(value)
    else:
        torch.cuda.set_rng_state(value, device)


def generator_in(state: Tensor) -> torch.Generator:
    """Create a generator in the given state, on the state's device."""
    (kind,) = _state_of(state, graphable=False)
    generator = torch.Generator(kind)
    generator.set_state(state)
    return generator


@dataclass(frozen=True)
class RandomState:
    """The state of the default generators and of the streams; see ``RandomStreams.snapshot``."""

    live: StreamState
    states: dict[str, StreamState]
    entered: tuple[str, ...]
    seeds: frozenset[int]
    is_initialized: bool
    # A generator that a CUDA graph has registered advances in place, so a copy of its state is kept separately.
    generators: tuple[tuple[torch.Generator, Tensor], ...] = ()

    def parts(self) -> tuple[Tensor, Any, dict[str, Any]]:
        """Return the states of the CPU's and the compute device's default generators and of each stream; not copied."""
        kept = {id(generator): value for generator, value in self.generators}
        states = self.states | ({self.entered[-1]: self.live} if self.entered else {})
        every = {_DEFAULT: self.live} | {name: state for name, state in states.items() if name != _DEFAULT}
        values = {name: next(iter(reversed(state.values()))) for name, state in every.items()}
        device, *own = [kept.get(id(value), value) for value in values.values()]
        return self.live["cpu"], device, dict(zip(list(values)[1:], own, strict=True))


class RandomStreams:
    """A set of named streams.

    A stream that is forked inside itself continues where it was. A stream that is forked inside another stream stays
    independent of it. No number is drawn twice.

    Args:
        use_cudagraphable_rng: create streams that a CUDA graph can capture. ``get_states`` returns ``torch.Generator``
            objects instead of tensors, which a program registers with its graph
            (``CUDAGraph.register_generator_state``), and ``fork`` copies no states.
        is_inference_rng_tracker: create no streams: ``add``, ``set_states`` and ``fork`` do nothing.
    """

    def __init__(self, use_cudagraphable_rng: bool = False, is_inference_rng_tracker: bool = False) -> None:
        self.use_cudagraphable_rng = use_cudagraphable_rng
        self.is_inference_rng_tracker = is_inference_rng_tracker
        self._states: dict[str, StreamState] = {}
        self._seeds: set[int] = set()
        # The stack of active streams, outermost first; the last one is in use.
        self._entered: list[str] = []
        self._is_initialized = False

    @property
    def rule(self) -> Rule:
        """Rule of a shard's dropout; see ``shardwise.nn.dropout``."""
        return "global" if GLOBAL_STREAM in self._states else "per_rank"

    def is_initialized(self) -> bool:
        """True if a stream was added, or streams were set, since the last ``reset``."""
        return self._is_initialized

    def reset(self) -> None:
        """Remove all streams.

        Raises:
            ConfigError: a stream is in use.
        """
        if self._entered:
            raise ConfigError(f"cannot reset the random streams while {self._entered[-1]!r} is in use")
        self._states.clear()
        self._seeds.clear()
        self._is_initialized = False

    def get_states(self) -> dict[str, Any]:
        """Return a copy of every stream's state: the GPU generator's state if the stream has one, else the CPU's."""
        if self._entered:
            self._store_live()
        graphable = self.use_cudagraphable_rng
        return {name: _one_of(state, graphable) for name, state in self._states.items() if name != _DEFAULT}

    @property
    def states_(self) -> Mapping[str, Any]:
        """Megatron's name for ``get_states()``, read-only."""
        return MappingProxyType(self.get_states())

    @property
    def seeds_(self) -> frozenset[int]:
        """Seeds passed to ``add`` since the last ``reset`` or ``set_states``."""
        return frozenset(self._seeds)

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Replace all streams by states from ``get_states``.

        Raises:
            ConfigError: a stream is in use.
        """
        if self._entered:
            raise ConfigError(f"cannot set the random streams while {self._entered[-1]!r} is in use")
        if self.is_inference_rng_tracker:
            return
        self._states = {name: _state_of(state, self.use_cudagraphable_rng) for name, state in states.items()}
        self._seeds.clear()
        self._is_initialized = True

    def add(self, name: str, seed: int) -> None:
        """Add a stream whose state is that of a default generator seeded with ``seed``.

        Raises:
            ConfigError: a stream with this name or this seed exists.
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
        graphable = self.use_cudagraphable_rng
        before = _live_state(graphable)
        # torch.manual_seed would initialize devices that the program may not use.
        torch.default_generator.manual_seed(seed)
        if "cuda" in before:
            _seed_gpu(seed, graphable)
        self._states[name] = _live_state(graphable)
        self._seeds.add(seed)
        self._is_initialized = True
        _set_live_state(before, graphable)

    def global_stream(self, layer_number: int | None) -> str:
        """Return the name of a layer's stream under the "global" rule, which the first call creates.

        None names the stream outside of layers. Each layer has its own stream, so that its numbers do not depend on the
        other layers of its pipeline stage.
        """
        if layer_number is None or GLOBAL_STREAM not in self._states or self.is_inference_rng_tracker:
            return GLOBAL_STREAM
        name = f"{GLOBAL_STREAM}-{layer_number}"
        if name not in self._states:
            with self.fork(GLOBAL_STREAM):
                seed = torch.default_generator.initial_seed()
            self.add(name, _mixed_seed(name, seed))
        return name

    @contextmanager
    def fork(self, name: str = TENSOR_PARALLEL_STREAM) -> Iterator[None]:
        """Draw from stream ``name`` inside the block.

        If CUDA is in use and the block draws from the CPU's generator, ``fork`` issues a UserWarning. The CPU's numbers
        belong to the stream as well, but a GPU program that draws them computes something on the wrong device.

        Raises:
            TopologyError: there is no stream with this name.
            ConfigError: ``set_states`` received a value for the stream that is not a generator state.
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
        self._go_on_from(name)
        self._entered.append(name)
        before = torch.get_rng_state() if _cuda_is_in_use() else None
        try:
            yield
        finally:
            drew_on_cpu = before is not None and not torch.equal(before, torch.get_rng_state())
            self._store_live()
            self._entered.pop()
            self._go_on_from(self._entered[-1] if self._entered else _DEFAULT)
            if not self._entered:
                del self._states[_DEFAULT]
        if drew_on_cpu:
            warnings.warn(
                f"the CPU's generator was used inside fork({name!r}), and this program computes on a GPU; make the "
                "random tensor on the GPU, or draw it outside the block",
                stacklevel=3,
            )

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Leave the streams in use for the duration of a block, which may replace them.

        After the block the numbers come from the new stream of the same name.
        """
        entered = self._entered
        if entered:
            self._store_live()
            self._go_on_from(_DEFAULT)
        self._entered = []
        try:
            yield
        finally:
            if entered:
                self._store_live()
                self._entered = entered
                self._go_on_from(entered[-1])

    def snapshot(self) -> RandomState:
        """Save the state of the default generators and of all streams, on every device, and the stack of streams."""
        # States are replaced and never modified, so a shallow copy is enough.
        live, states = _live_state(self.use_cudagraphable_rng), dict(self._states)
        generators = [state["cuda"] for state in (live, *states.values()) if "cuda" in state]
        return RandomState(
            live,
            states,
            tuple(self._entered),
            frozenset(self._seeds),
            self._is_initialized,
            tuple((each, each.get_state()) for each in generators if isinstance(each, torch.Generator)),
        )

    def restore(self, state: RandomState) -> None:
        """Restore a state saved by ``snapshot``."""
        self._states = dict(state.states)
        self._entered = list(state.entered)
        self._seeds = set(state.seeds)
        self._is_initialized = state.is_initialized
        for generator, value in state.generators:
            generator.set_state(value)
        _set_live_state(state.live, self.use_cudagraphable_rng)

    def _store_live(self) -> None:
        name = self._entered[-1] if self._entered else _DEFAULT
        self._states[name] = _live_state(self.use_cudagraphable_rng)

    def _go_on_from(self, name: str) -> None:
        # A block of `outside` may have removed the stream.
        state = self._states[name if name in self._states else _DEFAULT]
        _set_live_state(state, self.use_cudagraphable_rng)


@dataclass
class _Ambient:
    streams: RandomStreams
    # True once the program has chosen a kind of streams.
    chosen: bool = False


_AMBIENT = _Ambient(RandomStreams())


def streams() -> RandomStreams:
    """Return the ambient streams."""
    return _AMBIENT.streams


def streams_are_chosen() -> bool:
    """True if the program has chosen a kind of ambient streams, or added a stream."""
    return _AMBIENT.chosen or streams().is_initialized()


def choose_streams(
    *, use_cudagraphable_rng: bool = False, is_inference_rng_tracker: bool = False, force_reset: bool = False
) -> None:
    """Create the ambient ``RandomStreams``, unless the program has chosen them before; ``force_reset`` always does."""
    held = _AMBIENT.streams
    wanted = (use_cudagraphable_rng, is_inference_rng_tracker)
    is_another_kind = wanted != (held.use_cudagraphable_rng, held.is_inference_rng_tracker)
    if force_reset or (is_another_kind and not _AMBIENT.chosen):
        _AMBIENT.streams = RandomStreams(*wanted)
    _AMBIENT.chosen = True


def _mixed_seed(*values: object) -> int:
    """Mix numbers into a seed of 62 bits that does not collide with sums of small numbers."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8], "big") >> 2


def expert_seed(seed: int, ep_rank: int, etp_rank: int) -> int:
    """Return the expert stream's seed, ``seed + 1024 + 100 * ep_rank + etp_rank`` unless it can collide.

    From offset 2718 on the sum collides with seeds of tensor-parallel streams (rank 6 has the seed of expert rank 17).
    With 100 or more ranks per expert it collides with the seeds of the next expert. In these cases all the values are
    hashed into a seed.
    """
    offset = _EXPERT_PARALLEL_OFFSET + _EXPERT_STEP * ep_rank + etp_rank
    if offset < _TENSOR_PARALLEL_OFFSET and etp_rank < _EXPERT_STEP:
        return seed + offset
    return _mixed_seed(EXPERT_PARALLEL_STREAM, seed, ep_rank, etp_rank)


def seed_streams(
    seed: int, tp_rank: int, *, ep_rank: int = 0, etp_rank: int | None = None, rng: Rule = "per_rank"
) -> None:
    """Recreate the ambient streams, without changing the default generators.

    Args:
        seed: the data-parallel stream's seed, the same on every rank of a tensor-parallel group; the tensor-parallel
            stream takes ``seed + 2718 + tp_rank``, the expert stream ``expert_seed``.
        tp_rank, ep_rank, etp_rank: this rank in its groups; ``etp_rank`` None means ``tp_rank``.
        rng: "global" adds a stream that is the same on every rank of a tensor-parallel group. With it
            ``shardwise.nn.dropout`` draws the same mask at every number of ranks.
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
