"""Losses and other functions of a vocabulary that is split over the ranks; none gathers the logits."""

from shardwise.loss.cross_entropy import vocab_parallel_cross_entropy
from shardwise.loss.entropy import vocab_parallel_entropy
from shardwise.loss.kl_div import vocab_parallel_kl_div
from shardwise.loss.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from shardwise.loss.log_probs import vocab_parallel_log_probs
from shardwise.loss.topk import vocab_parallel_argmax, vocab_parallel_topk

__all__ = [
    "vocab_parallel_argmax",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_entropy",
    "vocab_parallel_kl_div",
    "vocab_parallel_linear_cross_entropy",
    "vocab_parallel_log_probs",
    "vocab_parallel_topk",
]
