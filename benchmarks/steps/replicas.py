"""Training steps of data-parallel ranks: Shardwise's model with the wrappers of PyTorch and of Shardwise."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from ranks import NUM_RANKS, join_ranks, leave_ranks, seconds_of
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_ as torch_clip_grad_norm_

from shardwise.core.communication.collectives import all_reduce
from shardwise.core.communication.transports.shared_memory import SWITCH, channel_of
from shardwise.core.topology import Topology
from shardwise.models.gpt import GPT
from shardwise.training.gradients import GradientBuffers
from shardwise.training.optimizer.clipping import clip_grad_norm_
from shardwise.training.optimizer.optimizer import ZeroOptimizer
from steps.baselines import whole
from steps.problem import MAX_GRAD_NORM, LlamaSizes, Problem, Step
from steps.runner import SEED
from steps.shardwise_step import make_model, make_optimizer

# The last variant computes like ``zero`` without communication, so its results differ from the others.
SILENT = "silent"
REPLICA_VARIANTS = ("ddp", "fsdp2", "fsdp2_zero2", "buffers", "zero", "buffers_gloo", "zero_gloo", SILENT)


@dataclasses.dataclass(frozen=True)
class Replica:
    """One rank of a variant.

    Attributes:
        step: training step; the loss is the mean over this rank's samples.
        held: returns all tensors that the rank keeps between steps.
    """

    step: Step
    held: Callable[[], Iterable[Tensor]]


def make_ddp(problem: Problem, topology: Topology, group: ProcessGroup) -> Replica:
    """Use PyTorch's DistributedDataParallel, with gradients as views of its buckets, so that they are stored once."""
    model = make_model(problem, topology)
    optimizer = make_optimizer(model)
    wrapped = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)

    def step() -> tuple[Tensor, Tensor]:
        loss = wrapped(problem.ids, labels=problem.labels).mean()
        loss.backward()
        norm = clip_grad_norm_(model, MAX_GRAD_NORM, tp_group=topology.group("tp"))
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    # The buckets are not accessible. They are as large as the parameters.
    return Replica(step, lambda: [*_held_by(model, optimizer), *(torch.empty_like(p) for p in model.parameters())])


def make_fsdp2(problem: Problem, topology: Topology, group: ProcessGroup, *, zero2: bool = False) -> Replica:
    """Use PyTorch's ``fully_shard`` on each layer and on the model; with ``zero2``, parameters are gathered once."""
    model = make_model(problem, topology)
    mesh = DeviceMesh.from_group(group, "cpu")
    for module in (*model.decoder.layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False if zero2 else None)
        assert isinstance(module, FSDPModule)
        # gloo has no averaging reduction.
        module.set_force_sum_reduction_for_comms(True)
    optimizer = make_optimizer(model)

    def step() -> tuple[Tensor, Tensor]:
        loss = model(problem.ids, labels=problem.labels).mean()
        loss.backward()
        norm = torch_clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), whole(norm)

    # Gradients are sharded like parameters, and are freed after a step.
    return Replica(step, lambda: [*_held_by(model, optimizer), *(torch.empty_like(p) for p in model.parameters())])


def make_buffers(problem: Problem, topology: Topology, group: ProcessGroup, *, zero: bool = False) -> Replica:
    """Use Shardwise's gradient buffers, and with ``zero`` its split optimizer state."""
    model: GPT = make_model(problem, topology)
    gradients = GradientBuffers(model, group=group, average=True, scatter=zero)
    inner = make_optimizer(model)
    optimizer = ZeroOptimizer(inner, model, gradients, has_masters=False) if zero else inner
    shares = optimizer.parameters.shares if isinstance(optimizer, ZeroOptimizer) else None

    def step() -> tuple[Tensor, Tensor]:
        gradients.zero_()
        loss = model(problem.ids, labels=problem.labels).mean()
        loss.backward()
        gradients.finish()
        norm = clip_grad_norm_(model, MAX_GRAD_NORM, tp_group=topology.group("tp"), shares=shares)
        optimizer.step()
        return loss.detach(), norm

    return Replica(step, lambda: [*_held_by(model, inner), *gradients.buffers])


