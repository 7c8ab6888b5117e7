"""Transports, which carry tensors between ranks: the interface, the implementations and the selection.

- ``trees.TreeTransport``, for the sums of a group that sums in parts;
- ``torch_distributed.Traced``, under ``torch.compile``;
- ``shared_memory``, between CPU ranks of one machine;
- ``torch_distributed``, PyTorch's own collectives, everywhere else.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.communication.context import backend_of, context_of
from shardwise.core.communication.transports import torch_distributed
from shardwise.core.communication.transports.shared_memory import CARRIED, REDUCTIONS, SharedMemory, channel_of
from shardwise.core.communication.transports.transport import Transport

__all__ = ["OF_SOME_GROUPS", "SharedMemory", "Transport", "choose_transport", "transport_name"]

# Transports that some groups have (``GroupContext.transports``), by name: torch.compile traces no class that a group's
# context holds.
OF_SOME_GROUPS: dict[str, Any] = {}


def choose_transport(operation: str, tensor: Tensor, group: ProcessGroup, op: Any = None) -> Transport:
    """Select the transport of a call.

    Args:
        operation: a method of ``Transport``.
        tensor: this rank's contribution.
        group: the ranks that take part; more than one.
        op: the ``ReduceOp`` of an all-reduce.
    """
    context = context_of(group)
    for name in context.transports:
        transport = OF_SOME_GROUPS[name]
        if transport.carries(operation, group, op):
            return cast(Transport, transport)
    if torch.compiler.is_compiling():
        return torch_distributed.Traced
    # A tensor subclass (fake, functional, distributed) has no memory that could be copied.
    if tensor.is_cpu and type(tensor) in (Tensor, Parameter) and tensor.dtype in CARRIED[operation]:
        channel: Transport | None = context.channel if context.has_tried_to_share else channel_of(group)
        if channel is not None and (op is None or op in REDUCTIONS):
            return channel
    return torch_distributed


def transport_name(group: ProcessGroup, device: torch.device) -> str:
    """Name the transport of tensors on ``device``: ``"shared memory"``, or the backend's name. Collective."""
    if device.type == "cpu" and channel_of(group) is not None:
        return "shared memory"
    return backend_of(group, device) or f"no backend for {device.type}"
