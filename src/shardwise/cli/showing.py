"""A look at what is trained on: ids, text and mask of samples, in colours."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import groupby
from typing import Any

from shardwise.cli.streams import allow_any_character
from shardwise.data import Encoded, UnusableExampleError
from shardwise.errors import DataError
from shardwise.tokenizer import Tokenizer
from shardwise.training.classifying import Classifying
from shardwise.training.finetune import Finetuning
from shardwise.training.finetune_settings import FinetuneSettings

_LEARNED, _READ, _PLAIN = "\033[32m", "\033[2m", "\033[0m"


def show_samples(recipe_of: Callable[[Any], Finetuning], settings: FinetuneSettings, count: int) -> None:
    """Print the first ``count`` samples as a run would train on them, and what is wrong with those that it leaves out.

    Args:
        recipe_of: makes the recipe of the run from its settings.
        settings: of the run.
        count: how many samples, or pairs.

    Raises:
        ShardwiseError: what a run would raise; or no sample can be trained on.
    """
    recipe = recipe_of(settings)
    examples, encoder = recipe.examples(), recipe.encoder()
    colours = _has_colours()
    allow_any_character()
    key = f"{_LEARNED}learned{_PLAIN}, {_READ}only read{_PLAIN}" if colours else "[[learned]], only read"
    print(f"{len(examples):,} samples in {', '.join(settings.data)}; {key}")
    longest = recipe.settings.sequence_length + 1
    shown = 0
    for number, example in enumerate(examples, 1):
        try:
            encoded = encoder.encode_all(example)
        except UnusableExampleError as error:
            print(f"\nsample {number} ({_printable(example.where)}) is left out: {_printable(str(error))}")
            continue
        for name, each in zip(("",) if len(encoded) == 1 else (", chosen", ", rejected"), encoded, strict=True):
            length = len(each.ids)
            too_long = f"; more than {longest}: --too-long {settings.samples.too_long}" if length > longest else ""
            print(
                f"\nsample {number} ({_printable(example.where)}){name}: {length} tokens, {each.learned.sum()} of them "
                f"learned{too_long}\n{_text(each, encoder.tokenizer, colours)}\n{_ids(each, colours)}"
            )
        shown += 1
        if shown == count:
            return
    if not shown:
        raise DataError(f"nothing can be learned from any of the {len(examples)} samples")


def show_labelled(settings: FinetuneSettings, count: int) -> None:
    """Print the first ``count`` texts with labels as a run would train on them. Raises what a run would."""
    recipe = Classifying(settings)
    name, texts = recipe.labelled_texts(settings.data)
    labels = recipe.labels_of(texts)
    allow_any_character()
    print(f"{name}, {len(texts):,} texts; {labels.problem}: {_printable(', '.join(labels.names))}")
    encoded = recipe.encoded(texts[:count], labels)
    for index, text in enumerate(encoded.texts):
        ids, label, *_ = encoded.rows.row(index)
        shown = _printable(recipe.tokenizer.decode(ids.tolist()))
        print(f"\nsample {index + 1} ({_printable(text.where)}): label {label.tolist()}\n{shown}\n{ids.tolist()}")


def _text(encoded: Encoded, tokenizer: Tokenizer, colours: bool) -> str:
    return "".join(_marked(_printable(tokenizer.decode(ids)), learned, colours) for learned, ids in _runs(encoded))


def _ids(encoded: Encoded, colours: bool) -> str:
    return " ".join(_marked(" ".join(map(str, ids)), learned, colours) for learned, ids in _runs(encoded))


def _runs(encoded: Encoded) -> list[tuple[bool, list[int]]]:
    """Tokens, one run after the other of those that are learned and of those that are not."""
    pairs = zip(encoded.learned.tolist(), encoded.ids.tolist(), strict=True)
    return [(learned, [token for _, token in run]) for learned, run in groupby(pairs, key=lambda pair: pair[0])]


def _marked(text: str, learned: bool, colours: bool) -> str:
    if not colours:
        return f"[[{text}]]" if learned else text
    colour = _LEARNED if learned else _READ
    # Begun anew on each line, for pagers that read one line at a time.
    return "\n".join(f"{colour}{line}{_PLAIN}" if line else "" for line in text.split("\n"))


def _printable(text: str) -> str:
    """The text with control characters, by which it could do things to a terminal, spelt out."""
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)


def _has_colours() -> bool:
    """As no-color.org and force-color.org say, or else if a terminal reads this."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()
