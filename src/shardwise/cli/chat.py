"""``shardwise chat``: talk with a model, split over any number of ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from shardwise.cli.generate import GeneratingArguments


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
        from shardwise.cli.chatting import prepare

        prepare(self, world_size)

    def work(self) -> Callable[[], object]:
        """Talk."""
        from shardwise.cli.chatting import chat

        return partial(chat, self)
