"""Context parallelism: ranks share the positions of each sample, and attention is still that of whole samples."""

from typing import Any

import torch
from torch import Tensor

from shardwise.conformance.case import case
from shardwise.conformance.dense import (
    IGNORED,
    DenseModel,
    Sizes,
    backward_of_mean,
    batch,
    dense_model,
    gradients_of,
    weights_of,
)
from shardwise.conformance.dense_checks import check_clipping, check_experts, check_state_is_split, check_steps
from shardwise.conformance.dense_comparison import assert_all_close, assert_close, assert_same_on_ranks, joined, numbers
from shardwise.conformance.dense_experts import DenseExperts, ExpertSizes
from shardwise.conformance.dense_latent import Latent
from shardwise.core.topology import Groups

_NEEDS = ("context_model", "ignored_labels")
_HEADS = (*_NEEDS, "context_model.by_heads")


def _documents(*lengths: int) -> Tensor:
    """Return the numbers of the documents of two rows; the second row has their lengths in reverse."""
    rows = [torch.arange(len(lengths)).repeat_interleave(torch.tensor(each)) for each in (lengths, lengths[::-1])]
    return torch.stack(rows)


def _check(
    target: Any,
    groups: Groups,
    sizes: Sizes,
    *,
    s: int = 12,
    documents: Tensor | None = None,
    tokens: Tensor | None = None,
    **options: bool,
) -> tuple[Any, DenseModel]:
    """Compare the loss of each position, and all gradients, with the dense model; return both models.

    Each data-parallel rank has two samples of ``s`` tokens. ``tokens`` is False for padding.
    """
    assert groups.cp is not None
    dense = dense_model(sizes)
    rank, num_ranks = groups.data.samples
    ids, labels = batch(sizes, 2 * num_ranks, s)
    # No token sees padding, which has no label.
    apart = documents
    if tokens is not None:
        apart = tokens.long() - 1
        labels[~tokens] = IGNORED
    count = int((labels != IGNORED).sum())
    expected = dense(ids, labels, apart)
    (expected.sum() / count).backward()

    model = target.context_model(sizes, weights_of(dense), groups, **options)
    own = slice(2 * rank, 2 * rank + 2)
    losses, positions = model(ids[own], labels[own], documents, tokens)
    everywhere = joined(positions, 0, groups.cp).sort().values
    assert torch.equal(everywhere, torch.arange(s)), f"the ranks have the positions {everywhere.tolist()}, of {s}"
    assert_close(losses, expected[own][:, positions], f"the loss of the positions {positions.tolist()}", target)
    (losses.sum() / count).backward()
    target.finalize_gradients(model, groups)
    assert_all_close(target.whole_gradients(model, groups), gradients_of(dense), "the gradient", target)
    return model, dense


@case("huggingface/diffusers#14265", *_NEEDS, cp=4)
def keys_of_all_ranks_get_their_gradients(target: Any, groups: Groups) -> None:
    """A key's gradient is the sum over the queries of all ranks, each with the keys that the forward had."""
    _check(target, groups, Sizes())


@case("axolotl-ai-cloud/axolotl#3608", *_NEEDS, cp=2)
def documents_are_kept_apart(target: Any, groups: Groups) -> None:
    """Packed documents, whose borders are not those of the ranks' parts, have the losses that they have alone."""
    _check(target, groups, Sizes(), documents=_documents(5, 1, 6))


@case("huggingface/trl#6843", "context_model", cp=2)
def a_document_does_not_move_the_next_one(target: Any, groups: Groups) -> None:
    """Another token in the first document changes no bit of the losses of the second."""
    sizes = Sizes()
    model = target.context_model(sizes, weights_of(dense_model(sizes)), groups)
    documents = _documents(6, 6)
    ids, labels = batch(sizes, s=12)
    losses, positions = model(ids, labels, documents)
    ids[:, 1] = (ids[:, 1] + 1) % sizes.vocab
    others, _ = model(ids, labels, documents)
    differs = (losses != others).any(0)
    wrong = positions[differs & (positions >= 6)].tolist()
    assert not wrong, f"the losses of the second document's positions {wrong} depend on a token of the first"


@case("huggingface/accelerate#4177", *_NEEDS, "windows", cp=2)
def windows_stay_windows(target: Any, groups: Groups) -> None:
    """A layer with a window of four tokens sees four, also where they are on another rank."""
    _check(target, groups, Sizes(window=4))


