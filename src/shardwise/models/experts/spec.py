"""The experts of a model: their number and size, and how a router chooses among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from shardwise.core.errors import ConfigError

if TYPE_CHECKING:
    # Settings import this file before PyTorch, whose import takes time.
    from torch import Tensor

RouterScores = Literal["softmax", "sigmoid"]
Balanced = Literal["sequence", "micro_batch", "global"]
Dropped = Literal["probability", "position"]


# A larger number is a mistake. It raises an error before it takes time or memory.
_LARGEST = {
    **dict.fromkeys(("num", "per_token", "num_groups", "groups_per_token"), 1 << 16),
    **dict.fromkeys(("ffn_hidden_size", "shared_ffn_hidden_size"), 1 << 30),
}
# In all layers together.
_MOST_EXPERTS = 1 << 20


@dataclass(frozen=True)
class ClampedGate:
    """Activation of experts with a gate, ``(up + 1) * gate * sigmoid(alpha * gate)`` of clamped values.

    Attributes:
        limit: largest gate, and largest magnitude of the up projection.
        alpha: factor of the gate in the sigmoid.

    Raises:
        ConfigError: a value is not a finite number over 0.

    Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv:2508.10925).
    """

    limit: float = 7.0
    alpha: float = 1.702

    def __post_init__(self) -> None:
        for name in ("limit", "alpha"):
            value = getattr(self, name)
            _require(0 < value < math.inf, f"{name} of the gate is {value}; it must be a finite number over 0")

    def __call__(self, inner: Tensor) -> Tensor:
        """Map ``[..., 2 f]``, the gate's half of the features first, to ``[..., f]``."""
        gate, up = inner.chunk(2, dim=-1)
        gate = gate.clamp(max=self.limit)
        return (up.clamp(-self.limit, self.limit) + 1) * (gate * (self.alpha * gate).sigmoid())


