"""The demo's run: it proves that splitting the model changes nothing, then trains it and shows what it learned."""

import os
import shutil
import sys
from pathlib import Path

from shardwise.core.errors import ConfigError
from shardwise.run.exact_trials.arithmetic import fix_order_of_mkl
from shardwise.run.parity import Parity, check_parity
from shardwise.run.processes.ranks import Ranks
from shardwise.run.tasks.recipe import Outcome, Recipe, Session, compared
from shardwise.run.tasks.texts import TrainingData
from shardwise.run.wording import banner

_EXACT_STEPS = 10


class Demo(Recipe):
    """A new model that is proved to be the same on one rank; see ``Recipe``.

    Attributes:
        parity: of the proof, once it is done.
        exact: what was found of exact runs, with the same bits; or why they are not for this layout or device.
    """

    parity: Parity
    exact: str

    def read_texts(self, ranks: Ranks) -> TrainingData:
        """The standard library's; it is said, as it takes a while."""
        # For the exact steps, which come when much has been multiplied.
        fix_order_of_mkl()
        if ranks.is_first:
            print("reading the standard library and learning its vocabulary (kept for the next time) ...", flush=True)
        return super().read_texts(ranks)

    def before(self, session: Session) -> None:
        """Prove, and mark the folder as one that the next demo may replace."""
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
            session.out.mkdir(parents=True, exist_ok=True)
            (session.out / "DEMO").write_text("made by `shardwise demo`, which replaces it\n", encoding="utf-8")

    def report(self, session: Session, outcome: Outcome) -> str:
        """The demo's last screen."""
        held_out, settings, bits = session.texts.held_out_bytes, session.settings, outcome.held_out_bits_per_byte
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


def _command_name() -> str:
    """How the user can call this program: its name if the shell finds it, else its path from here."""
    beside_python = Path(sys.executable).with_name("shardwise")
    if shutil.which("shardwise") is not None or not beside_python.exists():
        return "shardwise"
    return os.path.relpath(beside_python)