@case("PrimeIntellect-ai/prime-rl#3397", *_NEEDS, "sinks", cp=2)
def sinks_take_their_share_once(target: Any, groups: Groups) -> None:
    """Attention sinks are counted once for each query, and get the gradients of all ranks' queries."""
    _check(target, groups, Sizes(sinks=True))


@case("verl-project/verl#4250", *_NEEDS, cp=2)
def labels_are_those_of_the_next_tokens(target: Any, groups: Groups) -> None:
    """The label at the end of a rank's part is the next token of the sequence, which another rank has."""
    sizes = Sizes(layers=1)
    dense = dense_model(sizes)
    ids, _ = batch(sizes, s=12)
    labels = ids.roll(-1, 1)
    labels[:, -1] = IGNORED
    losses, positions = target.context_model(sizes, weights_of(dense), groups)(ids, labels)
    assert_close(losses, dense(ids, labels)[:, positions], f"the loss of the positions {positions.tolist()}", target)


@case("NVIDIA/Megatron-LM#4075", *_NEEDS, cp=3)
def positions_count_from_the_start(target: Any, groups: Groups) -> None:
    """Rotary positions are those of the whole sequence on every rank."""
    _check(target, groups, Sizes(layers=1, base=100.0), s=18)


@case("trymirai/uzu#604", *_NEEDS, "length_scaling", cp=2)
def wavelengths_are_those_of_the_whole_length(target: Any, groups: Groups) -> None:
    """Wavelengths that grow with the length grow with that of the text, and not with that of a rank's part."""
    sizes = Sizes(trained_length=4)
    _check(target, groups, sizes)
    _check(target, groups, sizes, documents=_documents(8, 4))


@case("ByteDance-Seed/VeOmni#1139", *_NEEDS, "uneven_sequence", cp=2)
def lengths_that_the_ranks_do_not_divide(target: Any, groups: Groups) -> None:
    """Lengths of 13, 7 and 3 on two ranks give each position its loss, and no other."""
    for s in (13, 7, 3):
        _check(target, groups, Sizes(), s=s)


@case("NVIDIA/TransformerEngine#1929", *_NEEDS, "uneven_sequence", cp=2)
def padding_is_not_seen(target: Any, groups: Groups) -> None:
    """Padding before and after the tokens changes none of their losses, on any rank."""
    tokens = torch.ones(2, 11, dtype=torch.bool)
    tokens[0, :4] = False
    tokens[1, 8:] = False
    _check(target, groups, Sizes(), s=11, tokens=tokens)


@case("hiyouga/LlamaFactory#10794", *_NEEDS, "few_kv_heads", tp=2, cp=2)
def fewer_keys_than_ranks(target: Any, groups: Groups) -> None:
    """One key-value head on two tensor-parallel and two context-parallel ranks has the gradient of all of them."""
    _check(target, groups, Sizes(kv_heads=1))


@case("deepspeedai/DeepSpeed#6392", *_HEADS, "uneven_sequence", cp=4)
def exchanged_heads_may_be_uneven(target: Any, groups: Groups) -> None:
    """Seven heads on four ranks, where one rank has a head less, attend to 13 positions."""
    _check(target, groups, Sizes(heads=7, kv_heads=7), s=13, by_heads=True)


@case("deepspeedai/DeepSpeed#8291", *_HEADS, cp=4)
def another_model_has_another_number_of_heads(target: Any, groups: Groups) -> None:
    """A model of twelve heads is right after one of seven in the same process, and the first one still is."""
    for heads in (7, 12, 7):
        _check(target, groups, Sizes(heads=heads, kv_heads=heads, layers=1), by_heads=True)


@case("verl-project/verl#1226", *_HEADS, "few_kv_heads", cp=4)
def exchanged_heads_may_share_a_key(target: Any, groups: Groups) -> None:
    """Two key-value heads go to four ranks with four query heads, and get the gradients of all of them."""
    _check(target, groups, Sizes(kv_heads=2), documents=_documents(5, 1, 6), by_heads=True)


@case("verl-project/verl#4551", *_HEADS, "sinks", "windows", cp=2)
def sinks_go_with_their_heads(target: Any, groups: Groups) -> None:
    """A rank that attends with some of the heads uses their sinks, also in a layer with a window."""
    _check(target, groups, Sizes(sinks=True, window=4), by_heads=True)


