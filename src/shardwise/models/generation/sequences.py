"""Sequences that the engine continues, and where each kind of model keeps what it has read of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shardwise.models.by_plan import joint
from shardwise.models.by_plan.model import PlannedCache, PlannedModel
from shardwise.models.generation.paged_cache import Chunk, PagedCache, RaggedPass
from shardwise.models.generation.requests import Generated, Request
from shardwise.models.generation.sampling import History
from shardwise.models.gpt import GPT


class RunningSequence:
    """A request in the engine: the tokens that the next one depends on, how many are cached, and the result."""

    def __init__(self, number: int, request: Request, longest: int, device: torch.device) -> None:
        self.number, self.request, self.result = number, request, Generated()
        self.most_tokens = request.most_tokens(longest)
        self.context, self.num_cached, self.pages = request.start, 0, list[int]()
        self.prompt_length = len(self.context)
        self.cache: PlannedCache | None = None
        kind = device if device.type == "cuda" else "cpu"
        self.generator = torch.Generator(device=kind).manual_seed(request.seed)

    @property
    def history(self) -> History:
        """The tokens that penalties count."""
        return History([*self.request.earlier_ids, *self.request.start], self.result.token_ids)

    def unmeasured(self, start: int, stop: int) -> range:
        """Return the positions from ``start`` to ``stop`` whose logits measure the prompt's next token, once."""
        if self.request.prompt_log_probs is None:
            return range(0)
        return range(max(start, len(self.result.prompt_log_probs)), min(stop, self.prompt_length - 1))

    @property
    def first_needed(self) -> int:
        """The first position whose logits are needed."""
        last = len(self.context) - 1
        return next(iter(self.unmeasured(0, last)), last)


class Work(NamedTuple):
    """Tokens of a sequence that a pass reads: those of its context from ``start`` to ``stop``."""

    sequence: RunningSequence
    start: int
    stop: int

    @property
    def rows(self) -> list[int]:
        """The positions, counted from ``start``, whose logits are needed."""
        own = self.sequence
        rows = [position - self.start for position in own.unmeasured(self.start, self.stop)]
        if self.chooses and self.stop - self.start - 1 not in rows:
            rows.append(self.stop - self.start - 1)
        return rows

    @property
    def chooses(self) -> bool:
        """True if the pass chooses a token."""
        own = self.sequence
        return self.stop == len(own.context) and own.request.max_new_tokens > 0


class SequenceStore(Protocol):
    """Where a kind of model keeps what it has read of sequences."""

    def extend_(self, sequence: RunningSequence, length: int, others: Sequence[RunningSequence] = ()) -> bool:
        """Make room for ``length`` tokens of a sequence; return False if that leaves too little for others to grow."""
        ...

    def share_(self, sequence: RunningSequence) -> None:
        """Take what others have read of a sequence's first tokens, before it reads any."""
        ...

    def offer_(self, work: Work) -> None:
        """Let others share what the next pass reads."""
        ...

    def release_(self, sequence: RunningSequence) -> None:
        """Forget a sequence."""
        ...

    def refusal(self, length: int) -> str | None:
        """Return why a sequence of some length never has room; None if it has."""
        ...

    def read(self, works: Sequence[Work], hidden: Tensor | None = None) -> Tensor:
        """Read tokens; return the logits of all rows, ``[n, v/t]`` or ``[n, v]``, or the hidden states of a stage.

        ``hidden`` are those of the stage before.
        """
        ...


class PagedStore:
    """Pages for a GPT, which reads the tokens of all sequences in one row."""

    def __init__(self, model: GPT, num_pages: int, page_size: int) -> None:
        self._model, self.cache = model, PagedCache.for_model(model, num_pages=num_pages, page_size=page_size)

    def extend_(self, sequence: RunningSequence, length: int, others: Sequence[RunningSequence] = ()) -> bool:
        spare = sum(self.cache.num_pages_for(other.most_tokens) > len(other.pages) for other in others)
        return self.cache.extend_(sequence.pages, length, spare=spare)

    def share_(self, sequence: RunningSequence) -> None:
        if not self._model.depends_on_length:
            sequence.num_cached = self.cache.share_(sequence.pages, sequence.context[: sequence.first_needed])

    def offer_(self, work: Work) -> None:
        if not self._model.depends_on_length:
            self.cache.offer_(work.sequence.pages, work.sequence.context, work.start, work.stop)

    def release_(self, sequence: RunningSequence) -> None:
        self.cache.release_(sequence.pages)

    def refusal(self, length: int) -> str | None:
        cache = self.cache
        if (needed := cache.num_pages_for(length)) <= cache.num_pages:
            return None
        return (
            f"it may have {length} tokens, which take {needed} pages of {cache.page_size}, and the cache has "
            f"{cache.num_pages}; raise the capacity of the cache to at least {length} tokens, or lower max_new_tokens"
        )

    def read(self, works: Sequence[Work], hidden: Tensor | None = None) -> Tensor:
        chunks, rows, first = [], list[int](), 0
        for work in works:
            own = work.sequence
            chunks.append(Chunk(own.context[work.start : work.stop], work.start, own.pages, len(own.context)))
            rows += [first + row for row in work.rows]
            first += work.stop - work.start
        # In exact mode the bits of a sequence must not depend on the others.
        row = RaggedPass(self.cache, chunks, rows, together=self._model.config.exact_parts is None)
        self._model.set_input_tensor(hidden)
        output: Tensor = self._model(row.ids, row.positions, cache=row)
        return output.reshape(-1, output.size(-1)) if self._model.post_process else output


class PlannedStore:
    """Caches of transformers for a model that is split by its own plan.

    It reads one prompt after the other, each whole, and the next tokens of several texts together if all layers are
    attention (``models.by_plan.joint``).
    """

    def __init__(self, model: PlannedModel) -> None:
        self._model = model
        self.may_join = joint.may_join(model)
        self._joins: bool | None = None if self.may_join else False

    def extend_(self, sequence: RunningSequence, length: int, others: Sequence[RunningSequence] = ()) -> bool:
        return True

    def share_(self, sequence: RunningSequence) -> None:
        pass

    def offer_(self, work: Work) -> None:
        pass

    def release_(self, sequence: RunningSequence) -> None:
        sequence.cache = None

    def refusal(self, length: int) -> str | None:
        return None

    def read(self, works: Sequence[Work], hidden: Tensor | None = None) -> Tensor:
        growing = {work: work.sequence.cache for work in works if work.start > 0 and work.stop == work.start + 1}
        caches = [cache for cache in growing.values() if cache is not None]
        if len(caches) > 1 and self._joins is None:
            self._joins = joint.joins(self._model)
        if len(caches) < 2 or not self._joins:
            return torch.cat([self._logits(work) for work in works])
        rows = joint.next_logits(self._model, [work.sequence.context[work.start] for work in growing], caches)
        together = dict(zip(growing, rows.split(1), strict=True))
        return torch.cat([together[work] if work in together else self._logits(work) for work in works])

    def _logits(self, work: Work) -> Tensor:
        own, device = work.sequence, next(self._model.parameters()).device
        if own.cache is None:
            own.cache = PlannedCache(self._model)
        ids = torch.tensor([own.context[work.start : work.stop]], device=device)
        positions = torch.arange(work.start, work.stop, device=device)
        if work.rows == [work.stop - work.start - 1]:
            return self._model.next_logits(ids, positions, cache=own.cache)
        logits: Tensor = self._model(ids, positions, cache=own.cache)
        return logits[work.rows, 0]
