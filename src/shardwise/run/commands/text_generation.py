"""Generate text with a trained model, or chat with it through its chat template."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from typing import Annotated, Any, Literal

from shardwise.core.communication.agreement import agree, gather_objects
from shardwise.core.errors import ConfigError, DataError
from shardwise.data import ExampleEncoder, UnusableExampleError
from shardwise.data.tokenizer import StoppableText, Tokenizer
from shardwise.models.by_plan.model import PlannedModel
from shardwise.models.generation import PrefixCache, Request, generate as generate_ids, generate_all, on_layers
from shardwise.models.generation.cache import CausalModel
from shardwise.models.gpt import GPT
from shardwise.run.commands.opened_model import (
    TO_BRING_A_TOKENIZER,
    OpenCheckpoint,
    check_fits,
    open_model,
    same_checkpoint,
)
from shardwise.run.exact.environment import use_deterministic_algorithms
from shardwise.run.exact.generation import check_exact_generation, try_generation_
from shardwise.run.processes.ranks import Ranks, open_ranks
from shardwise.storage.huggingface.generation_config import GenerationChoice, GenerationDefaults
from shardwise.training.bounds import (
    DEFAULT_PARTS,
    DEFAULT_TIMEOUT,
    DIFFERENCE,
    PARTS,
    PENALTY,
    RANKS,
    SEED,
    SHARE,
    STEPS,
    TEMPERATURE,
    TIMEOUT,
    TOP_P,
    Checked,
    checks_arguments,
)

RESET = "/reset"
"""The turn that starts a new conversation."""


@dataclass(frozen=True)
class SamplingRequest(Checked):
    """The sampling parameters given by the user; None means the default of the model's files.

    Attributes:
        max_new_tokens: maximum number of new tokens.
        temperature: divisor of the logits; below 1 favours likely tokens, 0 always takes the most likely one.
        top_k: sample from this many most likely tokens; 0 is off.
        top_p: sample from the smallest set of most likely tokens whose probabilities reach this sum; 1 is off.
        min_p, repetition_penalty, presence_penalty: see ``models.generation.Sampling``.

    Raises:
        ConfigError: a value is out of range.
    """

    max_new_tokens: Annotated[int | None, STEPS] = None
    temperature: Annotated[float | None, TEMPERATURE] = None
    top_k: Annotated[int | None, STEPS] = None
    top_p: Annotated[float | None, TOP_P] = None
    min_p: Annotated[float | None, SHARE] = None
    repetition_penalty: Annotated[float | None, PENALTY] = None
    presence_penalty: Annotated[float | None, DIFFERENCE] = None

    def choose(
        self,
        opened: OpenCheckpoint,
        tokenizer: Tokenizer,
        num_prompt_tokens: int,
        defaults: GenerationDefaults | None = None,
    ) -> GenerationChoice:
        """Resolve the sampling parameters for a prompt. Raises ConfigError: a value is out of range."""
        return (defaults or opened.generation_defaults()).choose(
            **{spec.name: getattr(self, spec.name) for spec in fields(SamplingRequest)},
            num_prompt_tokens=num_prompt_tokens,
            vocab_size=opened.description.vocab_size,
            eos_id=tokenizer.eos_id,
        )


@dataclass(frozen=True)
class OpenPrompt:
    """A text to continue."""

    opened: OpenCheckpoint
    tokenizer: Tokenizer
    prompt_ids: list[int]
    choice: GenerationChoice

    def notes(self, longest: int) -> Iterator[str]:
        """Yield warnings for the user; ``longest`` is the model's maximum sequence length."""
        yield from self.choice.notes
        ids, beginning = self.prompt_ids, list(self.tokenizer.beginning)
        if beginning and ids[len(beginning) : 2 * len(beginning)] == beginning:
            yield (
                f"the prompt begins with {self.tokenizer.decode(beginning)}, and the tokenizer adds it to every text, "
                "so the model reads it twice"
            )
        if len(ids) > longest:
            yield f"the prompt has {len(ids)} tokens, and the model reads only the last {longest}"


def open_prompt(
    checkpoint: str | PathLike[str],
    adapter: str | PathLike[str] | None,
    prompt: str,
    request: SamplingRequest,
    *,
    special_tokens: bool,
    world_size: int,
    pp: int = 1,
) -> OpenPrompt:
    """Open a causal model and encode the prompt. Raises as ``generate``."""
    opened, tokenizer = open_causal(checkpoint, adapter, world_size, pp)
    encoded = tokenizer.encode(prompt, parse_special=special_tokens)
    prompt_ids = [*tokenizer.beginning, *encoded]
    return OpenPrompt(opened, tokenizer, prompt_ids, request.choose(opened, tokenizer, len(prompt_ids)))


