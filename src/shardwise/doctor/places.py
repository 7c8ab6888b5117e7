"""Keys of recorded tensors: names of modules and parameters, axes of ranks, and layouts that a model states."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from shardwise.core.errors import ConfigError
from shardwise.core.layout import Layout
from shardwise.core.sharding import ParamLayout
from shardwise.core.topology import Groups

# For each axis how its ranks hold a tensor: the letter of a ``Layout`` and the dimension, or ["placed", dim, the
# intervals of each rank]; see ``findings.Kind``.
Declared = dict[str, list[Any]]
Axes = Mapping[str, tuple[int, int]]
ParameterTensors = Mapping[Parameter, tuple[Tensor, Declared]]

# The gradient of the values that copies of a key-value head compute is a partial sum on each rank.
GRADIENTS = {"R": "P", "P": "I", "placed": "placed sums"}
_AXES_OF_EXPERTS = ("dp", "cp", "tp")
# Parts of names that wrappers add.
_WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")


@dataclasses.dataclass(frozen=True)
class Key:
    """The identity of a recorded tensor.

    Attributes:
        what: ``input``, ``output``, ``input gradient``, ``output gradient`` of a module; ``used``, ``gradient``,
            ``accumulated``, ``updated`` of a parameter: its values in the forward, its gradient before clipping, its
            gradient after a micro-batch, and its values after the update.
        name: name of the module or parameter.
        step, micro_batch: numbers from 0; the micro-batch is -1 for what a step has once.
        call: number of the module's call in this micro-batch.
        leaf: place of the tensor in the module's inputs or outputs.
    """

    what: str
    name: str
    step: int
    micro_batch: int = -1
    call: int = 0
    leaf: str = ""


def named_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules by the names that they have in the model on one rank without wrappers.

    A wrapper has the name of what it wraps, and comes before it. The chunks of a list of chunks have no names.
    """
    seen: set[int] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        yield _WRAPPERS.sub("", name).removeprefix("."), module
        for child_name, child in module.named_children():
            number = getattr(child, "layer_number", None)
            own = str(number - 1) if child_name.isdigit() and isinstance(number, int) else child_name
            yield from walk(f"{name}.{own}" if name else own, child)

    for root in model if isinstance(model, nn.ModuleList) else (model,):
        yield from walk("", root)


def recorded_modules(model: nn.Module, first_layers: int | None) -> dict[str, list[nn.Module]]:
    """Return the modules to record by name: several if a rank has several chunks of a model."""
    found: dict[str, list[nn.Module]] = {}
    compiled: set[int] = set()
    for name, module in named_parts(model):
        # The wrapper of torch.compile is known by its submodule, since its class is in torch._dynamo, a slow import.
        if getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules:
            compiled.update(id(inner) for inner in module.modules() if inner is not module)
        if id(module) in compiled or (first_layers is not None and _layer_of(name) >= first_layers):
            continue
        if name in found and any(module is inner for outer in found[name] for inner in outer.modules()):
            # Its wrapper is recorded.
            continue
        found.setdefault(name, []).append(module)
    return found


def _layer_of(name: str) -> int:
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


def named_parameters(model: nn.Module) -> list[tuple[str, Parameter, nn.Module, str]]:
    """Return name, parameter, owner and the name in the owner of each parameter; a tied one under its first name."""
    found: dict[int, tuple[str, Parameter, nn.Module, str]] = {}
    for prefix, owner in named_parts(model):
        for key, param in owner.named_parameters(recurse=False):
            found.setdefault(id(param), (f"{prefix}.{key}" if prefix else key, param, owner, key))
    return list(found.values())


