"""Pipeline parallelism: stages on different ranks give the gradients of the whole model."""

from typing import Any

import torch

from shardwise.conformance.case import case
from shardwise.conformance.dense import Sizes, batch, dense_model, gradients_of, weights_of
from shardwise.conformance.dense_comparison import assert_close, assert_same_on_ranks
from shardwise.core.topology import Groups


def _check(
    target: Any, groups: Groups, sizes: Sizes, micro_batches: int, *, chunks: int = 1, ignored: int = 0
) -> dict[str, torch.Tensor]:
    """Compare the loss and this stage's gradients with the whole model; return the gradients."""
    dense = dense_model(sizes)
    batches = [batch(sizes, b=2, ignored=ignored * number) for number in range(micro_batches)]
    expected = torch.zeros((), dtype=torch.float64)
    for ids, labels in batches:
        loss = dense(ids, labels).sum()
        loss.backward()
        expected += loss.detach()
    options = {"chunks": chunks} if chunks > 1 else {}
    loss_here, gradients, _ = target.train_pipeline(sizes, weights_of(dense), batches, groups, **options)
    assert groups.pp is not None
    if groups.pp.rank() == groups.pp.size() - 1:
        assert loss_here is not None, "the last stage returned no loss"
        assert_close(loss_here, expected, "the loss", target)
    must = gradients_of(dense)
    assert gradients, "this stage has no gradients"
    for name, grad in gradients.items():
        assert_close(grad, must[name], f"the gradient of {name}", target)
    names: list[Any] = [None] * groups.pp.size()
    torch.distributed.all_gather_object(names, list(gradients), group=groups.pp)
    missing = must.keys() - {name for each in names for name in each}
    assert not missing, f"no stage has a gradient of {', '.join(sorted(missing))}"
    return gradients  # type: ignore[no-any-return]


@case("NVIDIA/Megatron-LM, class of bug", "train_pipeline", pp=2)
def two_stages(target: Any, groups: Groups) -> None:
    """1F1B with four micro-batches equals the model without stages."""
    _check(target, groups, Sizes(), 4)


@case("NVIDIA/Megatron-LM, class of bug", "train_pipeline", pp=4)
def four_stages(target: Any, groups: Groups) -> None:
    """1F1B over four stages equals the model without stages."""
    _check(target, groups, Sizes(layers=4), 4)


@case("pytorch/pytorch#129597", "train_pipeline", pp=2)
def odd_number_of_micro_batches(target: Any, groups: Groups) -> None:
    """Three micro-batches on two stages: every one is used once."""
    _check(target, groups, Sizes(), 3)


@case("HPDL-Group/Merak#4", "train_pipeline", pp=4)
def fewer_micro_batches_than_stages(target: Any, groups: Groups) -> None:
    """Two micro-batches on four stages: the pipeline never fills, and the gradients are right."""
    _check(target, groups, Sizes(layers=4), 2)


@case("areal-project/AReaL#1273", "train_pipeline", pp=2)
def one_micro_batch(target: Any, groups: Groups) -> None:
    """The schedule scales nothing: one micro-batch and many give gradients of the same scale."""
    _check(target, groups, Sizes(), 1)


@case("pytorch/torchtitan#2206", "train_pipeline", "ignored_labels", pp=2)
def unequal_labels_of_micro_batches(target: Any, groups: Groups) -> None:
    """Micro-batches with different numbers of labels weigh by their labels."""
    _check(target, groups, Sizes(), 3, ignored=2)


@case("NVIDIA/Megatron-LM#169", "train_pipeline.chunks", pp=2)
def interleaved_chunks(target: Any, groups: Groups) -> None:
    """Two chunks on each of two stages equal the model without stages."""
    _check(target, groups, Sizes(layers=4), 4, chunks=2)


@case("uw-syfi/piper#13", "train_pipeline", pp=2)
def tied_gradients_are_summed(target: Any, groups: Groups) -> None:
    """The tied weight's gradients on the first and the last stage are summed, and then equal."""
    gradients = _check(target, groups, Sizes(tied=True), 2)
    assert groups.pp is not None
    assert_same_on_ranks(gradients["embedding.weight"], "the gradient of embedding.weight", groups.pp)


@case("uw-syfi/piper#13", "train_pipeline", pp=4)
def tied_gradients_over_four_stages(target: Any, groups: Groups) -> None:
    """Middle stages take no part in the sum of the tied weight's gradients."""
    _check(target, groups, Sizes(layers=4, tied=True), 3)


@case("PyTorch, class of bug", "train_pipeline", "uneven", pp=2)
def uneven_layers(target: Any, groups: Groups) -> None:
    """Three layers on two stages equal the model without stages."""
    _check(target, groups, Sizes(layers=3), 2)


@case("NVIDIA/Megatron-LM#844", "train_pipeline", tp=2, pp=2)
def stages_of_split_layers(target: Any, groups: Groups) -> None:
    """Stages whose layers are split over two ranks equal the whole model, with a tied weight and norms of heads."""
    _check(target, groups, Sizes(tied=True, qk_norm=True), 2)
