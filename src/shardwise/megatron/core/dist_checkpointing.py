"""Megatron's distributed checkpoints in the engine's format: complete or absent, and without executable content.

A checkpoint folder holds the tensors of a state as safetensors and its plain values as JSON. Any layout can load it.
Checkpoints from Megatron itself cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, Self, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.agreement import decide
from shardwise.core.errors import CheckpointError, ConfigError, ShardingError
from shardwise.core.sharding import ParamLayout, ParamShard, ShardedOffset
from shardwise.megatron.absent import absent_names
from shardwise.megatron.surface import offer
from shardwise.storage import checkpoint
from shardwise.storage.checkpoint.comparing import StoredCheckpoint
from shardwise.storage.checkpoint.folder import held_latest

__getattr__ = absent_names(
    "dist_checkpointing.core",
    "dist_checkpointing.mapping",
    "dist_checkpointing.serialization",
    "dist_checkpointing.utils",
    "dist_checkpointing.validation",
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
    """Whether ``load`` ignores tensors that only the checkpoint has, or raises.

    Tensors that only the state has are always an error. Megatron's other values, which log or return names, are not
    supported.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"


CheckpointingException = CheckpointError
# Programs ask whether an entry of a state is a shard.
ShardedBase = ParamShard


def is_main_replica(replica_id: int | tuple[int, ...]) -> bool:
    """True for 0, and for a tuple of zeros."""
    return not any((replica_id,) if isinstance(replica_id, int) else replica_id)


class ShardedTensor(ParamShard):
    """A ``ParamShard`` made from Megatron's description of a shard."""

    def __new__(cls, key: str, data: Tensor, layout: ParamLayout, *more: Any, **options: Any) -> Self:
        if not isinstance(layout, ParamLayout):
            raise ShardingError(
                f"{key}: the arguments of Megatron's ShardedTensor(key, data, dtype, local_shape, ...) are not "
                "offered; call ShardedTensor.from_rank_offsets(key, data, (axis, index, count), ...) instead"
            )
        return cast(Self, super().__new__(cls, key, data, layout, *more, **options))

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: Tensor,
        *rank_offsets: ShardedOffset,
        replica_id: Any = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        allow_shape_mismatch: bool = False,
    ) -> ShardedTensor:
        """Describe the shard of a tensor that is split into equal parts.

        Args:
            key: name in the checkpoint.
            data: this rank's part.
            rank_offsets: ``(axis, index, count)``: the tensor is split into ``count`` parts along the axis, and this is
                part ``index``. One for each prepended axis, and at most one for another axis.
            replica_id: no effect; the layout determines which copy is written.
            prepend_axis_num: number of leading axes that ``data`` lacks.
            flattened_range: None.
            allow_shape_mismatch: whether the stored tensor may have another size along the split axis when loading.

        Raises:
            ShardingError: the arguments do not describe a supported shard.
        """
        lead = tuple(offset for offset in sorted(rank_offsets) if offset[0] < prepend_axis_num)
        cut = [offset for offset in rank_offsets if offset[0] >= prepend_axis_num and offset[2] > 1]
        if len(cut) > 1 or flattened_range is not None or len(lead) < prepend_axis_num:
            raise ShardingError(
                f"{key}: rank_offsets {list(rank_offsets)}, prepend_axis_num {prepend_axis_num} and flattened_range "
                f"{flattened_range}; give one for each prepended axis and at most one other, and no flattened_range"
            )
        if not cut:
            return cls(key, data, ParamLayout.replicated(data.shape, 1), 0, lead, allow_shape_mismatch)
        axis, index, count = cut[0]
        dim = axis - prepend_axis_num
        if dim >= data.dim() or not 0 <= index < count:
            raise ShardingError(f"{key}: {cut[0]} is no part of a tensor whose part has shape {list(data.shape)}")
        shape = [*data.shape[:dim], data.size(dim) * count, *data.shape[dim + 1 :]]
        layout = ParamLayout.split(shape, dim, count, sizes=(data.size(dim),) * count)
        return cls(key, data, layout, index, lead, allow_shape_mismatch)


