"""Megatron's messages between pipeline stages, for schedules of a program's own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.collectives import Transfer, exchange
from shardwise.core.communication.context import default_device
from shardwise.core.communication.transports.transport import Pending
from shardwise.core.errors import ConfigError
from shardwise.megatron.core.transformer.transformer_config import ModelParallelConfig

__all__ = ["P2PCommunicator", "is_single_shape"]

_FORWARD, _BACKWARD = 0, 1


def is_single_shape(x: Any) -> bool:
    """Whether ``x`` is the shape of one tensor, and no list of shapes."""
    is_list = isinstance(x, list | tuple) and len(x) > 0
    return isinstance(x, torch.Size) or (is_list and all(isinstance(size, int) for size in x))


class P2PCommunicator:
    """Sends hidden states to the next stage and gradients to the one before, and receives them.

    Stages lie on a circle: after the last one comes the first, as interleaved chunks need. Where a function has
    ``is_first_stage`` or ``is_last_stage`` and it is True, nothing crosses that end, and None is received. Of a list of
    tensors or shapes the result is a list.

    Args:
        pp_group: the stages.
        config: ``pipeline_dtype`` of what travels; ``params_dtype`` if None.

    Attributes:
        next_rank, prev_rank: global ranks of the neighbours.
        total_stages, current_stage: number of stages, and this one, from 0.
        is_pp_first_stage, is_pp_last_stage: whether it is the first, or the last.

    Raises:
        ConfigError: ``variable_seq_lengths``: both sides know the shape of what travels.
    """

    def __init__(self, pp_group: ProcessGroup, config: ModelParallelConfig) -> None:
        if config.variable_seq_lengths:  # type: ignore[attr-defined]
            raise ConfigError("variable_seq_lengths is set, and stages here exchange tensors of known shapes; unset it")
        self.pp_group, self.config = pp_group, config
        self.current_stage, self.total_stages = pp_group.rank(), pp_group.size()
        self.is_pp_first_stage = self.current_stage == 0
        self.is_pp_last_stage = self.current_stage == self.total_stages - 1
        self._next, self._prev = ((self.current_stage + step) % self.total_stages for step in (1, -1))
        self.next_rank = torch.distributed.get_global_rank(pp_group, self._next)
        self.prev_rank = torch.distributed.get_global_rank(pp_group, self._prev)
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """Hidden states of the stage before."""
        return _each(lambda shape: self._exchange(from_prev=shape)[0], tensor_shapes, at_end=is_first_stage)

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Gradients from the next stage."""
        return _each(lambda shape: self._exchange(from_next=shape)[1], tensor_shapes, at_end=is_last_stage)

    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        """Send hidden states to the next stage."""
        _each(lambda tensor: self._exchange(to_next=tensor), output_tensors, at_end=is_last_stage)

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        """Send gradients to the stage before."""
        _each(lambda tensor: self._exchange(to_prev=tensor), input_tensor_grads, at_end=is_first_stage)

    def send_forward_recv_backward(self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Send hidden states to the next stage, and receive the gradients of earlier ones from there."""

        def both(tensor: Tensor, shape: Any) -> Tensor | None:
            return self._exchange(to_next=tensor, from_next=shape)[1]

        return _each(both, output_tensors, tensor_shapes, at_end=is_last_stage)

    def send_backward_recv_forward(self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """Send gradients to the stage before, and receive the next hidden states from there."""

        def both(tensor: Tensor, shape: Any) -> Tensor | None:
            return self._exchange(to_prev=tensor, from_prev=shape)[0]

        return _each(both, input_tensor_grads, tensor_shapes, at_end=is_first_stage)

    def send_forward_recv_forward(
        self, output_tensor: Tensor | None, recv_prev: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        """Send hidden states on (unless None), and receive if ``recv_prev``.

        Returns:
            What was received or None; with ``overlap_p2p_comm`` also a list of objects to ``wait()`` for, before which
            neither tensor may be used.
        """
        works: list[Pending] | None = [] if overlap_p2p_comm else None
        received = self._exchange(to_next=output_tensor, from_prev=tensor_shape if recv_prev else None, works=works)[0]
        return received if works is None else (received, works)

    def send_backward_recv_backward(
        self, input_tensor_grad: Tensor | None, recv_next: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        """Send gradients back (unless None), and receive if ``recv_next``; see ``send_forward_recv_forward``."""
        works: list[Pending] | None = [] if overlap_p2p_comm else None
        shape = tensor_shape if recv_next else None
        received = self._exchange(to_prev=input_tensor_grad, from_next=shape, works=works)[1]
        return received if works is None else (received, works)

    def send_forward_backward_recv_forward_backward(
        self, output_tensor: Any, input_tensor_grad: Any, recv_prev: bool, recv_next: bool, tensor_shape: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """Both directions at once: the hidden states and the gradients that were received, or None."""
        shapes = tensor_shape if recv_prev else None, tensor_shape if recv_next else None
        return self._exchange(output_tensor, input_tensor_grad, *shapes)

    def _exchange(
        self,
        to_next: Tensor | None = None,
        to_prev: Tensor | None = None,
        from_prev: Any = None,
        from_next: Any = None,
        works: list[Pending] | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Send tensors and receive those of the shapes, at once; wait unless ``works`` takes what to wait for."""
        dtype = self.config.pipeline_dtype or self.config.params_dtype
        options: dict[str, Any] = {"dtype": dtype, "device": default_device(self.pp_group), "requires_grad": True}
        prev, after = (None if shape is None else torch.empty(*shape, **options) for shape in (from_prev, from_next))
        # Of two stages both neighbours are one rank, whose messages both sides put in this order.
        sends = ((to_next, self._next, _FORWARD), (to_prev, self._prev, _BACKWARD))
        receives = ((prev, self._prev, _FORWARD), (after, self._next, _BACKWARD))
        out, back = (
            [Transfer(tensor.detach().contiguous(), rank, tag) for tensor, rank, tag in each if tensor is not None]
            for each in (sends, receives)
        )
        for transfer in out:
            if transfer.tensor.dtype != dtype:
                raise ConfigError(f"a tensor of {transfer.tensor.dtype} is to be sent, and pipeline_dtype is {dtype}")
        sent, received = exchange(out, back, group=self.pp_group)
        if works is not None:
            works += [*sent, *received]
            return prev, after
        for pending in (*sent, *received):
            pending.wait()
        return prev, after


def _each(function: Callable[..., Any], *arguments: Any, at_end: bool) -> Any:
    """``function`` of each tensor and shape of lists, as a list; of one of each its result. None where ``at_end``."""
    lists = [each if isinstance(each, list | tuple) and not is_single_shape(each) else [each] for each in arguments]
    results = [None if at_end else function(*each) for each in zip(*lists, strict=True)]
    return results if lists[0] is arguments[0] else results[0]
