"""Evaluate a model on tasks of lm-evaluation-harness."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from os import PathLike
from typing import Annotated, Any, Literal

from shardwise.core.atomic_files import check_output, write_output
from shardwise.core.communication.agreement import agree
from shardwise.core.errors import DataError, ShardwiseError
from shardwise.data.tokenizer import Tokenizer
from shardwise.data.tokenizer.library import DeclaredTokens
from shardwise.models.generation.cache import CausalModel
from shardwise.run.commands.opened_model import OpenCheckpoint, as_tuple, same_checkpoint
from shardwise.run.commands.text_generation import open_causal
from shardwise.run.lm_harness import ShardwiseLM, harness
from shardwise.run.processes.ranks import open_ranks
from shardwise.run.settings import TrackerName
from shardwise.run.tracking import track_evaluation
from shardwise.training.bounds import BATCH, DEFAULT_BATCH, DEFAULT_TIMEOUT, TIMEOUT, Range, checks_arguments

# Bootstrap samples. The harness's default takes minutes on one core for metrics without a closed form.
_BOOTSTRAP_DRAWS = 1000


@checks_arguments
def evaluate_tasks(
    checkpoint: str | PathLike[str],
    tasks: str | Sequence[str],
    *,
    adapter: str | PathLike[str] | None = None,
    batch_size: Annotated[int, BATCH] = DEFAULT_BATCH,
    task_path: str | None = None,
    num_fewshot: Annotated[int | None, Range(0, 10**4)] = None,
    limit: Annotated[int | None, Range(1, 10**9)] = None,
    chat: bool = False,
    output: str | PathLike[str] | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    timeout: Annotated[float, TIMEOUT] = DEFAULT_TIMEOUT,
    track: Sequence[TrackerName] = (),
    on_table: Callable[[str], object] | None = None,
) -> dict[str, Any] | None:
    """Evaluate a model on tasks of lm-evaluation-harness; every rank calls.

    Args:
        checkpoint: see ``evaluate``.
        tasks: names of the tasks.
        adapter: see ``evaluate``.
        batch_size: texts per batch.
        task_path: folder of task definitions (YAML) that replace those of the harness.
        num_fewshot: number of solved examples before each question; the default of the task if None.
        limit: maximum number of questions per task; no limit if None.
        chat: format the questions with the model's chat template.
        output: JSON file for the harness's report.
        device: device of the model; "auto" takes a GPU if every rank can have one.
        timeout: maximum wait for another rank, in seconds.
        track: experiment trackers that get the metrics.
        on_table: callback on the first rank; receives each of the harness's tables as text.

    Returns:
        The harness's report on the first rank; None on the other ranks.

    Raises:
        ConfigError: see ``generate``; or lm_eval is not installed, or ``output`` cannot be written.
        CheckpointError: see ``generate``.
        DataError: a task cannot be read or evaluated.
    """
    names = as_tuple(tasks)
    # Disable the subprocesses of datasets: they would be forked from a process with threads.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    with open_ranks(device, timeout=timeout) as ranks, same_checkpoint(checkpoint, ranks) as checkpoint:

        def prepare() -> tuple[OpenCheckpoint, Tokenizer]:
            harness()
            if output is not None and ranks.is_first:
                check_output(output, flag="--output")
            return open_causal(checkpoint, adapter, ranks.world_size)

        def measure() -> Any:
            options = {"num_fewshot": num_fewshot, "limit": limit, "apply_chat_template": chat}
            return _measure(lm, manager, names, options, log_samples=output is not None)

        opened, tokenizer = agree(prepare, group=ranks.control)
        manager: Any = None
        with ranks.phase("reading the tasks"):
            # The other ranks follow the first and use its cache of the data.
            for is_turn in (ranks.is_first, not ranks.is_first):
                read = agree(partial(_read_tasks, names, task_path) if is_turn else lambda: None, group=ranks.control)
                manager = read or manager
        model = opened.load_model(ranks)
        assert isinstance(model, CausalModel)
        lm = harness_model(opened, tokenizer, model, batch_size)
        with ranks.phase("measuring", limited=True):
            report = agree(measure, group=ranks.control)

        def tell() -> None:
            for table in _tables(report):
                ranks.on_first(on_table)(table)
            if output is not None:
                _write(output, report)
            track_evaluation(track, checkpoint, {"tasks": names}, _numbers(report))

        agree(tell if ranks.is_first else lambda: None, group=ranks.control)
        return report if ranks.is_first else None


def harness_model(opened: OpenCheckpoint, tokenizer: Tokenizer, model: CausalModel, batch_size: int) -> ShardwiseLM:
    """Wrap a model for the harness, with the special tokens and the chat template of its folder."""
    name = DeclaredTokens(opened.adapter or opened.folder).names.get("bos_token")
    ids = {value: key for key, value in tokenizer.added_names.items()}
    choice = opened.generation_defaults().choose(vocab_size=opened.description.vocab_size, eos_id=tokenizer.eos_id)
    return ShardwiseLM(
        model,
        tokenizer,
        template=opened.chat_template(),
        prefix_id=None if name is None else ids.get(name),
        eos_ids=choice.eos_ids,
        batch_size=batch_size,
        name=str(opened.folder).replace("/", "__"),
    )


@contextmanager
def _errors_of_harness(what: str) -> Iterator[None]:
    """Convert any error of the harness, its data sets and third-party tasks to a DataError during the block."""
    try:
        yield
    except ShardwiseError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:500]
        raise DataError(f"the tasks cannot be {what}: {type(error).__name__}: {reason}") from error


def _read_tasks(tasks: Sequence[str], own: str | None) -> Any:
    """Return the harness's task manager after reading the given tasks."""
    with _errors_of_harness("read"):
        if own is not None and not os.path.isdir(own):
            raise DataError(f"--task-path {own} is not a folder")
        manager = import_module("lm_eval.tasks").TaskManager(include_path=own, include_defaults=own is None)
        known = set(manager.all_tasks)
        unknown = [name for name in tasks if name not in known and "*" not in name]
        if unknown:
            there = f"{own} has {', '.join(sorted(known)[:10]) or 'none'}" if own else "see lm-eval ls tasks"
            raise DataError(f"there is no task {unknown[0]!r}; {there}")
        manager.load(list(tasks))
    return manager


def _measure(lm: ShardwiseLM, manager: Any, tasks: Sequence[str], options: dict[str, Any], *, log_samples: bool) -> Any:
    with _errors_of_harness("measured"):
        return import_module("lm_eval").simple_evaluate(
            model=lm,
            tasks=list(tasks),
            bootstrap_iters=_BOOTSTRAP_DRAWS,
            task_manager=manager,
            log_samples=log_samples,
            **options,
        )


def _tables(report: Any) -> Iterator[str]:
    make = import_module("lm_eval.utils").make_table
    yield make(report)
    if report.get("groups"):
        yield make(report, "groups")


def _numbers(report: Any) -> dict[str, float]:
    """Return the results of all tasks by names such as ``arc_easy/acc.none``; MLflow's names have no commas."""
    return {
        f"{task}/{name.replace(',', '.')}": float(value)
        for task, results in report["results"].items()
        for name, value in results.items()
        if isinstance(value, int | float)
    }


def _write(path: str | PathLike[str], report: Any) -> None:
    text = json.dumps(report, indent=2, default=str, ensure_ascii=False) + "\n"
    write_output(path, lambda file: file.write(text.encode()), flag="--output")
