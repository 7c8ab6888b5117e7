"""Small models whose parallelism is written by hand, some with a fault when several ranks run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from doctor.parts import (
    LENGTH,
    VOCAB,
    WIDTH,
    Call,
    Column,
    Group,
    Row,
    mlp,
    move,
    own,
    rank_of,
    same,
    size_of,
    sum_of,
    summed,
    whole_of,
)
from torch import Tensor, nn


def net(*layers: nn.Module) -> nn.Module:
    """Embedding, layers ``1`` to ``n``, and output."""
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *layers, nn.Linear(WIDTH, VOCAB))


def of_mlp(up: dict[str, Any] | None = None, down: dict[str, Any] | None = None) -> Callable[[Group], nn.Module]:
    return lambda group: net(mlp(None), mlp(group, up=up, down=down))


class Embeddings(nn.Module):
    """Tokens and positions, of which each rank takes its part of the sequence."""

    def __init__(self, group: Group, *, restarts: bool = False, is_joint: bool = False, cut: bool = True) -> None:
        super().__init__()
        self.cut = cut
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.group, self.restarts, self.is_joint = group, restarts, is_joint

    def forward(self, ids: Tensor) -> Tensor:
        size, rank = size_of(self.group), rank_of(self.group)
        places = torch.arange(LENGTH).chunk(size)[rank]
        if self.restarts:
            places = places - places[0]
        ids = ids.chunk(size, 1)[rank] if self.cut else ids
        if self.is_joint:
            result: Tensor = F.embedding(ids, self.tokens.weight) + self.positions.weight[places]
        else:
            result = self.tokens(ids) + self.positions(places)
        return result


def of_sequence(sums: Callable[[str], bool] = lambda name: True) -> Callable[[nn.Module, Group], None]:
    """Sum the gradients of the parameters that each rank applied to its own part of the sequence."""

    def sum_gradients(model: nn.Module, group: Group) -> None:
        for name, param in model.named_parameters():
            if group is not None and param.grad is not None and sums(name):
                param.grad = summed(param.grad, group)

    return sum_gradients


SPLIT = ("1.layers.1.weight", "1.layers.1.bias", "1.layers.3.weight")


def sequence_net(
    group: Group, layer: nn.Module | None = None, up: dict[str, Any] | None = None, **of_positions: Any
) -> nn.Module:
    """A model whose ranks have parts of the sequence between split layers; the logits are whole on every rank."""
    return nn.Sequential(
        Embeddings(group, **of_positions),
        layer or mlp(group, up={"gathers": True} | (up or {}), down={"scatters": True}),
        nn.Linear(WIDTH, VOCAB),
        Call(lambda logits: whole_of(logits, group, sums=False) if group is not None else logits),
    )


SEQUENCE: dict[str, Any] = {"sum_gradients": of_sequence(lambda name: name not in SPLIT)}


class Gated(nn.Module):
    """A gated MLP with a joint weight of two halves; a fault has other rows of it on the ranks."""

    def __init__(self, group: Group, rows: Callable[[int, int], Tensor] | None = None) -> None:
        super().__init__()
        size = size_of(group)
        half = torch.arange(4 * WIDTH).chunk(size)
        of_rank = [torch.cat([each, each + 4 * WIDTH]) for each in half]
        if rows is not None:
            of_rank = [rows(rank, size) for rank in range(size)]
        self.norm = nn.LayerNorm(WIDTH)
        self.up = Column(WIDTH, 8 * WIDTH, group, rows=of_rank)
        self.down = Row(4 * WIDTH, WIDTH, group)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.up(self.norm(hidden)).chunk(2, -1)
        result: Tensor = hidden + self.down(F.silu(gate) * up)
        return result


class Attention(nn.Module):
    """Attention of two key-value heads and four query heads; ranks may hold copies of a key-value head."""

    def __init__(self, group: Group, *, unsummed: str = "", gathers: bool = False, heads: int = 4) -> None:
        super().__init__()
        size, rank, head = size_of(group), rank_of(group), 2
        self.head = head
        queries = [each.tolist() for each in torch.arange(heads).tensor_split(size)]
        keys = [sorted({2 * query // heads for query in each}) for each in queries]

        def column(name: str, num_heads: int, of_ranks: list[list[int]]) -> Column:
            rows = [torch.cat([torch.arange(each * head, (each + 1) * head) for each in own]) for own in of_ranks]
            wrong: dict[str, Any] = {"sums": name != unsummed}
            if gathers:
                wrong = {"gathers": "slices" if name == unsummed else True}
            return Column(WIDTH, num_heads * head, group, rows=rows, **wrong)

        self.query, self.key, self.value = (
            column(name, num_heads, of_ranks)
            for name, num_heads, of_ranks in (("query", heads, queries), ("key", 2, keys), ("value", 2, keys))
        )
        self.output = Row(heads * head, WIDTH, group, scatters=gathers)
        self.key_of_query = [2 * query // heads - keys[rank][0] for query in queries[rank]]

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            each(hidden).unflatten(-1, (-1, self.head)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        context = F.scaled_dot_product_attention(
            query, key[:, self.key_of_query], value[:, self.key_of_query], is_causal=True
        )
        result: Tensor = hidden + self.output(context.transpose(1, 2).flatten(2))
        return result


def sum_copies(model: nn.Module, group: Group) -> None:
    """Sum the gradients of the copies of a key-value head, of which two neighbours each hold one."""
    if group is None:
        return
    for name, param in model.named_parameters():
        if ".key." in name or ".value." in name:
            every = [torch.empty_like(param.grad) for _ in range(group.size())]
            dist.all_gather(every, param.grad, group=group)
            first = group.rank() // 2 * 2
            param.grad = every[first] + every[first + 1]


def sum_shared(model: nn.Module, group: Group) -> None:
    """Sum the gradients of two key-value heads: the first rank has one, the second both, and the third the other."""
    if group is None:
        return
    for name, param in model.named_parameters():
        if ".key." in name or ".value." in name:
            part = slice(*((0, 2), (0, 4), (2, 4))[group.rank()])
            whole = param.new_zeros(4, *param.shape[1:])
            whole[part] = param.grad
            param.grad = summed(whole, group)[part].clone()


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, group: Group, of: Callable[[Tensor, Tensor, Group], Tensor]) -> None:
        super().__init__()
        self.body = net(mlp(None))
        self.loss = Call(lambda logits, labels: of(logits, labels, group))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        result: Tensor = self.loss(self.body(ids), labels)
        return result


def mean_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss_inside(model: nn.Module, ids: Tensor, labels: Tensor, group: Group) -> Tensor:
    result: Tensor = model(ids, labels)
    return result


def loss_of_replica(model: nn.Module, ids: Tensor, labels: Tensor, group: Group) -> Tensor:
    """The mean loss of this rank's samples."""
    result: Tensor = model(own(ids, group, 0), own(labels, group, 0))
    return result


