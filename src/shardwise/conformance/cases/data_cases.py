"""Data parallelism: ranks with different samples, several micro-batches, split optimizer state."""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.conformance.case import case
from shardwise.conformance.dense import Batch, Sizes, backward_of_mean, batch, dense_model, gradients_of, weights_of
from shardwise.conformance.dense_checks import check_state_is_split, check_steps
from shardwise.conformance.dense_comparison import assert_all_close, assert_close, assert_same_on_ranks, numbers
from shardwise.core.topology import Groups


def _check_mean(target: Any, groups: Groups, sizes: Sizes, batches: list[list[Batch]]) -> None:
    """Compare with the mean over all labels; ``batches`` are each data-parallel rank's micro-batches."""
    dense = dense_model(sizes)
    model = target.language_model(sizes, weights_of(dense), groups)
    expected = backward_of_mean(dense, [each for own in batches for each in own])
    rank = 0 if groups.dp is None else groups.dp.rank()
    loss = target.accumulate(model, batches[rank], groups)
    assert_close(loss, expected, "the loss", target)
    assert_all_close(target.whole_gradients(model, groups), gradients_of(dense), "the gradient", target)


@case("pytorch/torchtitan#1842", "language_model", "accumulate", "ignored_labels", dp=2)
def unequal_labels_of_ranks(target: Any, groups: Groups) -> None:
    """Every label weighs the same, though one rank has more of them than the other."""
    sizes = Sizes()
    _check_mean(target, groups, sizes, [[batch(sizes, ignored=ignored)] for ignored in (1, 6)])


@case("huggingface/transformers#35203", "language_model", "accumulate", "ignored_labels", tp=2)
def unequal_labels_of_micro_batches(target: Any, groups: Groups) -> None:
    """Every label weighs the same, though micro-batches have different numbers of them."""
    sizes = Sizes()
    _check_mean(target, groups, sizes, [[batch(sizes, ignored=ignored) for ignored in (0, 7, 3)]])


@case("PrimeIntellect-ai/prime-rl#1957", "language_model", "accumulate", "ignored_labels", dp=2)
def rank_without_labels(target: Any, groups: Groups) -> None:
    """A rank whose labels are all ignored adds nothing, and no NaN."""
    sizes = Sizes()
    _check_mean(target, groups, sizes, [[batch(sizes, ignored=ignored)] for ignored in (0, 8)])


@case("OpenPipe/ART#619", "language_model", "accumulate", "ignored_labels", tp=2, dp=2)
def tensor_and_data_parallel(target: Any, groups: Groups) -> None:
    """With both kinds of parallelism, gradients are summed over the right ranks, each once."""
    sizes = Sizes(qk_norm=True)
    _check_mean(target, groups, sizes, [[batch(sizes, ignored=ignored), batch(sizes)] for ignored in (2, 5)])


class _Branches(nn.Module):
    """Two linear layers; a call uses those that ``used`` names."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 4, bias=False, dtype=torch.float64) for _ in weights)
        for param, weight in zip(self.layers.parameters(), weights, strict=True):
            param.data.copy_(weight)
        self.used: list[int] = [0, 1]

    def forward(self, x: Tensor) -> Tensor:
        outputs = [layer(x) for number, layer in enumerate(self.layers) if number in self.used]
        return torch.stack([output.square().sum() for output in outputs]).sum()


def _check_branches(target: Any, groups: Groups, used: list[list[list[int]]]) -> None:
    """Compare gradients with the mean over ranks of the sum over micro-batches; ``used[rank][micro_batch]``."""
    assert groups.dp is not None
    weights = [numbers(4, 3), numbers(4, 3)]
    inputs = [[numbers(2, 3) for _ in rank] for rank in used]
    dense, model = _Branches(weights), _Branches(weights)
    for of_rank, xs in zip(used, inputs, strict=True):
        for dense.used, x in zip(of_rank, xs, strict=True):
            (dense(x) / len(used)).backward()
    wrapped = target.data_parallel(model, groups)
    rank = groups.dp.rank()
    for number, (branches, x) in enumerate(zip(used[rank], inputs[rank], strict=True), 1):
        model.used = branches
        with contextlib.nullcontext() if number == len(inputs[rank]) else wrapped.no_sync():
            wrapped(x).backward()
    wrapped.finish()
    for name, param in model.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        assert_close(grad, gradients_of(dense)[name], f"the gradient of {name}", target)


@case("verl-project/verl#3332", "data_parallel", dp=2)
def accumulation_equals_one_batch(target: Any, groups: Groups) -> None:
    """Micro-batches under no_sync and one with synchronisation give the gradient of all of them."""
    _check_branches(target, groups, [[[0, 1]] * 3] * 2)


@case("pytorch/pytorch#128949", "data_parallel", dp=2)
def parameter_unused_on_one_rank(target: Any, groups: Groups) -> None:
    """A parameter that one rank did not use gets the other rank's share of the mean on both."""
    _check_branches(target, groups, [[[0, 1]], [[0]]])


@case("pytorch/pytorch#69031", "data_parallel", dp=2)
def parameter_unused_in_the_last_micro_batch(target: Any, groups: Groups) -> None:
    """A parameter that only an earlier micro-batch used, under no_sync, is summed over the ranks too."""
    _check_branches(target, groups, [[[1], [0]], [[1], [0]]])


@case("pytorch/pytorch#41101", "data_parallel", dp=2)
def parameter_unused_everywhere(target: Any, groups: Groups) -> None:
    """A parameter that no rank used gets no gradient, or zeros, and no rank waits."""
    _check_branches(target, groups, [[[0]], [[0]]])


@case("deepspeedai/DeepSpeed#4298", "language_model", "accumulate", "optimizer.split_state", dp=2)
def split_state_trains_alike(target: Any, groups: Groups) -> None:
    """With optimizer state split over the ranks, the weights after three steps are those of the whole state."""
    check_steps(target, groups, target.language_model, Sizes())


@case("NVIDIA/Megatron-LM#844", "language_model", "accumulate", "optimizer.split_state", tp=2, dp=2)
def split_state_with_tensor_parallelism(target: Any, groups: Groups) -> None:
    """The same holds with tensor parallelism, norms of heads and a tied weight, whose gradients are partial sums."""
    check_steps(target, groups, target.language_model, Sizes(qk_norm=True, tied=True))


@case("DeepSpeed, class of bug", "language_model", "accumulate", "optimizer.split_state", dp=2)
def each_rank_keeps_its_share(target: Any, groups: Groups) -> None:
    """The ranks' running means together are as many as the parameters' elements, and each keeps about half."""
    check_state_is_split(groups, *check_steps(target, groups, target.language_model, Sizes()))


@case("allenai/OLMo-core#319", "language_model", "accumulate", "optimizer", "ignored_labels", dp=2)
def replicas_stay_equal(target: Any, groups: Groups) -> None:
    """Copies of a model on data-parallel ranks are equal, bit by bit, after steps on different samples."""
    sizes = Sizes()
    assert groups.dp is not None
    model = target.language_model(sizes, weights_of(dense_model(sizes)), groups)
    optimizer = target.optimizer(model, groups)
    for _ in range(2):
        both = [batch(sizes, ignored=ignored) for ignored in (0, 4)]
        target.accumulate(model, [both[groups.dp.rank()]], groups)
        optimizer.step()
    for name, value in target.whole_parameters(model, groups).items():
        assert_same_on_ranks(value, name, groups.dp)
