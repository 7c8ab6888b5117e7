"""Cross entropy over a split vocabulary."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.conformance.case import case
from shardwise.conformance.dense import IGNORED
from shardwise.conformance.dense_comparison import assert_close, assert_same_on_ranks, grad_of, numbers, part
from shardwise.core.topology import Groups


def _dense(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Return the losses in fp64; smoothing is spread over all other ids."""
    log_p = logits.double().log_softmax(-1)
    own = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    others = (log_p.sum(-1) - own) / (logits.size(-1) - 1)
    return torch.where(labels == IGNORED, 0.0, -(1 - smoothing) * own - smoothing * others)


def _check(
    target: Any, groups: Groups, logits: Tensor, labels: Tensor, *, smoothing: float = 0.0, vocab: int | None = None
) -> None:
    """Compare losses and the gradient of the logits, for random gradients of the losses."""
    v = logits.size(-1) if vocab is None else vocab
    leaf = logits.detach().double().requires_grad_()
    expected, grad = _dense(leaf[..., :v], labels, smoothing), numbers(*labels.shape)
    expected.backward(grad)
    own = part(logits, -1, groups.tp, target).requires_grad_()
    options = {"label_smoothing": smoothing} if smoothing else {}
    # A copy, because a loss may overwrite what it is given: see logits_are_unmodified.
    loss = target.cross_entropy(own * 1.0, labels.clone(), groups, vocab=v, **options)
    # Logits have few digits in a narrow dtype, and the loss must not lose more than its own dtype does.
    assert_close(loss, expected, "the loss", target, dtype=loss.dtype)
    loss.backward(grad.to(loss.dtype))
    own_grad = part(grad_of(leaf), -1, groups.tp, target)
    assert_close(grad_of(own), own_grad, "the gradient of the logits", target, dtype=own.dtype)


@case("bigscience-workshop/Megatron-DeepSpeed#394", "cross_entropy", tp=2)
def equals_dense(target: Any, groups: Groups) -> None:
    """Loss and gradient are those of the whole softmax, not of a rank's part."""
    _check(target, groups, numbers(3, 4, 8), torch.randint(8, (3, 4)))


@case("NVIDIA/Megatron-LM#7466", "cross_entropy", tp=2)
def large_logits(target: Any, groups: Groups) -> None:
    """Logits of a thousand give finite losses and the right gradient."""
    _check(target, groups, numbers(3, 4, 8, scale=1000.0), torch.randint(8, (3, 4)))


@case("NVIDIA/Megatron-LM#7466", "cross_entropy", tp=2)
def largest_logit_on_another_rank(target: Any, groups: Groups) -> None:
    """The maximum is taken over all ranks: a part whose logits are all far below it does not overflow or vanish."""
    logits = numbers(3, 4, 8)
    logits[..., :4] -= 800.0
    _check(target, groups, logits, torch.randint(4, (3, 4)))


@case("NVIDIA/Megatron-LM#7464", "cross_entropy.label_smoothing", tp=2)
def label_smoothing_over_the_whole_vocabulary(target: Any, groups: Groups) -> None:
    """Label smoothing spreads over all ids, not over a rank's."""
    _check(target, groups, numbers(3, 4, 8), torch.randint(8, (3, 4)), smoothing=0.1)


@case("NVIDIA/Megatron-LM#737", "cross_entropy.label_smoothing", tp=2)
def smoothed_loss_is_the_same_on_ranks(target: Any, groups: Groups) -> None:
    """Every rank returns the same smoothed loss."""
    logits, labels = numbers(3, 4, 8), torch.randint(8, (3, 4))
    own = part(logits, -1, groups.tp, target)
    assert_same_on_ranks(target.cross_entropy(own, labels, groups, vocab=8, label_smoothing=0.1), "the loss", groups.tp)


@case("NVIDIA/Megatron-LM#5522", "cross_entropy.label_smoothing", tp=2)
def label_smoothing_of_large_logits(target: Any, groups: Groups) -> None:
    """A smoothed loss is finite where probabilities underflow."""
    _check(target, groups, numbers(3, 4, 8, scale=1000.0), torch.randint(8, (3, 4)), smoothing=0.1)


