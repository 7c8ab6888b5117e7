"""A Jinja sandbox in which every template ends, because its steps, values and output are limited.

The work of a template is counted, not timed, so that the limits are the same in any thread on any machine. Each time
that a loop, macro or block is entered, the number of nodes in its body is counted. A Python operation whose result can
be large (a product, a power, a width, a replacement), or that can be slow (a comparison of nested lists), is estimated
before it runs, and refused if the estimate is too large.
"""

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import BuiltinMethodType, FunctionType, GeneratorType
from typing import Any

import jinja2
import jinja2.nodes as nodes
import jinja2.sandbox
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from shardwise.data.tokenizer.template_authors import AUTHORS, FILTERS, Authors, LoopReporter
from shardwise.data.tokenizer.template_meter import SIZED, LimitError, Meter, width_of

MAX_OUTPUT_BYTES = 16 << 20
"""Maximum size of the output of a template, in UTF-8."""

MAX_SOURCE_CHARS = 1 << 20
"""Maximum length of a template."""


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits, which ``render`` applies to a template from ``limited_template``."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_finalized, **options)
        # A generator of random text, which no chat template needs.
        del self.globals["lipsum"]
        self.concat = _concat  # type: ignore[method-assign]

    def limited_template(self, source: str) -> jinja2.Template:
        """Compile ``source``; raise as ``from_string`` does, or LimitError if it is too long."""
        if len(source) > MAX_SOURCE_CHARS:
            raise LimitError(f"has {len(source):,} characters, more than {MAX_SOURCE_CHARS:,}")
        self.filters = {name: _limited_filter(name, each) for name, each in self.filters.items()}
        self.filters |= FILTERS | {
            _STEP: _step,
            # Applied to values before a comparison, to keys of a dictionary, to concatenated values, and after a slice.
            _BOUNDED: _counting(Meter.weigh),
            _JOINED: _counting(_weigh_as_text),
            _CUT: _counting(Meter.made),
        }
        self.tests = self.tests | {name: _limited_test(self.tests[name]) for name in _COMPARING_TESTS}
        tree = LoopReporter().visit(_Limiter().visit(self.parse(source)))
        tree.set_environment(self)
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute ``left operator right`` if the result is not too large."""
        meter = _METER.get()
        meter.check_numbers(left, right)
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, int) and hasattr(other, "__len__"):
                    meter.make(len(other) * max(one, 0) * width_of(other))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            meter.check_bits(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str | bytes):
            meter.make(_formatted(meter, left, (right,), by_percent=True))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            meter.make(len(left) * width_of(left) + len(right) * width_of(right))
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return ``obj[argument]``, which may compare the argument."""
        if isinstance(argument, tuple):
            _METER.get().weigh(argument)
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as the base
        """Call ``__obj(*args, **kwargs)`` if the result is not too large."""
        meter = _METER.get()
        meter.step(_CALL_STEPS)
        if isinstance(__obj, Macro | LoopContext | BlockReference):
            return super().call(__context, __obj, *args, **kwargs)
        plain = getattr(__obj, "__wrapped__", __obj) if isinstance(__obj, FunctionType) else __obj
        if isinstance(plain, BuiltinMethodType):
            if plain.__name__ == "join" and args:
                args = (_listed(args[0]), *args[1:])
            _check_operation(meter, plain.__name__, plain.__self__, args, kwargs)
        else:
            for each in (*args, *kwargs.values()):
                meter.weigh(each)
        found = super().call(__context, __obj, *args, **kwargs)
        meter.made(found)
        return found


def render(template: jinja2.Template, values: Mapping[str, Any], authors: Authors) -> str:
    """Render a template of ``LimitedEnvironment.limited_template``; return the text.

    ``authors`` receives the message that each part of the text belongs to.
    """
    token, authors_token = _METER.set(Meter()), AUTHORS.set(authors)
    try:
        # As ``Template.render``, which does not give the pieces.
        return _concat(authors.watch(template.root_render_func(template.new_context(dict(values)))))
    finally:
        _METER.reset(token)
        AUTHORS.reset(authors_token)


_METER: ContextVar[Meter] = ContextVar("meter")
_CALL_STEPS = 40
_FILTER_STEPS = 20
# Filter names that no template can contain.
_STEP, _BOUNDED, _JOINED, _CUT = "a step", "is compared", "is joined", "is cut"


