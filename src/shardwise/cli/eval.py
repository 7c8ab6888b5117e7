"""``shardwise eval``: measure a model on data, split over any number of ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import tyro

from shardwise.cli.arguments import SplitArguments
from shardwise.cli.rank import is_first_rank
from shardwise.cli.reporting import print_note
from shardwise.core.errors import ConfigError
from shardwise.training.bounds import BATCH, Folder, Range
from shardwise.training.setting_groups import SEQUENCE

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
    batch_size: Annotated[int, BATCH] = 8
    mask_prompts: bool = True
    special_tokens: bool = True
    text_key: str = "text"
    tasks: tuple[str, ...] = ()
    task_path: Annotated[str | None, Folder()] = None
    num_fewshot: Annotated[int | None, Range(0, 10**4)] = None
    limit: Annotated[int | None, Range(1, 10**9)] = None
    chat: bool = False
    output: Annotated[str | None, Folder()] = None
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data and not self.tasks:
            raise ConfigError("no data to measure on; pass --data with files or folders, or --tasks")
        if self.data and self.tasks:
            raise ConfigError("--data and --tasks exclude each other; leave one of them out")
        alone = {"--task-path": self.task_path, "--num-fewshot": self.num_fewshot, "--limit": self.limit}
        alone |= {"--chat": self.chat or None, "--output": self.output}
        if not self.tasks and (given := [flag for flag, value in alone.items() if value is not None]):
            raise ConfigError(f"{given[0]} is of tasks; name some with --tasks")

    def prepare(self, world_size: int) -> None:
        """Open the model."""
        from shardwise.run.commands.evaluate import open_to_measure

        open_to_measure(self.checkpoint, self.adapter, world_size)

    def work(self) -> Callable[[], object]:
        """Measure."""
        given = self.keywords()
        if self.tasks:
            from shardwise.run import evaluate_tasks

            return partial(evaluate_tasks, **{name: given[name] for name in given.keys() - _OF_DATA}, on_table=print)
        return partial(_print_evaluation, {name: given[name] for name in given.keys() - _OF_TASKS})


def _print_evaluation(keywords: dict[str, Any]) -> None:
    from shardwise.run import evaluate

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
