"""Limits on how much longer a tokenizer.json makes a text, checked when it is loaded.

The library applies the rules of a file without limits: four replacements of a letter by a thousand letters make 10**12
of one. The largest number of characters that a step makes of each character is computed here without applying it.
"""

import base64
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from shardwise.core.errors import DataError

MAX_GROWTH = 500
"""Largest number of characters that a tokenizer may make of one; published ones make at most a few dozen."""

_MAX_ADDED = 1_000
# U+FDFA is 18 characters in NFKC; lower case and decomposed letters have at most 3.
_UNICODE = {"NFKC": 18, "NFKD": 18, "NFC": 3, "NFD": 3, "Lowercase": 3, "BertNormalizer": 3}
_OTHER = ""


def check_growth(backend: tokenizers.Tokenizer, where: str) -> None:
    """Raise DataError if the tokenizer makes more than ``MAX_GROWTH`` characters of one, or adds many to each text."""
    for name in ("normalizer", "decoder"):
        steps = list(_steps(_state(getattr(backend, name)), f"{name}s"))
        if (growth := _growth(steps)) > MAX_GROWTH:
            raise DataError(
                f"{where}: its {name} makes up to {growth:,} characters of one, and {MAX_GROWTH} are allowed; use the "
                "tokenizer.json that the model was published with"
            )
    processor = _state(backend.post_processor)
    pieces = [
        piece
        for step in _steps(processor, "processors")
        for form in ("single", "pair")
        if isinstance(given := step.get(form), list)
        for piece in given
    ]
    added = max(len(pieces), backend.num_special_tokens_to_add(False), backend.num_special_tokens_to_add(True))
    longest = max(
        (len(str(step.get("prepend", ""))) for step in _steps(_state(backend.normalizer), "normalizers")), default=0
    )
    for count, what in (
        (added, "tokens that its post_processor adds"),
        (longest, "characters that its normalizer adds"),
    ):
        if count > _MAX_ADDED:
            raise DataError(
                f"{where}: the {what} to each text are {count:,}, and {_MAX_ADDED:,} are allowed; use the "
                "tokenizer.json that the model was published with"
            )


def _state(component: Any) -> Mapping[str, Any]:
    """Return the JSON of a part of a tokenizer; empty if there is none."""
    return {} if component is None else json.loads(component.__getstate__())


def _steps(state: Mapping[str, Any], key: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a sequence, which may have sequences, or the only step."""
    if state.get("type") != "Sequence":
        yield state
        return
    for each in state[key]:
        yield from _steps(each, key)


def _growth(steps: list[Mapping[str, Any]]) -> int:
    """Return the largest number of characters that the steps make of one."""
    replaced = [step for step in steps if step.get("type") == "Replace"]
    # Characters that no pattern begins with are all alike.
    first = {pattern[0] for step in replaced if (pattern := step["pattern"].get("String"))}
    largest = 1
    for start in (*first, _OTHER):
        size, signs = 1, Counter({start: 1})
        for step in steps:
            size, signs = _after(size, signs, step, first)
        largest = max(largest, size)
    kinds = {step.get("type") for step in steps}
    for forms in (("NFKC", "NFKD"), ("NFC", "NFD"), ("Lowercase", "BertNormalizer")):
        largest *= max((_UNICODE[form] for form in forms if form in kinds), default=1)
    return largest


def _after(size: int, signs: Counter[str], step: Mapping[str, Any], first: set[str]) -> tuple[int, Counter[str]]:
    """Return upper bounds, after a step, of the number of all characters, and of each of ``first``."""
    if step.get("type") == "Precompiled":
        # A table of texts, each with a NUL at its end, follows a trie of the characters that they replace.
        table = base64.b64decode(step.get("precompiled_charsmap") or "")
        longest = max(map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")))
        size *= max(1, longest)
        return size, Counter(dict.fromkeys(first, size))
    if step.get("type") != "Replace":
        return size, signs
    pattern, content = step["pattern"], step["content"]
    new = Counter(sign for sign in content if sign in first)
    if text := pattern.get("String"):
        # Each match takes at least its first character.
        count = min(size, signs[text[0]])
        size += count * (len(content) - 1)
        signs = signs - Counter({text[0]: count})
    else:
        # A match that may be empty takes no character.
        count = size
        size *= max(1, len(content)) if _least_width(pattern.get("Regex", "")) else 1 + len(content)
    return max(1, size), signs + Counter({sign: count * each for sign, each in new.items()})


def _least_width(pattern: str) -> int:
    try:
        return int(re._parser.parse(pattern).getwidth()[0])  # type: ignore[attr-defined]
    except (re.error, RecursionError, OverflowError):
        # The library's expressions have more than Python's.
        return 0
