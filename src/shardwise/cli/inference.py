"""The commands that use a model: ``generate``, ``chat``, ``classify`` and ``eval``."""

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from shardwise.cli.arguments import SplitArguments
from shardwise.cli.reporting import is_first_rank, print_note
from shardwise.core.errors import ConfigError, DataError
from shardwise.run.settings import CorpusSettings
from shardwise.training.bounds import BATCH, DEFAULT_BATCH, SEED, SEQUENCE, STEPS, TEMPERATURE, TOP_P, Folder, Range

if TYPE_CHECKING:
    from shardwise.run.commands.text_generation import SamplingRequest


@dataclass(frozen=True)
class GeneratingArguments(SplitArguments):
    """The arguments of every command that lets a model write.

    Attributes:
        checkpoint: folder of a run or an import, for its newest checkpoint, or of one of its checkpoints; or a Hugging
            Face folder, a fine-tuned one included; or adapters, with the model that they name.
        adapter: folder of adapters (LoRA, in the files of the peft library) to use with the model.
        max_new_tokens: most tokens to add. Here and below, if not given: what the model's generation_config.json says,
            or else 200.
        temperature: under 1 favours likely tokens; 0 always takes the likeliest. If not given: see above, or else 0.8.
        top_k: choose among this many likeliest tokens; 0 is off. If not given: see above, or else 50.
        top_p: choose among the fewest likeliest tokens whose probabilities reach this sum; 1 is off. If not given: see
            above, or else 1.
        seed: of the choices.
        device: where to compute; "auto" takes a GPU if there is one for each rank.
        layers: those of training; those for inference; or these "fused", with one exchange per half block. "auto" takes
            those for inference where the model can have them, which are the fastest where this was measured.
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT"), Folder("")]
    adapter: Annotated[str | None, Folder()] = None
    max_new_tokens: Annotated[int | None, STEPS] = None
    temperature: Annotated[float | None, TEMPERATURE] = None
    top_k: Annotated[int | None, STEPS] = None
    top_p: Annotated[float | None, TOP_P] = None
    seed: Annotated[int, SEED] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    layers: Literal["auto", "training", "inference", "fused"] = "auto"

    def request(self) -> "SamplingRequest":
        """The choice of tokens that was asked for. Imported only here, because PyTorch takes seconds."""
        from shardwise.run.commands.text_generation import SamplingRequest

        return SamplingRequest(self.max_new_tokens, self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True)
class GenerateArguments(GeneratingArguments):
    """Continue a text with a model of shardwise train, demo, finetune or import-hf, or in a Hugging Face folder.

    The same seed gives the same text on every number of ranks.

    Attributes:
        prompt: text to continue; a new text begins if it is empty.
        special_tokens: read the names of special tokens in the prompt, such as <|im_start|>, as these tokens, as
            transformers does; as letters with --no-special-tokens, for text of people whom you don't trust.
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
    """Talk with a model of shardwise finetune, or in a Hugging Face folder, by its own chat template.

    Each line of standard input is a turn, and all turns before are read with it. /reset begins a new conversation,
    /exit or the end of the input ends it.

    Attributes:
        system: what the model is told before the conversation.
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
    while (line := _read_line()) is not None and (turn := line.strip()) != _EXIT:
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
    except UnicodeError as error:
        raise DataError(f"a line of standard input is no text: {error}; write it in UTF-8") from error
    return line


@dataclass(frozen=True)
class ClassifyArguments(SplitArguments):
    """Label texts with a model that has a head for it, such as shardwise finetune --task sequence-classification makes.

    Prints a line of JSON for each text, as the pipeline of transformers answers: {"label": ..., "score": ...}; of a
    model of several labels a list of those that are likelier than not, of a regression {"scores": [...]}, and of a
    model that labels words (--task token-classification) a list of {"word": ..., "label": ..., "score": ...}, with null
    of words that were cut off. Texts are cut into words at blanks.

    Attributes:
        checkpoint: Hugging Face folder, or adapters, with the model that they name, or an import.
        text: texts to label; if there are none, and no data, each line of standard input is one.
        data: files and folders of records with a text and, for two texts, text_pair, or with tokens, a list of words,
            in the forms that shardwise finetune reads.
        adapter: folder of adapters (LoRA, in the files of the peft library) to use with the model.
        sequence_length: most tokens of a text, which loses its end otherwise; 512, or the model's longest if that is
            less, if not given.
        batch_size: texts at once.
        special_tokens: read the names of special tokens in texts as these tokens.
        text_key: field of a record that holds the text, or the words.
        device: where to compute; "auto" takes a GPU if there is one for each rank.
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT"), Folder("")]
    text: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    adapter: Annotated[str | None, Folder()] = None
    sequence_length: Annotated[int | None, SEQUENCE] = None
    batch_size: Annotated[int, BATCH] = DEFAULT_BATCH
    special_tokens: bool = True
    text_key: str = CorpusSettings.text_key
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def prepare(self, world_size: int) -> None:
        from shardwise.run.commands.label_texts import open_classifier

        open_classifier(self.checkpoint, self.adapter, world_size)

    def work(self) -> None:
        from shardwise.run import classify

        lines = None if self.text or self.data else sys.stdin
        note = partial(print_note, "note")
        classify(**self.keywords(), lines=lines, on_answer=_print_answer, on_note=note)


