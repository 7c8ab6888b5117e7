"""Continue a text with a trained model, or talk with one by its own chat template."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Annotated, Any, Literal

from shardwise.core.communication.agreement import agree, gather_objects
from shardwise.core.errors import ConfigError, DataError
from shardwise.data import ExampleEncoder, UnusableExampleError
from shardwise.data.tokenizer import TextStream, Tokenizer
from shardwise.models.generation import PrefixCache, generate as generate_ids, on_layers
from shardwise.models.gpt import GPT
from shardwise.run.commands.opened_model import TO_BRING_A_TOKENIZER, OpenCheckpoint, check_fits, open_model
from shardwise.run.processes.ranks import Ranks, open_ranks
from shardwise.storage.huggingface.generation_config import GenerationChoice
from shardwise.training.bounds import DEFAULT_TIMEOUT, SEED, STEPS, TEMPERATURE, TIMEOUT, TOP_P, checks_arguments

RESET = "/reset"
"""The turn that begins a new conversation."""


@dataclass(frozen=True)
class SamplingRequest:
    """The choice of tokens that a user asks for; None leaves it to the model's files.

    Attributes:
        max_new_tokens: most tokens to add.
        temperature: under 1 favours likely tokens; 0 always takes the likeliest.
        top_k: choose among this many likeliest tokens; 0 is off.
        top_p: choose among the fewest likeliest tokens whose probabilities reach this sum; 1 is off.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def choose(self, opened: OpenCheckpoint, tokenizer: Tokenizer, num_prompt_tokens: int) -> GenerationChoice:
        """The choice of tokens after a prompt. Raises ConfigError: a value out of range."""
        return opened.generation_defaults().choose(
            **asdict(self),
            num_prompt_tokens=num_prompt_tokens,
            vocab_size=opened.description.vocab_size,
            eos_id=tokenizer.eos_id,
        )


@dataclass(frozen=True)
class OpenPrompt:
    """A text to continue.

    Attributes:
        opened, tokenizer: the model, and its tokenizer.
        prompt_ids: the tokens that the tokenizer puts in front, and the prompt.
        choice: of tokens.
    """

    opened: OpenCheckpoint
    tokenizer: Tokenizer
    prompt_ids: list[int]
    choice: GenerationChoice

    def notes(self, longest: int) -> Iterator[str]:
        """Lines that a user should read, where the model reads ``longest`` tokens."""
        yield from self.choice.notes
        ids, beginning = self.prompt_ids, list(self.tokenizer.beginning)
        if beginning and ids[len(beginning) : 2 * len(beginning)] == beginning:
            yield (
                f"the prompt begins with {self.tokenizer.decode(beginning)}, which the tokenizer puts in front of "
                "every text: it stands there twice"
            )
        if len(ids) > longest:
            yield f"the prompt has {len(ids)} tokens, of which the model reads the last {longest}"


def open_prompt(
    checkpoint: str | PathLike[str],
    adapter: str | PathLike[str] | None,
    prompt: str,
    request: SamplingRequest,
    *,
    special_tokens: bool,
    world_size: int,
) -> OpenPrompt:
    """Open the checkpoint of a model that continues texts, and read the prompt. Raises as ``generate``."""
    opened, tokenizer = open_causal(checkpoint, adapter, world_size)
    encoded = tokenizer.encode(prompt, parse_special=special_tokens)
    prompt_ids = [*tokenizer.beginning, *encoded]
    return OpenPrompt(opened, tokenizer, prompt_ids, request.choose(opened, tokenizer, len(prompt_ids)))


