"""``shardwise plan COMMAND``: the plan of each command, one rank in detail, pictures, and mistakes."""

import json
import re
from pathlib import Path

import pytest
from cli.test_plan import CONFIG as FOUR_LAYERS

from shardwise.cli.main import main

CONFIG = FOUR_LAYERS | {"num_hidden_layers": 2}
# So few layouts that each is planned at once.
FEW = ("--training.micro-batch-size", "1", "--recompute.granularity", "full", "--model.sequence-length", "16")


def call(capsys, *argv):
    code = main(["plan", *map(str, argv)])
    out, error = capsys.readouterr()
    return code, out, error


def planned(capsys, *argv):
    code, out, error = call(capsys, *argv, "--json")
    assert (code, error) == (0, "")
    return json.loads(out)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.slow
def test_each_command_takes_its_settings(capsys, folder):
    (folder / "run.toml").write_text(
        'data = ["unread"]\n[lora]\nlora_rank = 4\n[parallel]\ntp = 2\n[model]\nsequence_length = 64\n'
    )
    (folder / "tp.toml").write_text("[parallel]\ntp = 2\n")
    tuned = planned(
        capsys, "finetune", folder, "--config", folder / "run.toml", "--out", folder / "x", "--resume", "auto"
    )
    assert (tuned["layout"]["tp"], tuned["stages"][0]["layers"]) == (2, [[0, 2]])
    assert 0 < tuned["stages"][0]["gradients"] < tuned["stages"][0]["weights"] / 4
    assert not (folder / "x").exists()
    pairs = planned(capsys, "dpo", folder, "--config", folder / "tp.toml", "--beta", "0.3")
    texts = planned(capsys, "finetune", folder, "--config", folder / "tp.toml")
    assert pairs["stages"][0]["activations"] > 1.9 * texts["stages"][0]["activations"]
    # As today, with and without the word.
    assert planned(capsys, "train", "--tp", "2") == planned(capsys, "--tp", "2")
    assert planned(capsys, folder) == planned(capsys, "train", folder) == planned(capsys, "finetune", folder)


@pytest.mark.slow
def test_layouts_that_fit_each_command(capsys, folder):
    code, text, _ = call(capsys, "dpo", folder, "--ranks", "1", "--fit", "1GiB", *FEW)
    assert (code, text.splitlines()[0].split()[:4]) == (0, ["ranks", "tp", "pp", "dp"])
    code, _, error = call(capsys, "finetune", folder, "--ranks", "1", "--fit", "1MiB", "--device", "cuda", *FEW)
    assert (code, "no layout of 1 rank needs at most 1.00 MiB of each (0 B of it for tensors)" in error) == (2, True)


@pytest.mark.slow
def test_one_rank_in_detail(capsys):
    layout = ["--ranks", "16", "--tp", "2", "--pp", "2", "--ranks-per-host", "4", "--rank", "9"]
    rates = ["--peak-tflops", "1", "--host-bandwidth", "1GB", "--network-bandwidth", "100MB"]
    code, text, error = call(capsys, *layout, *rates)
    assert (code, error) == (0, "")
    assert "rank   9: stage 1 with layers 2-3, tensor-parallel rank 1, data-parallel rank 0" in text
    found = planned(capsys, *layout, *rates)
    (rank,) = found["stages"]
    assert (rank["rank"], rank["stage"], rank["tp_rank"], rank["dp_rank"]) == (9, 1, 1, 0)
    assert f"in the {rank['peak_at']}; activations take" in text
    assert re.fullmatch(r"(?:backward|forward) of .*, micro-batch \d+", rank["peak_at"])
    # Every collective with its group, count and bytes.
    for each in rank["collectives"]:
        assert each["ranks"] in ([8, 9], [9, 11, 13, 15], [1, 9], [1])
        assert 0 <= each["sent_between_hosts"] <= each["sent"] or each["name"] == "send"
        group = ", ".join(map(str, each["ranks"]))
        assert re.search(rf"{each['axis']} +{each['name'].replace('_', '-')} +{group} +{each['calls']} ", text)
    assert sum(each["sent"] for each in rank["collectives"] if each["axis"] == "pp") == rank["sent"]["pp"]
    assert rank["sent_between_hosts"]["pp"] == rank["sent"]["pp"] > 0
    assert rank["sent_between_hosts"]["tp"] == 0 < rank["sent"]["tp"]
    assert "to other hosts." in text
    assert "1 in flight at most" in text
    assert rank["seconds"]["compute"] == rank["flops"] / 1e12
    assert rank["seconds"]["least"] < rank["seconds"]["most"]
    assert "if products hide all communication" in text
    # The same rank is in the plan of all stages, if it is the one that needs the most.
    worst = planned(capsys, *layout[:-2])["stages"][1]
    assert worst["total"] >= rank["total"]


