"""What is asked of generation, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from shardwise.models.generation.sampling import Sampling

SAMPLED = Sampling()
"""Sampling from the model's distribution."""

LEAST_TEMPERATURE = 1e-6
"""Least temperature of log-probabilities; logits divided by less may not be finite."""


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        prompt_ids: token ids, at most ``max_sequence_length`` of them. If empty, the model starts from the first of
            ``eos_ids``.
        max_new_tokens: maximum number of tokens to generate; 0 only measures the prompt.
        sampling: sampling parameters.
        seed: random seed, from 0 to 2**63 - 1; the text of a seed does not depend on other requests.
        eos_ids: tokens that end the text.
        log_probs: number of most likely tokens whose log-probabilities are returned next to those of the text's tokens;
            None for no log-probabilities.
        prompt_log_probs: the same for the prompt's tokens.
        temperature: divisor of the logits in log-probabilities; that of ``sampling`` if None, or 1 if that is 0; at
            least ``LEAST_TEMPERATURE``.
        on_token: called with each token of the text, but not with the one that ends it, on every rank. A result that is
            true ends the text; it must be the same on every rank.
        earlier_ids: tokens before the prompt, which the model does not read; the repetition penalty counts them.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = SAMPLED
    seed: int = 0
    eos_ids: Sequence[int] = ()
    log_probs: int | None = None
    prompt_log_probs: int | None = None
    temperature: float | None = None
    on_token: Callable[[int], object] | None = None
    earlier_ids: Sequence[int] = ()

    @property
    def start(self) -> list[int]:
        """The tokens before the text."""
        return list(self.prompt_ids or self.eos_ids[:1])

    def most_tokens(self, longest: int) -> int:
        """Return the maximum number of cached tokens, with a model that reads ``longest`` at once."""
        # The last token is not read.
        return min(longest, len(self.start) + max(0, self.max_new_tokens - 1))

    @property
    def measured_at(self) -> float:
        """The temperature of log-probabilities."""
        return (self.sampling.temperature or 1.0) if self.temperature is None else self.temperature


class LogProb(NamedTuple):
    """The log-probability of a token, and those of the most likely ones: their ids and values, the highest first.

    It is that of the softmax of all logits divided by the temperature, before penalties, top-k, top-p and min-p.
    """

    value: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Generated:
    """The continuation of a prompt.

    Attributes:
        token_ids: the new tokens, with the one that ended the text.
        reason: why it ended: ``"end"`` by a token of ``eos_ids``, ``"stop"`` by ``on_token``, or ``"length"``.
        log_probs: those of ``token_ids``; empty if not asked for.
        prompt_log_probs: those of the prompt's tokens but the first; empty if not asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    reason: Literal["end", "stop", "length"] = "length"
    log_probs: list[LogProb] = field(default_factory=list)
    prompt_log_probs: list[LogProb] = field(default_factory=list)

    @property
    def text_ids(self) -> list[int]:
        """The new tokens without the one that ended the text."""
        return self.token_ids[:-1] if self.reason == "end" else self.token_ids