@case("modelscope/ms-swift#9947", "cross_entropy", tp=2)
def ranks_without_the_label_have_gradients(target: Any, groups: Groups) -> None:
    """A rank that holds no label still has the gradient of its part of the softmax."""
    _check(target, groups, numbers(3, 4, 8), torch.randint(4, (3, 4)))


@case("modelscope/ms-swift#9947", "cross_entropy", "ignored_labels", tp=2)
def ignored_labels_cost_nothing(target: Any, groups: Groups) -> None:
    """A label of -100 has no loss and no gradient."""
    labels = torch.randint(8, (3, 4))
    labels[0], labels[1, 2] = IGNORED, IGNORED
    _check(target, groups, numbers(3, 4, 8), labels)


@case("pytorch/torchtitan#3111", "cross_entropy", "ignored_labels", tp=2)
def only_ignored_labels(target: Any, groups: Groups) -> None:
    """A batch without a label has losses and gradients of 0, and no NaN."""
    _check(target, groups, numbers(3, 4, 8), torch.full((3, 4), IGNORED))


@case("apple/ml-cross-entropy#42", "cross_entropy", "column_linear", tp=2)
def hidden_gradient_is_summed(target: Any, groups: Groups) -> None:
    """Output layer and loss together give the hidden state's whole gradient on every rank."""
    hidden, weight, labels = numbers(3, 4, 6), numbers(8, 6), torch.randint(8, (3, 4))
    leaf = hidden.clone().requires_grad_()
    _dense(F.linear(leaf, weight), labels, 0.0).sum().backward()
    given = hidden.clone().requires_grad_()
    logits = target.column_linear(weight, None, groups)(given)
    target.cross_entropy(logits, labels, groups, vocab=8).sum().backward()
    assert_close(grad_of(given), grad_of(leaf), "the gradient of the hidden states", target)


@case("Modalities/modalities#464", "cross_entropy", tp=2)
def bf16_logits_lose_nothing_more(target: Any, groups: Groups) -> None:
    """The loss of bf16 logits is computed in fp32: its error is fp32's, not a step of bf16."""
    logits, labels = numbers(3, 4, 8, scale=10.0).bfloat16(), torch.randint(8, (3, 4))
    loss = target.cross_entropy(part(logits, -1, groups.tp, target), labels, groups, vocab=8)
    assert_close(loss, _dense(logits, labels, 0.0), "the loss", target, dtype=torch.float32)


@case("NVIDIA/Megatron-LM#1754", "cross_entropy", "uneven", tp=3)
def uneven_vocabulary(target: Any, groups: Groups) -> None:
    """A vocabulary of 10 on three ranks has the dense loss and gradient."""
    _check(target, groups, numbers(2, 5, 10), torch.arange(10).view(2, 5))


@case("vllm-project/vllm, class of bug", "cross_entropy", tp=4)
def labels_at_the_borders(target: Any, groups: Groups) -> None:
    """The first and the last id of every rank are found there."""
    _check(target, groups, numbers(1, 8, 12), torch.tensor([[0, 2, 3, 5, 6, 8, 9, 11]]))


@case("NVIDIA/TensorRT-LLM#98", "cross_entropy", "padded_vocabulary", tp=2)
def padding_has_no_probability(target: Any, groups: Groups) -> None:
    """Logits of padding, here the largest, change no loss and have no gradient."""
    logits = numbers(3, 4, 8)
    logits[..., 7] = 50.0
    _check(target, groups, logits, torch.randint(7, (3, 4)), vocab=7)


@case("NVIDIA/TransformerEngine#3193", "cross_entropy", tp=2)
def logits_are_unmodified(target: Any, groups: Groups) -> None:
    """The loss does not change fp32 logits, so that a program can use them again."""
    logits = part(numbers(3, 4, 8), -1, groups.tp, target).float()
    given = logits.clone()
    target.cross_entropy(given, torch.randint(8, (3, 4)), groups, vocab=8)
    assert_close(given, logits, "the logits after the loss", target, dtype=torch.float32)
