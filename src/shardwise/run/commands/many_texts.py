"""Continue or measure many texts with a trained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from os import PathLike
from typing import Annotated, Any, Literal, NamedTuple

from shardwise.core.communication.agreement import agree
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.data import ExampleEncoder
from shardwise.data.tokenizer import StoppableText
from shardwise.models.generation import Generated, LogProb, Request
from shardwise.models.generation.cache import CausalModel
from shardwise.models.generation.engine import engine_for
from shardwise.models.generation.requests import LEAST_TEMPERATURE
from shardwise.run.commands.given_texts import Prompt, Texts, at_place, read_on_first, text_to_measure
from shardwise.run.commands.opened_model import OpenCheckpoint, same_checkpoint
from shardwise.run.commands.text_generation import SamplingRequest, checked_stops, load_to_generate, open_causal
from shardwise.run.processes.ranks import Ranks, open_ranks
from shardwise.training.bounds import (
    BATCH,
    DEFAULT_PARTS,
    DEFAULT_SEQUENCES,
    DEFAULT_TIMEOUT,
    DIFFERENCE,
    PARTS,
    PENALTY,
    RANKS,
    SEED,
    SEQUENCE,
    SHARE,
    STEPS,
    TEMPERATURE,
    TIMEOUT,
    TOP_LOG_PROBS,
    TOP_P,
    Range,
    checks_arguments,
)

_OVER_ZERO = Range(LEAST_TEMPERATURE, 1e6)


@dataclass(frozen=True)
class Sample:
    """A text that continues a prompt, or why there is none.

    Attributes:
        prompt: number of the prompt, from 0; of those of a file, without blank lines.
        sample: number of the text among those of its prompt, from 0.
        text: the text, without the prompt, and without a stop string or what follows it.
        tokens: the tokens that were chosen, with the one that ended the text.
        reason: why it ended: ``"end"`` by an end token, ``"stop"`` by a stop string, ``"length"``, or ``"error"``.
        error: why there is no text, or None.
        prompt_text, prompt_tokens: the prompt, with the tokens that the tokenizer puts before each text; of an empty
            prompt the end token from which the model starts.
        temperature: that of the log-probabilities.
        log_probs, prompt_log_probs: for each of ``tokens``, and of ``prompt_tokens`` but the first; empty if not asked
            for.
    """

    prompt: int
    sample: int = 0
    text: str = ""
    tokens: tuple[int, ...] = ()
    reason: str = "error"
    error: str | None = None
    prompt_text: str = ""
    prompt_tokens: tuple[int, ...] = ()
    temperature: float = 1.0
    log_probs: tuple[LogProb, ...] = ()
    prompt_log_probs: tuple[LogProb, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``shardwise generate --json`` prints."""
        if self.error is not None:
            return {"prompt": self.prompt, "error": self.error}
        values: dict[str, Any] = {"prompt": self.prompt, "sample": self.sample, "text": self.text}
        values |= {"reason": self.reason, "tokens": self.tokens, "prompt_tokens": self.prompt_tokens}
        if self.log_probs or self.prompt_log_probs:
            values["temperature"] = self.temperature
        return values | _as_json("", self.log_probs) | _as_json("prompt_", self.prompt_log_probs)


