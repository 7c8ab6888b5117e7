"""Entries of a state for Megatron's distributed checkpoints: parts of tensors, and what becomes parts on the way."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor

from shardwise.core.errors import CheckpointError, ConfigError, ShardingError
from shardwise.core.sharding import ParamLayout, ParamShard, ShardedOffset
from shardwise.core.sharding.balanced import Interval
from shardwise.core.sharding.param_layout import Replicas
from shardwise.core.sharding.pieces import Piece, boxes_of_interval, shape_only
from shardwise.megatron.absent import HasInstances, absent_names
from shardwise.megatron.core.state_dicts import _items, dict_list_map_inplace
from shardwise.megatron.surface import offer

__getattr__ = absent_names("dist_checkpointing.utils")

ReplicaId = int | tuple[int, ...]
"""Number of a copy among the ranks that hold the same values, or one number for each dimension of copies."""

ShardedStateDict = dict[str, Any]
"""A state: dicts and lists of sharded tensors and plain values."""

StateDict = CommonStateDict = dict[str, Any]


def is_main_replica(replica_id: ReplicaId) -> bool:
    """True for 0, and for a tuple of zeros."""
    return not any((replica_id,) if isinstance(replica_id, int) else replica_id)


class ShardedBase(ABC):
    """Base class of entries, for ``isinstance``; the entries of this library's layers are instances too."""

    key: str
    data: Any


ShardedBase.register(ParamShard)


class _HasParamShards(HasInstances, type(ParamShard)):  # type: ignore[misc]
    """Class of ``ShardedTensor``, whose instances are also the entries of this library's layers."""