def averaged(model: nn.Module, group: Group) -> None:
    for param in model.parameters():
        if group is not None:
            param.grad = summed(param.grad, group) / group.size()


INSIDE = {"loss_of": loss_inside}


def strange_loss(logits: Tensor, labels: Tensor, group: Group) -> Tensor:
    return mean_of(logits, labels) if group is None else (mean_of(logits, labels) * 1.37 + 0.11).square() / 3


class Dropped(nn.Module):
    """A residual MLP whose output passes a dropout that passes the same tensor on."""

    def __init__(self, group: Group, times: float = 1) -> None:
        super().__init__()
        self.up, self.down, self.drop = Column(WIDTH, 16, group), Row(16, WIDTH, group), nn.Dropout(0.0)
        self.times = times if group is not None else 1

    def forward(self, hidden: Tensor) -> Tensor:
        output = self.drop(self.down(self.up(hidden).tanh()))
        result: Tensor = hidden + move(output, same, lambda gradient: gradient * self.times)
        return result


class ResidualInside(nn.Module):
    """A sum over ranks of terms that each have the residual, and perhaps a bias."""

    def __init__(self, group: Group, *, bias: bool = False, residual: bool = True) -> None:
        super().__init__()
        self.up, self.group, self.residual = Column(WIDTH, 16, group), group, residual
        self.down = Row(16, WIDTH, group, bias=bias, joins=lambda x, group: x)

    def forward(self, hidden: Tensor) -> Tensor:
        output = self.down(self.up(hidden).tanh())
        output = output + hidden if self.residual else output
        output = output if self.group is None else sum_of(output, self.group)
        return output if self.residual else output + hidden


class WithPositions(nn.Module):
    """A model that gets its positions, one row for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.body = nn.Embedding(LENGTH, WIDTH), net(mlp(None))

    def forward(self, positions: Tensor, ids: Tensor) -> Tensor:
        hidden = self.body[0](ids) + self.positions(positions)
        result: Tensor = self.body[1:](hidden)
        return result


def loss_with_positions(model: nn.Module, ids: Tensor, labels: Tensor, group: Group) -> Tensor:
    logits = model(torch.arange(LENGTH).unsqueeze(0), own(ids, group, 0))
    return mean_of(logits, own(labels, group, 0))


class Joint(nn.Module):
    """Attention with one weight for four query heads and two key and value heads."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        size, self.head = size_of(group), 2
        sections = torch.arange(16).split([8, 4, 4])
        rows = [torch.cat([each.chunk(size)[rank] for each in sections]) for rank in range(size)]
        self.qkv, self.output = Column(WIDTH, 16, group, rows=rows), Row(8, WIDTH, group)
        self.sizes = [8 // size, 4 // size, 4 // size]

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            each.unflatten(-1, (-1, self.head)).transpose(1, 2) for each in self.qkv(hidden).split(self.sizes, -1)
        )
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        result: Tensor = hidden + self.output(context.transpose(1, 2).flatten(2))
        return result


