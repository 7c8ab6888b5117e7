"""The base classes of modules: a group, parameters made from layouts, and state for checkpoints."""

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


class GroupModule(nn.Module):
    """A module that holds process groups.

    ``copy.deepcopy`` (for moving averages, or a reference model) copies parameters and buffers. The groups are the
    same, since a group cannot be copied; and parameters keep attributes that a program gave them, which PyTorch's copy
    of a parameter loses. Gradients are not copied.

    ``pickle`` and ``torch.save`` of the module itself raise a ShardingError, as a group is of one process: save its
    ``state_dict()``, or a checkpoint.
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
            for value in vars(module).values():
                if isinstance(value, ProcessGroup):
                    memo[id(value)] = value
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        for own, other in zip(self.parameters(), copied.parameters(), strict=True):
            vars(other).update(copy.deepcopy(vars(own), memo))
        return copied


def parameter_device(group: ProcessGroup, *, on_cpu: bool = False) -> torch.device:
    """Device of the parameters of a layer that ``group`` shares: PyTorch's default device, or the GPU of a GPU group.

    With ``on_cpu`` the default device for every group.
    """
    # Such a group may not be able to talk about anything that lies on the CPU.
    return torch.get_default_device() if on_cpu else default_device(group)


def viewless(output: Tensor) -> Tensor:
    """The output of a model in the same memory, which has no other reader, and not as a view.

    PyTorch refuses in-place operations on some views, and under ``fully_shard`` they lose what gathers the parameters
    for the backward; it warns of every view there.
    """
    if torch.compiler.is_compiling() or not output._is_view():
        return output
    # As PyTorch's own matrix product returns its rows: recorded by autograd, and without a base.
    unviewed: Tensor = torch.ops.aten._unsafe_view(output, output.shape)
    return unviewed


class ShardedModule(GroupModule):
    """A layer whose parameters are split over a group, or held whole by each of its ranks.

    Args:
        group: the ranks that share the layer.
        device: where parameters are made; ``parameter_device`` if None.
        dtype: of the parameters; PyTorch's default if None.
        initialize: give parameters their initial values when they are made.
        init_on_cpu: draw initial values on the CPU, so that they do not depend on the device.

    Attributes:
        group: the ranks that share the layer.
        param_layouts: for each of the layer's parameters, the place of this rank's part in the whole one.
        param_replicas: for each of them, the ranks that hold the same, and those over which its gradient is summed.
        initializes, init_on_cpu: as ``initialize`` and ``init_on_cpu``.
    """

    # Of a vocabulary, whose padding may differ between a checkpoint and this layer.
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
        self, name: str, layout: ParamLayout | None, init_method: InitMethod, *, partial_gradient: bool = False
    ) -> None:
        """Make parameter ``name``, or none without a layout; a partial gradient is a part of a sum over the ranks."""
        if layout is None:
            self.register_parameter(name, None)
            return
        self.param_layouts[name] = layout
        self._init_methods[name] = init_method
        self.param_replicas[name] = Replicas(summed_over=("tp",) if partial_gradient else ())
        shape = layout.local_shape(self.group.rank())
        self.register_parameter(name, Parameter(torch.empty(shape, dtype=self._made_as[1], device=self._device())))
        self._made(name)
        if self.initializes:
            self._initialize(name)

    def _made(self, name: str) -> None:
        """For subclasses: parameter ``name`` was made, or made again, and has no values yet."""

    def _initialize(self, name: str) -> None:
        param, layout = getattr(self, name), self.param_layouts[name]
        initialize_shard_(param, layout, self.group.rank(), self._init_methods[name], on_cpu=self.init_on_cpu)

    def reset_parameters(self) -> None:
        """Give the parameters their initial values, as when the layer was made.

        Parameters on the meta device are first allocated where the layer makes its parameters (``to_empty`` chooses
        another device). The values are those that a layer made there would have had, if the generator is in the same
        state.
        """
        for name in self.param_layouts:
            param = getattr(self, name)
            if param is None:
                continue
            if param.is_meta:
                empty = torch.empty(param.shape, dtype=param.dtype, device=self._device())
                setattr(self, name, Parameter(empty, requires_grad=param.requires_grad))
            # `to_empty` may make new parameters too.
            self._made(name)
            self._initialize(name)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[ShardedOffset] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, ParamShard]:
        """This rank's part of each parameter, with its place in the whole.

        Args:
            prefix: put before each name, such as ``"decoder.layers.0.mlp.linear_fc1."``.
            sharded_offsets: ``(axis, index, count)`` of leading axes that stack this layer with others of one name.
            metadata: handed on to modules within; ``dp_cp_group`` as in ``sharded_state.sharded_state_dict``.

        Raises:
            ShardingError: ``sharded_offsets`` do not fit together.
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