class LocalNonpersistentObject:
    """A value that is not stored; ``load`` returns this rank's value."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """Return the value."""
        return self.obj


ShardedStateDict = dict[str, Any]
"""A state: dicts and lists of sharded tensors and plain values."""

_NOT_PLAIN = (ParamShard, LocalNonpersistentObject)


class ShardedObject:
    """Not supported: Megatron pickles such an object, but checkpoints here have no executable content."""

    def __init__(self, key: str, *_: Any, **__: Any) -> None:
        raise ConfigError(
            f"ShardedObject {key!r} would be stored pickled, which is not offered here; put plain values (numbers, "
            "text, lists, dicts) into the state, or tensors as ShardedTensor"
        )


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
        common = _without_shards(sharded_state_dict, "", shards)
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
) -> dict[str, Any]:
    """Load a state from a folder written by ``save``, at any layout. Collective.

    Args:
        sharded_state_dict: state whose tensors are overwritten.
        checkpoint_dir: the folder.
        sharded_strategy, common_strategy, validate_access_integrity: no effect, as in ``save``.
        strict: whether tensors that only the checkpoint has are an error.
        process_group: group of the ranks that load; None means all ranks.

    Returns:
        The saved plain values, with this rank's tensors in their places in ``sharded_state_dict``.

    Raises:
        ConfigError: an unsupported value of ``strict``.
        CheckpointError: no checkpoint, a damaged one, or one of another library or model; the same message on every
            rank.
    """
    folder, group = Path(checkpoint_dir), process_group or _world()
    try:
        strict = StrictHandling(strict)
    except ValueError as error:
        raise ConfigError(
            f"strict is {strict!r}; it must be one of {', '.join(each.value for each in StrictHandling)}"
        ) from error
    shards: dict[str, ParamShard] = {}

    def divide() -> None:
        _without_shards(sharded_state_dict, "", shards, takes_all=True)

    with ExitStack() as stack:
        path = decide(divide, lambda _: stack.enter_context(_checkpoint_in(folder)), group=group)
        meta = checkpoint.load(path, shards, group=group, allow_extra=strict is StrictHandling.ASSUME_OK_UNEXPECTED)
    result: dict[str, Any] = _merged(_common_in(meta), sharded_state_dict)
    return result


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


def apply_prefix_mapping(sharded_state_dict: Any, prefix_map: Mapping[str, str]) -> None:
    """Replace the first prefix of ``prefix_map`` that a name in the checkpoint has, for all shards of a state."""
    shards: dict[str, ParamShard] = {}
    _without_shards(sharded_state_dict, "", shards, takes_all=True)
    for shard in shards.values():
        before = next((prefix for prefix in prefix_map if shard.key.startswith(prefix)), None)
        if before is not None:
            shard.key = prefix_map[before] + shard.key.removeprefix(before)


def add_prefix_for_sharding(sharded_state_dict: Any, prefix: str) -> None:
    """Put ``prefix`` before the names in the checkpoint of all shards of a state."""
    apply_prefix_mapping(sharded_state_dict, {"": prefix})


def replace_prefix_for_sharding(sharded_state_dict: Any, old_prefix: str, new_prefix: str) -> None:
    """Replace the prefix of the names in the checkpoint of all shards of a state.

    Raises:
        CheckpointError: a name has another prefix. Nothing has changed.
    """
    shards: dict[str, ParamShard] = {}
    _without_shards(sharded_state_dict, "", shards, takes_all=True)
    for shard in shards.values():
        if not shard.key.startswith(old_prefix):
            raise CheckpointError(f"{shard.key!r} does not begin with {old_prefix!r}; give a prefix of all names")
    apply_prefix_mapping(sharded_state_dict, {old_prefix: new_prefix})


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
    if isinstance(value, (list, tuple)):
        items_ = (_without_shards(item, f"{name}.{i}", shards, takes_all=takes_all) for i, item in enumerate(value))
        return tuple(items_) if isinstance(value, tuple) else list(items_)
    return _plain(value, name, takes_all=takes_all)


def _plain(value: Any, name: str, *, takes_all: bool) -> Any:
    if isinstance(value, tuple):
        return tuple(_plain(item, name, takes_all=takes_all) for item in value)
    if not (takes_all or value is None or isinstance(value, (bool, int, float, str))):
        raise CheckpointError(
            f"the state's {name!r} is a {type(value).__name__}; give tensors as ShardedTensor, and other values as "
            "numbers, text, lists and dicts"
        )
    return value


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
                f"ranks disagree on a plain value of the state, of which one is stored: {name!r} is {wanted} on "
                f"rank 0 and {found} on rank {rank}; leave it out, store it as a ShardedTensor or, if rank 0's is "
                "the right one, remove it in preprocess_common_before_consistancy_check"
            )


def _merged(common: Any, state: Any) -> Any:
    """Combine the stored values with the state's tensors."""
    if isinstance(state, ParamShard):
        return state.data.detach()
    if isinstance(state, LocalNonpersistentObject):
        return state.unwrap()
    if isinstance(state, Mapping):
        stored = common if isinstance(common, Mapping) else {}
        own = {key: _merged(stored.get(key), item) for key, item in state.items() if _has_place(item)}
        return {**stored, **own}
    if isinstance(state, (list, tuple)):
        is_alike = isinstance(common, (list, tuple)) and len(common) == len(state)
        items = [
            _merged(one, item) for one, item in zip(common if is_alike else [None] * len(state), state, strict=True)
        ]
        return tuple(items) if isinstance(state, tuple) else items
    return common


def _has_place(value: Any) -> bool:
    """True if the value is or contains something other than plain values."""
    if isinstance(value, Mapping):
        return any(map(_has_place, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_place, value))
    return isinstance(value, _NOT_PLAIN)


offer(globals(), "ShardedStateDict")
