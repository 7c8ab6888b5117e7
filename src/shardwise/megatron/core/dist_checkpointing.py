"""Megatron's distributed checkpoints in the engine's format: complete or absent, and without executable content.

A checkpoint folder holds the tensors of a state as safetensors and its plain values as JSON. Any layout can load it.
Checkpoints from Megatron itself cannot be read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.agreement import decide
from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.core.sharding import ParamShard
from shardwise.megatron.absent import absent_names
from shardwise.megatron.core.checkpoint_strategies import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from shardwise.megatron.core.sharded_entries import (
    LocalNonpersistentObject as LocalNonpersistentObject,
    ShardedBase as ShardedBase,
    ShardedObject as ShardedObject,
    ShardedStateDict as ShardedStateDict,
    ShardedTensor as ShardedTensor,
    ShardedTensorFactory as ShardedTensorFactory,
    add_prefix_for_sharding as add_prefix_for_sharding,
    apply_factories as apply_factories,
    apply_factory_merges as apply_factory_merges,
    apply_prefix_mapping as apply_prefix_mapping,
    entries_in,
    is_main_replica as is_main_replica,
    replace_prefix_for_sharding as replace_prefix_for_sharding,
)
from shardwise.megatron.surface import offer
from shardwise.storage import checkpoint
from shardwise.storage.checkpoint.comparing import StoredCheckpoint
from shardwise.storage.checkpoint.folder import held_latest

__getattr__ = absent_names(
    "dist_checkpointing.core", "dist_checkpointing.serialization", "dist_checkpointing.validation"
)

_COMMON, _CONTENT = "common", "content_metadata"

# Files that identify the library that wrote a folder.
_FOREIGN = {
    "metadata.json": "Megatron",
    ".metadata": "torch.distributed.checkpoint",
    "common.pt": "Megatron",
    "latest_checkpointed_iteration.txt": "Megatron (several checkpoints)",
    "mp_rank_*": "Megatron",
    "config.json": "Hugging Face",
    "*.safetensors": "Hugging Face",
    "*.pt": "torch.save",
    "*.bin": "torch.save",
}


class StrictHandling(Enum):
    """The reaction of ``load`` to tensors that only the state has (unexpected), or only the checkpoint (missing).

    ``*_UNEXPECTED`` ignore missing tensors. Unexpected ones are an error, unless they are logged as a warning,
    returned by name, or ignored; the result of ``load`` lacks them then.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        """True if ``load`` also returns names."""
        return val in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL)


def parse_strict_flag(strict: str | StrictHandling) -> StrictHandling:
    """Return the value of ``StrictHandling`` by name; raise ConfigError if there is none."""
    try:
        return StrictHandling(strict)
    except ValueError as error:
        raise ConfigError(
            f"strict is {strict!r}; it must be one of {', '.join(each.value for each in StrictHandling)}"
        ) from error


CheckpointingException = CheckpointError
logger = logging.getLogger(__name__)


def save(
    sharded_state_dict: Mapping[str, Any],
    checkpoint_dir: str | Path,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
    content_metadata: Mapping[str, Any] | None = None,
    *,
    process_group: ProcessGroup | None = None,
) -> None:
    """Save a state atomically as the only checkpoint of a folder, replacing an earlier one. Collective.

    Args:
        sharded_state_dict: dicts, lists and tuples of sharded tensors, as in a model's ``sharded_state_dict``, and of
            plain values, the same on every rank (rank 0's are stored).
        checkpoint_dir: folder, created if it does not exist.
        sharded_strategy, common_strategy, validate_access_integrity: no effect, because there is one format and ranks
            that disagree are always an error.
        async_sharded_save: not supported.
        preprocess_common_before_consistancy_check: returns the plain values that ranks compare, without those that
            may differ; must not modify its argument.
        content_metadata: plain values for ``load_content_metadata``.
        process_group: group of the ranks that hold the state; None means all ranks.

    Raises:
        ConfigError: ``async_sharded_save`` is set.
        CheckpointError: the state cannot be saved (a value that is not plain, or not the same on all ranks, a folder of
            another library, a full disk); the same message on every rank.
    """
    if async_sharded_save:
        raise ConfigError("async_sharded_save is True, which is not offered here: save returns when all is on the disk")
    folder, group = Path(checkpoint_dir), process_group or _world()

    shards: dict[str, ParamShard] = {}
    meta: dict[str, Any] = {}

    def divided() -> dict[str, str]:
        if checkpoint.latest(folder) is None:
            _check_not_foreign(folder, "choose another folder to save into")
        common = _without_shards(_built(sharded_state_dict), "", shards)
        of_content: dict[str, ParamShard] = {}
        content = _without_shards(content_metadata, _CONTENT, of_content)
        if of_content:
            raise CheckpointError(f"{next(iter(of_content))!r} is a tensor; give content_metadata plain values")
        meta.update({_COMMON: _encoded(common), _CONTENT: _encoded(content)})
        compared = common if content is None else {**common, _CONTENT: content}
        if preprocess_common_before_consistancy_check is not None:
            compared = preprocess_common_before_consistancy_check(compared)
        return dict(_leaves(compared, ""))

    decide(divided, _check_same_values, group=group)
    checkpoint.save(folder, 0, shards, meta, group=group, keep=1)


