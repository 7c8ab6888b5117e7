"""Mixtures of experts: their settings, router, dispatch of tokens, and layer."""

# Settings are imported before PyTorch, whose import takes time.
from shardwise.models.experts.spec import (
    Balanced as Balanced,
    ClampedGate as ClampedGate,
    Dropped as Dropped,
    Experts as Experts,
    RouterScores as RouterScores,
)
