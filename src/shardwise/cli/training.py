"""The commands that train: ``train``, ``finetune``, ``dpo`` and ``demo``."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from shardwise.cli.arguments import LaunchArguments, RunArguments
from shardwise.cli.reporting import allow_any_character, has_colours
from shardwise.core.errors import ConfigError
from shardwise.core.folder_lock import check_free
from shardwise.run.settings import DpoSettings, FinetuneSettings, Settings
from shardwise.training.bounds import DEFAULT_TIMEOUT, LOCAL_RANKS, TIMEOUT, Folder, Range, with_values


@dataclass(frozen=True, kw_only=True)
class TrainArguments(RunArguments):
    """Train a GPT on your text.

    Flags override the TOML file of --config, which overrides the defaults. The
    file has a table for each group of settings: [model] num_layers = 8.
    On this machine:
      shardwise train --data FOLDER --tp 2
    On many hosts, torchrun starts the ranks (leave out --nproc, which torchrun
    takes for its own flag unless "--" precedes it):
      export OMP_NUM_THREADS=1
      torchrun --nnodes 2 --nproc-per-node 8 ... -m shardwise train --data FOLDER
    """

    settings: Annotated[Settings, tyro.conf.arg(name="")]

    def work(self) -> Callable[[], object] | None:
        from shardwise.run.run import run

        return partial(run, self.settings)


@dataclass(frozen=True, kw_only=True)
class FinetuneArguments(RunArguments):
    """Fine-tune a Hugging Face model on your chats, instructions or texts.

    Training updates all weights, or only low-rank adapters (LoRA). OUT becomes a
    Hugging Face folder, or an adapter folder of the peft library. Flags override
    the TOML file of --config, which overrides the defaults. Examples:
      shardwise finetune MODEL_DIR --data chats.jsonl --out OUT --epochs 3 --tp 2
      shardwise finetune MODEL_DIR --data FOLDER --out OUT --tp 2 --lora-rank 8
      shardwise finetune MODEL_DIR --data chats.jsonl --show 3

    Attributes:
        show: print this many samples as the model sees them, with the learned tokens in colour, and do not train.
    """

    settings: Annotated[FinetuneSettings, tyro.conf.arg(name="")]
    show: Annotated[int, Range(0, 1_000_000)] = 0

    @property
    def lasts(self) -> bool:  # type: ignore[override]  # one command that trains or prints
        return not self.show

    def _check_together(self) -> None:
        super()._check_together()
        if self.show and self.nproc is not None:
            raise ConfigError(f"--show prints samples on one rank; leave --nproc {self.nproc} out")

    @property
    def num_ranks(self) -> int:
        return 1 if self.show else super().num_ranks

    def check_world(self, world_size: int) -> None:
        if not self.show:
            super().check_world(world_size)

    def begins(self) -> str:
        return f"showing samples of {' '.join(self.settings.data)}" if self.show else super().begins()

    def check_early(self) -> None:
        if self.show:
            self.check_inputs()
        else:
            super().check_early()

    def resume_hint(self) -> str:
        return "" if self.show else super().resume_hint()

    def work(self) -> Callable[[], object] | None:
        if self.show:
            from shardwise.run.commands.shown_samples import shown_samples

            allow_any_character()
            for paragraph in shown_samples(self.settings, self.show, colours=has_colours()):
                print(paragraph)
            return None
        from shardwise.run.run import run

        return partial(run, self.settings)


@dataclass(frozen=True, kw_only=True)
class DpoArguments(FinetuneArguments):
    """Fine-tune a Hugging Face model on pairs of a better and a worse answer.

    The objective is direct preference optimization (DPO) or a variant of it. A
    record has a prompt, a chosen and a rejected answer, as texts or as messages.
    The answers' log-probabilities under the initial model are computed once and
    stored in OUT. The rest works as in shardwise finetune:
      shardwise dpo MODEL_DIR --data pairs.jsonl --out OUT --epochs 1 --tp 2
      shardwise dpo MODEL_DIR --data pairs.jsonl --out OUT --lora-rank 8 --beta 0.1
      shardwise dpo MODEL_DIR --data pairs.jsonl --show 3

    Attributes:
        show: print this many pairs as the model sees them, with the answers in colour, and do not train.
    """

    settings: Annotated[DpoSettings, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class DemoArguments(LaunchArguments):
    """Train a small GPT on this machine's Python standard library, in about a minute on two cores.

    Attributes:
        out: folder for the checkpoint, metrics, picture and sample, which replace the files of an earlier demo.
        tp: number of ranks that split each layer.
        pp: number of pipeline stages; with more than one, the demo writes no text sample at the end.
        steps: number of optimizer steps.
        timeout: seconds that a rank waits for another rank, before all ranks end with an error that names it.
    """

    out: Annotated[str, Folder()] = "runs/demo"
    tp: Annotated[int, LOCAL_RANKS, tyro.conf.arg(aliases=("--parallel.tp",))] = 2
    pp: Annotated[int, LOCAL_RANKS, tyro.conf.arg(aliases=("--parallel.pp",))] = 1
    steps: Annotated[int, Range(1, 10**9)] = 560
    timeout: Annotated[float, TIMEOUT] = DEFAULT_TIMEOUT
    lasts: ClassVar[bool] = True

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    def check_world(self, world_size: int) -> None:
        demo_settings(self).check_world(world_size)

    def check_early(self) -> None:
        """Raise ConfigError if the folder is in use, or holds a run that is not a demo and would be replaced."""
        out = Path(self.out)
        check_free(out)
        if (out / "checkpoints").exists() and not (out / "DEMO").exists():
            raise ConfigError(f"{out} holds a run that is not a demo's; choose another --out")

    def work(self) -> Callable[[], object] | None:
        from shardwise.run.run import run
        from shardwise.run.tasks.demo import demo_task

        return partial(run, demo_settings(self), demo_task)


def demo_settings(arguments: DemoArguments) -> Settings:
    """Return the settings of the demo's run."""
    values = {
        "data": ("stdlib",),
        "out": arguments.out,
        "resume": "restart",
        "device": "cpu",
        "timeout": arguments.timeout,
        "model": {"num_layers": 2, "hidden_size": 128},
        "parallel": {"tp": arguments.tp, "pp": arguments.pp},
        "optimizer": {"learning_rate": 4e-3},
        "training": {"steps": arguments.steps, "global_batch_size": 8},
    }
    return with_values(Settings, values)
