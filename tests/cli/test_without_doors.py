"""Every command runs where Megatron's names cannot be imported: the engine stands by itself."""

from __future__ import annotations

import argparse
import json
import pkgutil
from pathlib import Path

import pytest
from harness.program import run
from storage.adapters.tiny_models import save_model

import shardwise
from shardwise.data.tokenizer import Tokenizer

DOORS = [
    "shardwise.parallel_state",
    "shardwise.tensor_parallel",
    *(
        module.name
        for module in pkgutil.walk_packages(shardwise.__path__, "shardwise.")
        if module.name.split(".")[1] == "megatron"
    ),
]

# One process for all commands, since most of the time goes into loading PyTorch; it prints each command's exit code.
CALL_EACH = """
import json, sys
from shardwise.cli.main import main
for argv in json.loads(sys.argv[1]):
    print("exit code", argv[0], main(argv), flush=True)
assert "torch" in sys.modules
opened = [name for name in sys.argv[2].split() if sys.modules.get(name) is not None]
assert not opened, opened
"""


def test_the_list_has_every_door():
    assert {"shardwise.megatron", "shardwise.megatron.core.models.transformer_models"} <= set(DOORS)
    done = run("-c", "import shardwise.tensor_parallel", exit_code=1, TEST_WITHOUT_MODULES=" ".join(DOORS))
    assert "import of shardwise.tensor_parallel halted; None in sys.modules" in done.stderr
    done = run("-c", "import shardwise.tensor_parallel", exit_code=1, TEST_WITHOUT_MODULES="shardwise.megatron")
    assert "'shardwise.megatron' is not a package" in done.stderr


@pytest.mark.slow
def test_commands(tmp_path):
    text = Path(argparse.__file__).read_text()[:20_000]
    (tmp_path / "text.txt").write_text(text)
    save_model("llama", tmp_path / "base", vocab_size=301)
    Tokenizer.train([text], 290).save(tmp_path / "base")
    train = ("--data", str(tmp_path / "text.txt"), "--device", "cpu", "--model.sequence-length", "16")
    train += ("--training.steps", "2", "--training.global-batch-size", "2")
    small = (
        "--model.num-layers",
        "2",
        "--model.hidden-size",
        "16",
        "--model.num-heads",
        "2",
        "--model.vocab-size",
        "290",
    )
    trained = str(tmp_path / "trained")
    commands = [
        ["train", "--out", trained, *train, *small],
        ["generate", trained, "--prompt", "def ", "--max-new-tokens", "3"],
        ["export-hf", trained, "--out", str(tmp_path / "exported")],
        ["finetune", str(tmp_path / "base"), "--out", str(tmp_path / "tuned"), *train, "--lora-rank", "2"],
        ["import-hf", str(tmp_path / "base"), "--out", str(tmp_path / "imported")],
    ]
    # The picture takes as long as the steps.
    variables = {"SHARDWISE_CACHE": tmp_path / "cache", "TEST_WITHOUT_MODULES": " ".join([*DOORS, "matplotlib"])}
    done = run("-c", CALL_EACH, json.dumps(commands), " ".join(DOORS), **variables)
    codes = [line for line in done.stdout.splitlines() if line.startswith("exit code")]
    assert codes == [f"exit code {command[0]} 0" for command in commands], done.report()
