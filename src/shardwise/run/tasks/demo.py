"""The demo: prove that splitting the model changes nothing, then train it and show the result."""

import os
import shutil
import sys
from pathlib import Path

from shardwise.core.atomic_files import write_atomically
from shardwise.core.errors import ConfigError
from shardwise.run.banner import banner
from shardwise.run.exact.environment import fix_order_of_mkl
from shardwise.run.exact.parity import check_exact_parity
from shardwise.run.parity import Parity, check_parity
from shardwise.run.processes.ranks import Ranks
from shardwise.run.settings import Settings
from shardwise.run.tasks.task import Outcome, Session, Task, compared
from shardwise.run.tasks.task_data import TaskData
from shardwise.run.tasks.texts import NewModel, NewTexts

_EXACT_STEPS = 10


class Demo(NewTexts):
    """Task of the demo: check parity, then train a new model on the standard library."""

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
            self.exact = check_exact_parity(session, steps=_EXACT_STEPS).line()
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
        # There is no picture without matplotlib, and no sample from pipeline stages.
        files = [name for name in ("loss.png", "metrics.jsonl", "sample.txt") if (session.out / name).is_file()]
        rows = {
            "parity": self.parity.line(),
            "exact": self.exact,
            "loss": f"{outcome.first_loss:.3f} -> {outcome.last_loss:.3f} nats per token, {tokens:,} tokens in "
            f"{outcome.seconds:.0f} s",
            "held out": f"{bits:.3f} bits per byte on {len(held_out):,} bytes it never saw",
            "": f"the same bytes: {compared(outcome)}" + (f"; the model is {under}" if under else ""),
            "traffic": f"{outcome.collectives_per_step} collectives and {outcome.bytes_per_step / 1e6:.1f} MB per rank "
            "and step",
            "files": f"{session.out}/: {' '.join(files)} checkpoints/{outcome.checkpoint.name}/",
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
