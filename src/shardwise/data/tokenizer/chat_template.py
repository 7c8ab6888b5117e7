"""Chat templates: from messages to a model's input text, with the parts that the assistant wrote.

A template is a Jinja program in a model's folder. In addition to Jinja, it may use the extensions of ``transformers``:
``raise_exception``, ``strftime_now``, a ``tojson`` that does not escape HTML, ``break`` and ``continue``, the names of
special tokens, and ``{% generation %}`` around the assistant's text. Templates are untrusted, so they run in Jinja's
sandbox, within limits (``template_limits``).
"""

from __future__ import annotations

import datetime
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from shardwise.core.atomic_files import read_regular
from shardwise.core.errors import DataError
from shardwise.core.json_text import MAX_CONFIG_BYTES, read_json
from shardwise.data.tokenizer.library import CONFIG_NAME, DeclaredTokens
from shardwise.data.tokenizer.template_authors import Authors, Run
from shardwise.data.tokenizer.template_limits import LimitedEnvironment, render
from shardwise.data.tokenizer.template_meter import LimitError

TEMPLATE_NAME = "chat_template.jinja"
TOOLS_TEMPLATE_NAME = "additional_chat_templates/tool_use.jinja"

Message = Mapping[str, Any]
"""A message with a role, a content, and further values that a template may read."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the reasoning of a message."""

Span = tuple[int, int]
"""Start and end of a part of a text, in characters."""


@dataclass(frozen=True)
class Rendered:
    """Rendered messages.

    ``spans`` are the parts of the text that the template marks as written by the assistant, empty without marks, and
    ``runs`` those that it wrote for each message, in order.
    """

    text: str
    spans: tuple[Span, ...]
    runs: tuple[Run, ...] = ()


class TemplateError(DataError):
    """A chat template rejects messages or fails on them."""


class ChatTemplate:
    """The chat template of a model.

    Args:
        source: the Jinja program.
        tokens: names of special tokens by role, such as ``bos_token``.
        where: origin of the program, for messages.
        of_tools: another program for messages with tools, and its origin; compiled when it is first used.
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str] | None = None,
        *,
        where: str = "the chat template",
        of_tools: tuple[str, str] | None = None,
    ) -> None:
        self.source = source
        self._of_tools = of_tools
        self.tokens = dict(tokens or {})
        self._where = where
        # The positions of marked parts are known only when the text is complete. Random marks cannot occur in content
        # by chance.
        token = secrets.token_hex(16)
        self._opening, self._closing = f"\ufdd0{token}\ufdd1", f"\ufdd1{token}\ufdd0"
        try:
            self._template = _environment(lambda text: f"{self._opening}{text}{self._closing}").limited_template(source)
        except LimitError as error:
            raise DataError(f"{where} {error}; {_REMEDY}") from error
        except Exception as error:  # an untrusted template is compiled to Python
            line = getattr(error, "lineno", None)
            place = "" if line is None else f", line {line}"
            raise DataError(f"{where}{place} is no Jinja template: {error!s:.300}; repair it") from error
        self.has_marks = "generation" in _tags_of(source)

    @classmethod
    def load(cls, folder: str | Path) -> ChatTemplate | None:
        """Load the template in a model's folder; None if there is none.

        It is in ``chat_template.jinja``, or else under ``chat_template`` in ``tokenizer_config.json`` or
        ``chat_template.json``: a string, or the one named "default" of several. The one named "tool_use", or
        ``additional_chat_templates/tool_use.jinja``, is for messages with tools.

        Raises:
            DataError: a file cannot be read, or the template is invalid.
        """
        folder = Path(folder)
        tokens = DeclaredTokens(folder).names
        path = folder / TEMPLATE_NAME
        if (source := _text_of(path)) is not None:
            tools = folder / TOOLS_TEMPLATE_NAME
            other = _text_of(tools)
            return cls(source, tokens, where=str(path), of_tools=None if other is None else (other, str(tools)))
        for name in (CONFIG_NAME, "chat_template.json"):
            path = folder / name
            try:
                value = read_json(path).get("chat_template")
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                raise DataError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
            if value is not None:
                default, tools_source = _named_in(value, path)
                where = f"chat_template in {path}"
                return cls(default, tokens, where=where, of_tools=None if not tools_source else (tools_source, where))
        return None

    @property
    def sha256(self) -> str:
        """Hex digest of everything that affects rendering, including today's date if the template uses it."""
        sources = dict.fromkeys((self.source, self.source_for(True)))
        today = datetime.date.today().isoformat() if any("strftime_now" in each for each in sources) else ""
        return hashlib.sha256(json.dumps([*sources, sorted(self.tokens.items()), today]).encode()).hexdigest()

    def source_for(self, has_tools: bool) -> str:
        """Return the program that renders messages with or without tools."""
        return self.source if self._of_tools is None or not has_tools else self._of_tools[0]

    @cached_property
    def _with_tools(self) -> ChatTemplate:
        return self if self._of_tools is None else ChatTemplate(self._of_tools[0], self.tokens, where=self._of_tools[1])

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> Rendered:
        """Render messages, with the tools that the assistant may call, as the model's input text.

        A value of None in a message counts as missing, except that of ``content``. TemplateError if the template
        rejects the messages or fails on them; DataError if it takes too many steps, or its output is too long.
        """
        if tools and self._with_tools is not self:
            render_with = partial(self._with_tools.render, messages, tools=tools)
            return render_with(add_generation_prompt=add_generation_prompt, **variables)
        given = [_as_given(message) for message in messages]
        values = self.tokens | variables | {"messages": given, "tools": tools, "documents": None}
        try:
            authors = Authors(given, (self._opening, self._closing))
            text = render(self._template, values | {"add_generation_prompt": add_generation_prompt}, authors)
        except LimitError as error:
            raise DataError(f"{self._where} {error} for these messages; {_REMEDY}") from error
        except jinja2.TemplateError as error:
            raise TemplateError(f"{self._where} refuses the messages: {error!s:.1000}") from error
        except Exception as error:  # an untrusted program may raise any exception
            raise TemplateError(f"{self._where} fails: {type(error).__name__}: {error!s:.1000}") from error
        unmarked, spans = _without_marks(text, self._opening, self._closing)
        return Rendered(unmarked, spans, authors.runs)


