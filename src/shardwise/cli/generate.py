"""``shardwise generate``: continue a text with a trained checkpoint, split over any number of ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from shardwise.cli.arguments import parse_command
from shardwise.cli.launch import launch_ranks, shardwise_command
from shardwise.cli.rank import RankEnvironment
from shardwise.cli.reporting import print_line
from shardwise.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from shardwise.inference import Sampling
    from shardwise.models.gpt import GPTModel
    from shardwise.tokenizer import Tokenizer
    from shardwise.training.ranks import Ranks
    from shardwise.training.settings import Settings


@dataclass(frozen=True)
class GenerateArguments:
    """Continue a text with a model that ``shardwise train`` or ``shardwise demo`` trained.

    The same seed gives the same text at every --nproc.

    Attributes:
        checkpoint: folder of a run, for its newest checkpoint, or of one of its checkpoints.
        prompt: text to continue; a new text begins if it is empty.
        max_new_tokens: most tokens to add.
        temperature: under 1 favours likely tokens; 0 always takes the likeliest.
        top_k: choose among this many likeliest tokens; 0 is off.
        top_p: choose among the fewest likeliest tokens whose probabilities reach this sum; 1 is off.
        seed: of the choices.
        nproc: ranks on this machine that split the model.
        device: where to compute; "auto" takes a GPU if there is one for each rank.
        debug: show stack traces, and the launcher's log.
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    prompt: str = ""
    max_new_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0
    nproc: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    debug: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False


@dataclass(frozen=True)
class OpenCheckpoint:
    """A training run's checkpoint without its tensors.

    Attributes:
        folder: of the checkpoint.
        settings: of the run.
        tokenizer: of the run.
    """

    folder: Path
    settings: Settings
    tokenizer: Tokenizer


def main(argv: list[str]) -> int:
    """Generate, here if this process is a rank or the only one, else in ranks that this process starts.

    Args:
        argv: the arguments after ``generate``.

    Returns:
        The exit code.

    Raises:
        ConfigError: a flag that cannot be, or more ranks than the model can be split over.
        CheckpointError: no checkpoint there, or a damaged one.
    """
    arguments = parse_command(GenerateArguments, argv, "shardwise generate")
    environment = RankEnvironment.read()
    world_size = arguments.nproc or 1
    if environment is not None:
        if arguments.nproc not in (None, environment.world_size):
            raise ConfigError(
                f"--nproc asks for {arguments.nproc} ranks, but the launcher started {environment.world_size}; leave "
                "--nproc out"
            )
        world_size = environment.world_size
    sampling = _checked_sampling(arguments)
    if environment is None and world_size > 1:
        # A mistake costs less to find before the ranks are started.
        check_fits(open_checkpoint(Path(arguments.checkpoint)), world_size)
        program = shardwise_command("generate", *argv)
        return launch_ranks(world_size, program, command="shardwise generate", debug=arguments.debug)
    _run_rank(arguments, sampling)
    return 0


