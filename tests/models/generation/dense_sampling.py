"""The oracle of sampling: whole logits, sorted lists and explicit sums, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwise.models.generation import Sampling


def kept_probabilities(logits: Sequence[float], sampling: Sampling) -> dict[int, float]:
    """The ids that may be chosen, and how likely each is; ``sampling`` is not greedy."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = {i: math.exp((logits[i] - logits[order[0]]) / sampling.temperature) for i in order}
    total = math.fsum(weights.values())
    kept: dict[int, float] = {}
    reached = 0.0
    for i in order:
        if sampling.top_p < 1 and reached / total >= sampling.top_p:
            break
        reached += weights[i]
        if weights[i] >= sampling.min_p * weights[order[0]]:
            kept[i] = weights[i]
    total = math.fsum(kept.values())
    return {i: weight / total for i, weight in kept.items()}


def penalised(logits: Sequence[float], sampling: Sampling, prompt: Sequence[int], text: Sequence[int]) -> list[float]:
    """The logits after repetition and presence penalty."""
    result = list(logits)
    for i in {*prompt, *text}:
        result[i] *= sampling.repetition_penalty if result[i] < 0 else 1 / sampling.repetition_penalty
        result[i] -= sampling.presence_penalty * (i in text)
    return result


def choose(logits: Sequence[float], sampling: Sampling, uniform: Sequence[float]) -> int:
    """The id that ``uniform``, one number for each id, chooses."""
    if sampling.temperature == 0:
        return min(range(len(logits)), key=lambda i: (-logits[i], i))
    # The first of independent exponential clocks whose rates are the probabilities.
    kept = kept_probabilities(logits, sampling)
    return min(kept, key=lambda i: -math.log(uniform[i]) / kept[i])