def make_silent(problem: Problem, topology: Topology, group: ProcessGroup) -> Replica:
    """Run forward, backward, clipping and a rank's part of the update without communication, a bound for ``zero``."""
    model = make_model(problem, topology)
    gradients = GradientBuffers(model, group=topology.group("tp"), average=True)
    # Every second parameter in order of size: about half of the elements.
    mine = nn.ParameterList(sorted(model.parameters(), key=Tensor.numel)[::-NUM_RANKS])
    optimizer = make_optimizer(mine)

    def step() -> tuple[Tensor, Tensor]:
        gradients.zero_()
        loss = model(problem.ids, labels=problem.labels).mean()
        loss.backward()
        norm = clip_grad_norm_(mine, MAX_GRAD_NORM, tp_group=topology.group("tp"))
        optimizer.step()
        return loss.detach(), norm

    return Replica(step, lambda: [*_held_by(model, optimizer), *gradients.buffers])


def _held_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    yield from model.parameters()
    for state in optimizer.state.values():
        yield from state.values()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors on this rank, each storage counted once."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in local}
    return sum(storages.values())


class ReplicaRunner:
    """A rank and its current variants.

    Args:
        store: file through which the ranks connect.
        rank: this rank.
    """

    def __init__(self, store: str, rank: int) -> None:
        self._topology = join_ranks(store, rank, tp=1)
        self._rank = rank
        self._replicas: dict[str, Replica] = {}
        # A separate group for each wrapper, so that no wrapper sees state that another left in it.
        self._groups = {name: torch.distributed.new_group(range(NUM_RANKS)) for name in REPLICA_VARIANTS}
        for name, group in self._groups.items():
            if name.endswith("_gloo"):
                before = os.environ.get(SWITCH)
                os.environ[SWITCH] = "0"
                channel_of(group)
                if before is None:
                    del os.environ[SWITCH]
                else:
                    os.environ[SWITCH] = before

    def prepare(self, sizes: LlamaSizes, variants: Sequence[str]) -> int:
        """Create the variants of a model, discard the previous ones, and return the number of parameters."""
        self._replicas = {}
        every = Problem.draw(dataclasses.replace(sizes, batch_size=NUM_RANKS * sizes.batch_size), SEED)
        mine = slice(self._rank * sizes.batch_size, (self._rank + 1) * sizes.batch_size)
        problem = dataclasses.replace(every, sizes=sizes, ids=every.ids[mine], labels=every.labels[mine])
        makers: dict[str, Callable[..., Replica]] = {
            "ddp": make_ddp,
            "fsdp2": make_fsdp2,
            "fsdp2_zero2": partial(make_fsdp2, zero2=True),
            SILENT: make_silent,
        }
        for variant in variants:
            options: dict[str, Any] = {} if variant in makers else {"zero": variant.startswith("zero")}
            make = makers.get(variant, make_buffers)
            self._replicas[variant] = make(problem, self._topology, self._groups[variant], **options)
        return sum(weight.numel() for weight in problem.weights.values())

    def run_steps(self, variant: str, num_steps: int) -> list[tuple[float, float]]:
        """Run the next steps and return the loss of all samples and the gradient norm of each."""
        results = [self._replicas[variant].step() for _ in range(num_steps)]
        group = self._topology.group("dp")
        return [(float(all_reduce(loss, group=group)) / NUM_RANKS, float(norm)) for loss, norm in results]

    def num_bytes(self, variant: str) -> int:
        """Return the bytes of weights, gradients and optimizer state that this rank keeps after a step."""
        return bytes_of(self._replicas[variant].held())

    def time_steps(self, variant: str, num_steps: int) -> float:
        """Return the seconds that the next steps take on this rank, starting when all ranks are ready."""
        return seconds_of(self._replicas[variant].step, num_steps, together=True)

    def close(self) -> None:
        """Leave the process groups."""
        self._replicas = {}
        leave_ranks(self._topology)
