"""Frozen weights in 8 or 4 bits, whose values do not depend on the number of ranks, and the product with them.

Numbers are stored as codes of ``torchao``'s quantisers. A weight is divided into blocks of consecutive columns of a
row, or whole rows for int8. The largest magnitude in a block determines its scale, in fp32. Blocks and scales are those
of the whole weight: a rank that holds only some columns of a block uses the scale of the whole block.

The product decodes the weight a block of rows at a time, and never holds the whole decoded weight.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map

from shardwise.core.communication.collectives import all_reduce
from shardwise.core.errors import ConfigError
from shardwise.core.sharding import ParamLayout
from shardwise.core.typed import computed_locally

Quantization = Literal["int8", "nf4"]

# Number of elements that are compared with the sixteen levels at once.
_COMPARED = 1 << 20


@dataclass(frozen=True)
class Format:
    """Storage format of a quantised weight.

    Attributes:
        block: number of columns that share a scale; None for whole rows.
        per_byte: number of codes in a byte.
    """

    block: int | None
    per_byte: int


QUANTIZATIONS: dict[str, Format] = {"int8": Format(None, 1), "nf4": Format(64, 2)}
"""int8: one scale per row. nf4: 16 levels at quantiles of a normal distribution, one scale per 64 columns.

Source: Dettmers et al. 2023 (arXiv:2305.14314), section 3, for nf4.
"""


def check_available(kind: Quantization) -> None:
    """Raise ConfigError, with the reason, if ``kind`` is not available on this machine."""
    _torchao(kind)


@functools.cache
def _torchao(kind: str) -> Any:
    # On import, torchao warns about GPU extensions that it cannot load, and PyTorch about torchao's pytree classes.
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        import torchao.quantization
        from torchao.quantization import quant_primitives

        # Other versions may lack these.
        needed = (quant_primitives.choose_qparams_affine_with_min_max, quant_primitives.quantize_affine)
        assert all(needed)
        _ = torchao.quantization.NF4Tensor.quantize_tensor_nearest
    except ImportError as error:
        raise ConfigError(
            f"a base in {kind} needs torchao, which cannot be imported ({error}): pip install 'shardwise[quantization]'"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"a base in {kind} needs torchao, and the one that is installed does not work here "
            f"({type(error).__name__}: {error}): pip install 'shardwise[quantization]'"
        ) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    return torchao.quantization


def encode(kind: Quantization, values: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Encode values ``[rows, columns]``; return the codes and the scales.

    ``largest`` is the largest magnitude in each value's block, ``[rows, columns]``, or ``[rows, 1]`` for whole rows.
    The codes are ``[rows, columns]``, int8 or uint8 from 0 to 15; the scales have the shape of ``largest``.

    Raises:
        ConfigError: ``torchao`` is not available.
    """
    library = _torchao(kind)
    if kind == "int8":
        primitives, block = library.quant_primitives, (1, max(1, values.size(1)))
        # In the weight's dtype, as in torchao's own quantiser, which does not support fp64.
        values = values.float() if values.dtype == torch.float64 else values
        extremes = largest[:, 0].to(values.dtype)
        scales, zeros = primitives.choose_qparams_affine_with_min_max(
            -extremes,
            extremes,
            primitives.MappingType.SYMMETRIC,
            block,
            torch.int8,
            eps=torch.finfo(torch.float32).eps,
            scale_dtype=torch.float32,
        )
        if not values.numel():
            return values.to(torch.int8), scales[:, None]
        return primitives.quantize_affine(values, block, scales, zeros, torch.int8), scales[:, None]
    # Do not divide by the largest magnitude of a block of zeros.
    relative = (values.float() / largest.clamp(min=torch.finfo(torch.float32).tiny)).flatten()
    nearest = library.NF4Tensor.quantize_tensor_nearest
    parts = [nearest(part, levels_on(values.device)).to(torch.uint8) for part in relative.split(_COMPARED)]
    return torch.cat(parts).view(values.shape), largest


def levels_on(device: torch.device) -> Tensor:
    """Return ``torchao``'s sixteen levels of nf4, in fp32."""
    return _levels().to(device)


@functools.cache
def _levels() -> Tensor:
    tensor_class = _torchao("nf4").NF4Tensor
    levels: Tensor = tensor_class.from_tensor(torch.ones(1, 64, dtype=torch.float32), 64, 1).nf4
    return levels


def pack(kind: Quantization, codes: Tensor) -> Tensor:
    """Pack codes ``[rows, columns]`` for storage: two nf4 codes per byte, the first in the upper four bits."""
    if kind == "int8":
        return codes
    if codes.size(1) % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, ::2] << 4 | codes[:, 1::2]


