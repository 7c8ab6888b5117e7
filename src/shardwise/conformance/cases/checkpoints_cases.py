"""Checkpoints that are saved at one layout and loaded at another, optimizer state included."""

from typing import Any

from shardwise.conformance.case import case
from shardwise.conformance.dense import Sizes, backward_of_mean, batch, dense_model, weights_of
from shardwise.conformance.dense_checks import Reference, check_resuming
from shardwise.core.rank_grid import ParallelSizes
from shardwise.core.topology import Groups

_NEEDS = ("language_model", "accumulate", "optimizer", "save", "load")


def _check(target: Any, groups: Groups, tp: int, **options: bool) -> None:
    """Train two steps, save, load at ``tp`` ranks and train one more; compare with three dense steps."""
    sizes = Sizes(kv_heads=4, qk_norm=True)
    dense = dense_model(sizes)
    start, reference = weights_of(dense), Reference(dense)
    batches = [batch(sizes, b=4) for _ in range(3)]
    for each in batches:
        backward_of_mean(dense, [each])
        reference.step()

    def make(weights: dict[str, Any], at: Groups) -> Any:
        return target.language_model(sizes, weights, at)

    def step(model: Any, optimizer: Any, number: int, at: Groups) -> None:
        assert at.dp is not None
        ids, labels = (each.chunk(at.dp.size())[at.dp.rank()] for each in batches[number])
        target.accumulate(model, [(ids, labels)], at)
        optimizer.step()

    check_resuming(target, groups, make, step, start, weights_of(dense), [ParallelSizes(tp=tp)], **options)


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