def load(
    sharded_state_dict: Mapping[str, Any],
    checkpoint_dir: str | Path,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    process_group: ProcessGroup | None = None,
) -> Any:
    """Load a state from a folder written by ``save``, at any layout. Collective.

    Args:
        sharded_state_dict: state whose tensors are overwritten.
        checkpoint_dir: the folder.
        sharded_strategy, common_strategy, validate_access_integrity: no effect, as in ``save``.
        strict: how to treat tensors that only one side has.
        process_group: group of the ranks that load; None means all ranks.

    Returns:
        The saved plain values, with this rank's tensors in their places in ``sharded_state_dict``. With ``RETURN_*`` of
        ``strict``, also the names that only the checkpoint has, and those that only this rank's state has.

    Raises:
        ConfigError: an unknown value of ``strict``.
        CheckpointError: no checkpoint, a damaged one, or one of another library or model; the same message on every
            rank.
    """
    folder, group = Path(checkpoint_dir), process_group or _world()
    strict, state = parse_strict_flag(strict), None
    is_lenient = strict.name.startswith(("LOG", "RETURN", "IGNORE"))
    shards: dict[str, ParamShard] = {}

    def divide() -> set[str]:
        nonlocal state
        state = _built(sharded_state_dict)
        _without_shards(state, "", shards, takes_all=True)
        return {shard.key for shard in shards.values()}

    def compare(of_ranks: list[set[str]]) -> tuple[Path, set[str], set[str]]:
        path = stack.enter_context(_checkpoint_in(folder))
        stored = {*StoredCheckpoint(path).manifest.tensors} if is_lenient else set()
        return path, stored, stored.difference(*of_ranks)

    with ExitStack() as stack:
        path, stored, missing = decide(divide, compare, group=group)
        unexpected = {shard.key for shard in shards.values()} - stored if is_lenient else set()
        shards = {name: shard for name, shard in shards.items() if shard.key not in unexpected}
        meta = checkpoint.load(path, shards, group=group, allow_extra=strict is not StrictHandling.RAISE_ALL)
    result = _merged(_common_in(meta), state, unexpected)
    if strict.name.endswith("UNEXPECTED"):
        missing = set()
    if strict.name.startswith("LOG"):
        for keys, what, place in ((unexpected, "Unexpected", "checkpoint"), (missing, "Missing", "state")):
            if keys:
                logger.warning("%s keys, which the %s lacks: %s", what, place, sorted(keys))
    return (result, missing, unexpected) if StrictHandling.requires_returning_mismatch_keys(strict) else result


def load_common_state_dict(checkpoint_dir: str | Path) -> dict[str, Any]:
    """Read the plain values of the checkpoint in a folder, or raise CheckpointError; not collective.

    The value of ``"content_metadata"`` is that of ``save``, if it was given one.
    """
    return _common_in(_meta_in(Path(checkpoint_dir)))


def load_plain_tensors(checkpoint_dir: str | Path) -> dict[str, Tensor]:
    """Read every tensor of the checkpoint in a folder whole, to the CPU; not collective.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    with _checkpoint_in(Path(checkpoint_dir)) as path:
        checkpoint.verify(path)
        stored = StoredCheckpoint(path)
        shapes = {name: record.shape for name, record in stored.manifest.tensors.items()}
        return {name: stored.read(name, (0,) * len(shape), shape) for name, shape in shapes.items()}


def load_tensors_metadata(checkpoint_dir: str | Path, sharded_strategy: Any = None) -> dict[str, ShardedTensor]:
    """Return an entry for each tensor of the checkpoint in a folder, whole and on the CPU; not collective.

    ``load`` fills them. ``sharded_strategy`` has no effect.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    with _checkpoint_in(Path(checkpoint_dir)) as path:
        tensors = StoredCheckpoint(path).manifest.tensors
    return {
        name: ShardedTensor.from_rank_offsets(name, torch.empty(record.shape, dtype=record.dtype))
        for name, record in tensors.items()
    }


