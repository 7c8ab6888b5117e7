"""Talk with a model: what the ranks of ``shardwise chat`` do."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.cli.chat import ChatArguments
from shardwise.cli.checkpoint_model import OpenCheckpoint
from shardwise.cli.generating import choose, open_causal, show
from shardwise.cli.reporting import print_line
from shardwise.cli.streams import allow_any_character
from shardwise.core.communication.agreement import agree, gather_objects
from shardwise.core.errors import DataError
from shardwise.data import ExampleEncoder, UnusableExampleError
from shardwise.data.tokenizer import TextStream
from shardwise.models.generation import PrefixCache, generate, on_layers
from shardwise.models.gpt import GPT
from shardwise.run.processes.ranks import Ranks, open_ranks

_RESET, _EXIT = "/reset", "/exit"


@dataclass(frozen=True)
class Task:
    """A model to talk with.

    Attributes:
        opened: the model.
        encoder: turns messages into tokens.
        turn_ends: tokens that end a turn, beside those that end a text.
    """

    opened: OpenCheckpoint
    encoder: ExampleEncoder
    turn_ends: tuple[int, ...]


def prepare(arguments: ChatArguments, world_size: int) -> Task:
    """Open a model, its tokenizer and its chat template.

    Raises:
        ConfigError: more ranks than the model can be split over, or a model that adds no tokens.
        CheckpointError: no model there, or a damaged one.
        DataError: no tokenizer or chat template, or a damaged one.
    """
    opened, tokenizer = open_causal(arguments.checkpoint, arguments.adapter, world_size)
    template = opened.chat_template()
    if template is None:
        raise DataError(
            f"{opened.folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
            "put the model's there, or continue a text with shardwise generate"
        )
    encoder = ExampleEncoder(tokenizer, template)
    choose(opened, tokenizer, arguments, 0)
    return Task(opened, encoder, encoder.turn_end_ids())


def chat(arguments: ChatArguments) -> None:
    """Answer each line of standard input, as the answer comes.

    Raises:
        ShardwiseError: see ``prepare``; on every rank.
    """
    with open_ranks(arguments.device, timeout=arguments.timeout) as ranks:
        task = agree(lambda: prepare(arguments, ranks.world_size), group=ranks.control)
        model = task.opened.load_model(ranks)
        assert isinstance(model, GPT)
        model, layers = on_layers(model, arguments.layers)
        if ranks.is_first:
            print_line(f"shardwise chat: layers: {layers}")
            allow_any_character()
        conversation = _Conversation(arguments, task, model, ranks)
        while (said := _next_turn(ranks)) is not None:
            conversation.take(said)


class _Conversation:
    """Turns so far, and the model that answers.

    Args:
        arguments: of the command.
        task: how messages become tokens.
        model: that answers, on this rank.
        ranks: who this process is.
    """

    def __init__(self, arguments: ChatArguments, task: Task, model: GPT, ranks: Ranks) -> None:
        self._arguments, self._task, self._model, self._ranks = arguments, task, model, ranks
        self._notes: set[str] = set()
        self._num_turns = 0
        # Each turn's prompt begins with the turns before it, which are not read again.
        self._prefix = PrefixCache(model)
        self._reset()

    def _reset(self) -> None:
        system = self._arguments.system
        self._messages: list[Mapping[str, Any]] = [{"role": "system", "content": system}] if system else []

    def take(self, said: str) -> None:
        """Answer a line, or do what it commands; every rank calls."""
        if said == _RESET:
            self._reset()
        elif said:
            self._answer([*self._messages, {"role": "user", "content": said}])

    def _answer(self, messages: list[Mapping[str, Any]]) -> None:
        task, arguments, ranks, window = self._task, self._arguments, self._ranks, self._model.max_sequence_length
        tokenizer = task.encoder.tokenizer
        try:
            prompt_ids = agree(lambda: task.encoder.prompt_ids(tuple(messages)), group=ranks.control)
        except UnusableExampleError as error:
            self._note(str(error))
            return
        choice = agree(lambda: choose(task.opened, tokenizer, arguments, len(prompt_ids)), group=ranks.control)
        for note in choice.notes:
            self._note(note)
        if len(prompt_ids) > window:
            self._note(
                f"the conversation has more than {window} tokens, the last of which the model reads; {_RESET} begins "
                "a new one"
            )
        text = TextStream(tokenizer, prompt_ids)
        try:
            # Not limited: the first rank waits with everybody for a terminal that is paused.
            with ranks.phase("generating"):
                new_ids = generate(
                    self._model,
                    prompt_ids,
                    max_new_tokens=choice.max_new_tokens,
                    sampling=choice.sampling,
                    # Another one for each turn, so that the same question may be answered otherwise.
                    seed=(arguments.seed + self._num_turns) % 2**63,
                    eos_id=tuple(dict.fromkeys((*choice.eos_ids, *task.turn_ends))),
                    on_token=(lambda token: show(text.push(token))) if ranks.is_first else None,
                    prefix=self._prefix,
                )
        finally:
            if ranks.is_first:
                show(text.finish() + "\n")
        self._num_turns += 1
        self._messages = [*messages, {"role": "assistant", "content": tokenizer.decode(new_ids)}]

    def _note(self, note: str) -> None:
        """Say something once."""
        if note not in self._notes and self._ranks.is_first:
            print_line(f"shardwise chat: {note}")
        self._notes.add(note)


def _next_turn(ranks: Ranks) -> str | None:
    """The next line of the first rank's standard input, on every rank; None at the end."""
    with ranks.phase("waiting for what the user says"):
        line = agree(lambda: _read_line() if ranks.is_first else None, group=ranks.control)
        said: str | None = gather_objects(line, "what the user says", group=ranks.control)[0]
    return said


def _read_line() -> str | None:
    try:
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - by being imported it lets the user edit the line
            line = input("> ")
        elif not (line := sys.stdin.readline()):
            return None
        line.encode()
    except EOFError:
        return None
    except UnicodeError as error:
        raise DataError(f"a line of standard input is no text: {error}; write it in UTF-8") from error
    return None if line.strip() == _EXIT else line.strip()