def open_causal(
    checkpoint: str | PathLike[str], adapter: str | PathLike[str] | None, world_size: int
) -> tuple[OpenCheckpoint, Tokenizer]:
    """A model that continues texts, without its tensors, and its tokenizer. Raises as ``generate``."""
    opened = open_model(checkpoint, adapter)
    check_fits(opened.description, world_size)
    if (head := opened.description.classification) is not None:
        raise ConfigError(
            f"{opened.folder} holds a model for {head.task}, which adds no tokens; use shardwise classify"
        )
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
    special_tokens: bool = True,
    seed: Annotated[int, SEED] = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    layers: Literal["auto", "training", "inference", "fused"] = "auto",
    timeout: Annotated[float, TIMEOUT] = DEFAULT_TIMEOUT,
    on_text: Callable[[str], object] | None = None,
    on_note: Callable[[str], object] | None = None,
) -> str:
    """Continue a text; every rank calls. The same seed gives the same text at every number of ranks.

    Args:
        checkpoint: folder of a run or an import, for its newest checkpoint, or of one of its checkpoints; or a Hugging
            Face folder; or adapters, with the model that they name.
        prompt: text to continue; a new text begins if it is empty.
        adapter: folder of adapters to use with the model.
        max_new_tokens: most tokens to add. Here and below, None: as the model's generation_config.json says, or else
            200.
        temperature: under 1 favours likely tokens; 0 always takes the likeliest. None: see above, or else 0.8.
        top_k: choose among this many likeliest tokens; 0 is off. None: see above, or else 50.
        top_p: choose among the fewest likeliest tokens whose probabilities reach this sum; 1 is off. None: see above,
            or else 1.
        special_tokens: read the names of special tokens in the prompt as these tokens.
        seed: of the choices.
        device: where to compute; "auto" takes a GPU if there is one for each rank.
        layers: those of training; those for inference; or these "fused"; see ``shardwise generate --help``.
        timeout: seconds that a rank waits for another.
        on_text: given, on the first rank, the prompt, then each piece of the text as it comes, and at last the rest
            with a line's end, after an error too.
        on_note: given, on the first rank, each line that a user should read before the text.

    Returns:
        The text added to the prompt, on every rank.

    Raises:
        ConfigError: an argument out of range, more ranks than the model can be split over, or a model that adds no
            tokens.
        CheckpointError: no checkpoint there, or a damaged one.
        DataError: no tokenizer, or a damaged one.
    """
    request = SamplingRequest(max_new_tokens, temperature, top_k, top_p)
    with open_ranks(device, timeout=timeout) as ranks:
        show, note = ranks.on_first(on_text), ranks.on_first(on_note)
        task = agree(
            lambda: open_prompt(
                checkpoint, adapter, prompt, request, special_tokens=special_tokens, world_size=ranks.world_size
            ),
            group=ranks.control,
        )
        model = task.opened.load_model(ranks)
        assert isinstance(model, GPT)
        model, kind = on_layers(model, layers)
        for line in (*task.notes(model.max_sequence_length), f"layers: {kind}"):
            note(line)
        show(prompt)
        choice = task.choice
        eos_ids = choice.eos_ids
        return write(ranks, model, task.tokenizer, task.prompt_ids, choice, seed=seed, eos_ids=eos_ids, show=show)[1]


def write(
    ranks: Ranks,
    model: GPT,
    tokenizer: Tokenizer,
    prompt_ids: list[int],
    choice: GenerationChoice,
    *,
    seed: int,
    eos_ids: tuple[int, ...],
    show: Callable[[str], object],
    prefix: PrefixCache | None = None,
) -> tuple[list[int], str]:
    """Generate, and show each piece of the text as soon as it is certain, and a line's end; every rank calls.

    Returns:
        The new tokens, and the text.
    """
    stream, pieces = TextStream(tokenizer, prompt_ids), list[str]()

    def add(piece: str, end: str = "") -> None:
        pieces.append(piece)
        show(piece + end)

    try:
        # Not limited: the first rank waits with everybody for a terminal that is paused.
        with ranks.phase("generating"):
            new_ids = generate_ids(
                model,
                prompt_ids,
                max_new_tokens=choice.max_new_tokens,
                sampling=choice.sampling,
                seed=seed,
                eos_id=eos_ids,
                on_token=lambda token: add(stream.push(token)),
                prefix=prefix,
            )
    finally:
        # After Ctrl-C too, so that the shell's prompt begins a new line.
        add(stream.finish(), "\n")
    return new_ids, "".join(pieces)


