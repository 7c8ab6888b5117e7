"""Megatron's inference contexts: how much of the sequences in a batch was read, and the keys and values of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from shardwise.megatron.surface import offer


class BaseInferenceContext(ABC):
    """Base class of contexts.

    A model of this library reads a context that is also a key-value cache, such as
    ``shardwise.models.generation.PreallocatedCache``; a program's own attention may read any.
    """

    def __init__(self, materialize_only_last_token_logits: bool) -> None:
        self.materialize_only_last_token_logits = materialize_only_last_token_logits

    @abstractmethod
    def is_static_batching(self) -> bool:
        """True if all sequences of the batch begin and end together."""

    def is_dynamic_batching(self) -> bool:
        """True if sequences join and leave the batch."""
        return not self.is_static_batching()


class StaticInferenceContext(BaseInferenceContext):
    """State of a batch whose sequences begin together, for attention of the program's own.

    Args:
        max_batch_size: largest number of sequences.
        max_sequence_length: largest number of tokens of a sequence.
        use_flashinfer_fused_rope: no effect.

    Attributes:
        sequence_len_offset: tokens of each sequence that were read.
        batch_size_offset: sequences before this part of the batch.
        key_value_memory_dict: keys and values ``[s, b, heads, d]`` by layer number, kept by the attention.
        decode_mode: whether prompts were read.
    """

    def __init__(
        self, max_batch_size: int, max_sequence_length: int, use_flashinfer_fused_rope: bool | None = None
    ) -> None:
        super().__init__(materialize_only_last_token_logits=True)
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.key_value_memory_dict: dict[int, Any] = {}
        self.reset()

    def is_static_batching(self) -> bool:
        """Return True."""
        return True

    def increment_sequence_len_offset(self, increment: int) -> None:
        """Count ``increment`` more tokens of each sequence."""
        self.sequence_len_offset += increment

    def increment_batch_size_offset(self, increment: int) -> None:
        """Go on with the sequences after the next ``increment``."""
        self.batch_size_offset += increment

    def reset_batch_size_offset(self) -> None:
        """Go back to the first sequence."""
        self.batch_size_offset = 0

    def enable_prefill_mode(self) -> None:
        """Note that prompts are read."""
        self.decode_mode = False

    def enable_decode_mode(self) -> None:
        """Note that prompts were read."""
        self.decode_mode = True

    def is_decode_only(self) -> bool:
        """True after ``enable_decode_mode``."""
        return self.decode_mode

    def reset(self) -> None:
        """Begin a new batch; keys and values stay where they are."""
        self.sequence_len_offset = self.batch_size_offset = 0
        self.decode_mode = False


InferenceParams = StaticInferenceContext

offer(globals(), "InferenceParams")
