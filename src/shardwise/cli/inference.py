"""The commands that use a model: ``generate``, ``score``, ``chat`` and ``eval``."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from shardwise.cli.arguments import SplitArguments, check_data, check_file, check_model
from shardwise.cli.reporting import is_first_rank, print_note
from shardwise.core.errors import ConfigError, DataError
from shardwise.run.settings import CorpusSettings, TrackerName
from shardwise.training.bounds import (
    BATCH,
    DEFAULT_BATCH,
    DEFAULT_PARTS,
    DEFAULT_SEQUENCES,
    DIFFERENCE,
    PARTS,
    PENALTY,
    SEED,
    SEQUENCE,
    SHARE,
    STEPS,
    TEMPERATURE,
    TOP_LOG_PROBS,
    TOP_P,
    Folder,
    Range,
)

if TYPE_CHECKING:
    from shardwise.run.commands.many_texts import Sample, Score
    from shardwise.run.commands.opened_model import Evaluation
    from shardwise.run.commands.text_generation import SamplingRequest


@dataclass(frozen=True)
class ModelArguments(SplitArguments):
    """Arguments of the commands that use a model.

    Attributes:
        checkpoint: folder of a run or an import (its newest checkpoint is used), of one checkpoint, of a Hugging Face
            model, fine-tuned or not, or of adapters, which name their base model.
        adapter: folder of LoRA adapters, in the peft library's format, to use with the model.
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT"), Folder("")]
    adapter: Annotated[str | None, Folder()] = None

    def begins(self) -> str:
        return f"opening {self.checkpoint}"

    def check_early(self) -> None:
        check_model(self.checkpoint, "give the --out of a training run or one of its checkpoints")
        if self.adapter is not None:
            check_model(self.adapter)


@dataclass(frozen=True)
class ExactArguments(SplitArguments):
    """Arguments of exact generation.

    Attributes:
        exact: compute as shardwise train --exact does, so that log-probabilities have the bits of a training forward of
            the whole text, at every number of ranks. It takes longer.
        exact_parts: with --exact, number of parts into which sums are cut; as in training.
    """

    exact: bool = False
    exact_parts: Annotated[int, PARTS] = DEFAULT_PARTS
    has_stages: ClassVar = True

    def _check_together(self) -> None:
        super()._check_together()
        if self.exact_parts != DEFAULT_PARTS and not self.exact:
            raise ConfigError(
                f"--exact-parts {self.exact_parts} is for exact generation, and --exact is off; add --exact, or leave "
                "--exact-parts out"
            )


def _of_the_model(otherwise: str) -> Any:
    """Return the end of a flag's help: where the default comes from."""
    return tyro.conf.arg(help_behavior_hint=f"(default: that of generation_config.json, or {otherwise})")


@dataclass(frozen=True)
class GeneratingArguments(ModelArguments):
    """Arguments of the commands that generate text.

    Attributes:
        max_new_tokens: most tokens to add.
        temperature: under 1 favours likely tokens; 0 always takes the likeliest.
        top_k: choose among this many likeliest tokens; 0 is off.
        top_p: choose among the fewest likeliest tokens whose probabilities reach this sum; 1 is off.
        min_p: choose among tokens at least this share as likely as the likeliest; 0 is off.
        repetition_penalty: over 1 makes tokens of the prompt and of the text less likely.
        presence_penalty: over 0 makes tokens of the new text less likely.
        seed: seed of the sampling.
        device: device to compute on; "auto" takes a GPU if there is one for each rank.
        layers: kind of layers; "fused" means inference layers with one exchange per half block. "auto" takes inference
            layers if the model supports them, because they were the fastest where measured.
    """

    max_new_tokens: Annotated[int | None, STEPS, _of_the_model("200")] = None
    temperature: Annotated[float | None, TEMPERATURE, _of_the_model("0.8")] = None
    top_k: Annotated[int | None, STEPS, _of_the_model("50")] = None
    top_p: Annotated[float | None, TOP_P, _of_the_model("1")] = None
    min_p: Annotated[float | None, SHARE, _of_the_model("0")] = None
    repetition_penalty: Annotated[float | None, PENALTY, _of_the_model("1")] = None
    presence_penalty: Annotated[float | None, DIFFERENCE, _of_the_model("0")] = None
    seed: Annotated[int, SEED] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    layers: Literal["auto", "training", "inference", "fused"] = "auto"
    has_stages: ClassVar = True

    def request(self) -> "SamplingRequest":
        """Return the requested sampling. The import is here because PyTorch takes seconds to load."""
        from shardwise.run.commands.text_generation import SamplingRequest

        given = self.max_new_tokens, self.temperature, self.top_k, self.top_p, self.min_p
        return SamplingRequest(*given, self.repetition_penalty, self.presence_penalty)