def open_causal(
    checkpoint: str | PathLike[str], adapter: str | PathLike[str] | None, world_size: int, pp: int = 1
) -> tuple[OpenCheckpoint, Tokenizer]:
    """Open a causal model, without its tensors, and its tokenizer. Raises as ``generate``."""
    opened = open_model(checkpoint, adapter)
    check_fits(opened.description, world_size, pp)
    if opened.config is not None and opened.description.kind != "gpt":
        kind = opened.config.architecture.model_type
        raise ConfigError(f"{opened.folder} holds a {kind} model, which adds no tokens")
    if opened.tokenizer is None:
        raise DataError(
            f"{opened.folder} was imported from a folder without a tokenizer.json that says which token ends a text; "
            f"{TO_BRING_A_TOKENIZER}, and import it again"
        )
    return opened, opened.tokenizer


@checks_arguments
def generate(
    checkpoint: str | PathLike[str],
    prompt: str = "",
    *,
    adapter: str | PathLike[str] | None = None,
    max_new_tokens: Annotated[int | None, STEPS] = None,
    temperature: Annotated[float | None, TEMPERATURE] = None,
    top_k: Annotated[int | None, STEPS] = None,
    top_p: Annotated[float | None, TOP_P] = None,
    min_p: Annotated[float | None, SHARE] = None,
    repetition_penalty: Annotated[float | None, PENALTY] = None,
    presence_penalty: Annotated[float | None, DIFFERENCE] = None,
    stop: str | Sequence[str] = (),
    special_tokens: bool = True,
    seed: Annotated[int, SEED] = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    layers: Literal["auto", "training", "inference", "fused"] = "auto",
    exact: bool = False,
    exact_parts: Annotated[int, PARTS] = DEFAULT_PARTS,
    pp: Annotated[int, RANKS] = 1,
    timeout: Annotated[float, TIMEOUT] = DEFAULT_TIMEOUT,
    on_text: Callable[[str], object] | None = None,
    on_note: Callable[[str], object] | None = None,
) -> str:
    """Generate the continuation of a text; every rank calls.

    The same seed gives the same text at every number of ranks.

    Args:
        checkpoint: folder of one checkpoint; folder of a run or an import, whose newest checkpoint is taken; Hugging
            Face folder; or folder of adapters that names its base model.
        prompt: text to continue; if empty, a new text is generated.
        adapter: folder of adapters to apply to the model.
        max_new_tokens: maximum number of new tokens. If None, this parameter and the next three take the value of the
            model's generation_config.json, or else their default, here 200.
        temperature: below 1 favours likely tokens; 0 always takes the most likely one. Default: 0.8.
        top_k: sample from this many most likely tokens; 0 is off. Default: 50.
        top_p: sample from the smallest set of most likely tokens whose probabilities reach this sum; 1 is off.
            Default: 1.
        min_p: sample from tokens whose probability is at least this share of the most likely one's. Default: 0, off.
        repetition_penalty: divisor of the positive logits of all earlier tokens, and factor of the negative ones.
            Default: 1, off.
        presence_penalty: subtracted from the logits of tokens that the new text has. Default: 0, off.
        stop: string, or several, that end the text and are no part of it.
        special_tokens: parse the names of special tokens in the prompt as special tokens.
        seed: random seed of the sampling.
        device: device of the model; "auto" takes a GPU if every rank can have one.
        layers: layers of training, layers of inference, or fused inference layers; see ``shardwise generate --help``.
        exact: compute with the bits of exact training (``shardwise train --exact``), at every number of ranks.
        exact_parts: with ``exact``, number of parts into which sums are cut; as in training.
        pp: number of pipeline stages; the ranks of each split its layers.
        timeout: maximum wait for another rank, in seconds.
        on_text: callback on the first rank; receives the prompt, then each piece of text as it is generated, and last
            the remainder with a newline, even after an error.
        on_note: callback on the first rank; receives each line for the user before the text.

    Returns:
        The text added to the prompt, on every rank.

    Raises:
        ConfigError: an argument is out of range, the model cannot be split over this many ranks, or it is not causal.
        CheckpointError: the checkpoint is missing or damaged.
        DataError: the tokenizer is missing or damaged.
    """
    request = SamplingRequest(max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty)
    with open_ranks(device, timeout=timeout) as ranks, same_checkpoint(checkpoint, ranks) as checkpoint:
        show, note = ranks.on_first(on_text), ranks.on_first(on_note)
        task = agree(
            lambda: open_prompt(
                checkpoint, adapter, prompt, request, special_tokens=special_tokens, world_size=ranks.world_size, pp=pp
            ),
            group=ranks.control,
        )
        model, kind = load_to_generate(task.opened, ranks, layers, exact_parts if exact else None, pp)
        for line in (*task.notes(model.max_sequence_length), f"layers: {kind}"):
            note(line)
        show(prompt)
        choice = task.choice
        eos_ids = choice.eos_ids
        options: dict[str, Any] = {"seed": seed, "eos_ids": eos_ids, "show": show, "stops": checked_stops(stop)}
        return write(ranks, model, task.tokenizer, task.prompt_ids, choice, **options)[1]


