"""Talk with a model by its own chat template."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Annotated, Any, Literal

from shardwise.core.communication.agreement import agree, gather_objects
from shardwise.core.errors import DataError
from shardwise.data import ExampleEncoder, UnusableExampleError
from shardwise.models.generation import PrefixCache, on_layers
from shardwise.models.gpt import GPT
from shardwise.run.commands.opened_model import OpenCheckpoint
from shardwise.run.commands.text_generation import ChoiceWishes, open_causal, write
from shardwise.run.processes.ranks import Ranks, open_ranks
from shardwise.training.bounds import DEFAULT_TIMEOUT, SEED, STEPS, TEMPERATURE, TIMEOUT, TOP_P, checks_arguments

RESET = "/reset"
"""The turn that begins a new conversation."""


@dataclass(frozen=True)
class OpenChat:
    """A model to talk with.

    Attributes:
        opened: the model.
        encoder: turns messages into tokens.
        turn_ends: tokens that end a turn, beside those that end a text.
        wishes: how tokens are to be chosen.
    """

    opened: OpenCheckpoint
    encoder: ExampleEncoder
    turn_ends: tuple[int, ...]
    wishes: ChoiceWishes


def open_chat(
    checkpoint: str | PathLike[str], adapter: str | PathLike[str] | None, wishes: ChoiceWishes, world_size: int
) -> OpenChat:
    """Open a model, its tokenizer and its chat template.

    Raises:
        ConfigError: more ranks than the model can be split over, or a model that adds no tokens.
        CheckpointError: no model there, or a damaged one.
        DataError: no tokenizer or chat template, or a damaged one.
    """
    opened, tokenizer = open_causal(checkpoint, adapter, world_size)
    template = opened.chat_template()
    if template is None:
        raise DataError(
            f"{opened.folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
            "put the model's there, or continue a text with shardwise generate"
        )
    encoder = ExampleEncoder(tokenizer, template)
    wishes.choose(opened, tokenizer, 0)
    return OpenChat(opened, encoder, encoder.turn_end_ids(), wishes)


@checks_arguments
def chat(
    checkpoint: str | PathLike[str],
    turns: Iterable[str],
    *,
    system: str = "",
    adapter: str | PathLike[str] | None = None,
    max_new_tokens: Annotated[int | None, STEPS] = None,
    temperature: Annotated[float | None, TEMPERATURE] = None,
    top_k: Annotated[int | None, STEPS] = None,
    top_p: Annotated[float | None, TOP_P] = None,
    seed: Annotated[int, SEED] = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    layers: Literal["auto", "training", "inference", "fused"] = "auto",
    timeout: Annotated[float, TIMEOUT] = DEFAULT_TIMEOUT,
    on_text: Callable[[str], object] | None = None,
    on_note: Callable[[str], object] | None = None,
) -> list[dict[str, Any]]:
    """Answer turn after turn, each with all turns before it; every rank calls.

    Args:
        checkpoint: see ``generate``; a model with a chat template.
        turns: what the user says; "/reset" begins a new conversation, and an empty turn is passed over. Only the first
            rank's are read, each once the one before has its answer.
        system: what the model is told before the conversation.
        adapter: here and below, see ``generate``.
        on_text: given, on the first rank, each piece of an answer as it comes, and a line's end after each answer.
        on_note: given, on the first rank, each line that a user should read, once.

    Returns:
        The messages of the last conversation, on every rank: ``{"role": ..., "content": ...}``.

    Raises:
        ConfigError: see ``generate``.
        CheckpointError: likewise.
        DataError: likewise; or the model has no chat template.
    """
    wishes = ChoiceWishes(max_new_tokens, temperature, top_k, top_p)
    with open_ranks(device, timeout=timeout) as ranks:
        show, note = ranks.on_first(on_text), ranks.on_first(on_note)
        task = agree(lambda: open_chat(checkpoint, adapter, wishes, ranks.world_size), group=ranks.control)
        model = task.opened.load_model(ranks)
        assert isinstance(model, GPT)
        model, kind = on_layers(model, layers)
        note(f"layers: {kind}")
        notes, num_answers, prefix, left = set[str](), 0, PrefixCache(model), iter(turns)
        beginning = [{"role": "system", "content": system}] if system else []
        messages: list[dict[str, Any]] = beginning

        def note_once(line: str) -> None:
            if line not in notes:
                note(line)
            notes.add(line)

        while (said := _next_turn(ranks, left)) is not None:
            if said == RESET:
                messages = beginning
            elif said:
                asked = [*messages, {"role": "user", "content": said}]
                # Another seed for each turn, so that the same question may be answered otherwise.
                answer = _answer(ranks, model, task, asked, prefix, (seed + num_answers) % 2**63, show, note_once)
                if answer is not None:
                    messages, num_answers = [*asked, {"role": "assistant", "content": answer}], num_answers + 1
        return messages


def _answer(
    ranks: Ranks,
    model: GPT,
    task: OpenChat,
    messages: list[dict[str, Any]],
    prefix: PrefixCache,
    seed: int,
    show: Callable[[str], object],
    note: Callable[[str], object],
) -> str | None:
    """The answer to the last of the messages, None if they cannot be read; every rank calls."""
    tokenizer, window = task.encoder.tokenizer, model.max_sequence_length
    try:
        prompt_ids = agree(lambda: task.encoder.prompt_ids(tuple(messages)), group=ranks.control)
    except UnusableExampleError as error:
        note(str(error))
        return None
    choice = agree(lambda: task.wishes.choose(task.opened, tokenizer, len(prompt_ids)), group=ranks.control)
    for line in choice.notes:
        note(line)
    if len(prompt_ids) > window:
        note(
            f"the conversation has more than {window} tokens, the last of which the model reads; {RESET} begins a new "
            "one"
        )
    eos_ids = tuple(dict.fromkeys((*choice.eos_ids, *task.turn_ends)))
    # Each turn's prompt begins with the turns before it, which are not read again.
    new_ids, _ = write(
        ranks, model, tokenizer, prompt_ids, choice, seed=seed, eos_ids=eos_ids, show=show, prefix=prefix
    )
    return tokenizer.decode(new_ids)


def _next_turn(ranks: Ranks, left: Iterator[str]) -> str | None:
    """The next of the first rank's turns, on every rank; None at the end."""
    with ranks.phase("waiting for what the user says"):
        turn = agree(lambda: next(left, None) if ranks.is_first else None, group=ranks.control)
        said: str | None = gather_objects(turn, "what the user says", group=ranks.control)[0]
    return said
