"""Broadcast of the tensors that one rank has read to its tensor-parallel group."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication import collectives
from shardwise.core.communication.agreement import check_same
from shardwise.core.communication.context import device_of
from shardwise.core.errors import DataError
from shardwise.megatron.core.parallel_state import resolve_tensor_model_parallel_group
from shardwise.megatron.errors import AssertedDataError

__all__ = ["broadcast_data"]

# Unused: tensors may have any number of dimensions. Programs import it despite the underscore.
_MAX_DATA_DIM = 5


def broadcast_data(
    keys: Sequence[str], data: Mapping[str, Tensor] | None, datatype: torch.dtype, tp_group: ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Broadcast the first rank's tensors to every rank of the group.

    Collective: an all-gather of three numbers per rank, which checks that the ranks agree, a broadcast of the shapes
    and a broadcast of all values together.

    Args:
        keys: keys of the tensors, the same on every rank.
        data: tensors of any shape, including empty and scalar ones, on the group's first rank; ignored on other ranks,
            which may pass None. Not modified.
        datatype: dtype of all tensors.
        tp_group: tensor-parallel group; the ambient one if None.

    Returns:
        The tensors by key, in one storage, on the group's device: the current accelerator with NCCL, else the CPU.

    Raises:
        AssertedDataError: on every rank, if the first rank lacks a key or a value is not a tensor of that dtype.
        DesyncError: on every rank, if the ranks request different keys or dtypes.
        TopologyError: no group is given and none is initialised.
    """
    group = resolve_tensor_model_parallel_group(tp_group)
    keys = list(keys)
    shapes, payload = _exchange_shapes(keys, data, datatype, group)
    sizes = [math.prod(shape) for shape in shapes]
    if group.rank() != 0:
        payload = torch.empty(sum(sizes), dtype=datatype, device=payload.device)
    if payload.numel():
        # Sent as bytes, because no backend supports every dtype.
        collectives.broadcast_(payload.view(torch.uint8), group=group)
    parts = payload.split(sizes)
    return {key: part.view(shape) for key, part, shape in zip(keys, parts, shapes, strict=True)}


def _build_key_size_numel_dictionaries(
    keys: Sequence[str], data: Mapping[str, Tensor] | None, tp_group: ProcessGroup | None = None
) -> tuple[dict[str, list[int]], dict[str, int], int]:
    """Return the shapes of the first rank's tensors, their numbers of elements, and the total, on every rank.

    Collective, like ``broadcast_data`` without the values.
    """
    keys = list(keys)
    shapes, _ = _exchange_shapes(keys, data, None, resolve_tensor_model_parallel_group(tp_group))
    sizes = {key: math.prod(shape) for key, shape in zip(keys, shapes, strict=True)}
    return dict(zip(keys, shapes, strict=True)), sizes, sum(sizes.values())


def _exchange_shapes(
    keys: list[str], data: Any, datatype: torch.dtype | None, group: ProcessGroup
) -> tuple[list[list[int]], Tensor]:
    """Return the shapes of the first rank's tensors, and on the first rank all values if ``datatype`` is given.

    An error on the first rank is raised on every rank.
    """
    device = device_of(group)
    error: Exception | None = None
    header, payload = b"", torch.empty(0, dtype=datatype, device=device)
    if group.rank() == 0:
        try:
            tensors = _checked(keys, data, datatype)
            header = json.dumps([list(tensor.shape) for tensor in tensors]).encode()
            if datatype is not None:
                # Always a copy, so that no rank gets its input itself.
                payload = torch.cat([tensor.detach().reshape(-1).to(device) for tensor in tensors] or [payload])
        except Exception as caught:
            error = caught
            header = str(caught if isinstance(caught, DataError) else f"broadcast_data: {caught!r}").encode()
    asked = f"{keys} of {datatype}"
    digest = int.from_bytes(hashlib.sha256(asked.encode()).digest()[:8], "big", signed=True)
    own = torch.tensor([[digest, error is not None, len(header)]], dtype=torch.int64, device=device)
    digests, failed, lengths = collectives.all_gather(own, group=group).unbind(1)
    if (digests != digest).any():
        # All ranks see the difference, so they can exchange the values for the message.
        check_same(asked, "what broadcast_data is to hand out", group=group)
    packed = torch.empty(int(lengths[0]), dtype=torch.uint8, device=device)
    if group.rank() == 0:
        packed.copy_(torch.tensor(list(header), dtype=torch.uint8))
    header = bytes(collectives.broadcast_(packed, group=group).tolist())
    if failed[0]:
        raise error if isinstance(error, DataError) else AssertedDataError(header.decode()) from error
    return json.loads(header), payload


def _check_data_types(keys: Sequence[str], data: Mapping[str, Tensor], target_dtype: torch.dtype) -> None:
    """Raise AssertedDataError unless ``data`` has a tensor of ``target_dtype`` for each of ``keys``."""
    _checked(keys, data, target_dtype)


def _checked(keys: Sequence[str], data: Any, datatype: torch.dtype | None) -> list[Tensor]:
    if not isinstance(data, Mapping):
        raise AssertedDataError(
            f"broadcast_data: the group's first rank has {type(data).__name__}, not a dict of tensors"
        )
    tensors = []
    for key in keys:
        if key not in data:
            raise AssertedDataError(f"broadcast_data: the group's first rank has no {key!r}, only {list(data)}")
        value = data[key]
        if not isinstance(value, Tensor):
            raise AssertedDataError(
                f"broadcast_data: {key!r} is of {type(value).__name__}; it must be a tensor of {datatype or 'a dtype'}"
            )
        if datatype is not None and value.dtype != datatype:
            raise AssertedDataError(f"broadcast_data: {key!r} is of {value.dtype}; all of {keys} must be of {datatype}")
        tensors.append(value)
    return tensors
