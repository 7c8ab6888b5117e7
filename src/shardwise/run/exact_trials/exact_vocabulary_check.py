"""Whether the embedding and the loss have the bits on which exact runs rely; see ``exact_check``.

Whether a device updates weights with the bits on which exact runs rely, tried before a run starts.

- AdamW and the elementwise part of Muon have the same bits in whatever piece of a tensor an element lies: parts of a
  layer, or what data-parallel ranks share out. The fused AdamW is tried on pieces of whole vectors, which is what it
  is given.
- Muon's products of whole matrices have the same bits at every number of threads.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shardwise.core.sharding import balanced_sizes, intervals_of_sizes
from shardwise.kernels.dispatch import loss_kernels, why_not_fused_optimizer
from shardwise.models.config import ModelConfig
from shardwise.nn import VocabEmbedding
from shardwise.nn.embedding import look_up, look_up_own
from shardwise.nn.loss.options import LossOptions
from shardwise.nn.loss.vocabulary import columns_between, combine
from shardwise.run.exact_trials.exact_trials import (
    MOST_ELEMENTS,
    OtherBits,
    Trials,
    compare,
    how_split,
    on_one_thread,
    on_several_threads,
    powers_of_two,
    require_same_bits,
)
from shardwise.run.settings import RunSettings
from shardwise.training.gradients import GradientTrees
from shardwise.training.objective import CrossEntropy
from shardwise.training.optimizer.adamw import STATE_NAMES, VECTOR
from shardwise.training.optimizer.mixed_precision import PRECISIONS
from shardwise.training.optimizer.muon import matrix_shapes, orthogonalized, product_dtype, update_, with_momentum

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
            summed = partial(CrossEntropy(GradientTrees.sum_of_losses).sums, losses, (), dtype)
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


# Of whole vectors, and of any number of elements.
_VECTORS = [VECTOR, 3 * VECTOR, 100 * VECTOR, 2 * VECTOR]
_ELEMENTS = [1, 17, 1000, 3, 31, 256]

_Update = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]


def check_updates(model: nn.Module, settings: RunSettings) -> None:
    """Try the optimizer of an exact run.

    Args:
        model: this rank's.
        settings: of the run.

    Raises:
        ConfigError: the device does not keep what is relied on; the message names what.
    """
    precision, device = PRECISIONS[settings.training.dtype], next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def check(update: _Update, sizes: Sequence[int], what: str) -> None:
        dtype = torch.float32 if precision.has_masters else precision.params_dtype
        weight, gradient = (numbers(sum(sizes), dtype=dtype) for _ in range(2))
        whole = update([weight], [gradient])
        pieces = update(weight.split(sizes), gradient.split(sizes))
        for number, expected in enumerate(whole):
            found = torch.cat(list(pieces[number :: len(whole)]))
            require_same_bits(found, expected, f"{what} of a piece of {sum(sizes)} elements")

    def adamw(weights: Sequence[Tensor], gradients: Sequence[Tensor], *, fused: bool) -> list[Tensor]:
        params = [Parameter(weight.clone()) for weight in weights]
        options = settings.optimizer
        optimizer = torch.optim.AdamW(
            params,
            lr=options.learning_rate,
            betas=(options.beta1, options.beta2),
            eps=options.epsilon,
            weight_decay=options.weight_decay,
            fused=fused,
        )
        for factor in (1, -3):
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = factor * gradient
            optimizer.step()
        kept = [[param.detach(), *(optimizer.state[param][kind] for kind in STATE_NAMES)] for param in params]
        return [tensor for tensors in kept for tensor in tensors]

    def muon(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        found = []
        for weight, gradient in zip(weights, gradients, strict=True):
            weight, mean = weight.clone(), torch.zeros_like(weight)
            with_momentum(gradient, mean, 0.95)
            update_(weight, with_momentum(-3 * gradient, mean, 0.95), rate=0.013, weight_decay=0.1)
            found += [weight, mean]
        return found

    with torch.no_grad():
        if why_not_fused_optimizer(device.type, has_copies=False) is None:
            check(lambda *given: adamw(*given, fused=True), _VECTORS, "an update of the fused AdamW")
        check(lambda *given: adamw(*given, fused=False), _ELEMENTS, "an update of AdamW")
        if settings.optimizer.name != "muon":
            return
        check(muon, _ELEMENTS, "an update of Muon")
        for shape in sorted(matrix_shapes(model)) if torch.get_num_threads() > 1 else ():
            matrix = numbers(*shape, dtype=product_dtype(precision.params_dtype))
            one_step = partial(_one_step, matrix)
            what = f"Muon's product of a matrix {list(shape)} on one thread"
            require_same_bits(on_one_thread(one_step)[0], one_step()[0], what)


def _one_step(matrix: Tensor) -> list[Tensor]:
    # The products of every step have the same shapes.
    return [orthogonalized(matrix, 1)]
