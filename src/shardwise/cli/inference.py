"""The commands that use a model: ``generate``, ``chat`` and ``eval``."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from shardwise.cli.arguments import SplitArguments, check_data, check_file, check_model
from shardwise.cli.reporting import is_first_rank, print_note
from shardwise.core.errors import ConfigError, DataError
from shardwise.run.settings import CorpusSettings, TrackerName
from shardwise.training.bounds import BATCH, DEFAULT_BATCH, SEED, SEQUENCE, STEPS, TEMPERATURE, TOP_P, Folder, Range

if TYPE_CHECKING:
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
class GeneratingArguments(ModelArguments):
    """Arguments of the commands that generate text.

    Attributes:
        max_new_tokens: most tokens to add. Default, here and below: the model's generation_config.json, or else 200.
        temperature: under 1 favours likely tokens; 0 always takes the likeliest. Default: see above, or else 0.8.
        top_k: choose among this many likeliest tokens; 0 is off. Default: see above, or else 50.
        top_p: choose among the fewest likeliest tokens whose probabilities reach this sum; 1 is off. Default: see
            above, or else 1.
        seed: seed of the sampling.
        device: device to compute on; "auto" takes a GPU if there is one for each rank.
        layers: kind of layers; "fused" means inference layers with one exchange per half block. "auto" takes inference
            layers if the model supports them, because they were the fastest where measured.
    """

    max_new_tokens: Annotated[int | None, STEPS] = None
    temperature: Annotated[float | None, TEMPERATURE] = None
    top_k: Annotated[int | None, STEPS] = None
    top_p: Annotated[float | None, TOP_P] = None
    seed: Annotated[int, SEED] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    layers: Literal["auto", "training", "inference", "fused"] = "auto"

    def request(self) -> "SamplingRequest":
        """Return the requested sampling. The import is here because PyTorch takes seconds to load."""
        from shardwise.run.commands.text_generation import SamplingRequest

        return SamplingRequest(self.max_new_tokens, self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True)
class GenerateArguments(GeneratingArguments):
    """Continue a text with a model from shardwise train, demo, finetune or import-hf, or from a Hugging Face folder.

    The same seed gives the same text on any number of ranks.

    Attributes:
        prompt: text to continue; an empty prompt starts a new text.
        special_tokens: parse names of special tokens in the prompt, such as <|im_start|>, as transformers does; with
            --no-special-tokens they are plain characters, which is safer for untrusted text.
    """

    prompt: str = ""
    special_tokens: bool = True

    def prepare(self, world_size: int) -> None:
        from shardwise.run.commands.text_generation import open_prompt

        special = self.special_tokens
        open_prompt(
            self.checkpoint, self.adapter, self.prompt, self.request(), special_tokens=special, world_size=world_size
        )

    def work(self) -> None:
        from shardwise.cli import reporting
        from shardwise.run import generate

        reporting.allow_any_character()
        note = partial(print_note, "shardwise generate")
        generate(**self.keywords(), on_text=reporting.show, on_note=note)


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

        open_chat(self.checkpoint, self.adapter, self.request(), world_size)

    def work(self) -> None:
        from shardwise.cli import reporting
        from shardwise.run import chat

        reporting.allow_any_character()
        note = partial(print_note, "shardwise chat")
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
_OF_DATA = {"data", "sequence_length", "mask_prompts", "special_tokens", "text_key", "prompt_template"}


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
        if self.tasks and (named := [flag for flag, is_given in of_data.items() if is_given]):
            raise ConfigError(f"{named[0]} is for --data, which --tasks replaces; leave it out")

    def check_early(self) -> None:
        super().check_early()
        check_data(self.data)
        check_file(self.prompt_template, "--prompt-template")

    def prepare(self, world_size: int) -> None:
        from shardwise.run.commands.text_generation import open_causal

        open_causal(self.checkpoint, self.adapter, world_size)

    def work(self) -> None:
        given = self.keywords()
        if self.tasks:
            from shardwise.run import evaluate_tasks

            evaluate_tasks(**{name: given[name] for name in given.keys() - _OF_DATA}, on_table=print)
            return
        from shardwise.run import evaluate

        keywords = {name: given[name] for name in given.keys() - _OF_TASKS}
        measured = evaluate(**keywords, on_note=partial(print_note, "note"))
        if not is_first_rank():
            return
        for note in measured.notes:
            print(f"note            {note}")
        print(f"data            {measured.data}")
        has_texts = "perplexity" in measured.metrics
        for name, value in measured.metrics.items():
            unit = " nats per token" if has_texts and name == "loss" else ""
            print(f"{name:<15} {value:.{4 if name == 'perplexity' else 6}f}{unit}")
