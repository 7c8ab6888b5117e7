"""Each shell's own completion finds commands, flags and values in the script that we print."""

import shutil
import subprocess

import pytest

from shardwise.cli.main import COMMANDS, main

# Asks for the words after the Tab key, as the shell does, and prints them.
BASH = """
. ./script
COMP_WORDS=(%(line)s) COMP_LINE="%(line)s"
COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_POINT=${#COMP_LINE} COMPREPLY=()
$(complete -p shardwise | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%%s\\n' "${COMPREPLY[@]}"
"""
ASK = {"bash": BASH, "fish": ". ./script; complete -C '%(line)s' | string split -f 1 \\t"}


@pytest.mark.parametrize("shell", ASK)
def test_words_that_complete_a_line(capsys, tmp_path, shell):
    assert main(["completion", shell]) == 0
    script, error = capsys.readouterr()
    assert error == ""
    (tmp_path / "script").write_text(script)
    assert all(name in script for name in COMMANDS)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    for line, words in {
        "shardwise fi": ["finetune"],
        "shardwise import-": ["import-hf", "import-megatron"],
        "shardwise train --training.st": ["--training.steps"],
        "shardwise train --track w": ["wandb"],
        "shardwise eval --track ml": ["mlflow"],
        "shardwise plan fi": ["finetune"],
        "shardwise plan finetune --lora-dr": ["--lora-dropout"],
        "shardwise plan --rank": ["--rank", "--ranks", "--ranks-per-host"],
        "shardwise chat run": [],
        "shardwise doctor --exp": ["--explain"],
        "shardwise doctor dpo --recorded": ["--recorded-steps"],
    }.items():
        command = [shell, "-c", ASK[shell] % {"line": line}]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert sorted({*done.stdout.split()}) == words, line


def test_a_script_for_zsh_is_one_of_zsh(capsys):
    assert main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#compdef shardwise")
    assert all(name in script for name in COMMANDS)
