"""``shardwise chat``: talk with a model, split over any number of ranks."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from shardwise.cli.generate import GeneratingArguments
from shardwise.cli.reporting import print_note
from shardwise.core.errors import DataError

_EXIT = "/exit"


@dataclass(frozen=True)
class ChatArguments(GeneratingArguments):
    """Talk with a model of shardwise finetune, or in a Hugging Face folder, by its own chat template.

    Each line of standard input is a turn, and all turns before are read with it. /reset begins a new conversation,
    /exit or the end of the input ends it.

    Attributes:
        system: what the model is told before the conversation.
    """

    system: str = ""

    def prepare(self, world_size: int) -> None:
        """Open the model, its tokenizer and its template."""
        from shardwise.run.commands.conversation import open_chat

        open_chat(self.checkpoint, self.adapter, self.wishes(), world_size)

    def work(self) -> Callable[[], object]:
        """Talk."""
        from shardwise.cli import streams
        from shardwise.run import chat

        streams.allow_any_character()
        note = partial(print_note, "shardwise chat")
        return partial(chat, **self.keywords(), turns=_turns(), on_text=streams.show, on_note=note)


def _turns() -> Iterator[str]:
    """The lines of standard input, up to the one that ends the conversation."""
    while (line := _read_line()) is not None and (turn := line.strip()) != _EXIT:
        yield turn


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
    return line