@pytest.mark.slow
def test_time_is_estimated_from_stated_rates_alone(capsys):
    layout = ["--ranks", "4", "--tp", "2", "--ranks-per-host", "2"]
    assert "time " not in call(capsys, *layout)[1]
    assert planned(capsys, *layout)["stages"][0]["seconds"] is None
    _, text, _ = call(capsys, *layout, "--peak-tflops", "1", "--host-bandwidth", "1GB")
    assert "if they hide none" not in text
    assert "no time for dp: give --host-bandwidth and --network-bandwidth" in text


@pytest.mark.slow
def test_what_a_host_and_a_gpu_need(capsys):
    code, text, _ = call(capsys, "--tp", "2", "--ranks", "4")
    assert code == 0
    for line in (
        "a host of 4 ranks: ",
        "  shared memory tp ",
        "2 groups of 2 ranks",
        "  copies for saves ",
        "assumed: 256.0 MiB",
    ):
        assert line in text
    assert "a GPU" not in text
    host = planned(capsys, "--tp", "2", "--ranks", "4")["host"]
    parts = ("tensors", "batches", "snapshot", "processes_assumed")
    shared = sum(each["groups"] * each["bytes"] for each in host["shared_memory"])
    assert host["total"] == sum(host[part] for part in parts) + shared
    code, text, _ = call(capsys, "--tp", "2", "--ranks", "4", "--device", "cuda")
    assert code == 0
    for line in ("a GPU: ", "  CUDA ", "assumed: context, libraries, NCCL", "  slack ", "a host of 4 ranks: "):
        assert line in text
    found = planned(capsys, "--tp", "2", "--ranks", "4", "--device", "cuda")
    device = found["device"]
    parts = ("batches", "context_assumed", "slack_assumed")
    assert device["total"] == found["worst"]["total"] + sum(device[part] for part in parts)


@pytest.mark.slow
def test_generation(capsys, folder):
    found = planned(
        capsys, "generate", folder, "--ranks", "2", "--tp", "2", "--prompt-length", "40", "--max-new-tokens", "8"
    )
    assert (found["ranks"], found["batch_size"], found["prompt_length"], found["max_new_tokens"]) == (2, 1, 40, 8)
    # Keys and values of one of two heads of width 8, in each of 2 layers, in fp32.
    assert found["cache"] == 48 * found["cache_per_token"] == 48 * 2 * 2 * 8 * 4
    assert found["total"] == found["weights"] + found["cache"] + max(found["prompt_peak"], found["token_peak"])
    code, text, _ = call(capsys, "generate", folder, "--ranks", "1", "2", "--fit", "20MB")
    assert code == 0
    assert "prompts of 64 tokens, 64 new tokens each" in text
    plans = planned(capsys, "generate", folder, "--ranks", "1", "2", "--fit", "20MB")
    assert [plan["ranks"] for plan in plans] == [2, 1]
    assert all(plan["batch_size"] > 1 and plan["total"] <= 20e6 for plan in plans)
    code, text, _ = call(capsys, "generate", folder, "--device", "cuda")
    assert (code, "A GPU needs 1.00 GiB with CUDA's 1.00 GiB and 5 % that" in text) == (0, True)


