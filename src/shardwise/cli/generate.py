"""``shardwise generate``: continue a text with a trained checkpoint, split over any number of ranks."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from shardwise.cli.arguments import parse_command
from shardwise.cli.checkpoint_model import OpenCheckpoint, open_checkpoint
from shardwise.cli.launch import launch_ranks, shardwise_command
from shardwise.cli.rank import checked_world_size
from shardwise.cli.reporting import print_line
from shardwise.errors import ConfigError, DataError
from shardwise.training.bounds import LOCAL_RANKS, SEED, Range, check_values

if TYPE_CHECKING:
    from shardwise.inference import Sampling
    from shardwise.tokenizer import Tokenizer
    from shardwise.training.ranks import Ranks


@dataclass(frozen=True)
class GenerateArguments:
    """Continue a text with a model that ``shardwise train`` or ``shardwise demo`` trained, or ``import-hf`` imported.

    The same seed gives the same text at every --nproc.

    Attributes:
        checkpoint: folder of a run, for its newest checkpoint, or of one of its checkpoints.
        prompt: text to continue; a new text begins if it is empty.
        max_new_tokens: most tokens to add.
        temperature: under 1 favours likely tokens; 0 always takes the likeliest.
        top_k: choose among this many likeliest tokens; 0 is off.
        top_p: choose among the fewest likeliest tokens whose probabilities reach this sum; 1 is off.
        special_tokens: read the names of special tokens in the prompt, such as <|im_start|>, as these tokens, as
            transformers does; as letters with --no-special-tokens, for text of people whom you don't trust.
        seed: of the choices.
        nproc: ranks on this machine that split the model.
        device: where to compute; "auto" takes a GPU if there is one for each rank.
        debug: show stack traces, and the launcher's log.
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    prompt: str = ""
    max_new_tokens: Annotated[int, Range(0, 10**9)] = 200
    temperature: Annotated[float, Range(0, 1e6)] = 0.8
    top_k: Annotated[int, Range(0, 10**9)] = 50
    top_p: Annotated[float, Range(0, 1, low_included=False)] = 1.0
    special_tokens: bool = True
    seed: Annotated[int, SEED] = 0
    nproc: Annotated[int | None, LOCAL_RANKS] = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    debug: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False

    def __post_init__(self) -> None:
        check_values(self, "--")


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
    world_size, here = checked_world_size(arguments.nproc)
    sampling = _checked_sampling(arguments)
    if not here:
        # A mistake costs less to find before the ranks are started.
        _open(arguments, world_size)
        program = shardwise_command("generate", *argv)
        return launch_ranks(world_size, program, command="shardwise generate", debug=arguments.debug)
    _run_rank(arguments, sampling)
    return 0


def _checked_sampling(arguments: GenerateArguments) -> Sampling:
    # Late, here and below, because PyTorch takes seconds to import, and `--help` or a wrong flag should not.
    from shardwise.inference import Sampling

    return Sampling(arguments.temperature, arguments.top_k, arguments.top_p)


def _open(arguments: GenerateArguments, world_size: int) -> tuple[OpenCheckpoint, Tokenizer]:
    """The checkpoint of a model that continues texts, and its tokenizer."""
    from shardwise.training.settings import Settings

    opened = open_checkpoint(Path(arguments.checkpoint))
    opened.check_fits(world_size)
    if not isinstance(opened.origin, Settings) and opened.origin.description.kind != "gpt":
        raise ConfigError(
            f"{opened.folder} holds a {opened.origin.architecture.model_type} model, which adds no tokens"
        )
    if opened.tokenizer is None:
        raise DataError(f"{opened.folder} was imported without a tokenizer.json that says which token ends a text")
    return opened, opened.tokenizer


def _run_rank(arguments: GenerateArguments, sampling: Sampling) -> None:
    from shardwise.training.ranks import open_ranks

    with open_ranks(arguments.device) as ranks:
        _generate(arguments, sampling, ranks)


def _generate(arguments: GenerateArguments, sampling: Sampling, ranks: Ranks) -> None:
    import torch.distributed as dist

    from shardwise.collectives.agreement import agree
    from shardwise.inference import TextStream, generate
    from shardwise.models.gpt import GPTModel

    def prepare() -> tuple[OpenCheckpoint, Tokenizer, list[int]]:
        opened, tokenizer = _open(arguments, ranks.world_size)
        prompt_ids = tokenizer.encode(arguments.prompt, parse_special=arguments.special_tokens)
        return opened, tokenizer, [*tokenizer.beginning, *prompt_ids]

    world = dist.group.WORLD
    assert world is not None
    opened, tokenizer, prompt_ids = agree(prepare, group=world)
    model = opened.load_model(ranks)
    assert isinstance(model, GPTModel)
    text = TextStream(tokenizer, prompt_ids)
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
            eos_id=tokenizer.eos_id,
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
