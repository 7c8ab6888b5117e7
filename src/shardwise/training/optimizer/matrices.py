"""The matrices of a model that Muon orthogonalizes: weights, or their rows, of linear layers and experts."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.errors import ConfigError
from shardwise.core.sharding import Interval, ParamLayout
from shardwise.models.by_plan.model import PlannedModel
from shardwise.models.config import ModelConfig
from shardwise.models.experts.moe import ExpertWeights
from shardwise.models.transformer.attention import SelfAttention
from shardwise.models.transformer.heads import qkv_sections
from shardwise.models.transformer.latent_attention import LatentSelfAttention
from shardwise.models.transformer.layer import TransformerLayer
from shardwise.nn import ColumnLinear
from shardwise.nn.parallel_linear import ParallelLinear

# Names of the linear layers in a transformers layer that choose experts, or scale them; parts of their paths.
_ROUTERS = {"gate", "router", "shared_expert_gate"}
# Names of the weights of all experts of a layer in transformers.
_EXPERTS = {"gate_up_proj", "gate_proj", "up_proj", "down_proj"}


@dataclass(frozen=True)
class Matrix:
    """Rows of a weight that form a matrix, such as the queries of a query-key-value weight.

    Attributes:
        layout: the part of the matrix that each rank holds.
        runs: first index and length of each run of this rank's part, in its part of the weight.
        expert: index in the first dimension of a weight of several experts; None for a weight of one matrix.
        turns: whether the weight is stored ``[in, out]``, and its columns are the matrix's rows.
    """

    layout: ParamLayout
    runs: tuple[tuple[int, int], ...]
    expert: int | None = None
    turns: bool = False

    @property
    def dim(self) -> int:
        assert self.layout.dim is not None
        return self.layout.dim

    def views(self, weight: Tensor) -> list[Tensor]:
        """Return views of this rank's part of the matrix in its part of the weight, one for each run."""
        one = weight if self.expert is None else weight[self.expert]
        return [(one.T if self.turns else one).narrow(self.dim, start, length) for start, length in self.runs]


@cache
def _matrix(layout: ParamLayout, rows: tuple[Interval, ...], rank: int) -> Matrix:
    """Return the matrix that consists of the given runs of a weight's rows."""
    if layout.dim == 1:
        # A weight with split columns is one matrix.
        return Matrix(layout, ((0, layout.local_size(rank)),))
    intervals: list[list[Interval]] = []
    runs: list[list[tuple[int, int]]] = []
    for held in layout.intervals:
        intervals.append([])
        runs.append([])
        local = 0
        for start, stop in held:
            before = 0
            for first, last in rows:
                low, high = max(first, start), min(last, stop)
                if low < high:
                    intervals[-1].append((before + low - first, before + high - first))
                    runs[-1].append((local + low - start, high - low))
                before += last - first
            local += stop - start
    shape = (sum(last - first for first, last in rows), *layout.global_shape[1:])
    # A rank without rows has an empty run.
    held_rows = [each or [(0, 0)] for each in intervals]
    return Matrix(ParamLayout.of_intervals(shape, 0, held_rows), tuple(runs[rank]) or ((0, 0),))


class Weight(NamedTuple):
    """A weight, the ranks that split its matrices (None: each rank has them whole), and those that this rank has."""

    param: Parameter
    group: ProcessGroup | None
    matrices: list[Matrix]


