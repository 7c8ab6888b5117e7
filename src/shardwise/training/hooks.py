"""Calls from a training step to the program that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from shardwise.training.pipeline.schedules import Action

Parts = Callable[[], Mapping[Parameter, tuple[Tensor, dict[str, list[Any]]]]]
"""Returns the gradients or values of parameters that are split over the data-parallel ranks, in the parameter's shape,
and for each axis how its ranks hold them."""


class StepRouting(Protocol):
    """Records or replaces the experts of a step's tokens, such as a ``doctor.RoutingReplay``."""

    def step(self, number: int) -> AbstractContextManager[None]:
        """Return the context of a step's forward passes."""

    def check_steps(self, steps: range) -> None:
        """Raise ConfigError if one of these steps cannot be recorded or replaced."""

    def resume(self, first_step: int) -> None:
        """Prepare for a run that goes on at a step, and may have recorded it and later ones before."""


class StepHooks:
    """Methods that a trainer calls in each step; they do nothing unless a subclass overrides them.

    Args:
        routing: object whose context ``Trainer.train_step`` enters; or None.
    """

    def __init__(self, routing: StepRouting | None = None) -> None:
        self.routing = routing

    def before_action(self, action: Action) -> None:
        """A forward or backward of a micro-batch, or an action of a pipeline's schedule, begins."""

    def rank_reports(self) -> Sequence[float]:
        """Return this rank's numbers; ``before_update`` gets their maxima over all ranks."""
        return ()

    def before_update(self, step: int, rank_reports: Sequence[float]) -> None:
        """The loss and gradient are finite, or the update will be skipped; an error leaves the weights unchanged."""

    def gradients(self, parts: Parts) -> None:
        """The gradients are complete, and not clipped."""

    def clipped(self, parts: Parts) -> None:
        """The gradients have their final size: unscaled and clipped."""

    def updated(self, parts: Parts) -> None:
        """The parameters are updated, or the update is skipped."""


NO_HOOKS = StepHooks()
"""Hooks of a step that nothing watches."""
