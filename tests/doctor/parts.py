"""Layers of small models whose parallelism is written by hand, with the faults that people make in it.

Each layer takes the ranks that split it, None on one rank, and what is wrong with it there. On one rank nothing is.
Hidden states are ``[batch, sequence, width]``. All ranks train on the same samples unless a model says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from doctor.programs import _apply as move, _joined as joined, _own as own, _same as same, _summed as summed
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.doctor.diagnosis import Diagnosis, diagnose
from shardwise.doctor.recorder import Recorder

WIDTH, VOCAB, BATCH, LENGTH = 8, 20, 4, 12
Group = ProcessGroup | None


def rank_of(group: Group) -> int:
    return 0 if group is None else group.rank()


def size_of(group: Group) -> int:
    return 1 if group is None else group.size()


def to_each(tensor: Tensor, group: Group) -> Tensor:
    """The same values for each rank's term of what follows: gradients are summed."""
    return move(tensor, same, lambda gradient: summed(gradient, group))


def sum_of(tensor: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' terms, the same on every rank."""
    return move(tensor, lambda term: summed(term, group), same)


def whole_of(tensor: Tensor, group: Group, dim: int = 1, *, sums: bool = True) -> Tensor:
    """All parts, from which each rank computes its own term: gradients are summed, unless forgotten."""

    def back(gradient: Tensor) -> Tensor:
        return own(summed(gradient, group) if sums else gradient, group, dim)

    return move(tensor, lambda part: joined(part, group, dim), back)


class Column(nn.Module):
    """Linear layer whose output features are split.

    Args:
        rows: for each rank the rows of the whole weight that it has, in order; equal parts if None.
        sums: whether the input's gradient is summed.
        gathers: whether the input is this rank's part of the sequence; ``"slices"`` if the backward only slices.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        group: Group,
        *,
        bias: bool = True,
        rows: Sequence[Tensor] | None = None,
        sums: bool = True,
        gathers: bool | str = False,
    ) -> None:
        super().__init__()
        whole = nn.Linear(inputs, outputs, bias)
        mine = torch.arange(outputs).tensor_split(size_of(group))[rank_of(group)]
        if rows is not None and group is not None:
            mine = rows[group.rank()]
        self.weight = Parameter(whole.weight.detach()[mine].clone())
        self.bias = Parameter(whole.bias.detach()[mine].clone()) if bias else None
        self.group, self.sums, self.gathers = group, sums, gathers

    def forward(self, hidden: Tensor) -> Tensor:
        if self.group is not None and self.gathers:
            hidden = whole_of(hidden, self.group, sums=self.gathers != "slices")
        elif self.group is not None and self.sums:
            hidden = to_each(hidden, self.group)
        return F.linear(hidden, self.weight, self.bias)


class Row(nn.Module):
    """Linear layer whose input features are split.

    Args:
        columns: for each rank the columns of the whole weight that it has, in order; equal parts if None.
        bias_of: ``"every rank"`` if it is added before the sum.
        scatters: whether the output is this rank's part of the sequence.
        joins: the sum over ranks.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        group: Group,
        *,
        bias: bool = True,
        columns: Sequence[Tensor] | None = None,
        bias_of: str = "",
        scatters: bool = False,
        joins: Callable[[Tensor, Group], Tensor] = sum_of,
    ) -> None:
        super().__init__()
        whole = nn.Linear(inputs, outputs, bias)
        mine = torch.arange(inputs).tensor_split(size_of(group))[rank_of(group)]
        if columns is not None and group is not None:
            mine = columns[group.rank()]
        self.weight = Parameter(whole.weight.detach()[:, mine].clone())
        self.bias = Parameter(whole.bias.detach().clone()) if bias else None
        self.group, self.bias_of, self.scatters, self.joins = group, bias_of, scatters, joins

    def forward(self, hidden: Tensor) -> Tensor:
        if self.bias_of == "every rank" and self.group is not None:
            return self.joins(F.linear(hidden, self.weight, self.bias), self.group)
        output = F.linear(hidden, self.weight)
        if self.group is not None and self.scatters:
            output = move(
                output, lambda term: own(summed(term, self.group), self.group, 1), lambda g: joined(g, self.group, 1)
            )
        elif self.group is not None:
            output = self.joins(output, self.group)
        return output if self.bias is None else output + self.bias


class Residual(nn.Module):
    """Adds what its layers make of the hidden states to them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = hidden + self.layers(hidden)
        return result


class Call(nn.Module):
    """A function as a module without parameters."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def mlp(group: Group, *, up: dict[str, Any] | None = None, down: dict[str, Any] | None = None) -> nn.Module:
    """A residual MLP after a norm: ``layers.0`` is the norm, ``layers.1`` goes up, and ``layers.3`` down."""
    return Residual(
        nn.LayerNorm(WIDTH),
        Column(WIDTH, 4 * WIDTH, group, **up or {}),
        nn.GELU(),
        Row(4 * WIDTH, WIDTH, group, **down or {}),
    )


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss_of_logits(model: nn.Module, ids: Tensor, labels: Tensor, group: Group) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


Loss = Callable[[nn.Module, Tensor, Tensor, Group], Tensor]


def no_sums(model: nn.Module, group: Group) -> None:
    """The gradients are complete."""


def update_by_hand(model: nn.Module) -> None:
    """Update as no recorder sees it, and delete the gradients."""
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad
            param.grad = None


def train(
    build: Callable[[Group], nn.Module],
    group: Group,
    folder: Path,
    *,
    loss_of: Loss = loss_of_logits,
    sum_gradients: Callable[[nn.Module, Group], None] = no_sums,
    dtype: torch.dtype = torch.float32,
    calls_gradients: bool = True,
    by_hand: bool = False,
    **options: Any,
) -> None:
    torch.manual_seed(0)
    model = build(group).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(model, folder, optimizer=None if by_hand else optimizer, **options)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, *batch_of(step), group).backward()
        sum_gradients(model, group)
        if by_hand:
            update_by_hand(model)
            recorder.updated()
            continue
        if calls_gradients:
            recorder.gradients()
        optimizer.step()
    recorder.close()


def diagnosed(
    build: Callable[[Group], nn.Module], group: ProcessGroup, folder: Path, **options: Any
) -> Diagnosis | None:
    """Record a model on one rank, twice, and on all, and diagnose it on the first rank. Collective."""
    axes = options.pop("axes", None)
    if group.rank() == 0:
        dtype = options.get("dtype", torch.float32)
        other: dict[str, Any] = {"dtype": torch.float64} if dtype == torch.float32 else {"perturb": 1}
        train(build, None, folder / "one", world_size=1, **options)
        train(build, None, folder / "rounding", world_size=1, **options | other)
    train(build, group, folder / "parallel", axes=axes, **options)
    return diagnosis_of(folder, group)


def diagnosis_of(folder: Path, group: ProcessGroup) -> Diagnosis | None:
    """Diagnose three recordings on the first rank. Collective."""
    dist.barrier(group)
    try:
        if group.rank() == 0:
            return diagnose(folder / "one", folder / "parallel", folder / "rounding")
    finally:
        dist.barrier(group)
    return None