def weights_of(model: nn.Module) -> Iterator[Weight]:
    """Yield the trained weights of the linear layers and experts in transformer layers.

    Raises:
        ConfigError: the model has latent attention, or keys that are values.
    """
    for layer in model.modules():
        if isinstance(layer, PlannedModel):
            yield from _weights_by_plan(layer)
        if not isinstance(layer, TransformerLayer):
            continue
        fused = {}
        for attention in layer.modules():
            if isinstance(attention, LatentSelfAttention):
                raise ConfigError("muon cannot be used with latent attention; use adamw")
            if isinstance(attention, SelfAttention) and attention.keys_are_values:
                raise ConfigError("muon cannot be used with keys that are values (global_heads); use adamw")
            if isinstance(attention, SelfAttention):
                heads = attention.linear_proj.in_features // attention.head_dim
                blocks = attention.linear_qkv.out_features // attention.head_dim
                rows = qkv_sections(heads, (blocks - heads) // 2, attention.head_dim)
                fused[id(attention.linear_qkv)] = rows
        for linear in layer.modules():
            if isinstance(linear, ExpertWeights):
                yield from _weights_of_experts(linear)
            if isinstance(linear, ParallelLinear) and linear.weight is not None and linear.weight.requires_grad:
                section = linear.out_features // (linear.sections if isinstance(linear, ColumnLinear) else 1)
                equal = tuple(((start, start + section),) for start in range(0, linear.out_features, section))
                layout, rank = linear.param_layouts["weight"], linear.group.rank()
                matrices = [_matrix(layout, rows, rank) for rows in fused.get(id(linear), equal)]
                yield Weight(linear.weight, linear.group, matrices)


def _weights_of_experts(experts: ExpertWeights) -> Iterator[Weight]:
    """Yield the weights of experts; the gate, the up and the down projection of each expert are matrices."""
    group, width = experts.expert_tp, experts.param_layouts["down"].global_shape[0] // experts.num
    # The ranks that split this rank's experts follow each other.
    first = experts.group.rank() - group.rank()
    for name in ("up", "down"):
        param, whole = experts.get_parameter(name), experts.param_layouts[name]
        if param.requires_grad:
            held = ParamLayout(whole.global_shape, 0, whole.intervals[first : first + group.size()], group.size())
            rows = whole.global_shape[0] // experts.num
            own = range(experts.first_own * rows, (experts.first_own + experts.num_own) * rows, width)
            matrices = [_matrix(held, ((start, start + width),), group.rank()) for start in own]
            yield Weight(param, group, matrices)


def _weights_by_plan(model: PlannedModel) -> Iterator[Weight]:
    """Yield the trained weights of linear layers and experts in the layers of a model of transformers."""
    for path, module in model.layers.named_modules():
        parts = path.split(".")
        for name, param in module.named_parameters(recurse=False):
            is_linear = name == "weight" and isinstance(module, nn.Linear | ParallelLinear)
            is_of_experts = name in _EXPERTS and param.dim() == 3
            if not param.requires_grad or not (is_of_experts or (is_linear and not _ROUTERS & set(parts))):
                continue
            layout: ParamLayout | None = getattr(module, "param_layouts", {}).get(name)
            *_, num_rows, num_columns = param.shape if layout is None else layout.global_shape
            # transformers says how most experts are stored; others have the hidden size there.
            is_turned = num_rows == model.config.hidden_size != num_columns and name != "down_proj"
            turns = is_of_experts and getattr(module, "is_transposed", is_turned)
            is_whole = layout is None or layout.dim is None
            if layout is None or layout.dim is None:
                layout = ParamLayout.split(param.shape, -1 if turns else -2, 1)
            assert layout.dim is not None
            shape, dim = layout.global_shape[-2:], layout.dim - (param.dim() - 2)
            if turns:
                shape, dim = shape[::-1], 1 - dim
            one = ParamLayout(shape, dim, layout.intervals, layout.world_size)
            are_halves = getattr(module, "is_concatenated", True)
            sections = _sections(parts[-1] if is_linear else name, shape[0], model.config, are_halves=are_halves)
            group = None if is_whole else model.groups.tp
            matrices = [_matrix(one, rows, 0 if group is None else group.rank()) for rows in sections]
            if is_of_experts:
                matrices = [replace(each, expert=i, turns=turns) for i in range(len(param)) for each in matrices]
            yield Weight(param, group, matrices)


def _sections(name: str, num_rows: int, config: ModelConfig, *, are_halves: bool) -> tuple[tuple[Interval, ...], ...]:
    """Return the rows of each matrix in a weight of transformers, by the name of its module or parameter."""
    heads, groups = config.num_attention_heads, config.num_query_groups or config.num_attention_heads
    width, rest = divmod(num_rows, heads + 2 * groups)
    if name == "gate_up_proj" and are_halves:
        return ((0, num_rows // 2),), ((num_rows // 2, num_rows),)
    if name == "qkv_proj" and not rest:
        queries, keys = heads * width, (heads + groups) * width
        return ((0, queries),), ((queries, keys),), ((keys, num_rows),)
    if name == "query_key_value" and not rest:
        return qkv_sections(heads, groups, width)
    return (((0, num_rows),),)
