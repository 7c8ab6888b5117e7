"""Text generation with a split model: key-value cache, sampling from split logits, generation loop."""

from shardwise.models.generation.cache import (
    PreallocatedCache as PreallocatedCache,
    PrefixCache as PrefixCache,
    inference_view as inference_view,
    on_layers as on_layers,
)
from shardwise.models.generation.engine import (
    BatchEngine as BatchEngine,
    generate_all as generate_all,
)
from shardwise.models.generation.generation import (
    generate as generate,
    sequence_log_probs as sequence_log_probs,
)
from shardwise.models.generation.requests import (
    Generated as Generated,
    LogProb as LogProb,
    Request as Request,
)
from shardwise.models.generation.sampling import (
    GREEDY as GREEDY,
    Sampling as Sampling,
    sample_next_token as sample_next_token,
)