def _listed(value: Any) -> Any:
    """Convert a generator to a list and count its items; return any other value unchanged."""
    return list(value) if isinstance(value, GeneratorType) else value


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _METER.get().step(1)
        yield item


def _concat(pieces: Iterable[str]) -> str:
    size, kept = 0, []
    for piece in pieces:
        size += len(piece) if piece.isascii() else len(piece.encode(errors="surrogatepass"))
        if size > MAX_OUTPUT_BYTES:
            raise LimitError(f"makes a text of more than {MAX_OUTPUT_BYTES >> 20} MiB")
        kept.append(piece)
    _METER.get().make(size)
    return "".join(kept)


def _weigh_as_text(meter: Meter, value: Any) -> None:
    meter.make(meter.weigh(value))


@pass_context
def _finalized(context: Context, value: Any) -> Any:
    """Count a value before it is written as text."""
    if not isinstance(value, str):
        _weigh_as_text(_METER.get(), value)
    return value


@pass_context
def _step(context: Context, value: Any, count: int) -> Any:
    _METER.get().step(count)
    return value


def _counting(count: Callable[[Meter, Any], object]) -> Callable[..., Any]:
    """Make a filter that counts its value and returns it."""

    @pass_context
    def counting(context: Context, value: Any) -> Any:
        count(_METER.get(), value)
        return value

    return counting


