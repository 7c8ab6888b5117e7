"""Annotations for ``spmd_types``, a checker of layouts: its types R, I, V and P are the layouts of ``core.layout``.

The checker follows the types through PyTorch's own operations. Of an autograd function it reads the static method
``spmd_typecheck``, which gets the function's outputs and those arguments that its keyword parameters name. Such methods
call the functions of this module. ``nn.replicated.annotate_`` types the parameters of a model. Nothing here imports
``spmd_types`` before the checker runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.layout import Layout


def computed_locally(*names: str) -> Any:
    """Return the method ``spmd_typecheck`` of a function that each rank computes from its own arguments alone.

    ``names`` are those of all arguments that may be tensors, or sequences of tensors.
    """

    def check(outputs: Any, **arguments: Any) -> None:
        tensors = list(_tensors(arguments.values()))
        _touch(tensors)
        _set(outputs, _together(tensors))

    keyword = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    first = inspect.Parameter("outputs", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    check.__signature__ = inspect.Signature([first, *keyword])  # type: ignore[attr-defined]
    return staticmethod(check)


def check_move(
    outputs: Any, group: ProcessGroup | None, layout: Layout, *inputs: tuple[Tensor | None, Layout], **others: Any
) -> None:
    """Check the layouts of a function's arguments over a group, and set that of its outputs, or raise SpmdTypeError.

    The group is None if the function has no communication. Values that vary may stand for partial sums. ``others``
    have no part in the outputs' layout, such as ids.
    """
    import spmd_types

    tensors = [(tensor, own) for tensor, own in inputs if tensor is not None]
    _touch([*(tensor for tensor, _ in tensors), *_tensors(others.values())])
    if group is None or group.size() == 1:
        _set(outputs, _together([tensor for tensor, _ in tensors]))
        return
    axis = spmd_types.normalize_axis(group)
    for tensor, own in tensors:
        given = _types(tensor).get(axis)
        allowed = {letter(own)}
        if own.kind == "P":
            allowed.add(spmd_types.V)
        if own.kind in "IR" and not tensor.requires_grad:
            # These two differ in the gradient alone.
            allowed |= {spmd_types.I, spmd_types.R}
        if given is not None and given not in allowed:
            raise spmd_types.SpmdTypeError(f"a tensor has the layout {given} over {axis}, and must have {own!r}")
    types = _together([tensor for tensor, _ in tensors], but=axis)
    mixed = [other for other in types if not axis.isorthogonal(other)]
    if mixed and layout.kind in ("R", "V"):
        # A move over ranks of several axes, such as that of experts' tokens. A tensor cannot have types over axes that
        # share ranks; it has the layout over each of them.
        _set(outputs, types | dict.fromkeys(mixed, letter(layout)))
        return
    _set(outputs, types | {axis: letter(layout)})


def letter(layout: Layout) -> Any:
    """Return the type of ``spmd_types`` for a layout."""
    import spmd_types

    return {"I": spmd_types.I, "R": spmd_types.R, "V": spmd_types.V, "P": spmd_types.P}[layout.kind]


def _types(tensor: Tensor) -> dict[Any, Any]:
    import spmd_types

    return dict(spmd_types.get_local_type(tensor)) if spmd_types.has_local_type(tensor) else {}


def _together(tensors: Iterable[Tensor], but: Any = None) -> dict[Any, Any]:
    """Return the types of what a rank computes from tensors, by axis, without the axis ``but``."""
    import spmd_types

    found: dict[Any, set[Any]] = {}
    for tensor in tensors:
        for axis, given in _types(tensor).items():
            # A constant goes with each layout.
            if axis != but and (tensor.requires_grad or given is not spmd_types.R):
                found.setdefault(axis, set()).add(given)
            elif axis != but:
                found.setdefault(axis, set())
    result = {}
    for axis, given in found.items():
        if given <= {spmd_types.R, spmd_types.V} and spmd_types.V in given:
            result[axis] = spmd_types.V
        elif not given:
            result[axis] = spmd_types.R
        elif len(given) == 1 and spmd_types.P not in given:
            (result[axis],) = given
        else:
            raise spmd_types.SpmdTypeError(
                f"tensors of the layouts {sorted(map(str, given))} over {axis} do not go together"
            )
    return result


def _set(outputs: Any, types: dict[Any, Any]) -> None:
    import spmd_types

    for tensor in _tensors([outputs]):
        for axis, given in _types(tensor).items():
            if axis in types and given is not types[axis]:
                spmd_types.mutate_type(tensor, axis, src=given, dst=types[axis])
        spmd_types.assert_type(tensor, types)


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _touch(tensors: Iterable[Tensor]) -> None:
    from spmd_types import rules

    rules.ignore(*tensors)
