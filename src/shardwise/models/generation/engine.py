"""Generation for many prompts: sequences join and leave while others go on.

A pass has the next tokens of several sequences in one row: one token of each text that grows, and chunks of prompts
that are read. All ranks of the model's tensor-parallel group make the same passes, since they choose the same tokens.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.core.communication.agreement import check_same
from shardwise.core.errors import ConfigError
from shardwise.models.by_plan.model import PlannedModel
from shardwise.models.generation.cache import CausalModel, kind_of_cache, layer_sizes
from shardwise.models.generation.generation import check_arguments, checked_model, evaluation_mode, own_part
from shardwise.models.generation.paged_cache import PagedCache
from shardwise.models.generation.requests import LEAST_TEMPERATURE, Generated, LogProb, Request
from shardwise.models.generation.sampling import (
    History,
    Sampling,
    checked_choice,
    choose_next_token,
    likeliest_ids,
)
from shardwise.models.generation.sequences import PagedStore, PlannedStore, RunningSequence, SequenceStore, Work
from shardwise.models.gpt import GPT
from shardwise.nn.loss.cross_entropy import vocab_parallel_log_probs

PAGE_SIZE = 16
"""Default number of tokens of a page."""

CHUNK_SIZE = 512
"""Default number of prompt tokens of a pass."""

# Bytes of a cache whose size is not given, on the rank that needs the most.
_BYTES = 1 << 30


class BatchEngine:
    """Continues many prompts together, each as ``generate`` does alone, up to rounding of the logits.

    Every rank of the model's tensor-parallel group makes the same calls. The model must be in evaluation mode, without
    gradient, in ``step``; ``run`` sees to it. Its weights may change between two runs.

    A prompt is read in chunks, between which the texts of others grow. If the cache is full, requests wait, in their
    order. If it is full because texts grow, the youngest one gives its pages back and is read again later. Sequences
    that begin with the same tokens share the full pages of these while one of them runs, and only the first reads them.
    A model by a plan (``PlannedModel``) has caches of transformers; it reads one prompt after the other, whole.

    Args:
        model: the model.
        max_sequences: maximum number of sequences at once.
        capacity: number of tokens whose keys and values fit into the cache, rounded up to pages. If None,
            ``max_sequences`` of the longest sequences, or as many tokens as fit into 1 GiB if that is less, but at
            least one longest sequence.
        page_size: tokens of a page.
        chunk_size: number of prompt tokens of a pass.

    Raises:
        ConfigError: a number is under 1, or the model is one of several pipeline stages.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        max_sequences: int = 32,
        capacity: int | None = None,
        page_size: int = PAGE_SIZE,
        chunk_size: int = CHUNK_SIZE,
    ) -> None:
        self.vocab_size, self.model, self.page_size = checked_model(model), model, page_size
        sizes = {"max_sequences": max_sequences, "page_size": page_size, "chunk_size": chunk_size}
        for name, size in (sizes if capacity is None else sizes | {"capacity": capacity}).items():
            if size < 1:
                raise ConfigError(f"{name} of a BatchEngine is {size}; it must be at least 1")
        self._device = next(model.parameters()).device
        self._store: SequenceStore
        if isinstance(model, PlannedModel):
            self._store, self._max_sequences, self._chunk_size = PlannedStore(model), 1, model.max_sequence_length
        else:
            capacity = self._usual_capacity(model, max_sequences) if capacity is None else capacity
            self._store = PagedStore(model, -(-capacity // page_size), page_size)
            self._max_sequences, self._chunk_size = max_sequences, chunk_size
        # Keys that were rotated for a length cannot be computed again when the text is longer.
        self._reserves = model.depends_on_length
        self._waiting: deque[RunningSequence] = deque()
        self._running: list[RunningSequence] = []
        self._num_added = 0

    @staticmethod
    def _usual_capacity(model: GPT, max_sequences: int) -> int:
        itemsize = kind_of_cache(model)[0].itemsize
        per_token = max(
            sum(groups * (key + value) for groups, key, value in layer_sizes(model, rank)) * itemsize
            for rank in range(model.tp_group.size())
        )
        longest = model.max_sequence_length
        return max(longest, min(max_sequences * longest, _BYTES // per_token))

    @property
    def cache(self) -> PagedCache | None:
        """The cache of a GPT; None for a model by a plan."""
        return self._store.cache if isinstance(self._store, PagedStore) else None

    @property
    def is_idle(self) -> bool:
        """True if all requests are done."""
        return not self._waiting and not self._running

    def check(self, request: Request) -> None:
        """Check that a request can be answered; no communication.

        Raises:
            ConfigError: the prompt is empty or too long, another value is out of range, or the cache is too small for
                prompt and text.
            VocabularyError: a token is outside the vocabulary.
        """
        check_arguments(request.prompt_ids, request.max_new_tokens, request.seed, request.eos_ids, self.vocab_size)
        longest = self.model.max_sequence_length
        if len(request.prompt_ids) > longest:
            raise ConfigError(
                f"the prompt has {len(request.prompt_ids)} tokens, and the model reads {longest} at once; shorten it"
            )
        for name in ("log_probs", "prompt_log_probs"):
            count = getattr(request, name)
            if count is not None and not 0 <= count <= self.vocab_size:
                raise ConfigError(f"{name} is {count}; it must be from 0 to {self.vocab_size}, the number of ids")
        measures = (request.temperature, request.log_probs, request.prompt_log_probs) != (None, None, None)
        if measures and not request.measured_at >= LEAST_TEMPERATURE:
            rule = f"it must be at least {LEAST_TEMPERATURE}"
            raise ConfigError(f"temperature of log-probabilities is {request.measured_at}; {rule}")
        if (refusal := self._store.refusal(request.most_tokens(longest))) is not None:
            raise ConfigError(refusal)

    def add(self, requests: Sequence[Request]) -> range:
        """Add requests, also while others go on; return their numbers. Every rank calls.

        Raises:
            DesyncError: the ranks have different requests.
            ConfigError, VocabularyError: see ``check``; no request is added.
        """
        named = [
            f"{list(each.prompt_ids)} {each.max_new_tokens} {each.sampling} {each.seed} {list(each.eos_ids)} "
            f"{each.log_probs} {each.prompt_log_probs} {each.temperature}"
            for each in requests
        ]
        digest = hashlib.sha256("\n".join(named).encode()).hexdigest()
        check_same(f"{len(named)} requests, SHA-256 {digest[:12]}", "what to generate", group=self.model.tp_group)
        for request in requests:
            self.check(request)
        numbers = range(self._num_added, self._num_added + len(requests))
        self._num_added = numbers.stop
        longest = self.model.max_sequence_length
        self._waiting.extend(
            RunningSequence(number, request, longest, self._device)
            for number, request in zip(numbers, requests, strict=True)
        )
        return numbers

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[int, Generated]]:
        """Add requests; yield the index of each with its result, as soon as it is done. Every rank calls.

        Raises:
            DesyncError, ConfigError, VocabularyError: see ``add``.
            DivergenceError: logits are infinite or NaN.
        """
        first = self.add(requests).start
        try:
            while not self.is_idle:
                done: list[tuple[int, Generated]] = []
                with evaluation_mode(self.model):
                    while not done and not self.is_idle:
                        done = self.step()
                yield from ((number - first, result) for number, result in done)
        finally:
            self.clear()

    def clear(self) -> None:
        """Drop all requests that are not done."""
        for sequence in self._running:
            self._store.release_(sequence)
        self._running.clear()
        self._waiting.clear()

    def step(self) -> list[tuple[int, Generated]]:
        """Make one pass; return number and result of each request that is done. Every rank calls.

        Raises:
            DivergenceError: logits are infinite or NaN.
        """
        works = self.schedule()
        logits = self.logits(works)
        return self.accept(works, checked_choice(self.choose(works, logits)).tolist(), logits)

    def schedule(self) -> list[Work]:
        """Choose the tokens of the next pass, and make room for them in the cache."""
        works: dict[RunningSequence, Work] = {}
        for sequence in list(self._running):
            if sequence.num_cached == len(sequence.context) - 1 and self._has_room(sequence, works):
                self._read_chunk(sequence, 1, works)
        left = self._chunk_size
        for sequence in list(self._running):
            if left > 0 and sequence not in works and self._has_room(sequence, works):
                left -= self._read_chunk(sequence, left, works)
        while left > 0 and self._waiting and len(self._running) < self._max_sequences:
            sequence = self._waiting[0]
            length = sequence.most_tokens if self._reserves else len(sequence.context)
            # If there are tokens left, this pass reads all running sequences to their ends. In each layer it writes all
            # keys before it attends to any, so the pages that it fills can be shared in the same pass.
            self._store.share_(sequence)
            # With a page for each text that grows, so that they do not soon take these back.
            if not self._store.extend_(sequence, length, self._running):
                self._forget(sequence)
                break
            self._running.append(self._waiting.popleft())
            left -= self._read_chunk(sequence, left, works)
        # Single tokens first, by the number of keys, so that sequences of about one length are computed together.
        return sorted(works.values(), key=lambda work: (work.stop - work.start > 1, work.stop, work.sequence.number))

    def _read_chunk(self, sequence: RunningSequence, left: int, works: dict[RunningSequence, Work]) -> int:
        start = sequence.num_cached
        works[sequence] = Work(sequence, start, min(len(sequence.context), start + left))
        self._store.offer_(works[sequence])
        return works[sequence].stop - start

    def _forget(self, sequence: RunningSequence) -> None:
        self._store.release_(sequence)
        sequence.num_cached = 0

    def _has_room(self, sequence: RunningSequence, works: dict[RunningSequence, Work]) -> bool:
        """Make room for a sequence's tokens; take the pages of younger ones if need be, or its own."""
        if sequence not in self._running:
            return False
        while not self._store.extend_(sequence, len(sequence.context)):
            youngest = self._running.pop()
            # Sequences that took pages from it are younger, so they have given them back already.
            self._forget(youngest)
            works.pop(youngest, None)
            self._waiting.appendleft(youngest)
            if youngest is sequence:
                return False
        return True

    def logits(self, works: Sequence[Work]) -> Tensor:
        """Read tokens; return this rank's part of the logits of ``Work.rows``, ``[n, v/t]``."""
        return own_part(self.model, self._store.logits(works))

    def choose(self, works: Sequence[Work], logits: Tensor) -> Tensor:
        """Choose the next token of each sequence that has one, ``[b]`` ids in their order."""
        places: dict[Sampling, list[tuple[int, int]]] = {}
        number = last = 0
        choosing = []
        for work in works:
            last += len(work.rows)
            if work.chooses:
                places.setdefault(work.sequence.request.sampling, []).append((number, last - 1))
                choosing.append(work.sequence)
                number += 1
        chosen = torch.zeros(number, dtype=torch.int64, device=logits.device)
        options: dict[str, Any] = {"vocab_size": self.vocab_size, "group": self.model.tp_group}
        for sampling, pairs in places.items():
            own = [choosing[index] for index, _ in pairs]
            rows = [row for _, row in pairs]
            chosen[[index for index, _ in pairs]] = choose_next_token(
                logits if rows == list(range(len(logits))) else logits[rows],
                sampling,
                **options,
                generator=[each.generator for each in own],
                histories=[History(each.request.start, each.result.token_ids) for each in own],
            )
        return chosen

    def accept(
        self, works: Sequence[Work], chosen: Sequence[int], logits: Tensor | None = None
    ) -> list[tuple[int, Generated]]:
        """Add the chosen tokens to their sequences; return number and result of each request that is done."""
        left, measured, first, done = iter(chosen), list[_Measured](), 0, []
        for work in works:
            own, request = work.sequence, work.sequence.request
            for place, position in enumerate(own.unmeasured(work.start, work.stop)):
                assert request.prompt_log_probs is not None
                token = own.context[position + 1]
                measured.append(
                    _Measured(first + place, token, request, request.prompt_log_probs, own.result.prompt_log_probs)
                )
            first += len(work.rows)
            own.num_cached = work.stop
            if not work.chooses:
                if work.stop == len(own.context):
                    done.append(own)
                continue
            token = next(left)
            if request.log_probs is not None:
                measured.append(_Measured(first - 1, token, request, request.log_probs, own.result.log_probs))
            if self._ends(own, token):
                done.append(own)
        if measured:
            assert logits is not None
            self._measure(measured, logits)
        for sequence in done:
            self._running.remove(sequence)
            self._store.release_(sequence)
        return [(sequence.number, sequence.result) for sequence in done]

    def _ends(self, sequence: RunningSequence, token: int) -> bool:
        """Add a token to a sequence; return whether its text ends."""
        request, result = sequence.request, sequence.result
        result.token_ids.append(token)
        if token in request.eos_ids:
            result.reason = "end"
            return True
        if request.on_token is not None and request.on_token(token):
            result.reason = "stop"
            return True
        if len(result.token_ids) == request.max_new_tokens:
            return True
        sequence.context.append(token)
        window, rotary = self.model.max_sequence_length, self.model.rotary
        is_full = len(sequence.context) > window
        if is_full:
            sequence.context = sequence.context[-max(1, window // 2) :]
            if not self._reserves:
                self._store.release_(sequence)
        if is_full or (rotary is not None and rotary.is_outgrown_at(len(sequence.context))):
            sequence.num_cached = 0
        return False

    def _measure(self, measured: Sequence[_Measured], logits: Tensor) -> None:
        """Append log-probabilities to their lists."""
        for temperature in dict.fromkeys(each.request.measured_at for each in measured):
            own = [each for each in measured if each.request.measured_at == temperature]
            rows, count = logits[[each.row for each in own]], max(each.num_top for each in own)
            options: dict[str, Any] = {"vocab_size": self.vocab_size, "group": self.model.tp_group}
            ids = torch.tensor([[each.token] for each in own], device=logits.device)
            if count > 0:
                ids = torch.cat([ids, likeliest_ids(rows, count, **options)], dim=1)
            values = torch.stack(
                [
                    vocab_parallel_log_probs(
                        rows, column.contiguous(), temperature=temperature, validate=False, **options
                    )
                    for column in ids.unbind(1)
                ],
                dim=1,
            )
            for each, tokens, found in zip(own, ids.tolist(), values.tolist(), strict=True):
                top = tuple(zip(tokens[1 : 1 + each.num_top], found[1 : 1 + each.num_top], strict=True))
                each.result.append(LogProb(found[0], top))


class _Measured(NamedTuple):
    """A log-probability to measure: a row of logits, a token, the number of top ones, and the list for it."""

    row: int
    token: int
    request: Request
    num_top: int
    result: list[LogProb]


def generate_all(
    model: CausalModel,
    requests: Sequence[Request],
    *,
    max_sequences: int = 32,
    capacity: int | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> list[Generated]:
    """Continue prompts together; every rank of the model's tensor-parallel group calls.

    Args:
        model, max_sequences, capacity, chunk_size: see ``BatchEngine``; the cache is no larger than the requests need.
        requests: the prompts.

    Returns:
        The result of each request, in their order.

    Raises:
        ConfigError, VocabularyError, DesyncError, DivergenceError: see ``BatchEngine``.
    """
    engine = engine_for(model, requests, max_sequences=max_sequences, capacity=capacity, chunk_size=chunk_size)
    results = dict(engine.run(requests))
    return [results[index] for index in range(len(requests))]


def engine_for(
    model: CausalModel,
    requests: Sequence[Request],
    *,
    max_sequences: int = 32,
    capacity: int | None = None,
    page_size: int = PAGE_SIZE,
    chunk_size: int = CHUNK_SIZE,
) -> BatchEngine:
    """Create an engine whose cache is no larger than the requests need, if ``capacity`` is None."""
    if capacity is None and isinstance(model, GPT):
        longest = model.max_sequence_length
        lengths = sorted(each.most_tokens(longest) for each in requests)
        pages = sum(-(-max(1, length) // page_size) for length in lengths[-max_sequences:])
        capacity = min(BatchEngine._usual_capacity(model, max_sequences), max(1, pages) * page_size)
    return BatchEngine(
        model, max_sequences=max_sequences, capacity=capacity, page_size=page_size, chunk_size=chunk_size
    )
