"""The doctor names the module and the kind of each planted fault, and finds none in sound runs."""

from __future__ import annotations

import json
import math
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch.distributed as dist
from doctor.parts import diagnosis_of
from doctor.planted import OUR_FAULTS, SCRIPTS, SOUND, OurFault, Script
from doctor.recorded import record_script
from harness.faults import Fault, plant
from run.compared_runs import TEXT
from run.run_processes import run_commands

from shardwise.doctor.diagnosis import Diagnosis, diagnose

# Faults for which the doctor names another kind, though the right module, and the kind that it names. They cannot be
# told from their tensors.
OTHER_KINDS = {"loss divided by the rank's own labels": "scaled", "vocabulary of the loss offset by one": "unexplained"}


def of_ranks(scripts: tuple[Script, ...], ranks: int) -> list[object]:
    return [pytest.param(script, id=script.name) for script in scripts if script.ranks == ranks]


def diagnosed(script: Script, group: dist.ProcessGroup, folder: Path, *, is_planted: bool) -> Diagnosis | None:
    """Record a program, and diagnose it on the first rank."""
    record_script(script, group, folder, is_planted=is_planted)
    return diagnosis_of(folder, group)


def check_found(script: Script, group: dist.ProcessGroup, folder: Path) -> None:
    diagnosis = diagnosed(script, group, folder, is_planted=True)
    if diagnosis is not None:
        assert diagnosis.first is not None
        assert diagnosis.first.module in script.modules, diagnosis.first.line()
        assert diagnosis.first.kind == OTHER_KINDS.get(script.name, script.kind), diagnosis.first.line()


def check_sound(script: Script, group: dist.ProcessGroup, folder: Path) -> None:
    diagnosis = diagnosed(script, group, folder, is_planted=False)
    assert diagnosis is None or diagnosis.is_sound, [finding.line() for finding in diagnosis.findings]


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.sample(3)
@pytest.mark.parametrize("script", of_ranks(SOUND, 2))
def test_a_sound_program_is_sound(script, group, tmp_path):
    check_sound(script, group, tmp_path)


@pytest.mark.ranks(4)
@pytest.mark.sample(1)
@pytest.mark.parametrize("script", of_ranks(SOUND, 4))
def test_a_sound_program_of_four_ranks_is_sound(script, group, tmp_path):
    check_sound(script, group, tmp_path)


@pytest.mark.ranks(2)
@pytest.mark.sample(8)
@pytest.mark.parametrize("script", of_ranks(SCRIPTS, 2))
def test_a_fault_is_named(script, group, tmp_path):
    check_found(script, group, tmp_path)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("script", of_ranks(SCRIPTS, 4))
def test_a_fault_of_four_ranks_is_named(script, group, tmp_path):
    check_found(script, group, tmp_path)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_without_a_third_recording_and_with_a_parallel_reference(group, tmp_path):
    """The rounding is estimated; a parallel reference is compared rank by rank."""
    script = SCRIPTS[0]
    record_script(script, group, tmp_path / "wrong", is_planted=True)
    record_script(script, group, tmp_path / "sound", is_planted=False)
    dist.barrier(group)
    if group.rank() == 0:
        assert diagnose(tmp_path / "sound/one", tmp_path / "sound/parallel").is_sound
        diagnosis = diagnose(tmp_path / "wrong/one", tmp_path / "wrong/parallel")
        assert diagnosis.first is not None
        assert diagnosis.first.module in script.modules
        assert "estimated" in diagnosis.notes[0]
        assert diagnose(tmp_path / "sound/parallel", tmp_path / "sound/parallel").is_sound
        first = diagnose(tmp_path / "sound/parallel", tmp_path / "wrong/parallel").first
        assert first is not None
        assert first.module in script.modules
    dist.barrier(group)


def run_doctor(folder: Path, fault: Fault | None, *arguments: str, exit_code: int) -> dict[str, object]:
    text = TEXT
    command = ("doctor", "train", "--data", text, "--out", folder / "run", "--json", *arguments)
    flags = dict(pairwise(arguments))
    size = int(flags.get("--nproc", 0)) or math.prod(int(flags.get(axis, 1)) for axis in ("--tp", "--pp", "--cp"))
    ended = run_commands(folder, [command] * size, changed=None if fault is None else partial(plant, fault))
    assert ended[0][0] == exit_code, ended
    return json.loads(ended[0][1][ended[0][1].index("{") :])


def first_finding(fault: Fault, folder: Path, *arguments: str) -> dict[str, str]:
    """Return what the doctor finds first in a run with the fault."""
    found = run_doctor(folder, fault, *arguments, exit_code=1)
    assert isinstance(found["findings"], list)
    first: dict[str, str] = found["findings"][0]
    return first


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", OUR_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_ours_is_named(fault: OurFault, tmp_path):
    first = first_finding(Fault(fault.name, fault.function, fault.old, fault.new, ""), tmp_path, *fault.arguments)
    assert first["module"] in fault.modules, first
    assert first["kind"] == OTHER_KINDS.get(fault.name, fault.kind), first


