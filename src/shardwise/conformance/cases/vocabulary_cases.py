"""The embedding over a split vocabulary, and the weight that it shares with the output layer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.conformance.case import case
from shardwise.conformance.dense import Sizes, backward_of_mean, batch, dense_model, gradients_of, weights_of
from shardwise.conformance.dense_checks import check_model
from shardwise.conformance.dense_comparison import assert_all_close, assert_close, grad_of, numbers, part
from shardwise.core.topology import Groups

H = 4


def _check(target: Any, groups: Groups, v: int, ids: Tensor, *, sequence: bool = False) -> None:
    weight, grad = numbers(v, H), numbers(*ids.shape, H)
    leaf = weight.clone().requires_grad_()
    expected = F.embedding(ids, leaf)
    expected.backward(grad)
    if sequence:
        layer = target.embedding(weight, groups, sequence_length=ids.size(1))
        expected, grad = (part(each.transpose(0, 1), 0, groups.tp, target) for each in (expected, grad))
    else:
        layer = target.embedding(weight, groups)
    given = ids.clone()
    output = layer(given)
    assert torch.equal(given, ids), "the ids were modified"
    assert_close(output, expected, "the embeddings", target)
    output.backward(grad)
    target.finalize_gradients(layer, groups)
    assert_all_close(target.whole_gradients(layer, groups), {"weight": grad_of(leaf)}, "the gradient", target)


@case("vllm-project/vllm#53977", "embedding", tp=2)
def ids_of_other_ranks_are_masked(target: Any, groups: Groups) -> None:
    """Ids of another rank's rows add nothing on this rank, in the output and in the gradient."""
    _check(target, groups, 8, torch.tensor([[4, 5, 6, 7], [7, 6, 5, 4]]))


@case("sgl-project/sglang#27482", "embedding", tp=4)
def ids_at_the_borders(target: Any, groups: Groups) -> None:
    """The first and the last id of every rank are looked up there."""
    _check(target, groups, 12, torch.tensor([[0, 2, 3, 5, 6, 8, 9, 11]]))


@case("NVIDIA/Megatron-LM#1754", "embedding", "uneven", tp=3)
def uneven_vocabulary(target: Any, groups: Groups) -> None:
    """A vocabulary of 10 on three ranks gives the dense embeddings."""
    _check(target, groups, 10, torch.arange(10).view(2, 5))


@case("openxla/xla#42481", "embedding", tp=2)
def repeated_ids_sum_their_gradients(target: Any, groups: Groups) -> None:
    """A row's gradient is the sum over all positions with its id, and other rows have none."""
    _check(target, groups, 8, torch.tensor([[1, 1, 1, 5], [5, 1, 1, 1]]))


@case("bigscience-workshop/Megatron-DeepSpeed, class of bug", "embedding.sequence_length", tp=2)
def embeddings_of_this_ranks_positions(target: Any, groups: Groups) -> None:
    """With sequence parallelism each rank gets the sum for its own positions."""
    _check(target, groups, 8, torch.randint(8, (3, 4)), sequence=True)


@case("tenstorrent/tt-metal#51428", "language_model", tp=2)
def tied_weight_has_both_gradients(target: Any, groups: Groups) -> None:
    """A weight that embedding and output layer share gets the sum of both gradients."""
    sizes = Sizes(tied=True)
    dense, given = dense_model(sizes), batch(sizes)
    model = target.language_model(sizes, weights_of(dense), groups)
    backward_of_mean(dense, [given])
    model(*given).mean().backward()
    target.finalize_gradients(model, groups)
    actual = target.whole_gradients(model, groups)["embedding.weight"]
    assert_close(actual, gradients_of(dense)["embedding.weight"], "the gradient of embedding.weight", target)


@case("NVIDIA/Megatron-LM#1754", "language_model", "uneven", tp=3)
def model_of_uneven_vocabulary(target: Any, groups: Groups) -> None:
    """A model whose vocabulary the ranks do not divide has the dense loss and gradients."""
    check_model(target, groups, Sizes(hidden=18, heads=3, kv_heads=3, vocab=31))
