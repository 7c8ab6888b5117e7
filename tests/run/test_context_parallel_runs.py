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
    "cp 2, dp 2, fsdp": ("--nproc", "4", "--cp", "2", "--fsdp"),
    "cp 2, tp 2, sp": ("--nproc", "4", "--cp", "2", "--tp", "2", "--sequence-parallel"),
    "cp 2, pp 2": ("--nproc", "4", "--cp", "2", "--pp", "2"),
    "cp 3": ("--nproc", "3", "--cp", "3", "--doctor-every", "2"),
}


def run(folder: Path, *arguments: str) -> None:
    with Program("-m", "shardwise", *arguments, folder=folder) as program:
        program.finish(exit_code=0)


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


# What is learned from which file, with which options, and a layout.
TASKS = {
    # Texts in a row see themselves alone, and their positions start at 0, wherever the ranks cut the row.
    "packed rows, adapters with dropout": (
        ("finetune", "texts", "--packing", "--lora-rank", "4", "--lora-dropout", "0.2"),
        ("--nproc", "4", "--cp", "2", "--tp", "2"),
    ),
    "a teacher": (
        ("distill", "texts", "--teacher", "hf", "--lora-rank", "4"),
        ("--nproc", "4", "--cp", "2", "--zero", "1"),
    ),
    "labels": (
        ("finetune", "labels", "--task", "sequence-classification", "--pad-token", "<|endoftext|>"),
        ("--nproc", "4", "--cp", "2", "--pp", "2"),
    ),
}


@pytest.fixture(scope="module")
def pretrained(folder, one):
    """A folder of Hugging Face, and files of samples of each kind."""
    run(folder, "export-hf", str(one), "--out", str(folder / "hf"))
    texts = [{"prompt": "What is " * (k % 5 + 1), "completion": f"{k} " * (k % 3 + 1)} for k in range(60)]
    records = {
        "texts": texts,
        "pairs": [
            {"prompt": each["prompt"], "chosen": each["completion"], "rejected": f"no {k % 7}"}
            for k, each in enumerate(texts)
        ],
        "labels": [{"text": each["prompt"] + each["completion"], "label": k % 3} for k, each in enumerate(texts)],
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
        run(tmp_path, *arguments, "--out", str(tmp_path / name))
    comparison = compare(tmp_path / "alone", tmp_path / "shared")
    assert comparison.verdict == "rounding", "\n".join(comparison.lines)


@pytest.mark.slow
def test_the_doctor_finds_no_fault_in_preferences(pretrained, tmp_path):
    """Metrics of such runs are not compared: an accuracy of rewards that are equal at first is any number."""
    steps = ("--training.steps", "2", "--training.global-batch-size", "4", "--device", "cpu", "--out", "run")
    data = ("--data", str(pretrained / "pairs.jsonl"))
    run(tmp_path, "doctor", "dpo", str(pretrained / "hf"), *data, *steps, "--nproc", "3", "--cp", "3")


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match=r"parallel\.exact and parallel\.cp 2 exclude each other"):
        ParallelSettings(exact=True, cp=2)
    sizes = {"data": ("text",), "parallel": {"cp": 4}, "model": {"sequence_length": 3}}
    with pytest.raises(ConfigError, match=r"model\.sequence-length 3 is less than parallel\.cp 4; each rank needs"):
        with_values(Settings, sizes).check_world(4)
    settings = with_values(Settings, {"data": ("text",), "parallel": {"cp": 4, "tp": 2}})
    with pytest.raises(ConfigError, match=r"parallel\.tp 2 x parallel\.cp 4 does not divide the 4 ranks; start a mult"):
        settings.check_world(4)
    assert ParallelSettings(tp=2, cp=4, pp=3).fewest_ranks == 24
    with pytest.raises(ConfigError, match=r"parallel\.cp 2 does not divide the 3 ranks"):
        plan_run(ranks=3, parallel={"cp": 2}, device="cpu")


@pytest.mark.slow
def test_dropout_of_attention_is_refused(tmp_path):
    arguments = ("train", "--data", str(TEXT), "--out", str(tmp_path / "run"), *SIZES, "--nproc", "2", "--cp", "2")
    with Program("-m", "shardwise", *arguments, "--model.dropout", "0.1", folder=tmp_path) as program:
        program.finish(exit_code=2)
    assert "attention_dropout 0.1 with training.rng global" in program.stderr
