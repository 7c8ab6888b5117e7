"""Trials of all properties that exact runs rely on, on the run's device and with its shapes, before the run starts.

- A product by parts has the same bits whether one rank has all parts or each rank has some, and with context
  parallelism whether one rank has all tokens or each rank has some.
- Attention is deterministic, and a head has the same bits whichever other heads are computed with it.
- An expert multiplies its tokens with the same bits whichever other experts its rank holds.
- Norms, biases, factors of adapters, embedding and loss have the same bits whichever part of the tokens or of the
  vocabulary a rank has.
- An activation has the same bits in any piece of a tensor, and a sum of squared gradients does not depend on where the
  gradients are in memory.
- AdamW and the elementwise part of Muon have the same bits in any piece of a tensor: parts of a layer, or shards of
  data-parallel ranks. The fused AdamW is tried on pieces that consist of whole vectors, as in runs.
- All of these, and Muon's products of whole matrices, have the same bits on one thread and on several.

Each kind of layer is tried once, with random numbers. All trials together take a second or two.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from shardwise.core.communication.trees import deterministic_sum
from shardwise.core.errors import REPORT, ConfigError
from shardwise.core.random import streams
from shardwise.core.sharding import balanced_sizes, intervals_of_sizes
from shardwise.exact.products import USUAL_ROWS
from shardwise.exact.strategies import ExactArithmetic
from shardwise.kernels.dispatch import loss_kernels, why_not_fused_optimizer
from shardwise.kernels.elementwise import blockwise, swiglu
from shardwise.models.description import ModelChunks
from shardwise.models.language_model import LanguageModel
from shardwise.nn import VocabEmbedding
from shardwise.nn.embedding import look_up, look_up_own
from shardwise.nn.loss.options import LossOptions
from shardwise.nn.loss.vocabulary import columns_between, combine
from shardwise.run.exact.expert_trials import expert_kinds, router_softmaxes, try_experts, try_router_softmax
from shardwise.run.exact.layer_trials import (
    MOST_ELEMENTS,
    NOT_DETERMINISTIC,
    ResultPair,
    TrialRun,
    attention_layers,
    how_split,
    linear_kinds,
    on_several_threads,
    on_threads,
    powers_of_two,
    row_operations,
    try_attention,
    try_rows,
    try_split,
    try_summed,
)
from shardwise.run.settings import OptimizerSettings, RunSettings
from shardwise.training.optimizer.adamw import STATE_NAMES
from shardwise.training.optimizer.exact_adamw import VECTOR
from shardwise.training.optimizer.exact_grad_norm import sums_of_squares
from shardwise.training.optimizer.mixed_precision import PRECISIONS
from shardwise.training.optimizer.muon import matrix_shapes, orthogonalized, product_dtype, update_, with_momentum

_REPORT = REPORT.format("other devices refuse it too")
# Maximum weights of an embedding. If there are more, only some of its rows are tried.
_MOST_WEIGHTS = 1 << 21
# In 16 bits, libraries multiply fewer rows in another order than more.
_LEAST_TOKENS_OF_A_RANK = 32
# Minimum tokens of a loss, which is computed token by token.
_LEAST_TOKENS = 256
# Sizes of pieces that consist of whole vectors, and of any number of elements.
_VECTORS = [VECTOR, 3 * VECTOR, 100 * VECTOR, 2 * VECTOR]
_ELEMENTS = [1, 17, 1000, 3, 31, 256]


def check_device(
    model: LanguageModel | ModelChunks,
    *,
    micro_batch_size: int,
    sequence_length: int,
    is_packed: bool = False,
    context: int = 1,
) -> None:
    """Run the trials of layers, loss and gradients with the model's shapes; the default generator keeps its state.

    Args:
        model: this rank's model, with ``exact_parts`` in its config.
        micro_batch_size: samples per forward pass.
        sequence_length: tokens per sample.
        is_packed: True if a row holds several samples, separated by a mask.
        context: number of ranks that share the tokens of a sample.

    Raises:
        ConfigError: some results differ on this device, and the message names them with their shapes, and the largest
            number of parts that works; or ranks that share samples have too few tokens.
    """
    parts = model.config.exact_parts
    assert parts is not None
    tokens = micro_batch_size * sequence_length // context
    if context > 1 and tokens < _LEAST_TOKENS_OF_A_RANK:
        raise ConfigError(
            f"exact: {context} context-parallel ranks share {micro_batch_size * sequence_length} tokens of a "
            f"micro-batch, and products of fewer than {_LEAST_TOKENS_OF_A_RANK} rows round in another way; use a lower "
            "parallel.cp, longer samples, or a larger training.micro-batch-size"
        )
    run = TrialRun(model, model.config.params_dtype, parts, micro_batch_size, sequence_length, is_packed, context)
    differences, fitting = _differences(run)
    works = f"the largest exact-parts that works is {fitting}; use it," if fitting else "no exact-parts works; use"
    refuse(run, differences, works)


def check_updates(model: LanguageModel | ModelChunks, settings: RunSettings) -> None:
    """Try the optimizer of an exact run.

    Raises:
        ConfigError: some results differ on this device; the message names them.
    """
    precision = PRECISIONS[settings.training.dtype]
    dtype = torch.float32 if precision.has_masters else precision.params_dtype
    run = UpdateRun(model, dtype, settings=settings)
    differences, _ = _differences(run)
    refuse(run, differences, "use")


class Trial(NamedTuple):
    """A row of the table of trials: the class of its runs, their cases, and the pairs of results of a case."""

    run: type[TrialRun]
    cases: Callable[[Any], Iterable[Any]]
    pairs: Callable[[Any, Any, int], Iterator[ResultPair]]


def _differences(run: TrialRun) -> tuple[list[str], int]:
    """Return the first difference of each trial and case, and the largest number of parts without a difference."""
    found, fitting, before = [], run.parts, streams().snapshot()
    tried = ((trial.pairs, case) for trial in TRIALS if trial.run is type(run) for case in trial.cases(run))
    try:
        with torch.no_grad():
            for pairs, case in tried:
                if difference := _first_difference(pairs(run, case, run.parts)):
                    found.append(difference)
                    parts = run.parts // 2
                    while parts and _first_difference(pairs(run, case, parts)):
                        parts //= 2
                    fitting = min(fitting, parts)
    finally:
        streams().restore(before)
    return found, fitting


def _first_difference(pairs: Iterable[ResultPair]) -> str | None:
    for found, expected, what, differs in pairs:
        if not torch.equal(found, expected):
            number = f"{int((found != expected).sum()):,} of {expected.numel():,} elements"
            return f"{what} {differs or f'has other bits: {number}'}"
    return None


def refuse(run: TrialRun, differences: list[str], use: str) -> None:
    """Raise ConfigError that names the differences, if there are any, and what to use instead."""
    if differences:
        raise ConfigError(
            f"exact: on this device ({run.device}) {'; '.join(differences)}; {use} another device, other sizes, or no "
            f"--exact; {_REPORT}"
        )


def _once(_: TrialRun) -> tuple[None]:
    return (None,)


def _embeddings(run: TrialRun) -> Iterator[tuple[int, int, bool, Tensor]]:
    """Yield rows, width, whether the look-up is deterministic, and ids, for each kind of embedding."""
    kinds = {
        # The same choice as in ``VocabEmbedding``.
        (layer.num_embeddings, layer.embedding_dim, layer.deterministic or run.device.type == "cuda")
        for layer in run.layers(VocabEmbedding)
    }
    for vocab_size, width, deterministic in sorted(kinds):
        rows = min(vocab_size, max(_MOST_WEIGHTS // width, 64))
        yield rows, width, deterministic, run.ids(rows, run.length, run.batch)


def _try_embedding(run: TrialRun, kind: tuple[int, int, bool, Tensor], parts: int) -> Iterator[ResultPair]:
    rows, width, deterministic, ids = kind
    weight, incoming = run.numbers(rows, width), run.numbers(*ids.shape, width)

    def embedded(start: int, stop: int) -> tuple[Tensor, Tensor]:
        leaf = weight[start:stop].clone().requires_grad_()
        look = partial(look_up, weight=leaf, deterministic=deterministic)
        with torch.enable_grad():
            output = look(ids) if stop - start == rows else look_up_own(ids, start, stop, look)
            (gradient,) = torch.autograd.grad(output, leaf, incoming)
        return output.detach(), gradient

    name = f"an embedding {[rows, width]}"
    output, gradient = on_several_threads(partial(embedded, 0, rows))
    again = on_several_threads(partial(embedded, 0, rows))[1]
    yield ResultPair(again, gradient, f"the gradient of {name}", NOT_DETERMINISTIC)
    for ranks in powers_of_two(min(parts, rows)):
        shards = intervals_of_sizes(balanced_sizes(rows, ranks))
        for rank in {0, ranks // 2, ranks - 1}:
            start, stop = shards[rank]
            found, found_gradient = on_threads(1, partial(embedded, start, stop))
            own = ((ids >= start) & (ids < stop)).unsqueeze(-1)
            yield ResultPair(found, output.masked_fill(~own, 0.0), f"{name}, {how_split(ranks)},")
            yield ResultPair(found_gradient, gradient[start:stop], f"the gradient of {name}, {how_split(ranks)},")


def _vocabularies(run: TrialRun) -> set[int]:
    """Return the vocabulary sizes of the losses that this rank computes."""
    ends = (each for each in run.layers(LanguageModel) if each.post_process)
    return {each.vocab_size for each in ends if each.vocab_size is not None}


def _try_loss(run: TrialRun, vocab_size: int, parts: int) -> Iterator[ResultPair]:
    """Compare two parts of the vocabulary as views of one tensor against the same parts in separate tensors."""
    # The output layer caps and scales logits (``Arithmetic.scales_before_loss``).
    options, arithmetic = LossOptions(), ExactArithmetic()
    ranges = intervals_of_sizes(balanced_sizes(vocab_size, parts)[:2])
    width = ranges[-1][1]
    # As in ``ExactArithmetic.parts_of_vocabulary``.
    size, tokens = USUAL_ROWS * vocab_size, min(run.rows, max(_LEAST_TOKENS, MOST_ELEMENTS // width))
    logits = run.numbers(tokens, width)
    target, ignored = run.ids(width, tokens), run.ids(8, tokens) == 0

    def losses(side_by_side: bool) -> list[Tensor]:
        whole = logits.clone()
        columns = [whole[:, start:stop] for start, stop in ranges]
        columns = columns if side_by_side else [part.contiguous() for part in columns]
        targets = [columns_between(target, *ids) for ids in ranges]
        own = [
            arithmetic.row_statistics(loss_kernels(part, softcap=options.softcap, size=size), part, local)
            for part, local in zip(columns, targets, strict=True)
        ]
        combined = combine(torch.stack(own), ranges, ignored, options, arithmetic.activation)
        numbers = combined.maximum, combined.weight, combined.at_target
        for part, local in zip(columns, targets, strict=True):
            loss_kernels(part, part, softcap=options.softcap, size=size).gradient_(
                part, part, local, *numbers, None, **options.of_kernels
            )
        return [combined.loss, torch.cat(columns, 1)]

    whole = on_several_threads(partial(losses, True))
    for found, expected, what in zip(on_threads(1, partial(losses, False)), whole, ("loss", "gradient"), strict=True):
        yield ResultPair(
            found, expected, f"the {what} of {tokens:,} tokens over parts of {vocab_size:,} ids, on one thread,"
        )


def _try_sum_of_losses(run: TrialRun, _: object, __: int) -> Iterator[ResultPair]:
    losses = run.numbers(run.batch, run.length).to(torch.promote_types(run.dtype, torch.float32))
    for dtype in (None, torch.float64):
        summed = partial(deterministic_sum, losses, dtype)
        what = f"the sum of the losses of {list(losses.shape)} tokens, on one thread,"
        yield ResultPair(on_threads(1, summed), on_several_threads(summed), what)


def _try_activation(run: TrialRun, _: object, parts: int) -> Iterator[ResultPair]:
    config = run.model.config
    assert config.ffn_hidden_size is not None
    width = config.ffn_hidden_size * (1 + config.gated_linear_unit)
    inner = run.numbers(max(1, min(run.rows, MOST_ELEMENTS // width)), width)
    gated = config.gated_linear_unit and config.activation_func is F.silu
    sections = 2 if gated else 1

    def activated(part: Tensor) -> tuple[Tensor, Tensor]:
        leaf = part.detach().contiguous().requires_grad_()
        with torch.enable_grad():
            output = swiglu(leaf, at_any_size=True) if gated else blockwise(config.activation_func, leaf)
            (gradient,) = torch.autograd.grad(output, leaf, torch.ones_like(output))
        return output.detach(), gradient

    def pieces(tensor: Tensor, sections: int, ranks: int) -> Iterator[Tensor]:
        """Yield each rank's pieces of all sections, concatenated."""
        each = [section.tensor_split(ranks, dim=1) for section in tensor.chunk(sections, dim=1)]
        return (torch.cat(of_rank, 1) for of_rank in zip(*each, strict=True))

    output, gradient = on_several_threads(partial(activated, inner))
    for ranks in powers_of_two(parts):
        where = f"of a piece of {list(inner.shape)}, {how_split(ranks)},"
        each = (pieces(inner, sections, ranks), pieces(output, 1, ranks), pieces(gradient, sections, ranks))
        for part, expected, expected_gradient in zip(*each, strict=True):
            found, found_gradient = on_threads(1, partial(activated, part))
            yield ResultPair(found, expected, f"the activation {where}")
            yield ResultPair(found_gradient, expected_gradient, f"the activation's gradient {where}")


