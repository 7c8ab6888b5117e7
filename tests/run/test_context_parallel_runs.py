"""Runs whose ranks share samples train as one rank; what does not work with them is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.program import Program

from shardwise.core.errors import ConfigError
from shardwise.run.comparison import compare
from shardwise.run.plan.plan import plan_run
from shardwise.run.settings import ParallelSettings, Settings
from shardwise.training.bounds import with_values

TEXT = Path(__file__).parents[2] / "README.md"
# A length that nothing divides.
SIZES = (
    *("--model.num-layers", "2", "--model.hidden-size", "32", "--model.num-heads", "4", "--device", "cpu"),
    *("--model.sequence-length", "61", "--model.vocab-size", "301", "--training.global-batch-size", "4"),
    *("--training.steps", "6", "--training.save-every", "3", "--training.keep-checkpoints", "9"),
)
LAYOUTS = {
    "cp 2": ("--nproc", "2", "--cp", "2"),
    "cp 4, zero 1": ("--nproc", "4", "--cp", "4", "--zero", "1", "--recompute.granularity", "full"),
    "cp 4, gathered": ("--nproc", "4", "--cp", "4", "--cp-comm-type", "all_gather"),
    "cp 2, dp 2, fsdp": ("--nproc", "4", "--cp", "2", "--fsdp"),
    "cp 2, tp 2, sp": ("--nproc", "4", "--cp", "2", "--tp", "2", "--sequence-parallel"),
    "cp 2, pp 2": ("--nproc", "4", "--cp", "2", "--pp", "2"),
    "cp 3": ("--nproc", "3", "--cp", "3"),
}


def run(folder: Path, *arguments: str) -> str:
    with Program("-m", "shardwise", *arguments, folder=folder) as program:
        program.finish(exit_code=0)
    return program.stdout


def train(folder: Path, name: str, *arguments: str) -> Path:
    run(folder, "train", "--data", str(TEXT), "--out", str(folder / name), *SIZES, *arguments)
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("context")


@pytest.fixture(scope="module")
def one(folder):
    return train(folder, "one")


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_trains_as_one_rank(folder, one, tmp_path, layout):
    comparison = compare(one, train(tmp_path, "run", *LAYOUTS[layout]))
    assert comparison.verdict == "rounding", "\n".join(comparison.lines)


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_another_number_of_ranks(folder, one, tmp_path):
    stopped = train(tmp_path, "run", "--nproc", "2", "--cp", "2", "--training.steps", "3")
    train(tmp_path, "run", "--nproc", "4", "--cp", "4", "--resume", "auto")
    comparison = compare(one, stopped)
    assert comparison.verdict == "rounding", "\n".join(comparison.lines)


@pytest.mark.slow
def test_packed_rows_with_adapters_are_fine_tuned_as_on_one_rank(folder, one, tmp_path):
    """Texts in a row see themselves alone, and their positions start at 0, wherever the ranks cut the row."""
    run(tmp_path, "export-hf", str(one), "--out", str(tmp_path / "hf"))
    samples = [{"prompt": "What is " * (k % 5 + 1), "completion": f"{k} " * (k % 3 + 1)} for k in range(60)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, samples)))
    options = (
        "--device",
        "cpu",
        "--packing",
        "--training.steps",
        "3",
        "--training.global-batch-size",
        "2",
        "--lora-rank",
        "4",
    )
    for name, more in (("alone", ()), ("shared", ("--nproc", "4", "--cp", "2", "--tp", "2"))):
        command = ("finetune", str(tmp_path / "hf"), "--data", str(tmp_path / "pairs.jsonl"), *options, *more)
        banner = run(tmp_path, *command, "--out", str(tmp_path / name))
    assert "context parallel 2 (a2a, or all_gather under a mask), data parallel 1" in banner
    comparison = compare(tmp_path / "alone", tmp_path / "shared")
    assert comparison.verdict == "rounding", "\n".join(comparison.lines)


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match=r"parallel\.exact and parallel\.cp 2 exclude each other"):
        ParallelSettings(exact=True, cp=2)
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
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("doctor", "train"), "the doctor cannot merge the positions of parallel.cp 2 ranks yet"),
        (
            ("train", "--model.dropout", "0.1", "--cp-comm-type", "all_gather"),
            "attention_dropout 0.1 with training.rng global",
        ),
    ],
    ids=["doctor", "dropout"],
)
def test_what_does_not_work_is_refused(tmp_path, command, message):
    arguments = (*command, "--data", str(TEXT), "--out", str(tmp_path / "run"), *SIZES, "--nproc", "2", "--cp", "2")
    with Program("-m", "shardwise", *arguments, folder=tmp_path) as program:
        program.finish(exit_code=2)
    assert message in program.stderr