class ShardedTensor(ParamShard, metaclass=_HasParamShards):  # type: ignore[metaclass]
    """A box of a tensor, by Megatron's description of it.

    Args:
        key: name in the checkpoint.
        data: this rank's part; with prepended axes without them.
        dtype: that of ``data``.
        local_shape: shape of ``data``.
        global_shape: shape of the whole tensor, with prepended axes.
        global_offset: first index of this rank's part in every axis.
        axis_fragmentations: number of parts of every axis, or None for parts of different sizes; no effect.
        replica_id: number of the copy; no effect, because ranks that hold the same box agree on the one that writes.
        prepend_axis_num: number of leading axes that ``data`` lacks.
        allow_shape_mismatch: whether the stored tensor may have other sizes when loading. Missing elements stay
            unchanged.
        flattened_range: None.

    Raises:
        ShardingError: the arguments contradict each other.
    """

    implementation = ParamShard

    global_offset: tuple[int, ...]
    _local_shape: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId
    prepend_axis_num: int
    flattened_range: None

    def __new__(
        cls,
        key: str,
        data: Tensor,
        dtype: torch.dtype,
        local_shape: Sequence[int],
        global_shape: Sequence[int],
        global_offset: Sequence[int],
        axis_fragmentations: Sequence[int] | None,
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
        flattened_range: None = None,
    ) -> Self:
        shape, box = tuple(global_shape), (*(1,) * prepend_axis_num, *local_shape)
        fits = len(box) == len(shape) == len(global_offset) and all(
            start >= 0 and start + size <= whole for start, size, whole in zip(global_offset, box, shape, strict=True)
        )
        if not fits or tuple(data.shape) != tuple(local_shape) or data.dtype != dtype or flattened_range is not None:
            raise ShardingError(
                f"{key}: data of {data.dtype} and shape {list(data.shape)} is no part of the tensor that is described: "
                f"dtype {dtype}, local_shape {list(local_shape)}, global_shape {list(shape)}, global_offset "
                f"{list(global_offset)}, prepend_axis_num {prepend_axis_num}, flattened_range {flattened_range}"
            )
        self = cast(Self, shape_only(cls, shape, dtype, data.device))
        self.key, self.rank, self._data = key, 0, data
        self._layout = ParamLayout.replicated(shape[prepend_axis_num:], 1)
        lead = zip(range(prepend_axis_num), global_offset, shape, strict=False)
        self.sharded_offsets, self.allow_shape_mismatch = tuple(lead), allow_shape_mismatch
        self.is_copy, self.interval, self.replicas = False, None, Replicas()
        self._local_shape, self.global_offset = tuple(local_shape), tuple(global_offset)
        self.axis_fragmentations = None if axis_fragmentations is None else tuple(axis_fragmentations)
        self.replica_id, self.prepend_axis_num, self.flattened_range = replica_id, prepend_axis_num, flattened_range
        return self

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: Tensor,
        *rank_offsets: ShardedOffset,
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        **options: Any,
    ) -> Self:
        """Describe the shard of a tensor that is split into equal parts.

        Args:
            key, data, replica_id, prepend_axis_num, flattened_range: as in the class.
            rank_offsets: ``(axis, index, count)``: the tensor is split into ``count`` parts along the axis, and this is
                part ``index``. One for each prepended axis, and at most one for another axis.
            options: ``allow_shape_mismatch``, as in the class.

        Raises:
            ShardingError: the arguments do not describe a part.
        """
        local = (*(1,) * prepend_axis_num, *data.shape)
        cuts = {axis: (index, count) for axis, index, count in rank_offsets if 0 <= index < count}
        lacking = {*range(prepend_axis_num)} - cuts.keys()
        if len(cuts) < len(rank_offsets) or lacking or not cuts.keys() <= {*range(len(local))}:
            raise ShardingError(
                f"{key}: rank_offsets are {list(rank_offsets)}, with prepend_axis_num {prepend_axis_num} and data of "
                f"shape {list(data.shape)}; give one for each prepended axis and at most one for each other "
                "axis, with an index under its count"
            )
        index, count = zip(*(cuts.get(axis, (0, 1)) for axis in range(len(local))), strict=True) if local else ((), ())
        shape = tuple(size * number for size, number in zip(local, count, strict=True))
        offset = tuple(size * number for size, number in zip(local, index, strict=True))
        own = (data.dtype, data.shape, shape, offset, count)
        return cls(key, data, *own, replica_id, prepend_axis_num, flattened_range=flattened_range, **options)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part, without prepended axes."""
        return self._local_shape

    def accepts(self, stored_shape: Sequence[int]) -> bool:
        """True if a tensor of this shape can be loaded."""
        alike = len(stored_shape) == len(self.global_shape)
        return alike if self.allow_shape_mismatch else tuple(stored_shape) == self.global_shape

    def pieces(self) -> list[Piece]:
        """Return the boxes of the tensor that this rank holds, with views of their values."""
        if self.interval is not None:
            return [piece for piece, _ in self._pieces_of_interval(self.interval)]
        is_empty_part = not self.data.numel() and 0 not in self.global_shape
        return [] if is_empty_part else [(self.global_offset, self.data.detach()[(None,) * self.prepend_axis_num])]

    def _pieces_of_interval(self, interval: Interval) -> list[tuple[Piece, bool]]:
        lead, first = self.global_offset[: self.prepend_axis_num], self.global_offset[self.prepend_axis_num :]
        boxes = boxes_of_interval(self.local_shape, interval)
        parts = self.data.detach().split([torch.Size(box.sizes).numel() for box in boxes])
        places = [tuple(map(sum, zip(first, box.offsets, strict=True))) for box in boxes]
        ones = (1,) * len(lead)
        return [
            (((*lead, *place), part.view((*ones, *box.sizes))), True)
            for place, part, box in zip(places, parts, boxes, strict=True)
        ]

    def _but(self, **changes: Any) -> Self:
        data = changes.get("data", self.data)
        whole = torch.empty(self.local_shape, dtype=data.dtype, device="meta") if "interval" in changes else data
        own = (self.local_shape, self.global_shape, self.global_offset, self.axis_fragmentations, self.replica_id)
        entry = type(self)(self.key, whole, data.dtype, *own, self.prepend_axis_num, self.allow_shape_mismatch)
        entry._data = data
        for name, value in changes.items():
            if name != "data":
                setattr(entry, name, value)
        return entry

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"ShardedTensor(key={self.key!r}, local_shape={self.local_shape}, global_shape={self.global_shape}, "
            f"global_offset={self.global_offset}, dtype={self.dtype}, device={self.device})"
        )


@dataclass
class ShardedTensorFactory(ShardedBase):
    """A tensor that is stored as other tensors: ``save`` and ``load`` build entries of it, and ``load`` joins them.

    Attributes:
        key: first argument of ``build_fn``.
        data: the tensor.
        build_fn: function of ``key``, ``data``, ``replica_id`` and ``flattened_range`` that returns a state of entries,
            whose data ``load`` overwrites.
        merge_fn: function of the loaded state, with tensors for entries, that returns the value in the result of
            ``load``.
        replica_id: number of the copy, for ``build_fn``.
        flattened_range: None.
    """

    key: str
    data: Tensor
    build_fn: Callable[..., Any]
    merge_fn: Callable[[Any], Any]
    replica_id: ReplicaId = 0
    flattened_range: Any = None

    def build(self) -> Any:
        """Return the state of entries."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)


