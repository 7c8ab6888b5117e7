"""The ``shardwise`` command, which runs a subcommand in this process or in ranks that it starts.

Any command can start with closed standard streams. Training also continues when its outputs lose their readers.
"""

import signal


class SignalsNoted:
    """Context that notes SIGINT, SIGTERM and SIGHUP, and ends the process with 128 plus the signal's number at its end.

    An exception of a signal handler in the middle of an import ends in a traceback, or crashes a C extension. The class
    is here because the module that handles signals later has imports itself. Ignored signals (``nohup``) stay ignored.
    Outside the main thread nothing changes.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._before: list[tuple[int, object]] = []

    def __enter__(self) -> "SignalsNoted":
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            signum = getattr(signal, name, None)
            # None as a handler means that it was not set from Python; it cannot be restored.
            if signum is None or (before := signal.getsignal(signum)) in (signal.SIG_IGN, None):
                continue
            try:
                signal.signal(signum, self._note)
            except ValueError:
                break
            self._before.append((signum, before))
        return self

    def __exit__(self, *_: object) -> None:
        for signum, before in self._before:
            signal.signal(signum, before)  # type: ignore[arg-type]  # what getsignal returned
        if self.signum:
            raise SystemExit(128 + self.signum)

    def hand_over(self) -> None:
        """Raise the noted signal, for the handlers that a block inside this context has installed."""
        signum, self.signum = self.signum, 0
        if signum:
            signal.raise_signal(signum)

    def _note(self, signum: int, _: object) -> None:
        self.signum = self.signum or signum


with SignalsNoted():
    import contextlib
    import importlib
    import os
    import sys
    import threading
    from collections.abc import Iterator, Mapping, Sequence
    from dataclasses import dataclass, field
    from functools import partial
    from typing import Any, TextIO, cast

    import shardwise
    from shardwise.cli.arguments import Arguments, LaunchArguments, parse_command
    from shardwise.cli.launch import launch_ranks, shardwise_command
    from shardwise.cli.reporting import RankEnvironment, print_note, run_command
    from shardwise.core.errors import ConfigError
    from shardwise.core.processes import check_switches
    from shardwise.run.processes.stopping import Interrupted, start_guard
    from shardwise.training.bounds import nearest


@dataclass(frozen=True)
class Command:
    """A subcommand.

    ``module`` of ``shardwise.cli`` has the class of its arguments, or those of its kinds, by the word after its name.
    """

    module: str
    arguments: str
    summary: str
    kinds: Mapping[str, str] = field(default_factory=dict)


COMMANDS = {
    "demo": Command("training", "DemoArguments", "train a small GPT on two local ranks, in about a minute"),
    "train": Command("training", "TrainArguments", "train a GPT on your text, on any number of ranks"),
    "finetune": Command(
        "training", "FinetuneArguments", "fine-tune a Hugging Face model, all weights or LoRA adapters"
    ),
    "dpo": Command("training", "DpoArguments", "fine-tune on preferences: pairs of a better and a worse answer"),
    "plan": Command(
        "plan",
        "PlanArguments",
        "show what a run needs of memory and network, and which layouts fit",
        {
            "train": "PlanArguments",
            "finetune": "FinetunePlanArguments",
            "dpo": "DpoPlanArguments",
            "generate": "GeneratePlanArguments",
        },
    ),
    "doctor": Command(
        "doctor",
        "DoctorArguments",
        "find the first wrong module of a parallel run, of any model",
        {
            "train": "DoctorTrainArguments",
            "finetune": "DoctorFinetuneArguments",
            "dpo": "DoctorDpoArguments",
            "--explain": "DoctorExplainArguments",
        },
    ),
    "generate": Command("inference", "GenerateArguments", "continue one text, or many, with a trained checkpoint"),
    "score": Command("inference", "ScoreArguments", "measure the log-probability of each token of your texts"),
    "chat": Command("inference", "ChatArguments", "talk with a model, by its own chat template"),
    "eval": Command("inference", "EvalArguments", "measure a model on your data: loss, perplexity, bits per byte"),
    "compare": Command(
        "compare", "CompareArguments", "find the first step where two runs differ, and whether rounding explains it"
    ),
    "tokenize": Command("conversion", "TokenizeArguments", "write text as token files, which train and Megatron read"),
    "import-hf": Command("conversion", "ImportArguments", "convert a Hugging Face folder to a checkpoint"),
    "import-megatron": Command(
        "conversion", "ImportMegatronArguments", "convert a checkpoint of Megatron to a checkpoint"
    ),
    "export-hf": Command("conversion", "ExportArguments", "write a checkpoint as a Hugging Face folder"),
    "export-megatron": Command("conversion", "ExportMegatronArguments", "write a checkpoint as one of Megatron"),
    "conformance": Command("conformance", "ConformanceArguments", "check a library for known tensor-parallel bugs"),
    "env": Command("env", "EnvArguments", "show versions, devices, backends and fast paths"),
    "completion": Command("completion", "CompletionArguments", "complete commands and flags in bash, zsh or fish"),
}
# Of help: what a newcomer needs, and the rest by purpose.
_PURPOSES = {
    "first steps": ("demo", "train", "generate", "finetune", "plan"),
    "more training": ("dpo", "tokenize"),
    "use and measure a model": ("chat", "score", "eval"),
    "formats of others": ("import-hf", "export-hf", "import-megatron", "export-megatron"),
    "find faults": ("compare", "doctor", "conformance"),
    "this machine": ("env", "completion"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``shardwise ARGUMENTS``.

    Args:
        argv: the arguments; None means the arguments of the process.

    Returns:
        The exit code: 0, 1 for a failure, 2 for a mistake of the user, 128 plus the number of a signal.
    """
    with SignalsNoted() as noted:
        open_closed_streams()
        arguments = list(sys.argv[1:] if argv is None else argv)
        if "--debug" not in arguments:
            # PyTorch reads this when it is loaded, later. By default it warns about each host name that does not
            # resolve.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        name, *own = arguments or [""]
        is_known = name in COMMANDS
        # The "--" in `torchrun -m shardwise train -- --nproc 2` keeps torchrun from parsing --nproc.
        own = own[1:] if own[:1] == ["--"] else own
        if is_known and own and own[0] in COMMANDS[name].kinds:
            name, own = f"{name} {own[0]}", own[1:]

        run = partial(run_subcommand, name, own, noted) if is_known else partial(_without_command, name)
        return run_command(f"shardwise {name}" if is_known else "shardwise", run, debug="--debug" in arguments)