@case("huggingface/accelerate#4209", *_HEADS, cp=2)
def exchanged_heads_do_not_see_padding(target: Any, groups: Groups) -> None:
    """Padding before and after the tokens is masked for all positions that a rank has after the exchange."""
    tokens = torch.ones(2, 12, dtype=torch.bool)
    tokens[0, :4] = tokens[1, 8:] = False
    _check(target, groups, Sizes(), tokens=tokens, by_heads=True)


@case("deepspeedai/DeepSpeed#5248", *_NEEDS, dp=2, cp=2)
def gradients_do_not_scale_with_ranks(target: Any, groups: Groups) -> None:
    """With two samples' ranks and two parts of each, gradients are those of the mean over all labels."""
    _check(target, groups, Sizes(qk_norm=True, tied=True))


@case("deepspeedai/DeepSpeed#8587", *_NEEDS, "accumulate", cp=2)
def labels_weigh_the_same_on_all_ranks(target: Any, groups: Groups) -> None:
    """Labels weigh the same if all are in one rank's part, or nearly all, also in two micro-batches."""
    sizes = Sizes()
    for first, last in ((0, 3), (2, 6)):
        dense = dense_model(sizes)
        batches = [batch(sizes, s=12) for _ in range(2)]
        for _, labels in batches:
            labels[:, :first] = labels[:, last:] = IGNORED
        expected = backward_of_mean(dense, batches)
        model = target.context_model(sizes, weights_of(dense), groups)
        assert_close(target.accumulate(model, batches, groups), expected, "the loss", target)
        assert_all_close(target.whole_gradients(model, groups), gradients_of(dense), "the gradient", target)


@case("THUDM/slime#1871", *_NEEDS, "uneven_sequence", "context_model.sequence_parallel", tp=2, cp=2)
def parts_of_parts_are_in_order(target: Any, groups: Groups) -> None:
    """With sequence parallelism in each part, and 11 positions, every token has its keys, its position and its loss."""
    _check(target, groups, Sizes(qk_norm=True, window=4), s=11, documents=_documents(4, 7), sequence_parallel=True)


@case("NVIDIA/Megatron-LM#3003", *_NEEDS, "latent_attention", tp=2, cp=2)
def keys_and_values_of_two_widths(target: Any, groups: Groups) -> None:
    """Keys of latent attention, and the narrower values, both reach the queries of other ranks whole."""
    sizes = Sizes(kv_heads=4, latent=Latent(rank=5, rotated=4, value=3, query_rank=7))
    _check(target, groups, sizes, documents=_documents(5, 7))


@case("verl-project/verl#6609", *_NEEDS, "clip", tp=2, cp=2)
def norm_counts_each_gradient_once(target: Any, groups: Groups) -> None:
    """The norm is that of one rank, and all ranks clip by the same factor."""
    check_clipping(target, groups, *_check(target, groups, Sizes()))


@case("NVIDIA-NeMo/Automodel#2768", *_NEEDS, "accumulate", "optimizer.split_state", dp=2, cp=2)
def optimizer_state_is_split_over_all_copies(target: Any, groups: Groups) -> None:
    """Optimizer state is split over the ranks of all samples and parts, and weights after two steps are one rank's."""
    check_state_is_split(groups, *check_steps(target, groups, target.context_model, Sizes(), s=12))


def _check_experts(target: Any, groups: Groups, sizes: ExpertSizes) -> None:
    """Compare a layer of experts with the dense layer; the ranks have positions of the same four sequences."""
    assert groups.cp is not None
    # As many positions for each rank, and not consecutive ones.
    own, x = slice(groups.cp.rank(), None, groups.cp.size()), numbers(8, 4, sizes.hidden)
    layer, _ = check_experts(target, groups, DenseExperts(sizes), x, lambda whole: whole[own], context_length=8)
    assert_same_on_ranks(target.whole_gradients(layer, groups)["router"], "the router's gradient", groups.cp)


@case("NVIDIA/Megatron-LM#1652", "expert_layer", "expert_layer.context_length", tp=2, cp=2)
def balance_counts_the_tokens_of_all_ranks(target: Any, groups: Groups) -> None:
    """Auxiliary losses of experts are those of whole sequences, and do not scale with the ranks."""
    _check_experts(target, groups, ExpertSizes(aux_loss=3.0, z_loss=0.5))


@case("pytorch/pytorch#160285", "expert_layer", "expert_layer.context_length", cp=4, ep=2)
def experts_are_exchanged_between_parts(target: Any, groups: Groups) -> None:
    """Ranks that share samples also share experts, whose gradients are those of all positions, each once."""
    _check_experts(target, groups, ExpertSizes(per_token=3))
