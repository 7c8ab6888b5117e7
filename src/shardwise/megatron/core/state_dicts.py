"""Megatron's functions of nested dicts and lists, which states of checkpoints are."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.megatron.surface import offer


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replace each value ``v`` in nested dicts and lists by ``f(v)``, in place, and return ``x``; or ``f(x)``."""
    if not isinstance(x, (dict, list)):
        return f(x)
    for key, value in _items(x):
        x[key] = dict_list_map_inplace(f, value)
    return x


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Return nested dicts and lists with ``f(v)`` for each value ``v``."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    return [dict_list_map_outplace(f, value) for value in x] if isinstance(x, list) else f(x)


def nested_values(x: dict[Any, Any] | list[Any]) -> Iterator[Any]:
    """Yield the values in nested dicts and lists."""
    for _, value in _items(x):
        if isinstance(value, (dict, list)):
            yield from nested_values(value)
        else:
            yield value


def extract_matching_values(
    x: dict[Any, Any] | list[Any], predicate: Callable[[Any], bool], return_lists_as_dicts: bool = False
) -> tuple[Any, Any]:
    """Return the values of which ``predicate`` is true, and the others, in dicts and lists nested as ``x``.

    Args:
        x: nested dicts and lists.
        predicate: function of a value.
        return_lists_as_dicts: whether dicts by index stand for lists in the results.

    Raises:
        ConfigError: ``x`` is neither.
    """
    if not isinstance(x, (dict, list)):
        raise ConfigError(f"extract_matching_values got a {type(x).__name__}; give a dict or a list")
    found: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})
    for key, value in _items(x):
        if isinstance(value, (dict, list)) and (value or isinstance(x, dict)):
            parts = extract_matching_values(value, predicate, return_lists_as_dicts)
            for part, own in zip(parts, found, strict=True):
                if part or (not value and own is found[1]):
                    own[key] = part
        else:
            found[0 if predicate(value) else 1][key] = value
    if isinstance(x, list) and not return_lists_as_dicts:
        return [*found[0].values()], [*found[1].values()]
    return found


def diff(x1: Any, x2: Any, prefix: tuple[Any, ...] = ()) -> tuple[list[Any], list[Any], list[Any]]:
    """Compare nested dicts, lists and tuples.

    Args:
        x1, x2: the two.
        prefix: keys on the way to them.

    Returns:
        The paths that only ``x1`` has, those that only ``x2`` has, and of each pair of different values path and types.
    """
    both = (x1, x2)
    if all(isinstance(x, dict) for x in both):
        left, right = x1, x2
    elif type(x1) is type(x2) and isinstance(x1, (list, tuple, np.ndarray)):
        left, right = dict(enumerate(x1)), dict(enumerate(x2))
    else:
        return [], [], [] if _is_same(x1, x2) else [(prefix, type(x1), type(x2))]
    only: tuple[list[Any], list[Any], list[Any]]
    only = (
        [(*prefix, key) for key in left if key not in right],
        [(*prefix, key) for key in right if key not in left],
        [],
    )
    for key in left.keys() & right.keys():
        for own, part in zip(only, diff(left[key], right[key], (*prefix, key)), strict=True):
            own.extend(part)
    return only


def _is_same(x1: Any, x2: Any) -> bool:
    if isinstance(x1, Tensor) or isinstance(x2, Tensor):
        return isinstance(x1, Tensor) and isinstance(x2, Tensor) and torch.equal(x1.cpu(), x2.cpu())
    return bool(x1 == x2)


def _items(x: dict[Any, Any] | list[Any]) -> list[tuple[Any, Any]]:
    return [*x.items()] if isinstance(x, dict) else [*enumerate(x)]


offer(globals())