@dataclass(frozen=True)
class Score:
    """The log-probabilities of a text, or why there are none.

    Attributes:
        number: number of the text, from 0.
        tokens: tokens of the text, or of the completion after a prompt.
        log_probs: for each of ``tokens``; None for a first token that no other precedes.
        sum: sum of the log-probabilities.
        temperature: their temperature.
        error: why there are none, or None.
    """

    number: int
    tokens: tuple[int, ...] = ()
    log_probs: tuple[LogProb | None, ...] = ()
    sum: float = 0.0
    temperature: float = 1.0
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``shardwise score`` prints."""
        if self.error is not None:
            return {"number": self.number, "error": self.error}
        values: dict[str, Any] = {"number": self.number, "sum": self.sum, "temperature": self.temperature}
        return values | {"tokens": self.tokens} | _as_json("", self.log_probs)


def _as_json(prefix: str, values: Sequence[LogProb | None]) -> dict[str, Any]:
    if not values:
        return {}
    found: dict[str, Any] = {f"{prefix}log_probs": [None if each is None else each.value for each in values]}
    if any(each is not None and each.top for each in values):
        found[f"{prefix}top_log_probs"] = [None if each is None else each.top for each in values]
    return found


@checks_arguments
def generate_many(
    checkpoint: str | PathLike[str],
    prompts: Texts,
    *,
    n: Annotated[int, BATCH] = 1,
    adapter: str | PathLike[str] | None = None,
    max_new_tokens: Annotated[int | None, STEPS] = None,
    temperature: Annotated[float | None, TEMPERATURE] = None,
    top_k: Annotated[int | None, STEPS] = None,
    top_p: Annotated[float | None, TOP_P] = None,
    min_p: Annotated[float | None, SHARE] = None,
    repetition_penalty: Annotated[float | None, PENALTY] = None,
    presence_penalty: Annotated[float | None, DIFFERENCE] = None,
    stop: str | Sequence[str] = (),
    log_probs: Annotated[int | None, TOP_LOG_PROBS] = None,
    prompt_log_probs: Annotated[int | None, TOP_LOG_PROBS] = None,
    batch_size: Annotated[int, BATCH] = DEFAULT_SEQUENCES,
    cache_tokens: Annotated[int | None, SEQUENCE] = None,
    special_tokens: bool = True,
    seed: Annotated[int, SEED] = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    layers: Literal["auto", "training", "inference", "fused"] = "auto",
    exact: bool = False,
    exact_parts: Annotated[int, PARTS] = DEFAULT_PARTS,
    pp: Annotated[int, RANKS] = 1,
    timeout: Annotated[float, TIMEOUT] = DEFAULT_TIMEOUT,
    on_sample: Callable[[Sample], object] | None = None,
    on_note: Callable[[str], object] | None = None,
) -> list[Sample]:
    """Generate continuations of many prompts together; every rank calls.

    Each prompt gets the text that it would get alone, up to rounding. What is wrong with a prompt is the ``error`` of
    its sample, and the others are answered.

    Args:
        checkpoint: see ``generate``, also for the arguments that are not described here.
        prompts: the prompts. A record has ``prompt``, a string; ``messages``, a chat as in ``finetune``, which the
            chat template turns into a prompt; or ``tokens``, a list of ids. It may have ``seed``, ``stop`` and the
            arguments from ``max_new_tokens`` to ``presence_penalty``, for this prompt. With a file or standard input
            the first rank reads.
        n: number of texts for each prompt; the seed of a text is that of its prompt plus its number.
        log_probs: number of most likely tokens whose log-probabilities are given next to those of the chosen tokens;
            None for none. They are those of the distribution at ``temperature``, 1 if None or 0, before top-k, top-p,
            min-p and penalties.
        prompt_log_probs: the same for the tokens of the prompts.
        batch_size: maximum number of texts at once.
        cache_tokens: number of tokens that the cache holds, of all texts together; if None, as many as ``batch_size``
            texts need, or 1 GiB.
        on_sample: callback on the first rank; receives each sample as soon as it is done.
        on_note: callback on the first rank; receives each line for the user.

    Returns:
        All samples, by prompt and number, on every rank.

    Raises:
        ConfigError, CheckpointError: see ``generate``.
        DataError: see ``generate``; or the prompts cannot be read.
    """
    given = SamplingRequest(max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty)
    stops = checked_stops(stop)
    with open_ranks(device, timeout=timeout) as ranks, same_checkpoint(checkpoint, ranks) as checkpoint:
        opened, tokenizer = agree(lambda: open_causal(checkpoint, adapter, ranks.world_size, pp), group=ranks.control)
        defaults = opened.generation_defaults()
        found: list[Sample] = []

        def done(sample: Sample) -> None:
            found.append(sample)
            ranks.on_first(on_sample)(sample)

        asked: list[_Asked] = []
        notes: dict[str, None] = {}

        @cache
        def chats() -> tuple[ExampleEncoder, tuple[int, ...]]:
            encoder = ExampleEncoder(tokenizer, opened.chat_template(), parse_special=special_tokens)
            return encoder, encoder.turn_end_ids()

        for number, (where, value) in enumerate(read_on_first(ranks, prompts)):
            try:
                prompt = Prompt.of(where, value, given, stops, seed, tokenizer, chats, parse_special=special_tokens)
                choice = prompt.request.choose(opened, tokenizer, len(prompt.ids), defaults)
                if prompt.seed + n - 1 > SEED.high:
                    raise ConfigError(f"seed is {prompt.seed}, and {n} texts have it and those after it; lower it")
            except ShardwiseError as error:
                done(Sample(number, error=at_place(where, error)))
                continue
            notes |= dict.fromkeys(choice.notes)
            for index in range(n):
                text = StoppableText(tokenizer, prompt.ids, prompt.stops)
                request = Request(
                    prompt.ids,
                    choice.max_new_tokens,
                    choice.sampling,
                    prompt.seed + index,
                    tuple(dict.fromkeys((*choice.eos_ids, *prompt.turn_ends))),
                    log_probs,
                    prompt_log_probs,
                    prompt.request.temperature or 1.0,
                    _stopping(text),
                )
                asked.append(_Asked(request, text, prompt.text, number, index, where))
        model = _load(opened, ranks, layers, exact_parts if exact else None, pp, notes, on_note)

        def finish(index: int, result: Generated) -> None:
            own = asked[index]
            own.text.finish()
            done(
                Sample(
                    own.prompt,
                    own.sample,
                    own.text.text,
                    tuple(result.token_ids),
                    # The last characters of a text may complete a stop string when it ends otherwise.
                    "stop" if own.text.is_stopped else result.reason,
                    None,
                    own.prompt_text,
                    tuple(own.request.start),
                    own.request.measured_at,
                    tuple(result.log_probs),
                    tuple(result.prompt_log_probs),
                )
            )

        def refuse(index: int, error: ShardwiseError) -> None:
            own = asked[index]
            if own.sample == 0:
                done(Sample(own.prompt, error=at_place(own.where, error)))

        with ranks.phase("generating"):
            _answer(model, [each.request for each in asked], batch_size, cache_tokens, finish, refuse)
        return sorted(found, key=lambda sample: (sample.prompt, sample.sample))


@checks_arguments
def score(
    checkpoint: str | PathLike[str],
    texts: Texts,
    *,
    adapter: str | PathLike[str] | None = None,
    temperature: Annotated[float, _OVER_ZERO] = 1.0,
    top_log_probs: Annotated[int, TOP_LOG_PROBS] = 0,
    batch_size: Annotated[int, BATCH] = DEFAULT_SEQUENCES,
    cache_tokens: Annotated[int | None, SEQUENCE] = None,
    special_tokens: bool = True,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    layers: Literal["auto", "training", "inference", "fused"] = "auto",
    exact: bool = False,
    exact_parts: Annotated[int, PARTS] = DEFAULT_PARTS,
    pp: Annotated[int, RANKS] = 1,
    timeout: Annotated[float, TIMEOUT] = DEFAULT_TIMEOUT,
    on_score: Callable[[Score], object] | None = None,
    on_note: Callable[[str], object] | None = None,
) -> list[Score]:
    """Measure the log-probabilities of texts; every rank calls.

    Args:
        checkpoint: see ``generate``, also for the arguments that are not described here.
        texts: the texts. A record has ``text``, a string; or ``prompt`` and ``completion``, strings, to measure the
            second; or ``tokens``, a list of ids, and perhaps ``prompt_tokens`` before them, as ``generate --json``
            prints them. Other keys are not read.
        temperature: divisor of the logits.
        top_log_probs: number of most likely tokens whose log-probabilities are given next to each token's.
        batch_size, cache_tokens: see ``generate_many``.
        on_score: callback on the first rank; receives each score as soon as it is known.

    Returns:
        The scores of all texts, in their order, on every rank.

    Raises:
        ConfigError, CheckpointError: see ``generate``.
        DataError: see ``generate``; or the texts cannot be read.
    """
    with open_ranks(device, timeout=timeout) as ranks, same_checkpoint(checkpoint, ranks) as checkpoint:
        opened, tokenizer = agree(lambda: open_causal(checkpoint, adapter, ranks.world_size, pp), group=ranks.control)
        found: list[Score] = []

        def done(measured: Score) -> None:
            found.append(measured)
            ranks.on_first(on_score)(measured)

        requests: list[tuple[Request, int, int, str]] = []
        for number, (where, value) in enumerate(read_on_first(ranks, texts)):
            try:
                ids, first = text_to_measure(where, value, tokenizer, parse_special=special_tokens)
            except ShardwiseError as error:
                done(Score(number, error=at_place(where, error)))
                continue
            request = Request(ids, 0, prompt_log_probs=top_log_probs, temperature=temperature)
            requests.append((request, first, number, where))
        model = _load(opened, ranks, layers, exact_parts if exact else None, pp, {}, on_note)

        def finish(index: int, result: Generated) -> None:
            request, first, number, _ = requests[index]
            values: list[LogProb | None] = [None, *result.prompt_log_probs]
            total = sum((each.value for each in values[first:] if each is not None), 0.0)
            done(Score(number, tuple(request.prompt_ids[first:]), tuple(values[first:]), total, temperature))

        def refuse(index: int, error: ShardwiseError) -> None:
            _, _, number, where = requests[index]
            done(Score(number, error=at_place(where, error)))

        with ranks.phase("measuring"):
            _answer(model, [each[0] for each in requests], batch_size, cache_tokens, finish, refuse)
        return sorted(found, key=lambda measured: measured.number)


class _Asked(NamedTuple):
    """A text to generate: its request, the text so far, its prompt, both numbers, and the place of the prompt."""

    request: Request
    text: StoppableText
    prompt_text: str
    prompt: int
    sample: int
    where: str


def _load(
    opened: OpenCheckpoint,
    ranks: Ranks,
    layers: Literal["auto", "training", "inference", "fused"],
    exact_parts: int | None,
    pp: int,
    notes: Mapping[str, None],
    on_note: Callable[[str], object] | None,
) -> CausalModel:
    model, kind = load_to_generate(opened, ranks, layers, exact_parts, pp)
    for line in (*notes, f"layers: {kind}"):
        ranks.on_first(on_note)(line)
    return model


def _stopping(text: StoppableText) -> Callable[[int], bool]:
    def push(token: int) -> bool:
        text.push(token)
        return text.is_stopped

    return push


def _answer(
    model: CausalModel,
    requests: Sequence[Request],
    batch_size: int,
    cache_tokens: int | None,
    finish: Callable[[int, Generated], None],
    refuse: Callable[[int, ShardwiseError], None],
) -> None:
    """Answer requests together, and pass each result or refusal on with the index of its request."""
    engine = engine_for(model, requests, max_sequences=batch_size, capacity=cache_tokens)
    valid = []
    for index, request in enumerate(requests):
        try:
            engine.check(request)
            valid.append(index)
        except ShardwiseError as error:
            refuse(index, error)
    for place, result in engine.run([requests[index] for index in valid]):
        finish(valid[place], result)
