"""The base classes of modules: a group, parameters from layouts, and checkpoint state."""

import copy
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core import sharded_state
from shardwise.core.communication.context import default_device
from shardwise.core.errors import ShardingError
from shardwise.core.initialization import InitMethod, initialize_shard_
from shardwise.core.sharding import ParamLayout, ParamShard, Replicas, ShardedOffset, is_copy_by

# Attributes of a parameter for the sums of its gradients, which a copy does not have.
_OF_GRADIENTS = {"main_grad", "grad_added_to_main_grad", "take_output_gradient", "take_gradient_of_source"}


class GroupModule(nn.Module):
    """A module that holds process groups.

    ``copy.deepcopy`` (for moving averages, or a reference model) copies parameters and buffers. The copy shares the
    groups, because a group cannot be copied. Parameters keep attributes that a program set on them, which PyTorch's
    copy of a parameter loses. Gradients are not copied.

    ``pickle`` and ``torch.save`` of the module raise ShardingError, because a group belongs to one process. Save
    ``state_dict()`` or a checkpoint instead.
    """

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))
        copied.__setstate__(vars(self).copy())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardingError(
            f"a {type(self).__name__} cannot be pickled: it holds process groups, which are of this process alone; "
            "save its parameters, torch.save(model.state_dict(), PATH), or a checkpoint (shardwise.storage.checkpoint)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        for module in self.modules():
            for name, value in vars(module).items():
                if isinstance(value, ProcessGroup):
                    memo[id(value)] = value
                elif name == "_weight_gradient_hooks" and value is not None:
                    memo[id(value)] = None
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        for own, other in zip(self.parameters(), copied.parameters(), strict=True):
            kept = {name: value for name, value in vars(own).items() if name not in _OF_GRADIENTS}
            vars(other).update(copy.deepcopy(kept, memo))
        return copied


def parameter_device(group: ProcessGroup, *, on_cpu: bool = False) -> torch.device:
    """Return the device for the parameters of a layer of ``group``: PyTorch's default, or the GPU of a GPU group.

    With ``on_cpu`` it is PyTorch's default device for every group.
    """
    # A GPU group may not be able to communicate CPU tensors.
    return torch.get_default_device() if on_cpu else default_device(group)


def viewless(output: Tensor) -> Tensor:
    """Return a model's output as a tensor that is not a view, in the same memory, which must have no other user.

    PyTorch forbids in-place operations on some views. Under ``fully_shard`` such an operation also removes the hook
    that gathers the parameters for the backward, and PyTorch warns about every view.
    """
    if torch.compiler.is_compiling() or not output._is_view():
        return output
    # PyTorch's own matrix product returns its rows like this: recorded by autograd, but without a base.
    unviewed: Tensor = torch.ops.aten._unsafe_view(output, output.shape)
    return unviewed


class ShardedModule(GroupModule):
    """A layer whose parameters are split over a group, or held whole by each of its ranks.

    Args:
        group: the ranks that share the layer.
        device: device of the parameters; ``parameter_device`` if None.
        dtype: dtype of the parameters; PyTorch's default if None.
        initialize: whether to initialize the parameters in the constructor.
        init_on_cpu: whether to draw initial values on the CPU, so that they do not depend on the device.

    Attributes:
        group: the ranks that share the layer.
        param_layouts: position of this rank's part in each whole parameter, by the parameter's name.
        param_replicas: by name, the ranks that hold the same values, and the ranks over which the gradient is summed.
        initializes, init_on_cpu: the arguments ``initialize`` and ``init_on_cpu``.
    """

    # True for a vocabulary, whose padding in a checkpoint may differ from this layer's.
    _allow_shape_mismatch = False

    def __init__(
        self,
        group: ProcessGroup,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        initialize: bool = True,
        init_on_cpu: bool = False,
    ) -> None:
        super().__init__()
        self.group = group
        self.param_layouts: dict[str, ParamLayout] = {}
        self.param_replicas: dict[str, Replicas] = {}
        self._made_as = (device, dtype)
        self.initializes = initialize
        self.init_on_cpu = init_on_cpu
        self._init_methods: dict[str, InitMethod] = {}

    def _device(self) -> torch.device:
        device = self._made_as[0]
        return parameter_device(self.group, on_cpu=self.init_on_cpu) if device is None else torch.device(device)

    def _make_parameter(
        self,
        name: str,
        layout: ParamLayout | None,
        init_method: InitMethod,
        replicas: Replicas | None = None,
        *,
        partial_gradient: bool = False,
    ) -> None:
        """Create parameter ``name``, or none if ``layout`` is None; the ranks sum its gradient if it is partial."""
        if layout is None:
            self.register_parameter(name, None)
            return
        self.param_layouts[name] = layout
        self._init_methods[name] = init_method
        self.param_replicas[name] = replicas or Replicas(summed_over=("tp",) if partial_gradient else ())
        shape = layout.local_shape(self.group.rank())
        self.register_parameter(name, Parameter(torch.empty(shape, dtype=self._made_as[1], device=self._device())))
        self._made(name)
        if self.initializes:
            self._initialize(name)

    def _made(self, name: str) -> None:
        """Hook for subclasses, called when parameter ``name`` was created or replaced and has no values yet."""

    def _initialize(self, name: str) -> None:
        param, layout = getattr(self, name), self.param_layouts[name]
        initialize_shard_(param, layout, self.group.rank(), self._init_methods[name], on_cpu=self.init_on_cpu)

    def reset_parameters(self) -> None:
        """Set the parameters to their initial values.

        Parameters on the meta device are first allocated on the layer's device (use ``to_empty`` for another one). The
        values are those of a new layer on that device, given the same state of the generator.
        """
        for name in self.param_layouts:
            param = getattr(self, name)
            if param is None:
                continue
            if param.is_meta:
                empty = torch.empty(param.shape, dtype=param.dtype, device=self._device())
                setattr(self, name, Parameter(empty, requires_grad=param.requires_grad))
            # `to_empty` may have replaced the parameter, too.
            self._made(name)
            self._initialize(name)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[ShardedOffset] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ParamShard]:
        """Return this rank's part of each parameter, with its position in the whole parameter.

        Args:
            prefix: prefix of each name, such as ``"decoder.layers.0.mlp.linear_fc1."``.
            sharded_offsets: ``(axis, index, count)`` of leading axes that stack this layer with others of one name.
            metadata: passed to submodules; ``dp_cp_group`` as in ``sharded_state.sharded_state_dict``.

        Raises:
            ShardingError: ``sharded_offsets`` contradict each other.
        """
        flags = self._allow_shape_mismatch, is_copy_by(metadata)
        rank, offsets, replicas = self.group.rank(), tuple(sharded_offsets), self.param_replicas
        entries = {
            prefix + name: ParamShard(prefix + name, param, layout, rank, offsets, *flags, replicas=replicas[name])
            for name, layout in self.param_layouts.items()
            if (param := getattr(self, name)) is not None
        }
        for name, child in self.named_children():
            entries |= sharded_state.sharded_state_dict(
                child, f"{prefix}{name}.", sharded_offsets, metadata, group=self.group
            )
        return entries
