"""Continue a text: what the ranks of ``shardwise generate`` do."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwise.cli.checkpoint_model import TO_BRING_A_TOKENIZER, OpenCheckpoint, check_fits, open_model
from shardwise.cli.generate import GenerateArguments, GeneratingArguments
from shardwise.cli.reporting import print_line
from shardwise.cli.streams import allow_any_character
from shardwise.core.communication.agreement import agree
from shardwise.core.errors import ConfigError, DataError
from shardwise.data.tokenizer import TextStream, Tokenizer
from shardwise.models.generation import generate, on_layers
from shardwise.models.gpt import GPT
from shardwise.run.processes.ranks import open_ranks
from shardwise.storage.huggingface.generation_config import GenerationChoice


@dataclass(frozen=True)
class Task:
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


def prepare(arguments: GenerateArguments, world_size: int) -> Task:
    """Open the checkpoint of a model that continues texts, and read the prompt.

    Raises:
        ConfigError: more ranks than the model can be split over, or a model that adds no tokens.
        CheckpointError: no checkpoint there, or a damaged one.
        DataError: no tokenizer, or a damaged one.
    """
    opened, tokenizer = open_causal(arguments.checkpoint, arguments.adapter, world_size)
    encoded = tokenizer.encode(arguments.prompt, parse_special=arguments.special_tokens)
    prompt_ids = [*tokenizer.beginning, *encoded]
    return Task(opened, tokenizer, prompt_ids, choose(opened, tokenizer, arguments, len(prompt_ids)))


def open_causal(checkpoint: str, adapter: str | None, world_size: int) -> tuple[OpenCheckpoint, Tokenizer]:
    """A model that continues texts, without its tensors, and its tokenizer. Raises as ``prepare``."""
    opened = open_model(Path(checkpoint), None if adapter is None else Path(adapter))
    check_fits(opened.description, world_size)
    if (head := opened.description.classification) is not None:
        raise ConfigError(
            f"{opened.folder} holds a model for {head.task}, which adds no tokens; use shardwise classify"
        )
    if opened.config is not None and opened.description.kind != "gpt":
        kind = opened.config.architecture.model_type
        raise ConfigError(f"{opened.folder} holds a {kind} model, which adds no tokens")
    if opened.tokenizer is None:
        raise DataError(
            f"{opened.folder} was imported from a folder without a tokenizer.json that says which token ends a text; "
            f"{TO_BRING_A_TOKENIZER}, and import it again"
        )
    return opened, opened.tokenizer


def choose(
    opened: OpenCheckpoint, tokenizer: Tokenizer, arguments: GeneratingArguments, num_prompt_tokens: int
) -> GenerationChoice:
    """How tokens are chosen after a prompt. Raises ConfigError: a value out of range."""
    return opened.generation_defaults().choose(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        max_new_tokens=arguments.max_new_tokens,
        num_prompt_tokens=num_prompt_tokens,
        vocab_size=opened.description.vocab_size,
        eos_id=tokenizer.eos_id,
    )


def _notes(task: Task, longest: int) -> Iterator[str]:
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


def generate_text(arguments: GenerateArguments) -> None:
    """Print the prompt, and what the model continues it with, as it comes.

    Raises:
        ShardwiseError: see ``prepare``; on every rank.
    """
    with open_ranks(arguments.device, timeout=arguments.timeout) as ranks:
        task = agree(lambda: prepare(arguments, ranks.world_size), group=ranks.control)
        model = task.opened.load_model(ranks)
        assert isinstance(model, GPT)
        model, layers = on_layers(model, arguments.layers)
        text = TextStream(task.tokenizer, task.prompt_ids)
        if ranks.is_first:
            for note in (*_notes(task, model.max_sequence_length), f"layers: {layers}"):
                print_line(f"shardwise generate: {note}")
            allow_any_character()
            show(arguments.prompt)
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
                    on_token=(lambda token: show(text.push(token))) if ranks.is_first else None,
                )
        finally:
            # After Ctrl-C too, so that the shell's prompt begins a line of its own.
            if ranks.is_first:
                show(text.finish() + "\n")


def show(piece: str) -> None:
    """Print a piece of a text, at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()