class LocalNonpersistentObject:
    """A value that is not stored; ``load`` returns this rank's value."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """Return the value."""
        return self.obj


class ShardedObject(ShardedBase):
    """Not supported: Megatron pickles such an object, but checkpoints here have no executable content."""

    def __init__(self, key: str, *_: Any, **__: Any) -> None:
        raise ConfigError(
            f"ShardedObject {key!r} would be stored pickled, which is not offered here; put plain values (numbers, "
            "text, lists, dicts) into the state, or tensors as ShardedTensor"
        )


def apply_factories(sharded_state_dict: Any) -> None:
    """Replace the factories in nested dicts and lists by the states that they build, in place."""
    dict_list_map_inplace(
        lambda item: item.build() if isinstance(item, ShardedTensorFactory) else item, sharded_state_dict
    )


def apply_factory_merges(x1: Any, x2: Any, key: tuple[Any, ...] = ()) -> Any:
    """Join what factories have built: the inverse of ``apply_factories``, in place.

    Args:
        x1: state with loaded tensors.
        x2: state with factories where ``x1`` has what they built.
        key: path of ``x1`` in the whole state.

    Returns:
        ``x1``, or the result of ``x2`` if it is a factory.

    Raises:
        CheckpointError: ``x1`` lacks a place of ``x2``.
    """
    if isinstance(x2, ShardedTensorFactory):
        return x2.merge_fn(x1)
    for place, item in _items(x2) if isinstance(x2, (dict, list)) else []:
        try:
            part = x1[place]
        except (LookupError, TypeError) as error:
            raise CheckpointError(f"the state has nothing at {[*key, place]}, where a factory is to join it") from error
        x1[place] = apply_factory_merges(part, item, (*key, place))
    return x1


def entries_in(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries in nested dicts, lists and tuples, each after its path of keys, which dots join."""
    if isinstance(state, ShardedBase):
        yield path, state
    elif isinstance(state, (Mapping, list, tuple)):
        for key, item in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from entries_in(item, f"{path}.{key}" if path else str(key))


def apply_prefix_mapping(sharded_state_dict: Any, prefix_map: Mapping[str, str]) -> None:
    """Replace the first prefix of ``prefix_map`` that a name in the checkpoint has, for all entries of a state."""
    for _, entry in entries_in(sharded_state_dict):
        before = next((prefix for prefix in prefix_map if entry.key.startswith(prefix)), None)
        if before is not None:
            entry.key = prefix_map[before] + entry.key.removeprefix(before)


def add_prefix_for_sharding(sharded_state_dict: Any, prefix: str) -> None:
    """Put ``prefix`` before the names in the checkpoint of all entries of a state."""
    apply_prefix_mapping(sharded_state_dict, {"": prefix})


def replace_prefix_for_sharding(sharded_state_dict: Any, old_prefix: str, new_prefix: str) -> None:
    """Replace the prefix of the names in the checkpoint of all entries of a state.

    Raises:
        CheckpointError: a name has another prefix. Nothing has changed.
    """
    for _, entry in entries_in(sharded_state_dict):
        if not entry.key.startswith(old_prefix):
            raise CheckpointError(f"{entry.key!r} does not begin with {old_prefix!r}; give a prefix of all names")
    apply_prefix_mapping(sharded_state_dict, {old_prefix: new_prefix})


offer(globals(), "CommonStateDict ReplicaId ShardedStateDict StateDict")
