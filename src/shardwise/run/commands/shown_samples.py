"""Display samples as a run would train on them: token ids, text and mask, in colours."""

from collections.abc import Iterator
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import DataError
from shardwise.data import TokenRows, UnusableExampleError
from shardwise.data.json_records import counted
from shardwise.data.tokenizer import Tokenizer
from shardwise.run.settings import FinetuneSettings
from shardwise.run.tasks import task_of
from shardwise.run.tasks.preference import Preferences
from shardwise.run.tasks.samples import Examples
from shardwise.run.tasks.task_data import TaskData

# Maximum number of ids shown per sample.
_MOST_TOKENS = 2000
_LEARNED, _READ, _PLAIN = "\033[32m", "\033[2m", "\033[0m"


def shown_samples(settings: FinetuneSettings, count: int, *, colours: bool) -> Iterator[str]:
    """Yield the first ``count`` samples as a run would train on them, and the reasons for omitting other samples."""
    method = task_of(settings).method
    assert isinstance(method, Examples | Preferences)
    settings, examples = method.settings, method.to_show()
    longest = settings.sequence_length + 1
    key = f"{_LEARNED}learned{_PLAIN}, {_READ}only read{_PLAIN}" if colours else "[[learned]], only read"
    if isinstance(examples, TaskData):
        yield from _stream(examples, count, key, colours)
        return
    encoder = method.encoder()
    yield f"{counted(len(examples), 'sample')} in {', '.join(settings.data)}; {key}"
    shown = 0
    for number, example in enumerate(examples, 1):
        try:
            encoded = encoder.encode_all(example)
        except UnusableExampleError as error:
            yield f"\nsample {number} ({_printable(example.where)}) is left out: {_printable(str(error))}"
            continue
        for name, each in zip(("",) if len(encoded) == 1 else (", chosen", ", rejected"), encoded, strict=True):
            ids, learned = each.ids, each.learned
            length, past = len(ids), settings.samples.too_long
            too_long = f"; more than {longest}: --too-long {past}" if length > longest else ""
            if past == "cut" and not name:
                ids, learned = ids[:longest], learned[:longest]
            yield (
                f"\nsample {number} ({_printable(example.where)}){name}: {counted(length, 'token')}, {learned.sum():,} "
                f"of them learned{too_long}\n{_tokens(ids, learned, encoder.tokenizer, colours)}"
            )
        shown += 1
        if shown == count:
            return
    if not shown:
        raise DataError(f"nothing can be learned from any of the {counted(len(examples), 'sample')}")


def _stream(texts: TaskData, count: int, key: str, colours: bool) -> Iterator[str]:
    rows = texts.train
    assert isinstance(rows, TokenRows)
    yield (
        f"{texts.name}: texts one after the other, cut into {counted(len(rows), 'sample')} of "
        f"{counted(rows.sequence_length, 'token')}, elsewhere in each pass over them (--packing keeps them apart); "
        f"{key}"
    )
    for number in range(min(count, len(rows))):
        row = rows.row(number)
        ids = np.append(row["tokens"], row["labels"][-1:])
        learned = np.arange(len(ids)) > 0
        yield f"\nsample {number + 1}:\n{_tokens(ids, learned, texts.tokenizer, colours)}"


def _tokens(ids: NDArray[np.int64], learned: NDArray[np.bool_], tokenizer: Tokenizer, colours: bool) -> str:
    """Return the text of a sample, and below it the ids; of a long sample, only the first and last tokens."""
    parts, left_out = [_runs(ids, learned)], len(ids) - _MOST_TOKENS
    if left_out > 0:
        half = _MOST_TOKENS // 2
        parts = [_runs(ids[:half], learned[:half]), _runs(ids[-half:], learned[-half:])]
    texts = (
        "".join(_marked(_printable(tokenizer.decode(run)), is_learned, colours) for is_learned, run in part)
        for part in parts
    )
    numbers = (
        " ".join(_marked(" ".join(map(str, run)), is_learned, colours) for is_learned, run in part) for part in parts
    )
    gap = f"\n... {counted(left_out, 'token')} not shown ...\n"
    return f"{gap.join(texts)}\n{gap.join(numbers)}"


def _runs(ids: NDArray[np.int64], learned: NDArray[np.bool_]) -> list[tuple[bool, list[int]]]:
    """Split the tokens into consecutive runs with the same mask value."""
    pairs = zip(learned.tolist(), ids.tolist(), strict=True)
    return [(learned, [token for _, token in run]) for learned, run in groupby(pairs, key=lambda pair: pair[0])]


def _marked(text: str, learned: bool, colours: bool) -> str:
    if not colours:
        return f"[[{text}]]" if learned else text
    colour = _LEARNED if learned else _READ
    # Restart the colour on each line, because pagers read one line at a time.
    return "\n".join(f"{colour}{line}{_PLAIN}" if line else "" for line in text.split("\n"))


def _printable(text: str) -> str:
    """Escape control characters, which could otherwise control the terminal."""
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)
