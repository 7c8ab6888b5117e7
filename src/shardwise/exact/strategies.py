"""The arithmetic of exact mode, for layers whose group sums over parts (``core.communication.trees``).

The gradient of a replicated parameter is a sum over tokens. The sequence is cut into ``exact_parts`` parts, and the
tokens of each part are summed separately. With sequence parallelism a rank has some of the parts, otherwise all. With
context parallelism the first rank sums the parts of all ranks (``exact.context_terms``).
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardwise.core.communication import moves, trees
from shardwise.core.communication.collectives import all_gather, all_reduce
from shardwise.core.communication.context import context_of
from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.sharding import Interval, ParamLayout, Replicas, balanced_sizes, intervals_of_sizes, local_parts
from shardwise.exact.context_terms import gathered, with_whole_gradients
from shardwise.exact.products import USUAL_ROWS, ExactProducts, FewRows
from shardwise.kernels import compiled, dispatch, elementwise, loss_reference
from shardwise.kernels.elementwise import VECTORS, blockwise, softmax_of_rows
from shardwise.kernels.partial_attention import BLOCK_OF_KEYS
from shardwise.nn.arithmetic import Activation, Arithmetic, K, Norm, arithmetic_of
from shardwise.nn.norm import HeadsRMSNorm, NormFunction


def norm_by_parts(norm: nn.Module, input_: Tensor, number: int, others: ProcessGroup | None = None) -> Tensor:
    """Compute ``norm(input_)``, part by part of the sequence.

    Args:
        norm: one of ``nn.norm.NORMS``.
        input_: ``[s, b, h]``, or ``[s/t, b, h]`` with sequence parallelism.
        number: number of this rank's parts.
        others: group whose ranks have the other parts; None if this rank has all parts.
    """
    function = NormFunction.of(norm)
    if _is_compiled(function, input_):
        # Rows are independent; only the weight's gradient is summed by parts.
        normed: Tensor = _RMSNormByParts.apply(input_, function.whole_weight, function.eps, number, others)
        return normed
    return torch.cat(_normed(function, input_.chunk(number), others))


def _normed(norm: NormFunction, parts: Sequence[Tensor], others: ProcessGroup | None) -> list[Tensor]:
    number = len(parts)
    weights = moves.copies(norm.weight, number, group=others)
    biases = (None,) * number if norm.bias is None else moves.copies(norm.bias, number, group=others)
    return [
        _norm_by_rows(dataclasses.replace(norm, weight=weight, bias=bias), part)
        for weight, bias, part in zip(weights, biases, parts, strict=True)
    ]


def add_bias_by_parts(output: Tensor, bias: Tensor, number: int, others: ProcessGroup | None = None) -> Tensor:
    """Compute ``output + bias``; for the arguments see ``norm_by_parts``."""
    result: Tensor = _AddBias.apply(output, bias, number, others)
    return result


def linear_by_rows(input_: Tensor, weight: Tensor, *, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """Compute ``input_ @ weight.T`` with a replicated weight ``[o, i]``, in the input's dtype.

    The input is ``[s, b, i]``, or ``[s/t, b, i]`` with sequence parallelism over the group.

    Raises:
        ShardingError: the parts do not all have the same size.
    """
    return _by_parts(linear_by_parts, input_, [weight], group, sequence_parallel)


def linear_by_parts(input_: Tensor, weight: Tensor, number: int, others: ProcessGroup | None = None) -> Tensor:
    """Compute ``linear_by_rows``; for the arguments see ``norm_by_parts``."""
    weights = moves.copies(weight, number, group=others)
    return torch.cat(
        [_linear(part, each.to(part.dtype)) for part, each in zip(input_.chunk(number), weights, strict=True)]
    )


def _linear(input_: Tensor, weight: Tensor) -> Tensor:
    """Compute the product; the bits of few rows would otherwise depend on their number and that of threads."""
    rows = input_.flatten(0, -2)
    output = F.linear(FewRows().filled(rows), weight)[: rows.size(0)]
    return output.view(*input_.shape[:-1], weight.size(0))


def _norm_heads(norm: nn.Module, heads: Tensor, group: ProcessGroup) -> Tensor:
    # Sums over the heads of all ranks have as many parts of whole heads as possible.
    parts, local = trees.exact_parts(group), heads.size(2)
    assert parts is not None
    number, others = min(parts // group.size(), local & -local), group if group.size() > 1 else None
    some = [part.contiguous() for part in heads.chunk(number, 2)]
    if isinstance(norm, HeadsRMSNorm):
        return torch.cat(_normed_together(norm, some, others), 2)
    return torch.cat(_normed(NormFunction.of(norm), some, others), 2)


def _normed_together(norm: HeadsRMSNorm, parts: list[Tensor], others: ProcessGroup | None) -> list[Tensor]:
    sums, number = [norm.squares_of(part) for part in parts], len(parts)
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    squares = moves.copies(sums[0] if others is None else moves.reduce(sums[0], group=others), number, group=others)
    weights, width, first = moves.copies(norm.weight, number, group=others), parts[0].size(2), norm.heads[0]
    return [
        norm.norm_some(part, square, weight, (first + i * width, first + (i + 1) * width))
        for i, (part, square, weight) in enumerate(zip(parts, squares, weights, strict=True))
    ]


def _norm_by_rows(norm: NormFunction, input_: Tensor) -> Tensor:
    if norm.normalization == "RMSNorm":
        return norm(input_)
    output: Tensor = _LayerNormByRows.apply(input_, norm.whole_weight, norm.bias, norm.eps)
    return output


def _is_compiled(norm: NormFunction, input_: Tensor) -> bool:
    """True if the compiled loops norm the rows, which they then do for any number of rows."""
    if norm.normalization != "RMSNorm" or input_.size(-1) % 2:
        return False
    return dispatch.ELEMENTWISE.runs(input_, norm.weight, size=dispatch.ELEMENTWISE.min_size)


class _RMSNormByParts(Function):
    @staticmethod
    def forward(
        ctx: Any, input_: Tensor, weight: Tensor, eps: float, number: int, group: ProcessGroup | None
    ) -> Tensor:
        input_ = input_.contiguous()
        output, scale = compiled.rms_norm(input_, weight, eps)
        ctx.save_for_backward(input_, weight, scale)
        ctx.number, ctx.group = number, group
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        input_, weight, scale = ctx.saved_tensors
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        grad_input, total = compiled.rms_norm_gradient(
            input_, grad, weight, scale, needs_input=needs_input, needs_weight=needs_weight, num_parts=ctx.number
        )
        if total is not None:
            total = trees.tree_sum_stacked_(total)
            total = total if ctx.group is None else all_reduce(total, group=ctx.group)
        return grad_input, total, None, None, None


class _LayerNormByRows(Function):
    """LayerNorm whose weight and bias gradients sum the rows in one order, at any number of threads."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        output, mean, scale = torch.native_layer_norm(input_, weight.shape, weight, bias, eps)
        ctx.save_for_backward(input_, weight, bias, mean, scale)
        result: Tensor = output
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        input_, weight, bias, mean, scale = ctx.saved_tensors
        grad = grad.contiguous()
        numbers = (grad, input_, weight.shape, mean, scale, weight, bias)
        grad_input = torch.ops.aten.native_layer_norm_backward(*numbers, [True, False, False])[0]
        normed = (input_ - mean) * scale
        return grad_input, *(x.flatten(0, -2).sum(0).to(weight.dtype) for x in (grad * normed, grad)), None


