"""The ``shardwise`` command: finds the subcommand, and imports nothing else."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import shardwise
from shardwise.cli.reporting import nearest, run_command
from shardwise.cli.streams import lasting_outputs, open_closed_streams
from shardwise.errors import ConfigError


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        summary: one line for ``shardwise --help``.
    """

    summary: str


COMMANDS = {
    "demo": Command("train a small GPT on two local ranks, in about a minute"),
    "train": Command("train a GPT on your text, on any number of ranks"),
    "finetune": Command("fine-tune a Hugging Face model, all weights or LoRA adapters"),
    "generate": Command("continue a text with a trained checkpoint"),
    "import-hf": Command("make a checkpoint of a Hugging Face folder"),
    "export-hf": Command("write a checkpoint as a Hugging Face folder"),
    "env": Command("show versions, devices, backends and fast paths"),
}
"""Each is the module ``shardwise.cli.NAME`` (with ``_`` for ``-``), which has ``main(argv: list[str]) -> int``."""

# Commands that go on when nobody reads what they print.
_RUNS = ("train", "finetune", "demo")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``shardwise ARGUMENTS``.

    Args:
        argv: the arguments; those of the process if None.

    Returns:
        The exit code: 0, 2 for a mistake of the user's, 1 for a failure, 128 and the number of a signal.
    """
    open_closed_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--debug" not in arguments:
        # Read when PyTorch is loaded, which is later: it would warn of every host name that has no answer.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    name = arguments[0] if arguments else ""
    command = COMMANDS.get(name)
    if command is None:
        return run_command("shardwise", lambda: _without_command(name))

    # `torchrun -m shardwise train -- --nproc 2` keeps torchrun from taking the flag for its own.
    own = arguments[2:] if arguments[1:2] == ["--"] else arguments[1:]

    def body() -> int:
        module = importlib.import_module(f"shardwise.cli.{name.replace('-', '_')}")
        # Help is read by people, who may stop; a run of hours is not for its output.
        lasts = name in _RUNS and not {"-h", "--help"} & set(own)
        with lasting_outputs() if lasts else contextlib.nullcontext():
            code: int = module.main(own)
        return code

    return run_command(f"shardwise {name}", body, debug="--debug" in arguments)


def _without_command(word: str) -> int:
    if word == "--version":
        print(f"shardwise {shardwise.__version__}")
    elif word in ("-h", "--help", "help"):
        print(_help())
    elif not word:
        print(_help(), file=sys.stderr)
        return 2
    else:
        kind = "option" if word.startswith("-") else "command"
        close = nearest(word, ["--help", "--version"] if kind == "option" else COMMANDS)
        hint = f"did you mean {close}?" if close else f"one of {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown {kind} {word!r}; {hint}")
    return 0


def _help() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    return (
        "usage: shardwise COMMAND [options]\n\n"
        "Tensor parallelism for PyTorch: small, exact, on any device.\n\n"
        f"commands:\n{rows}\n\n"
        "shardwise COMMAND --help explains a command, shardwise --version prints the version."
    )
