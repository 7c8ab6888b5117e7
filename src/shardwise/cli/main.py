"""The ``shardwise`` command: finds the subcommand, and imports nothing else."""

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import shardwise
from shardwise.cli.reporting import run_command
from shardwise.cli.start import lasting_outputs, open_closed_streams
from shardwise.core.errors import ConfigError
from shardwise.core.processes import check_switches
from shardwise.run.processes.stopping import Interrupted
from shardwise.training.bounds import nearest


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        module: the module of ``shardwise.cli`` that has the class of its arguments.
        arguments: the name of that class.
        summary: one line for ``shardwise --help``.
    """

    module: str
    arguments: str
    summary: str


COMMANDS = {
    "demo": Command("trainings", "DemoArguments", "train a small GPT on two local ranks, in about a minute"),
    "train": Command("trainings", "TrainArguments", "train a GPT on your text, on any number of ranks"),
    "finetune": Command(
        "trainings", "FinetuneArguments", "fine-tune a Hugging Face model, all weights or LoRA adapters"
    ),
    "dpo": Command("trainings", "DpoArguments", "fine-tune on preferences: pairs of a better and a worse answer"),
    "distill": Command(
        "trainings", "DistillArguments", "fine-tune on what a larger model of the same tokenizer predicts"
    ),
    "plan": Command(
        "inspection", "PlanArguments", "show what a run needs of memory and network, and which layouts fit"
    ),
    "generate": Command("inference", "GenerateArguments", "continue a text with a trained checkpoint"),
    "chat": Command("inference", "ChatArguments", "talk with a model, by its own chat template"),
    "eval": Command(
        "inference", "EvalArguments", "measure a model on your data: loss, perplexity, bits per byte; accuracy"
    ),
    "classify": Command(
        "inference", "ClassifyArguments", "say what the labels of texts are, with a fine-tuned classifier"
    ),
    "compare": Command("inspection", "CompareArguments", "show where two runs part: step, tensor and element"),
    "import-hf": Command("conversion", "ImportArguments", "make a checkpoint of a Hugging Face folder"),
    "export-hf": Command("conversion", "ExportArguments", "write a checkpoint as a Hugging Face folder"),
    "env": Command("inspection", "EnvArguments", "show versions, devices, backends and fast paths"),
}


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
    if name not in COMMANDS:
        return run_command("shardwise", lambda: _without_command(name))
    # `torchrun -m shardwise train -- --nproc 2` keeps torchrun from taking the flag for its own.
    own = arguments[2:] if arguments[1:2] == ["--"] else arguments[1:]
    return run_command(f"shardwise {name}", partial(run_subcommand, name, own), debug="--debug" in arguments)


def run_subcommand(name: str, argv: Sequence[str]) -> int:
    """Run ``shardwise NAME ARGUMENTS``, here if this process is a rank or the only one, else in ranks started here.

    Args:
        name: of the subcommand.
        argv: the arguments after it.

    Returns:
        The exit code.

    Raises:
        SystemExit: help was asked for and printed.
        ShardwiseError: what the user did wrong, or what failed.
    """
    from shardwise.cli.arguments import parse_command
    from shardwise.cli.start import start_ranks

    command = COMMANDS[name]
    module = importlib.import_module(f"shardwise.cli.{command.module}")
    arguments = parse_command(getattr(module, command.arguments), argv, f"shardwise {name}")
    check_switches()
    try:
        with lasting_outputs() if arguments.lasts else contextlib.nullcontext():
            code: int | None = start_ranks(name, argv, arguments)
            if code is None:
                arguments.work()()
            return code or 0
    except Interrupted as interruption:
        interruption.note = arguments.way_on()
        raise


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
