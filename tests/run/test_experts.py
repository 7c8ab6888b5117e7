"""Runs of models with experts: any layout gives the results of one rank, and wrong settings are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan.measured_layouts import CASES
from run.compared_runs import TEXT, sizes, train
from run.run_processes import run_commands

from shardwise.core.errors import ConfigError
from shardwise.doctor.comparison import compare
from shardwise.models.recomputation import Recomputation
from shardwise.plan.fit import fitted, layouts
from shardwise.plan.plan import plan_run
from shardwise.plan.rehearsal import Rehearsals
from shardwise.plan.workload import Mesh
from shardwise.run.metrics import read_metrics
from shardwise.run.settings import ModelSettings, ParallelSettings, Settings
from shardwise.training.bounds import with_values

SIZES = sizes(23, "--model.num-experts", "8", "--model.num-experts-per-tok", "3", "--model.router-aux-loss", "0.5")
LAYOUTS = {
    "ep 2": "--nproc 2 --ep 2 --training.micro-batch-size 1",
    "tp 2, ep 2, sp": "--nproc 2 --tp 2 --ep 2 --etp 1 --sequence-parallel --recompute.granularity full",
    "ep 2, dp 4, zero": "--nproc 4 --ep 2 --zero 1",
    "tp 2, etp 2, ep 2": "--nproc 4 --tp 2 --ep 2",
    "ep 2, fsdp 4": "--nproc 4 --ep 2 --fsdp --training.micro-batch-size 1",
    "ep 4, tp 2, fsdp 2, sp": "--nproc 4 --tp 2 --ep 4 --etp 1 --fsdp --sequence-parallel --recompute.granularity full",
    "ep 2, pp 2": "--nproc 4 --pp 2 --ep 2",
    "ep 2, pp 2, zero bubble": "--nproc 4 --pp 2 --ep 2 --pipeline-schedule zero-bubble",
}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return train(tmp_path_factory.mktemp("experts"), "one", *SIZES)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_trains_as_one_rank(one, tmp_path, layout):
    """Losses, gradient norms, weights and the optimizer's state, with balance losses and uneven tokens."""
    comparison = compare(one, train(tmp_path, "run", *SIZES, *LAYOUTS[layout].split()))
    assert comparison.verdict == "rounding", "\n".join(comparison.lines)


@pytest.mark.slow
def test_a_checkpoint_goes_on_at_another_layout(one, tmp_path):
    first = ("--nproc", "4", "--tp", "2", "--ep", "4", "--etp", "1")
    stopped = train(tmp_path, "run", *SIZES, *first, "--training.steps", "3")
    train(tmp_path, "run", *SIZES, "--nproc", "4", "--pp", "2", "--ep", "2", "--resume", "auto")
    comparison = compare(one, stopped)
    assert comparison.verdict == "rounding", "\n".join(comparison.lines)


@pytest.mark.slow
@pytest.mark.parametrize("drops_by", [pytest.param("probability", marks=pytest.mark.matrix), "position"])
def test_capacity_and_global_balance_are_those_of_one_rank(tmp_path, drops_by):
    options = ("--model.expert-capacity-factor", "0.9", "--model.expert-drops-by", drops_by)
    options += ("--model.router-balance", "global")
    alone = train(tmp_path, "alone", *SIZES, *options)
    split = train(tmp_path, "split", *SIZES, *options, "--nproc", "4", "--tp", "2", "--ep", "2", "--sequence-parallel")
    comparison = compare(alone, split)
    assert comparison.verdict == "rounding", "\n".join(comparison.lines)
    metrics = [read_metrics(run / "metrics.jsonl") for run in (alone, split)]
    dropped, others = ([each["dropped_tokens"] for each in rows if "loss" in each] for rows in metrics)
    assert dropped == others
    assert min(dropped) > 0


def loads(run: Path) -> list[tuple[float, float]]:
    """The largest and the smallest load of each step, over the mean."""
    return [
        (step["expert_load_max"], step["expert_load_min"])
        for step in read_metrics(run / "metrics.jsonl")
        if "loss" in step
    ]


@pytest.mark.slow
def test_a_run_replays_the_routing_of_another(one, tmp_path):
    """Recording changes nothing. The loads of a run that replays choices are those of the recorded run."""
    folder = str(tmp_path / "routing")
    recorded = train(tmp_path, "recorded", *SIZES, "--record-routing", folder)
    assert compare(one, recorded).verdict == "same bits"
    replays = ("--replay-routing", folder, "--training.dtype", "float64")
    assert loads(train(tmp_path, "wide", *SIZES, *LAYOUTS["ep 2, pp 2"].split(), *replays)) == loads(recorded)
    split = train(tmp_path, "split", *SIZES, *LAYOUTS["ep 2"].split(), *replays[:2])
    assert loads(split) == loads(recorded)
    comparison = compare(recorded, split)
    assert comparison.verdict == "rounding", "\n".join(comparison.lines)
    out = ("--out", str(tmp_path / "longer"))
    ((code, _, error),) = run_commands(
        tmp_path, [("train", "--data", str(TEXT), *SIZES, *out, "--training.steps", "7", *replays)]
    )
    assert code == 2
    assert "has no routing of step 6; replay fewer steps" in error
    other = train(tmp_path, "other", *SIZES, "--training.seed", "2", "--training.steps", "2")
    again = ("--training.seed", "2", "--resume", "auto", "--record-routing", folder)
    arguments = ("train", "--data", str(TEXT), *SIZES, "--out", str(other), *again)
    ((code, _, error),) = run_commands(tmp_path, [arguments])
    assert (code, "exists already" in error) == (2, True)


