"""Megatron's timers: seconds between two calls, of this rank, and the times of all ranks as text."""

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError
from shardwise.megatron.surface import offer

logger = logging.getLogger(__name__)

_LAST_LEVEL = 2


class Timer:
    """Sums the seconds between ``start`` and ``stop``, by which time the device has done its work.

    Attributes:
        name: name in the text.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._elapsed = self._active_time = 0.0
        self._since: float | None = None
        self._barrier_group: ProcessGroup | None = None

    def set_barrier_group(self, barrier_group: ProcessGroup) -> None:
        """Set the group whose ranks wait for each other where ``barrier`` is True; all ranks without this call."""
        self._barrier_group = barrier_group

    def start(self, barrier: bool = False) -> None:
        """Begin to measure; raise ConfigError if the timer runs already."""
        if self._since is not None:
            raise ConfigError(f"timer {self.name!r} has been started already; stop it first")
        self._since = self._now(barrier)

    def stop(self, barrier: bool = False) -> None:
        """Add the seconds since ``start``; raise ConfigError if the timer does not run."""
        if self._since is None:
            raise ConfigError(f"timer {self.name!r} is not started; start it first")
        seconds = self._now(barrier) - self._since
        self._elapsed, self._active_time, self._since = self._elapsed + seconds, self._active_time + seconds, None

    def _now(self, barrier: bool) -> float:
        if barrier:
            dist.barrier(group=self._barrier_group)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.perf_counter()

    def reset(self) -> None:
        """Forget the seconds since the last reset, and stop."""
        self._elapsed, self._since = 0.0, None

    def set_elapsed(self, value: float) -> None:
        """Replace the seconds since the last reset."""
        self._elapsed = value

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Return the seconds since the last reset; a running timer runs on."""
        runs = self._since is not None
        if runs:
            self.stop(barrier)
        seconds = self._elapsed
        if reset:
            self.reset()
        if runs:
            self.start(barrier)
        return seconds

    def active_time(self) -> float:
        """Return the seconds since construction."""
        return self._active_time


class DummyTimer(Timer):
    """A timer above the log level, which measures nothing; reading it raises ConfigError."""

    def __init__(self) -> None:
        super().__init__("dummy timer")

    def start(self, barrier: bool = False) -> None:
        """Do nothing."""

    stop = start

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Raise ConfigError."""
        raise ConfigError("this timer's log_level is above that of Timers, and it measures nothing; raise the latter")

    active_time = elapsed


class Timers:
    """Timers by name; ``timers("forward", log_level=1).start()`` makes one.

    Args:
        log_level: highest level of timers that measure, from 0 to 2.
        log_option: "max", "minmax" or "all": which times of the ranks the text has.

    Raises:
        ConfigError: another ``log_option``.
    """

    def __init__(self, log_level: int, log_option: str) -> None:
        if log_option not in ("max", "minmax", "all"):
            raise ConfigError(f"log_option is {log_option!r}; it must be 'max', 'minmax' or 'all'")
        self._log_level, self._log_option = log_level, log_option
        self._timers: dict[str, Timer] = {}
        self._log_levels: dict[str, int] = {}
        self._dummy_timer = DummyTimer()

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """Return the timer ``name``, made at its first use.

        Args:
            name: name of the timer.
            log_level: its level, 2 by default; for a timer that exists, the same or None.

        Raises:
            ConfigError: another level than before, or above 2.
        """
        level = _LAST_LEVEL if log_level is None else log_level
        if name in self._timers:
            if log_level not in (None, self._log_levels[name]):
                raise ConfigError(f"timer {name!r} has log_level {self._log_levels[name]}, and now {log_level}")
            return self._timers[name]
        if level > _LAST_LEVEL:
            raise ConfigError(f"log_level of timer {name!r} is {level}; it must be at most {_LAST_LEVEL}")
        if level > self._log_level:
            return self._dummy_timer
        self._log_levels[name] = level
        return self._timers.setdefault(name, Timer(name))

    def get_all_timers_string(
        self, names: Sequence[str] | None = None, normalizer: float = 1.0, reset: bool = True, barrier: bool = False
    ) -> str | None:
        """Return the times of all ranks in milliseconds as text, or None if there are none. Collective.

        Args:
            names: timers, the same on all ranks; None means all.
            normalizer: divisor of the times, such as the number of steps that they measure.
            reset: whether the timers start from 0 again.
            barrier: whether the ranks wait for each other first.
        """
        times = self._times(names, normalizer / 1000, reset, barrier)
        if not times:
            return None
        if self._log_option == "all":
            ranks = {
                name: "".join(f"\n     rank {rank:2d}: {of_rank:.2f}" for rank, of_rank in of_name.items())
                for name, of_name in times.items()
            }
            return "times across ranks (ms):" + "".join(f"\n  {name}:{text}" for name, text in ranks.items())
        shows_both = self._log_option == "minmax"
        text = "(min, max) time across ranks (ms):" if shows_both else "max time across ranks (ms):"
        for name, of_ranks in times.items():
            low, high = min(of_ranks.values()), max(of_ranks.values())
            value = f"({low:.2f}, {high:.2f})" if shows_both else f"{high:.2f}"
            text += f"\n    {(name + ' ').ljust(48, '.')}: {value}"
        return text

    def log(
        self,
        names: Sequence[str] | None,
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Log the text of ``get_all_timers_string`` on ``rank``, the last one by default. Collective."""
        text = self.get_all_timers_string(names, normalizer, reset, barrier)
        if text is not None and dist.get_rank() == (dist.get_world_size() - 1 if rank is None else rank):
            logger.info(text)

    def write(
        self,
        names: Sequence[str],
        writer: Any,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Give the longest time of a rank, in seconds, to TensorBoard or W&B as ``{name}-time``. Collective.

        Args:
            names, normalizer, reset, barrier: as in ``get_all_timers_string``.
            writer: ``SummaryWriter``, or an object with W&B's ``log``, or None.
            iteration: step of the values.
        """
        for name, of_ranks in self._times(names, normalizer, reset, barrier).items():
            if hasattr(writer, "add_scalar"):
                writer.add_scalar(f"{name}-time", max(of_ranks.values()), iteration)
            elif writer is not None:
                writer.log({f"{name}-time": max(of_ranks.values())}, iteration)

    def _times(
        self, names: Sequence[str] | None, divisor: float, reset: bool, barrier: bool
    ) -> dict[str, dict[int, float]]:
        """Return the times of the ranks that have measured, by name and rank, divided by ``divisor``."""
        names = [*self._timers] if names is None else names
        if divisor <= 0:
            raise ConfigError("normalizer must be above 0")
        if barrier:
            dist.barrier()
        own = {name: self._timers[name].elapsed(reset) / divisor for name in names if name in self._timers}
        of_ranks: list[dict[str, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        times = {name: {i: one[name] for i, one in enumerate(of_ranks) if one.get(name)} for name in names}
        return {name: of_name for name, of_name in times.items() if of_name}


offer(globals())
