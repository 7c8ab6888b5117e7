"""Parity check: compare the first steps at tp = 1 and at a run's tp and pp, from the same seed.

Both models are trained in this process: the split model over the run's groups, and a whole model on each rank.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwise.core.communication.collectives import all_reduce
from shardwise.core.errors import ParityError
from shardwise.core.sharded_state import gather_parameter, sharded_state_dict
from shardwise.core.topology import Groups, Topology
from shardwise.models.config import ModelConfig
from shardwise.run.settings import RunSettings
from shardwise.run.tasks.task import Session
from shardwise.training.trainer import Trainer

# Relative tolerances for loss, gradient norm and weights, ten to seventy times the rounding errors measured at the
# demo's size (fp32: 1e-7, 4e-8, 1.4e-7; bf16: 4e-6, 1e-3, 5e-4). A real bug gives 1e-2 or more.
_TOLERANCES = {
    torch.float32: (1e-6, 1e-5, 1e-5),
    torch.float64: (1e-13, 1e-12, 1e-12),
    torch.bfloat16: (1e-4, 1e-2, 1e-2),
    torch.float16: (1e-4, 1e-2, 1e-2),
}
# The true gradient of a key's bias is 0, because the bias shifts all scores of a query equally. The computed gradient
# is rounding error, which Adam scales up to whole learning rates in either direction.
_KEY_BIAS_FACTOR = 100


@dataclass(frozen=True)
class Parity:
    """Result of a parity check: the differences of the two runs."""

    steps: int
    tp: int
    pp: int
    loss_error: float
    grad_norm_error: float
    weight_error: float

    @property
    def layout(self) -> str:
        """The sizes that are compared with 1."""
        return f"tp={self.tp}" + ("" if self.pp == 1 else f" pp={self.pp}")

    def line(self) -> str:
        """The three differences on one line."""
        return (
            f"{self.layout} equals tp=1 over {self.steps} steps: loss within {self.loss_error:.1e}, gradient norm "
            f"{self.grad_norm_error:.1e}, updated weights {self.weight_error:.1e}; initial weights bit-equal"
        )

    def check(self, config: ModelConfig) -> None:
        """Raise ParityError if a difference exceeds the tolerance for the model."""
        loss_bound, norm_bound, weight_bound = _TOLERANCES[config.params_dtype]
        if config.add_qkv_bias:
            weight_bound *= _KEY_BIAS_FACTOR
        # Written so that a NaN fails.
        if not (
            self.loss_error <= loss_bound and self.grad_norm_error <= norm_bound and self.weight_error <= weight_bound
        ):
            bounds = ", ".join(f"{bound:.0e}" for bound in (loss_bound, norm_bound, weight_bound))
            raise ParityError(f"{self.line()}: more than rounding explains ({bounds})")


def check_parity(session: Session, *, steps: int = 3) -> Parity:
    """Train a new copy of the run's model for a few steps at both layouts, and compare; every rank calls.

    The session's own model is not modified.
    """
    return compare_layouts(session, session.settings, session.topology, steps, Parity)


def compare_layouts(
    session: Session,
    settings: RunSettings,
    topology: Topology,
    steps: int,
    result: type[Parity],
    before: Callable[[Trainer], None] = lambda split: None,
) -> Parity:
    """Compare two layouts as ``check_parity``; ``before`` gets the split model's trainer before the first step."""

    def fresh(groups: Groups) -> Trainer:
        torch.default_generator.manual_seed(settings.training.seed)
        model = session.task.source.build(settings, session.data, groups=groups, device=session.ranks.device)
        return Trainer(settings, model, groups)

    split, parallel = fresh(Groups.of(topology)), settings.parallel
    before(split)
    # The whole model is on one rank. These runs have no context parallelism, so the "cp" group has one rank.
    alone = topology.group("cp")
    whole = fresh(Groups.alone(alone))
    if _weight_difference(split, whole, session.ranks.world) != 0.0:
        raise ParityError(f"initial weights at tp={parallel.tp} pp={parallel.pp} are not those at tp=1")
    loss_error = grad_norm_error = 0.0
    for step in range(steps):
        of_split = split.train_step(step, session.loader)
        of_whole = whole.train_step(step, session.loader)
        loss_error = max(loss_error, _relative(of_split.loss, of_whole.loss))
        grad_norm_error = max(grad_norm_error, _relative(of_split.grad_norm, of_whole.grad_norm))
    weight_error = _weight_difference(split, whole, session.ranks.world)
    parity = result(steps, parallel.tp, parallel.pp, loss_error, grad_norm_error, weight_error)
    parity.check(split.model.config)
    return parity


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference)


def _weight_difference(split: Trainer, whole: Trainer, world: dist.ProcessGroup) -> float:
    """Norm of the difference over the norm of the weights; the maximum over ranks."""
    split.wait_for_weights()
    reference = sharded_state_dict(whole.model, group=whole.tp_group)
    sums = torch.zeros(2, dtype=torch.float64, device=split.device)
    # Both copies of a tied weight count, because each must be right.
    for key, shard in sharded_state_dict(split.model, group=split.tp_group).items():
        gathered = gather_parameter(shard.data, shard.layout, group=split.tp_group).double()
        expected = reference[key].data.detach().double()
        sums += torch.stack([(gathered - expected).square().sum(), expected.square().sum()])
    if split.pp_group is not None:
        sums = all_reduce(sums, group=split.pp_group)
    difference, norm = sums.tolist()
    result = torch.tensor(math.sqrt(difference / norm), dtype=torch.float64, device=split.device)
    return float(all_reduce(result, group=world, op=dist.ReduceOp.MAX))
