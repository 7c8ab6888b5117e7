"""Floating-point operations of a model of transformers, counted in forwards on the meta device."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from shardwise.core.errors import ConfigError
from shardwise.models.by_plan import library
from shardwise.models.config import ModelConfig

# Name in transformers' table of attention functions, for the time of a forward.
_NAME = "shardwise_counted"
# A multiple of the chunks of linear attention, whose last chunk is padded.
_LENGTH = 256


@dataclass(frozen=True)
class Operations:
    """Operations of a forward, for each token; a multiply-add counts as two.

    Attributes:
        of_weights: of products whose number does not depend on the text's length, such as those with weights. Each
            token goes to its number of experts; rows of embeddings are looked up.
        of_pairs: for each attention the operations for each token that is attended to, and the largest number of these
            tokens, if it has a window.
    """

    of_weights: float
    of_pairs: tuple[tuple[float, int | None], ...]

    def of_attention(self, length: int) -> float:
        """Return the operations of attention in a text, as if each token attended to all others of its window."""
        return sum(each * (length if most is None else min(length, most)) for each, most in self.of_pairs)


def forward_operations(config: ModelConfig) -> Operations:
    """Count the operations of a model that ``library.describe`` described.

    Raises:
        ConfigError: the model's code needs values, which tensors of the meta device do not have.
    """
    assert config.transformers_config is not None
    return _counted(config.transformers_config)


@lru_cache(maxsize=4)
def _counted(text: str) -> Operations:
    config = library.describe(json.loads(text))
    model = library.build(config).eval()
    model.config._attn_implementation = _NAME
    # Reads the weights of each choice of a token, so the products are those of the choices.
    model.config._experts_implementation = "batched_mm"
    try:
        (one, pairs), (two, _) = (_products(model, length) for length in (_LENGTH, 2 * _LENGTH))
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(f"the products of {library.name_of(config)} cannot be counted: {reason}") from error
    # What grows with the square of the length is attention that the model computes itself.
    squares = max(0.0, (two - 2 * one) / 2 / _LENGTH**2)
    return Operations(one / _LENGTH - squares * _LENGTH, (*pairs, (squares, None)))


def _products(model: Any, length: int) -> tuple[int, list[tuple[float, int | None]]]:
    """Return the operations of a forward outside of attention functions, and ``Operations.of_pairs`` of these."""
    with torch.device("meta"), torch.no_grad(), _attention_counted() as pairs, _Zeros():
        ids, mask = torch.zeros(1, length, dtype=torch.int64), torch.zeros(1, 1, length, length)
        # Most models take a mask of all pairs as it is, and some of them need one. Others make their own.
        for attention_mask in (mask, None):
            pairs.clear()
            with contextlib.suppress(*([] if attention_mask is None else [Exception])):
                with FlopCounterMode(display=False) as counter:
                    model(input_ids=ids, attention_mask=attention_mask, use_cache=False)
                break
    return counter.get_total_flops(), pairs


class _Zeros(TorchDispatchMode):
    """Reads each single value of a tensor without values as zero."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0
        return func(*args, **kwargs or {})


@contextlib.contextmanager
def _attention_counted() -> Iterator[list[tuple[float, int | None]]]:
    """Count attention instead of computing it."""
    functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    pairs: list[tuple[float, int | None]] = []

    def count(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        (batch, heads, length, width), own = query.shape, value.size(-1)
        pairs.append((2 * heads * (width + own) * key.size(2) / length, options.get("sliding_window")))
        return query.new_empty(batch, length, heads, own), None

    functions[_NAME] = count
    try:
        yield pairs
    finally:
        del functions[_NAME]
