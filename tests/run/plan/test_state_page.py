"""The table of docs/accounting.md about weights, gradients and state is what ranks hold and send."""

from __future__ import annotations

import itertools
import re

import pytest
from models.transformer.accounting_page import PAGE
from run.plan.test_state import a_step, bytes_of, settings_of, state_tensors

_SMALL = 100


def rows():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    lines = lines[lines.index("## Weights, gradients and optimizer state") :]
    header = next(number for number, line in enumerate(lines) if line.startswith("| setting |"))
    _, _, *cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in itertools.takewhile(bool, lines[header:])
    ]
    return cells


def evaluated(formula, letters):
    expression = formula.strip("`").replace("·", "*").replace("/", "//")
    return eval(expression, {"__builtins__": {}}, dict(letters))


def settings_for(name):
    dtype, *rest = name.split(", ")
    return settings_of(
        dtype=dtype,
        optimizer="muon" if "Muon" in rest else "adamw",
        zero=int("zero 1" in rest),
        tp=1 + (len(rest) > 0 and rest[0].startswith("one ")),
    )


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_every_row_is_what_ranks_hold_and_send(group):
    for name, *formulas in rows():
        settings = settings_for(name)
        trainer, groups, counter = a_step(settings)
        params = list(trainer.model.parameters())
        buffers = getattr(trainer.gradients, "buffers", [])
        kept = [(tensor, is_copy) for tensor, is_copy in state_tensors(trainer.optimizer) if tensor.dim()]
        held = [
            bytes_of(params),
            bytes_of(buffers or [param.grad for param in params]),
            # A view of what a rank owns lies in memory that is not its own.
            sum(tensor.nbytes for tensor, is_copy in kept if is_copy),
            sum(tensor.nbytes for tensor, is_copy in kept if not is_copy),
        ]
        owned = sum(share.data.numel() for share in trainer.zero.parameters.shares.values()) if trainer.zero else 0
        letters = {
            "n": sum(param.numel() for param in params),
            "p": sum(buffer.numel() for buffer in buffers),
            "o": owned,
            "d": groups.dp.size(),
            "m": 0,
            "w": 0,
        }
        matrices = getattr(getattr(trainer.optimizer, "optimizer", trainer.optimizer), "_parts", {})
        letters["m"] = sum(param.numel() for param in matrices)
        assert held == [evaluated(formula, letters) for formula in formulas[:4]], name
        if groups.dp.size() == 1:
            assert formulas[4] == "nothing"
            continue
        sent = sorted((each.name, each.num_bytes) for each in counter.launches if each.num_bytes > _SMALL)
        # What comes back of Muon's whole matrices is known where the matrices are dealt out.
        dealt = {size for kind, size in sent if kind == "all_to_all"} - {4 * letters["m"]}
        letters["w"] = dealt.pop() // 4 if dealt else letters["m"]
        stated = re.findall(r"`1 . (\w+) ([^`]+)`", formulas[4])
        assert sent == sorted((kind, evaluated(formula, letters)) for kind, formula in stated), name
