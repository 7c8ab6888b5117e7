"""Text generation with a split model: key-value cache, sampling from split logits, the loop."""

from shardwise.inference.batch import generate_batch as generate_batch
from shardwise.inference.cache import PreallocatedCache as PreallocatedCache
from shardwise.inference.generation import generate as generate
from shardwise.inference.generation import sequence_log_probs as sequence_log_probs
from shardwise.inference.prefix import PrefixCache as PrefixCache
from shardwise.inference.sampling import GREEDY as GREEDY
from shardwise.inference.sampling import Sampling as Sampling
from shardwise.inference.sampling import sample_next_token as sample_next_token
from shardwise.inference.sampling import vocab_parallel_argmax as vocab_parallel_argmax
from shardwise.inference.streaming import TextStream as TextStream
from shardwise.inference.view import inference_view as inference_view
from shardwise.inference.view import on_layers as on_layers