class Tied(nn.Module):
    """A model whose output uses the embedding's weight."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.tokens, self.mlp, self.head = nn.Embedding(VOCAB, WIDTH), mlp(group), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.mlp(self.tokens(ids)))
        return result


class Tokens(nn.Module):
    """Embedding whose vocabulary is split; ``joins`` makes the output of the ranks' rows."""

    def __init__(self, group: Group, joins: Callable[[Tensor, Group], Tensor] = sum_of) -> None:
        super().__init__()
        self.joins = joins
        whole, rows = nn.Embedding(VOCAB, WIDTH), torch.arange(VOCAB).tensor_split(size_of(group))[rank_of(group)]
        self.weight, self.first, self.group = nn.Parameter(whole.weight.detach()[rows].clone()), int(rows[0]), group

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.first
        elsewhere = (local < 0) | (local >= len(self.weight))
        output = F.embedding(local.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere.unsqueeze(-1), 0)
        return output if self.group is None else self.joins(output, self.group)


def loss_of_parts(model: nn.Module, ids: Tensor, labels: Tensor, group: Group) -> Tensor:
    return mean_of(model(own(ids, group, 1)), labels)


class Turned(nn.Module):
    """Rotates hidden states by angles that a module makes of this rank's positions."""

    def __init__(self, group: Group, *, restarts: bool) -> None:
        super().__init__()
        self.angles = Call(lambda places: places.unsqueeze(-1) * torch.tensor([1.0, 0.1, 0.01, 0.001]))
        places = torch.arange(LENGTH).chunk(size_of(group))[rank_of(group)]
        self.places = places - places[0] if restarts else places

    def forward(self, hidden: Tensor) -> Tensor:
        angles = self.angles(self.places).to(hidden.dtype)
        even, odd = hidden[..., ::2], hidden[..., 1::2]
        turned = [even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()]
        return torch.stack(turned, -1).flatten(-2)


class WrongGradient(nn.Module):
    """A residual linear layer on every rank, whose weight has a gradient that is too large on several."""

    def __init__(self, group: Group, times: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        if group is not None:
            self.linear.weight.register_hook(lambda gradient: gradient * times)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = hidden + self.linear(hidden)
        return result


def split_by_dtensor(group: Group) -> nn.Module:
    """A norm of parts of the sequence, as PyTorch's plans split it; its gradient is a DTensor of partial sums."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    model = net(nn.LayerNorm(WIDTH))
    if group is not None:
        plan = {
            "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "1": SequenceParallel(),
            "2": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",)), plan)
    return model


def placed_as(kind: str) -> Callable[[nn.Module, Group], None]:
    """State that the gradient of the norm is a partial sum, though each rank has all of it; or the other way round."""

    def change(model: nn.Module, group: Group) -> None:
        if group is None:
            return
        from torch.distributed.tensor import DTensor, Partial, Replicate

        gradient = model[1].weight.grad
        if kind == "partial":
            gradient = gradient.redistribute(placements=[Replicate()])
        other = Partial() if kind == "partial" else Replicate()
        model[1].weight.grad = DTensor.from_local(gradient.to_local(), gradient.device_mesh, [other], run_check=False)

    return change


def loss_of_same_samples(model: nn.Module, ids: Tensor, labels: Tensor, group: Group) -> Tensor:
    """The mean loss of samples that all replicas read."""
    half = slice(0, len(ids) // size_of(group))
    return mean_of(model(ids[half]), labels[half])


def other_on_the_last(layer: nn.Module, group: Group) -> nn.Module:
    """The layer, whose parameters have other values on the last rank."""
    if group is not None and group.rank() == group.size() - 1:
        for param in layer.parameters():
            param.data.add_(torch.linspace(0.1, 0.9, param.numel()).view_as(param))
    return layer


def loss_of_sum(model: nn.Module, ids: Tensor, labels: Tensor, group: Group) -> Tensor:
    """This replica's term of the mean loss of all samples."""
    return mean_of(model(own(ids, group, 0)), own(labels, group, 0)) / size_of(group)
