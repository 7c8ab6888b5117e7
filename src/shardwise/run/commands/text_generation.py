"""Continue a text with a trained model.

A look at what is trained on: ids, text and mask of samples, in colours.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from os import PathLike
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from shardwise.core.communication.agreement import agree
from shardwise.core.errors import ConfigError, DataError
from shardwise.data import TokenRows, UnusableExampleError
from shardwise.data.json_records import counted
from shardwise.data.tokenizer import TextStream, Tokenizer
from shardwise.models.generation import PrefixCache, generate as generate_ids, on_layers
from shardwise.models.gpt import GPT
from shardwise.run.commands.opened_model import TO_BRING_A_TOKENIZER, OpenCheckpoint, check_fits, open_model
from shardwise.run.processes.ranks import Ranks, open_ranks
from shardwise.run.settings import FinetuneSettings
from shardwise.run.tasks import task_of
from shardwise.run.tasks.labels import LabelledTexts, choose_labels
from shardwise.run.tasks.preference import Preferences
from shardwise.run.tasks.samples import Examples
from shardwise.run.tasks.task_data import TaskData
from shardwise.storage.huggingface.generation_config import GenerationChoice
from shardwise.training.bounds import DEFAULT_TIMEOUT, SEED, STEPS, TEMPERATURE, TIMEOUT, TOP_P, checks_arguments


@dataclass(frozen=True)
class ChoiceWishes:
    """How tokens are to be chosen; None leaves it to the model's files.

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
        """How tokens are chosen after a prompt. Raises ConfigError: a value out of range."""
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
        opened: the model.
        tokenizer: of the model.
        prompt_ids: what the tokenizer puts in front, and the prompt.
        choice: how tokens are chosen.
    """

    opened: OpenCheckpoint
    tokenizer: Tokenizer
    prompt_ids: list[int]
    choice: GenerationChoice

    def notes(self, longest: int) -> Iterator[str]:
        """What a user should know, one line each, where the model reads ``longest`` tokens."""
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
    wishes: ChoiceWishes,
    *,
    special_tokens: bool,
    world_size: int,
) -> OpenPrompt:
    """Open the checkpoint of a model that continues texts, and read the prompt.

    Raises:
        ConfigError: more ranks than the model can be split over, or a model that adds no tokens.
        CheckpointError: no checkpoint there, or a damaged one.
        DataError: no tokenizer, or a damaged one.
    """
    opened, tokenizer = open_causal(checkpoint, adapter, world_size)
    encoded = tokenizer.encode(prompt, parse_special=special_tokens)
    prompt_ids = [*tokenizer.beginning, *encoded]
    return OpenPrompt(opened, tokenizer, prompt_ids, wishes.choose(opened, tokenizer, len(prompt_ids)))


def open_causal(
    checkpoint: str | PathLike[str], adapter: str | PathLike[str] | None, world_size: int
) -> tuple[OpenCheckpoint, Tokenizer]:
    """A model that continues texts, without its tensors, and its tokenizer. Raises as ``open_prompt``."""
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
        What was added to the prompt, on every rank.

    Raises:
        ConfigError: an argument out of range, more ranks than the model can be split over, or a model that adds no
            tokens.
        CheckpointError: no checkpoint there, or a damaged one.
        DataError: no tokenizer, or a damaged one.
    """
    wishes = ChoiceWishes(max_new_tokens, temperature, top_k, top_p)
    with open_ranks(device, timeout=timeout) as ranks:
        show, note = ranks.on_first(on_text), ranks.on_first(on_note)
        task = agree(
            lambda: open_prompt(
                checkpoint, adapter, prompt, wishes, special_tokens=special_tokens, world_size=ranks.world_size
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
        # After Ctrl-C too, so that the shell's prompt begins a line of its own.
        add(stream.finish(), "\n")
    return new_ids, "".join(pieces)


# Of one sample: more are a wall of text.
_MOST_TOKENS = 2000
_LEARNED, _READ, _PLAIN = "\033[32m", "\033[2m", "\033[0m"


def shown_samples(settings: FinetuneSettings, count: int, *, colours: bool) -> Iterator[str]:
    """The first ``count`` samples as a run would train on them, and what is wrong with those that it leaves out.

    Args:
        settings: of the run.
        count: how many samples, pairs or texts with labels.
        colours: mark what is learned by colours of a terminal, else by brackets.

    Yields:
        A head, and a paragraph for each sample.

    Raises:
        ShardwiseError: what a run would raise; or no sample can be trained on.
    """
    method = task_of(settings).method
    if isinstance(method, LabelledTexts):
        yield from _labelled(method, count)
    else:
        assert isinstance(method, Examples | Preferences)
        yield from _samples(method, count, colours)


def _samples(method: Examples | Preferences, count: int, colours: bool) -> Iterator[str]:
    """Samples of texts and chats, or pairs of answers."""
    settings, examples = method.settings, method.to_show()
    longest = settings.sequence_length + 1
    key = f"{_LEARNED}learned{_PLAIN}, {_READ}only read{_PLAIN}" if colours else "[[learned]], only read"
    if isinstance(examples, TaskData):
        yield from _stream(examples, count, key, colours)
        return
    encoder = method.encoder()
    yield f"{counted(len(examples), 'sample')} in {', '.join(settings.data)}; {key}"
    shown = 0
    for number, example in enumerate(examples, 1):
        try:
            encoded = encoder.encode_all(example)
        except UnusableExampleError as error:
            yield f"\nsample {number} ({_printable(example.where)}) is left out: {_printable(str(error))}"
            continue
        for name, each in zip(("",) if len(encoded) == 1 else (", chosen", ", rejected"), encoded, strict=True):
            ids, learned = each.ids, each.learned
            length, past = len(ids), settings.samples.too_long
            too_long = f"; more than {longest}: --too-long {past}" if length > longest else ""
            if past == "cut" and not name:
                ids, learned = ids[:longest], learned[:longest]
            yield (
                f"\nsample {number} ({_printable(example.where)}){name}: {counted(length, 'token')}, {learned.sum():,} "
                f"of them learned{too_long}\n{_tokens(ids, learned, encoder.tokenizer, colours)}"
            )
        shown += 1
        if shown == count:
            return
    if not shown:
        raise DataError(f"nothing can be learned from any of the {counted(len(examples), 'sample')}")


def _stream(texts: TaskData, count: int, key: str, colours: bool) -> Iterator[str]:
    """Samples cut from texts one after the other."""
    rows = texts.train
    assert isinstance(rows, TokenRows)
    yield (
        f"{texts.name}: texts one after the other, cut into {counted(len(rows), 'sample')} of "
        f"{counted(rows.sequence_length, 'token')}, elsewhere in each pass over them (--packing keeps them apart); "
        f"{key}"
    )
    for number in range(min(count, len(rows))):
        row = rows.row(number)
        ids = np.append(row["tokens"], row["labels"][-1:])
        learned = np.arange(len(ids)) > 0
        yield f"\nsample {number + 1}:\n{_tokens(ids, learned, texts.tokenizer, colours)}"


def _labelled(method: LabelledTexts, count: int) -> Iterator[str]:
    """Texts with labels."""
    name, texts = method.read_texts(method.settings.data)
    labels = choose_labels(method.source.folder, texts, method.settings.labels)
    yield f"{name}, {counted(len(texts), 'text')}; {labels.problem}: {_printable(', '.join(labels.names))}"
    encoded = method.encoded(texts[:count], labels)
    for index, text in enumerate(encoded.texts):
        row = encoded.rows.row(index)
        ids, label = row["tokens"].tolist(), row["labels"].tolist()
        shown = _printable(method.source.tokenizer.decode(ids))
        yield f"\nsample {index + 1} ({_printable(text.where)}): label {label}\n{shown}\n{ids}"


def _tokens(ids: NDArray[np.int64], learned: NDArray[np.bool_], tokenizer: Tokenizer, colours: bool) -> str:
    """The text of a sample, and its ids below; of a long one the first and the last."""
    parts, left_out = [_runs(ids, learned)], len(ids) - _MOST_TOKENS
    if left_out > 0:
        half = _MOST_TOKENS // 2
        parts = [_runs(ids[:half], learned[:half]), _runs(ids[-half:], learned[-half:])]
    texts = (
        "".join(_marked(_printable(tokenizer.decode(run)), is_learned, colours) for is_learned, run in part)
        for part in parts
    )
    numbers = (
        " ".join(_marked(" ".join(map(str, run)), is_learned, colours) for is_learned, run in part) for part in parts
    )
    gap = f"\n... {counted(left_out, 'token')} not shown ...\n"
    return f"{gap.join(texts)}\n{gap.join(numbers)}"


def _runs(ids: NDArray[np.int64], learned: NDArray[np.bool_]) -> list[tuple[bool, list[int]]]:
    """Tokens, one run after the other of those that are learned and of those that are not."""
    pairs = zip(learned.tolist(), ids.tolist(), strict=True)
    return [(learned, [token for _, token in run]) for learned, run in groupby(pairs, key=lambda pair: pair[0])]


def _marked(text: str, learned: bool, colours: bool) -> str:
    if not colours:
        return f"[[{text}]]" if learned else text
    colour = _LEARNED if learned else _READ
    # Begun anew on each line, for pagers that read one line at a time.
    return "\n".join(f"{colour}{line}{_PLAIN}" if line else "" for line in text.split("\n"))


def _printable(text: str) -> str:
    """The text with control characters, by which it could do things to a terminal, spelt out."""
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)
