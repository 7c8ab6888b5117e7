"""Random numbers: dropout's masks, recomputation, and initial weights."""

from typing import Any

import torch

from shardwise.conformance.case import case
from shardwise.conformance.dense_comparison import assert_same_on_ranks, joined, numbers
from shardwise.core.topology import Groups

_ROWS, _COLUMNS = 16, 64


def _mask(target: Any, groups: Groups, *, split: bool) -> torch.Tensor:
    """Return which elements of this rank's tensor dropout keeps."""
    rows = _ROWS // groups.tp.size() if split else _ROWS
    return target.dropout(torch.ones(rows, _COLUMNS, dtype=torch.float64), 0.5, groups, split=split) != 0  # type: ignore[no-any-return]


@case("PaddlePaddle/PaddleFleetX#1005", "dropout", tp=2)
def masks_of_split_tensors_differ(target: Any, groups: Groups) -> None:
    """Ranks that hold different parts of a tensor drop different elements."""
    target.seed(7, groups)
    first, second = joined(_mask(target, groups, split=True), 0, groups.tp).chunk(2)
    # Independent masks agree on half of the elements; 5 deviations are 0.11.
    agreement = float((first == second).double().mean())
    assert abs(agreement - 0.5) < 0.12, f"the masks of two ranks agree on {agreement:.0%} of the elements"


@case("NVIDIA/Megatron-LM#206", "dropout", tp=2)
def masks_of_replicated_tensors_are_the_same(target: Any, groups: Groups) -> None:
    """Ranks that hold the same tensor drop the same elements, so that it stays the same."""
    target.seed(7, groups)
    for _ in range(2):
        assert_same_on_ranks(_mask(target, groups, split=False), "the mask", groups.tp)


@case("NVIDIA/Megatron-LM#1256", "dropout", tp=2)
def replicated_masks_are_the_same_after_split_ones(target: Any, groups: Groups) -> None:
    """Masks of split tensors do not move the stream of the replicated ones apart, nor the other way round."""
    target.seed(7, groups)
    _mask(target, groups, split=True)
    assert_same_on_ranks(_mask(target, groups, split=False), "the mask", groups.tp)
    first, second = joined(_mask(target, groups, split=True), 0, groups.tp).chunk(2)
    assert not torch.equal(first, second), "the masks of two ranks' parts are the same"


@case("tenstorrent/tt-metal#55947", "dropout", tp=2, dp=2)
def masks_differ_between_samples(target: Any, groups: Groups) -> None:
    """Data-parallel ranks, which have different samples, drop different elements if the program seeds them apart."""
    assert groups.dp is not None
    target.seed(7 + 1000 * groups.dp.rank(), groups)
    mask = _mask(target, groups, split=False)
    assert_same_on_ranks(mask, "the mask", groups.tp)
    first, second = joined(mask, 0, groups.dp).chunk(2)
    assert not torch.equal(first, second), "the masks of two samples are the same"


@case("PyTorch, class of bug", "dropout", tp=2)
def successive_masks_differ(target: Any, groups: Groups) -> None:
    """A second mask is another one, on every rank."""
    target.seed(7, groups)
    for split in (True, False):
        masks = [_mask(target, groups, split=split) for _ in range(2)]
        assert not torch.equal(*masks), "two successive masks are the same"


@case("PyTorch, class of bug", "dropout", tp=2)
def kept_elements_are_scaled(target: Any, groups: Groups) -> None:
    """Kept elements are divided by the probability of keeping them, which is about their share."""
    target.seed(7, groups)
    kept = target.dropout(torch.ones(64, 64, dtype=torch.float64), 0.25, groups, split=True)
    values = {round(float(each), 9) for each in kept.unique()}
    assert values <= {0.0, round(4 / 3, 9)}, f"the values are {sorted(values)} and must be 0 and 4/3"
    share = float((kept != 0).double().mean())
    assert abs(share - 0.75) < 0.05, f"{share:.0%} of the elements are kept, and 75% must be"


def _check_recomputation(target: Any, groups: Groups, *, split: bool) -> None:
    target.seed(7, groups)
    x = numbers(_ROWS // groups.tp.size() if split else _ROWS, _COLUMNS).requires_grad_()
    calls = []

    def function(given: torch.Tensor) -> torch.Tensor:
        # The product makes the backward need what was dropped.
        output: torch.Tensor = target.dropout(given * given, 0.5, groups, split=split)
        calls.append(output.detach().clone())
        return output * output

    output = target.recompute(function, x)
    after = _mask(target, groups, split=split)
    output.sum().backward()
    assert len(calls) == 2, f"the function ran {len(calls)} times and must run twice"
    assert torch.equal(calls[0], calls[1]), "the recomputation drew another mask"
    again = _mask(target, groups, split=split)
    assert not torch.equal(after, again), "the recomputation moved the stream back for good"


@case("allenai/OLMo-core#828", "dropout", "recompute", tp=2)
def recomputation_redraws_split_masks(target: Any, groups: Groups) -> None:
    """Recomputation in the backward drops the elements of a split tensor that the forward dropped."""
    _check_recomputation(target, groups, split=True)


@case("pytorch/torchtitan#1323", "dropout", "recompute", tp=2)
def recomputation_redraws_replicated_masks(target: Any, groups: Groups) -> None:
    """The same holds for a tensor that every rank holds whole."""
    _check_recomputation(target, groups, split=False)


def _check_initial(target: Any, groups: Groups, kind: str) -> torch.Tensor:
    target.seed(7, groups)
    whole: torch.Tensor = target.initial(kind, 64, 48, groups)
    assert tuple(whole.shape) == (64, 48), f"the whole weight has shape {list(whole.shape)} and must have [64, 48]"
    parts = whole.chunk(groups.tp.size(), 1 if kind == "row" else 0)
    assert not torch.equal(parts[0], parts[1]), "two ranks drew the same part"
    return whole


@case("modelscope/ms-swift#7944", "initial", tp=2)
def parts_are_drawn_apart(target: Any, groups: Groups) -> None:
    """The ranks' parts of a new weight differ."""
    for kind in ("column", "row", "embedding"):
        _check_initial(target, groups, kind)


@case("NVIDIA-NeMo/Megatron-Bridge#5840", "initial", tp=2)
def deviation_is_that_of_the_whole(target: Any, groups: Groups) -> None:
    """The standard deviation of a new weight does not depend on the number of ranks."""
    for kind in ("column", "row", "embedding"):
        deviation = float(_check_initial(target, groups, kind).double().std())
        # 3,072 draws have a standard error of 0.013.
        assert abs(deviation - 1) < 0.07, f"the standard deviation of a {kind} weight is {deviation:.3f} and must be 1"


@case("allenai/OLMo-core#319", "initial", "one_draw", tp=4)
def parts_are_of_one_draw(target: Any, groups: Groups) -> None:
    """The whole weight at four ranks is the weight at one rank, from the same seed."""
    alone = torch.distributed.new_subgroups(1)[0]
    for kind in ("column", "row", "embedding"):
        target.seed(7, groups)
        split = target.initial(kind, 64, 48, groups)
        target.seed(7, groups)
        assert torch.equal(split, target.initial(kind, 64, 48, Groups(tp=alone))), f"the {kind} weight is another one"


@case("facebookresearch/detr#544", "initial", dp=2)
def replicas_start_equal(target: Any, groups: Groups) -> None:
    """Data-parallel ranks draw the same initial weights."""
    assert groups.dp is not None
    for kind in ("column", "row", "embedding"):
        target.seed(7, groups)
        assert_same_on_ranks(target.initial(kind, 8, 6, groups), f"the {kind} weight", groups.dp)
