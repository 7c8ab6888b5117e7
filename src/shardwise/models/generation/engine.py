"""Generation for many prompts: sequences join and leave while others go on.

A pass has the next tokens of several sequences in one row: one token of each text that grows, and chunks of prompts
that are read. All ranks make the same passes, since they choose the same tokens.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.models.by_plan.model import PlannedModel
from shardwise.models.generation.cache import CausalModel, kind_of_cache, layer_sizes
from shardwise.models.generation.generation import check_arguments, evaluation_mode, own_part
from shardwise.models.generation.paged_cache import PagedCache
from shardwise.models.generation.requests import LEAST_TEMPERATURE, Generated, LogProb, Request
from shardwise.models.generation.sampling import (
    Sampling,
    checked_choice,
    choose_next_token,
    likeliest_ids,
)
from shardwise.models.generation.sequences import PagedStore, PlannedStore, RunningSequence, SequenceStore, Work
from shardwise.models.generation.stages import Answer, Stages
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

    Every rank of the model's tensor- and pipeline-parallel groups makes the same calls. The model must be in evaluation
    mode, without gradient, in ``step``; ``run`` sees to it. Its weights may change between two runs.

    Pipeline stages read different passes at the same time, each of about an equal share of the sequences.

    A prompt is read in chunks, between which the texts of others grow. If the cache is full, requests wait, in their
    order. If it is full because texts grow, the youngest one gives its pages back and is read again later. Sequences
    that begin with the same tokens share the full pages of these while one of them runs, and only the first reads them.
    A model by a plan (``PlannedModel``) has caches of transformers; it reads one prompt after the other, whole, and the
    next tokens of all texts together if all of its layers are attention.

    Args:
        model: the model, or this rank's pipeline stage of it.
        max_sequences: maximum number of sequences at once.
        capacity: number of tokens whose keys and values fit into the cache, rounded up to pages. If None,
            ``max_sequences`` of the longest sequences, or as many tokens as fit into 1 GiB if that is less, but at
            least one longest sequence.
        page_size: tokens of a page.
        chunk_size: number of prompt tokens of a pass.

    Raises:
        ConfigError: a number is under 1; or the model is not the stage of its place in its pipeline-parallel group, or
            has several chunks of layers.
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
        self._stages = Stages(model)
        assert model.vocab_size is not None
        self.vocab_size, self.model, self.page_size = model.vocab_size, model, page_size
        sizes = {"max_sequences": max_sequences, "page_size": page_size, "chunk_size": chunk_size}
        for name, size in (sizes if capacity is None else sizes | {"capacity": capacity}).items():
            if size < 1:
                raise ConfigError(f"{name} of a BatchEngine is {size}; it must be at least 1")
        self._device = next(model.parameters()).device
        self._store: SequenceStore
        if isinstance(model, PlannedModel):
            self._store = store = PlannedStore(model)
            self._max_sequences = max_sequences if store.may_join else 1
            self._chunk_size = self._max_sequences * model.max_sequence_length
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
        # The same on all stages.
        per_token = max(
            sum(groups * (key + value) for groups, key, value in layer_sizes(model, rank, *stage).values()) * itemsize
            for rank in range(model.tp_group.size())
            for stage in model.config.stage_layers()
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
        measures = (request.log_probs, request.prompt_log_probs) != (None, None)
        if measures and not request.measured_at >= LEAST_TEMPERATURE:
            rule = f"it must be at least {LEAST_TEMPERATURE}"
            raise ConfigError(f"temperature of log-probabilities is {request.measured_at}; {rule}")
        self._check_exact(request)
        if (refusal := self._store.refusal(request.most_tokens(longest))) is not None:
            raise ConfigError(refusal)

    def _check_exact(self, request: Request) -> None:
        scaling = self.model.rope_scaling if isinstance(self.model, GPT) else None
        if scaling is None or self.model.config.exact_parts is None:
            return
        # A training forward reads all tokens of the whole text but the last.
        longer = max(len(request.start), len(request.start) + request.max_new_tokens - 1)
        shorter = len(request.start) - (request.max_new_tokens == 0)
        if scaling.changes_between(shorter, longer):
            raise ConfigError(
                "exact: the rotary frequencies change with the length of a text over "
                f"{scaling.original_max_position_embeddings} tokens, and this one has {shorter} when the first token "
                f"is measured and up to {longer} in a training forward of all of it; lower max_new_tokens, or do not "
                "generate exactly"
            )

    def add(self, requests: Sequence[Request]) -> range:
        """Add requests, also while others go on; return their numbers. Every rank calls.

        Raises:
            DesyncError: the ranks have different requests.
            ConfigError, VocabularyError: see ``check``; no request is added.
        """
        named = [
            f"{list(each.prompt_ids)} {each.max_new_tokens} {each.sampling} {each.seed} {list(each.eos_ids)} "
            f"{each.log_probs} {each.prompt_log_probs} {each.temperature} {list(each.earlier_ids)}"
            for each in requests
        ]
        digest = hashlib.sha256("\n".join(named).encode()).hexdigest()
        asked = f"{len(named)} requests, SHA-256 {digest[:12]}"
        self._stages.check_same(asked, "what to generate")
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
        self._stages.clear()

    def step(self) -> list[tuple[int, Generated]]:
        """Begin a pass, and end one; return number and result of each request that is done. Every rank calls.

        Raises:
            DivergenceError: logits are infinite or NaN.
        """
        stages = self._stages
        works, arrived = stages.begin(self.schedule())
        output = self._store.read(works, arrived) if works else None
        answer = None
        if output is not None and stages.is_last:
            answer, output = self.answer(works, own_part(self.model, output)), None
        ended = stages.oldest()
        return self.accept(ended, stages.exchange(output, answer, _sizes(ended)))

    def schedule(self) -> list[Work]:
        """Choose the tokens of the next pass, and make room for them in the cache.

        ``num_cached`` counts them already: a later pass finds them cached, as each stage reads passes in their order.
        """
        works: dict[RunningSequence, Work] = {}
        # The other stages read the other sequences meanwhile.
        most = -(-min(self._max_sequences, len(self._running) + len(self._waiting)) // self._stages.number)
        for sequence in list(self._running):
            is_next = sequence.num_cached == len(sequence.context) - 1 and len(works) < most
            if is_next and self._has_room(sequence, works):
                self._read_chunk(sequence, 1, works)
        left = self._chunk_size
        for sequence in list(self._running):
            is_read = sequence.num_cached == len(sequence.context)
            if left > 0 and len(works) < most and not is_read and self._has_room(sequence, works):
                left -= self._read_chunk(sequence, left, works)
        while left > 0 and len(works) < most and self._waiting and len(self._running) < self._max_sequences:
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
        sequence.num_cached = works[sequence].stop
        return sequence.num_cached - start

    def _forget(self, sequence: RunningSequence) -> None:
        self._store.release_(sequence)
        sequence.num_cached = 0

    def _has_room(self, sequence: RunningSequence, works: dict[RunningSequence, Work]) -> bool:
        """Make room for a sequence's tokens; take the pages of younger ones if need be, or its own."""
        if sequence not in self._running:
            return False
        while not self._store.extend_(sequence, len(sequence.context)):
            if self._stages.are_busy:
                # Wait until each sequence has the tokens that were chosen for it.
                return False
            youngest = self._running.pop()
            # Sequences that took pages from it are younger, so they have given them back already.
            self._forget(youngest)
            works.pop(youngest, None)
            self._waiting.appendleft(youngest)
            if youngest is sequence:
                return False
        return True

    def answer(self, works: Sequence[Work], logits: Tensor) -> Answer:
        """Choose the next token of each sequence that has one, and measure tokens.

        Args:
            works: what the model has read.
            logits: ``[n, v/t]``, this rank's part of the logits of ``Work.rows``.
        """
        chosen = self._choose(works, logits)
        ids, values = [chosen], [logits.new_empty(0, dtype=torch.promote_types(logits.dtype, torch.float32))]
        for temperature, measured in _measured(works).items():
            tokens, found = self._measure(measured, temperature, chosen, logits)
            ids.append(tokens.flatten())
            values.append(found.flatten())
        return Answer(torch.cat(ids), torch.cat(values))

    def _choose(self, works: Sequence[Work], logits: Tensor) -> Tensor:
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
        for sampling, pairs in places.items():
            own = [choosing[index] for index, _ in pairs]
            rows = [row for _, row in pairs]
            chosen[[index for index, _ in pairs]] = choose_next_token(
                logits if rows == list(range(len(logits))) else logits[rows],
                sampling,
                **self._of_vocabulary,
                generator=[each.generator for each in own],
                histories=[each.history for each in own],
            )
        return chosen

    def _measure(
        self, measured: Sequence[_Measured], temperature: float, chosen: Tensor, logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return tokens and log-probabilities, ``[n, 1 + top]``: of each token to measure, then of the likeliest."""
        device, count = logits.device, _most_top(measured)
        places = [place for place, each in enumerate(measured) if each.choice is not None]
        choices = [each.choice for each in measured if each.choice is not None]
        first = torch.tensor([each.token for each in measured], device=device)
        # -1 if logits are not finite, which is an error when the tokens are accepted.
        first[places] = chosen[choices].clamp(min=0)
        rows, ids = logits[[each.row for each in measured]], first.unsqueeze(1)
        if count > 0:
            ids = torch.cat([ids, likeliest_ids(rows, count, **self._of_vocabulary)], dim=1)
        options: dict[str, Any] = {"temperature": temperature, "validate": False, **self._of_vocabulary}
        values = [vocab_parallel_log_probs(rows, column.contiguous(), **options) for column in ids.unbind(1)]
        return ids, torch.stack(values, dim=1)

    @property
    def _of_vocabulary(self) -> dict[str, Any]:
        return {"vocab_size": self.vocab_size, "group": self.model.tp_group}

    def accept(self, works: Sequence[Work], answer: Answer) -> list[tuple[int, Generated]]:
        """Add the chosen tokens to their sequences; return number and result of each request that is done.

        Raises:
            DivergenceError: logits are infinite or NaN.
        """
        num_chosen = sum(work.chooses for work in works)
        left, done = iter(checked_choice(answer.ids[:num_chosen]).tolist()), []
        measured_ids = checked_choice(answer.ids[num_chosen:].masked_fill(answer.values.isnan(), -1))
        ids, values, start = measured_ids.tolist(), answer.values.tolist(), 0
        for measured in _measured(works).values():
            width = 1 + _most_top(measured)
            for each in measured:
                tokens, found = (several[start : start + 1 + each.num_top] for several in (ids, values))
                each.result.append(LogProb(found[0], tuple(zip(tokens[1:], found[1:], strict=True))))
                start += width
        for work in works:
            own = work.sequence
            if self._ends(own, next(left)) if work.chooses else work.stop == len(own.context):
                done.append(own)
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


class _Measured(NamedTuple):
    """A log-probability to measure.

    Attributes:
        row: row of the logits.
        token: the token; 0 if it is one that is chosen now.
        choice: its place among those that are chosen now, or None.
        num_top: number of most likely tokens next to it.
        result: the list for it.
    """

    row: int
    token: int
    choice: int | None
    num_top: int
    result: list[LogProb]


def _measured(works: Sequence[Work]) -> dict[float, list[_Measured]]:
    """Return what is measured in a pass, by temperature; the same before the pass as when it is accepted."""
    found: dict[float, list[_Measured]] = {}
    first = num_chosen = 0
    for work in works:
        own, request = work.sequence, work.sequence.request
        for place, position in enumerate(own.unmeasured(work.start, work.stop)):
            token, top = own.context[position + 1], request.prompt_log_probs or 0
            each = _Measured(first + place, token, None, top, own.result.prompt_log_probs)
            found.setdefault(request.measured_at, []).append(each)
        first += len(work.rows)
        if work.chooses:
            if request.log_probs is not None:
                each = _Measured(first - 1, 0, num_chosen, request.log_probs, own.result.log_probs)
                found.setdefault(request.measured_at, []).append(each)
            num_chosen += 1
    return found


def _most_top(measured: Sequence[_Measured]) -> int:
    return max(each.num_top for each in measured)


def _sizes(works: Sequence[Work]) -> tuple[int, int]:
    """Return the numbers of ids and values of the answer to a pass."""
    number = sum(len(each) * (1 + _most_top(each)) for each in _measured(works).values())
    return number + sum(work.chooses for work in works), number


def generate_all(
    model: CausalModel,
    requests: Sequence[Request],
    *,
    max_sequences: int = 32,
    capacity: int | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> list[Generated]:
    """Continue prompts together; every rank of the model calls.

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
