"""What a run is told of its optimizer: which one, its numbers, and the learning rate of each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from shardwise.training import bounds
from shardwise.training.bounds import Checked, Range, require

if TYPE_CHECKING:
    from torch import nn

    from shardwise.training.optimizer.optimizer import ShardedOptimizer
import math

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


# What fp32 holds with room for a few products.
_LARGE = 1e30
RATE = Range(0, _LARGE, low_included=False)
"""Of a learning rate."""

DECAY = Range(0, 10_000)
"""Of a weight decay."""

_DECAY_SHARE, _MOMENTUM = 0.2, 0.95


@dataclass(frozen=True)
class OptimizerSettings(Checked, prefix="optimizer."):
    """AdamW or Muon, and the learning rate of each step.

    Attributes:
        name: "adamw", or "muon" for the weight matrices of transformer layers, with AdamW for all else.
        learning_rate: highest learning rate.
        schedule: how the learning rate moves after the warm-up: "constant" stays, "linear" and "cosine" fall until the
            last step, and "wsd" (warm-up, stable, decay) stays and then falls linearly over the last decay_share of the
            steps.
        final_learning_rate_ratio: last learning rate as a share of the highest, from 0 to 1; "constant" has none.
        warmup_steps: steps over which the learning rate rises from 0.
        decay_share: share of all steps over which "wsd" falls; 0.2 if not given.
        weight_decay: decoupled decay of weight matrices and embeddings, per unit of learning rate.
        beta1: decay of the gradient's mean.
        beta2: decay of the gradient's mean square.
        epsilon: added to the root mean square.
        clip_grad_norm: largest global gradient norm; larger gradients are scaled down to it. 0 turns clipping off.
        momentum: decay of the gradient's mean in "muon"; 0.95 if not given.
        matrix_learning_rate_ratio: learning rate of the matrices of "muon", as a multiple of learning_rate; 1 if not
            given.
    """

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: Annotated[float, RATE] = 3e-3
    schedule: Schedule = "cosine"
    final_learning_rate_ratio: Annotated[float, bounds.SHARE] = 0.1
    warmup_steps: Annotated[int, bounds.STEPS] = 20
    decay_share: Annotated[float | None, bounds.SHARE] = None
    weight_decay: Annotated[float, DECAY] = 0.1
    beta1: Annotated[float, bounds.PROBABILITY] = 0.9
    beta2: Annotated[float, bounds.PROBABILITY] = 0.95
    # Without it the update of a weight that never had a gradient is 0 / 0; less than this vanishes in fp32.
    epsilon: Annotated[float, Range(1e-30, 10_000)] = 1e-8
    clip_grad_norm: Annotated[float, Range(0, _LARGE)] = 1.0
    momentum: Annotated[float | None, bounds.PROBABILITY] = None
    matrix_learning_rate_ratio: Annotated[float | None, Range(0, _LARGE)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("momentum", "matrix_learning_rate_ratio"):
            value = getattr(self, name)
            require(
                value is None or self.name == "muon",
                f"optimizer.{name.replace('_', '-')} {value} is for --optimizer.name muon, and it is {self.name!r}; "
                "leave one out",
            )
        require(
            self.decay_share is None or self.schedule == "wsd",
            f"optimizer.decay-share {self.decay_share} is for --optimizer.schedule wsd, and it is {self.schedule!r}; "
            "leave one out",
        )

    def learning_rate_at(self, step: int, steps: int) -> float:
        """Of step ``step``, from 0, of a run of ``steps``."""
        return learning_rate_at(
            step,
            schedule=self.schedule,
            steps=steps,
            warmup_steps=self.warmup_steps,
            highest=self.learning_rate,
            final_ratio=self.final_learning_rate_ratio,
            decay_share=_DECAY_SHARE if self.decay_share is None else self.decay_share,
        )

    def make(self, model: nn.Module) -> ShardedOptimizer:
        """The optimizer of ``model``: the one place that says which."""
        from shardwise.training.optimizer.adamw import AdamW
        from shardwise.training.optimizer.muon import Muon

        options: dict[str, Any] = {
            "learning_rate": self.learning_rate,
            "weight_decay": self.weight_decay,
            "betas": (self.beta1, self.beta2),
            "epsilon": self.epsilon,
            "exact_parts": getattr(getattr(model, "config", None), "exact_parts", None),
        }
        if self.name == "adamw":
            return AdamW(model, **options)
        ratio = self.matrix_learning_rate_ratio
        return Muon(
            model,
            momentum=_MOMENTUM if self.momentum is None else self.momentum,
            matrix_learning_rate_ratio=1.0 if ratio is None else ratio,
            **options,
        )