def get_default_save_sharded_strategy(backend: str = "torch_dist", version: int = 1) -> TorchDistSaveShardedStrategy:
    """Return a strategy for ``save``, on which it has no effect."""
    return TorchDistSaveShardedStrategy(backend, version)


def get_default_load_sharded_strategy(checkpoint_dir: str | Path) -> TorchDistLoadShardedStrategy:
    """Return a strategy for ``load``, on which it has no effect; raise CheckpointError if there is no checkpoint."""
    with _checkpoint_in(Path(checkpoint_dir)):
        return TorchDistLoadShardedStrategy()


def load_content_metadata(
    checkpoint_dir: str | Path | None = None, *, preloaded_state_dict: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Return the saved ``content_metadata``, None without any; not collective.

    Args:
        checkpoint_dir: folder to read it from.
        preloaded_state_dict: result of ``load`` or ``load_common_state_dict``, to read no file again.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        ConfigError: neither is given.
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise ConfigError("load_content_metadata needs checkpoint_dir or preloaded_state_dict; both are None")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    content: dict[str, Any] | None = preloaded_state_dict.get(_CONTENT)
    return content


def check_is_distributed_checkpoint(checkpoint_dir: str | Path) -> bool:
    """True if ``save`` has written into the folder."""
    return checkpoint.latest(Path(checkpoint_dir)) is not None


def _world() -> ProcessGroup:
    world = dist.group.WORLD
    if world is None:
        raise ConfigError("torch.distributed is not initialised; call init_process_group first, or pass process_group")
    return world


@contextmanager
def _checkpoint_in(folder: Path) -> Iterator[Path]:
    with held_latest(folder) as path:
        if path is None:
            _check_not_foreign(
                folder,
                "`shardwise import-megatron` converts Megatron's, and `shardwise import-hf` a Hugging Face folder",
            )
            raise CheckpointError(f"there is no checkpoint in {folder}; dist_checkpointing.save writes one")
        yield path


def _common_in(meta: dict[str, Any]) -> dict[str, Any]:
    """Return the plain values in the meta of a checkpoint, with the content metadata as Megatron has them."""
    common: dict[str, Any] = _decoded(meta.get(_COMMON) or {})
    content = _decoded(meta.get(_CONTENT))
    return common if content is None else common | {_CONTENT: content}


def _meta_in(folder: Path) -> dict[str, Any]:
    with _checkpoint_in(folder) as path:
        return checkpoint.read_meta(path)


def _check_not_foreign(folder: Path, what_to_do: str) -> None:
    for pattern, library in _FOREIGN.items():
        if folder.is_dir() and (found := next(folder.glob(pattern), None)) is not None:
            raise CheckpointError(
                f"{folder} holds a checkpoint of {library} ({found.name}), which is not read or changed; {what_to_do}"
            )


@dataclass
class _Built:
    """A factory, and the state that it has built."""

    factory: ShardedTensorFactory
    parts: Any


def _built(value: Any) -> Any:
    """Return a copy of a state, with ``_Built`` for factories."""
    if isinstance(value, ShardedTensorFactory):
        return _Built(value, value.build())
    if isinstance(value, Mapping):
        return {key: _built(item) for key, item in value.items()}
    # A named tuple cannot be made from its items.
    return type(value)(map(_built, value)) if isinstance(value, (list, tuple)) and not _is_named(value) else value


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _is_of(value: Any, keys: set[str]) -> bool:
    if isinstance(value, _Built):
        return any(shard.key in keys for _, shard in entries_in(value.parts))
    return isinstance(value, ParamShard) and value.key in keys


def _without_shards(value: Any, name: str, shards: dict[str, ParamShard], *, takes_all: bool = False) -> Any:
    """Move the shards in ``value`` to ``shards``, keyed by path, and return the rest; lists have None for a shard.

    Raise CheckpointError for two shards of one path and, unless ``takes_all``, for a value that is neither a shard nor
    plain.
    """
    if isinstance(value, ParamShard):
        if name in shards:
            raise CheckpointError(f"the state has two tensors of the path {name!r}; rename a key")
        shards[name] = value
        return None
    if isinstance(value, _Built):
        return _without_shards(value.parts, name, shards, takes_all=takes_all)
    if isinstance(value, LocalNonpersistentObject):
        return None
    if isinstance(value, Mapping):
        items = {
            _plain(key, f"a key of {name}" if name else "a key", takes_all=takes_all): _without_shards(
                item, f"{name}.{key}" if name else str(key), shards, takes_all=takes_all
            )
            for key, item in value.items()
        }
        return {key: items[key] for key, item in value.items() if not isinstance(item, _NOT_PLAIN)}
    if isinstance(value, (list, tuple)) and not _is_named(value):
        items_ = (_without_shards(item, f"{name}.{i}", shards, takes_all=takes_all) for i, item in enumerate(value))
        return tuple(items_) if isinstance(value, tuple) else list(items_)
    return _plain(value, name, takes_all=takes_all)


def _plain(value: Any, name: str, *, takes_all: bool) -> Any:
    if isinstance(value, tuple) and not _is_named(value):
        return tuple(_plain(item, name, takes_all=takes_all) for item in value)
    if not (takes_all or value is None or isinstance(value, (bool, int, float, str))):
        raise CheckpointError(
            f"the state's {name!r} is a {type(value).__name__}; give tensors as ShardedTensor, and other values as "
            "numbers, text, lists, tuples and dicts"
        )
    return value


_NOT_PLAIN = (ParamShard, LocalNonpersistentObject, _Built)

# Objects of JSON that stand for a tuple, and for a dict with keys that are not text.
_TUPLE, _ITEMS = "__tuple__", "__items__"


def _encoded(value: Any) -> Any:
    """Return JSON that ``_decoded`` converts back to an equal value."""
    if isinstance(value, tuple):
        return {_TUPLE: [*map(_encoded, value)]}
    if isinstance(value, list):
        return [*map(_encoded, value)]
    if not isinstance(value, Mapping):
        return value
    if all(isinstance(key, str) and key not in (_TUPLE, _ITEMS) for key in value):
        return {key: _encoded(item) for key, item in value.items()}
    return {_ITEMS: [[_encoded(key), _encoded(item)] for key, item in value.items()]}


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_decoded, value)]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE}:
        return tuple(map(_decoded, value[_TUPLE]))
    if value.keys() == {_ITEMS}:
        return {_decoded(key): _decoded(item) for key, item in value[_ITEMS]}
    return {key: _decoded(item) for key, item in value.items()}


