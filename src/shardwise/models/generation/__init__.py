"""Text generation with a split model: key-value cache, sampling from split logits, the loop."""

from shardwise.models.generation.batch import generate_batch as generate_batch
from shardwise.models.generation.cache import PreallocatedCache as PreallocatedCache
from shardwise.models.generation.generation import generate as generate
from shardwise.models.generation.generation import sequence_log_probs as sequence_log_probs
from shardwise.models.generation.inference_view import inference_view as inference_view
from shardwise.models.generation.inference_view import on_layers as on_layers
from shardwise.models.generation.prefix import PrefixCache as PrefixCache
from shardwise.models.generation.sampling import GREEDY as GREEDY
from shardwise.models.generation.sampling import Sampling as Sampling
from shardwise.models.generation.sampling import sample_next_token as sample_next_token
from shardwise.models.generation.sampling import vocab_parallel_argmax as vocab_parallel_argmax
