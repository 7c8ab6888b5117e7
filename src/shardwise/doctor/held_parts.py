"""This rank's parts of parameters, of their gradients and of DTensors, and how the ranks of each axis hold them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardwise.core.sharding.balanced import group_of_rows, local_rows, rows_of_ranks
from shardwise.doctor.places import Axes, Declared, PartOfExperts, declared_of_param, named_parameters


class HeldParts:
    """The parameters of a model (name, parameter, owner, name in the owner), and this rank's parts of tensors."""

    def __init__(self, model: nn.Module, axes: Axes) -> None:
        self.axes, self.params = axes, named_parameters(model)
        self._declared = {name: declared_of_param(owner, key, axes) for name, _, owner, key in self.params}
        self._of_experts = {
            name: part
            for name, _, owner, key in self.params
            if (part := PartOfExperts.of(owner, key, axes)) is not None
        }

    def of_param(self, name: str, param: Tensor, tensor: Tensor) -> tuple[Tensor, Declared]:
        """Return this rank's part of a parameter, or of its gradient, and how the ranks hold it."""
        group, declared, of_experts = group_of_rows(param), self._declared[name], self._of_experts.get(name)
        if group is None:
            own, declared = self.local(tensor, declared)
            return (own, declared) if of_experts is None else of_experts.as_term(own, is_term=False)
        own, rows = local_rows(tensor), rows_of_ranks(param)
        if "cp" not in self.axes and of_experts is None:
            return own, declared | {"dp": ["placed", 0, [[list(interval)] for interval in rows]]}
        # The ranks of both axes split the rows: each has its own, and zeros.
        whole = own.new_zeros(param.shape)
        whole[slice(*rows[group.rank()])] = own
        return self.of_term(name, whole, {"dp": ["P"], "cp": ["P"]})

    def of_term(self, name: str, tensor: Tensor, stated: Declared) -> tuple[Tensor, Declared]:
        """Return this rank's term of a parameter, or of its gradient, and how the ranks hold it."""
        of_experts = self._of_experts.get(name)
        if of_experts is not None:
            return of_experts.as_term(tensor, is_term=True)
        return tensor, self._declared[name] | stated

    def local(self, tensor: Tensor, declared: Declared) -> tuple[Tensor, Declared]:
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
