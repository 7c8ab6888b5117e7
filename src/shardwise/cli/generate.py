"""``shardwise generate``: continue a text with a trained checkpoint, split over any number of ranks."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from shardwise.cli.arguments import SplitArguments, parse_command
from shardwise.cli.checkpoint_model import TO_BRING_A_TOKENIZER, OpenCheckpoint, open_model
from shardwise.cli.reporting import print_line
from shardwise.cli.start import run_in_ranks
from shardwise.errors import ConfigError, DataError
from shardwise.training.bounds import SEED, Range, resolve_paths_

if TYPE_CHECKING:
    from shardwise.huggingface.generation_config import GenerationChoice
    from shardwise.tokenizer import Tokenizer
    from shardwise.training.ranks import Ranks


@dataclass(frozen=True)
class GenerateArguments(SplitArguments):
    """Continue a text with a model of shardwise train, demo, finetune or import-hf, or in a Hugging Face folder.

    The same seed gives the same text on every number of ranks.

    Attributes:
        checkpoint: folder of a run or an import, for its newest checkpoint, or of one of its checkpoints; or a Hugging
            Face folder, a fine-tuned one included; or adapters, with the model that they name.
        adapter: folder of adapters (LoRA, in the files of the peft library) to use with the model.
        prompt: text to continue; a new text begins if it is empty.
        max_new_tokens: most tokens to add. Here and below, if not given: what the model's generation_config.json says,
            or else 200.
        temperature: under 1 favours likely tokens; 0 always takes the likeliest. If not given: see above, or else 0.8.
        top_k: choose among this many likeliest tokens; 0 is off. If not given: see above, or else 50.
        top_p: choose among the fewest likeliest tokens whose probabilities reach this sum; 1 is off. If not given: see
            above, or else 1.
        special_tokens: read the names of special tokens in the prompt, such as <|im_start|>, as these tokens, as
            transformers does; as letters with --no-special-tokens, for text of people whom you don't trust.
        seed: of the choices.
        device: where to compute; "auto" takes a GPU if there is one for each rank.
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    adapter: str | None = None
    prompt: str = ""
    max_new_tokens: Annotated[int | None, Range(0, 10**9)] = None
    temperature: Annotated[float | None, Range(0, 1e6)] = None
    top_k: Annotated[int | None, Range(0, 10**9)] = None
    top_p: Annotated[float | None, Range(0, 1, low_included=False)] = None
    special_tokens: bool = True
    seed: Annotated[int, SEED] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        resolve_paths_(self, "checkpoint")
        resolve_paths_(self, "adapter", prefix="--")


def main(argv: list[str]) -> int:
    """Generate, here if this process is a rank or the only one, else in ranks that this process starts.

    Args:
        argv: the arguments after ``generate``.

    Returns:
        The exit code.

    Raises:
        ConfigError: a flag out of range, or more ranks than the model can be split over.
        CheckpointError: no checkpoint there, or a damaged one.
    """
    arguments = parse_command(GenerateArguments, argv, "shardwise generate")

    def body() -> None:
        # Late, here and below, because PyTorch takes seconds to import, and `--help` or a wrong flag should not.
        from shardwise.training.ranks import open_ranks

        with open_ranks(arguments.device, timeout=arguments.timeout) as ranks:
            _generate(arguments, ranks)

    return run_in_ranks(
        "generate",
        argv,
        arguments,
        body,
        prepare=lambda world_size: _prepare(arguments, world_size),
    )


@dataclass(frozen=True)
class _Task:
    """A text to continue.

    Attributes:
        opened: the model.
        tokenizer: of the model.
        prompt_ids: what the tokenizer puts in front, and the prompt.
        choice: how tokens are chosen.
    """

    opened: OpenCheckpoint
    tokenizer: Tokenizer
    prompt_ids: list[int]
    choice: GenerationChoice


def _prepare(arguments: GenerateArguments, world_size: int) -> _Task:
    """Open the checkpoint of a model that continues texts, and read the prompt."""
    adapter = None if arguments.adapter is None else Path(arguments.adapter)
    opened = open_model(Path(arguments.checkpoint), adapter)
    opened.check_fits(world_size)
    if opened.config is not None and opened.description.kind != "gpt":
        raise ConfigError(
            f"{opened.folder} holds a {opened.config.architecture.model_type} model, which adds no tokens"
        )
    tokenizer = opened.tokenizer
    if tokenizer is None:
        raise DataError(
            f"{opened.folder} was imported from a folder without a tokenizer.json that says which token ends a text; "
            f"{TO_BRING_A_TOKENIZER}, and import it again"
        )
    prompt_ids = [
        *tokenizer.beginning,
        *tokenizer.encode(arguments.prompt, parse_special=arguments.special_tokens),
    ]
    choice = opened.generation_defaults().choose(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        max_new_tokens=arguments.max_new_tokens,
        num_prompt_tokens=len(prompt_ids),
        vocab_size=opened.description.vocab_size,
        eos_id=tokenizer.eos_id,
    )
    return _Task(opened, tokenizer, prompt_ids, choice)


def _notes(task: _Task, longest: int) -> Iterator[str]:
    """What a user should know, one line each."""
    yield from task.choice.notes
    ids, beginning = task.prompt_ids, list(task.tokenizer.beginning)
    if beginning and ids[len(beginning) : 2 * len(beginning)] == beginning:
        yield (
            f"the prompt begins with {task.tokenizer.decode(beginning)}, which the tokenizer puts in front of "
            "every text: it stands there twice"
        )
    if len(ids) > longest:
        yield f"the prompt has {len(ids)} tokens, of which the model reads the last {longest}"


def _generate(arguments: GenerateArguments, ranks: Ranks) -> None:
    from shardwise.communication.agreement import agree
    from shardwise.inference import TextStream, generate
    from shardwise.models.gpt import GPT

    task = agree(lambda: _prepare(arguments, ranks.world_size), group=ranks.control)
    model = task.opened.load_model(ranks)
    assert isinstance(model, GPT)
    text = TextStream(task.tokenizer, task.prompt_ids)
    if ranks.is_first:
        for note in _notes(task, model.max_sequence_length):
            print_line(f"shardwise generate: {note}")
        _allow_any_character()
        _show(arguments.prompt)
    try:
        # Not limited: the first rank waits with everybody for a terminal that is paused.
        with ranks.phase("generating"):
            generate(
                model,
                task.prompt_ids,
                max_new_tokens=task.choice.max_new_tokens,
                sampling=task.choice.sampling,
                seed=arguments.seed,
                eos_id=task.choice.eos_ids,
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
