"""Text generation with a split model: key-value cache, sampling from split logits, the loop."""

from shardwise.inference.cache import PreallocatedCache
from shardwise.inference.generation import generate, sequence_log_probs
from shardwise.inference.sampling import GREEDY, Sampling, sample_next_token, vocab_parallel_argmax
from shardwise.inference.streaming import TextStream
from shardwise.inference.view import inference_view, on_layers

__all__ = [
    "GREEDY",
    "PreallocatedCache",
    "Sampling",
    "TextStream",
    "generate",
    "inference_view",
    "on_layers",
    "sample_next_token",
    "sequence_log_probs",
    "vocab_parallel_argmax",
]
