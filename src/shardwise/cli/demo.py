"""``shardwise demo``: prove that splitting the model changes nothing, then train it and show what it learned."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from shardwise.cli.arguments import LaunchArguments
from shardwise.core.errors import ConfigError
from shardwise.core.folder_lock import check_free
from shardwise.training.bounds import DEFAULT_TIMEOUT, LOCAL_RANKS, TIMEOUT, Folder, Range
from shardwise.training.plain_values import with_values
from shardwise.training.settings import Settings


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

    out: Annotated[str, Folder()] = "runs/demo"
    tp: Annotated[int, LOCAL_RANKS, tyro.conf.arg(aliases=("--parallel.tp",))] = 2
    pp: Annotated[int, LOCAL_RANKS, tyro.conf.arg(aliases=("--parallel.pp",))] = 1
    steps: Annotated[int, Range(1, 10**9)] = 560
    timeout: Annotated[float, TIMEOUT] = DEFAULT_TIMEOUT
    lasts: ClassVar[bool] = True

    @property
    def num_ranks(self) -> int:
        """One for each part of the model."""
        return self.tp * self.pp

    def check_world(self, world_size: int) -> None:
        """See ``Settings.check_world``."""
        demo_settings(self).check_world(world_size)

    def check(self) -> None:
        """Raise ConfigError if the folder is in use, or not an earlier demo's, which this one replaces."""
        out = Path(self.out)
        check_free(out)
        if (out / "checkpoints").exists() and not (out / "DEMO").exists():
            raise ConfigError(f"{out} holds a run that is not a demo's; choose another --out")

    def work(self) -> Callable[[], object]:
        """Prove, train and report."""
        from shardwise.run.run import run
        from shardwise.run.tasks.demo_run import Demo

        return partial(run, demo_settings(self), Demo)


def demo_settings(arguments: DemoArguments) -> Settings:
    """The demo's run."""
    values = {
        "data": ("stdlib",),
        "out": arguments.out,
        "resume": "restart",
        "device": "cpu",
        "timeout": arguments.timeout,
        "model": {"num_layers": 2, "hidden_size": 128, "num_heads": 4, "vocab_size": 4096, "sequence_length": 256},
        "parallel": {"tp": arguments.tp, "pp": arguments.pp},
        "optimizer": {"learning_rate": 4e-3, "warmup_steps": 20},
        "training": {"steps": arguments.steps, "global_batch_size": 8, "eval_every": max(1, arguments.steps // 2)},
        "corpus": {"held_out_fraction": 0.03},
    }
    return with_values(Settings, values)
