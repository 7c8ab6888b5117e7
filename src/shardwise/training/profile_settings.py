"""What a run is told of the steps that it traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from shardwise.training import bounds
from shardwise.training.bounds import Checked, Range, require


@dataclass(frozen=True)
class ProfileSettings(Checked, prefix="profile."):
    """A trace of some steps by torch.profiler, from each rank, which changes no number.

    Attributes:
        enabled: write the trace, a file for each rank in ``out/profile``, for chrome://tracing or Perfetto.
        wait: steps to leave out, from the first that the run does.
        warmup: steps after these in which the profiler runs already, and nothing is kept.
        active: steps after these, of which the trace is.
    """

    enabled: Annotated[bool, tyro.conf.arg(aliases=("--profile",))] = False
    wait: Annotated[int, bounds.STEPS] = 5
    # PyTorch warns of results without.
    warmup: Annotated[int, Range(1, 1_000)] = 1
    # Each is some megabytes.
    active: Annotated[int, Range(1, 1_000)] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("wait", "warmup", "active"):
            value = getattr(self, name)
            require(
                self.enabled or value == getattr(type(self), name),
                f"profile.{name} {value} is for --profile, which is not given; give it, or leave the other out",
            )

    @property
    def num_steps(self) -> int:
        """Those that a run must do for the trace to be whole."""
        return self.wait + self.warmup + self.active if self.enabled else 0

    def check_steps(self, first: int, last: int) -> None:
        """Raise ConfigError unless the steps from ``first`` to before ``last`` suffice."""
        require(
            self.num_steps <= last - first,
            f"profile.wait {self.wait}, profile.warmup {self.warmup} and profile.active {self.active} are "
            f"{self.num_steps} steps, and there are {last - first} to do; lower them",
        )
