"""The command ``completion``."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tyro

from shardwise.cli.arguments import Arguments, FlagReader
from shardwise.training.bounds import kind_of


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

        classes = {
            name: getattr(import_module(f"shardwise.cli.{command.module}"), command.arguments)
            for name, command in COMMANDS.items()
        }
        if self.shell == "fish":
            # tyro's script gives the flags to Python as one argument, which Linux limits to 128 KiB.
            for name, command in COMMANDS.items():
                print(f"complete -c shardwise -n __fish_use_subcommand -xa {name} -d '{command.summary}'")
                print("\n".join(_fish_flags(name, classes[name])))
            return
        conf = tyro.conf
        union: Any = Union[  # noqa: UP007  # its members are not known before
            tuple(Annotated[cls, conf.subcommand(name=name, prefix_name=False)] for name, cls in classes.items())
        ]
        arguments = ["--tyro-write-completion", self.shell, "-"]
        tyro.cli(union, prog="shardwise", args=arguments, config=(conf.DisallowNone,))


def _fish_flags(command: str, cls: type) -> Iterator[str]:
    for flag, argument in FlagReader(cls).flags.items():
        kind = kind_of(argument.annotation)
        kind = get_args(kind)[0] if get_origin(kind) is tuple else kind
        choices = " ".join(map(str, get_args(kind))) if get_origin(kind) is Literal else ""
        value = f" -xa '{choices}'" if choices else "" if kind is bool else " -r"
        yield f"complete -c shardwise -n '__fish_seen_subcommand_from {command}' -l {flag[2:]}{value}"
