"""Losses and other functions of a vocabulary that is split over the ranks; none gathers the logits."""

from shardwise.loss.cross_entropy import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from shardwise.loss.entropy import vocab_parallel_entropy as vocab_parallel_entropy
from shardwise.loss.kl_div import vocab_parallel_kl_div as vocab_parallel_kl_div
from shardwise.loss.linear_cross_entropy import (
    vocab_parallel_linear_cross_entropy as vocab_parallel_linear_cross_entropy,
)
from shardwise.loss.log_probs import vocab_parallel_log_probs as vocab_parallel_log_probs
from shardwise.loss.preference import preference_loss as preference_loss
from shardwise.loss.topk import vocab_parallel_argmax as vocab_parallel_argmax
from shardwise.loss.topk import vocab_parallel_topk as vocab_parallel_topk
