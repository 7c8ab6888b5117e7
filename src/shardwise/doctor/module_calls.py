"""Hooks of modules: record what each call gets and returns, its collectives, and the gradients of its tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.doctor.held_parts import HeldParts
from shardwise.doctor.places import (
    GRADIENTS,
    Declared,
    Key,
    declared_of_output,
    declared_of_tensor,
    leaves,
    named_arguments,
    perturbed,
    recorded_modules,
)
from shardwise.doctor.sketch_store import SketchStore
from shardwise.models.experts.routing import row_hashes
from shardwise.nn.recompute import in_backward


class ModuleCalls:
    """Records the calls of a model's modules (``facts``) and its micro-batches (``inputs``) until ``close``.

    ``before_forward`` is called before each forward of the model in training mode; it may end the recording.
    """

    def __init__(
        self,
        model: nn.Module,
        store: SketchStore,
        parts: HeldParts,
        *,
        first_layers: int | None,
        perturb: int | None,
        before_forward: Callable[[], None],
    ) -> None:
        self._store, self._parts, self._perturb, self._before_forward = store, parts, perturb, before_forward
        self.modules = recorded_modules(model, first_layers)
        self.facts: list[dict[str, Any]] = []
        self.inputs: list[dict[str, Any]] = []
        self.is_done = False
        # Modules that are running, outermost first: in a forward, and in a recomputation within a backward.
        self._stack: list[tuple[str, Key]] = []
        self._recomputed: list[tuple[str, Key]] = []
        self._micro_batches: Counter[int] = Counter()
        self._call_numbers: Counter[tuple[str, int]] = Counter()
        self._without_graph: dict[str, list[Key]] = defaultdict(list)
        self._open: dict[int, dict[str, Any]] = {}
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        # Collectives of the modules that are running, and of those inside them.
        self._counter = CollectiveCounter()
        self._counting = contextlib.ExitStack()
        self._counting.enter_context(self._counter)
        self._handles: list[RemovableHandle] = []
        for name, modules in self.modules.items():
            for module in modules:
                # The caller's inputs, before other hooks change them, and the outputs that the caller gets.
                self._handles.append(
                    module.register_forward_pre_hook(self._pre_hook(name), with_kwargs=True, prepend=True)
                )
                self._handles.append(module.register_forward_hook(self._after(name), with_kwargs=True))

    def state_inputs(self, tensors: Mapping[str, Tensor]) -> None:
        """Note the integers of the next micro-batch."""
        self.inputs.append({"step": self._store.step, "stated": True} | _samples(tensors, tensors.get("labels")))

    def end_step(self) -> None:
        """Count micro-batches and calls from 0 again."""
        self._micro_batches.clear()
        self._call_numbers.clear()
        self._without_graph.clear()
        self._seen.clear()

    def close(self) -> None:
        """Remove the hooks."""
        self.is_done = True
        for handle in self._handles:
            handle.remove()
        self._counting.close()

    def _pre_hook(self, name: str) -> Any:
        @torch._dynamo.disable  # type: ignore[untyped-decorator]
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.is_done or torch.compiler.is_compiling():
                return
            if in_backward():
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
                self._before_forward()
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
            key = Key("", name, self._store.step, micro_batch, call)
            self._stack.append((name, key))
            if not torch.is_grad_enabled():
                self._without_graph[name].append(key)
            declared = declared_of_tensor(getattr(module, "input_layout", None), self._parts.axes)
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
            is_recomputed = in_backward()
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
            declared = declared_of_output(module, self._parts.axes)
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
            self.facts.append(dataclasses.asdict(key) | facts)
            if key.micro_batch == 0 and key.call == 0:
                self._used(name, module)
            return output if self._perturb is not None else None

        return hook

    @torch.no_grad()
    def _used(self, name: str, module: nn.Module) -> None:
        own = {id(param) for param in module._parameters.values() if param is not None}
        for full_name, param, _, _ in self._parts.params:
            if id(param) in own:
                values, declared = self._parts.of_param(full_name, param, param)
                self._store.keep(Key("used", full_name, self._store.step), values, declared)

    def _pass(self, key: Key, tensor: Tensor, declared: Declared) -> int:
        known = self._seen.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            return known[2]
        local, stated = self._parts.local(tensor, declared)
        number = self._store.keep(key, local, stated)
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
            calls = reference()
            if calls is None or calls.is_done or calls._store.step != gradient_key.step:
                return None
            if calls._perturb is not None:
                gradient = perturbed(gradient, calls._perturb, gradient_key)
            local, declared = calls._parts.local(gradient, {})
            if not declared and key in calls._store.numbers:
                own = calls._store.facts[calls._store.numbers[key]].get("layouts", {})
                declared = {axis: [GRADIENTS.get(kind[0], kind[0]), *kind[1:]] for axis, kind in own.items()}
            calls._store.keep(gradient_key, local, declared)
            return gradient if calls._perturb is not None else None

        tensor.register_hook(hook)

    def _take_ids(self, module: nn.Module, micro_batch: int, args: Any, kwargs: Any) -> None:
        waiting = self.inputs[-1] if self.inputs else None
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
            self.inputs.append(
                {"step": self._store.step, "micro_batch": micro_batch}
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