def _checked_sampling(arguments: GenerateArguments) -> Sampling:
    # Late, here and below, because PyTorch takes seconds to import, and `--help` or a wrong flag should not.
    from shardwise.inference import Sampling

    if arguments.nproc is not None and arguments.nproc < 1:
        raise ConfigError(f"--nproc is {arguments.nproc}; it must be at least 1")
    if arguments.max_new_tokens < 0:
        raise ConfigError(f"--max-new-tokens is {arguments.max_new_tokens}; it must not be negative")
    if not 0 <= arguments.seed < 2**63:
        raise ConfigError(f"--seed is {arguments.seed}; it must be from 0 to 2**63 - 1")
    return Sampling(arguments.temperature, arguments.top_k, arguments.top_p)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that ``path`` stands for: itself, or the newest of a run or of its folder of checkpoints.

    Raises:
        CheckpointError: there is none.
    """
    from shardwise.checkpoint import latest

    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}; give the --out of a training run or one of its checkpoints")
    if path.name.startswith("step-"):
        return path
    newest = latest(path / "checkpoints") or latest(path)
    if newest is None:
        raise CheckpointError(
            f"{path} holds no checkpoint; give the --out of a training run or one of its checkpoints/step-*"
        )
    return newest


def open_checkpoint(path: Path) -> OpenCheckpoint:
    """Find a training run's checkpoint, and read all of it but its tensors.

    Args:
        path: see ``find_checkpoint``.

    Raises:
        CheckpointError: there is none, it is damaged, or it was not written by a training run.
        DataError: its tokenizer cannot be read.
    """
    from shardwise.checkpoint import read_meta
    from shardwise.tokenizer import Tokenizer
    from shardwise.training.settings import Settings

    folder = find_checkpoint(path)
    meta = read_meta(folder)
    missing = [name for name in ("settings", "tokenizer_sha256") if name not in meta]
    if missing:
        raise CheckpointError(f"{folder} was not written by shardwise train: {', '.join(missing)} is missing in it")
    tokenizer = Tokenizer.load(folder)
    if tokenizer.sha256 != meta["tokenizer_sha256"]:
        raise CheckpointError(f"{folder / 'tokenizer.json'} is not the tokenizer that the model was trained with")
    return OpenCheckpoint(folder, Settings.from_json(meta["settings"]), tokenizer)


def check_fits(opened: OpenCheckpoint, world_size: int) -> None:
    """Raise ConfigError unless the model can be split over ``world_size`` ranks."""
    model = opened.settings.model
    heads = model.num_query_groups or model.num_heads
    if world_size > heads:
        raise ConfigError(
            f"the model's {heads} key-value heads cannot be split over {world_size} ranks; use --nproc {heads} or less"
        )


def load_model(opened: OpenCheckpoint, ranks: Ranks) -> GPTModel:
    """The checkpoint's model, split over all ranks; every rank calls.

    Raises:
        CheckpointError: the tensors are damaged or of another model.
    """
    import torch.distributed as dist

    from shardwise import checkpoint
    from shardwise.process_groups_config import ProcessGroupCollection
    from shardwise.sharded_state import sharded_state_dict
    from shardwise.training.build import build_model
    from shardwise.training.settings import ParallelSettings

    world = dist.group.WORLD
    assert world is not None
    model = build_model(
        # The run's own split says nothing about this one, and splitting the sequence saves nothing on one token.
        dataclasses.replace(opened.settings, parallel=ParallelSettings(tp=ranks.world_size)),
        opened.tokenizer.vocab_size,
        pg_collection=ProcessGroupCollection(tp=world),
        device=ranks.device,
    )
    state = sharded_state_dict(model, "model.", group=world)
    checkpoint.load(opened.folder, state, group=world, allow_extra=True)
    return model


def _run_rank(arguments: GenerateArguments, sampling: Sampling) -> None:
    from shardwise.training.ranks import open_ranks

    with open_ranks(arguments.device) as ranks:
        _generate(arguments, sampling, ranks)


def _generate(arguments: GenerateArguments, sampling: Sampling, ranks: Ranks) -> None:
    import torch.distributed as dist

    from shardwise.collectives.agreement import agree
    from shardwise.inference import TextStream, generate

    def prepare() -> tuple[OpenCheckpoint, list[int]]:
        opened = open_checkpoint(Path(arguments.checkpoint))
        check_fits(opened, ranks.world_size)
        return opened, opened.tokenizer.encode(arguments.prompt)

    world = dist.group.WORLD
    assert world is not None
    opened, prompt_ids = agree(prepare, group=world)
    model = load_model(opened, ranks)
    text = TextStream(opened.tokenizer, prompt_ids)
    if ranks.is_first:
        if len(prompt_ids) > model.max_sequence_length:
            print_line(
                f"shardwise generate: the prompt has {len(prompt_ids)} tokens, of which the model reads the last "
                f"{model.max_sequence_length}"
            )
        _allow_any_character()
        _show(arguments.prompt)
    try:
        generate(
            model,
            prompt_ids,
            max_new_tokens=arguments.max_new_tokens,
            sampling=sampling,
            seed=arguments.seed,
            eos_id=opened.tokenizer.eos_id,
            on_token=(lambda token: _show(text.push(token))) if ranks.is_first else None,
        )
    finally:
        # After Ctrl-C too, so that the shell's prompt begins a line of its own.
        if ranks.is_first:
            _show(text.finish() + "\n")


def _allow_any_character() -> None:
    """Where the terminal's encoding lacks a character, show a question mark and go on."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):
            sys.stdout.reconfigure(errors="replace")


def _show(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()
