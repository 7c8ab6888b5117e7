"""Runs whose ranks share samples train as one rank; what does not work with them is refused by name."""

from __future__ import annotations

import json
from functools import cache

import pytest
from run.compared_runs import TEXT, run, sizes, train
from run.run_processes import run_commands

from shardwise.core.errors import ConfigError
from shardwise.doctor.comparison import compare
from shardwise.plan.plan import plan_run
from shardwise.run.settings import ParallelSettings, Settings
from shardwise.storage.checkpoint.comparing import StoredCheckpoint, tensor_differences
from shardwise.storage.checkpoint.folder import latest
from shardwise.training.bounds import with_values

# A length that nothing divides.
SIZES = sizes(61)
LAYOUTS = {
    "cp 2": ("--nproc", "2", "--cp", "2"),
    "cp 4, zero 1": ("--nproc", "4", "--cp", "4", "--zero", "1", "--recompute.granularity", "full"),
    "cp 4, gathered": ("--nproc", "4", "--cp", "4", "--cp-comm-type", "all_gather"),
    "cp 2, dp 2, fsdp": ("--nproc", "4", "--cp", "2", "--fsdp"),
    "cp 2, tp 2, sp": ("--nproc", "4", "--cp", "2", "--tp", "2", "--sequence-parallel"),
    "cp 2, pp 2": ("--nproc", "4", "--cp", "2", "--pp", "2"),
    "cp 3": ("--nproc", "3", "--cp", "3", "--doctor-every", "2"),
}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return train(tmp_path_factory.mktemp("context"), "one", *SIZES)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_trains_as_one_rank(one, tmp_path, layout):
    comparison = compare(one, train(tmp_path, "run", *SIZES, *LAYOUTS[layout]))
    assert comparison.verdict == "rounding", "\n".join(comparison.lines)


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_another_number_of_ranks(one, tmp_path):
    stopped = train(tmp_path, "run", *SIZES, "--nproc", "2", "--cp", "2", "--training.steps", "3")
    train(tmp_path, "run", *SIZES, "--nproc", "4", "--cp", "4", "--resume", "auto")
    comparison = compare(one, stopped)
    assert comparison.verdict == "rounding", "\n".join(comparison.lines)


# What is learned from which file, with which options, and a layout.
TASKS = {
    # Texts in a row see themselves alone, and their positions start at 0, wherever the ranks cut the row.
    "packed rows, adapters with dropout": (
        ("finetune", "texts", "--packing", "--lora-rank", "4", "--lora-dropout", "0.2"),
        ("--nproc", "4", "--cp", "2", "--tp", "2"),
    )
}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, one):
    """A folder of Hugging Face, and files of samples of each kind."""
    folder = tmp_path_factory.mktemp("pretrained")
    run(folder, "export-hf", str(one), "--out", str(folder / "hf"))
    texts = [{"prompt": "What is " * (k % 5 + 1), "completion": f"{k} " * (k % 3 + 1)} for k in range(60)]
    records = {
        "texts": texts,
        "pairs": [
            {"prompt": each["prompt"], "chosen": each["completion"], "rejected": f"no {k % 7}"}
            for k, each in enumerate(texts)
        ],
    }
    for name, each in records.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, each)))
    return folder


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("task", TASKS)
def test_any_task_is_learned_as_on_one_rank(pretrained, tmp_path, task):
    (command, data, *options), layout = TASKS[task]
    steps = ("--training.steps", "3", "--training.global-batch-size", "4", "--device", "cpu")
    model = str(pretrained / "hf")
    given = [model if option == "hf" else option for option in options]
    for name, more in (("alone", ()), ("shared", layout)):
        arguments = (command, model, "--data", str(pretrained / f"{data}.jsonl"), *given, *steps, *more)
        banner = run(tmp_path, *arguments, "--out", str(tmp_path / name))
    assert "context parallel 2 (a2a: 2 ranks divide " in banner
    comparison = compare(tmp_path / "alone", tmp_path / "shared")
    assert comparison.verdict == "rounding", "\n".join(comparison.lines)


# Thirty steps in fp64: layouts of 4 or 8 ranks, each with one of the ways.
THIRTY = {
    "cp 2, tp 2": ("--nproc", "4", "--cp", "2", "--tp", "2", "--cp-comm-type", "p2p"),
    "cp 2, pp 2": ("--nproc", "4", "--cp", "2", "--pp", "2", "--cp-comm-type", "a2a"),
    "cp 2, dp 2": ("--nproc", "4", "--cp", "2", "--cp-comm-type", "p2p"),
    "cp 2, zero 1": ("--nproc", "4", "--cp", "2", "--zero", "1", "--cp-comm-type", "all_gather"),
    "cp 2, fsdp": ("--nproc", "4", "--cp", "2", "--fsdp", "--cp-comm-type", "a2a"),
    "cp 4, zero 1": ("--nproc", "4", "--cp", "4", "--zero", "1", "--cp-comm-type", "p2p"),
    "cp 4, tp 2": ("--nproc", "8", "--cp", "4", "--tp", "2", "--sequence-parallel", "--cp-comm-type", "p2p"),
    "cp 4, pp 2": ("--nproc", "8", "--cp", "4", "--pp", "2", "--cp-comm-type", "p2p"),
    "cp 4, dp 2": ("--nproc", "8", "--cp", "4", "--cp-comm-type", "a2a"),
    "cp 4, fsdp": ("--nproc", "8", "--cp", "4", "--fsdp", "--cp-comm-type", "all_gather"),
}