def axes_of(axes: Axes | DeviceMesh | Groups | None) -> dict[str, tuple[int, int]]:
    """Return each axis with this rank's place and the number of ranks; one axis of all ranks if there is none."""
    if axes is None:
        return {"rank": (dist.get_rank(), dist.get_world_size())} if dist.is_initialized() else {}
    if isinstance(axes, Groups):
        named = {"pp": axes.pp, "dp": axes.dp, "cp": axes.cp, "tp": axes.tp}
        found = {name: (group.rank(), group.size()) for name, group in named.items() if group is not None}
        if found.get("cp", (0, 1))[1] > 1:
            return found | {"dp": axes.data.samples}
        return {name: place for name, place in found.items() if name != "cp"}
    if isinstance(axes, DeviceMesh):
        names = axes.mesh_dim_names or tuple(f"axis {dim}" for dim in range(axes.ndim))
        return {name: (axes.get_local_rank(dim), axes.size(dim)) for dim, name in enumerate(names)}
    for name, (rank, size) in axes.items():
        if not 0 <= rank < size:
            raise ConfigError(f"axes: {name} is rank {rank} of {size}; ranks count from 0")
    return dict(axes)


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh of all ranks on which parameters are DTensors, if there is one."""
    meshes = [mesh for param in model.parameters() if (mesh := getattr(param, "device_mesh", None)) is not None]
    return next((mesh for mesh in meshes if mesh.size() == dist.get_world_size()), None)


@dataclasses.dataclass(frozen=True)
class PartOfExperts:
    """This rank's part of a parameter that ranks of several axes split; ``copies`` ranks hold it."""

    layout: ParamLayout
    rank: int
    copies: int

    @classmethod
    def of(cls, owner: nn.Module, key: str, axes: Axes) -> PartOfExperts | None:
        """Return the part of a module's parameter; None if only tensor-parallel ranks split it."""
        replicas = getattr(owner, "param_replicas", {}).get(key)
        if replicas is None or not replicas.is_of_expert or "tp" not in axes:
            return None
        module: Any = owner
        layout, group = module.param_layouts[key], module.group
        if layout.world_size == axes["tp"][1]:
            return None
        ranks = math.prod(axes[axis][1] for axis in _AXES_OF_EXPERTS if axis in axes)
        return cls(layout, group.rank(), ranks // layout.world_size)

    def as_term(self, own: Tensor, *, is_term: bool) -> tuple[Tensor, Declared]:
        """Return a tensor of the whole shape whose sum over all axes is the parameter; ``own`` is a term, or a copy."""
        whole = own.new_zeros(self.layout.global_shape)
        self.layout.place_(whole, self.rank, own if is_term else own / self.copies)
        return whole, {axis: ["P"] for axis in _AXES_OF_EXPERTS}


def declared_of_param(owner: nn.Module, key: str, axes: Axes) -> Declared:
    """Return how the ranks hold a parameter, as far as its module states it."""
    layout = getattr(owner, "param_layouts", {}).get(key)
    if layout is None or "tp" not in axes:
        return {}
    if layout.dim is None:
        return {"tp": ["I"]}
    return {"tp": ["placed", layout.dim, [[list(interval) for interval in own] for own in layout.intervals]]}


def declared_of_tensor(layout: Layout | None, axes: Axes) -> Declared:
    """Return how the ranks hold a tensor of a stated layout."""
    if not isinstance(layout, Layout) or "tp" not in axes or (layout.kind == "V" and layout.dim is None):
        return {}
    return {"tp": [layout.kind] if layout.dim is None else [layout.kind, layout.dim]}


def declared_of_output(module: nn.Module, axes: Axes) -> Declared:
    """Return how the ranks hold a module's output, as far as the module states it."""
    declared = declared_of_tensor(getattr(module, "output_layout", None), axes)
    weight = getattr(module, "param_layouts", {}).get("weight")
    if declared == {"tp": ["V", -1]} and weight and weight.dim == 0:
        # Joint weights, such as gate and up, are split section by section.
        return {"tp": ["placed", -1, [[list(interval) for interval in own] for own in weight.intervals]]}
    return declared


def named_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return positional arguments by their numbers, and keyword arguments by their names."""
    return {str(index): value for index, value in enumerate(args)} | dict(kwargs)


def leaves(value: Any, path: str = "", *, floats: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses, with their places."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Tensor):
        if value.is_floating_point() or not floats:
            yield path, value
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    for key, item in items:
        yield from leaves(item, f"{path}.{key}" if path else str(key), floats=floats)


def perturbed(value: Any, seed: int, key: Key) -> Any:
    """Change each element by one rounding error, up or down."""
    if isinstance(value, Tensor) and value.is_floating_point():
        generator = torch.Generator().manual_seed(int(hashlib.sha256(f"{seed} {key}".encode()).hexdigest()[:15], 16))
        signs = torch.randint(0, 2, value.shape, generator=generator).to(value.device, value.dtype) * 2 - 1
        return value * (1 + torch.finfo(value.dtype).eps * signs)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(perturbed(item, seed, key) for item in value)
    return value
