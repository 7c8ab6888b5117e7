"""Thirteen kinds of chats, and the chat templates of published models that the library trl ships."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

from shardwise.data import Example, ExampleEncoder, example_of
from shardwise.data.json_records import Record
from shardwise.data.tokenizer import ChatTemplate, Tokenizer


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **more: object) -> dict:
    return {"role": "assistant", "content": text} | more


def _calling(arguments: object, **content: object) -> dict:
    call = {"id": "seek00001", "type": "function", "function": {"name": "find_book", "arguments": arguments}}
    asked = {"role": "assistant", "tool_calls": [call]} | content
    found = {"role": "tool", "name": "find_book", "tool_call_id": "seek00001", "content": "shelf 7"}
    parameters = {
        "type": "object",
        "properties": {
            "title": {"type": "string", "description": "as on the cover"},
            "year": {"type": "string", "enum": ["1851", "1852"]},
        },
        "required": ["title"],
    }
    function = {"name": "find_book", "description": "Finds the shelf of a book", "parameters": parameters}
    messages = [user("Where is Moby-Dick?"), asked, found, assistant("On shelf seven.")]
    return {"messages": messages, "tools": [{"type": "function", "function": function}]}


CHATS = {
    "plain": {"messages": [user("Who wrote Emma?"), assistant("Jane Austen.")]},
    "two turns": {
        "messages": [
            *({"role": "system", "content": "Answer in a word."}, user("Good day"), assistant("Greetings.")),
            *(user("More?"), assistant("  Certainly!\n")),
        ]
    },
    "reasoning": {
        "messages": [
            *(user("5+1?"), assistant("Six!", reasoning_content="count up by one")),
            *(user("5+2?"), assistant("Seven!", reasoning_content="count up by two")),
        ]
    },
    "think": {
        "messages": [
            *(user("5+1?"), assistant("<think>\nby one\n</think>\n\nSix!")),
            *(user("5+2?"), assistant("<think>\nby two\n</think>\n\nSeven!")),
        ]
    },
    "same": {"messages": [user("x"), assistant("no"), user("y"), assistant("no"), user("no"), assistant("no")]},
    "call": _calling({"title": "Moby-Dick"}, content=""),
    "call as text": _calling('{"title": "Moby-Dick"}', content=""),
    "call alone": _calling({"title": "Moby-Dick"}),
    "call and null": _calling({"title": "Moby-Dick"}, content=None),
    "two questions": {"messages": [user("first"), user("second"), assistant("third")]},
    "question last": {"messages": [user("first"), assistant("second"), user("third")]},
    "answer first": {"messages": [assistant("Hello, reader."), user("hello"), assistant("Go on.")]},
    "no thinking": {
        "messages": [user("hello"), assistant("Go on.")],
        "chat_template_kwargs": {"enable_thinking": False},
    },
}

# transformers gives the same tokens to a template.
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}

_NAMES = re.compile(
    r"<[|\uff5c][^'\"|\uff5c<>\s]{1,60}[|\uff5c]>|</?[a-z_]{1,40}\|?>|<\|[a-z_]+>|<[A-Z_]{2,40}>|\[/?[A-Z_a-z]{2,40}\]"
)


@cache
def published() -> dict[str, str]:
    """Return the chat templates by name."""
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    files = sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja"))
    return {path.stem: path.read_text() for path in files}


@cache
def tokenizer() -> Tokenizer:
    """Return a tokenizer with the special tokens of all templates."""
    names = {name for source in published().values() for name in _NAMES.findall(source)}
    special = ("</s>", *sorted({*names, "<s>"} - {"</s>"}))
    return Tokenizer.train(["Who wrote Emma?"], 256 + len(special), special)


def encoder_of(source: str, **options: bool) -> ExampleEncoder:
    return ExampleEncoder(tokenizer(), ChatTemplate(source, TOKENS, where="the template"), **options)


def chat(kind: str) -> Example:
    return example_of(Record(kind, CHATS[kind]), "text")


def learned_parts(encoder: ExampleEncoder, example: Example) -> list[str]:
    """Return each run of learned tokens as text."""
    encoded, parts, last = encoder.encode(example), [], False
    for token, learned in zip(encoded.ids.tolist(), encoded.learned.tolist(), strict=True):
        if learned:
            parts = [*parts[:-1], [*parts[-1], token]] if last else [*parts, [token]]
        last = learned
    return [encoder.tokenizer.decode(part) for part in parts]
