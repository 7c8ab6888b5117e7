"""Runs and commands: settings, tasks, saving, plan, comparison, evaluation.

Each command is a function with keyword arguments::

    from shardwise.run import generate

    print(generate("runs/mine", "Once upon", max_new_tokens=40))

The first access to a function imports PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.doctor.comparison import compare as compare
    from shardwise.plan.fit import fit_run as fit_run
    from shardwise.plan.generation import fit_generation as fit_generation, plan_generation as plan_generation
    from shardwise.plan.plan import plan_run as plan_run
    from shardwise.run.commands.conversion import (
        export_hf as export_hf,
        export_megatron as export_megatron,
        import_hf as import_hf,
        import_megatron as import_megatron,
    )
    from shardwise.run.commands.evaluate import evaluate as evaluate
    from shardwise.run.commands.harness_tasks import evaluate_tasks as evaluate_tasks
    from shardwise.run.commands.many_texts import generate_many as generate_many, score as score
    from shardwise.run.commands.text_generation import chat as chat, generate as generate
    from shardwise.run.commands.tokenization import tokenize as tokenize
    from shardwise.run.commands.train import dpo as dpo, finetune as finetune, train as train

MODULES = {
    "chat": "run.commands.text_generation",
    "compare": "doctor.comparison",
    "dpo": "run.commands.train",
    "evaluate": "run.commands.evaluate",
    "evaluate_tasks": "run.commands.harness_tasks",
    "export_hf": "run.commands.conversion",
    "export_megatron": "run.commands.conversion",
    "finetune": "run.commands.train",
    "fit_generation": "plan.generation",
    "fit_run": "plan.fit",
    "generate": "run.commands.text_generation",
    "generate_many": "run.commands.many_texts",
    "import_hf": "run.commands.conversion",
    "import_megatron": "run.commands.conversion",
    "plan_generation": "plan.generation",
    "plan_run": "plan.plan",
    "score": "run.commands.many_texts",
    "tokenize": "run.commands.tokenization",
    "train": "run.commands.train",
}
"""The module of each function."""

__all__ = sorted(MODULES)


def __getattr__(name: str) -> object:
    if name not in MODULES:
        raise AttributeError(f"module 'shardwise.run' has no attribute {name!r}")
    return getattr(import_module(f"shardwise.{MODULES[name]}"), name)
