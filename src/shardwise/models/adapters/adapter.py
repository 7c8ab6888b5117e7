"""The factors of an adapter, split over the ranks like the layer that it adapts.

A fused weight of ours may combine several Hugging Face weights (query, key and value; gate and up), or hold the rows in
another order (GPT-2's ``c_attn``). A *section* maps each row of a Hugging Face weight to its row in the fused weight.
"""

import functools
import math

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import init

from shardwise.core.communication.collectives import all_reduce
from shardwise.core.errors import ShardingError
from shardwise.core.sharding import Interval, ParamLayout
from shardwise.core.validation import on_host
from shardwise.models.adapters.config import LoraConfig
from shardwise.nn import ColumnLinear, RowLinear, ShardedModule, arithmetic_of
from shardwise.nn.parallel_linear import ParallelLinear


@on_host
def section_layout(section: Tensor, fused: ParamLayout, width: int) -> ParamLayout:
    """Return the layout of a tensor ``[len(section), width]`` for a section of a weight with the layout ``fused``.

    ``section`` has for each row its row in the fused weight. A rank holds a row if it holds its fused row; rows are in
    ascending order.

    Raises:
        ShardingError: the fused weight is not split along dimension 0, or lacks a row of the section.
    """
    if fused.dim != 0:
        raise ShardingError(f"a section is of rows; the fused weight is split along dimension {fused.dim}")
    if section.numel() and not 0 <= int(section.min()) <= int(section.max()) < fused.global_shape[0]:
        raise ShardingError(f"a section has rows outside the fused weight's {fused.global_shape[0]}")
    intervals = tuple(_intervals(_held(section, fused, rank)) for rank in range(fused.world_size))
    return ParamLayout((len(section), width), 0, intervals, fused.world_size)


@on_host
def local_places(section: Tensor, fused: ParamLayout, rank: int) -> Tensor | None:
    """Map the rank's rows of ``section_layout``, in local order, to rows of its part of the fused weight.

    Returns None for the identity.
    """
    own = torch.arange(fused.local_size(rank))
    places = torch.full(fused.global_shape[:1], -1)
    places[_rows(fused, rank)] = own
    held: Tensor = places[section[_held(section, fused, rank)]]
    return None if torch.equal(held, own) else held


def _rows(fused: ParamLayout, rank: int) -> Tensor:
    return torch.cat([torch.arange(0), *(torch.arange(start, stop) for start, stop in fused.intervals[rank])])


def _held(section: Tensor, fused: ParamLayout, rank: int) -> Tensor:
    """Return the section's rows on a rank, in ascending order."""
    is_held = torch.zeros(fused.global_shape[0], dtype=torch.bool)
    is_held[_rows(fused, rank)] = True
    return is_held[section].nonzero().flatten()


def _intervals(rows: Tensor) -> tuple[Interval, ...]:
    """Convert ascending rows to intervals: 0, 1 and 4 become ``((0, 2), (4, 5))``."""
    if not rows.numel():
        return ((0, 0),)
    ends = (rows.diff() != 1).nonzero().flatten()
    starts = [int(rows[0]), *rows[ends + 1].tolist()]
    stops = [*(rows[ends] + 1).tolist(), int(rows[-1]) + 1]
    return tuple(zip(starts, stops, strict=True))


# PEFT initialises A like the weight of nn.Linear: uniformly within 1 / sqrt(fan in).
INIT_A = functools.partial(init.kaiming_uniform_, a=math.sqrt(5))
_REDUCED_PRECISION = (torch.float16, torch.bfloat16)


class Adapter(ShardedModule):
    """Base of the two factors for one Hugging Face layer.

    Attributes:
        r, scaling: rank, and factor of the product.
    """

    def __init__(self, layer: ShardedModule, weight: Tensor, config: LoraConfig) -> None:
        super().__init__(
            layer.group,
            device=weight.device,
            dtype=torch.float32 if weight.dtype in _REDUCED_PRECISION else weight.dtype,
            # The factors are initialised even if the weight was read from a file.
            initialize=True,
            init_on_cpu=layer.init_on_cpu,
        )
        self.r, self.scaling = config.r, config.scaling

    def to_file(self, name: str, whole: Tensor) -> Tensor:
        """Return the whole factor ``name`` as ``peft`` stores it."""
        return whole

    def from_file(self, name: str, stored: Tensor) -> Tensor:
        """Return the whole factor ``name`` from the tensor that ``peft`` stores."""
        return stored


