"""The command ``completion``."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, make_dataclass
from importlib import import_module
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tyro
from tyro import conf

from shardwise.cli.arguments import Arguments, FlagReader
from shardwise.training.bounds import kind_of

_FISH_RUNS = """function __shardwise_runs
    set -l words (commandline -poc)
    set -l kind
    contains -- "$words[3]" %s; and set kind $words[3]
    test "$words[2] $kind" = "$argv[1] $argv[2]"
end"""
# tyro's scripts offer files only for arguments of the type Path.
_FILES_ELSE = {
    "bash": """
_shardwise() {
  _tyro_shardwise
  [ -n "${COMPREPLY[*]}" ] || COMPREPLY=()
}
complete -o default -F _shardwise shardwise""",
    "zsh": "(( compstate[nmatches] )) || _files",
}


@dataclass(frozen=True)
class CompletionArguments(Arguments):
    """Print the script that lets a shell complete commands and flags when the Tab key is pressed.

    For bash (in a new shell; needs the package bash-completion):
    shardwise completion bash > ~/.local/share/bash-completion/completions/shardwise

    For zsh, in a folder of $fpath before compinit:
    shardwise completion zsh > ~/.zfunc/_shardwise

    For fish:
    shardwise completion fish > ~/.config/fish/completions/shardwise.fish

    Attributes:
        shell: shell that reads the script.
    """

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional, tyro.conf.arg(metavar="SHELL")]

    def begins(self) -> str:
        return ""

    def work(self) -> None:
        from shardwise.cli.main import COMMANDS

        if self.shell == "fish":
            # tyro's script gives the flags to Python as one argument, which Linux limits to 128 KiB.
            print("\n".join(_fish_lines()))
            return
        arguments = ["--tyro-write-completion", self.shell, "-"]
        classes = {name: _with_kinds(*_classes(name)) for name in COMMANDS}
        with suppress(SystemExit):
            tyro.cli(_one_of(classes), prog="shardwise", args=arguments, config=(conf.DisallowNone,))
        print(_FILES_ELSE[self.shell])


def _classes(name: str) -> tuple[type, dict[str, type]]:
    """Return the class of a command's arguments, and those of its kinds."""
    from shardwise.cli.main import COMMANDS

    command = COMMANDS[name]
    module = import_module(f"shardwise.cli.{command.module}")
    return getattr(module, command.arguments), {kind: getattr(module, name) for kind, name in command.kinds.items()}


def _with_kinds(cls: type, kinds: Mapping[str, type]) -> Any:
    """Return a class of a command's own arguments, and of the words that may follow its name."""
    if not kinds:
        return cls
    words = _one_of({kind: own for kind, own in kinds.items() if not kind.startswith("-")})
    flags = [(kind[2:], conf.FlagCreatePairsOff[bool], False) for kind in kinds if kind.startswith("-")]
    fields: list[Any] = [("kind", Annotated[words, conf.arg(name="")]), *flags]
    return make_dataclass(cls.__name__, fields, bases=(cls,), frozen=True, kw_only=True)


def _one_of(classes: Mapping[str, type]) -> Any:
    """Return the type of one of several subcommands."""
    named = tuple(Annotated[cls, conf.subcommand(name=name, prefix_name=False)] for name, cls in classes.items())
    return Union[named]  # noqa: UP007  # its members are not known before


def _fish_lines() -> Iterator[str]:
    from shardwise.cli.main import COMMANDS

    kinds = dict.fromkeys(kind for command in COMMANDS.values() for kind in command.kinds)
    yield _FISH_RUNS % " ".join(kinds)
    for name, command in COMMANDS.items():
        cls, own_kinds = _classes(name)
        yield f"complete -c shardwise -n __fish_use_subcommand -xa {name} -d '{command.summary}'"
        yield from _fish_flags(name, cls)
        for kind, own in own_kinds.items():
            flag = f"-l {kind[2:]}" if kind.startswith("-") else f"-a {kind}"
            yield f"complete -c shardwise -n '__shardwise_runs {name}; and test (count (commandline -poc)) = 2' {flag}"
            yield from _fish_flags(f"{name} {kind}", own)


def _fish_flags(command: str, cls: type) -> Iterator[str]:
    for flag, argument in FlagReader(cls).flags.items():
        kind = kind_of(argument.annotation)
        kind = get_args(kind)[0] if get_origin(kind) is tuple else kind
        choices = " ".join(map(str, get_args(kind))) if get_origin(kind) is Literal else ""
        value = f" -xa '{choices}'" if choices else "" if kind is bool else " -r"
        yield f"complete -c shardwise -n '__shardwise_runs {command}' -l {flag[2:]}{value}"