@dataclass(frozen=True)
class GenerateArguments(ExactArguments, GeneratingArguments):
    """Continue texts with a model from shardwise train, demo, finetune or import-hf, or from a Hugging Face folder.

    The same seed gives the same text on any number of ranks and with any other prompts.

    Attributes:
        prompt: text to continue; an empty prompt starts a new text. Several if the flag is repeated.
        prompts: file of prompts, in JSON lines such as {"prompt": "..."}, {"messages": [...]}, a chat to answer by the
            model's chat template, or {"tokens": [1, 2]}, each with its settings if it has some ("seed",
            "max_new_tokens", ...); a .txt file has one in each line. "-" reads JSON lines from standard input.
        n: number of texts for each prompt; each has the seed after that of the one before.
        json: print each text as a line of JSON, as soon as it is done.
        stop: string that ends a text and is no part of it; several if the flag is repeated.
        log_probs: with --json, number of likeliest tokens whose log-probabilities are printed next to those of the
            tokens. They are those at --temperature, 1 if that is not given, before top-k, top-p and penalties.
        prompt_log_probs: the same for the tokens of the prompts.
        batch_size: number of texts that are generated at once.
        cache_tokens: number of tokens that the cache holds, of all texts; those that do not fit wait. Default: as many
            as the texts need, or 1 GiB.
        special_tokens: parse names of special tokens in the prompt, such as <|im_start|>, as transformers does;
            otherwise they are plain characters, which is safer for untrusted text.
    """

    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    prompts: str | None = None
    n: Annotated[int, BATCH] = 1
    json: bool = False
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    log_probs: Annotated[int | None, TOP_LOG_PROBS] = None
    prompt_log_probs: Annotated[int | None, TOP_LOG_PROBS] = None
    batch_size: Annotated[int, BATCH] = DEFAULT_SEQUENCES
    cache_tokens: Annotated[int | None, SEQUENCE] = None
    special_tokens: bool = True

    def _check_together(self) -> None:
        super()._check_together()
        if self.prompt and self.prompts is not None:
            raise ConfigError("--prompt cannot be used with --prompts; write all prompts into the file")
        for flag, value in {"--log-probs": self.log_probs, "--prompt-log-probs": self.prompt_log_probs}.items():
            if value is not None and not self.json:
                raise ConfigError(f"{flag} is printed as JSON; add --json")

    @property
    def is_one(self) -> bool:
        """True if there is one text, which is shown as it grows."""
        return len(self.prompt) < 2 and self.prompts is None and self.n == 1 and not self.json

    def check_early(self) -> None:
        super().check_early()
        if self.prompts not in (None, "-"):
            check_file(self.prompts, "--prompts")

    def prepare(self, world_size: int) -> None:
        from shardwise.run.commands.text_generation import open_causal, open_prompt

        if not self.is_one:
            open_causal(self.checkpoint, self.adapter, world_size, self.pp)
            return
        prompt, special = "".join(self.prompt), self.special_tokens
        sizes = {"world_size": world_size, "pp": self.pp}
        open_prompt(self.checkpoint, self.adapter, prompt, self.request(), special_tokens=special, **sizes)

    def work(self) -> None:
        from shardwise.cli import reporting
        from shardwise.run import generate, generate_many

        reporting.allow_any_character()
        note, given = partial(print_note, "shardwise generate"), self.keywords()
        if self.is_one:
            given["prompt"] = "".join(self.prompt)
            one = {name: given[name] for name in given.keys() - _OF_MANY}
            generate(**one, on_text=reporting.show, on_note=note)
            return
        many = {name: given[name] for name in given.keys() - {"prompt", "json"}}
        many["prompts"] = list(self.prompt or [""]) if self.prompts is None else self.prompts
        show = _show_json if self.json else _InOrder(self.n, note).add
        found = generate_many(**many, on_sample=show, on_note=note)
        _check_answered([each.error for each in found], "prompts")


_OF_MANY = {"prompts", "n", "json", "log_probs", "prompt_log_probs", "batch_size", "cache_tokens"}


class _InOrder:
    """Shows texts in the order of their prompts, each as soon as those before it are shown."""

    def __init__(self, n: int, note: Callable[[str], object]) -> None:
        self._n, self._note, self._next = n, note, (0, 0)
        self._waiting: dict[tuple[int, int], Sample] = {}

    def add(self, sample: "Sample") -> None:
        from shardwise.cli import reporting

        self._waiting[sample.prompt, sample.sample] = sample
        while (first := self._waiting.pop(self._next, None)) is not None:
            prompt, number = self._next
            if first.error is not None:
                self._note(first.error)
            else:
                reporting.show(("" if self._next == (0, 0) else "\n") + first.prompt_text + first.text + "\n")
            is_last = first.error is not None or number + 1 == self._n
            self._next = (prompt + 1, 0) if is_last else (prompt, number + 1)


