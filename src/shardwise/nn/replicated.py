"""Replicated parameters: queries over the parameters of a model, and layers that every rank holds whole."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.communication import agreement
from shardwise.core.communication.agreement import check_ids_alike
from shardwise.core.initialization import InitMethod
from shardwise.core.layout import I, R, V
from shardwise.core.sharding import ParamLayout, Replicas
from shardwise.core.topology import Groups
from shardwise.core.typed import letter
from shardwise.core.validation import safe_to_look_up
from shardwise.nn.arithmetic import arithmetic_of
from shardwise.nn.module import ShardedModule


def named_param_layouts(module: nn.Module, world_size: int) -> Iterator[tuple[str, Parameter, ParamLayout]]:
    """Yield name, parameter and layout of each parameter of ``module``; a tied parameter once, under its first name.

    Args:
        module: any module; a parameter without a stated layout is replicated.
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
    """Map each parameter to its replicas, in the order of ``module.parameters()``; a tied one by its first name."""
    found: dict[Parameter, Replicas] = {}
    for owner in module.modules():
        stated: dict[str, Replicas] = getattr(owner, "param_replicas", {})
        for name, param in owner.named_parameters(recurse=False):
            found.setdefault(param, stated.get(name, Replicas()))
    return found


def set_replicas_(module: nn.Module, replicas: Replicas, *names: str) -> None:
    """Set the replicas of the named parameters of a module, without submodules; of all if there are no names."""
    owner: Any = module
    names = names or tuple(name for name, _ in owner.named_parameters(recurse=False))
    owner.param_replicas = getattr(owner, "param_replicas", {}) | dict.fromkeys(names, replicas)


def annotate_(module: nn.Module, groups: Groups) -> None:
    """Type the parameters of ``module`` for the checker ``spmd_types`` over the tensor- and data-parallel groups.

    A split parameter has the layout V. One whose gradients are partial sums has R, which all have over data-parallel
    ranks. Any other has I. Exchanges of objects between ranks are exempt from then on.
    """
    import spmd_types

    for function in (agreement.gather_objects, agreement.decide, agreement.agree):
        spmd_types.register_no_typecheck(function)

    replicas = replicas_of(module)
    for _, param, layout in named_param_layouts(module, groups.tp.size()):
        is_partial = "tp" in replicas[param].summed_over
        own = V(dim=layout.dim) if layout.dim is not None else R if is_partial else I
        types = {groups.tp: letter(own)}
        if groups.dp is not None:
            types[groups.dp] = letter(R)
        spmd_types.assert_type(param, types)


class ReplicatedEmbedding(ShardedModule):
    """An embedding that every rank holds whole, such as the table of learned positions.

    Args:
        num_embeddings, embedding_dim: number and width of rows.
        what: name of an id, for error messages.
        init: function that fills the weight in place.
        group, options: as for ``ShardedModule``.

    Attributes:
        weight: ``[num_embeddings, h]``.
    """

    weight: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        what: str,
        group: ProcessGroup,
        init: InitMethod,
        **options: Any,
    ) -> None:
        super().__init__(group, **options)
        self.what = what
        self._arithmetic = arithmetic_of(group)
        self._make_parameter("weight", ParamLayout.replicated((num_embeddings, embedding_dim), group.size()), init)

    def forward(self, input_: Tensor) -> Tensor:
        """Look up ids of shape ``[...]``; returns ``[..., h]``.

        Raises:
            VocabularyError: an id is out of range.
        """
        num_embeddings = self.weight.size(0)
        check_ids_alike(input_, num_embeddings, what=self.what, group=self.group)
        ids = safe_to_look_up(input_, num_embeddings)
        return self._arithmetic.look_up(F.embedding, ids, self.weight, dim=ids.dim() - 1)

    def first(self, count: int, start: int = 0) -> Tensor:
        """Return a view of ``count`` rows from ``start``, ``[count, h]``, without a check of ids."""
        return self.weight[start : start + count]


class ReplicatedLinear(ShardedModule):
    """A linear layer that every rank of ``group`` holds whole.

    Args:
        in_features, out_features: widths of input and output, ``i`` and ``o``.
        init: function that fills the weight in place; the bias starts at 0.
        bias: whether there is a bias.
        sequence_shards: whether ranks apply the layer to parts of the sequence, so that gradients are partial sums.
        options: as for ``ShardedModule``.

    Attributes:
        weight: ``[o, i]``.
        bias: ``[o]``, or None.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: ProcessGroup,
        init: InitMethod,
        bias: bool = True,
        sequence_shards: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(group, **options)
        weight = ParamLayout.replicated((out_features, in_features), group.size())
        self._make_parameter("weight", weight, init, partial_gradient=sequence_shards)
        layout = ParamLayout.replicated((out_features,), group.size()) if bias else None
        self._make_parameter("bias", layout, torch.nn.init.zeros_, partial_gradient=sequence_shards)

    def forward(self, input_: Tensor) -> Tensor:
        """Map ``[..., i]`` to ``[..., o]``."""
        return F.linear(input_, self.weight, self.bias)