def _leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield path and text of plain values; None also stands for what another rank may have."""
    if isinstance(value, (Mapping, list, tuple)) and not value:
        yield name, repr(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            part = key if isinstance(key, str) else f"[{key!r}]"
            yield from _leaves(item, f"{name}.{part}" if name else part)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{name}.{i}")
    elif value is not None:
        yield name, repr(value)


def _check_same_values(of_ranks: Sequence[dict[str, str]]) -> None:
    """Raise CheckpointError unless all ranks have the same plain values."""
    first = of_ranks[0]
    for rank, leaves in enumerate(of_ranks):
        differing = [name for name in {**first, **leaves} if leaves.get(name) != first.get(name)]
        if differing:
            # The longest path: an empty mapping on one rank stands at the start of the path of another rank's value.
            name = max(differing, key=len)
            found, wanted = leaves.get(name, "no value"), first.get(name, "no value")
            raise CheckpointError(
                f"ranks disagree on a plain value of the state, and one value is stored: {name!r} is {wanted} on "
                f"rank 0 and {found} on rank {rank}; leave it out, store it as a ShardedTensor or, if rank 0's is "
                "the right one, remove it in preprocess_common_before_consistancy_check"
            )


def _merged(common: Any, state: Any, lacking: set[str]) -> Any:
    """Combine the stored values with the state's tensors, without the entries of keys that the checkpoint lacks."""
    if isinstance(state, ParamShard):
        return state.data.detach()
    if isinstance(state, _Built):
        return state.factory.merge_fn(_merged(None, state.parts, lacking))
    if isinstance(state, LocalNonpersistentObject):
        return state.unwrap()
    if isinstance(state, Mapping):
        stored = common if isinstance(common, Mapping) else {}
        own = {key: item for key, item in state.items() if _has_place(item) and not _is_of(item, lacking)}
        return {**stored, **{key: _merged(stored.get(key), item, lacking) for key, item in own.items()}}
    if isinstance(state, (list, tuple)):
        is_alike = isinstance(common, (list, tuple)) and len(common) == len(state)
        pairs = zip(common if is_alike else [None] * len(state), state, strict=True)
        return type(state)(_merged(one, item, lacking) for one, item in pairs if not _is_of(item, lacking))
    return common


def _has_place(value: Any) -> bool:
    """True if the value is or contains something other than plain values."""
    if isinstance(value, Mapping):
        return any(map(_has_place, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_place, value))
    return isinstance(value, _NOT_PLAIN)


offer(
    globals(),
    "CheckpointingException LocalNonpersistentObject ShardedBase ShardedObject ShardedStateDict ShardedTensor",
    "ShardedTensorFactory add_prefix_for_sharding apply_factories apply_factory_merges apply_prefix_mapping",
    "is_main_replica replace_prefix_for_sharding",
)
