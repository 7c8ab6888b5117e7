"""Which message a template is writing: the loops of a template tell it while they run.

Nearly every chat template loops over the messages and writes one after the other. The loops of a compiled template are
extended so that each reports its current item. A piece of the output belongs to the message of the innermost loop that
has one. Text from before, between and after the loops belongs to no message.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jinja2.nodes as nodes
from jinja2.runtime import Context
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

Run = tuple[int | None, int, int]
"""Number of a message, or None, with start and end of the text that a template wrote for it, in characters."""


class Authors:
    """Records, for one rendering, the message that each piece of the output belongs to; ``marks`` in it do not count.

    Messages are recognised by identity.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], marks: Sequence[str] = ()) -> None:
        self._marks = marks
        self._numbers = {id(message): number for number, message in enumerate(messages)}
        self._loops: list[int | None] = []
        self._runs: list[Run] = []

    def watch(self, pieces: Iterable[str]) -> Iterator[str]:
        """Yield the pieces of the output, and record the message of each."""
        for piece in pieces:
            author = next((number for number in reversed(self._loops) if number is not None), None)
            length = len(piece) - sum(len(mark) * piece.count(mark) for mark in self._marks)
            last, begin, end = self._runs[-1] if self._runs else (author, 0, 0)
            if self._runs and last == author:
                self._runs[-1] = (author, begin, end + length)
            elif length:
                self._runs.append((author, end, end + length))
            yield piece

    @property
    def runs(self) -> tuple[Run, ...]:
        """The parts of the output in order; neighbours belong to different messages."""
        return tuple(self._runs)

    def enter(self, _: Any) -> None:
        """Note the start of a loop."""
        self._loops.append(None)

    def leave(self, _: Any) -> None:
        """Note the end of a loop."""
        self._loops.pop()

    def item(self, value: Any) -> None:
        """Note the next item of the innermost loop."""
        self._loops[-1] = self._numbers.get(id(value))

    def name(self, value: Any) -> None:
        """Note a name that is set in a loop, as in ``{% for i in range(9) %}{% set message = messages[i] %}``."""
        if self._loops and self._loops[-1] is None:
            self._loops[-1] = self._numbers.get(id(value))


AUTHORS: ContextVar[Authors] = ContextVar("authors")
"""The record of the rendering in progress."""


def _reporting(method: str) -> Any:
    @pass_context
    def report(context: Context, value: Any) -> None:
        getattr(AUTHORS.get(), method)(value)

    return report


# No template can contain a filter of such a name.
FILTERS = {f"author: {method}": _reporting(method) for method in ("enter", "leave", "item", "name")}


class LoopReporter(NodeTransformer):
    """Inserts the reports of loops into a template's tree."""

    def __init__(self) -> None:
        self._depth = 0

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:  # noqa: N802 - as Jinja's visitors are called
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        target = node.target
        item = nodes.Name(target.name, "load") if isinstance(target, nodes.Name) else nodes.Const(None)
        node.body = [_report("item", item, node.lineno), *node.body]
        nothing = nodes.Const(None)
        return [_report("enter", nothing, node.lineno), node, _report("leave", nothing, node.lineno)]

    def visit_Assign(self, node: nodes.Assign) -> list[nodes.Node]:  # noqa: N802
        if not self._depth or not isinstance(node.target, nodes.Name):
            return [node]
        return [node, _report("name", nodes.Name(node.target.name, "load"), node.lineno)]


def _report(method: str, value: nodes.Expr, line: int) -> nodes.Node:
    found = nodes.ExprStmt(nodes.Filter(value, f"author: {method}", [], [], None, None, lineno=line), lineno=line)
    return found.set_lineno(line)
