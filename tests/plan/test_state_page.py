"""The table of docs/memory.md about weights, gradients and state is what ranks hold and send, and the plan."""

from __future__ import annotations

import re

import pytest
from models.transformer.accounting_page import table
from plan.planned_models import planned, settings_of, state_of, state_tensors
from plan.test_state import a_step, workload_for

_SMALL = 100


def rows():
    return [[name, *cells.values()] for name, cells in table("setting", "state").items()]


def evaluated(formula, letters):
    expression = formula.strip("`").replace("·", "*").replace("/", "//")
    return eval(expression, {"__builtins__": {}}, dict(letters))


def settings_for(name):
    dtype, *rest = name.split(", ")
    return settings_of(
        dtype=dtype,
        model={"num_layers": 1},
        optimizer="muon" if "Muon" in rest else "adamw",
        zero=int("zero 1" in rest),
        tp=1 + (len(rest) > 0 and rest[0].startswith("one ")),
    )


def collectives(plan):
    """Of the data-parallel ranks, as ``(name, bytes)``."""
    calls = ((call, times) for call, times in plan.calls.items() if call.axis == "dp" and call.num_bytes > _SMALL)
    return sorted((call.name, call.num_bytes) for call, times in calls for _ in range(times))


@pytest.fixture
def plans():
    """For each row the state and the collectives that are planned for two ranks."""
    found = {}
    for name, *_ in rows():
        for rank, plan in planned(workload_for(settings_for(name)), 2, range(2)).items():
            step = plan.step
            found[name, rank] = [step.weights, step.gradients, step.masters, step.optimizer], collectives(plan)
    return found


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_every_row_is_what_ranks_hold_and_send(group, plans):
    for name, *formulas in rows():
        settings = settings_for(name)
        trainer, groups, counter = a_step(settings)
        held = state_of(trainer)
        planned_bytes, planned_collectives = plans[name, group.rank()]
        assert planned_bytes == list(held.values()), name
        params, buffers = list(trainer.model.parameters()), getattr(trainer.gradients, "buffers", [])
        # AdamW's numbers of steps.
        held["optimizer"] -= sum(tensor.nbytes for tensor, _ in state_tensors(trainer.optimizer) if tensor.dim() == 0)
        letters = {
            "n": sum(param.numel() for param in params),
            "p": sum(buffer.numel() for buffer in buffers),
            "o": sum(share.data.numel() for share in trainer.zero.parameters.shares.values()) if trainer.zero else 0,
            "d": groups.dp.size(),
            "m": 0,
            "w": 0,
        }
        matrices = getattr(getattr(trainer.optimizer, "optimizer", trainer.optimizer), "_parts", {})
        letters["m"] = sum(param.numel() for param in matrices)
        assert list(held.values()) == [evaluated(formula, letters) for formula in formulas[:4]], name
        if groups.dp.size() == 1:
            assert (formulas[4], planned_collectives) == ("nothing", []), name
            continue
        sent = sorted((each.name, each.num_bytes) for each in counter.launches if each.num_bytes > _SMALL)
        assert planned_collectives == sent, name
        # What comes back of Muon's whole matrices is known where the matrices are dealt out.
        dealt = {size for kind, size in sent if kind == "all_to_all"} - {4 * letters["m"]}
        letters["w"] = dealt.pop() // 4 if dealt else letters["m"]
        cells = re.findall(r"`1 . (\w+) ([^`]+)`", formulas[4])
        stated = sorted((kind, evaluated(formula, letters)) for kind, formula in cells)
        # A rank may have no matrix.
        assert sent == [each for each in stated if each[1]], name
