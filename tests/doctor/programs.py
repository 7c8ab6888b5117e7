"""Three small training programs that are not Shardwise's, and the faults that can be planted in them.

``by_hand`` calls the collectives itself, ``with_dtensor`` uses ``torch.distributed.tensor.parallel``, and
``with_transformers`` loads a model of Hugging Face with its own plan. Each runs on one rank as a plain dense program,
and on several ranks comes to the same losses. Hidden states are ``[batch, sequence, width]``.

A fault is a name. A program compares it at the one place where it changes something, so that nothing stays behind.
"""

from __future__ import annotations

import logging
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.nn import Parameter

STEPS, MICRO_BATCHES = 2, 2
BATCH, LENGTH, VOCAB, WIDTH, HEADS, LAYERS = 4, 12, 36, 32, 4, 2
IGNORED = -100
MAX_NORM = 0.5


class Watcher(Protocol):
    """What a program calls, so that something may look at it while it trains."""

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Called once, before the first step."""

    def gradients(self) -> None:
        """Called in each step when gradients are complete over ranks and micro-batches, before they are clipped."""

    def inputs(self, **tensors: Tensor) -> None:
        """Called before the forward of each micro-batch with this rank's ids and labels."""


@dataclass(frozen=True)
class Options:
    """Layout and variant of a program.

    Attributes:
        tp: number of ranks that split each layer; the others are data-parallel. None for all.
        sequence: whether the activations between split layers are split along the sequence.
        dropout: probability.
        key_bias: whether keys have a bias, whose true gradient is 0.
        optimizer: ``"adamw"`` or ``"sgd"``.
        architecture: of ``with_transformers``.
    """

    tp: int | None = None
    sequence: bool = False
    dropout: float = 0.0
    key_bias: bool = False
    optimizer: Literal["adamw", "sgd"] = "adamw"
    architecture: Literal["llama", "qwen3"] = "llama"


def _generator(*what: object) -> torch.Generator:
    """Make a generator that depends only on ``what``."""
    return torch.Generator().manual_seed(zlib.crc32(repr(what).encode()))


def _batch(step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """Make the ids and labels ``[batch, sequence]`` of all ranks; each sample ignores another number of labels."""
    start = torch.randint(VOCAB, (BATCH, 1), generator=_generator("ids", step, micro_batch))
    stride = torch.randint(1, VOCAB, (BATCH, 1), generator=_generator("strides", step, micro_batch))
    ids = (start + stride * torch.arange(LENGTH + 1)) % VOCAB
    labels = ids[:, 1:].clone()
    for sample in range(BATCH):
        labels[sample, : 2 * sample] = IGNORED
    return ids[:, :-1].contiguous(), labels


def _num_labels(labels: Tensor) -> int:
    return int((labels != IGNORED).sum())


def _make_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    params = list(model.parameters())
    if kind == "sgd":
        return torch.optim.SGD(params, lr=0.5, foreach=False)
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), foreach=False)


# The program by hand.


