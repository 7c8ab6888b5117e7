"""Losses of preferences: functions of how much likelier two answers have become than a reference model finds them."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.core.errors import ConfigError

PreferenceKind = Literal["sigmoid", "robust", "hinge", "ipo"]


def preference_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float = 0.1,
    kind: PreferenceKind = "sigmoid",
    label_smoothing: float = 0.0,
    num_chosen: Tensor | None = None,
    num_rejected: Tensor | None = None,
) -> Tensor:
    """Loss of each pair of answers, without a reward model.

    With ``d = chosen - rejected``, ``sigmoid`` is ``-(1 - e) log σ(beta d) - e log σ(-beta d)``; ``robust`` the same
    with ``+`` before its second term, over ``1 - 2 e``; ``hinge`` is ``max(0, 1 - beta d)``; and ``ipo`` is
    ``(d - 1 / (2 beta))²``, where each of the two is the mean over the tokens of its answer.

    Args:
        chosen: ``[n]``, log-probability of each better answer by the model, minus that by the reference.
        rejected: ``[n]``, the same of the other answers.
        beta: how closely the model is held to the reference.
        kind: which loss.
        label_smoothing: ``e``, the probability that a preference is the wrong way round.
        num_chosen: ``[n]``, tokens of each better answer; for ``ipo``.
        num_rejected: ``[n]``, tokens of each other answer; for ``ipo``.

    Returns:
        ``[n]``.

    Raises:
        ConfigError: an option out of range, an unknown kind, or ``ipo`` without numbers of tokens.

    Source: Rafailov et al. 2023 (arXiv:2305.18290), equation 7; robust: Chowdhury et al. 2024 (arXiv:2403.00409);
        hinge: Zhao et al. 2023 (arXiv:2305.10425); ipo: Azar et al. 2023 (arXiv:2310.12036), equation 17.
    """
    # Each written so that NaN fails.
    if not 0.0 < beta < math.inf:
        raise ConfigError(f"beta is {beta}; it must be over 0 and finite")
    if not 0.0 <= label_smoothing < 0.5:
        raise ConfigError(f"label_smoothing is {label_smoothing}; it must be at least 0 and under 0.5")
    if label_smoothing and kind not in ("sigmoid", "robust"):
        raise ConfigError(f"label_smoothing is {label_smoothing}, and {kind!r} has none; use 'sigmoid' or 'robust'")
    if kind == "ipo":
        if num_chosen is None or num_rejected is None:
            raise ConfigError("ipo is of means over tokens; pass num_chosen and num_rejected")
        difference = chosen / num_chosen.clamp(min=1) - rejected / num_rejected.clamp(min=1)
        return (difference - 1 / (2 * beta)).square()
    scaled = beta * (chosen - rejected)
    if kind == "hinge":
        return torch.relu(1 - scaled)
    right, wrong = -F.logsigmoid(scaled), -F.logsigmoid(-scaled)
    if kind == "sigmoid":
        return (1 - label_smoothing) * right + label_smoothing * wrong
    if kind == "robust":
        return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)
    raise ConfigError(f"kind is {kind!r}; choose one of sigmoid, robust, hinge, ipo")
