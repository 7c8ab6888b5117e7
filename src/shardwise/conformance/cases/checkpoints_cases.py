"""Checkpoints that are saved at one layout and loaded at another, optimizer state included."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.conformance.case import case
from shardwise.conformance.dense import Sizes, backward_of_mean, batch, dense_model, weights_of
from shardwise.conformance.dense_comparison import assert_all_close
from shardwise.core.topology import Groups, Topology

_NEEDS = ("language_model", "accumulate", "optimizer", "save", "load")


def _check(target: Any, groups: Groups, tp: int, *, split_state: bool = False) -> None:
    """Train two steps, save, load at ``tp`` ranks and train one more; compare with three dense steps."""
    sizes = Sizes(kv_heads=4, qk_norm=True)
    dense = dense_model(sizes)
    start = weights_of(dense)
    reference = torch.optim.AdamW(dense.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    batches = [batch(sizes, b=4) for _ in range(3)]

    def step(model: Any, optimizer: Any, number: int, at: Groups) -> None:
        backward_of_mean(dense, [batches[number]])
        reference.step()
        reference.zero_grad()
        assert at.dp is not None
        ids, labels = (each.chunk(at.dp.size())[at.dp.rank()] for each in batches[number])
        target.accumulate(model, [(ids, labels)], at)
        optimizer.step()

    paths: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(paths)
    folder = Path(paths[0])
    options = {"split_state": True} if split_state else {}
    model = target.language_model(sizes, start, groups)
    optimizer = target.optimizer(model, groups, **options)
    for number in range(2):
        step(model, optimizer, number, groups)
    target.save(model, optimizer, folder, groups)
    topology = Topology.create(tp=tp)
    try:
        other = Groups.of(topology)
        # Other weights, so that loading nothing shows.
        loaded = target.language_model(sizes, {name: value + 1 for name, value in start.items()}, other)
        its_optimizer = target.optimizer(loaded, other, **options)
        target.load(loaded, its_optimizer, folder, other)
        step(loaded, its_optimizer, 2, other)
        assert_all_close(target.whole_parameters(loaded, other), weights_of(dense), "the value after loading", target)
    finally:
        topology.destroy()


@case("huggingface/nanotron#106", *_NEEDS, tp=2)
def from_two_ranks_to_one(target: Any, groups: Groups) -> None:
    """A run at two ranks continues at one with the weights and the running means that it had."""
    _check(target, groups, 1)


@case("huggingface/transformers#48569", *_NEEDS, tp=2, dp=2)
def from_two_ranks_to_four(target: Any, groups: Groups) -> None:
    """A run at two ranks, with two copies, continues at four."""
    _check(target, groups, 4)


@case("NVIDIA/Megatron-LM#5077", *_NEEDS, "optimizer.split_state", tp=2, dp=2)
def with_split_state(target: Any, groups: Groups) -> None:
    """The same holds if the optimizer state is split over the copies."""
    _check(target, groups, 4, split_state=True)