def _show_json(result: "Sample | Score") -> None:
    from shardwise.cli import reporting

    reporting.show(json.dumps(result.to_json(), ensure_ascii=False) + "\n")


def _check_answered(errors: Sequence[str | None], what: str) -> None:
    if failed := sum(error is not None for error in errors):
        raise DataError(f"{failed} of the {what} could not be answered; the output says why")


@dataclass(frozen=True)
class ScoreArguments(ExactArguments, ModelArguments):
    """Measure the log-probability of each token of your texts, and their sum; prints a line of JSON for each text.

    Attributes:
        texts: file of JSON lines: {"text": "..."}; or {"prompt": "...", "completion": "..."} to measure the completion;
            or what shardwise generate --json prints. A .txt file has one text in each line. "-" reads JSON lines from
            standard input.
        temperature: divisor of the logits.
        top_log_probs: number of likeliest tokens whose log-probabilities are printed next to each token's.
        batch_size: number of texts that are read at once.
        cache_tokens: number of tokens that the cache holds, of all texts. Default: as many as the texts need, or 1 GiB.
        special_tokens: parse names of special tokens in texts as these tokens.
        device: device to compute on; "auto" takes a GPU if there is one for each rank.
        layers: kind of layers; see shardwise generate --help.
    """

    texts: str = "-"
    temperature: Annotated[float, Range(0, 1e6, low_included=False)] = 1.0
    top_log_probs: Annotated[int, TOP_LOG_PROBS] = 0
    batch_size: Annotated[int, BATCH] = DEFAULT_SEQUENCES
    cache_tokens: Annotated[int | None, SEQUENCE] = None
    special_tokens: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    layers: Literal["auto", "training", "inference", "fused"] = "auto"

    def check_early(self) -> None:
        super().check_early()
        if self.texts != "-":
            check_file(self.texts, "--texts")

    def prepare(self, world_size: int) -> None:
        from shardwise.run.commands.text_generation import open_causal

        open_causal(self.checkpoint, self.adapter, world_size, self.pp)

    def work(self) -> None:
        from shardwise.cli import reporting
        from shardwise.run import score

        reporting.allow_any_character()
        note = partial(print_note, "shardwise score")
        found = score(**self.keywords(), on_score=_show_json, on_note=note)
        _check_answered([each.error for each in found], "texts")


_EXIT = "/exit"


@dataclass(frozen=True)
class ChatArguments(GeneratingArguments):
    """Talk with a model from shardwise finetune or from a Hugging Face folder, using its own chat template.

    Each line of standard input is a turn; the model reads it together with all earlier turns. /reset begins a new
    conversation, and /exit or the end of the input ends the command.

    Attributes:
        system: system message at the start of a conversation.
    """

    system: str = ""

    def prepare(self, world_size: int) -> None:
        from shardwise.run.commands.text_generation import open_chat

        open_chat(self.checkpoint, self.adapter, self.request(), world_size, self.pp)

    def work(self) -> None:
        from shardwise.cli import reporting
        from shardwise.run import chat

        reporting.allow_any_character()
        note = partial(print_note, "shardwise chat")
        if sys.stdin.isatty() and is_first_rank():
            note(f"each line is a turn; /reset begins a new conversation, {_EXIT} ends the chat")
        chat(**self.keywords(), turns=_turns(), on_text=reporting.show, on_note=note)


def _turns() -> Iterator[str]:
    while True:
        with _errors_of_input():
            line = _read_line()
        if line is None or (turn := line.strip()) == _EXIT:
            return
        yield turn


def _read_line() -> str | None:
    try:
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - by being imported it lets the user edit the line
            line = input("> ")
        elif not (line := sys.stdin.readline()):
            return None
        line.encode()
    except EOFError:
        return None
    return line


@contextlib.contextmanager
def _errors_of_input() -> Iterator[None]:
    try:
        yield
    except UnicodeError as error:
        raise DataError(f"a line of standard input is no text: {error}; write it in UTF-8") from error


_OF_TASKS = {"tasks", "task_path", "num_fewshot", "limit", "chat", "output"}
_OF_DATA = {
    "also",
    "picture",
    "data",
    "sequence_length",
    "mask_prompts",
    "special_tokens",
    "text_key",
    "prompt_template",
}


