"""``shardwise plan`` prints what a run needs, and what is wrong with a question."""

import json
import re
import shlex
from pathlib import Path

import pytest

from shardwise.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 301,
    "max_position_embeddings": 128,
}


def call(capsys, *argv):
    code = main(["plan", *argv])
    out, error = capsys.readouterr()
    return code, out, error


def test_the_numbers_of_a_layout(capsys):
    layout = ["--tp", "2", "--pp", "2", "--ranks", "8", "--training.dtype", "bfloat16"]
    code, text, _ = call(capsys, *layout)
    assert code == 0
    assert "8: tp 2, pp 2, dp 2" in text
    code, out, _ = call(capsys, *layout, "--json")
    found = json.loads(out)
    assert (code, found["layout"]["dp"], len(found["stages"])) == (0, 2, 2)
    for stage in found["stages"]:
        parts = ("weights", "gradients", "masters", "optimizer", "activations", "working")
        assert stage["total"] == sum(stage[part] for part in parts)
        # bf16 weights, fp32 copies, and two fp32 numbers of AdamW for each.
        assert (stage["weights"], stage["masters"]) == (2 * stage["parameters"], 4 * stage["parameters"])
        assert 0 < stage["optimizer"] - 8 * stage["parameters"] < 1000
    assert found["worst"]["total"] == max(stage["total"] for stage in found["stages"])


def test_a_hugging_face_folder_and_a_file_of_settings(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "run.toml").write_text('[training]\ndtype = "bfloat16"\n[parallel]\ntp = 8\n')
    options = ["--config", str(tmp_path / "run.toml"), "--model.sequence-length", "128"]
    code, text, _ = call(capsys, str(tmp_path), *options)
    assert code == 0
    assert "8: tp 8" in text
    assert "samples of 128 tokens" in text
    code, _, error = call(capsys, str(tmp_path), "--model.num-layers", "8")
    assert (code, f"model.num-layers 8 cannot be used with the model of {tmp_path}" in error) == (2, True)
    code, _, error = call(capsys, str(tmp_path), "--model.sequence-length", "256")
    assert (code, "model.sequence-length 256 is more than 128" in error) == (2, True)
    # Without numbers a folder is planned as it is fine-tuned, a new model as it is trained.
    for argv, longest, step in (
        ([], 128, "16 samples of 256 tokens"),
        ([str(tmp_path)], 128, "8 samples of 128 tokens"),
        ([str(tmp_path)], 4096, "8 samples of 512 tokens"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": longest}))
        code, text, _ = call(capsys, *argv)
        assert (code, f"step   {step}" in text) == (0, True)


@pytest.mark.slow
def test_the_dtype_that_is_meant_on_a_gpu(capsys):
    plans = {}
    for name, options in {
        "gpu": ["--device", "cuda"],
        "bfloat16": ["--training.dtype", "bfloat16"],
        "cpu": ["--device", "cpu"],
        "float32": ["--training.dtype", "float32"],
    }.items():
        code, out, _ = call(capsys, *options, "--json")
        assert code == 0
        plans[name] = json.loads(out)
    assert plans["cpu"] == plans["float32"]
    (on_gpu, on_cpu, wide) = (plans[name]["stages"][0] for name in ("gpu", "bfloat16", "cpu"))
    assert on_gpu["weights"] == on_cpu["weights"] == wide["weights"] / 2
    # CUDA's kernels keep less.
    assert on_gpu["activations"] < on_cpu["activations"]


@pytest.mark.slow
def test_what_fits_is_listed_best_first(capsys):
    # So small that each layout is planned in a second, and so few layouts.
    question = ["--training.global-batch-size", "4", "--training.micro-batch-size", "1"]
    question += ["--model.num-layers", "2", "--model.sequence-length", "16", "--recompute.granularity", "full", "--fit"]
    code, out, _ = call(capsys, *question, "40MiB", "--json", "--ranks", "2", "4")
    assert code == 0
    plans = json.loads(out)
    assert {plan["layout"]["ranks"] for plan in plans} == {2, 4}
    assert all(plan["worst"]["total"] <= 40 << 20 for plan in plans)
    order = [(round(plan["repeated_work"] + plan["idle_share"], 3), plan["sent"]) for plan in plans]
    assert order == sorted(order)
    assert len(plans) > 10
    code, _, error = call(capsys, *question, "1 MiB", "--ranks", "1", "2")
    assert (code, "no layout of 1, 2 ranks needs at most 1.00 MiB" in error) == (2, True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--fit", "lots"], "'lots' is not a number of bytes; write it as 80GiB, 40.5GB or 1024MiB"),
        (["--ranks", "4", "8"], "--ranks (--nproc) has 2 numbers; several go with --fit only"),
        (["--ranks", "many"], "--ranks (--nproc) 'many' is not a number of ranks; give integers such as 8 64"),
        (["--tp", "16"], "tp 16 is more than the 8 attention heads"),
        (["--pp", "8"], "the model's 4 layers are fewer than the 8 parts"),
        (
            ["--model.num-layers", "10000"],
            "the model has 10,000 layers, and a plan, which goes through each, takes at most",
        ),
        (["--model.num-experts", "65536"], "the model has 65,536 experts, and a plan"),
        (["nowhere"], "nowhere"),
        (["--tp", "2", "dpo", "x"], "no flag takes x; the word dpo goes directly after shardwise plan"),
        (
            ["--recompute.granularity", "full", "--recompute.num-layers", "5", "--fit", "1GiB"],
            "recompute.num-layers 5 is more than the 4 layers of the model",
        ),
        (
            ["--exact-parts", "4", "--fit", "1GiB"],
            "parallel.exact-parts 4 is for exact runs, and parallel.exact is off",
        ),
    ],
)
def test_a_mistake_is_one_line(capsys, argv, message):
    code, out, error = call(capsys, *argv)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("shardwise plan: error: ")
    assert message in error


COMMANDS = re.findall(r"^shardwise plan (.*)$", PAGE, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_page_run(capsys, tmp_path, monkeypatch, command):
    assert len(COMMANDS) >= 10
    monkeypatch.chdir(tmp_path)
    for name in ("MODEL_DIR", "LARGE"):
        (tmp_path / name).mkdir()
        config = CONFIG | {"max_position_embeddings": 8192, "num_hidden_layers": 2}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "run.toml").write_text("[model]\nnum_heads = 8\n[training]\nglobal_batch_size = 32\n")
    assert call(capsys, *shlex.split(command))[0] == 0
