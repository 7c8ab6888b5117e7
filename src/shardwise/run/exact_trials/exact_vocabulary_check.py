"""Whether the embedding and the loss have the bits on which exact runs rely; see ``exact_check``."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from shardwise.core.sharding import balanced_sizes, intervals_of_sizes
from shardwise.kernels.dispatch import loss_kernels
from shardwise.models.config import ModelConfig
from shardwise.nn import VocabEmbedding
from shardwise.nn.embedding import look_up, look_up_own
from shardwise.nn.loss.combine import combine
from shardwise.nn.loss.options import LossOptions
from shardwise.nn.loss.vocabulary import columns_between
from shardwise.run.exact_trials.exact_trials import (
    MOST_ELEMENTS,
    OtherBits,
    Trials,
    compare,
    how_split,
    on_one_thread,
    on_several_threads,
    powers_of_two,
)
from shardwise.training.objective import CrossEntropy

# Of an embedding's weight; of more rows some are tried.
_MOST_WEIGHTS = 1 << 21
# Of a loss, whose tokens are computed one by one.
_LEAST_TOKENS = 256


def try_embeddings(trials: Trials, model: nn.Module, *, batch: int, length: int) -> None:
    """Try each kind of embedding of a model; arguments as ``try_attention``'s."""
    kinds = {
        # As ``VocabEmbedding`` chooses.
        (layer.num_embeddings, layer.embedding_dim, layer.deterministic or trials.device.type == "cuda")
        for layer in model.modules()
        if isinstance(layer, VocabEmbedding)
    }
    for vocab_size, width, deterministic in sorted(kinds):
        rows = min(vocab_size, max(_MOST_WEIGHTS // width, 64))
        ids = trials.ids(rows, length, batch)
        trials.run(partial(_try_embedding, trials, rows, width, deterministic, ids))


def _try_embedding(trials: Trials, rows: int, width: int, deterministic: bool, ids: Tensor, parts: int) -> None:
    weight, incoming = trials.numbers(rows, width), trials.numbers(*ids.shape, width)

    def embedded(start: int, stop: int) -> tuple[Tensor, Tensor]:
        leaf = weight[start:stop].clone().requires_grad_()
        look = partial(look_up, weight=leaf, deterministic=deterministic)
        with torch.enable_grad():
            output = look(ids) if stop - start == rows else look_up_own(ids, start, stop, look)
            (gradient,) = torch.autograd.grad(output, leaf, incoming)
        return output.detach(), gradient

    what = f"the gradient of an embedding {[rows, width]}"
    output, gradient = on_several_threads(partial(embedded, 0, rows))
    if not torch.equal(on_several_threads(partial(embedded, 0, rows))[1], gradient):
        raise OtherBits(f"{what} is not deterministic: a second run has other bits")
    for ranks in powers_of_two(min(parts, rows)):
        shards = intervals_of_sizes(balanced_sizes(rows, ranks))
        for rank in {0, ranks // 2, ranks - 1}:
            start, stop = shards[rank]
            found, found_gradient = on_one_thread(partial(embedded, start, stop))
            own = ((ids >= start) & (ids < stop)).unsqueeze(-1)
            compare(found, output.masked_fill(~own, 0.0), f"an embedding {[rows, width]}, {how_split(ranks)},")
            compare(found_gradient, gradient[start:stop], f"{what}, {how_split(ranks)},")


def try_loss(trials: Trials, config: ModelConfig, vocab_size: int, *, batch: int, length: int) -> None:
    """Try the loss over a vocabulary of so many ids; other arguments as ``try_attention``'s."""
    options = LossOptions(softcap=config.final_logit_softcap, temperature=config.logits_scaling)
    trials.run(partial(_try_loss, trials, vocab_size, options, batch * length))
    losses = trials.numbers(batch, length).to(torch.promote_types(trials.dtype, torch.float32))

    def try_sum(_: int) -> None:
        for dtype in (None, torch.float64):
            summed = partial(CrossEntropy(is_exact=True).sums, losses, (), dtype)
            what = f"the sum of the losses of {list(losses.shape)} tokens, on one thread,"
            compare(on_one_thread(summed)[0], on_several_threads(summed)[0], what)

    trials.run(try_sum)


def _try_loss(trials: Trials, vocab_size: int, options: LossOptions, tokens: int, parts: int) -> None:
    """Two parts of the vocabulary side by side, and each by itself."""
    ranges = intervals_of_sizes(balanced_sizes(vocab_size, parts)[:2])
    width = ranges[-1][1]
    # Library and kernel are chosen by all tokens and ids.
    size, tokens = tokens * vocab_size, min(tokens, max(_LEAST_TOKENS, MOST_ELEMENTS // width))
    logits = trials.numbers(tokens, width)
    target, ignored = trials.ids(width, tokens), trials.ids(8, tokens) == 0

    def losses(side_by_side: bool) -> list[Tensor]:
        whole = logits.clone()
        columns = [whole[:, start:stop] for start, stop in ranges]
        columns = columns if side_by_side else [part.contiguous() for part in columns]
        targets = [columns_between(target, *ids) for ids in ranges]
        own = [
            loss_kernels(part, softcap=options.softcap, size=size).row_statistics(part, local, **options.of_kernels)
            for part, local in zip(columns, targets, strict=True)
        ]
        combined = combine(torch.stack(own), ranges, ignored, options)
        numbers = combined.maximum, combined.weight, combined.at_target
        for part, local in zip(columns, targets, strict=True):
            loss_kernels(part, part, softcap=options.softcap, size=size).gradient_(
                part, part, local, *numbers, None, **options.of_kernels
            )
        return [combined.loss, torch.cat(columns, 1)]

    whole = on_several_threads(partial(losses, True))
    for found, expected, what in zip(on_one_thread(partial(losses, False)), whole, ("loss", "gradient"), strict=True):
        compare(found, expected, f"the {what} of {tokens:,} tokens over parts of {vocab_size:,} ids, on one thread,")