def run_subcommand(name: str, argv: Sequence[str], noted: SignalsNoted | None = None) -> int:
    """Run ``shardwise NAME ARGUMENTS`` in this process if it is a rank or no others are needed, else in new ranks.

    ``noted`` are signals since the start of the program; they take effect now. The result is the exit code.
    """
    if noted is not None:
        noted.hand_over()
    first, _, kind = name.partition(" ")
    command = COMMANDS[first]
    module = importlib.import_module(f"shardwise.cli.{command.module}")
    arguments_class = getattr(module, command.kinds[kind] if kind else command.arguments)
    try:
        arguments = parse_command(arguments_class, argv, f"shardwise {name}")
    except ConfigError as error:
        late = None if kind else next((word for word in argv if word in command.kinds), None)
        if late is None:
            raise
        mistake = str(error).partition(";")[0]
        raise ConfigError(f"{mistake}; the word {late} goes directly after shardwise {first}") from error
    check_switches()
    try:
        with lasting_outputs() if arguments.lasts else contextlib.nullcontext():
            code: int | None = start_ranks(name, argv, arguments)
            if code is None:
                with guarded(f"shardwise {name}"):
                    work = arguments.work()
                    if work is not None:
                        work()
            return code or 0
    except Interrupted as interruption:
        interruption.note = arguments.resume_hint()
        raise