class _AddBias(Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, bias: Tensor, number: int, group: ProcessGroup | None) -> Tensor:
        ctx.number, ctx.group, ctx.dtype = number, group, bias.dtype
        return output + bias.to(output.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = None
        if ctx.needs_input_grad[1]:
            total = trees.tree_sum([part.flatten(0, -2).sum(0) for part in grad.contiguous().chunk(ctx.number)])
            total = (total if ctx.group is None else all_reduce(total, group=ctx.group)).to(ctx.dtype)
        return grad, total, None, None


def _by_parts(
    function: Callable[..., Tensor],
    input_: Tensor,
    params: Sequence[Tensor],
    group: ProcessGroup,
    sequence_parallel: bool,
) -> Tensor:
    """Compute ``function(input_, *params, number, others)``; see ``norm_by_parts`` for the last two arguments."""
    context, number = arithmetic_of(group).context, trees.exact_parts(group)
    if context is None:
        return function(input_, *params, *_own_parts(input_, group, sequence_parallel))

    def gather(own: Tensor, dim: int) -> Tensor:
        return gathered(all_gather(own.contiguous(), group=group, dim=dim) if sequence_parallel else own, group=context)

    def of_all(whole: Tensor, *params: Tensor) -> Tensor:
        return function(whole, *params, number, None)

    output = function(input_, *(param.detach() for param in params), 1, None)
    return with_whole_gradients(output, of_all, [input_], params, gather=gather, group=context)


def _own_parts(input_: Tensor, group: ProcessGroup, sequence_parallel: bool) -> tuple[int, ProcessGroup | None]:
    """Return the number of parts of the sequence that this rank has, and the group that has the other parts."""
    parts = trees.exact_parts(group)
    assert parts is not None
    number, others = (parts // group.size(), group) if sequence_parallel and group.size() > 1 else (parts, None)
    if input_.size(0) % number == 0:
        return number, others
    if torch.is_grad_enabled():
        raise ShardingError(
            f"exact: {input_.size(0)} positions of a sequence cannot be cut into {number} equal parts on each of "
            f"{group.size()} ranks; use a length that is a multiple of {parts}, or fewer exact_parts"
        )
    # There is no gradient to sum by parts.
    return 1, others


class ExactNorm(Norm):
    """``Norm`` by parts of the sequence or the heads; gradients are complete as soon as they are computed."""

    @staticmethod
    def replicas(*, applied_apart: bool) -> Replicas:
        return Replicas()

    def __call__(self, norm: nn.Module, input_: Tensor) -> Tensor:
        return self._of_module(norm_by_parts, norm, input_)

    def add_and_norm(self, norm: nn.Module, residual: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + added
        return total, self(norm, total)

    def heads(self, query_norm: nn.Module, key_norm: nn.Module, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        def by_heads(norm: nn.Module, heads: Tensor, *_: object) -> Tensor:
            return _norm_heads(norm, heads, self.group)

        return self._of_module(by_heads, query_norm, query), self._of_module(by_heads, key_norm, key)

    def add_bias(self, output: Tensor, bias: Tensor) -> Tensor:
        return _by_parts(add_bias_by_parts, output, [bias], self.group, self.sequence_parallel)

    def row_output(self, multiply: Callable[[Tensor | None], Tensor], bias: Tensor | None) -> Tensor:
        output = multiply(None)
        return output if bias is None else self.add_bias(output, bias)

    def _of_module(self, function: Callable[..., Tensor], norm: nn.Module, input_: Tensor) -> Tensor:
        names, params = zip(*norm.named_parameters(), strict=True)

        def normed(input_: Tensor, *given: Any) -> Tensor:
            *params, number, others = given
            with_params = copy.copy(norm)
            with_params._parameters = dict(zip(names, params, strict=True))
            return function(with_params, input_, number, others)

        return _by_parts(normed, input_, params, self.group, self.sequence_parallel)


# Multiplications above which PyTorch always multiplies matrices in 16 bits by oneDNN (ATen's mkldnn_gemm_min_size).
_SMALL = 16**3


class ExactActivation(Activation):
    """``Activation`` in blocks of a fixed size, so that the bits of an element do not depend on its position."""

    def __call__(self, function: Callable[[Tensor], Tensor], input_: Tensor) -> Tensor:
        return blockwise(function, input_)

    def softmax(self, input_: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return softmax_of_rows(input_, dtype)

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """See ``Activation``: sum over keys in blocks, whose number then affects no bit.

        Small matrices in 16 bits are multiplied one by one: PyTorch chooses a kernel by the size of all heads together.
        """
        if left.size(-1) > BLOCK_OF_KEYS:
            blocks = zip(left.split(BLOCK_OF_KEYS, -1), right.split(BLOCK_OF_KEYS, -2), strict=True)
            return reduce(torch.add, (self.matmul(*each) for each in blocks))
        size = left.size(-2) * left.size(-1) * right.size(-1)
        if left.device.type != "cpu" or left.dtype not in (torch.bfloat16, torch.float16) or size > _SMALL:
            return left @ right
        products = [one @ other for one, other in zip(left.flatten(0, 1), right.flatten(0, 1), strict=True)]
        result: Tensor = torch.stack(products).unflatten(0, left.shape[:2])
        return result

    swiglu = staticmethod(partial(elementwise.swiglu, at_any_size=True))
    rotate = staticmethod(partial(elementwise.rotate, at_any_size=True))

    def split_and_rotate(
        self,
        mixed: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        queries_per_group: int,
        head_dim: int,
        interleaved: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = elementwise.split(mixed, queries_per_group=queries_per_group, head_dim=head_dim)
        query, key = (self.rotate(each, cos, sin, interleaved=interleaved) for each in (query, key))
        return query, key, value

    def kernels(self, table: Sequence[K]) -> tuple[K, ...]:
        return tuple(kernel for kernel in table if kernel.counts_from_start or not kernel.adds_parts)

    def counted_heads(self, local: int, whole: int) -> int:
        """Count all heads: gradients of keys and values are sums over blocks, which must not depend on the ranks."""
        return whole


class ExactArithmetic(Arithmetic):
    """The arithmetic of a group that sums over parts.

    Args:
        context: see ``Arithmetic``.

    Attributes:
        few: how products of few rows are padded.
    """

    norm = ExactNorm
    activation = ExactActivation()

    def __init__(self, context: ProcessGroup | None = None) -> None:
        self.context = context
        self.few = FewRows()

    def look_up(self, function: Callable[[Tensor, Tensor], Tensor], ids: Tensor, weight: Tensor, *, dim: int) -> Tensor:
        if self.context is None:
            return function(ids, weight)
        context = self.context
        return with_whole_gradients(
            function(ids, weight.detach()),
            function,
            [ids],
            [weight],
            gather=lambda own, dim: gathered(own, group=context, dim=dim),
            group=context,
            dim=dim,
        )

    def embed(
        self,
        function: Callable[[Tensor, Tensor], Tensor],
        ids: Tensor,
        weight: Tensor,
        *,
        reduce: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """See ``Arithmetic``. A row's gradient is summed in the order of ``[s, b]``, as with sequence parallelism."""
        return reduce(self.look_up(function, ids.transpose(0, 1), weight, dim=0)).transpose(0, 1)

    def products(self, layout: ParamLayout, split: Literal["output", "input"], *, group: ProcessGroup) -> ExactProducts:
        """See ``Arithmetic``; raise ConfigError if the ranks cannot share the parts."""
        number = trees.exact_parts(group)
        assert number is not None
        assert layout.dim is not None
        parts = local_parts(layout, group.rank(), number, what=f"the {split} of a linear layer")
        size = layout.global_shape[layout.dim]
        return ExactProducts(parts, split, size, number, context=self.context, few=self.few)

    def parts_of_vocabulary(
        self, ranges: Sequence[Interval], num_tokens: int, *, group: ProcessGroup
    ) -> tuple[list[Interval], Sequence[Interval], int]:
        """See ``Arithmetic``: the parts that the group sums over. The vocabulary alone decides the kernels."""
        number = trees.exact_parts(group)
        assert number is not None
        first, vocab_size, per_rank = ranges[group.rank()][0], ranges[-1][1], number // group.size()
        parts = intervals_of_sizes(balanced_sizes(vocab_size, number))
        if any(run != (parts[i * per_rank][0], parts[(i + 1) * per_rank - 1][1]) for i, run in enumerate(ranges)):
            raise ConfigError(
                f"exact: the loss over {vocab_size} ids is cut into {number} parts, and the bounds of the ranks' ids "
                f"({list(ranges)}) are not among the cuts; use a vocabulary that {number} divides, without padding"
            )
        own = parts[group.rank() * per_rank : (group.rank() + 1) * per_rank]
        return [(start - first, stop - first) for start, stop in own], parts, USUAL_ROWS * vocab_size

    def may_fuse_loss(self) -> bool:
        """False: sums are over parts of the logits."""
        return False

    def scales_before_loss(self) -> bool:
        """True, as in generation."""
        return True

    def row_statistics(self, kernels: Any, logits: Tensor, target_local: Tensor, **options: Any) -> Tensor:
        """See ``Arithmetic``. PyTorch's loops over all rows get whole vectors, like those of ``blockwise``."""
        rest = -len(logits) % VECTORS if kernels is loss_reference and logits.is_cpu else 0
        if rest:
            logits, target_local = F.pad(logits, (0, 0, 0, rest)), F.pad(target_local, (0, rest), value=-1)
        statistics: Tensor = kernels.row_statistics(logits, target_local, **options)
        return statistics[: len(statistics) - rest]

    def tokens_of_loss(self, choose: Callable[[], Tensor | None]) -> Tensor | None:
        """None: sums are over all tokens, including those that do not count."""
        return None

    def sums_in_order(self, ids: Tensor) -> bool:
        """True on CUDA, where the zeros that replace other ranks' ids would shift the runs that are added."""
        return ids.is_cuda

    def refuse(self, message: str) -> None:
        raise ConfigError(message)


def sum_in_parts(group: ProcessGroup, parts: int, *, context: ProcessGroup | None = None) -> None:
    """Sum over ``group`` by a tree over ``parts`` parts from now on, also in layers created on it later.

    For arguments and errors see ``core.communication.trees.sum_in_parts``.

    Args:
        context: the ranks that share the positions of the layers' samples; None if each has whole samples.

    Raises:
        ConfigError: ``context`` and ``group`` together have more ranks than there are parts, or a part of a sequence
            lies on several ranks.
    """
    trees.sum_in_parts(group, parts)
    if context is not None and context.size() == 1:
        context = None
    if context is not None:
        own, shared = group.size(), context.size()
        if not trees.is_power_of_two(shared) or max(2, own) * shared > parts:
            raise ConfigError(
                f"exact sums over {parts} parts need a power of two of context-parallel ranks (cp), at most {parts} / "
                f"2, and tp x cp of at most {parts}, and there are tp {own} and cp {shared}; use fewer ranks, or more "
                "exact_parts"
            )
    context_of(group).arithmetic = ExactArithmetic(context)