def _try_squares(run: TrialRun, _: object, __: int) -> Iterator[ResultPair]:
    """Compare the gradient of some columns of a weight, as a view, against the same elements in a separate tensor."""
    part = run.numbers(257, 1024)[:, 301:702]
    sums = (
        on_threads(1, partial(sums_of_squares, part.contiguous())),
        on_several_threads(partial(sums_of_squares, part)),
    )
    found, expected = (torch.tensor(each, dtype=torch.float64) for each in sums)
    yield ResultPair(found, expected, f"the sum of squares of a gradient {list(part.shape)}, on one thread,")


_Update = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]


@dataclass
class UpdateRun(TrialRun):
    """A run whose optimizer is tried, with its settings."""

    settings: RunSettings = field(kw_only=True)


def _updates(run: UpdateRun) -> Iterator[tuple[_Update, list[int], str]]:
    if why_not_fused_optimizer(run.device.type, has_copies=False) is None:
        yield partial(_adamw, run.settings.optimizer, True), _VECTORS, "the fused AdamW"
    yield partial(_adamw, run.settings.optimizer, False), _ELEMENTS, "AdamW"
    if run.settings.optimizer.name == "muon":
        yield _muon, _ELEMENTS, "Muon"


def _try_update(run: UpdateRun, case: tuple[_Update, list[int], str], _: int) -> Iterator[ResultPair]:
    """Compare the update of a whole tensor against the updates of its pieces."""
    update, sizes, name = case
    weight, gradient = run.numbers(2, sum(sizes))
    whole = update([weight], [gradient])
    pieces = update(weight.split(sizes), gradient.split(sizes))
    for number, expected in enumerate(whole):
        found = torch.cat(list(pieces[number :: len(whole)]))
        yield ResultPair(found, expected, f"an update of {name} of a piece of {sum(sizes)} elements")


