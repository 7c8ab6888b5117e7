"""Entities that the labels of words mark, such as ``B-PER I-PER O``, and how many of them were found."""

from __future__ import annotations

from collections.abc import Sequence

_INSIDE = ("B", "I", "E", "S")


def mark_entities(names: Sequence[str]) -> bool:
    """Whether labels are of a scheme that marks entities: ``O``, or ``B-``, ``I-``, ``E-`` or ``S-`` and a kind."""
    marks = [name.partition("-") for name in names if name != "O"]
    return bool(marks) and all(prefix in _INSIDE and kind for prefix, _, kind in marks)


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Kind, first word and the word after the last, of each entity.

    One begins at ``B-`` and ``S-``, and at an ``I-`` or ``E-`` that goes on with none of its kind; it ends after ``E-``
    and ``S-``, and before what does not go on with it. So counts ``conlleval`` of CoNLL 2000, and ``seqeval``.

    Args:
        tags: the labels of a text's words, in order.
    """
    found: set[tuple[str, int, int]] = set()
    kind, begin, last = "", 0, "O"
    for place, tag in enumerate((*tags, "O")):
        prefix, _, name = tag.partition("-")
        goes_on = prefix in ("I", "E") and last in ("B", "I") and name == kind
        if last != "O" and not goes_on:
            found.add((kind, begin, place))
        if not goes_on:
            kind, begin = name, place
        last = prefix
    return found
