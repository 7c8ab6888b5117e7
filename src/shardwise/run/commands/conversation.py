"""Talk with a model by its own chat template."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Annotated, Any, Literal

from shardwise.core.communication.agreement import agree, gather_objects
from shardwise.core.errors import DataError
from shardwise.data import ExampleEncoder, UnusableExampleError
from shardwise.data.tokenizer import TextStream
from shardwise.models.generation import PrefixCache, generate, on_layers
from shardwise.models.gpt import GPT
from shardwise.run.commands.opened_model import OpenCheckpoint
from shardwise.run.commands.text_generation import ChoiceWishes, ShownText, open_causal
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
        conversation = _Conversation(task, model, ranks, system=system, seed=seed, show=show, note=note)
        left = iter(turns)
        while (said := _next_turn(ranks, left)) is not None:
            conversation.take(said)
        return conversation.messages


class _Conversation:
    """Turns so far, and the model that answers.

    Args:
        task: how messages become tokens.
        model: that answers, on this rank.
        ranks: who this process is.
        system: what the model is told before.
        seed: of the choices.
        show: given each piece of an answer.
        note: given each line that a user should read.
    """

    def __init__(
        self,
        task: OpenChat,
        model: GPT,
        ranks: Ranks,
        *,
        system: str,
        seed: int,
        show: Callable[[str], object],
        note: Callable[[str], object],
    ) -> None:
        self._task, self._model, self._ranks, self._system, self._seed = task, model, ranks, system, seed
        self._show, self._tell = show, note
        self._notes: set[str] = set()
        self._num_turns = 0
        # Each turn's prompt begins with the turns before it, which are not read again.
        self._prefix = PrefixCache(model)
        self._reset()

    def _reset(self) -> None:
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": self._system}] if self._system else []

    def take(self, said: str) -> None:
        """Answer a turn, or do what it commands; every rank calls."""
        if said == RESET:
            self._reset()
        elif said:
            self._answer([*self.messages, {"role": "user", "content": said}])

    def _answer(self, messages: list[dict[str, Any]]) -> None:
        task, ranks, window = self._task, self._ranks, self._model.max_sequence_length
        tokenizer = task.encoder.tokenizer
        try:
            prompt_ids = agree(lambda: task.encoder.prompt_ids(tuple(messages)), group=ranks.control)
        except UnusableExampleError as error:
            self._note(str(error))
            return
        choice = agree(lambda: task.wishes.choose(task.opened, tokenizer, len(prompt_ids)), group=ranks.control)
        for note in choice.notes:
            self._note(note)
        if len(prompt_ids) > window:
            self._note(
                f"the conversation has more than {window} tokens, the last of which the model reads; {RESET} begins "
                "a new one"
            )
        text = ShownText(TextStream(tokenizer, prompt_ids), self._show)
        try:
            # Not limited: the first rank waits with everybody for a terminal that is paused.
            with ranks.phase("generating"):
                new_ids = generate(
                    self._model,
                    prompt_ids,
                    max_new_tokens=choice.max_new_tokens,
                    sampling=choice.sampling,
                    # Another one for each turn, so that the same question may be answered otherwise.
                    seed=(self._seed + self._num_turns) % 2**63,
                    eos_id=tuple(dict.fromkeys((*choice.eos_ids, *task.turn_ends))),
                    on_token=text.push,
                    prefix=self._prefix,
                )
        finally:
            text.finish()
        self._num_turns += 1
        self.messages = [*messages, {"role": "assistant", "content": tokenizer.decode(new_ids)}]

    def _note(self, note: str) -> None:
        """Say something once."""
        if note not in self._notes:
            self._tell(note)
        self._notes.add(note)


def _next_turn(ranks: Ranks, left: Iterator[str]) -> str | None:
    """The next of the first rank's turns, on every rank; None at the end."""
    with ranks.phase("waiting for what the user says"):
        turn = agree(lambda: next(left, None) if ranks.is_first else None, group=ranks.control)
        said: str | None = gather_objects(turn, "what the user says", group=ranks.control)[0]
    return said