def _matrices(run: UpdateRun) -> list[tuple[int, ...]]:
    is_tried = run.settings.optimizer.name == "muon" and torch.get_num_threads() > 1
    return sorted(matrix_shapes(run.model)) if is_tried else []


def _try_orthogonalized(run: UpdateRun, shape: tuple[int, ...], _: int) -> Iterator[ResultPair]:
    matrix = run.numbers(*shape).to(product_dtype(PRECISIONS[run.settings.training.dtype].params_dtype))
    # The products of every step have the same shapes.
    step = partial(orthogonalized, matrix, 1)
    yield ResultPair(on_threads(1, step), step(), f"Muon's product of a matrix {list(shape)} on one thread")


def _adamw(
    options: OptimizerSettings, fused: bool, weights: Sequence[Tensor], gradients: Sequence[Tensor]
) -> list[Tensor]:
    params = [Parameter(weight.clone()) for weight in weights]
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
    return [
        tensor
        for param in params
        for tensor in (param.detach(), *(optimizer.state[param][kind] for kind in STATE_NAMES))
    ]


def _muon(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    found = []
    for weight, gradient in zip(weights, gradients, strict=True):
        weight, mean = weight.clone(), torch.zeros_like(weight)
        with_momentum(gradient, mean, 0.95)
        update_(weight, with_momentum(-3 * gradient, mean, 0.95), rate=0.013, weight_decay=0.1)
        found += [weight, mean]
    return found


TRIALS = (
    Trial(TrialRun, linear_kinds, try_split),
    Trial(TrialRun, linear_kinds, try_summed),
    Trial(TrialRun, attention_layers, try_attention),
    Trial(TrialRun, row_operations, try_rows),
    Trial(TrialRun, expert_kinds, try_experts),
    Trial(TrialRun, router_softmaxes, try_router_softmax),
    Trial(TrialRun, _embeddings, _try_embedding),
    Trial(TrialRun, _vocabularies, _try_loss),
    Trial(TrialRun, _vocabularies, _try_sum_of_losses),
    Trial(TrialRun, _once, _try_activation),
    Trial(TrialRun, _once, _try_squares),
    Trial(UpdateRun, _updates, _try_update),
    Trial(UpdateRun, _matrices, _try_orthogonalized),
)
"""The table of trials: forward and backward pass, then the optimizer."""