@dataclass(frozen=True)
class OpenChat:
    """A model to talk with.

    Attributes:
        opened: the model.
        encoder: turns messages into tokens.
        turn_ends: tokens that end a turn, as those do that end a text.
        request: the choice of tokens that the user asks for.
    """

    opened: OpenCheckpoint
    encoder: ExampleEncoder
    turn_ends: tuple[int, ...]
    request: SamplingRequest


def open_chat(
    checkpoint: str | PathLike[str], adapter: str | PathLike[str] | None, request: SamplingRequest, world_size: int
) -> OpenChat:
    """Open a model, its tokenizer and its chat template. Raises as ``chat``."""
    opened, tokenizer = open_causal(checkpoint, adapter, world_size)
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
    seed: Annotated[int, SEED] = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    layers: Literal["auto", "training", "inference", "fused"] = "auto",
    timeout: Annotated[float, TIMEOUT] = DEFAULT_TIMEOUT,
    on_text: Callable[[str], object] | None = None,
    on_note: Callable[[str], object] | None = None,
) -> list[dict[str, Any]]:
    """Answer turn after turn, each with all turns before it; every rank calls.

    Args:
        checkpoint: see ``generate``; a model with a chat template.
        turns: what the user says; "/reset" begins a new conversation, and an empty turn is passed over. Only the first
            rank's are read, each once the one before has its answer.
        system: instructions to the model before the conversation.
        adapter: here and below, see ``generate``.
        on_text: given, on the first rank, each piece of an answer as it comes, and a line's end after each answer.
        on_note: given, on the first rank, each line that a user should read, once.

    Returns:
        The messages of the last conversation, on every rank: ``{"role": ..., "content": ...}``.

    Raises:
        ConfigError: see ``generate``.
        CheckpointError: see ``generate``.
        DataError: see ``generate``; or the model has no chat template.
    """
    request = SamplingRequest(max_new_tokens, temperature, top_k, top_p)
    with open_ranks(device, timeout=timeout) as ranks:
        show, note = ranks.on_first(on_text), ranks.on_first(on_note)
        task = agree(lambda: open_chat(checkpoint, adapter, request, ranks.world_size), group=ranks.control)
        model = task.opened.load_model(ranks)
        assert isinstance(model, GPT)
        model, kind = on_layers(model, layers)
        note(f"layers: {kind}")
        notes, num_answers, prefix, left = set[str](), 0, PrefixCache(model), iter(turns)
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
                # Another seed for each turn, so that the same question may be answered otherwise.
                answer = _answer(ranks, model, task, asked, prefix, (seed + num_answers) % 2**63, show, note_once)
                if answer is not None:
                    messages, num_answers = [*asked, {"role": "assistant", "content": answer}], num_answers + 1
        return messages


def _answer(
    ranks: Ranks,
    model: GPT,
    task: OpenChat,
    messages: list[dict[str, Any]],
    prefix: PrefixCache,
    seed: int,
    show: Callable[[str], object],
    note: Callable[[str], object],
) -> str | None:
    """The answer to the last of the messages, None if they cannot be read; every rank calls."""
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
            f"the conversation has more than {window} tokens, the last of which the model reads; {RESET} begins a new "
            "one"
        )
    eos_ids = tuple(dict.fromkeys((*choice.eos_ids, *task.turn_ends)))
    # Each turn's prompt begins with the turns before it, which are not read again.
    new_ids, _ = write(
        ranks, model, tokenizer, prompt_ids, choice, seed=seed, eos_ids=eos_ids, show=show, prefix=prefix
    )
    return tokenizer.decode(new_ids)


def _next_turn(ranks: Ranks, left: Iterator[str]) -> str | None:
    """The next of the first rank's turns, on every rank; None at the end."""
    with ranks.phase("waiting for what the user says"):
        turn = agree(lambda: next(left, None) if ranks.is_first else None, group=ranks.control)
        said: str | None = gather_objects(turn, "what the user says", group=ranks.control)[0]
    return said