@dataclass(frozen=True)
class Experts:
    """Mixture of experts instead of a layer's MLP. Two are equal if they are equal outside of training.

    A router gives each token a score for each expert. The token goes to the ``per_token`` experts with the highest
    scores, and the layer's output is the sum of their outputs, each times its weight.

    Attributes:
        num: number of experts.
        per_token: number of experts of a token, ``k``.
        ffn_hidden_size: width of each expert.
        layers: for each layer of the model, whether it has experts; None means all layers.
        scores: ``"softmax"`` over the experts, or ``"sigmoid"`` of each expert's own logit.
        softmax_after_choice: whether the softmax is over the chosen experts only, whose logits are the highest.
        normalizes_weights: whether the weights of a token's experts are divided by their sum.
        weight_scale: factor of the weights.
        selection_bias: whether a bias is added to the scores for the choice alone.
        bias_rate: rate at which a trainer changes this bias after each step, by the sign of the mean load minus the
            expert's, which balances the experts without a loss; 0 to keep it.
        centers_bias: whether the mean change of a layer's experts is subtracted from each change, so that the mean bias
            stays the same.
        num_groups: number of groups of experts; a token considers the best ``groups_per_token`` of them.
        groups_per_token: number of groups that are considered, those with the highest scores: with ``"sigmoid"`` the
            sum of a group's two highest scores, else its highest.
        weighs_input: whether the weight multiplies an expert's input instead of its output.
        biases: whether the router's logits and both projections of each expert have biases.
        gate: activation of the experts; None for that of the model.
        shared_ffn_hidden_size: width of an additional MLP that sees all tokens; None for none.
        shared_gate: whether the sigmoid of a projection of each token multiplies that MLP's output.
        capacity_factor: in training, an expert takes at most this factor times the mean number of a sequence's tokens,
            rounded up; None for all. A token that it does not take gets nothing from it, as if its weight were 0.
        drops_by: the tokens that an expert takes: those with the highest weights (``"probability"``), or the first ones
            of the sequence (``"position"``).
        aux_loss: coefficient of the loss that balances the experts; 0 for none. For each layer it is ``num * sum(f *
            p)``, with each expert's share ``f`` of the tokens' choices, and its mean score ``p`` (a token's scores are
            divided by their sum).
        balances: whether ``f`` and ``p`` are those of each ``"sequence"``, and the loss is the mean over sequences,
            which does not depend on the micro-batches; or of all tokens of a ``"micro_batch"``; or, ``"global"``, of
            all tokens of the micro-batches that the data-parallel ranks compute at the same time.
        pools_layers: whether ``f`` and ``p`` are those of all layers together, as in the balance loss of transformers,
            instead of a loss for each layer. ``f`` is then an expert's choices per token and layer, ``k`` times its
            share. It needs all layers on one pipeline stage.
        init_scale: factor of the initial standard deviation of the second projection. With normalised weights, ``k``
            experts of a ``k``-th of an MLP's width together start with a ``k``-th of its scale.
        forces_balance: whether the choice ignores the scores, and the experts of a token follow those of the token
            before it in its sequence; to measure and to debug. So loads are even, and the same at every layout.
        z_loss: coefficient of the mean square of the log of the sum of the logits' exponentials; 0 for none.

    Raises:
        ConfigError: a value is out of range, or values contradict each other.

    Source: Shazeer et al. 2017 (arXiv:1701.06538); Lepikhin et al. 2020 (arXiv:2006.16668), section 2.2; Fedus et al.
    2021 (arXiv:2101.03961), section 2.2; Zoph et al. 2022 (arXiv:2202.08906), section 3; Wang et al. 2024
    (arXiv:2408.15664); DeepSeek-AI 2024 (arXiv:2412.19437), section 2.1.2; Qiu et al. 2025 (arXiv:2501.11873), for
    ``"global"``; torchtitan, for ``centers_bias``.
    """

    num: int
    per_token: int
    ffn_hidden_size: int
    layers: tuple[bool, ...] | None = None
    scores: RouterScores = "softmax"
    softmax_after_choice: bool = False
    normalizes_weights: bool = True
    weight_scale: float = 1.0
    selection_bias: bool = False
    bias_rate: float = field(default=0.0, compare=False)
    centers_bias: bool = field(default=False, compare=False)
    num_groups: int = 1
    groups_per_token: int = 1
    weighs_input: bool = False
    biases: bool = False
    gate: ClampedGate | None = None
    shared_ffn_hidden_size: int | None = None
    shared_gate: bool = False
    capacity_factor: float | None = field(default=None, compare=False)
    drops_by: Dropped = field(default="probability", compare=False)
    aux_loss: float = field(default=0.0, compare=False)
    balances: Balanced = field(default="sequence", compare=False)
    pools_layers: bool = field(default=False, compare=False)
    init_scale: float = field(default=1.0, compare=False)
    forces_balance: bool = field(default=False, compare=False)
    z_loss: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        for name, largest in _LARGEST.items():
            value = getattr(self, name)
            _require(
                1 <= (1 if value is None else value) <= largest, f"{name} is {value}; it must be from 1 to {largest}"
            )
        _require(
            self.per_token <= self.num, f"per_token is {self.per_token}, and there are {self.num} experts; lower it"
        )
        for name, kinds in (("scores", RouterScores), ("balances", Balanced), ("drops_by", Dropped)):
            value, known = getattr(self, name), get_args(kinds)
            _require(value in known, f"{name} is {value!r}; it must be one of {', '.join(known)}")
        _require(
            self.scores == "softmax" or not self.softmax_after_choice,
            "softmax_after_choice is for softmax scores, and scores is 'sigmoid'; leave it at False",
        )
        _require(
            self.num % self.num_groups == 0, f"num_groups {self.num_groups} does not divide the {self.num} experts"
        )
        _require(
            self.groups_per_token <= self.num_groups,
            f"groups_per_token is {self.groups_per_token}, and there are {self.num_groups} groups; lower it",
        )
        room = self.groups_per_token * (self.num // self.num_groups)
        _require(
            self.per_token <= room,
            f"per_token is {self.per_token}, and {self.groups_per_token} groups have {room} experts; raise "
            "groups_per_token",
        )
        _require(
            self.selection_bias or not self.bias_rate, "bias_rate is about selection_bias, which is False; set both"
        )
        _require(self.bias_rate > 0 or not self.centers_bias, "centers_bias is about bias_rate, which is 0; set both")
        for name in ("weight_scale", "init_scale", "aux_loss", "z_loss", "bias_rate"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, f"{name} is {value}; it must be a finite number of at least 0")
        _require(self.aux_loss > 0 or not self.pools_layers, "pools_layers is about aux_loss, which is 0; set both")
        factor = self.capacity_factor
        _require(
            factor is None or 0 < factor < math.inf,
            f"capacity_factor is {factor}; it must be a finite number over 0, or None",
        )
        _require(
            factor is not None or self.drops_by == "probability",
            f"drops_by {self.drops_by!r} is about capacity_factor, which is None; set both",
        )
        _require(
            self.shared_ffn_hidden_size is not None or not self.shared_gate,
            "shared_gate is about the MLP of shared_ffn_hidden_size, which is None; set both",
        )

    def in_layer(self, layer_number: int) -> bool:
        """Whether a layer, numbered from 1, has experts."""
        return self.layers is None or self.layers[layer_number - 1]

    def check_layers(self, num_layers: int) -> None:
        """Raise ConfigError unless ``layers`` fits a model of so many layers, and there are not too many experts."""
        _require(
            self.num * num_layers <= _MOST_EXPERTS,
            f"{num_layers} layers of num {self.num} are more than {_MOST_EXPERTS} experts; lower one of them",
        )
        value = self.layers
        is_right = value is None or (
            isinstance(value, Sequence) and len(value) == num_layers and all(isinstance(each, bool) for each in value)
        )
        _require(
            is_right, f"layers is {value!r}; it must be a bool for each of the {num_layers} layers, or None for all"
        )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(f"experts: {message}")