def start_ranks(command: str, argv: Sequence[str], arguments: Arguments) -> int | None:
    """Start the ranks of a command, unless this process is a rank already or the only one needed.

    Return their exit code, or None if this process must do the work itself. ConfigError if the arguments do not fit the
    number of ranks, or ``--nproc`` differs from the launcher's number.
    """
    if not isinstance(arguments, LaunchArguments):
        arguments.check_early()
        announce(command, arguments)
        return None
    environment = RankEnvironment.read()
    world_size = environment.world_size if environment is not None else arguments.nproc or arguments.num_ranks
    if arguments.nproc not in (None, world_size):
        raise ConfigError(
            f"--nproc asks for {arguments.nproc} ranks, but the launcher started {world_size}; leave --nproc out"
        )
    try:
        arguments.check_world(world_size)
    except ConfigError as error:
        if environment is None or environment.launcher_pid is not None or "MASTER_ADDR" in os.environ:
            raise
        raise ConfigError(
            f"{error} (WORLD_SIZE={world_size} is in the environment; unset it and RANK if no launcher set them)"
        ) from error
    if environment is not None:
        if environment.rank == 0 and environment.reports is None:
            announce(command, arguments, world_size)
        return None
    arguments.check_early()
    announce(command, arguments, world_size)
    if world_size == 1:
        return None
    arguments.prepare(world_size)
    program, name = shardwise_command(*command.split(), *argv), f"shardwise {command}"
    return launch_ranks(
        world_size,
        program,
        command=name,
        debug=arguments.debug,
        resume_hint=arguments.resume_hint,
        once_started=arguments.import_hint,
    )


def announce(command: str, arguments: Arguments, world_size: int = 1) -> None:
    """Print what begins, because importing PyTorch takes seconds; nothing if it is imported, or for a program."""
    if "torch" not in sys.modules and not getattr(arguments, "json", False) and arguments.begins():
        ranks = f" on {world_size} ranks" if world_size > 1 else ""
        print_note(f"shardwise {command}", f"{arguments.begins()}{ranks}; PyTorch is loaded first")


@contextlib.contextmanager
def guarded(command: str) -> Iterator[None]:
    """End the command on a signal in the block even if it is busy in C++ code, unless it is a rank, which has a guard.

    Outside the main thread, where Python handles no signals, nothing changes.
    """
    is_rank = RankEnvironment.read() is not None
    if is_rank or threading.current_thread() is not threading.main_thread():
        yield
        return
    end_guard = start_guard(None, last_words=lambda: print_note(command, "interrupted"))
    try:
        yield
    finally:
        end_guard()


def open_closed_streams() -> None:
    """Open ``/dev/null`` for each standard stream that is closed (``>&-``).

    Otherwise a file that is opened later would get the stream's descriptor, and libraries would print into that file.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            # The stream's descriptor may belong to another file by now. The new file stays open until the process ends.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))


class LastingOutput:
    """Output stream that discards text instead of raising once it cannot be written, after one line to ``other``."""

    def __init__(self, stream: TextIO, other: TextIO, name: str) -> None:
        self._stream, self._other, self._name = stream, other, name

    def write(self, text: str) -> int:
        with self._loss_accepted():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._loss_accepted():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _loss_accepted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # Discard the buffered text and all later text.
            with open(os.devnull, "wb") as sink:
                os.dup2(sink.fileno(), self._stream.fileno())
            with contextlib.suppress(OSError):
                print(
                    f"{self._name} cannot be written any more ({error.strerror}); the run goes on",
                    file=self._other,
                    flush=True,
                )


@contextlib.contextmanager
def lasting_outputs() -> Iterator[None]:
    """Keep a run alive in the block when its outputs fail, because a pager exits or a disk is full."""
    out, err = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, LastingOutput(out, err, "standard output"))
    sys.stderr = cast(TextIO, LastingOutput(err, out, "standard error"))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err


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
    purposes = "\n\n".join(
        f"{purpose}:\n" + "\n".join(f"  {name:<{width}}  {COMMANDS[name].summary}" for name in names)
        for purpose, names in _PURPOSES.items()
    )
    return (
        "usage: shardwise COMMAND [options]\n\n"
        "Megatron-style parallelism for PyTorch, checked against one rank.\n\n"
        f"{purposes}\n\n"
        "shardwise COMMAND --help explains a command, shardwise --version prints the version."
    )
