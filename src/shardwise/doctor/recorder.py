"""Record a few steps of a model: what each module gets and returns, gradients, and parameters.

Hooks of modules and tensors copy what passes; they return nothing, so that the run keeps its bits. The gradient of a
tensor is the sum over all modules that use it. A module that is recomputed is recorded once. Modules inside a compiled
module are not recorded.

A recording is a folder with two files for each rank: a JSON file of facts, and the tensors. ``Recording`` in
``recording.py`` reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import json
import math
import shutil
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError, UnwritableError
from shardwise.core.files import write_atomically
from shardwise.core.sharding.balanced import group_of_rows, local_rows, rows_of_ranks
from shardwise.core.topology import Groups
from shardwise.doctor.places import (
    GRADIENTS,
    Axes,
    Declared,
    Given,
    Key,
    PartOfExperts,
    axes_of,
    declared_of_output,
    declared_of_param,
    declared_of_tensor,
    leaves,
    mesh_of,
    named_arguments,
    named_parameters,
    perturbed,
    recorded_modules,
)
from shardwise.doctor.sketches import Sketch
from shardwise.models.experts.routing import row_hashes
from shardwise.training.optimizer.gradients import gradient_of

VERSION = 1
BUDGET = 256 << 20
_PARTS = 512


class Recorder:
    """Records a model from now on, until ``steps`` updates were made; see ``record`` for the arguments.

    ``world_size`` is 1 for a model that this rank trains alone, although there are other ranks. ``remedy`` says
    what to do if the disk is full.

    Attributes:
        is_done: whether the recording is complete and written.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | PathLike[str],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        steps: int = 2,
        axes: Axes | DeviceMesh | Groups | None = None,
        full: Sequence[str] = (),
        first_layers: int | None = None,
        budget: int = BUDGET,
        perturb: int | None = None,
        world_size: int | None = None,
        remedy: str = "record fewer layers with first_layers, or lower budget",
    ) -> None:
        if steps < 1:
            raise ConfigError(f"steps is {steps}; record at least one step")
        self._folder, self._steps, self._remedy = Path(folder), steps, remedy
        self.axes = axes_of(mesh_of(model) if axes is None else axes)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size == 1:
            self._rank, self._world_size = 0, 1
        self._file = self._folder / f"rank{self._rank:05d}"
        if self._file.with_suffix(".json").exists():
            raise ConfigError(f"{self._folder} has a recording already; give another folder, or delete it")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._full, self._budget, self._perturb = tuple(full), budget, perturb
        self._step = 0
        self._num_bytes = 0
        self._dropped: list[str] = []
        self._tensors: list[dict[str, Any]] = []
        self._updates: list[dict[str, Any]] = []
        self._views: dict[str, Tensor] = {}
        self._numbers: dict[Key, int] = {}
        self._pending: list[tuple[int, Sketch]] = []
        self._calls: list[dict[str, Any]] = []
        self._inputs: list[dict[str, Any]] = []
        self._factors: dict[str, float] = {}
        self._gradients: dict[str, Tensor] = {}
        self._has_gradients = False
        self._was_clipped = False
        # Whether an optimizer has changed parameters of the model in this step.
        self._was_updated = False
        # Modules that are running, outermost first: in a forward, and in a recomputation within a backward.
        self._stack: list[tuple[str, Key]] = []
        self._recomputed: list[tuple[str, Key]] = []
        self._micro_batches: Counter[int] = Counter()
        self._call_numbers: Counter[tuple[str, int]] = Counter()
        self._without_graph: dict[str, list[Key]] = defaultdict(list)
        self._accumulations: Counter[str] = Counter()
        self._open: dict[int, dict[str, Any]] = {}
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        self._handles: list[RemovableHandle] = []
        # Collectives of the modules that are running, and of those inside them.
        self._counter = CollectiveCounter()
        self._counting = contextlib.ExitStack()
        self._counting.enter_context(self._counter)
        self.is_done = False
        self._modules = recorded_modules(model, first_layers)
        self._params = named_parameters(model)
        self._declared = {name: declared_of_param(owner, key, self.axes) for name, _, owner, key in self._params}
        self._of_experts = {
            name: part
            for name, _, owner, key in self._params
            if (part := PartOfExperts.of(owner, key, self.axes)) is not None
        }
        for name, modules in self._modules.items():
            for module in modules:
                # The caller's inputs, before other hooks change them, and the outputs that the caller gets.
                self._handles.append(
                    module.register_forward_pre_hook(self._before(name), with_kwargs=True, prepend=True)
                )
                self._handles.append(module.register_forward_hook(self._after(name), with_kwargs=True))
        for name, param, _, _ in self._params:
            if param.requires_grad and param.is_leaf:
                self._handles.append(param.register_post_accumulate_grad_hook(self._accumulated(name)))
        self._handles += self._watch_optimizers()
        if optimizer is not None:
            self._handles.append(optimizer.register_step_pre_hook(lambda *_: self.clipped()))
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self.updated()))

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def inputs(self, **tensors: Tensor | None) -> None:
        """State the ids, labels and other integers of the next micro-batch; each row is a sample.

        Without a call, the integer tensors that the model gets are taken.
        """
        if not self.is_done:
            given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
            self._inputs.append({"step": self._step, "stated": True} | _samples(given, given.get("labels")))

    @torch.no_grad()
    def gradients(self, given: Given | None = None) -> None:
        """Record the gradients of all parameters; call it after the backward and all sums over ranks, before clipping.

        Args:
            given: gradients that are not in ``main_grad`` or ``grad``, and how each axis holds them.
        """
        if self.is_done or self._has_gradients:
            return
        self._has_gradients = True
        for name, param, _, _ in self._params:
            if given is not None and param in given:
                memory = given[param][0]
                self._keep_gradient(name, memory, *self._given(name, *given[param]))
            elif (found := _gradient_of(param)) is not None:
                self._keep_gradient(name, self._local(found, {})[0], *self._part(name, param, found))

    def _keep_gradient(self, name: str, memory: Tensor, gradient: Tensor, declared: Declared) -> None:
        # Clipping changes this memory, so the factor is known when the optimizer begins.
        self._gradients[name] = memory
        self._factors[name] = float(memory.double().square().sum())
        self._keep(Key("gradient", name, self._step), gradient, declared)

    @torch.no_grad()
    def _find_gradients(self, params: Sequence[Parameter] | None = None) -> None:
        """Record the gradients of these parameters, or of all, that nobody recorded: they may be clipped already."""
        if self._has_gradients:
            return
        chosen = None if params is None else {id(param) for param in params}
        for name, param, _, _ in self._params:
            found = _gradient_of(param) if chosen is None or id(param) in chosen else None
            if found is None or Key("gradient", name, self._step) in self._numbers:
                continue
            values, declared = self._part(name, param, found)
            # Zeros after a backward are what is left of a gradient.
            if chosen is not None or not self._accumulations[name] or bool(values.any()):
                self._was_clipped = True
                self._keep_gradient(name, self._local(found, {})[0], values, declared)

    def clipped(self, given: Given | None = None) -> None:
        """Note the factor that has scaled the gradients since ``gradients``; the optimizer's hook calls it.

        Args:
            given: as for ``gradients``.
        """
        if self.is_done:
            return
        if not self._has_gradients:
            self.gradients()
            self._was_clipped = True
        for name, param, _, _ in self._params:
            if given is not None and param in given:
                self._gradients[name] = given[param][0]
        with torch.no_grad():
            after = {name: float(gradient.double().square().sum()) for name, gradient in self._gradients.items()}
        squares = sum(self._factors.values())
        # A gradient that is not finite has no factor, and JSON no NaN.
        square = sum(after.values()) / squares if 0 < squares < math.inf else math.nan
        factor = square**0.5 if math.isfinite(square) else None
        self._updates.append({"step": self._step, "clip_factor": factor, "was_clipped": self._was_clipped})

    @torch.no_grad()
    def updated(self, given: Given | None = None) -> None:
        """Record the parameters after the update, which ends the step; the optimizer's hook calls it.

        Args:
            given: for parameters that no rank has whole yet, the values of this rank and how each axis holds them.
        """
        if self.is_done:
            return
        self._find_gradients()
        self._was_updated = False
        for name, param, _, _ in self._params:
            if given is not None and param in given:
                self._keep(Key("updated", name, self._step), *self._given(name, *given[param]))
            elif param.requires_grad:
                values, declared = self._part(name, param, param)
                self._keep(Key("updated", name, self._step), values, declared)
        self._end_step()

    def close(self) -> None:
        """Remove all hooks, and write what was recorded, if anything."""
        if self._pending and self._was_updated:
            self.updated()
        elif self._pending:
            self._find_gradients()
            self._end_step()
        if not self.is_done:
            self._write()

    def _watch_optimizers(self) -> list[RemovableHandle]:
        """Record gradients when any optimizer of PyTorch begins, before it changes or deletes them."""
        reference = weakref.ref(self)
        own = {id(param) for _, param, _, _ in self._params}

        def params_of(optimizer: torch.optim.Optimizer) -> list[Parameter]:
            return [param for group in optimizer.param_groups for param in group["params"] if id(param) in own]

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            recorder = reference()
            if recorder is not None and not recorder.is_done and (params := params_of(optimizer)):
                recorder._find_gradients(params)

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            recorder = reference()
            if recorder is not None and not recorder.is_done and recorder._pending and params_of(optimizer):
                recorder._was_updated = True

        return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def _end_step(self) -> None:
        self._flush()
        self._step += 1
        self._has_gradients = self._was_clipped = False
        self._gradients, self._factors = {}, {}
        self._micro_batches.clear()
        self._call_numbers.clear()
        self._accumulations.clear()
        self._without_graph.clear()
        self._seen.clear()
        if self._step == self._steps:
            self._write()

    def _part(self, name: str, param: Tensor, tensor: Tensor) -> tuple[Tensor, Declared]:
        """Return this rank's part of a parameter, or of its gradient, and how the ranks hold it."""
        group, declared, of_experts = group_of_rows(param), self._declared[name], self._of_experts.get(name)
        if group is None:
            own, declared = self._local(tensor, declared)
            return (own, declared) if of_experts is None else of_experts.as_term(own, is_term=False)
        own, rows = local_rows(tensor), rows_of_ranks(param)
        if "cp" not in self.axes and of_experts is None:
            return own, declared | {"dp": ["placed", 0, [[list(interval)] for interval in rows]]}
        # The ranks of both axes split the rows: each has its own, and zeros.
        whole = own.new_zeros(param.shape)
        whole[slice(*rows[group.rank()])] = own
        return self._given(name, whole, {"dp": ["P"], "cp": ["P"]})

    def _given(self, name: str, tensor: Tensor, stated: Declared) -> tuple[Tensor, Declared]:
        """Return this rank's term of a parameter, or of its gradient, and how the ranks hold it."""
        of_experts = self._of_experts.get(name)
        if of_experts is not None:
            return of_experts.as_term(tensor, is_term=True)
        return tensor, self._declared[name] | stated

    def _local(self, tensor: Tensor, declared: Declared) -> tuple[Tensor, Declared]:
        """Return this rank's part of a DTensor, and how its placements say that the ranks hold it."""
        placements = getattr(tensor, "placements", None)
        if placements is None:
            return tensor, declared
        whole: Any = tensor
        own, stated = whole.to_local(), dict(declared)
        axes, sizes = self._axes_of_mesh(whole.device_mesh), whole.device_mesh.shape
        for axis, placement, size in zip(axes, placements, sizes, strict=False):
            if axis not in self.axes:
                continue
            if placement.is_partial():
                stated[axis] = ["P"]
                own = own / size if getattr(placement, "reduce_op", "sum") == "avg" else own
            elif (sections := getattr(placement, "split_factor", 1)) > 1:
                # The other axis splits the dimension first.
                stated[axis] = ["sections", placement.dim, sections]
            else:
                stated[axis] = ["I"] if placement.is_replicate() else ["V", placement.dim]
        return own, stated

    def _axes_of_mesh(self, mesh: Any) -> list[str]:
        several = [name for name, (_, size) in self.axes.items() if size > 1] or list(self.axes)
        if mesh.ndim == 1 and len(several) == 1:
            # It has other names if axes were given otherwise.
            return several if mesh.size() == self.axes[several[0]][1] else []
        return list(mesh.mesh_dim_names or several)

    def _before(self, name: str) -> Any:
        @torch._dynamo.disable  # type: ignore[untyped-decorator]
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.is_done or torch.compiler.is_compiling():
                return
            if torch._C._current_graph_task_id() != -1:
                waiting = self._without_graph[name]
                self._recomputed.append((name, waiting.pop(0) if waiting else Key("", name, -1)))
                return
            # A recomputation may have ended early, and a forward have failed.
            self._recomputed.clear()
            if self._stack and self._stack[0][0] == name:
                self._stack.clear()
            if not self._stack:
                if not (torch.is_grad_enabled() and module.training):
                    self._stack.append((name, Key("", name, -1)))
                    return
                if self._was_updated:
                    # Nobody has said that the step has ended.
                    self.updated()
                    if self.is_done:
                        return
                micro_batch = self._micro_batches[id(module)]
                self._micro_batches[id(module)] += 1
                self._take_ids(module, micro_batch, args, kwargs)
            else:
                outer = self._stack[0][1]
                if outer.step < 0:
                    self._stack.append((name, outer))
                    return
                micro_batch = outer.micro_batch
            call = self._call_numbers[name, micro_batch]
            self._call_numbers[name, micro_batch] += 1
            key = Key("", name, self._step, micro_batch, call)
            self._stack.append((name, key))
            if not torch.is_grad_enabled():
                self._without_graph[name].append(key)
            declared = declared_of_tensor(getattr(module, "input_layout", None), self.axes)
            inputs = [
                self._pass(dataclasses.replace(key, what="input", leaf=leaf), tensor, declared if not index else {})
                for index, (leaf, tensor) in enumerate(leaves(named_arguments(args, kwargs)))
            ]
            self._open[len(self._stack)] = {"inputs": inputs, "begun": len(self._counter.launches), "inner": []}

        return hook

    def _after(self, name: str) -> Any:
        @torch._dynamo.disable  # type: ignore[untyped-decorator]
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if self.is_done or torch.compiler.is_compiling():
                return None
            is_recomputed = torch._C._current_graph_task_id() != -1
            stack = self._recomputed if is_recomputed else self._stack
            # A call that failed left its entry.
            while stack and stack[-1][0] != name:
                stack.pop()
            depth = len(stack)
            if not depth:
                return None
            _, key = stack.pop()
            if key.step < 0:
                return None
            if is_recomputed:
                for leaf, tensor in leaves(output):
                    self._watch_gradient(dataclasses.replace(key, what="output", leaf=leaf), tensor)
                return None
            if self._perturb is not None and not any(True for _ in module.children()):
                output = perturbed(output, self._perturb, key)
            declared = declared_of_output(module, self.axes)
            outputs = [
                self._pass(dataclasses.replace(key, what="output", leaf=leaf), tensor, declared if not index else {})
                for index, (leaf, tensor) in enumerate(leaves(output))
            ]
            begun = self._open.pop(depth, {"inputs": [], "begun": 0, "inner": []})
            launched = range(begun["begun"], len(self._counter.launches))
            own = [self._counter.launches[at] for at in launched if at not in begun["inner"]]
            if depth - 1 in self._open:
                self._open[depth - 1]["inner"] += launched
            moves = [[launch.name, launch.num_bytes] for launch in own]
            facts = {"inputs": begun["inputs"], "outputs": outputs, "class": type(module).__name__, "moves": moves}
            self._calls.append(dataclasses.asdict(key) | facts)
            if key.micro_batch == 0 and key.call == 0:
                self._used(name, module)
            return output if self._perturb is not None else None

        return hook

    @torch.no_grad()
    def _used(self, name: str, module: nn.Module) -> None:
        own = {id(param) for param in module._parameters.values() if param is not None}
        for full_name, param, _, _ in self._params:
            if id(param) in own:
                values, declared = self._part(full_name, param, param)
                self._keep(Key("used", full_name, self._step), values, declared)

    def _pass(self, key: Key, tensor: Tensor, declared: Declared) -> int:
        """Record a tensor of a forward unless it is known already, and return its number."""
        known = self._seen.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            return known[2]
        local, stated = self._local(tensor, declared)
        number = self._keep(key, local, stated)
        if number >= 0:
            self._seen[id(tensor)] = weakref.ref(tensor), tensor._version, number
            self._watch_gradient(key, tensor)
        return number

    def _watch_gradient(self, key: Key, tensor: Tensor) -> None:
        if not (tensor.requires_grad and tensor.is_floating_point()) or tensor.is_leaf:
            return
        reference = weakref.ref(self)
        gradient_key = dataclasses.replace(key, what=f"{key.what} gradient")

        def hook(gradient: Tensor) -> Tensor | None:
            recorder = reference()
            if recorder is None or recorder.is_done or recorder._step != gradient_key.step:
                return None
            if recorder._perturb is not None:
                gradient = perturbed(gradient, recorder._perturb, gradient_key)
            local, declared = recorder._local(gradient, {})
            if not declared and key in recorder._numbers:
                own = recorder._tensors[recorder._numbers[key]].get("layouts", {})
                declared = {axis: [GRADIENTS.get(kind[0], kind[0]), *kind[1:]] for axis, kind in own.items()}
            recorder._keep(gradient_key, local, declared)
            return gradient if recorder._perturb is not None else None

        tensor.register_hook(hook)

    def _keep(self, key: Key, tensor: Tensor, declared: Declared) -> int:
        """Keep a sketch of a tensor, and return its number; -1 for integers, and once the budget is used up."""
        if not tensor.is_floating_point():
            return -1
        if key in self._numbers:
            return self._numbers[key]
        # No tensor takes more than this part of what is left, so that later ones find room too.
        most = (self._budget - self._num_bytes) // (_PARTS * tensor.itemsize)
        if any(fnmatch.fnmatchcase(key.name, pattern) for pattern in self._full):
            most = tensor.numel()
        sketch = Sketch.of(tensor, most_elements=most)
        if self._num_bytes + sketch.num_bytes > self._budget:
            self._dropped.append(key.name)
            return -1
        self._num_bytes += sketch.num_bytes
        number = self._numbers[key] = len(self._tensors)
        shape, dtype = list(sketch.shape), str(sketch.dtype).removeprefix("torch.")
        facts = dataclasses.asdict(key) | {"shape": shape, "dtype": dtype, "strides": list(sketch.strides)}
        self._tensors.append(facts | ({"layouts": declared} if declared else {}))
        self._pending.append((number, sketch))
        return number

    def _flush(self) -> None:
        """Move the sketches of a step to the host."""
        for number, sketch in self._pending:
            for name, view in sketch.to("cpu").views.items():
                self._views[f"{number}.{name}"] = view.contiguous()
        self._pending.clear()

    def _write(self) -> None:
        self.is_done = True
        for handle in self._handles:
            handle.remove()
        self._counting.close()
        facts = {
            "version": VERSION,
            "torch": torch.__version__,
            "rank": self._rank,
            "world_size": self._world_size,
            "axes": {name: list(place) for name, place in self.axes.items()},
            "steps": self._step,
            "perturb": self._perturb,
            "modules": {name: type(modules[0]).__name__ for name, modules in self._modules.items()},
            "parameters": {
                name: {"shape": list(param.shape), "is_trained": param.requires_grad}
                for name, param, _, _ in self._params
            },
            "dropped": sorted(set(self._dropped)),
            "inputs": self._inputs,
            "updates": self._updates,
            "calls": self._calls,
            "tensors": self._tensors,
        }
        needed = sum(view.numel() * view.itemsize for view in self._views.values())
        free = shutil.disk_usage(self._folder).free
        if free < needed + (1 << 20):
            raise UnwritableError(
                f"{self._folder} has {free:,} bytes free, and the recording of rank {self._rank} needs {needed:,}; "
                f"free some, {self._remedy}"
            )
        write_atomically(self._file.with_suffix(".safetensors"), lambda file: file.write(save(self._views)))
        # The facts come last: a recording without them is incomplete.
        write_atomically(self._file.with_suffix(".json"), lambda file: file.write(json.dumps(facts).encode()))
        self._views, self._tensors = {}, []

    def _accumulated(self, name: str) -> Any:
        reference = weakref.ref(self)

        def hook(param: Parameter) -> None:
            recorder = reference()
            if recorder is None or recorder.is_done or param.grad is None:
                return
            with torch.no_grad():
                number = recorder._accumulations[name]
                recorder._accumulations[name] += 1
                values, declared = recorder._part(name, param, param.grad)
                recorder._keep(Key("accumulated", name, recorder._step, number), values, declared)

        return hook

    def _take_ids(self, module: nn.Module, micro_batch: int, args: Any, kwargs: Any) -> None:
        waiting = self._inputs[-1] if self._inputs else None
        if waiting is not None and waiting.get("stated") and "micro_batch" not in waiting:
            waiting["micro_batch"] = micro_batch
            return
        named = {
            leaf: tensor
            for leaf, tensor in leaves(named_arguments(args, kwargs), floats=False)
            if not tensor.is_floating_point() and tensor.dtype != torch.bool and tensor.dim() >= 2
        }
        if named:
            place = _place_of_labels(type(module).forward)
            self._inputs.append(
                {"step": self._step, "micro_batch": micro_batch}
                | _samples(named, named.get("labels", named.get(place)))
            )


@cache
def _place_of_labels(forward: Callable[..., Any]) -> str:
    """Return the place of ``labels`` among the arguments of a forward; empty if it has none, or no signature."""
    try:
        names = list(signature(forward).parameters)[1:]
    except ValueError:
        return ""
    return str(names.index("labels")) if "labels" in names else ""


def _samples(tensors: Mapping[str, Tensor], labels: Tensor | None) -> dict[str, Any]:
    """Return what is recorded of a micro-batch's integers: hashes of rows, their lengths, and the number of labels."""
    return {
        "rows": {name: row_hashes(tensor) for name, tensor in tensors.items()},
        "lengths": {
            name: tensor.numel() // max(1, tensor.size(0) if tensor.dim() > 1 else 1)
            for name, tensor in tensors.items()
        },
        "num_labels": None if labels is None else int((labels >= 0).sum()),
    }


def _gradient_of(param: Parameter) -> Tensor | None:
    """Return the parameter's gradient; a DTensor has placements, which say whether it is a partial sum."""
    return param.grad if getattr(param, "main_grad", None) is None else gradient_of(param)