@dataclass(frozen=True)
class EvalArguments(ModelArguments):
    """Measure a model from shardwise train, demo, finetune or import-hf, or from a Hugging Face folder, on data.

    Prints the loss in nats per token, the perplexity, and bits per byte, which are comparable between tokenizers.

    With --tasks, runs tasks of EleutherAI's lm-evaluation-harness (pip install 'shardwise[eval]').

    Attributes:
        data: files and folders, in the forms that shardwise finetune reads.
        sequence_length: number of tokens that the model reads at once; longer texts are cut into windows, longer chats
            are split. Default: 512, or the model's maximum if that is less.
        batch_size: number of windows at once.
        mask_prompts: measure only assistant messages and completions; --no-mask-prompts measures all of the text.
        special_tokens: parse names of special tokens in texts as these tokens.
        text_key: field of a record that holds the text.
        prompt_template: JSON file with a form for records of other keys, as of shardwise finetune.
        tasks: names of lm-evaluation-harness tasks, instead of data.
        task_path: folder of your own tasks (YAML), which replace the harness's tasks.
        num_fewshot: number of solved examples before each question; the task's own number if not given.
        limit: number of questions of each task; all if not given.
        chat: ask with the model's chat template.
        output: JSON file for the harness's report.
        also: further models to measure on the same data.
        picture: PNG or SVG file for a picture of the bits per byte of the models.
        track: experiment trackers that get the metrics; a failing one never stops the command.
        device: device to compute on; "auto" takes a GPU if there is one for each rank.
    """

    data: tuple[str, ...] = ()
    sequence_length: Annotated[int | None, SEQUENCE] = None
    batch_size: Annotated[int, BATCH] = DEFAULT_BATCH
    mask_prompts: bool = True
    special_tokens: bool = True
    text_key: str = CorpusSettings.text_key
    prompt_template: str | None = None
    tasks: tuple[str, ...] = ()
    task_path: Annotated[str | None, Folder()] = None
    num_fewshot: Annotated[int | None, Range(0, 10**4)] = None
    limit: Annotated[int | None, Range(1, 10**9)] = None
    chat: bool = False
    output: Annotated[str | None, Folder()] = None
    also: tuple[str, ...] = ()
    picture: Annotated[str | None, Folder()] = None
    track: tuple[TrackerName, ...] = ()
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def _check_together(self) -> None:
        super()._check_together()
        if not self.data and not self.tasks:
            raise ConfigError("no data to measure on; pass --data with files or folders, or --tasks")
        if self.data and self.tasks:
            raise ConfigError("--data cannot be used with --tasks: one call measures one of them")
        alone = {"--task-path": self.task_path, "--num-fewshot": self.num_fewshot, "--limit": self.limit}
        alone |= {"--chat": self.chat or None, "--output": self.output}
        if not self.tasks and (given := [flag for flag, value in alone.items() if value is not None]):
            raise ConfigError(f"{given[0]} is of tasks; name some with --tasks")
        of_data = {"--sequence-length": self.sequence_length is not None, "--no-mask-prompts": not self.mask_prompts}
        of_data |= {"--no-special-tokens": not self.special_tokens}
        of_data |= {"--text-key": self.text_key != CorpusSettings.text_key}
        of_data |= {"--prompt-template": self.prompt_template is not None}
        of_data |= {"--also": bool(self.also), "--picture": self.picture is not None}
        if self.tasks and (named := [flag for flag, is_given in of_data.items() if is_given]):
            raise ConfigError(f"{named[0]} is for --data, which --tasks replaces; leave it out")

    def check_early(self) -> None:
        super().check_early()
        for model in self.also:
            check_model(model, "give the --out of a training run or one of its checkpoints")
        check_data(self.data)
        check_file(self.prompt_template, "--prompt-template")

    def prepare(self, world_size: int) -> None:
        from shardwise.run.commands.text_generation import open_causal

        for model in (self.checkpoint, *self.also):
            open_causal(model, self.adapter, world_size)

    def work(self) -> None:
        given = self.keywords()
        if self.tasks:
            from shardwise.run import evaluate_tasks

            evaluate_tasks(**{name: given[name] for name in given.keys() - _OF_DATA}, on_table=print)
            return
        from shardwise.run import evaluate
        from shardwise.run.pictures import check_picture, draw_evaluations

        if self.picture is not None:
            check_picture(self.picture)
        keywords = {name: given[name] for name in given.keys() - _OF_TASKS - {"checkpoint", "also", "picture"}}
        values = {}
        for model in (self.checkpoint, *self.also):
            measured = evaluate(model, **keywords)
            values[model] = measured.metrics["bits per byte"]
            if is_first_rank():
                self._print(model, measured)
        if self.picture is not None and is_first_rank():
            draw_evaluations(values, self.picture, title=" ".join(self.data), unit="bits per byte")

    def _print(self, model: str, measured: "Evaluation") -> None:
        if self.also:
            print(f"model           {model}")
        for note in measured.notes:
            print(f"note            {note}")
        print(f"data            {measured.data}")
        for name, value in measured.metrics.items():
            unit = " nats per token" if name == "loss" else ""
            print(f"{name:<15} {value:.{4 if name == 'perplexity' else 6}f}{unit}", flush=True)
