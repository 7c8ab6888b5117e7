"""Exact generation and scoring: what is refused, and trials before the first token.

Log-probabilities must have the bits of a training forward of the whole text, which has other numbers of rows. So the
trials of training run first. Then a search finds the smallest number of rows at which no layer's products depend on
it any more; fewer rows are filled up. Last, the model reads a text in pieces, and its log-probabilities are compared
with those of the whole text.
"""

from collections.abc import Iterator
from itertools import islice
from typing import cast

import torch
from torch import Tensor

from shardwise.core.communication.agreement import agree, gather_objects
from shardwise.core.errors import ConfigError
from shardwise.exact.products import ExactProducts, FewRows
from shardwise.exact.strategies import ExactArithmetic
from shardwise.models.config import ModelConfig
from shardwise.models.generation import PreallocatedCache, sequence_log_probs
from shardwise.models.generation.generation import evaluation_mode
from shardwise.models.gpt import GPT
from shardwise.nn import arithmetic_of
from shardwise.nn.loss.cross_entropy import vocab_parallel_log_probs
from shardwise.nn.parallel_linear import ParallelLinear
from shardwise.run.exact.environment import check_arithmetic
from shardwise.run.exact.layer_trials import TrialRun
from shardwise.run.exact.trials import check_device, refuse
from shardwise.run.processes.ranks import Ranks
from shardwise.training.step_settings import ParallelSettings, TrainingSettings

# Numbers of rows that are tried, and of the product that they are compared with.
_LEAST, _ROWS = (1, 2, 4, 8, 16, 32, 64), 160
# Where pieces of the text end: chunks and single tokens, also at the end of a block of keys.
_ENDS = (5, 6, 200, 201, 511, 512, 513, 520)


def check_exact_generation(
    description: ModelConfig, dtype: torch.dtype | None, exact_parts: int, tp: int, pp: int
) -> None:
    """Raise ConfigError, in the words of training, unless exact training has such a model on so many ranks."""
    parallel = ParallelSettings(tp=tp, pp=pp, exact=True, exact_parts=exact_parts)
    parallel.check_exact(1, None, TrainingSettings(dtype="float64" if dtype == torch.float64 else "float32"))
    if description.transformers_config is not None:
        raise ConfigError(
            "the model is computed by transformers, because Shardwise has no table for it, and such a model cannot be "
            "used with --exact; leave it out"
        )
    if description.experts is not None:
        parallel.check_experts(tp * pp, description.experts.num)


def try_generation_(model: GPT, ranks: Ranks) -> None:
    """Try the device of an exact model that generates, and set the number of rows of its products; every rank calls.

    Raises:
        ConfigError: results differ on this device, or ranks compute differently; on every rank.
    """
    check_arithmetic(ranks.device, group=ranks.control)
    parts = model.config.exact_parts
    assert parts is not None
    longest = min(model.max_sequence_length, _ENDS[-1])
    if model.depends_on_length and model.rope_scaling is not None:
        # Up to here the frequencies are the same at each length.
        longest = min(longest, model.rope_scaling.original_max_position_embeddings or longest)
    length = max(parts, longest // parts * parts)
    run = TrialRun(model, model.config.params_dtype, parts, 1, length)
    least: list[int] = []

    def tried() -> None:
        check_device(model, micro_batch_size=1, sequence_length=length)
        least.append(_least_rows_(model, run))

    agree(tried, group=ranks.control)
    _few_of(model).least = max(gather_objects(least[0], "rows of a product", group=ranks.control))
    found, expected = _of_pieces(model, run, length)
    what = "log-probabilities" if model.post_process else "hidden states"

    def compare() -> None:
        if not torch.equal(found, expected):
            number = f"{int((found != expected).sum())} of {expected.numel()} {what}"
            refuse(
                run, [f"{number} of a text that is read in pieces have other bits than those of the whole text"], "use"
            )

    # Stages have other results.
    agree(compare, group=ranks.control)


def _few_of(model: GPT) -> FewRows:
    return cast(ExactArithmetic, arithmetic_of(model.tp_group)).few


def _least_rows_(model: GPT, run: TrialRun) -> int:
    """Return the smallest number of rows at which the bits of a row no longer depend on it."""
    few = _few_of(model)
    with torch.no_grad():
        for least in _LEAST:
            few.least = least
            found = list(islice(_differences(model, run, least), 1))
            if not found:
                break
    refuse(run, found, "use")
    return least


def _differences(model: GPT, run: TrialRun, least: int) -> Iterator[str]:
    layers = {}
    for layer in model.modules():
        if isinstance(layer, ParallelLinear) and isinstance(layer._products, ExactProducts):
            weight = model.shared_embedding_or_output_weight() if layer.weight is None else layer.weight
            assert weight is not None
            layers[layer._products.split, weight.shape, layer.bias is None] = layer, weight.detach()
    # A library may multiply some numbers of rows in another way, such as 5 to 11, and fewer ones as usual.
    numbers = [number for low in _LEAST if low >= least for number in (low, low + 1, 2 * low - 1)]
    for layer, weight in layers.values():
        products = layer._products
        bias = layer.bias if isinstance(products, ExactProducts) and products.split == "output" else None
        rows = run.numbers(_ROWS, weight.size(1)).to(weight.dtype)
        whole = products.linear(rows, weight, bias)
        for number in dict.fromkeys([*numbers, 1]):
            for first in (0, _ROWS - number):
                some = slice(first, first + number)
                if not torch.equal(products.linear(rows[some].clone(), weight, bias), whole[some]):
                    yield f"a product of {number} rows with a weight {list(weight.shape)} has other bits among {_ROWS}"


def _of_pieces(model: GPT, run: TrialRun, length: int) -> tuple[Tensor, Tensor]:
    """Return what the model makes of a text that is read in pieces, and of the whole text.

    These are the log-probabilities of its tokens, ``[s, 1]``, or the hidden states of a stage, ``[s, 1, h]``.
    """
    assert model.vocab_size is not None
    ids = run.ids(model.vocab_size, 1, length + 1)
    hidden = None if model.pre_process else run.numbers(length, 1, model.config.hidden_size).to(run.dtype)
    cache, start, found = PreallocatedCache.for_model(model, batch_size=1, capacity=length), 0, []
    with evaluation_mode(model):
        for stop in sorted({*(end for end in _ENDS if end < length), length}):
            model.set_input_tensor(None if hidden is None else hidden[start:stop])
            output = model(ids[:, start:stop], torch.arange(start, stop, device=ids.device), cache=cache)
            if model.post_process:
                labels = ids[:, start + 1 : stop + 1].t().contiguous()
                output = vocab_parallel_log_probs(output, labels, group=model.tp_group, vocab_size=model.vocab_size)
            found.append(output)
            start = stop
        model.set_input_tensor(hidden)
        whole = sequence_log_probs(model, ids).t() if model.post_process else model(ids[:, :-1])
        model.set_input_tensor(None)
    return torch.cat(found), whole
