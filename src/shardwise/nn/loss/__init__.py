"""Losses and other functions over a vocabulary that is split over the ranks. None of them gathers the logits."""

from shardwise.nn.loss.cross_entropy import (
    preference_loss as preference_loss,
    vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
    vocab_parallel_log_probs as vocab_parallel_log_probs,
)
from shardwise.nn.loss.entropy import (
    vocab_parallel_entropy as vocab_parallel_entropy,
    vocab_parallel_kl_div as vocab_parallel_kl_div,
)
from shardwise.nn.loss.linear_cross_entropy import (
    vocab_parallel_linear_cross_entropy as vocab_parallel_linear_cross_entropy,
)
from shardwise.nn.loss.vocabulary import (
    vocab_parallel_argmax as vocab_parallel_argmax,
    vocab_parallel_topk as vocab_parallel_topk,
)
