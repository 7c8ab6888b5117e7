"""The learning rate of each step: a function of the step alone, so that a resumed run goes on as it would have."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine", "wsd"]
"""How the learning rate moves from its highest value, after the warm-up, to its last."""


def learning_rate_at(
    step: int,
    *,
    schedule: Schedule = "cosine",
    steps: int,
    warmup_steps: int,
    highest: float,
    final_ratio: float,
    decay_share: float = 0.2,
) -> float:
    """Learning rate of step ``step`` (from 0) of ``steps``: a linear rise, and then what the schedule says.

    >>> plan = {"schedule": "linear", "steps": 6, "warmup_steps": 2, "highest": 1.0, "final_ratio": 0.0}
    >>> [learning_rate_at(step, **plan) for step in range(6)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]

    Args:
        step: number of the step; from ``steps`` on the rate stays as it was in the last.
        schedule: "constant" stays at ``highest``; "linear" and "cosine" (Loshchilov and Hutter 2017, arXiv:1608.03983)
            fall from the warm-up to the last step; "wsd" (warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395)
            stays, and falls linearly over the last ``decay_share`` of all steps.
        steps: of the whole run.
        warmup_steps: steps until ``highest`` is reached.
        highest: largest learning rate.
        final_ratio: the last step's, as a share of ``highest``; not read by "constant".
        decay_share: share of ``steps``; read by "wsd" alone.
    """
    if step < warmup_steps:
        return highest * (step + 1) / warmup_steps
    if schedule == "constant":
        return highest
    falling = steps - warmup_steps
    if schedule == "wsd":
        falling = min(falling, round(decay_share * steps))
    progress = min(1.0, max(0.0, (step + 1 - (steps - falling)) / max(1, falling)))
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress
    return highest * (final_ratio + (1.0 - final_ratio) * left)
