"""How many of our functions lie between a flag and the layer that reads it."""

from __future__ import annotations

import pytest
from harness.calls import stacks_at

import shardwise.run.run  # noqa: F401  # Or its imports would be counted through too, which takes a while.
from shardwise.cli.main import main

READERS = {
    "--parallel.sequence-parallel": "nn/column.py:ColumnLinear.__init__",
    "--training.loss": "models/language_model.py:LanguageModel.fuses_output_layer_and_loss",
}


@pytest.mark.slow
def test_from_a_flag_to_the_layer_that_reads_it(tmp_path, monkeypatch):
    """Counted are the functions of the package on the stack, from the command's entry to the first that has the value.

    Both of these are counted too. ``--parallel.sequence-parallel`` becomes an argument of the parallel layers within a
    transformer layer when they are made, and ``--training.loss`` is read in each step, by the model. One rank is
    enough: the same functions make and train the model on several.
    """
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("".join(f"line {number} of a short text\n" for number in range(400)))
    flags = {
        "data": tmp_path / "text.txt", "out": tmp_path / "run", "device": "cpu",
        "model.num-layers": 1, "model.hidden-size": 16, "model.vocab-size": 300, "model.sequence-length": 16,
        "training.steps": 1, "training.global-batch-size": 1, "training.loss": "plain",
    }  # fmt: skip
    argv = ["train", "--parallel.sequence-parallel", *(f"--{name}={value}" for name, value in flags.items())]
    codes: list[int] = []
    stacks = stacks_at(set(READERS.values()), lambda: codes.append(main(argv)))
    assert codes == [0]
    for flag, reader in READERS.items():
        stack = stacks[reader]
        assert stack[0] == "cli/main.py:main"
        assert len(stack) <= 12, (flag, *stack)
