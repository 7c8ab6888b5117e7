"""The table of planted faults is complete and plantable; ``test_diagnosis.py`` shows that they are found."""

from __future__ import annotations

import pytest
import torch
from doctor.planted import KINDS, OUR_FAULTS, SCRIPTS, SOUND, OurFault
from harness.faults import Fault, planted

from shardwise.core.topology import Groups
from shardwise.run.build import build_model
from shardwise.run.settings import ModelSettings, Settings


@pytest.mark.parametrize("fault", OUR_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_ours_can_be_planted(fault: OurFault):
    path, text = planted(Fault(fault.name, fault.function, fault.old, fault.new, ""))
    assert text != path.read_text()


@pytest.mark.ranks(1)
def test_answers_of_our_faults_are_names_of_the_model(group):
    groups = Groups(tp=group, dp=group)
    for fault in OUR_FAULTS:
        architecture = "gpt" if "gpt" in fault.arguments else "llama"
        settings = Settings(
            data=("stdlib",), model=ModelSettings(architecture, num_layers=2, hidden_size=64, num_heads=4)
        )
        model = build_model(settings, 301, groups=groups, device=torch.device("meta"))
        names = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
        assert set(fault.modules) <= names, fault.name


def test_the_tables_are_complete():
    cases = [*SCRIPTS, *OUR_FAULTS]
    assert len({case.name for case in [*cases, *SOUND]}) == len(cases) + len(SOUND)
    assert {script.kind for script in SCRIPTS} == set(KINDS)
    assert {fault.kind for fault in OUR_FAULTS} == set(KINDS)
    assert all(1 <= len(case.modules) <= 3 for case in cases)
    assert {script.kind for script in SOUND} == {""}
    for scripts in (SCRIPTS, SOUND):
        assert {script.family for script in scripts} == {"by hand", "dtensor", "transformers"}