class LoraAdapter(Adapter):
    """The two factors for one Hugging Face linear layer.

    Factors of a layer in half precision are stored in fp32, so that small updates are not lost, and multiplied in the
    layer's dtype.

    ``section`` maps the adapter's output features to those of a column-parallel layer; None is the identity.

    Attributes:
        r, scaling: rank, and factor of the product.
        lora_A: ``[r, i]`` for a column-parallel layer, ``[r, i/t]`` for a row-parallel one.
        lora_B: ``[o/t, r]`` for a column-parallel layer, ``[o, r]`` for a row-parallel one; starts at 0.
        lora_magnitude_vector: with ``use_dora``, ``[o/t]`` or ``[o]``; starts as the lengths of the weight's rows.
        places: ``[o/t]``, indices of the adapter's features in this rank's output; None for the identity.
    """

    places: Tensor | None

    def __init__(self, layer: ParallelLinear, config: LoraConfig, section: Tensor | None = None) -> None:
        assert layer.weight is not None
        weight_layout = layer.param_layouts["weight"]
        super().__init__(layer, layer.weight, config)
        t, rank = self.group.size(), self.group.rank()
        output_size, input_size = weight_layout.global_shape
        places: Tensor | None = None
        if isinstance(layer, ColumnLinear):
            if section is None:
                section = on_host(torch.arange)(output_size)
            layout_a = ParamLayout.replicated((config.r, input_size), t)
            layout_b = section_layout(section, weight_layout, config.r)
            partial_a, partial_b = layer.sequence_parallel, False
            places = local_places(section, weight_layout, rank)
        else:
            layout_a = ParamLayout((config.r, input_size), 1, weight_layout.intervals, t, weight_layout.stride)
            layout_b = ParamLayout.replicated((output_size, config.r), t)
            partial_a, partial_b = False, t > 1
        replicas_of = arithmetic_of(self.group).norm.replicas
        replicas_a, replicas_b = replicas_of(applied_apart=partial_a), replicas_of(applied_apart=partial_b)
        self._make_parameter("lora_A", layout_a, INIT_A, replicas_a)
        self._make_parameter("lora_B", layout_b, init.zeros_, replicas_b)
        self.lora_A: nn.Parameter
        self.lora_B: nn.Parameter
        if config.use_dora:
            layout_m = ParamLayout(
                layout_b.global_shape[:1], layout_b.dim, layout_b.intervals, layout_b.world_size, layout_b.stride
            )
            lengths = row_lengths(layer, layer.weight.detach())
            own = lengths if places is None else lengths[places.to(lengths.device)]
            self._make_parameter("lora_magnitude_vector", layout_m, init.zeros_, replicas_b)
            self.lora_magnitude_vector: nn.Parameter
            with torch.no_grad():
                self.lora_magnitude_vector.copy_(own)
        self.register_buffer("places", None if places is None else places.to(layer.weight.device), persistent=False)

    def extra_repr(self) -> str:
        layout = self.param_layouts
        (r, in_features), out_features = layout["lora_A"].global_shape, layout["lora_B"].global_shape[0]
        return (
            f"in_features={in_features}, out_features={out_features}, r={r}, tp={self.group.rank()}/{self.group.size()}"
        )


def row_lengths(layer: ParallelLinear, weight: Tensor) -> Tensor:
    """Return the 2-norm of each row of this rank's part of a weight, ``[o/t]`` or ``[o]``, in fp32 or wider.

    ``weight`` is split like that of ``layer``. The ranks of a row-parallel layer sum the squares of their parts.
    """
    return lengths(weight, 1, layer.group if isinstance(layer, RowLinear) else None)


def lengths(weight: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    """Return the 2-norm along ``dim``, in fp32 or wider. If ``group`` is given, its ranks split ``dim``."""
    squares = weight.to(torch.promote_types(weight.dtype, torch.float32)).square().sum(dim)
    if group is not None and group.size() > 1:
        squares = all_reduce(squares, group=group)
    return squares.sqrt()
