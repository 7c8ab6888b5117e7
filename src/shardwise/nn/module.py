"""The base classes of modules: a group, parameters made from layouts, state for checkpoints, and fixed tensors."""

import copy
from collections.abc import Iterator, Sequence
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

    ``copy.deepcopy`` (for moving averages, or a reference model) gives one with parameters and buffers of its own. The
    groups are the same, since a group cannot be copied; and parameters keep attributes that a program gave them, which
    PyTorch's copy of a parameter loses. As there, gradients are not copied.

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
    """Where the parameters of a layer are made: PyTorch's default device, or the GPU of a group that is of GPUs.

    Args:
        group: the ranks that share the layer.
        on_cpu: the default device whatever the group is of.
    """
    # Such a group may not be able to talk about anything that lies on the CPU.
    return torch.get_default_device() if on_cpu else default_device(group)


def viewless(output: Tensor) -> Tensor:
    """The same elements in the same memory, as no view: what a model returns.

    PyTorch refuses in-place operations on some views, and under ``fully_shard`` they lose what gathers the parameters
    for the backward; it warns of every view there.

    Args:
        output: whose memory nobody else reads, neither a backward nor the caller.
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
        param_layouts: for each of the layer's own parameters, where this rank's part lies in the whole one.
        param_replicas: for each of them, which ranks hold the same, and over which its gradient is summed.
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
        self, name: str, layout: ParamLayout, init_method: InitMethod, *, partial_gradient: bool = False
    ) -> None:
        """Make parameter ``name``; ``partial_gradient``: what each rank computes of its gradient is a part of a sum."""
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

    def _wrong_width(self, input_: Tensor, width: int) -> ShardingError:
        return ShardingError(
            f"the input has shape {list(input_.shape)}; rank {self.group.rank()} of {self.group.size()} needs "
            f"{width} features in the last dimension"
        )

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
        """This rank's part of each parameter, with where it lies in the whole.

        Args:
            prefix: put before each name, such as ``"decoder.layers.0.mlp.linear_fc1."``.
            sharded_offsets: ``(axis, index, count)`` of leading axes that stack this layer with others of one name.
            metadata: handed on to modules within; ``dp_cp_group`` as in ``sharded_state.sharded_state_dict``.

        Returns:
            An entry for each parameter that the layer owns, and for what modules within it hold.

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


def named_param_layouts(module: nn.Module, world_size: int) -> Iterator[tuple[str, Parameter, ParamLayout]]:
    """Name, parameter and layout of every parameter of ``module``; a tied parameter comes once, under its first name.

    Args:
        module: any module; a parameter that no sharded layer owns is one that every rank holds whole.
        world_size: size of the tensor-parallel group.
    """
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        layouts: dict[str, ParamLayout] = getattr(owner, "param_layouts", {})
        for name, param in owner.named_parameters(recurse=False):
            if id(param) in seen:
                continue
            seen.add(id(param))
            layout = layouts.get(name) or ParamLayout.replicated(param.shape, world_size)
            yield f"{prefix}.{name}" if prefix else name, param, layout


def replicas_of(module: nn.Module) -> dict[Parameter, Replicas]:
    """The replicas of every parameter, in the order of ``module.parameters()``; of a tied one by its first name."""
    found: dict[Parameter, Replicas] = {}
    for owner in module.modules():
        stated: dict[str, Replicas] = getattr(owner, "param_replicas", {})
        for name, param in owner.named_parameters(recurse=False):
            found.setdefault(param, stated.get(name, Replicas()))
    return found


def set_replicas_(module: nn.Module, replicas: Replicas, *names: str) -> None:
    """State the replicas of a module's own parameters: of those in ``names``, or of all."""
    owner: Any = module
    names = names or tuple(name for name, _ in owner.named_parameters(recurse=False))
    owner.param_replicas = getattr(owner, "param_replicas", {}) | dict.fromkeys(names, replicas)


# MPS has no fp64, and a tensor on the meta device has no values.
_WITHOUT_FP64 = ("mps", "meta")


class FixedTensors(nn.Module):
    """A module whose tensors of the names in ``_fixed`` move with it from device to device, and change in nothing else.

    As buffers they would be rounded by ``module.bfloat16()``, and ``to_empty`` would lose their values.
    """

    _fixed: tuple[str, ...] = ()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        for name in self._fixed:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, _on(fn(tensor).device, tensor))
        return self


def on_default_device(tensor: Tensor) -> Tensor:
    """A tensor in fp64 on PyTorch's default device, or where it is, if that device has no such tensors."""
    return _on(torch.get_default_device(), tensor)


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor if device.type in _WITHOUT_FP64 else tensor.to(device)