def load_to_generate(
    opened: OpenCheckpoint,
    ranks: Ranks,
    layers: Literal["auto", "training", "inference", "fused"],
    exact_parts: int | None = None,
    pp: int = 1,
) -> tuple[CausalModel, str]:
    """Load a model, exact if ``exact_parts`` is given, and return it and its kind of layers; every rank calls.

    Raises:
        ConfigError: the model does not support the layers, or has no exact form on so many ranks or on this device.
    """
    if exact_parts is None:
        model = opened.load_model(ranks, pp=pp)
    else:
        description, dtype = opened.description, opened.dtype
        sizes = ranks.world_size // pp, pp
        agree(lambda: check_exact_generation(description, dtype, exact_parts, *sizes), group=ranks.control)
        use_deterministic_algorithms(ranks.device)
        model = opened.load_model(ranks, exact_parts=exact_parts, pp=pp)
        assert isinstance(model, GPT)
        try_generation_(model, ranks)
    assert isinstance(model, CausalModel)
    if isinstance(model, PlannedModel):
        model.check_cache()
    return on_layers(model, layers)


def checked_stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Return the stop strings; raise ConfigError if one is empty or no string."""
    if not isinstance(stop, str | list | tuple):
        raise ConfigError(f"stop is {stop!r}; it must be a string or a list of strings")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for each in stops:
        if not isinstance(each, str) or not each:
            raise ConfigError(f"stop is {each!r}; a string that ends a text has at least one character")
    return stops


def write(
    ranks: Ranks,
    model: CausalModel,
    tokenizer: Tokenizer,
    prompt_ids: list[int],
    choice: GenerationChoice,
    *,
    seed: int,
    eos_ids: tuple[int, ...],
    show: Callable[[str], object],
    prefix: PrefixCache | None = None,
    stops: Sequence[str] = (),
) -> tuple[list[int], str]:
    """Generate text and write each piece as soon as it is final, then a newline; every rank calls."""
    text = StoppableText(tokenizer, prompt_ids, stops)

    def add(token: int) -> bool:
        show(text.push(token))
        return text.is_stopped

    try:
        # No time limit: the first rank may wait for a paused terminal, and the other ranks wait with it.
        with ranks.phase("generating"):
            if isinstance(model, GPT) and model.groups.num_stages > 1:
                window, most = model.max_sequence_length, choice.max_new_tokens
                earlier, context = prompt_ids[:-window], prompt_ids[-window:]
                request = Request(context, most, choice.sampling, seed, eos_ids, on_token=add, earlier_ids=earlier)
                new_ids = generate_all(model, [request])[0].text_ids
            else:
                new_ids = generate_ids(
                    model,
                    prompt_ids,
                    max_new_tokens=choice.max_new_tokens,
                    sampling=choice.sampling,
                    seed=seed,
                    eos_id=eos_ids,
                    on_token=add,
                    prefix=prefix,
                )
    finally:
        # Also after Ctrl-C, so that the shell's prompt starts on a new line.
        show(text.finish() + "\n")
    return new_ids, text.text


@dataclass(frozen=True)
class OpenChat:
    """A model to chat with."""

    opened: OpenCheckpoint
    encoder: ExampleEncoder
    turn_ends: tuple[int, ...]
    request: SamplingRequest


def open_chat(
    checkpoint: str | PathLike[str],
    adapter: str | PathLike[str] | None,
    request: SamplingRequest,
    world_size: int,
    pp: int = 1,
) -> OpenChat:
    """Open a model, its tokenizer and its chat template. Raises as ``chat``."""
    opened, tokenizer = open_causal(checkpoint, adapter, world_size, pp)
    template = opened.chat_template()
    if template is None:
        raise DataError(
            f"{opened.folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
            "put the model's there, or continue a text with shardwise generate"
        )
    encoder = ExampleEncoder(tokenizer, template)
    request.choose(opened, tokenizer, 0)
    return OpenChat(opened, encoder, encoder.turn_end_ids(), request)


@checks_arguments
def chat(
    checkpoint: str | PathLike[str],
    turns: Iterable[str],
    *,
    system: str = "",
    adapter: str | PathLike[str] | None = None,
    max_new_tokens: Annotated[int | None, STEPS] = None,
    temperature: Annotated[float | None, TEMPERATURE] = None,
    top_k: Annotated[int | None, STEPS] = None,
    top_p: Annotated[float | None, TOP_P] = None,
    min_p: Annotated[float | None, SHARE] = None,
    repetition_penalty: Annotated[float | None, PENALTY] = None,
    presence_penalty: Annotated[float | None, DIFFERENCE] = None,
    seed: Annotated[int, SEED] = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    layers: Literal["auto", "training", "inference", "fused"] = "auto",
    pp: Annotated[int, RANKS] = 1,
    timeout: Annotated[float, TIMEOUT] = DEFAULT_TIMEOUT,
    on_text: Callable[[str], object] | None = None,
    on_note: Callable[[str], object] | None = None,
) -> list[dict[str, Any]]:
    """Chat with a model: answer each turn in the context of all previous turns. Every rank calls.

    Args:
        checkpoint: see ``generate``; the model must have a chat template.
        turns: the user's messages; "/reset" starts a new conversation, and empty messages are skipped. Only the first
            rank's turns are read, each after the previous one was answered.
        system: system prompt.
        adapter: see ``generate``, also for the parameters below.
        on_text: callback on the first rank; receives each piece of an answer, and a newline after each answer.
        on_note: callback on the first rank; receives each line for the user, once.

    Returns:
        The messages of the last conversation, on every rank: ``{"role": ..., "content": ...}``.

    Raises:
        ConfigError: see ``generate``.
        CheckpointError: see ``generate``.
        DataError: see ``generate``; also if the model has no chat template, or the template refuses every turn.
    """
    request = SamplingRequest(max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty)
    with open_ranks(device, timeout=timeout) as ranks, same_checkpoint(checkpoint, ranks) as checkpoint:
        show, note = ranks.on_first(on_text), ranks.on_first(on_note)
        task = agree(lambda: open_chat(checkpoint, adapter, request, ranks.world_size, pp), group=ranks.control)
        model, kind = load_to_generate(task.opened, ranks, layers, pp=pp)
        note(f"layers: {kind}")
        notes, num_answers, prefix, left = set[str](), 0, PrefixCache(model), iter(turns)
        was_refused = False
        beginning = [{"role": "system", "content": system}] if system else []
        messages: list[dict[str, Any]] = beginning

        def note_once(line: str) -> None:
            if line not in notes:
                note(line)
            notes.add(line)

        while (said := _next_turn(ranks, left)) is not None:
            if said == RESET:
                messages = beginning
            elif said:
                asked = [*messages, {"role": "user", "content": said}]
                # Each turn has another seed, so that a repeated question may get another answer.
                answer = _answer(ranks, model, task, asked, prefix, (seed + num_answers) % 2**63, show, note_once)
                if answer is not None:
                    messages, num_answers = [*asked, {"role": "assistant", "content": answer}], num_answers + 1
                else:
                    was_refused = True
        if was_refused and not num_answers:
            raise DataError("no turn was answered, because the chat template refuses each of them; see above why")
        return messages


def _answer(
    ranks: Ranks,
    model: CausalModel,
    task: OpenChat,
    messages: list[dict[str, Any]],
    prefix: PrefixCache,
    seed: int,
    show: Callable[[str], object],
    note: Callable[[str], object],
) -> str | None:
    """Answer the last message; None if the template rejects the messages. Every rank calls."""
    tokenizer, window = task.encoder.tokenizer, model.max_sequence_length
    try:
        prompt_ids = agree(lambda: task.encoder.prompt_ids(tuple(messages)), group=ranks.control)
    except UnusableExampleError as error:
        note(str(error))
        return None
    choice = agree(lambda: task.request.choose(task.opened, tokenizer, len(prompt_ids)), group=ranks.control)
    for line in choice.notes:
        note(line)
    if len(prompt_ids) > window:
        note(
            f"the conversation has more than {window} tokens, and the model reads only the last ones; {RESET} begins a "
            "new one"
        )
    eos_ids = tuple(dict.fromkeys((*choice.eos_ids, *task.turn_ends)))
    # The prompt of a turn starts with the previous turns, whose keys and values are in the cache.
    new_ids, _ = write(
        ranks, model, tokenizer, prompt_ids, choice, seed=seed, eos_ids=eos_ids, show=show, prefix=prefix
    )
    return tokenizer.decode(new_ids)


def _next_turn(ranks: Ranks, left: Iterator[str]) -> str | None:
    """Return the first rank's next turn on every rank; None at the end."""
    with ranks.phase("waiting for what the user says"):
        turn = agree(lambda: next(left, None) if ranks.is_first else None, group=ranks.control)
        said: str | None = gather_objects(turn, "what the user says", group=ranks.control)[0]
    return said
