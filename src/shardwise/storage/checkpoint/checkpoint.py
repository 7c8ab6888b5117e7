"""Load a sharded state at any layout, and verify a checkpoint.

torch.distributed.checkpoint plans which rank reads which bytes, and moves them. This module adds checks of the
contents, and errors that are the same on every rank (``checkpoint_errors``).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from shardwise.core.communication.agreement import decide
from shardwise.core.errors import CheckpointError, ShardwiseError
from shardwise.core.sharding import ParamLayout, ParamShard, TensorPieces
from shardwise.core.slow_work import told_if_slow
from shardwise.core.tensor_files import some_tensors
from shardwise.storage.checkpoint.manifest import Manifest, check_state_fits
from shardwise.storage.checkpoint.storage import SafetensorsReader, tensors_of


def describe(error: BaseException) -> str:
    """Return ``error`` as one line, with its type unless it is a ShardwiseError or an OSError."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ShardwiseError | OSError) else f"{type(error).__name__}: {text}"


@contextmanager
def checkpoint_errors() -> Iterator[None]:
    """Convert errors into CheckpointErrors; KeyboardInterrupt and the like are raised unchanged.

    Of an error of torch.distributed.checkpoint, which has those of all ranks, the lowest rank's is used.
    """
    try:
        yield
    except CheckpointException as failure:
        errors = [error for _, (error, _) in sorted(failure.failures.items())]
        for error in errors:
            if not isinstance(error, Exception):
                raise error from failure
        raise CheckpointError(describe(errors[0])) from failure
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(describe(error)) from error


Description = tuple[torch.dtype, tuple[int, ...], ParamLayout]
"""Properties of a tensor that are the same on every rank: dtype, global shape (with leading axes), and layout."""


def load(
    path: Path,
    state: Mapping[str, ParamShard],
    *,
    group: ProcessGroup,
    allow_extra: bool = False,
    convert: bool = False,
) -> dict[str, Any]:
    """Load the checkpoint at ``path``, which was saved at any layout, into the tensors of ``state``, in place.

    Collective over ``group``. Each rank reads only its own slices. The tensors' names, shapes and dtypes and the sizes
    of files are checked before any tensor is written. Checksums are compared while the contents are read; if they
    differ, the tensors of ``state`` hold the damaged values.

    Args:
        path: folder of a checkpoint, for example from ``latest``.
        state: this rank's part of each tensor; the ``data`` of its entries is overwritten. An entry may allow a tensor
            of another size (see ``ParamShard``).
        group: all ranks that load; they see the same ``path``.
        allow_extra: ignore tensors of the checkpoint that no rank's ``state`` has, such as the optimizer's.
        convert: convert tensors that were saved in another floating-point dtype to the dtype of ``state``.

    Returns:
        The saved ``meta``.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged or of another model (a tensor is missing or
            unexpected, or has another shape or dtype); the message is the same on every rank.
    """
    manifest: Manifest | None = None
    mine: dict[str, TensorPieces] = {}

    @checkpoint_errors()
    def examine() -> tuple[int, int, dict[str, Description]]:
        nonlocal manifest
        manifest = Manifest.read(path)
        manifest.check_sizes(path)
        described = describe_state(state)
        for shard in state.values():
            if shard.data.is_meta:
                raise CheckpointError(
                    f"tensor {shard.key!r} is on the meta device; allocate the model first (to_empty)"
                )
        check_state_fits(path, manifest, state, convert=convert)
        mine.update(tensors_of(state, {key: tensor.shape for key, tensor in manifest.tensors.items()}))
        return manifest.step, manifest.serial, described

    @checkpoint_errors()
    def compare(ranks: list[tuple[int, int, dict[str, Description]]]) -> None:
        assert manifest is not None
        if len({(step, serial) for step, serial, _ in ranks}) > 1:
            raise CheckpointError(f"the ranks load different steps: {[step for step, _, _ in ranks]}")
        asked_for = merge_descriptions((f"rank {rank}", part) for rank, (_, _, part) in enumerate(ranks))
        extra = sorted(manifest.tensors.keys() - asked_for.keys())
        if extra and not allow_extra:
            raise CheckpointError(
                f"checkpoint {path} holds {some_tensors(extra)} for which there is no place here: it is of another "
                "model"
            )

    decide(examine, compare, group=group)
    assert manifest is not None
    reader = SafetensorsReader(path, manifest)
    with told_if_slow(f"reading {path}"), checkpoint_errors():
        state_dict_loader.load(
            dict(mine), storage_reader=reader, planner=DefaultLoadPlanner(flatten_state_dict=False), process_group=group
        )
    decide(lambda: reader.sums, checkpoint_errors()(reader.check_sums), group=group)
    return manifest.meta


def read_meta(path: Path) -> dict[str, Any]:
    """Return the ``meta`` of the checkpoint at ``path``, or raise CheckpointError. Not collective."""
    return Manifest.read(path).meta


def verify(path: Path) -> None:
    """Compare every file of the checkpoint at ``path`` with its recorded size and checksum. Not collective.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged; the message names the file.
    """
    manifest = Manifest.read(path)
    manifest.check_sizes(path)
    manifest.check_contents(path)


def describe_state(state: Mapping[str, ParamShard]) -> dict[str, Description]:
    """Return descriptions of this rank's entries by key; raise CheckpointError if two entries of a key differ."""
    return merge_descriptions((f"entry {name!r}", {shard.key: shard.description}) for name, shard in state.items())


def merge_descriptions(parts: Iterable[tuple[str, dict[str, Description]]]) -> dict[str, Description]:
    """Merge the descriptions of all named parts by key; raise CheckpointError if two parts differ about a tensor."""
    merged: dict[str, Description] = {}
    first: dict[str, str] = {}
    for who, part in parts:
        for key, mine in part.items():
            other = merged.setdefault(key, mine)
            first.setdefault(key, who)
            if other != mine:
                raise CheckpointError(
                    f"disagreement about tensor {key!r}: {who} has {_text(mine)}, {first[key]} has {_text(other)}"
                )
    return merged


def _text(description: Description) -> str:
    dtype, shape, layout = description
    return f"{dtype} of shape {list(shape)}, {layout}"
