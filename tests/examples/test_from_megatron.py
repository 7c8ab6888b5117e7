"""A program written for Megatron gives the losses of one rank at every layout, and its checkpoint opens at another."""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardwise import megatron

FOLDER = Path(__file__).parents[2] / "examples" / "from_megatron"
# Of which layout a checkpoint is, and at which it is loaded.
LAYOUTS = {2: [((2, 1), (1, 2)), ((1, 1), (2, 1)), ((1, 2), (1, 1))], 4: [((2, 2), (2, 1)), ((2, 1), (1, 2))]}
# The losses of three steps on one rank, and that of the first batch with the weights after them.
ONE_RANK = [4.1528683, 3.9960125, 3.7954011]
AFTER_THREE_STEPS = 3.5971997


@contextmanager
def program():
    """The program as a module; importing it puts Megatron's names in place."""
    sys.path.append(str(FOLDER))
    try:
        yield importlib.import_module("train_gpt")
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("train_gpt", None)
        megatron.uninstall()


@pytest.mark.ranks(1, 2, 4, slow=(4,))
def test_losses_are_those_of_one_rank_and_a_checkpoint_opens_at_another_layout(group, tmp_path):
    with program() as train_gpt:
        for number, ((tp, pp), (other_tp, other_pp)) in enumerate(LAYOUTS.get(group.size(), [((1, 1), (1, 1))])):
            folder = str(tmp_path / str(number))
            losses = train_gpt.train(tp, pp, steps=3, save=folder)
            assert losses == pytest.approx(ONE_RANK, rel=2e-6), (tp, pp)
            again = train_gpt.train(other_tp, other_pp, steps=1, load=folder)
            assert again == pytest.approx([AFTER_THREE_STEPS], rel=2e-6), (other_tp, other_pp)
