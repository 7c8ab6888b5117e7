"""``shardwise demo``: prove that splitting the model changes nothing, then train it and show what it learned."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from shardwise.cli.arguments import LaunchArguments, parse_command
from shardwise.cli.start import run_in_ranks
from shardwise.errors import ConfigError
from shardwise.folder_lock import check_free
from shardwise.training.bounds import DEFAULT_TIMEOUT, LOCAL_RANKS, TIMEOUT, Range, resolve_paths_
from shardwise.training.settings import (
    CorpusSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    Settings,
    TrainingSettings,
)

if TYPE_CHECKING:
    from shardwise.training.outcome import Outcome
    from shardwise.training.parity import Parity
    from shardwise.training.ranks import Ranks
    from shardwise.training.session import Session


@dataclass(frozen=True)
class DemoArguments(LaunchArguments):
    """Train a small GPT on this machine's Python standard library, in about a minute on two cores.

    Attributes:
        out: folder for the checkpoint, metrics, picture and sample; an earlier demo's are replaced.
        tp: ranks that split each layer.
        pp: pipeline stages, which share out the layers; without the text sample at the end.
        steps: optimizer steps.
        timeout: seconds that a rank waits for another, before all end with an error that names it.
    """

    out: str = "runs/demo"
    tp: Annotated[int, LOCAL_RANKS, tyro.conf.arg(aliases=("--parallel.tp",))] = 2
    pp: Annotated[int, LOCAL_RANKS, tyro.conf.arg(aliases=("--parallel.pp",))] = 1
    steps: Annotated[int, Range(1, 10**9)] = 560
    timeout: Annotated[float, TIMEOUT] = DEFAULT_TIMEOUT

    def __post_init__(self) -> None:
        super().__post_init__()
        resolve_paths_(self, "out", prefix="--")

    @property
    def num_ranks(self) -> int:
        """One for each part of the model."""
        return self.tp * self.pp

    def check_world(self, world_size: int) -> None:
        """See ``Settings.check_world``."""
        demo_settings(self).check_world(world_size)


def demo_settings(arguments: DemoArguments) -> Settings:
    """The demo's run."""
    return Settings(
        data=("stdlib",),
        out=arguments.out,
        resume="restart",
        device="cpu",
        timeout=arguments.timeout,
        model=ModelSettings(num_layers=2, hidden_size=128, num_heads=4, vocab_size=4096, sequence_length=256),
        parallel=ParallelSettings(tp=arguments.tp, pp=arguments.pp),
        optimizer=OptimizerSettings(learning_rate=4e-3, warmup_steps=20),
        training=TrainingSettings(steps=arguments.steps, global_batch_size=8, eval_every=max(1, arguments.steps // 2)),
        corpus=CorpusSettings(held_out_fraction=0.03),
    )


def main(argv: list[str]) -> int:
    """Run the demo, in ranks that this process starts.

    Args:
        argv: the arguments after ``demo``.

    Returns:
        The exit code.

    Raises:
        ConfigError: a number of ranks that the model cannot be split over, or a folder that is not an earlier demo's.
    """
    arguments = parse_command(DemoArguments, argv, "shardwise demo")
    out = Path(arguments.out)

    def check() -> None:
        check_free(out)
        # The demo replaces what it finds; it must not find somebody's run.
        if (out / "checkpoints").exists() and not (out / "DEMO").exists():
            raise ConfigError(f"{out} holds a run that is not a demo's; choose another --out")

    return run_in_ranks("demo", argv, arguments, lambda: _run_rank(demo_settings(arguments)), check=check)


def _run_rank(settings: Settings) -> None:
    # Late, because PyTorch takes seconds to import, and a wrong argument should not.
    from shardwise.training.parity import check_parity
    from shardwise.training.run import open_new, run

    found: list[Parity] = []

    def opened(settings: Settings, ranks: Ranks) -> Session:
        if ranks.is_first:
            print("reading the standard library and learning its vocabulary (kept for the next time) ...", flush=True)
        return open_new(settings, ranks)

    def prove(session: Session) -> None:
        if session.ranks.is_first:
            split = f"tp={settings.parallel.tp}" + (f" pp={settings.parallel.pp}" if settings.parallel.pp > 1 else "")
            print(f"proving that {split} equals tp=1 before training ...", flush=True)
        found.append(check_parity(session))
        if session.ranks.is_first:
            print(f"       {found[0].line()}", flush=True)
            session.out.mkdir(parents=True, exist_ok=True)
            (session.out / "DEMO").write_text("made by `shardwise demo`, which replaces it\n", encoding="utf-8")

    run(settings, opened, before=prove, report=lambda session, outcome: report(session, found[0], outcome))


def report(session: Session, parity: Parity, outcome: Outcome) -> str:
    """The demo's last screen."""
    from shardwise.training.wording import banner

    held_out, settings = session.texts.held_out, session.settings
    tokens = settings.training.steps * settings.training.global_batch_size * settings.sequence_length
    compared = ", ".join(f"{name} {value:.3f}" for name, value in outcome.references.items())
    under = ", ".join(
        f"{1 - outcome.held_out_bits_per_byte / value:.0%} under {name}"
        for name, value in outcome.references.items()
        if outcome.held_out_bits_per_byte < value
    )
    command = _command_name()
    sample = "sample.txt " if settings.parallel.pp == 1 else ""
    rows = {
        "parity": parity.line(),
        "loss": f"{outcome.first_loss:.3f} -> {outcome.last_loss:.3f} nats per token, {tokens:,} tokens in "
        f"{outcome.seconds:.0f} s",
        "held out": f"{outcome.held_out_bits_per_byte:.3f} bits per byte on {held_out.num_bytes:,} bytes it never saw",
        "": f"the same bytes: {compared}" + (f"; the model is {under}" if under else ""),
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
    found = shutil.which("shardwise")
    if found is not None or not beside_python.exists():
        return "shardwise"
    return os.path.relpath(beside_python)
