"""Parity check before training: compare the first steps at tp = 1 and at this run's tp and pp, from the same seed.

Both models are trained in this process: the split model over the run's groups, and a whole model on each rank. In
exact mode, which has its own groups, both give the same bits.

The demo proves that splitting the model changes nothing, then trains it and shows the result.
"""

import contextlib
import dataclasses
import math
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.core.communication.agreement import agree
from shardwise.core.communication.collectives import all_reduce
from shardwise.core.errors import ConfigError, ParityError
from shardwise.core.files import write_atomically
from shardwise.core.sharded_state import gather_parameter, sharded_state_dict
from shardwise.core.topology import Groups, Topology
from shardwise.run.exact_surroundings import deterministic_algorithms, fix_order_of_mkl
from shardwise.run.exact_trials import check_device
from shardwise.run.processes.ranks import Ranks
from shardwise.run.settings import RunSettings, Settings
from shardwise.run.tasks.task import Outcome, Session, Task, compared
from shardwise.run.tasks.task_data import TaskData
from shardwise.run.tasks.texts import NewModel, NewTexts
from shardwise.run.wording import banner
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
    """Result of a parity check: the differences of the two runs.

    Attributes:
        steps: number of compared optimizer steps.
        tp, pp: tensor-parallel size and number of pipeline stages, compared with 1.
        loss_error: largest relative difference of a step's loss.
        grad_norm_error: largest relative difference of a step's gradient norm.
        weight_error: norm of the difference of all updated weights, over the norm of the weights.
        exact: True if the runs were exact and had to give the same bits.
    """

    steps: int
    tp: int
    pp: int
    loss_error: float
    grad_norm_error: float
    weight_error: float
    exact: bool = False

    def line(self) -> str:
        """The three differences on one line."""
        stages = "" if self.pp == 1 else f" pp={self.pp}"
        if self.exact:
            return (
                f"tp={self.tp}{stages} has the bits of tp=1 over {self.steps} steps: loss {self.loss_error:g} apart, "
                f"gradient norm {self.grad_norm_error:g}, updated weights {self.weight_error:g}"
            )
        return (
            f"tp={self.tp}{stages} equals tp=1 over {self.steps} steps: loss within {self.loss_error:.1e}, gradient "
            f"norm {self.grad_norm_error:.1e}, updated weights {self.weight_error:.1e}; initial weights bit-equal"
        )


def check_parity(session: Session, *, steps: int = 3, exact: bool = False) -> Parity:
    """Train a new copy of the run's model for a few steps at both layouts, and compare; every rank calls.

    The session's own model is not modified.

    Args:
        session: session of the run.
        steps: number of optimizer steps.
        exact: train in exact mode (``parallel.exact``) and allow no difference.

    Raises:
        ParityError: initial weights differ, or a difference exceeds the tolerance, which is 0 in exact mode.
        ConfigError: the run's sizes or device do not support exact mode; on every rank.
    """
    if not exact:
        return _compared(session, session.settings, session.topology, steps)
    parallel = dataclasses.replace(session.settings.parallel, exact=True)
    settings = dataclasses.replace(session.settings, parallel=parallel)
    settings.check_world(session.ranks.world_size)
    # A process group has one kind of sum, so exact mode needs its own groups.
    topology = Topology.create(tp=parallel.tp, pp=parallel.pp)
    with contextlib.ExitStack() as stack:
        stack.callback(topology.destroy)
        stack.enter_context(deterministic_algorithms(session.ranks.device))
        return _compared(session, settings, topology, steps)


def _compared(session: Session, settings: RunSettings, topology: Topology, steps: int) -> Parity:
    exact = settings.parallel.exact

    def fresh(groups: Groups) -> Trainer:
        torch.default_generator.manual_seed(settings.training.seed)
        model = session.task.source.build(settings, session.data, groups=groups, device=session.ranks.device)
        return Trainer(settings, model, groups)

    split = fresh(Groups.of(topology))
    if exact:
        micro = settings.micro_batch_size(topology.size("dp"))

        def tried() -> None:
            with session.shortage.explained():
                check_device(split.model, micro_batch_size=micro, sequence_length=settings.sequence_length)

        agree(tried, group=session.ranks.control)
    # The whole model is on one rank. These runs have no context parallelism, so the "cp" group has one rank.
    alone = topology.group("cp")
    whole = fresh(Groups.alone(alone))
    if _weight_difference(split, whole, session.ranks.world) != 0.0:
        split_over = f"tp={settings.parallel.tp} pp={settings.parallel.pp}"
        raise ParityError(f"initial weights at {split_over} are not those at tp=1")
    loss_error = grad_norm_error = 0.0
    for step in range(steps):
        of_split = split.train_step(step, session.loader)
        of_whole = whole.train_step(step, session.loader)
        loss_error = max(loss_error, _relative(of_split.loss, of_whole.loss))
        grad_norm_error = max(grad_norm_error, _relative(of_split.grad_norm, of_whole.grad_norm))
    loss_bound, norm_bound, weight_bound = (0.0,) * 3 if exact else _TOLERANCES[split.model.config.params_dtype]
    if split.model.config.add_qkv_bias:
        weight_bound *= _KEY_BIAS_FACTOR
    weight_error, parallel = _weight_difference(split, whole, session.ranks.world), settings.parallel
    parity = Parity(steps, parallel.tp, parallel.pp, loss_error, grad_norm_error, weight_error, exact)
    # Written so that a NaN fails.
    if not (loss_error <= loss_bound and grad_norm_error <= norm_bound and weight_error <= weight_bound):
        if exact:
            raise ParityError(f"{parity.line()}; exact runs must have the same bits at every layout")
        bounds = ", ".join(f"{bound:.0e}" for bound in (loss_bound, norm_bound, weight_bound))
        raise ParityError(f"{parity.line()}: more than rounding explains ({bounds})")
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


