"""Record a few steps of a model: what each module gets and returns, gradients, and parameters.

Hooks of modules and tensors copy what passes; they return nothing, so that the run keeps its bits. The gradient of a
tensor is the sum over all modules that use it. A module that is recomputed is recorded once. Modules inside a compiled
module are not recorded.

A recording is a folder with two files for each rank: a JSON file of facts, and the tensors. ``Recording`` in
``recording.py`` reads them.
"""

from __future__ import annotations

import json
import math
import shutil
import weakref
from collections import Counter
from collections.abc import Sequence
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

from shardwise.core.atomic_files import write_atomically
from shardwise.core.errors import ConfigError, UnwritableError
from shardwise.core.topology import Groups
from shardwise.doctor.facts import VERSION
from shardwise.doctor.held_parts import HeldParts
from shardwise.doctor.module_calls import ModuleCalls
from shardwise.doctor.places import Axes, Declared, Key, ParameterTensors, axes_of, mesh_of
from shardwise.doctor.sketch_store import SketchStore
from shardwise.training.gradients.finalize import gradient_of

BUDGET = 256 << 20


class Recorder:
    """Records a model from now on, until ``steps`` updates were made; see ``record`` for the arguments.

    ``world_size`` is 1 for a model that this rank trains alone, although there are other ranks. ``remedy`` says
    what to do if the disk is full.
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
        self._perturb = perturb
        self._store, self._parts = SketchStore(budget, full), HeldParts(model, self.axes)
        self._updates: list[dict[str, Any]] = []
        self._factors: dict[str, float] = {}
        self._gradients: dict[str, Tensor] = {}
        self._has_gradients = False
        self._was_clipped = False
        # Whether an optimizer has changed parameters of the model in this step.
        self._was_updated = False
        self._accumulations: Counter[str] = Counter()
        self._calls = ModuleCalls(
            model,
            self._store,
            self._parts,
            first_layers=first_layers,
            perturb=perturb,
            before_forward=self._end_updated_step,
        )
        self._handles: list[RemovableHandle] = []
        for name, param, _, _ in self._parts.params:
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

    @property
    def is_done(self) -> bool:
        """Whether the recording has ended."""
        return self._calls.is_done

    def inputs(self, **tensors: Tensor | None) -> None:
        """State the integers of the next micro-batch, whose rows are samples; by default those that the model gets."""
        if not self.is_done:
            self._calls.state_inputs({name: tensor for name, tensor in tensors.items() if tensor is not None})

    @torch.no_grad()
    def gradients(self, given: ParameterTensors | None = None) -> None:
        """Record all gradients, after sums over ranks and before clipping; ``given`` has those not in ``grad``."""
        if self.is_done or self._has_gradients:
            return
        self._has_gradients = True
        for name, param, _, _ in self._parts.params:
            if given is not None and param in given:
                memory = given[param][0]
                self._keep_gradient(name, memory, *self._parts.of_term(name, *given[param]))
            elif (found := _gradient_of(param)) is not None:
                self._keep_gradient(name, self._parts.local(found, {})[0], *self._parts.of_param(name, param, found))

    def _keep_gradient(self, name: str, memory: Tensor, gradient: Tensor, declared: Declared) -> None:
        # Clipping changes this memory, so the factor is known when the optimizer begins.
        self._gradients[name] = memory
        self._factors[name] = float(memory.double().square().sum())
        self._store.keep(Key("gradient", name, self._store.step), gradient, declared)

    @torch.no_grad()
    def _find_gradients(self, params: Sequence[Parameter] | None = None) -> None:
        """Record the gradients of these parameters, or of all, that are not recorded: they may be clipped already."""
        if self._has_gradients:
            return
        chosen = None if params is None else {id(param) for param in params}
        for name, param, _, _ in self._parts.params:
            found = _gradient_of(param) if chosen is None or id(param) in chosen else None
            if found is None or Key("gradient", name, self._store.step) in self._store.numbers:
                continue
            values, declared = self._parts.of_param(name, param, found)
            # Zeros after a backward are what is left of a gradient.
            if chosen is not None or not self._accumulations[name] or bool(values.any()):
                self._was_clipped = True
                self._keep_gradient(name, self._parts.local(found, {})[0], values, declared)

    def clipped(self, given: ParameterTensors | None = None) -> None:
        """Note the factor that has scaled the gradients since ``gradients``; the optimizer's hook calls it."""
        if self.is_done:
            return
        if not self._has_gradients:
            self.gradients()
            self._was_clipped = True
        for name, param, _, _ in self._parts.params:
            if given is not None and param in given:
                self._gradients[name] = given[param][0]
        with torch.no_grad():
            after = {name: float(gradient.double().square().sum()) for name, gradient in self._gradients.items()}
        squares = sum(self._factors.values())
        # A gradient that is not finite has no factor, and JSON no NaN.
        square = sum(after.values()) / squares if 0 < squares < math.inf else math.nan
        factor = square**0.5 if math.isfinite(square) else None
        self._updates.append({"step": self._store.step, "clip_factor": factor, "was_clipped": self._was_clipped})

    @torch.no_grad()
    def updated(self, given: ParameterTensors | None = None) -> None:
        """Record the parameters after the update, which ends the step; ``given`` has those that no rank has whole."""
        if self.is_done:
            return
        self._find_gradients()
        self._was_updated = False
        for name, param, _, _ in self._parts.params:
            if given is not None and param in given:
                self._store.keep(Key("updated", name, self._store.step), *self._parts.of_term(name, *given[param]))
            elif param.requires_grad:
                values, declared = self._parts.of_param(name, param, param)
                self._store.keep(Key("updated", name, self._store.step), values, declared)
        self._end_step()

    def close(self) -> None:
        """Remove all hooks, and write what was recorded, if anything."""
        if self._store.pending and self._was_updated:
            self.updated()
        elif self._store.pending:
            self._find_gradients()
            self._end_step()
        if not self.is_done:
            self._write()

    def _watch_optimizers(self) -> list[RemovableHandle]:
        """Record gradients when any optimizer of PyTorch begins, before it changes or deletes them."""
        reference = weakref.ref(self)
        own = {id(param) for _, param, _, _ in self._parts.params}

        def params_of(optimizer: torch.optim.Optimizer) -> list[Parameter]:
            return [param for group in optimizer.param_groups for param in group["params"] if id(param) in own]

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            recorder = reference()
            if recorder is not None and not recorder.is_done and (params := params_of(optimizer)):
                recorder._find_gradients(params)

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            recorder = reference()
            if recorder is not None and not recorder.is_done and recorder._store.pending and params_of(optimizer):
                recorder._was_updated = True

        return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def _end_updated_step(self) -> None:
        # No call has ended the step.
        if self._was_updated:
            self.updated()

    def _end_step(self) -> None:
        self._store.end_step()
        self._calls.end_step()
        self._has_gradients = self._was_clipped = False
        self._gradients, self._factors = {}, {}
        self._accumulations.clear()
        if self._store.step == self._steps:
            self._write()

    def _write(self) -> None:
        self._calls.close()
        for handle in self._handles:
            handle.remove()
        facts = {
            "version": VERSION,
            "torch": torch.__version__,
            "rank": self._rank,
            "world_size": self._world_size,
            "axes": {name: list(place) for name, place in self.axes.items()},
            "steps": self._store.step,
            "perturb": self._perturb,
            "modules": {name: type(modules[0]).__name__ for name, modules in self._calls.modules.items()},
            "parameters": {
                name: {"shape": list(param.shape), "is_trained": param.requires_grad}
                for name, param, _, _ in self._parts.params
            },
            "dropped": sorted(set(self._store.dropped)),
            "inputs": self._calls.inputs,
            "updates": self._updates,
            "calls": self._calls.facts,
            "tensors": self._store.facts,
        }
        needed = sum(view.numel() * view.itemsize for view in self._store.views.values())
        free = shutil.disk_usage(self._folder).free
        if free < needed + (1 << 20):
            raise UnwritableError(
                f"{self._folder} has {free:,} bytes free, and the recording of rank {self._rank} needs {needed:,}; "
                f"free some, {self._remedy}"
            )
        write_atomically(self._file.with_suffix(".safetensors"), lambda file: file.write(save(self._store.views)))
        # The facts come last: a recording without them is incomplete.
        write_atomically(self._file.with_suffix(".json"), lambda file: file.write(json.dumps(facts).encode()))
        self._store.views, self._store.facts = {}, []

    def _accumulated(self, name: str) -> Any:
        reference = weakref.ref(self)

        def hook(param: Parameter) -> None:
            recorder = reference()
            if recorder is None or recorder.is_done or param.grad is None:
                return
            with torch.no_grad():
                number = recorder._accumulations[name]
                recorder._accumulations[name] += 1
                values, declared = recorder._parts.of_param(name, param, param.grad)
                recorder._store.keep(Key("accumulated", name, recorder._store.step, number), values, declared)

        return hook


def _gradient_of(param: Parameter) -> Tensor | None:
    """Return the parameter's gradient; a DTensor has placements, which say whether it is a partial sum."""
    return param.grad if getattr(param, "main_grad", None) is None else gradient_of(param)