def _print_answer(answer: object) -> None:
    print(json.dumps(answer, ensure_ascii=False), flush=True)


_OF_TASKS = {"tasks", "task_path", "num_fewshot", "limit", "chat", "output"}
_OF_DATA = {"data", "sequence_length", "mask_prompts", "special_tokens", "text_key"}


@dataclass(frozen=True)
class EvalArguments(SplitArguments):
    """Measure a model of shardwise train, demo, finetune or import-hf, or in a Hugging Face folder, on data.

    Prints the loss in nats per token, the perplexity, and bits per byte, which can be compared between tokenizers; of a
    model that labels texts, or their words, the accuracy, the mean of the labels' F1 (macro) or that of the entities
    that words make, and the loss.

    With --tasks, measures it by tasks of EleutherAI's lm-evaluation-harness (pip install 'shardwise[eval]').

    Attributes:
        checkpoint: folder of a run or an import, for its newest checkpoint, or of one of its checkpoints; or a Hugging
            Face folder, a fine-tuned one included; or adapters, with the model that they name.
        data: files and folders, in the forms that shardwise finetune reads.
        adapter: folder of adapters (LoRA, in the files of the peft library) to use with the model.
        sequence_length: tokens that the model reads at once; 512, or the model's longest if that is less, if not given.
            A longer text is cut into windows, a longer chat is split.
        batch_size: windows at once.
        mask_prompts: measure what the assistant says, and completions, only; with --no-mask-prompts all of the text.
        special_tokens: read the names of special tokens in texts as these tokens.
        text_key: field of a record that holds the text, or the words.
        tasks: names of tasks of lm-evaluation-harness, in place of data.
        task_path: folder of tasks of one's own (YAML), which are then all there are.
        num_fewshot: solved examples before each question; what the task says if not given.
        limit: questions of each task; all if not given.
        chat: ask by the model's chat template.
        output: file for what the harness reports, in JSON.
        device: where to compute; "auto" takes a GPU if there is one for each rank.
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT"), Folder("")]
    data: tuple[str, ...] = ()
    adapter: Annotated[str | None, Folder()] = None
    sequence_length: Annotated[int | None, SEQUENCE] = None
    batch_size: Annotated[int, BATCH] = DEFAULT_BATCH
    mask_prompts: bool = True
    special_tokens: bool = True
    text_key: str = CorpusSettings.text_key
    tasks: tuple[str, ...] = ()
    task_path: Annotated[str | None, Folder()] = None
    num_fewshot: Annotated[int | None, Range(0, 10**4)] = None
    limit: Annotated[int | None, Range(1, 10**9)] = None
    chat: bool = False
    output: Annotated[str | None, Folder()] = None
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def _check_together(self) -> None:
        super()._check_together()
        if not self.data and not self.tasks:
            raise ConfigError("no data to measure on; pass --data with files or folders, or --tasks")
        if self.data and self.tasks:
            raise ConfigError("--data and --tasks exclude each other; leave one of them out")
        alone = {"--task-path": self.task_path, "--num-fewshot": self.num_fewshot, "--limit": self.limit}
        alone |= {"--chat": self.chat or None, "--output": self.output}
        if not self.tasks and (given := [flag for flag, value in alone.items() if value is not None]):
            raise ConfigError(f"{given[0]} is of tasks; name some with --tasks")

    def prepare(self, world_size: int) -> None:
        from shardwise.run.commands.evaluate import open_to_measure

        open_to_measure(self.checkpoint, self.adapter, world_size)

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
        of_texts = "perplexity" in measured.metrics
        for name, value in measured.metrics.items():
            unit = " nats per token" if of_texts and name == "loss" else ""
            print(f"{name:<15} {value:.{4 if name == 'perplexity' else 6}f}{unit}")
