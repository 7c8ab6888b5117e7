"""The work of one rendering of a chat template so far, and the sizes of its values."""

import itertools
from collections.abc import Iterator
from typing import Any

from jinja2.utils import Cycler, Namespace

MAX_STEPS = 20_000_000
"""Nodes of a template, items of a sequence and portions of 64 characters that one rendering may go through."""

_MAX_VALUE = 1 << 24
_MAX_VALUES = 1 << 27
_MAX_BITS = 4096
_MAX_DEPTH = 200
_VALUE_SIZE = 64
_ITEM_SIZE = 8


class LimitError(Exception):
    """A template goes beyond a limit."""


class Meter:
    """The work of one rendering so far.

    Attributes:
        steps: nodes, items and portions of text gone through.
        num_made: characters of all values made, those of a list counting eight for each item.
    """

    __slots__ = ("num_made", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self.num_made = 0

    def step(self, count: int) -> None:
        """Count steps."""
        self.steps += count
        if self.steps > MAX_STEPS:
            raise LimitError(f"takes more than {MAX_STEPS:,} steps")

    def make(self, size: int) -> None:
        """Count a value of ``size`` characters that is about to be made."""
        if size > _MAX_VALUE:
            raise LimitError(f"makes a value of more than {_MAX_VALUE:,} characters")
        self.num_made += size + _VALUE_SIZE
        self.step(size >> 6)
        if self.num_made > _MAX_VALUES:
            raise LimitError(f"makes values of more than {_MAX_VALUES:,} characters")

    def made(self, value: Any) -> None:
        """Count a value that was made, without what is in it."""
        self.make(len(value) * width_of(value) if isinstance(value, SIZED) else 0)

    def check_bits(self, bits: int) -> None:
        """Refuse a number of so many bits."""
        if bits > _MAX_BITS:
            raise LimitError(f"makes a number of more than {_MAX_BITS} bits")

    def check_numbers(self, *values: Any) -> None:
        """Refuse numbers that are too large to calculate with."""
        for each in values:
            if isinstance(each, int):
                self.check_bits(each.bit_length())

    def weigh(self, value: Any) -> int:
        """About how many characters a value has as text, what occurs twice in it counting twice."""
        if not _is_container(value):
            return self._weigh_one(value)
        size = num_items = 0
        within = [iter((value,))]
        while within:
            for each in within[-1]:
                if _is_container(each):
                    self.step(1)
                    size += _ITEM_SIZE
                    if len(within) > _MAX_DEPTH:
                        raise LimitError(f"nests values more than {_MAX_DEPTH} deep")
                    within.append(_items_of(each))
                    break
                num_items += 1
                size += _ITEM_SIZE + self._weigh_one(each)
                if size > _MAX_VALUE:
                    raise LimitError(f"reads a value that has more than {_MAX_VALUE:,} characters as text")
            else:
                within.pop()
        self.step(num_items)
        return size

    def _weigh_one(self, value: Any) -> int:
        if isinstance(value, _TEXTS):
            self.step(len(value) >> 6)
            return len(value)
        if isinstance(value, int):
            self.check_bits(value.bit_length())
            return 1 + value.bit_length() // 3
        if isinstance(value, range):
            self.step(len(value))
            return _ITEM_SIZE * len(value)
        return 1


SIZED = (str, bytes, list, tuple, dict, set, frozenset)
"""Kinds of values that are as large as they are long."""

_TEXTS = (str, bytes)
_EMPTY: dict[str, str] = {}
_VIEWS = (type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))
_CONTAINERS = (list, tuple, dict, set, frozenset, *_VIEWS, Cycler)
# By their own type first: others, such as a namespace, answer slowly which class they are of.
_IS_CONTAINER = dict.fromkeys((*_CONTAINERS, Namespace), True) | dict.fromkeys((str, bytes, int, float, bool), False)


def _is_container(value: Any) -> bool:
    found = _IS_CONTAINER.get(type(value))
    return isinstance(value, _CONTAINERS) if found is None else found


def _items_of(value: Any) -> Iterator[Any]:
    if type(value) is Namespace:
        value = object.__getattribute__(value, "_Namespace__attrs")
    elif type(value) is Cycler:
        value = value.items
    return itertools.chain(value.keys(), value.values()) if isinstance(value, dict) else iter(value)


def width_of(value: Any) -> int:
    """Characters that an item of a value counts."""
    return 1 if isinstance(value, str | bytes) else _ITEM_SIZE
