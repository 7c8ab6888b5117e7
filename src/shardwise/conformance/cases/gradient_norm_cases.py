"""The norm of the whole gradient, and clipping by it."""

import math
from typing import Any

import torch

from shardwise.conformance.case import case
from shardwise.conformance.dense import Sizes, batch, dense_model, gradients_of, weights_of
from shardwise.conformance.dense_checks import assert_norm, check_clipping, check_model, norm_of
from shardwise.conformance.dense_comparison import assert_all_close
from shardwise.core.topology import Groups


@case("NVIDIA-NeMo/RL#3788", "language_model", "grad_norm", tp=2)
def replicated_parameters_count_once(target: Any, groups: Groups) -> None:
    """Parameters that every rank holds whole count once in the norm, and split ones on every rank."""
    model, dense = check_model(target, groups, Sizes())
    assert_norm(target.grad_norm(model, groups), norm_of(dense), "the norm", target)


@case("facebookresearch/fairscale#167", "column_linear", "row_linear", "grad_norm", tp=4)
def split_parameters_are_summed(target: Any, groups: Groups) -> None:
    """The norm of a split weight's gradient is that of the whole, not a rank's and not a maximum."""
    layer = target.column_linear(torch.ones(8, 3, dtype=torch.float64), None, groups)
    layer(torch.ones(1, 1, 3, dtype=torch.float64)).sum().backward()
    target.finalize_gradients(layer, groups)
    assert_norm(target.grad_norm(layer, groups), math.sqrt(24), "the norm", target)


@case("NVIDIA/Megatron-LM, class of bug", "language_model", "grad_norm", "few_kv_heads", tp=4)
def copies_of_heads_count_once(target: Any, groups: Groups) -> None:
    """Key-value heads that several ranks hold count once in the norm."""
    model, dense = check_model(target, groups, Sizes(kv_heads=2))
    assert_norm(target.grad_norm(model, groups), norm_of(dense), "the norm", target)


@case("meta-pytorch/torchtune#2420", "language_model", "clip", tp=2)
def clipped_gradients_equal_dense(target: Any, groups: Groups) -> None:
    """Clipping scales every rank's gradients by the same factor, to the maximum norm."""
    check_clipping(target, groups, *check_model(target, groups, Sizes(qk_norm=True)))


@case("huggingface/transformers#36132", "language_model", "clip", tp=2)
def smaller_gradients_are_not_scaled(target: Any, groups: Groups) -> None:
    """Gradients within the maximum norm are not scaled."""
    model, dense = check_model(target, groups, Sizes())
    target.clip(model, norm_of(dense) * 3, groups)
    assert_all_close(target.whole_gradients(model, groups), gradients_of(dense), "the gradient", target)


@case("deepspeedai/DeepSpeed#5242", "column_linear", "grad_norm", tp=2)
def nan_on_one_rank_reaches_all(target: Any, groups: Groups) -> None:
    """A NaN in one rank's gradient makes the norm NaN on every rank."""
    _assert_not_finite(target, groups, math.nan)


@case("deepspeedai/DeepSpeed#5242", "column_linear", "grad_norm", tp=2)
def inf_on_one_rank_reaches_all(target: Any, groups: Groups) -> None:
    """An infinite gradient on one rank makes the norm infinite or NaN on every rank."""
    _assert_not_finite(target, groups, math.inf)


def _assert_not_finite(target: Any, groups: Groups, value: float) -> None:
    layer = target.column_linear(torch.ones(4, 3, dtype=torch.float64), None, groups)
    grad = torch.ones(1, 1, 2, dtype=torch.float64)
    if groups.tp.rank() == 1:
        grad[0, 0, 0] = value
    layer(torch.ones(1, 1, 3, dtype=torch.float64)).backward(grad)
    target.finalize_gradients(layer, groups)
    norm = target.grad_norm(layer, groups)
    assert not math.isfinite(norm), f"the norm is {norm} and must not be finite"
    assert math.isnan(value) <= math.isnan(norm), f"the norm is {norm} and must be NaN"


@case("pytorch/torchtitan#596", "train_pipeline.with_norm", pp=2)
def stages_are_summed(target: Any, groups: Groups) -> None:
    """The norm is over the parameters of all stages, on every stage."""
    _check_stages(target, groups, Sizes())


@case("deepspeedai/DeepSpeed#1252", "train_pipeline.with_norm", pp=2)
def tied_weight_counts_once(target: Any, groups: Groups) -> None:
    """A tied weight that the first and the last stage hold counts once."""
    _check_stages(target, groups, Sizes(tied=True))


def _check_stages(target: Any, groups: Groups, sizes: Sizes) -> None:
    dense, batches = dense_model(sizes), [batch(sizes, b=1) for _ in range(2)]
    for ids, labels in batches:
        dense(ids, labels).sum().backward()
    _, _, actual = target.train_pipeline(sizes, weights_of(dense), batches, groups, with_norm=True)
    assert_norm(actual, norm_of(dense), "the norm", target)