@dataclass(frozen=True)
class _Ranks:
    """Groups of this rank, and the planted fault.

    Attributes:
        tp, dp: groups; None stands for this rank alone.
        sequence: whether the sequence is split over ``tp``.
        fault: name of the fault, or "".
    """

    tp: ProcessGroup | None
    dp: ProcessGroup | None
    sequence: bool
    fault: str

    @property
    def size(self) -> int:
        return 1 if self.tp is None else self.tp.size()

    @property
    def rank(self) -> int:
        return 0 if self.tp is None else self.tp.rank()

    @property
    def dp_size(self) -> int:
        return 1 if self.dp is None else self.dp.size()

    @property
    def dp_rank(self) -> int:
        return 0 if self.dp is None else self.dp.rank()

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a whole tensor."""
        return tensor.chunk(self.size, dim)[self.rank]


def _summed(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    if group is None:
        return tensor
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _joined(tensor: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    if group is None:
        return tensor
    own = tensor.detach().contiguous()
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return torch.cat(parts, dim)


def _own(tensor: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    return tensor if group is None else tensor.chunk(group.size(), dim)[group.rank()].contiguous()


class _Apply(Function):
    """One function in the forward, another in the backward."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.backward_function = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.backward_function(grad), None, None


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def _apply(tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = _Apply.apply(tensor, forward, backward)
    return result


class _StaleInput(Function):
    """A linear function whose weight gradient uses another input than the forward."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept, weight)
        return F.linear(input_, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        kept, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, 1).t() @ kept.flatten(0, 1), None


class _Part(nn.Module):
    """A module that knows its name and its ranks, and which dimension of each parameter is split."""

    def __init__(self, ranks: _Ranks, name: str) -> None:
        super().__init__()
        self.ranks, self.name = ranks, name
        self.split: dict[str, int] = {}

    def has(self, fault: str, name: str) -> bool:
        """Return whether a fault is planted in this module, of that name."""
        return self.ranks.fault == fault and self.name == name

    def make(self, name: str, *shape: int, dim: int | None = None) -> None:
        """Make this rank's part of a parameter; ``dim`` is the dimension that is split."""
        whole = torch.randn(shape, generator=_generator(self.name, name), dtype=torch.float64) * 0.2
        if name == "weight" and len(shape) == 1:
            whole = whole + 1
        if self.has("other initial values on the last rank", "positions") and self.ranks.rank == self.ranks.size - 1:
            whole = torch.randn(shape, generator=_generator("another seed"), dtype=torch.float64) * 0.2
        if self.has("halves of a column layer exchanged", "layers.1.mlp.up") and self.ranks.size > 1:
            whole = whole.roll(shape[0] // 2, 0)
        if dim is not None:
            self.split[name] = dim
            whole = self.ranks.part(whole, dim)
        self.register_parameter(name, Parameter(whole.clone()))


class Column(_Part):
    """Linear layer whose output features are split: ``[b, s, i]`` (or ``[b, s/t, i]``) to ``[b, s, o/t]``."""

    def __init__(self, ranks: _Ranks, name: str, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__(ranks, name)
        self.make("weight", outputs, inputs, dim=0)
        self.register_parameter("bias", None)
        if bias:
            self.make("bias", outputs, dim=0)
        self._kept: Tensor | None = None

    def forward(self, input_: Tensor) -> Tensor:
        group = self.ranks.tp
        if group is not None and self.ranks.sequence:
            input_ = _apply(input_, lambda x: _joined(x, group, 1), lambda g: _own(_summed(g, group), group, 1))
        elif group is not None and not self.has("input gradient not summed", "layers.0.mlp.up"):
            input_ = _apply(input_, _same, lambda g: _summed(g, group))
        if self.has("gathered input of the micro-batch before", "layers.0.mlp.up"):
            kept, self._kept = self._kept, input_.detach()
            output: Tensor = _StaleInput.apply(input_, self.weight, self._kept if kept is None else kept)
            return output if self.bias is None else output + self.bias
        return F.linear(input_, self.weight, self.bias)


class Row(_Part):
    """Linear layer whose input features are split: ``[b, s, i/t]`` to ``[b, s, o]`` (or ``[b, s/t, o]``)."""

    def __init__(self, ranks: _Ranks, name: str, inputs: int, outputs: int) -> None:
        super().__init__(ranks, name)
        self.make("weight", outputs, inputs, dim=1)
        self.make("bias", outputs)

    def forward(self, input_: Tensor) -> Tensor:
        return self.sum(F.linear(input_, self.weight)) + self.bias

    def sum(self, output: Tensor) -> Tensor:
        """Sum the ranks' products."""
        group = self.ranks.tp
        if group is None:
            return output
        if self.ranks.sequence:
            if self.has("parts of the sequence in another order", "layers.0.mlp.down"):
                return _apply(
                    output,
                    lambda x: _own(_summed(x, group).roll(LENGTH // 2, 1), group, 1),
                    lambda g: _joined(g, group, 1).roll(-(LENGTH // 2), 1),
                )
            return _apply(output, lambda x: _own(_summed(x, group), group, 1), lambda g: _joined(g, group, 1))
        if self.has("output not summed", "layers.1.attention.output"):
            return output
        if self.has("output summed twice", "layers.0.mlp.down"):
            return _apply(output, lambda x: _summed(_summed(x, group), group), _same)
        if self.has("sum with a sum as its backward", "layers.1.attention.output"):
            return _apply(output, lambda x: _summed(x, group), lambda g: _summed(g, group))
        if self.has("output summed over the replicas", "layers.0.mlp.down"):
            return _apply(output, lambda x: _summed(x, self.ranks.dp), _same)
        return _apply(output, lambda x: _summed(x, group), _same)


class Tokens(_Part):
    """Embedding whose vocabulary is split: ids ``[b, s]`` to ``[b, s, h]`` (or ``[b, s/t, h]``)."""

    def __init__(self, ranks: _Ranks, name: str) -> None:
        super().__init__(ranks, name)
        self.make("weight", VOCAB, WIDTH, dim=0)

    def forward(self, ids: Tensor) -> Tensor:
        group, size = self.ranks.tp, self.weight.size(0)
        if group is None:
            return F.embedding(ids, self.weight)
        start = self.ranks.rank * size
        if self.ranks.fault == "vocabulary offset by one" and start:
            start += 1
        local = ids - start
        elsewhere = (local < 0) | (local >= size)
        output = F.embedding(local.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.ranks.fault == "embedding of the first rank":

            def of_first(tensor: Tensor) -> Tensor:
                tensor = tensor.detach().clone()
                dist.broadcast(tensor, group=group, group_src=0)
                return tensor

            return _apply(output, of_first, _same)
        if self.ranks.sequence:
            return _apply(output, lambda x: _own(_summed(x, group), group, 1), lambda g: _joined(g, group, 1))
        return _apply(output, lambda x: _summed(x, group), _same)


class Positions(_Part):
    """Table of positions ``[n]`` that every rank has: to ``[n, h]``."""

    def __init__(self, ranks: _Ranks, name: str) -> None:
        super().__init__(ranks, name)
        self.make("weight", LENGTH, WIDTH)

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(positions, self.weight)


class Norm(_Part):
    """LayerNorm that every rank has."""

    def __init__(self, ranks: _Ranks, name: str) -> None:
        super().__init__(ranks, name)
        self.make("weight", WIDTH)
        self.make("bias", WIDTH)

    def forward(self, input_: Tensor) -> Tensor:
        return F.layer_norm(input_, (WIDTH,), self.weight, self.bias)


class Dropout(_Part):
    """Dropout of hidden states with the mask of one rank, of which each rank takes its part."""

    def __init__(self, ranks: _Ranks, name: str, p: float) -> None:
        super().__init__(ranks, name)
        self.p, self.number = p, 0

    def forward(self, input_: Tensor) -> Tensor:
        if self.p == 0:
            return input_
        ranks, self.number = self.ranks, self.number + 1
        whole = torch.rand((BATCH, LENGTH, WIDTH), generator=_generator(self.name, self.number)) >= self.p
        keep = whole.chunk(ranks.dp_size, 0)[ranks.dp_rank]
        if ranks.fault == "replicas share a dropout mask":
            keep = whole.chunk(ranks.dp_size, 0)[0]
        if ranks.sequence:
            keep = ranks.part(keep, 1)
            if ranks.fault == "parts of the sequence share a dropout mask":
                keep = whole[:, : keep.size(1)]
        elif self.has("each rank its own dropout mask", "layers.0.mlp_dropout") and ranks.rank:
            keep = keep.roll(1, 2)
        return input_ * keep.to(input_.dtype) / (1 - self.p)


class Attention(nn.Module):
    """Causal attention whose heads are split."""

    def __init__(self, ranks: _Ranks, name: str, key_bias: bool) -> None:
        super().__init__()
        self.query = Column(ranks, f"{name}.query", WIDTH, WIDTH, bias=True)
        self.key = Column(ranks, f"{name}.key", WIDTH, WIDTH, bias=key_bias)
        self.value = Column(ranks, f"{name}.value", WIDTH, WIDTH, bias=True)
        self.output = Row(ranks, f"{name}.output", WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            each(hidden).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.output(context.transpose(1, 2).flatten(2))
        return result


class MLP(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, ranks: _Ranks, name: str) -> None:
        super().__init__()
        self.up = Column(ranks, f"{name}.up", WIDTH, 4 * WIDTH, bias=True)
        self.down = Row(ranks, f"{name}.down", 4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(hidden)))
        return result


class Layer(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, ranks: _Ranks, name: str, options: Options) -> None:
        super().__init__()
        self.norm1 = Norm(ranks, f"{name}.norm1")
        self.attention = Attention(ranks, f"{name}.attention", options.key_bias)
        self.attention_dropout = Dropout(ranks, f"{name}.attention_dropout", options.dropout)
        self.norm2 = Norm(ranks, f"{name}.norm2")
        self.mlp = MLP(ranks, f"{name}.mlp")
        self.mlp_dropout = Dropout(ranks, f"{name}.mlp_dropout", options.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention_dropout(self.attention(self.norm1(hidden)))
        result: Tensor = hidden + self.mlp_dropout(self.mlp(self.norm2(hidden)))
        return result


class SplitCrossEntropy(nn.Module):
    """Cross entropy of logits ``[b, s, v/t]``: the sum over this rank's labels, divided by ``count``."""

    def __init__(self, ranks: _Ranks) -> None:
        super().__init__()
        self.ranks = ranks

    def forward(self, logits: Tensor, labels: Tensor, count: int) -> Tensor:
        group, size = self.ranks.tp, logits.size(-1)
        if self.ranks.fault == "mean over the rank's own labels":
            # Both micro-batches have the same number of labels.
            count = _num_labels(labels) * MICRO_BATCHES * self.ranks.dp_size
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        maximum = logits.detach().amax(-1)
        if group is not None:
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
        logits = logits - maximum.unsqueeze(-1)
        local = labels - self.ranks.rank * size
        elsewhere = (local < 0) | (local >= size)
        target = logits.gather(-1, local.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
        sums = torch.stack([logits.exp().sum(-1), target.masked_fill(elsewhere, 0.0)])
        if group is not None:
            sums = _apply(sums, lambda x: _summed(x, group), _same)
        losses = (sums[0].log() - sums[1]).masked_fill(labels == IGNORED, 0.0)
        return losses.sum() / count


class GPT(nn.Module):
    """A small GPT with learned positions; returns this rank's part of the mean loss."""

    def __init__(self, ranks: _Ranks, options: Options) -> None:
        super().__init__()
        self.ranks = ranks
        self.tokens = Tokens(ranks, "tokens")
        self.positions = Positions(ranks, "positions")
        self.layers = nn.ModuleList(Layer(ranks, f"layers.{number}", options) for number in range(LAYERS))
        self.norm = Norm(ranks, "norm")
        self.head = Column(ranks, "head", WIDTH, VOCAB, bias=False)
        self.loss = SplitCrossEntropy(ranks)

    def forward(self, ids: Tensor, labels: Tensor, count: int) -> Tensor:
        places = torch.arange(ids.size(1))
        if self.ranks.sequence:
            places = self.ranks.part(places, 0)
            if self.ranks.fault == "positions restart on each rank":
                places = torch.arange(places.size(0))
        hidden = self.tokens(ids) + self.positions(places)
        for layer in self.layers:
            hidden = layer(hidden)
        result: Tensor = self.loss(self.head(self.norm(hidden)), labels, count)
        return result

    def named_splits(self) -> Iterator[tuple[str, Parameter, int | None]]:
        """Yield each parameter with its name and the dimension that is split, if any."""
        for prefix, module in self.named_modules():
            for name, param in module.named_parameters(recurse=False):
                yield f"{prefix}.{name}", param, getattr(module, "split", {}).get(name)


@contextmanager
def _groups(group: ProcessGroup, tp: int | None) -> Iterator[tuple[ProcessGroup | None, ProcessGroup | None]]:
    """Divide ranks into tensor-parallel and data-parallel groups, which end with the block."""
    size, tp = group.size(), group.size() if tp is None else min(tp, group.size())
    if tp in (1, size):
        own = None if size == 1 else group
        yield (None, own) if tp == 1 else (own, None)
        return
    first = group.rank()
    made = [dist.new_group(list(range(start, start + tp))) for start in range(0, size, tp)]
    others = [dist.new_group(list(range(start, size, tp))) for start in range(tp)]
    try:
        yield made[first // tp], others[first % tp]
    finally:
        dist.barrier(group)
        for each in (made[first // tp], others[first % tp]):
            dist.destroy_process_group(each)


def by_hand(group: ProcessGroup, watcher: Watcher, fault: str, dtype: torch.dtype, options: Options) -> None:
    """Train ``GPT`` for two steps of two micro-batches."""
    with _groups(group, options.tp) as (tp, dp):
        ranks = _Ranks(tp, dp, options.sequence and tp is not None, fault if group.size() > 1 else "")
        _train_by_hand(ranks, watcher, dtype, options)


def _train_by_hand(ranks: _Ranks, watcher: Watcher, dtype: torch.dtype, options: Options) -> None:
    model, fault = GPT(ranks, options).to(dtype), ranks.fault
    optimizer = _make_optimizer(model, options.optimizer)
    watcher.start(model, optimizer)
    for step in range(STEPS):
        batches = [_batch(step, number) for number in range(MICRO_BATCHES)]
        count = sum(_num_labels(labels) for _, labels in batches)
        optimizer.zero_grad()
        for ids, labels in batches:
            share = BATCH // ranks.dp_size
            first = ranks.dp_rank * (share - (fault == "samples of two ranks overlap"))
            ids, labels = ids[first : first + share], labels[first : first + share]
            watcher.inputs(ids=ids, labels=labels)
            loss = model(ids, labels, count)
            loss.backward()
            if fault == "gradient summed again with each micro-batch":
                for param in model.layers[0].mlp.up.parameters():
                    param.grad = _summed(param.grad, ranks.dp)
        _complete(model, ranks)
        watcher.gradients()
        norm = _norm_by_hand(model, ranks)
        for param in model.parameters():
            param.grad.mul_(min(1.0, MAX_NORM / (norm + 1e-6)))
        kept = [param.detach().clone() for param in model.layers[1].norm1.parameters()]
        optimizer.step()
        if fault == "larger update on the last rank" and ranks.rank == ranks.size - 1:
            for param, before in zip(model.layers[1].norm1.parameters(), kept, strict=True):
                param.data.lerp_(before, -0.5)
        if fault == "update of one weight lost on the last rank" and ranks.dp_rank == ranks.dp_size - 1:
            model.layers[1].norm1.weight.data.copy_(kept[0])


def _complete(model: GPT, ranks: _Ranks) -> None:
    """Sum gradients over the ranks, where each has only a part of them."""
    fault = ranks.fault
    of_sequence = {"positions.weight", "norm.weight", "norm.bias"}
    for name, param, dim in model.named_splits():
        part = name.rpartition(".")[0]
        is_partial = name in of_sequence or "norm" in part or part.endswith((".output", ".down"))
        if ranks.sequence and dim is None and is_partial:
            if fault == "gradients of the last norm not summed" and part == "norm":
                continue
            if fault == "gradients of the last norm of the first rank" and part == "norm":
                dist.broadcast(param.grad, group=ranks.tp, group_src=0)
                continue
            param.grad = _summed(param.grad, ranks.tp)
        if ranks.dp is not None:
            if fault == "gradient summed again with each micro-batch" and part == "layers.0.mlp.up":
                continue
            if fault == "gradient not summed over replicas" and name == "layers.1.mlp.down.weight":
                continue
            if fault == "gradient summed over the wrong ranks" and name == "head.weight":
                param.grad = _summed(param.grad, ranks.tp)
                continue
            param.grad = _summed(param.grad, ranks.dp)
            if fault == "gradient averaged over replicas" and name == "head.weight":
                param.grad.div_(ranks.dp_size)


def _norm_by_hand(model: GPT, ranks: _Ranks) -> float:
    split = torch.zeros((), dtype=torch.float64)
    whole = torch.zeros((), dtype=torch.float64)
    for _, param, dim in model.named_splits():
        (whole if dim is None else split).add_(param.grad.double().square().sum())
    if ranks.fault == "replicated gradients counted on each rank":
        return float(_summed(split + whole, ranks.tp).sqrt())
    if ranks.fault == "norm of the rank's own gradients":
        return float((split + whole).sqrt())
    return float((_summed(split, ranks.tp) + whole).sqrt())


# The program with DTensor.


class PlainAttention(nn.Module):
    """Causal attention of as many heads as its projections have outputs for."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("query", "key", "value", "output"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=name == "output"))

    forward = Attention.forward


class PlainLayer(nn.Module):
    """Attention and a gated MLP, each after an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = PlainAttention()
        self.gate = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        normed = self.mlp_norm(hidden)
        result: Tensor = hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return result


class PlainModel(nn.Module):
    """A small language model without any communication; returns logits ``[b, s, v]``."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(PlainLayer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.positions(positions)
        for layer in self.layers:
            hidden = layer(hidden)
        result: Tensor = self.head(self.norm(hidden))
        return result


def _fill(model: nn.Module) -> None:
    """Set each parameter to values that depend only on its name."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            values = torch.randn(param.shape, generator=_generator(name), dtype=torch.float64) * 0.2
            param.copy_(values + 1 if "norm" in name else values)


def with_dtensor(group: ProcessGroup, watcher: Watcher, fault: str, dtype: torch.dtype, options: Options) -> None:
    """Train ``PlainModel``, split by ``parallelize_module``, for two steps of two micro-batches."""
    torch.manual_seed(0)
    model = PlainModel()
    _fill(model)
    model.to(dtype)
    fault = fault if group.size() > 1 else ""
    is_split = options.sequence and group.size() > 1
    if group.size() > 1:
        _parallelize(model, group, fault, is_split)
    part = slice(None)
    if is_split:
        share = LENGTH // group.size()
        part = slice(group.rank() * share, (group.rank() + 1) * share)

    def forward(ids: Tensor) -> Tensor:
        positions = torch.arange(LENGTH)[part]
        if fault == "positions restart on each rank":
            positions = torch.arange(len(positions))
        return model(ids[:, part], positions)

    _train_plain(model, forward, group, watcher, fault, options, summed=_partial_in_sequence(model, is_split))


def _partial_in_sequence(model: nn.Module, is_split: bool) -> set[str]:
    """Return the parameters outside of the plan, which each rank applies to its own part of the sequence."""
    from torch.distributed.tensor import DTensor

    return {name for name, param in model.named_parameters() if is_split and not isinstance(param, DTensor)}


def _parallelize(model: PlainModel, group: ProcessGroup, fault: str, sequence: bool) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    mesh = DeviceMesh.from_group(group, "cpu")
    hidden = Shard(1) if sequence else Replicate()
    if fault == "heads of a value in another order":
        with torch.no_grad():
            value = model.layers[0].attention.value.weight
            value.copy_(value.roll(WIDTH // 2, 0))
    if fault == "other initial values on the last rank" and group.rank() == group.size() - 1:
        with torch.no_grad():
            other = torch.randn(LENGTH, WIDTH, generator=_generator("another seed"), dtype=torch.float64) * 0.2
            model.positions.weight.copy_(other)
    plan: dict[str, Any] = {"head": ColwiseParallel(input_layouts=hidden, output_layouts=Replicate())}
    for number in range(LAYERS):
        name = f"layers.{number}"
        for each in ("attention.query", "attention.key", "attention.value", "gate", "up"):
            plan[f"{name}.{each}"] = ColwiseParallel(input_layouts=hidden)
        for each in ("attention.output", "down"):
            plan[f"{name}.{each}"] = RowwiseParallel(output_layouts=hidden)
        if sequence:
            plan[f"{name}.attention_norm"] = SequenceParallel(use_local_output=True)
            plan[f"{name}.mlp_norm"] = SequenceParallel(use_local_output=True)
    if sequence:
        plan["norm"] = SequenceParallel(use_local_output=True)
    if fault == "output left partial":
        plan["layers.0.down"] = RowwiseParallel(output_layouts=Partial())
    if fault == "norm left out of the plan":
        del plan["layers.1.mlp_norm"]
    parallelize_module(model, mesh, plan)


def _train_plain(
    model: nn.Module,
    forward: Callable[[Tensor], Tensor],
    group: ProcessGroup,
    watcher: Watcher,
    fault: str,
    options: Options,
    *,
    summed: Collection[str] = (),
    cleared: Collection[str] = (),
) -> None:
    """Train a model whose logits are whole on every rank.

    Args:
        summed: parameters whose gradient is summed over the ranks once per step.
        cleared: parameters whose hooks sum the gradient with each backward, so that each needs a cleared gradient.
    """
    from torch.distributed.tensor import DTensor

    size = group.size()
    optimizer = _make_optimizer(model, options.optimizer)
    watcher.start(model, optimizer)
    for step in range(STEPS):
        batches = [_batch(step, number) for number in range(MICRO_BATCHES)]
        count = sum(_num_labels(labels) for _, labels in batches)
        optimizer.zero_grad()
        kept: dict[str, Tensor] = {}
        for ids, labels in batches:
            watcher.inputs(ids=ids, labels=labels)
            logits = forward(ids)
            logits = logits.float() if logits.dtype == torch.bfloat16 else logits
            if fault == "labels shifted twice":
                labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
            loss = loss / count
            loss.backward()
            for name, param in model.named_parameters():
                if name in cleared:
                    kept[name] = param.grad + kept[name] if name in kept else param.grad
                    param.grad = None
        for name, param in model.named_parameters():
            param.grad = kept.get(name, param.grad)
            if isinstance(param.grad, DTensor) and param.grad.placements != param.placements:
                param.grad = param.grad.redistribute(placements=param.placements)
            is_left_out = fault == "norm left out of the plan" and "norm" in name
            if name in summed and not is_left_out:
                param.grad = _summed(param.grad, group)
            if fault == "gradient averaged over ranks" and name == "layers.1.attention.value.weight":
                param.grad = param.grad / size
        watcher.gradients()
        norm = _norm_of(model, group, fault)
        for param in model.parameters():
            param.grad.mul_(min(1.0, MAX_NORM / (norm + 1e-6)))
        optimizer.step()


def _norm_of(model: nn.Module, group: ProcessGroup, fault: str) -> float:
    from torch.distributed.tensor import DTensor, Shard

    split = torch.zeros((), dtype=torch.float64)
    whole = torch.zeros((), dtype=torch.float64)
    for param in model.parameters():
        is_split = isinstance(param.grad, DTensor) and any(isinstance(each, Shard) for each in param.grad.placements)
        local = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
        (split if is_split else whole).add_(local.double().square().sum())
    if group.size() == 1:
        return float((split + whole).sqrt())
    if fault == "replicated gradients counted on each rank":
        return float(_summed(split + whole, group).sqrt())
    if fault == "split gradients not counted":
        return float(whole.sqrt())
    return float((_summed(split, group) + whole).sqrt())


# The program with transformers.


def with_transformers(group: ProcessGroup, watcher: Watcher, fault: str, dtype: torch.dtype, options: Options) -> None:
    """Train a tiny Llama or Qwen 3, with its own plan, for two steps of two micro-batches."""
    fault = fault if group.size() > 1 else ""
    with _quiet():
        model = _pretrained(group, dtype, options)
    if fault:
        _break(model, group, fault)

    def forward(ids: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        return logits

    cleared = {name for name, _ in model.named_parameters() if "q_norm" in name or "k_norm" in name}
    if fault == "gradient summed again with each micro-batch":
        # The hooks of transformers 5.23 sum all that was accumulated so far.
        cleared.remove("model.layers.1.self_attn.q_norm.weight")
    _train_plain(model, forward, group, watcher, fault, options, cleared=cleared)


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _pretrained(group: ProcessGroup, dtype: torch.dtype, options: Options) -> nn.Module:
    """Save a tiny model and load it, on several ranks with its plan; they must be all ranks of the process."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
    from transformers.distributed import DistributedConfig

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 3 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
    }
    if options.architecture == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=WIDTH // HEADS))
    _fill(model)
    model.to(dtype)
    if group.size() == 1:
        return model.train()
    # Only the first rank of the process writes.
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, group=group, group_src=0)
        model.save_pretrained(folders[0])
        dist.barrier(group)
        config = DistributedConfig(tp_size=group.size(), tp_plan="auto")
        model = type(model).from_pretrained(folders[0], dtype=dtype, distributed_config=config)
        dist.barrier(group)
    return model.train()


def _break(model: Any, group: ProcessGroup, fault: str) -> None:
    """Change the forward of one module, or the values of one parameter, as a wrong plan would."""
    modules: Mapping[str, Any] = dict(model.named_modules())

    def change(name: str, made: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
        modules[name].forward = made(modules[name].forward)

    if fault == "output not summed":
        output = modules["model.layers.1.self_attn.o_proj"]
        output.forward = lambda hidden: F.linear(hidden, output.weight.to_local())
    elif fault == "input gradient not summed":
        up = modules["model.layers.0.mlp.up_proj"]
        up.forward = lambda hidden: F.linear(hidden, up.weight.to_local())
    elif fault == "output averaged":
        change("model.layers.0.mlp.down_proj", lambda forward: lambda hidden: forward(hidden) / group.size())
    elif fault == "input gradient summed twice":
        change(
            "model.layers.1.mlp",
            lambda forward: lambda hidden: forward(_apply(hidden, _same, lambda g: _summed(g, group))),
        )
    elif fault == "logits gathered in another order":
        change("lm_head", lambda forward: lambda hidden: forward(hidden).roll(VOCAB // group.size(), -1))
    elif fault == "norm of query heads never summed":
        norm = modules["model.layers.1.self_attn.q_norm"]
        norm.forward = type(norm).forward.__get__(norm)
    elif fault == "other values on the last rank":
        if group.rank() == group.size() - 1:
            modules["model.norm"].weight.data.add_(0.5)
    elif fault == "output of the micro-batch before":
        kept: list[Tensor] = []

        def of_before(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def stale(hidden: Tensor) -> Tensor:
                kept.append(hidden.detach())
                # The values of the input before, with the gradient of this one.
                return forward(hidden + (kept[-2] - hidden).detach() if len(kept) > 1 else hidden)

            return stale

        change("model.layers.0.self_attn.v_proj", of_before)