def decode(kind: Quantization, stored: Tensor, scales: Tensor, columns: int) -> Tensor:
    """Decode stored codes to values ``[rows, columns]`` in fp32; there is one scale per value or per row."""
    if kind == "int8":
        return stored.float() * scales
    codes = torch.stack((stored >> 4, stored & 15), dim=2).flatten(1)[:, :columns]
    # Indexing with brackets would copy the codes in 64 bits, and takes six times as long on a CPU.
    levels = torch.index_select(levels_on(stored.device), 0, codes.reshape(-1).int())
    return levels.view(codes.shape).mul_(scales)


_aten = torch.ops.aten
# Number of elements that are decoded at once.
_AT_ONCE = 1 << 22


class QuantizedTensor(Tensor):
    """A rank's part of a weight, ``[rows, columns]``, stored as codes and scales.

    It has the shape, dtype and device of the original weight. An operation on it decodes all values first
    (``quantized_linear`` decodes block by block). In-place operations raise ConfigError.

    Attributes:
        kind: "int8" or "nf4".
        codes: ``[rows, columns]`` int8, or ``[rows, ceil(columns / 2)]`` uint8.
        scales: ``[rows, blocks]`` fp32.
        blocks: ``[columns]``, index of each column's block in ``scales``; None if a block is a whole row.
    """

    __slots__ = ("blocks", "codes", "kind", "scales")
    kind: Quantization
    codes: Tensor
    scales: Tensor
    blocks: Tensor | None

    @staticmethod
    def __new__(
        cls,
        kind: Quantization,
        codes: Tensor,
        scales: Tensor,
        blocks: Tensor | None,
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> Self:
        made: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)
        made.kind, made.codes, made.scales, made.blocks = kind, codes, scales, blocks
        return made

    def __init__(self, *_: object) -> None:
        super().__init__()

    @classmethod
    def empty(cls, kind: Quantization, layout: ParamLayout, rank: int, like: Tensor) -> Self:
        """Create one without values for the part of a matrix on ``rank``, with the dtype and device of ``like``."""
        rows, columns = layout.local_shape(rank)
        form, device = QUANTIZATIONS[kind], like.device
        held = _held_blocks(kind, layout, rank)
        blocks = None if held is None else _blocks(kind, layout, rank, held)
        number = 1 if held is None else len(held)
        return cls(
            kind,
            torch.empty(
                rows, -(-columns // form.per_byte), dtype=torch.int8 if kind == "int8" else torch.uint8, device=device
            ),
            torch.empty(rows, number, dtype=torch.float32, device=device),
            # The columns' blocks do not depend on values.
            blocks if blocks is None or like.is_meta else blocks.to(device),
            torch.Size((rows, columns)),
            like.dtype,
        )

    @property
    def num_bytes(self) -> int:
        """Number of bytes of storage."""
        parts = (self.codes, self.scales, *(() if self.blocks is None else (self.blocks,)))
        return sum(part.numel() * part.itemsize for part in parts)

    def dequantize(self, rows: slice = slice(None)) -> Tensor:
        """Decode some rows, to the weight's dtype."""
        scales = self.scales[rows]
        if self.blocks is not None:
            scales = scales[:, self.blocks]
        return decode(self.kind, self.codes[rows], scales, self.size(1)).to(self.dtype)

    def row_blocks(self) -> Iterator[slice]:
        """Return slices that cover all rows, each of a size that is decoded at once."""
        step = max(1, _AT_ONCE // max(1, self.size(1)))
        return (slice(start, min(start + step, self.size(0))) for start in range(0, self.size(0), step))

    def _with(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> QuantizedTensor:
        blocks = None if self.blocks is None else change(self.blocks)
        parts = change(self.codes), change(self.scales), blocks
        return QuantizedTensor(self.kind, *parts, self.shape, dtype or self.dtype)

    def __repr__(self) -> str:  # type: ignore[override]  # as in Python, without PyTorch's argument
        return f"QuantizedTensor({self.kind}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    # With these, moving a module swaps its parameters, codes included.
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = ["codes", "scales", *([] if self.blocks is None else ["blocks"])]
        return names, (self.kind, self.shape, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> QuantizedTensor:
        kind, shape, dtype = context
        return QuantizedTensor(kind, inner["codes"], inner["scales"], inner.get("blocks"), shape, dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) not in memo:
            copied = self._with(torch.clone)
            memo[id(self)] = torch.nn.Parameter(copied, requires_grad=False) if _is_parameter(self) else copied
        found: QuantizedTensor = memo[id(self)]
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        self = args[0] if args and isinstance(args[0], QuantizedTensor) else None
        if self is not None:
            if func in (_aten.detach.default, _aten.alias.default):
                return self._with(lambda part: part)
            if func is _aten.clone.default:
                return self._with(torch.clone)
            if func is _aten._to_copy.default:
                device, dtype = kwargs.get("device"), kwargs.get("dtype")
                return self._with(lambda part: part.to(device, copy=True), dtype)
            if func is _aten.empty_like.default:
                device = kwargs.get("device")
                blocks = None if self.blocks is None else self.blocks.to(device)
                parts = (torch.empty_like(part, device=device) for part in (self.codes, self.scales))
                return QuantizedTensor(self.kind, *parts, blocks, self.shape, self.dtype)
            if func._schema.is_mutable:
                raise ConfigError(
                    f"a weight in {self.kind} is frozen: it cannot be written to ({func}); load the model without "
                    "quantisation"
                )

        def plain(value: Any) -> Any:
            return value.dequantize() if isinstance(value, QuantizedTensor) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs))


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def _held_blocks(kind: Quantization, layout: ParamLayout, rank: int) -> list[int] | None:
    """Return the blocks of the whole weight that a rank has columns of; None if a block is a row."""
    size = QUANTIZATIONS[kind].block
    if size is None:
        return None
    runs = [(0, layout.global_shape[1])] if layout.dim != 1 else layout.intervals[rank]
    return sorted({block for start, stop in runs if start < stop for block in range(start // size, -(-stop // size))})


def _blocks(kind: Quantization, layout: ParamLayout, rank: int, held: list[int]) -> Tensor:
    """Return the place in ``held`` of the block of each of a rank's columns."""
    blocks = _columns(layout, rank) // cast(int, QUANTIZATIONS[kind].block)
    return torch.searchsorted(torch.tensor(held, dtype=torch.int64), blocks).to(torch.int32)


def _columns(layout: ParamLayout, rank: int) -> Tensor:
    """Return the indices of a rank's columns in the whole weight."""
    if layout.dim != 1:
        return torch.arange(layout.global_shape[1])
    return torch.cat([torch.arange(0), *(torch.arange(*run) for run in layout.intervals[rank])])


@torch.no_grad()
def quantize_shard(kind: Quantization, values: Tensor, layout: ParamLayout, group: ProcessGroup) -> QuantizedTensor:
    """Quantise this rank's part ``values`` of a weight to the codes that one rank would compute.

    If the weight is split by columns, the call is collective: one all-reduce computes the largest magnitudes of whole
    blocks.

    Raises:
        ConfigError: ``torchao`` is not available.
    """
    made = QuantizedTensor.empty(kind, layout, group.rank(), values)
    size, width = QUANTIZATIONS[kind].block, layout.global_shape[1]
    number = 1 if size is None else -(-width // size)
    places = torch.zeros(width, dtype=torch.long) if size is None else torch.arange(width) // size
    own = places[_columns(layout, group.rank())].to(values.device)
    largest = torch.zeros(values.size(0), number, dtype=torch.float32, device=values.device)
    for rows in made.row_blocks():
        wide = values[rows].float().abs()
        largest[rows] = largest[rows].scatter_reduce(1, own.expand_as(wide), wide, "amax")
    if layout.dim == 1 and group.size() > 1:
        largest = all_reduce(largest, group=group, op=dist.ReduceOp.MAX)
    for rows in made.row_blocks():
        of_columns = largest[rows] if size is None else largest[rows][:, own]
        codes, scales = encode(kind, values[rows], of_columns)
        made.codes[rows] = pack(kind, codes)
        if made.blocks is None:
            made.scales[rows] = scales
    if made.blocks is not None:
        made.scales.copy_(largest[:, torch.unique(own)])
    return made


def quantized_linear(input_: Tensor, weight: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``input_ @ weight.T + bias`` of ``[..., i]``, ``[o, i]`` and ``[o]``, without a gradient of the weight.

    The backward decodes the weight again. Neither the decoded weight nor the input is saved.
    """
    output: Tensor = _QuantizedLinear.apply(input_, weight.detach())
    return output if bias is None else output + bias.to(output.dtype)


class _QuantizedLinear(Function):
    spmd_typecheck = computed_locally("input_", "weight")

    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: QuantizedTensor) -> Tensor:
        ctx.weight = weight
        ctx.dtype = input_.dtype
        output = input_.new_empty(*input_.shape[:-1], weight.size(0))
        for rows in weight.row_blocks():
            output[..., rows] = F.linear(input_, weight.dequantize(rows).to(input_.dtype))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        weight: QuantizedTensor = ctx.weight
        flat = grad_output.reshape(-1, weight.size(0)) if weight.size(0) else None
        total = None
        blocks = list(weight.row_blocks())
        # Accumulate over blocks of rows in at least fp32.
        wide = torch.promote_types(ctx.dtype, torch.float32) if len(blocks) > 1 else ctx.dtype
        for rows in blocks:
            assert flat is not None
            part = (flat[:, rows].to(ctx.dtype) @ weight.dequantize(rows).to(ctx.dtype)).to(wide)
            total = part if total is None else total.add_(part)
        shape = (*grad_output.shape[:-1], weight.size(1))
        grad = grad_output.new_zeros(shape) if total is None else total.view(shape)
        return grad.to(ctx.dtype), None
