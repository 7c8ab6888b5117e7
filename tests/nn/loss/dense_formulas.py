"""The loss family over a whole vocabulary, as its definitions read; in the dtype of the logits, by autograd."""

import torch
from harness.parity import assert_close_to, assert_unmodified

from shardwise.core.sharding import balanced_range
from shardwise.nn.loss.cross_entropy import vocab_parallel_cross_entropy


def transformed(logits, softcap=None, temperature=1.0):
    """What enters the softmax."""
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


def dense_loss(
    logits,
    target,
    *,
    label_smoothing=0.0,
    z_loss=0.0,
    softcap=None,
    temperature=1.0,
    ignore_index=-100,
    vocab_size=None,
    reduction="none",
):
    """``(1-a) nll_y + a/(K-1) Σ_{i≠y} nll_i + z lse²``, one token at a time."""
    k = vocab_size or logits.size(-1)
    losses = []
    rows = logits.reshape(-1, logits.size(-1))[:, :k]
    for row, y in zip(rows, target.flatten().tolist(), strict=True):
        if y == ignore_index:
            losses.append((row * 0.0).nan_to_num().sum())
            continue
        row = transformed(row, softcap, temperature)
        log_normalizer = torch.logsumexp(row, 0)
        # Not `log_normalizer - row`: near 1e4 that loses digits of its own.
        highest = row.detach().amax()
        nll = torch.logsumexp(row - highest, 0) - (row - highest)
        loss = (1 - label_smoothing) * nll[y]
        if label_smoothing:
            loss = loss + label_smoothing / (k - 1) * (nll.sum() - nll[y])
        losses.append(loss + z_loss * log_normalizer**2)
    if not losses:
        return logits.sum(dim=-1) * 0.0
    loss = torch.stack(losses).view(target.shape)
    if reduction == "none":
        return loss
    return loss.sum() / (1 if reduction == "sum" else max(1, int((target != ignore_index).sum())))


def shard_of(whole, group, split_size=None):
    """This rank's columns of the logits, as a leaf."""
    start, stop = balanced_range(split_size or whole.size(-1), group.size(), group.rank())
    return whole[..., start:stop].clone().requires_grad_()


def assert_gradient_shard(actual, whole_gradient, group, rtol):
    """Against the norm of the whole gradient, since a rank may hold none of it."""
    start, stop = balanced_range(whole_gradient.size(-1), group.size(), group.rank())
    error = torch.linalg.vector_norm(actual.double() - whole_gradient[..., start:stop].double())
    assert float(error) <= rtol * float(torch.linalg.vector_norm(whole_gradient.double()))


def assert_equals_dense(group, whole, target, *, rtol=1e-12, **options):
    """Loss and gradient of the shard, for random incoming gradients, against the dense ones; returns the loss."""
    dense_options = {name: value for name, value in options.items() if name not in ("inplace_", "check_finite")}
    padded = dense_options.pop("padded_vocab_size", whole.size(-1))
    reference = whole.detach().double().requires_grad_()
    expected = dense_loss(reference, target, **dense_options)
    incoming = torch.rand(expected.shape, dtype=torch.float64)
    expected.backward(incoming)

    logits = shard_of(whole, group, padded)
    with assert_unmodified(target, *([] if options.get("inplace_") else [logits])):
        loss = vocab_parallel_cross_entropy(logits, target, group=group, **({"vocab_size": whole.size(-1)} | options))
        incoming = incoming.to(loss.dtype)
        with assert_unmodified(incoming):
            loss.backward(incoming)
    wide = torch.float64 if whole.dtype == torch.float64 else torch.float32
    assert loss.dtype == wide
    assert_close_to(loss.detach(), expected.detach().to(wide), rtol_of_norm=rtol, name=f"loss with {options}")
    assert logits.grad.dtype == whole.dtype
    bound = rtol if whole.dtype == torch.float64 else max(rtol, 2 * torch.finfo(whole.dtype).eps)
    assert_gradient_shard(logits.grad, reference.grad, group, bound)
    return loss.detach()