def _as_given(message: Message) -> Message:
    """Return the message that a template sees: without missing values, its reasoning by all usual names."""
    given = {name: value for name, value in message.items() if value is not None or name == "content"}
    # As in transformers, since templates read different names.
    reasoning = next((given[name] for name in REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _without_marks(text: str, opening: str, closing: str) -> tuple[str, tuple[Span, ...]]:
    spans: list[Span] = []
    pieces: list[str] = []
    length = 0
    for number, part in enumerate(text.split(opening)):
        inside, *after = part.split(closing)
        if number > 0 and inside:
            spans.append((length, length + len(inside)))
        pieces += (inside, *after)
        length += len(inside) + sum(map(len, after))
    return "".join(pieces), tuple(spans)


def _text_of(path: Path) -> str | None:
    """Return the content of a file, or None if there is none; raise DataError if it cannot be read."""
    try:
        return read_regular(path, limit=MAX_CONFIG_BYTES).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error


def _named_in(value: object, path: Path) -> tuple[str, str | None]:
    """Return the template itself, or of named templates the default one and that for tools, if any."""
    named: Any = value
    of_tools: object = None
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        named = {each.get("name"): each.get("template") for each in value}
    if isinstance(named, dict):
        named, of_tools = named.get("default"), named.get("tool_use")
    if not isinstance(named, str):
        raise DataError(f"chat_template in {str(path)!r} is neither a template nor a list with one named 'default'")
    return named, of_tools if isinstance(of_tools, str) else None


def _environment(mark: Callable[[str], str]) -> LimitedEnvironment:
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, _MARK: mark}
    return environment


_MARK = "mark_generation"
_LONGEST_FORM = 1000
_REMEDY = "repair it, or use the template that the model was published with"


class _Generation(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}``, whose content passes through ``_MARK``."""

    tags = {"generation"}  # noqa: RUF012 - the class variable of Jinja's own base class is declared so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_through")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _through(self, caller: Callable[[], str]) -> str:
        mark: Any = self.environment.globals[_MARK]
        return str(mark(caller()))


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    allowed = {name: options[name] for name in ("separators", "sort_keys") if name in options}
    return json.dumps(value, ensure_ascii=bool(options.get("ensure_ascii", False)), indent=indent, **allowed)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form[:_LONGEST_FORM])


def _tags_of(source: str) -> set[str]:
    """Return the names of a template's block tags."""
    found: set[str] = set()
    expects = False
    for _, kind, value in jinja2.Environment(extensions=[jinja2.ext.loopcontrols]).lex(source):
        if kind == "block_begin":
            expects = True
        elif expects and kind != "whitespace":
            found.add(value)
            expects = False
    return found
