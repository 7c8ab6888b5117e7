"""Runs and the work of commands: settings, tasks, saving, plan, comparison, evaluation.

Each command's work is a function here, with keyword arguments::

    from shardwise.run import generate

    print(generate("runs/mine", "Once upon", max_new_tokens=40))

PyTorch is imported with the first function that is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.run.commands.conversation import chat as chat
    from shardwise.run.commands.text_generation import generate as generate

_MODULES = {
    "chat": "commands.conversation",
    "generate": "commands.text_generation",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'shardwise.run' has no attribute {name!r}")
    return getattr(import_module(f"shardwise.run.{_MODULES[name]}"), name)