class _Limiter(NodeTransformer):
    """Inserts counting into a template's tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - as Jinja's visitors are called
        weight = self._enter(node)
        if node.test is not None:
            node.test = _filter(node.test, _STEP, nodes.Const(weight))
        return node

    def visit_Block(self, node: nodes.Block) -> nodes.Node:  # noqa: N802
        self._enter(node)
        return node

    visit_Macro = visit_CallBlock = visit_Block  # noqa: N815

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _guarded(node.expr, _BOUNDED)
        for operand in node.ops:
            operand.expr = _guarded(operand.expr, _BOUNDED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_guarded(each, _JOINED) for each in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, _CUT) if isinstance(node.arg, nodes.Slice) else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _guarded(pair.key, _BOUNDED)
        return node

    def _enter(self, node: Any) -> int:
        """Insert a count for each entry of a node's body; return the body's weight."""
        weight = _ENTRY_STEPS[type(node)] + sum(map(_weight, node.body))
        self.generic_visit(node)
        count = nodes.ExprStmt(_filter(nodes.Const(None), _STEP, nodes.Const(weight)), lineno=node.lineno)
        node.body = [count.set_lineno(node.lineno), *node.body]
        return weight


# Measured cost of entering these nodes.
_ENTRY_STEPS = {nodes.For: 8, nodes.Macro: 40, nodes.CallBlock: 40, nodes.Block: 400}
_MADE = (nodes.List, nodes.Tuple, nodes.Dict, nodes.Macro, nodes.CallBlock, nodes.For)


def _weight(node: nodes.Node) -> int:
    """Count the nodes of a part of a template, without bodies that are counted on entry; allocations count more."""
    weight, left = 0, [node]
    while left:
        each = left.pop()
        weight += 8 if isinstance(each, _MADE) else 1
        bodies = each.body if isinstance(each, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block) else ()
        left += [child for child in each.iter_child_nodes() if not any(child is inner for inner in bodies)]
    return weight


def _guarded(node: nodes.Expr, name: str) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filter(node, name)


def _filter(node: Any, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a filter that counts its work, and refuses a result that would be too large."""
    first = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    def limited(context: Context, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        meter = _METER.get()
        meter.step(_FILTER_STEPS)
        if name in _CONSUMING:
            value = _listed(value)
        _check_operation(meter, "%" if name == "format" else name, value, args, kwargs)
        before = {"context": (context,), "eval_context": (context.eval_ctx,), "environment": (context.environment,)}
        found = function(*before.get(first or "", ()), value, *args, **kwargs)
        if isinstance(found, GeneratorType):
            return _counted(found)
        meter.made(found)
        return found

    return limited


def _limited_test(function: Any) -> Callable[..., Any]:
    @pass_context
    def limited(context: Context, *args: Any, **kwargs: Any) -> Any:
        for each in (*args, *kwargs.values()):
            _METER.get().weigh(each)
        return function(*args, **kwargs)

    return limited


_COMPARING_TESTS = (
    *("==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le"),
    *("in", "divisibleby", "even", "odd", "lower", "upper"),
)
# Filters that read a whole generator.
_CONSUMING = frozenset(("batch", "groupby", "join", "max", "min", "slice", "sort", "sum", "unique"))


def _check_operation(meter: Meter, name: str, value: Any, args: Any, kwargs: Any) -> None:
    """Count the input of a filter or a method, and refuse it if its result would be too large."""
    given = (*args, *kwargs.values())
    if _SHALLOW.fullmatch(name):
        meter.step(1 + (len(value) >> 3 if isinstance(value, SIZED) else 0))
        for each in given:
            meter.weigh(each)
        return
    size, others = meter.weigh(value), sum(map(meter.weigh, given))
    numbers = sum(abs(each) for each in given if isinstance(each, int))
    if isinstance(value, int | float):
        meter.check_bits(numbers)
    # As if each part of the value were compared with the arguments, or with each other part.
    adds_lists = name == "sum" and any(isinstance(each, list | tuple) for each in given)
    is_quadratic = adds_lists or _QUADRATIC.fullmatch(name)
    meter.step(size * (size if is_quadratic else 1 + others) >> 6)
    meter.make(_bound(meter, name, value, size, given, others, numbers))


def _bound(meter: Meter, name: str, value: Any, size: int, given: tuple[Any, ...], others: int, numbers: int) -> int:
    """Return the maximum number of characters in the result of an operation."""
    texts = isinstance(value, str) and all(isinstance(each, str) for each in given[:2])
    if name == "replace" and texts and len(given) >= 2:
        return int(size + value.count(given[0]) * len(given[1]))
    if name == "join" and isinstance(value, list | tuple) and given and isinstance(given[0], str):
        return size + len(value) * len(given[0])
    if name == "join" and isinstance(value, str) and isinstance(given[0] if given else None, list | tuple):
        return others + len(given[0]) * size
    if name == "indent" and isinstance(value, str):
        return size + (value.count("\n") + 1) * (4 + numbers + others)
    if name in ("%", "format", "format_map"):
        return _formatted(meter, value, given, by_percent=name == "%")
    return size * (1 + others + numbers) if _MULTIPLYING.fullmatch(name) else size + others + numbers


_NUMBER = r"\d+"
_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?")


def _formatted(meter: Meter, value: Any, given: Any, *, by_percent: bool) -> int:
    """Return the maximum number of characters of a text formatted by ``%`` or by ``format``."""
    form = str(value)
    try:
        specs = [] if by_percent else [spec or "" for _, _, spec, _ in string.Formatter().parse(form)]
    except ValueError:
        specs = []
    # Each search for the end of a key succeeds up to the last ")", and is not tried after it: so the time is linear.
    head, sign, tail = form.rpartition(")")
    parts = (head + sign, tail.replace("(", " ")) if by_percent else ()
    widths = [width for part in parts for found in _PERCENT.findall(part) for width in found]
    if "*" in widths or any("{" in spec for spec in specs):
        raise LimitError("formats values to a width that is itself a value")
    digits: list[str] = [number for each in (*widths, *specs) for number in re.findall(_NUMBER, each)]
    if any(len(number) > 8 for number in digits):
        raise LimitError("formats values to a width of more than 8 digits")
    places: int = 1 + form.count("%") + form.count("{")
    weights: list[int] = [meter.weigh(each) for each in given]
    return len(form) + sum(map(int, digits)) + places * (350 + sum(weights))


# Operations that do not read the contents of the value's items.
_SHALLOW = re.compile(
    "attr|copy|d|default|first|get|items|keys|last|length|list|map|random|reject|rejectattr|reverse|select|selectattr|"
    "values"
)
# Operations that may read the value again for each of its parts.
_QUADRATIC = re.compile("decode|encode|pprint|striptags|urlize|wordwrap|xmlattr")
# Operations whose result may have the arguments, or as many blanks, for each part of the value.
_MULTIPLYING = re.compile(f"{_QUADRATIC.pattern}|expandtabs|indent|join|replace|tojson|translate")
