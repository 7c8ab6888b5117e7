"""The data of a run as rows: training and held-out rows, their split and cache, and their sharing by ranks."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwise.core.atomic_files import check_folder
from shardwise.core.communication.agreement import agree, check_same
from shardwise.core.errors import DataError, UnwritableError
from shardwise.data import HeldOut, Rows
from shardwise.data.json_records import counted
from shardwise.data.tokenizer import Tokenizer
from shardwise.run.processes.ranks import Ranks

_T = TypeVar("_T")


@dataclass(frozen=True)
class TaskData:
    """Rows for training and evaluation.

    Attributes:
        name: display name of the data.
        sha256: hex digest of all data.
        tokenizer: tokenizer of the rows.
        train: rows for training.
        held_out: rows for evaluation.
        notes: notes for the user, one line each.
        identity: settings that determined how the data became rows, recorded in checkpoints.
        held_out_bytes: held-out text for the comparison with compressors; empty if they are not comparable.
        bits_per_nat: factor from a loss in nats per token to bits per byte of the training text; 0 if no text is
            predicted.
        held_out_sha256: hex digest of the data of ``held_out``.
        blend: share of each source of a blend, and how often the run takes it, one line each.
        epoch_size: number of training rows that one pass over the data has; 0 stands for all.
        keys: of all samples to train on, and of all held-out ones: numbers that are equal for equal samples.
    """

    name: str
    sha256: str
    tokenizer: Tokenizer
    train: Rows
    held_out: HeldOut
    notes: tuple[str, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)
    held_out_bytes: bytes = b""
    bits_per_nat: float = 0.0
    held_out_sha256: str = ""
    blend: tuple[str, ...] = ()
    epoch_size: int = 0
    keys: tuple[NDArray[np.uint64], NDArray[np.uint64]] = (np.empty(0, np.uint64), np.empty(0, np.uint64))

    @property
    def overlap(self) -> tuple[str, ...]:
        """A note if held-out samples are also learned."""
        learned, held_out = self.keys
        count = int(np.isin(held_out, learned).sum())
        if not count:
            return ()
        return (
            f"{count:,} of {counted(len(held_out), 'held-out sample')} are also among those to train on, so the "
            "held-out loss says less; remove them from one of the two",
        )

    def __post_init__(self) -> None:
        object.__setattr__(self, "epoch_size", self.epoch_size or len(self.train))


def share(prepare: Callable[[], TaskData], ranks: Ranks) -> TaskData:
    """Call ``prepare`` on every rank: first on one rank of each machine, which fills the cache for the others."""
    with ranks.phase("reading the text"):
        data = agree(lambda: prepare() if ranks.local_rank == 0 else None, group=ranks.control)
        data = agree(lambda: data or prepare(), group=ranks.control)
    assert data is not None
    for note in (*data.notes, *data.overlap) if ranks.is_first else ():
        print(f"note   {note}", flush=True)
    check_same(data.sha256, "the text (its SHA-256)", group=ranks.control)
    check_same(data.held_out_sha256, "the held-out text (its SHA-256)", group=ranks.control)
    check_same(data.tokenizer.sha256, "the tokenizer (its SHA-256)", group=ranks.control)
    return data


def cache_folder() -> Path:
    """Return the folder that caches tokenizers and token streams between runs.

    It is ``$SHARDWISE_CACHE``, else ``shardwise`` in ``$XDG_CACHE_HOME``, else ``shardwise`` in ``~/.cache``.
    """
    own = os.environ.get("SHARDWISE_CACHE")
    if own:
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise"
    except RuntimeError as error:
        raise UnwritableError(str(error)) from error


def with_cache(make: Callable[[Path | None], _T]) -> tuple[_T, tuple[str, ...]]:
    """Call ``make`` with the cache folder, or with None and a note if the folder is not writable."""
    try:
        folder = cache_folder()
        # Fail before the work is done, not when its result cannot be cached.
        check_folder(folder, flag="SHARDWISE_CACHE")
        return make(folder), ()
    except UnwritableError as error:
        return make(None), (f"nothing is kept for the next run: {error}",)


class Item(Protocol):
    """An example or a preference."""

    @property
    def sha256(self) -> str:
        """Hex digest of the content, independent of its location."""


_I = TypeVar("_I", bound=Item)


def keys_of(digests: Iterable[str]) -> NDArray[np.uint64]:
    """Return the beginnings of hex digests as numbers."""
    return np.array([int(digest[:16], 16) for digest in digests], dtype=np.uint64)


def sha256_of(items: Sequence[Item]) -> str:
    """Return a hex digest of all items in order."""
    return hashlib.sha256("".join(item.sha256 for item in items).encode()).hexdigest()


def divided(items: Sequence[_I], held_out: Sequence[_I] | None, fraction: float) -> tuple[list[_I], list[_I]]:
    """Split items into a training part and a held-out part.

    Args:
        items: items for training.
        held_out: items for evaluation; if None, a part of ``items``, chosen independently of their order, with equal
            items in the same part.
        fraction: fraction of the items in that part.

    Raises:
        DataError: all items are equal.
    """
    if held_out is not None:
        return list(items), list(held_out)
    groups: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        groups.setdefault(item.sha256, []).append(index)
    if len(groups) < 2:
        equal = ", all equal," if len(items) > 1 else ""
        raise DataError(
            f"{counted(len(items), 'sample')}{equal} cannot be divided into some to train on and some to "
            "measure on; give more, or name a file to measure on (--held-out)"
        )
    target = max(1, round(fraction * len(items)))
    picked: set[int] = set()
    for digest in sorted(groups)[:-1]:
        if len(picked) >= target:
            break
        picked.update(groups[digest])
    train, measured = (
        [each for index, each in enumerate(items) if (index in picked) is held] for held in (False, True)
    )
    return train, measured