def thirty_steps(pretrained, folder, packs, *layout):
    options = ("--training.steps", "30", "--training.dtype", "float64", "--training.save-every", "30")
    if not packs:
        return train(folder, "run", *SIZES, *options, *layout)
    model, data = str(pretrained / "hf"), str(pretrained / "texts.jsonl")
    batch = ("--training.global-batch-size", "4", "--packing", "--device", "cpu")
    run(folder, "finetune", model, "--data", data, *batch, *options, *layout, "--out", str(folder / "run"))
    return folder / "run"


@pytest.fixture(scope="module")
def on_one_rank(pretrained, tmp_path_factory):
    """A function that returns the run of one rank, on texts or on packed rows."""
    return cache(lambda packs: thirty_steps(pretrained, tmp_path_factory.mktemp("thirty"), packs))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("layout", "packs"), [(layout, packs) for layout in THIRTY for packs in (False, True)])
def test_thirty_steps_give_the_weights_of_one_rank(pretrained, on_one_rank, tmp_path, layout, packs):
    runs = on_one_rank(packs), thirty_steps(pretrained, tmp_path, packs, *THIRTY[layout])
    one, other = (StoredCheckpoint(latest(folder / "checkpoints")) for folder in runs)
    differences = list(tensor_differences(one, other))
    assert differences
    assert {each.name: each.distance for each in differences if not each.distance < 1e-9} == {}


@pytest.mark.slow
def test_the_doctor_finds_no_fault_in_preferences(pretrained, tmp_path):
    """Metrics of such runs are not compared: an accuracy of rewards that are equal at first is any number."""
    steps = (
        "--training.steps",
        "2",
        "--training.global-batch-size",
        "4",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "run"),
    )
    data = ("--data", str(pretrained / "pairs.jsonl"))
    run(tmp_path, "doctor", "dpo", str(pretrained / "hf"), *data, *steps, "--nproc", "3", "--cp", "3")


def test_wrong_settings_are_refused():
    with pytest.raises(
        ConfigError, match=r"parallel\.cp-comm-type a2a is for --parallel\.cp of at least 2, and it is 1"
    ):
        ParallelSettings(cp_comm_type="a2a")
    sizes = {"data": ("text",), "parallel": {"cp": 4}, "model": {"sequence_length": 3}}
    with pytest.raises(ConfigError, match=r"model\.sequence-length 3 is less than parallel\.cp 4; each rank needs"):
        with_values(Settings, sizes).check_world(4)
    settings = with_values(Settings, {"data": ("text",), "parallel": {"cp": 4, "tp": 2}})
    with pytest.raises(ConfigError, match=r"parallel\.tp 2 x parallel\.cp 4 does not divide the 4 ranks; start a mult"):
        settings.check_world(4)
    assert ParallelSettings(tp=2, cp=4, pp=3).fewest_ranks == 24
    with pytest.raises(ConfigError, match=r"parallel\.cp 2 does not divide the 3 ranks"):
        plan_run(ranks=3, parallel={"cp": 2}, device="cpu")


@pytest.mark.parametrize(("way", "numbers"), [("all_gather", 3 * 2 * 4), ("a2a", 2 * (2 * 4 + 2 * 4) / 4), ("auto", 8)])
def test_plans_count_what_a_way_sends(way, numbers):
    """docs/context.md has the formulas: heads of a position that each of 4 ranks receives, from 3 of them."""
    model = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "sequence_length": 96, "vocab_size": 301}
    parallel, training = {"cp": 4, "cp_comm_type": way}, {"global_batch_size": 1}
    plan = plan_run(ranks=4, parallel=parallel, device="cpu", model=model, training=training)
    heads_bytes = 8 * 4
    assert [rank.sent("cp") for rank in plan.stages] == [2 * 96 * numbers * heads_bytes * 3 / 4]


@pytest.mark.slow
def test_dropout_of_attention_is_refused(tmp_path):
    arguments = ("train", "--data", str(TEXT), "--out", str(tmp_path / "run"), *SIZES, "--cp", "2")
    options = ("--model.dropout", "0.1", "--cp-comm-type", "all_gather")
    ended = run_commands(tmp_path, [(*arguments, *options)] * 2)
    assert [code for code, _, _ in ended] == [2, 2]
    assert "attention_dropout 0.1 with training.rng global" in ended[0][2]
