"""A program written for Megatron gives one rank's losses at every layout; a checkpoint of one opens at another."""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardwise import megatron

FOLDER = Path(__file__).parents[2] / "examples" / "from_megatron"
# Of which layout a checkpoint is, and at which it is loaded; the first has no data-parallel ranks.
LAYOUTS = {
    1: [((1, 1), (1, 1))],
    2: [((2, 1), (1, 2)), ((1, 2), (1, 1)), ((1, 1), (2, 1))],
    4: [((2, 2), (2, 1)), ((2, 1), (1, 2))],
}
# The losses of three steps on one rank, and that of the first batch with the weights after them.
ONE_RANK = [4.1528683, 3.9960125, 3.7954011]
AFTER_THREE_STEPS = 3.5971997
# Data-parallel ranks drop other elements.
WITH_DROPOUT = [4.1521740, 3.9948602, 3.8053014]


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


@pytest.mark.slow
@pytest.mark.ranks(1, 2, 4)
def test_losses_are_those_of_one_rank_and_a_checkpoint_opens_at_another_layout(group, tmp_path):
    layouts = LAYOUTS[group.size()]
    with program() as train_gpt:
        assert train_gpt.train(*layouts[0][0], steps=3, dropout=0.1) == pytest.approx(WITH_DROPOUT, rel=2e-6)
        for number, (saved, other) in enumerate(layouts):
            folder = str(tmp_path / str(number))
            losses = train_gpt.train(*saved, steps=3, save=folder)
            assert losses == pytest.approx(ONE_RANK, rel=2e-6), saved
            again = train_gpt.train(*other, steps=1, load=folder)
            assert again == pytest.approx([AFTER_THREE_STEPS], rel=2e-6), other
