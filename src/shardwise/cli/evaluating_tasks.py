"""Measure a model by tasks of lm-evaluation-harness: what the ranks of ``shardwise eval --tasks`` do."""

from __future__ import annotations

import json
import os
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from shardwise.cli.eval import EvalArguments
from shardwise.core.communication.agreement import agree
from shardwise.core.errors import CheckpointError, DataError, ShardwiseError
from shardwise.core.files import write_atomically
from shardwise.data.tokenizer import Tokenizer
from shardwise.data.tokenizer.declared_tokens import DeclaredTokens
from shardwise.models.gpt import GPT
from shardwise.run.commands.opened_model import OpenCheckpoint
from shardwise.run.commands.text_generation import open_causal
from shardwise.run.evaluation.lm_harness import ShardwiseLM, harness
from shardwise.run.processes.ranks import Ranks, open_ranks

# The harness's own number takes minutes on one core for what has no closed form.
_BOOTSTRAP_DRAWS = 1000


def evaluate_tasks(arguments: EvalArguments) -> None:
    """Print what the model makes of the tasks; every rank calls.

    Raises:
        ShardwiseError: see ``open_causal``; lm_eval is missing, or a task cannot be read or measured; on every rank.
    """
    # Its processes would be forked from one with threads.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    with open_ranks(arguments.device, timeout=arguments.timeout) as ranks:

        def prepare() -> tuple[OpenCheckpoint, Tokenizer]:
            harness()
            return open_causal(arguments.checkpoint, arguments.adapter, ranks.world_size)

        opened, tokenizer = agree(prepare, group=ranks.control)
        manager: Any = None
        with ranks.phase("reading the tasks"):
            # One rank after the first finds what that has made of the data.
            for is_turn in (ranks.is_first, not ranks.is_first):
                read = agree(partial(_tasks, arguments) if is_turn else lambda: None, group=ranks.control)
                manager = read or manager
        model = opened.load_model(ranks)
        assert isinstance(model, GPT)
        lm = harness_model(opened, tokenizer, model, arguments.batch_size)
        with ranks.phase("measuring", limited=True):
            report = agree(lambda: _measure(arguments, lm, manager), group=ranks.control)
        agree(lambda: _show(arguments, report, ranks), group=ranks.control)


def harness_model(opened: OpenCheckpoint, tokenizer: Tokenizer, model: GPT, batch_size: int) -> ShardwiseLM:
    """The model as the harness asks for one, with what its folder says of tokens and chats."""
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


def _tasks(arguments: EvalArguments) -> Any:
    """The harness's manager of tasks, once it has read those that are asked for."""
    own = arguments.task_path
    try:
        if own is not None and not os.path.isdir(own):
            raise DataError(f"--task-path {own} is not a folder")
        manager = import_module("lm_eval.tasks").TaskManager(include_path=own, include_defaults=own is None)
        known = set(manager.all_tasks)
        unknown = [name for name in arguments.tasks if name not in known and "*" not in name]
        if unknown:
            there = f"{own} has {', '.join(sorted(known)[:10]) or 'none'}" if own else "see lm-eval ls tasks"
            raise DataError(f"there is no task {unknown[0]!r}; {there}")
        manager.load(list(arguments.tasks))
    except ShardwiseError:
        raise
    except Exception as error:  # whatever the harness, its data sets and tasks of strangers may raise
        reason = " ".join(str(error).split())[:500]
        raise DataError(f"the tasks cannot be read: {type(error).__name__}: {reason}") from error
    return manager


def _measure(arguments: EvalArguments, lm: ShardwiseLM, manager: Any) -> Any:
    """What the harness reports; on some ranks nothing."""
    try:
        return import_module("lm_eval").simple_evaluate(
            model=lm,
            tasks=list(arguments.tasks),
            num_fewshot=arguments.num_fewshot,
            limit=arguments.limit,
            apply_chat_template=arguments.chat,
            bootstrap_iters=_BOOTSTRAP_DRAWS,
            task_manager=manager,
            log_samples=arguments.output is not None,
        )
    except ShardwiseError:
        raise
    except Exception as error:  # see above
        reason = " ".join(str(error).split())[:500]
        raise DataError(f"the tasks cannot be measured: {type(error).__name__}: {reason}") from error


def _show(arguments: EvalArguments, report: Any, ranks: Ranks) -> None:
    if not ranks.is_first:
        return
    print(import_module("lm_eval.utils").make_table(report))
    if report.get("groups"):
        print(import_module("lm_eval.utils").make_table(report, "groups"))
    if arguments.output is not None:
        text = json.dumps(report, indent=2, default=str, ensure_ascii=False) + "\n"
        path = Path(arguments.output)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lambda file: file.write(text.encode()))
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