@pytest.mark.slow
def test_a_picture_of_the_memory(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    for name, begin in (("memory.png", b"\x89PNG"), ("memory.svg", b"<?xml")):
        code, text, error = call(capsys, "--training.micro-batch-size", "2", "--picture", tmp_path / name)
        assert (code, error, "Most memory" in text) == (0, "", True)
        assert (tmp_path / name).read_bytes().startswith(begin)
    (tmp_path / "link.svg").symlink_to("memory.svg")
    assert call(capsys, "--training.micro-batch-size", "2", "--picture", tmp_path / "link.svg")[0] == 0
    assert (tmp_path / "link.svg").is_symlink()
    svg = (tmp_path / "memory.svg").read_text()
    # matplotlib writes each text as a comment next to its shapes.
    for words in (
        "5 more micro-batches",
        "activations",
        "MiB: backward of the loss, micro-batch 1",
        "memory of rank 0 of 1: tp 1",
    ):
        assert f"<!-- {words}" in svg or re.search(rf"<!-- [^>]*{re.escape(words)}", svg), words
    code, _, error = call(capsys, "--fit", "1GiB", "--picture", tmp_path / "fit.svg", *FEW)
    assert (code, error) == (0, "")
    assert "limit 1.00 GiB" in (tmp_path / "fit.svg").read_text()


def test_a_picture_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    for name in ("file/memory.png", "folder.png"):
        code, _, error = call(capsys, "--picture", tmp_path / name)
        assert (code, "cannot write" in error, error.count("\n")) == (2, True, 1)


@pytest.mark.parametrize(
    ("argv", "command", "message"),
    [
        (["finetune"], "plan finetune", "no model to start from; name its Hugging Face folder"),
        (["dpo", "F", "--packing"], "plan dpo", "dpo cannot be used with --packing"),
        (["finetune", "F", "--tp", "16"], "plan finetune", "tp 16 is more than the 8 attention heads"),
        (["finetune", "F", "--rank", "2", "--tp", "2"], "plan finetune", "rank 2 is not one of the 2 ranks, 0 to 1"),
        (["--rank", "0", "--fit", "1GiB"], "plan", "--rank 0 is of one layout, and --fit lists layouts"),
        (["--host-bandwidth", "fast"], "plan", "'fast' is not a number of bytes"),
        (["--picture", "memory.pdf"], "plan", "--picture memory.pdf is no picture; its name must end in .png or .svg"),
        (["--tp", "2", "finetune"], "plan", "the word finetune goes directly after shardwise plan"),
        (["generate"], "plan generate", "MODEL_DIR is missing; see --help"),
        (["generate", "nowhere"], "plan generate", "nowhere"),
        (["generate", "F", "--ranks", "2", "--tp", "4"], "plan generate", "--tp 4 is not the number of ranks, 2"),
        (["generate", "F", "--fit", "1GB", "--batch-size", "4"], "plan generate", "--batch-size 4 with --fit"),
        (["generate", "F", "--rank", "1"], "plan generate", "rank 1 is not one of the 1 ranks, 0 to 0"),
        (
            ["generate", "F", "--prompt-length", "128"],
            "plan generate",
            "a prompt of 128 tokens and 1 new ones are more",
        ),
    ],
)
def test_a_mistake_is_one_line(capsys, folder, argv, command, message):
    code, out, error = call(capsys, *(folder if word == "F" else word for word in argv))
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith(f"shardwise {command}: error: ")
    assert message in error


@pytest.mark.slow
def test_a_folder_with_the_name_of_a_command(capsys, folder, monkeypatch):
    monkeypatch.chdir(folder)
    Path("dpo").mkdir()
    (folder / "dpo" / "config.json").write_text(json.dumps(CONFIG))
    assert planned(capsys, "./dpo", "--tp", "2")["layout"]["tp"] == 2
    assert planned(capsys, "--tp", "2", "dpo")["layout"]["tp"] == 2
