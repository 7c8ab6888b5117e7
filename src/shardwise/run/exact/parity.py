"""Parity check in exact mode, which has its own groups and allows no difference."""

import contextlib
import dataclasses
from dataclasses import dataclass

from shardwise.core.communication.agreement import agree
from shardwise.core.errors import ParityError
from shardwise.core.topology import Topology
from shardwise.models.config import ModelConfig
from shardwise.run.exact.environment import deterministic_algorithms
from shardwise.run.exact.trials import check_device
from shardwise.run.parity import Parity, compare_layouts
from shardwise.run.tasks.task import Session
from shardwise.training.trainer import Trainer


@dataclass(frozen=True)
class ExactParity(Parity):
    """Result of a parity check of exact runs, which have the same bits."""

    def line(self) -> str:
        return (
            f"{self.layout} has the bits of tp=1 over {self.steps} steps: loss {self.loss_error:g} apart, gradient "
            f"norm {self.grad_norm_error:g}, updated weights {self.weight_error:g}"
        )

    def check(self, config: ModelConfig) -> None:
        # Written so that a NaN fails.
        if not self.loss_error == self.grad_norm_error == self.weight_error == 0.0:
            raise ParityError(f"{self.line()}; exact runs must have the same bits at every layout")


def check_exact_parity(session: Session, *, steps: int = 3) -> Parity:
    """Train as ``check_parity``, in exact mode; every rank calls.

    Raises:
        ParityError: initial weights, losses, norms or updated weights differ.
        ConfigError: the run's sizes or device do not support exact mode; on every rank.
    """
    parallel = dataclasses.replace(session.settings.parallel, exact=True)
    settings = dataclasses.replace(session.settings, parallel=parallel)
    settings.check_world(session.ranks.world_size)
    # A process group has one kind of sum, so exact mode needs its own groups.
    topology = Topology.create(tp=parallel.tp, pp=parallel.pp)
    micro = settings.micro_batch_size(topology.size("dp"))

    def try_device(split: Trainer) -> None:
        def tried() -> None:
            with session.shortage.explained():
                check_device(split.model, micro_batch_size=micro, sequence_length=settings.sequence_length)

        agree(tried, group=session.ranks.control)

    with contextlib.ExitStack() as stack:
        stack.callback(topology.destroy)
        stack.enter_context(deterministic_algorithms(session.ranks.device))
        return compare_layouts(session, settings, topology, steps, ExactParity, before=try_device)