_EXACT_STEPS = 10


class Demo(NewTexts):
    """Task of the demo: check parity, then train a new model on the standard library.

    Args:
        settings: settings of the run.

    Attributes:
        parity: result of the parity check, once it is done.
        exact: result of the parity check in exact mode, or the reason why this layout or device does not support it.
    """

    parity: Parity
    exact: str

    def read(self, ranks: Ranks) -> TaskData:
        """Read the standard library, after a message because this takes a while."""
        # MKL must be configured before the first product, long before the exact steps.
        fix_order_of_mkl()
        if ranks.is_first:
            print("reading the standard library and learning its vocabulary (kept for the next time) ...", flush=True)
        return super().read(ranks)

    def before(self, session: Session) -> None:
        """Check parity, and mark the folder as one that the next demo may replace."""
        parallel, is_first = session.settings.parallel, session.ranks.is_first
        if is_first:
            split = f"tp={parallel.tp}" + (f" pp={parallel.pp}" if parallel.pp > 1 else "")
            print(f"proving that {split} equals tp=1 before training ...", flush=True)
        self.parity = check_parity(session)
        if is_first:
            print(f"       {self.parity.line()}", flush=True)
        try:
            self.exact = check_parity(session, steps=_EXACT_STEPS, exact=True).line()
        except ConfigError as error:
            self.exact = f"left out: {error}"
        if is_first:
            print(f"       exact: {self.exact}", flush=True)
            write_atomically(
                session.out / "DEMO", lambda file: file.write(b"made by `shardwise demo`, which replaces it\n")
            )

    def report(self, session: Session, outcome: Outcome) -> str:
        """The text that the demo prints last."""
        held_out, settings, bits = session.data.held_out_bytes, session.settings, outcome.held_out_bits_per_byte
        tokens = settings.training.steps * settings.training.global_batch_size * settings.sequence_length
        beaten = {name: 1 - bits / value for name, value in outcome.references.items() if bits < value}
        under = ", ".join(f"{share:.0%} under {name}" for name, share in beaten.items())
        command = _command_name()
        sample = "sample.txt " if settings.parallel.pp == 1 else ""
        rows = {
            "parity": self.parity.line(),
            "exact": self.exact,
            "loss": f"{outcome.first_loss:.3f} -> {outcome.last_loss:.3f} nats per token, {tokens:,} tokens in "
            f"{outcome.seconds:.0f} s",
            "held out": f"{bits:.3f} bits per byte on {len(held_out):,} bytes it never saw",
            "": f"the same bytes: {compared(outcome)}" + (f"; the model is {under}" if under else ""),
            "traffic": f"{outcome.collectives_per_step} collectives and {outcome.bytes_per_step / 1e6:.1f} MB per rank "
            "and step",
            "files": f"{session.out}/: loss.png metrics.jsonl {sample}checkpoints/{outcome.checkpoint.name}/",
        }
        body = "\n".join(f"{name:<9}{text}" for name, text in rows.items())
        notes = "".join(f"\n         {note}" for note in outcome.notes)
        return f"""
{banner(session)}
{body}{notes}

Go on:
  {command} generate {session.out} --prompt "def "
  {command} train --data YOUR_FILES --out runs/mine --tp {settings.parallel.tp}
  {command} train --help"""


def demo_task(settings: Settings) -> Task:
    """Return the demo's task."""
    demo = Demo(settings)
    return Task(settings, NewModel(settings), demo, report=demo.report)


def _command_name() -> str:
    """Return the command that starts this program: its name if the shell finds it, else its relative path."""
    beside_python = Path(sys.executable).with_name("shardwise")
    if shutil.which("shardwise") is not None or not beside_python.exists():
        return "shardwise"
    return os.path.relpath(beside_python)