_SIZES = (
    *("--model.num-layers", "2", "--model.hidden-size", "64", "--model.num-heads", "4"),
    *("--model.sequence-length", "48", "--model.vocab-size", "301"),
    *("--training.steps", "2", "--training.global-batch-size", "4", "--training.micro-batch-size", "1"),
)
# A family of layouts, options and dtypes that no test of exact runs covers: the plain path.
LAYOUTS = {
    "tp": ("--tp", "2"),
    "tp and sequence parallelism, dropout": ("--tp", "2", "--sequence-parallel", "--model.dropout", "0.1"),
    "gpt, a bias of keys": ("--tp", "2", "--model.architecture", "gpt"),
    "overlap": ("--tp", "2", "--sequence-parallel", "--tp-comm-overlap"),
    "key-value copies": ("--tp", "2", "--model.num-query-groups", "1"),
    "stages": ("--pp", "2"),
    "interleaved": (
        "--pp",
        "2",
        "--virtual-stages",
        "2",
        "--pipeline-schedule",
        "interleaved",
        "--model.num-layers",
        "4",
    ),
    "replicas": ("--nproc", "2"),
    "zero 1, bf16": ("--nproc", "2", "--zero", "1", "--training.dtype", "bfloat16"),
    "fsdp": ("--nproc", "2", "--fsdp"),
    "recomputation": ("--tp", "2", "--recompute.granularity", "full"),
    "Muon, bf16": ("--tp", "2", "--optimizer.name", "muon", "--training.dtype", "bfloat16"),
    "many layers": ("--tp", "2", "--sequence-parallel", "--model.num-layers", "12", "--model.hidden-size", "128"),
    # Its first step overflows.
    "fp16": ("--tp", "2", "--training.dtype", "float16"),
    "tp and stages": ("--tp", "2", "--pp", "2"),
    "positions": ("--nproc", "3", "--cp", "3", "--model.sequence-length", "47", "--model.dropout", "0"),
    "positions, zero 1": ("--nproc", "4", "--cp", "2", "--zero", "1"),
    "positions, fsdp": ("--nproc", "4", "--cp", "2", "--fsdp"),
    "positions, tp and sequence parallelism": ("--cp", "2", "--tp", "2", "--sequence-parallel"),
    "experts": ("--nproc", "2", "--ep", "2", "--model.num-experts", "4"),
    "experts, fsdp": ("--nproc", "4", "--ep", "2", "--fsdp", "--model.num-experts", "4"),
    "experts of all ranks, zero 1": (
        *("--nproc", "4", "--tp", "2", "--ep", "4", "--etp", "1", "--zero", "1"),
        *("--model.num-experts", "4"),
    ),
    "experts, positions": ("--nproc", "4", "--ep", "2", "--cp", "2", "--model.num-experts", "4"),
    "tp and zero 1, bf16": ("--nproc", "4", "--tp", "2", "--zero", "1", "--training.dtype", "bfloat16"),
}


_POSITIONS = ("--nproc", "2", "--cp", "2", "--cp-comm-type", "all_gather")
# Faults of ranks that share positions or experts: the layout, where the first wrong tensor is, and the module.
OF_LAYOUTS = {
    ("sequence_view:ContextShard.in_order", "sorted(runs)", "runs"): (
        _POSITIONS,
        "forward",
        "decoder.layers.0.self_attention",
    ),
    ("moves:gather_for_parts", "partial(collectives.reduce_scatter, **along)", "partial(split_for_rank, **along)"): (
        _POSITIONS,
        "backward",
        "decoder.layers.1.self_attention",
    ),
    ("choice:groups_of_experts", "{param: groups.expert_dp for", "{param: groups.dp for"): (
        ("--nproc", "2", "--ep", "2", "--model.num-experts", "4"),
        "backward",
        "decoder.layers.1.mlp.experts",
    ),
}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("change", OF_LAYOUTS, ids=lambda change: change[0])
def test_a_fault_of_shared_positions_or_experts_is_named(change, tmp_path):
    layout, passes, module = OF_LAYOUTS[change]
    first = first_finding(Fault("of a layout", *change, ""), tmp_path, *_SIZES, *layout)
    assert first["where"] == passes, first
    assert first["module"].startswith(module), first


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_our_runs_are_sound(layout, tmp_path):
    found = run_doctor(tmp_path, None, *_SIZES, *LAYOUTS[layout], exit_code=0)
    assert found["sound"], found["findings"]
    assert found["rounding_is_measured"]


def test_a_run_whose_layouts_drop_other_elements_is_refused(tmp_path):
    data = ("--data", TEXT, "--out", tmp_path / "run", "--nproc", "2")
    options = (*_SIZES, "--model.dropout", "0.1", "--training.rng", "per_rank")
    for code, _, errors in run_commands(tmp_path, [("doctor", "train", *data, *options)] * 2):
        assert code == 2, errors
        assert "training.rng is per_rank, so each layout drops other elements" in errors