@pytest.mark.slow
def test_forced_balance_is_even(tmp_path):
    run = train(tmp_path, "run", *SIZES, "--model.router-force-balance", "--nproc", "2", "--ep", "2")
    # A sequence has 23 * 3 choices, 8 or 9 for each of the 8 experts.
    assert set(loads(run)) == {(9 * 8 / 69, 8 * 8 / 69)}


def test_wrong_settings_are_refused():
    experts = {"num_experts": 8}
    for model, parallel, world_size, message in (
        ({}, {"ep": 2}, 2, "parallel.ep 2 is about the experts of a model, and this one has none"),
        (experts, {"ep": 3}, 3, "the 8 experts of the model are not a multiple of parallel.ep 3"),
        (experts, {"ep": 4}, 2, "parallel.ep 4 x etp 1 x parallel.pp 1 does not divide the 2 ranks"),
        (
            experts | {"expert_capacity_factor": 1.5},
            {"exact": True},
            1,
            "exact form of --model.expert-capacity-factor 1.5",
        ),
    ):
        # A batch of 8 is no multiple of 3 ranks either, and the experts come first.
        values = {"data": ("text",), "model": model, "parallel": parallel, "training": {"global_batch_size": 8}}
        with pytest.raises(ConfigError, match=message):
            with_values(Settings, values).check_world(world_size)
    with pytest.raises(ConfigError, match=r"num-experts-per-tok 9 is more than model\.num-experts 8"):
        ModelSettings(num_experts=8, num_experts_per_tok=9)
    with pytest.raises(ConfigError, match=r"router-aux-loss 0.5 is for --model\.num-experts"):
        ModelSettings(router_aux_loss=0.5)
    with pytest.raises(ConfigError, match=r"expert-drops-by position is for model\.expert-capacity-factor"):
        ModelSettings(num_experts=8, expert_drops_by="position")
    with pytest.raises(ConfigError, match=r"ep-comm-type all_gather is about the experts of a model"):
        with_values(Settings, {"data": ("text",), "parallel": {"ep_comm_type": "all_gather"}}).check_world(1)
    with pytest.raises(ConfigError, match="record-routing cannot be used with --replay-routing"):
        Settings(data=("text",), record_routing="a", replay_routing="b")
    with pytest.raises(ConfigError, match=r"router-force-balance True is for --model\.num-experts"):
        ModelSettings(router_force_balance=True)
    with pytest.raises(ConfigError, match=r"router-balance global is for --model\.num-experts"):
        ModelSettings(router_balance="global")
    with pytest.raises(ConfigError, match="experts have no biases"):
        ModelSettings(architecture="gpt", num_experts=8)
    assert ParallelSettings(tp=2, ep=4, etp=1, pp=3).fewest_ranks == 12


@pytest.mark.slow
def test_a_plan_counts_the_exchange_of_tokens():
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 301, "sequence_length": 24}
    model = sizes | {"num_experts": 8, "num_experts_per_tok": 3}
    training = {"global_batch_size": 4, "micro_batch_size": 1, "dtype": "float32"}
    options = {"ranks": 4, "rank": 1, "training": training, "device": "cpu"}

    def sent_by(**parallel: Any) -> dict[int, int]:
        plan = plan_run(parallel={"tp": 2} | parallel, model=model, **options)
        return {call.num_bytes: number for call, number in plan.worst.calls.items() if call.axis == "ep"}

    # A rank routes 12 of a micro-batch's 24 tokens to 3 experts each, which two ranks split; two layers, two batches.
    # Tokens and results are sent in the forward, their gradients in the backward, and the counts of 8 experts once.
    assert sent_by(ep=2, ep_comm_type="a2a") == {2 * 12 * 3 * 32 * 4: 2 * 2 * 4, 2 * 8 * 8: 2 * 2}
    # Four ranks gather counts of 9 kinds, tokens, and two numbers of each choice, and reduce sums. Gradients go back.
    tokens, choices = 12 * 32 * 4, 12 * 3 * 2 * 4
    gathered = {9 * 8: 4, tokens: 8, choices: 4, 4 * tokens: 8, 4 * choices: 4}
    assert sent_by(ep=2) == sent_by(ep=2, ep_comm_type="all_gather") == gathered
    # In an exact run experts are whole. Each of two ranks sends the rows for the ranks in its place, of all tokens.
    model |= {"vocab_size": 304}
    assert sent_by(ep=4, exact=True) == {24 * 3 // 2 * 32 * 4: 2 * 2 * 4, 8 * 8: 2 * 2}
    with pytest.raises(ConfigError, match=r"parallel\.ep 4 x etp 2 x parallel\.pp 1 does not divide the 4 ranks"):
        sent_by(ep=4)


@pytest.mark.slow
def test_the_layouts_that_fit_divide_experts():
    workload = CASES["experts"].workload(small=True)
    found = list(layouts(workload, (4,), 2, Mesh(recomputation=Recomputation("full"))))
    assert {(mesh.tp, mesh.ep, mesh.expert_tp) for mesh in found if mesh.pp == 1} == {
        *((1, ep, 1) for ep in (1, 2, 4)),
        *((2, ep, etp) for ep, etp in ((1, 1), (1, 2), (2, 1), (4, 1))),
    }
    rehearsals = Rehearsals(workload, estimates=True)
    assert fitted(rehearsals, found[0], 1 << 40) is not None
    assert fitted(rehearsals, replace(found[0], ep=3), 1 << 40) is None
