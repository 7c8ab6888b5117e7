"""A meter of the work and the values of one rendering of a chat template."""

import itertools
from collections.abc import Iterator
from typing import Any

from jinja2.utils import Cycler, Namespace

MAX_STEPS = 20_000_000
"""Maximum steps of a rendering; a step is a node of the template, an item of a sequence, or 64 characters."""

_MAX_VALUE = 1 << 24
_MAX_VALUES = 1 << 27
_MAX_BITS = 4096
_MAX_DEPTH = 200
_VALUE_SIZE = 64
_ITEM_SIZE = 8


class LimitError(Exception):
    """A template exceeds a limit."""


class Meter:
    """Meter of one rendering; its methods raise LimitError if a limit is exceeded.

    ``num_made`` counts the characters of all values made so far; an item of a list counts as eight.
    """

    __slots__ = ("num_made", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self.num_made = 0

    def step(self, count: int) -> None:
        """Count ``count`` steps."""
        self.steps += count
        if self.steps > MAX_STEPS:
            raise LimitError(f"takes more than {MAX_STEPS:,} steps")

    def make(self, size: int) -> None:
        """Count a value of ``size`` characters before it is made."""
        if size > _MAX_VALUE:
            raise LimitError(f"makes a value of more than {_MAX_VALUE:,} characters")
        self.num_made += size + _VALUE_SIZE
        self.step(size >> 6)
        if self.num_made > _MAX_VALUES:
            raise LimitError(f"makes values of more than {_MAX_VALUES:,} characters")

    def made(self, value: Any) -> None:
        """Count a value that was made, without the contents of its items."""
        self.make(len(value) * width_of(value) if isinstance(value, SIZED) else 0)

    def check_bits(self, bits: int) -> None:
        """Refuse a number of too many bits."""
        if bits > _MAX_BITS:
            raise LimitError(f"makes a number of more than {_MAX_BITS} bits")

    def check_numbers(self, *values: Any) -> None:
        """Refuse numbers that are too large for arithmetic."""
        for each in values:
            if isinstance(each, int):
                self.check_bits(each.bit_length())

    def weigh(self, value: Any) -> int:
        """Return the approximate length of a value as text; an object that occurs twice in it counts twice."""
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
"""Types whose size is proportional to their length."""

_TEXTS = (str, bytes)
_EMPTY: dict[str, str] = {}
_VIEWS = (type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))
_CONTAINERS = (list, tuple, dict, set, frozenset, *_VIEWS, Cycler)
# Look up the exact type first, because isinstance is slow for some types, such as a namespace.
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
    """Return the number of characters that an item of a value counts as."""
    return 1 if isinstance(value, str | bytes) else _ITEM_SIZE
