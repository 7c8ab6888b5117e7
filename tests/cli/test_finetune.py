"""``shardwise finetune`` as a user calls it: a Hugging Face folder in, one that transformers or peft opens out."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from run.run_processes import run_command
from safetensors.torch import load_file
from storage.adapters.tiny_models import read_adapters, save_model

from shardwise.cli.arguments import parse_command
from shardwise.cli.main import main
from shardwise.cli.training import FinetuneArguments
from shardwise.data.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune")
    text = Path(argparse.__file__).read_text()[:20_000]
    (folder / "text.jsonl").write_text("".join(json.dumps({"body": part}) + "\n" for part in text.split("\n\n")))
    save_model("llama", folder / "base", vocab_size=301)
    Tokenizer.train([text], 290).save(folder / "base")
    # Of the tokenizer's files, one that is not ours.
    (folder / "base" / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder


def arguments_of(folder, out, *more):
    return [
        *("finetune", str(folder / "base"), "--out", str(folder / out), "--data", str(folder / "text.jsonl")),
        *("--corpus.text-key", "body", "--model.sequence-length", "16", "--device", "cpu"),
        *("--training.steps", "4", "--training.global-batch-size", "4", *more),
    ]


def call_on_two_ranks(folder, out, *more):
    return run_command(folder, 2, *arguments_of(folder, out, *more, "--tp", "2"))[0]


def call_here(folder, out, *more):
    """On one rank, this process; the exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_CACHE", str(folder / "cache"))
        return main(arguments_of(folder, out, *more))


def reopened(path):
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(path).eval()


@pytest.mark.slow
def test_adapters_find_their_model_from_any_folder(folder, tmp_path, monkeypatch):
    arguments = arguments_of(folder, "roaming", "--lora-rank", "2")
    arguments[1] = "base"
    monkeypatch.setenv("SHARDWISE_CACHE", str(folder / "cache"))
    monkeypatch.chdir(folder)
    assert main(arguments) == 0
    monkeypatch.chdir(tmp_path)
    assert main(["generate", str(folder / "roaming"), "--max-new-tokens", "1", "--device", "cpu"]) == 0


@pytest.mark.slow
def test_all_weights(folder, capsys):
    rate = ("--optimizer.learning-rate", "0.01")
    assert "all weights" in call_on_two_ranks(folder, "tuned", *rate)
    tuned, base = reopened(folder / "tuned"), reopened(folder / "base")
    changed = [name for name, param in tuned.named_parameters() if not torch.equal(param, base.get_parameter(name))]
    assert len(changed) == len(list(base.named_parameters()))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (folder / "tuned" / name).read_bytes() == (folder / "base" / name).read_bytes()
    for name in ("metrics.jsonl", "settings.json", "sample.txt", "checkpoints"):
        assert (folder / "tuned" / name).exists()
    # Done already: the model is written anew from the checkpoint, bit for bit, also by one rank.
    before = (folder / "tuned" / "model.safetensors").read_bytes()
    (folder / "tuned" / "model.safetensors").unlink()
    capsys.readouterr()
    assert call_here(folder, "tuned", "--resume", "auto", *rate) == 0
    assert "resumed at step 4" in capsys.readouterr().out
    assert (folder / "tuned" / "model.safetensors").read_bytes() == before
    # It is a model to go on with, and no folder for another run; its checkpoints are for the run itself.
    assert call_here(folder, "tuned") == 2
    assert "--resume auto" in capsys.readouterr().err
    assert main(["generate", str(folder / "tuned"), "--prompt", "import", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("import")
    assert main(["generate", str(folder / "tuned" / "checkpoints")]) == 2
    assert "is of shardwise finetune, whose --out becomes a Hugging Face folder" in capsys.readouterr().err


@pytest.mark.slow
def test_adapters_and_merged_adapters_are_the_same_model(folder, capsys):
    """Merged at once by a run, or later in the folder of a run that has ended, and taken apart again."""
    options = ("--lora-rank", "4", "--lora-targets", "q_proj", "v_proj", "down_proj")
    options += ("--optimizer.learning-rate", "0.05")
    out, names = folder / "later", ("adapter_model.safetensors", "adapter_config.json")
    assert call_here(folder, "later", *options) == 0
    trained = sum(tensor.numel() for tensor in load_file(out / "adapter_model.safetensors").values())
    assert f"{trained / 1e3:.1f} K of " in capsys.readouterr().out
    assert not (out / "config.json").exists()
    assert call_here(folder, "merged", *options, "--lora-merge") == 0
    assert not (folder / "merged" / "adapter_config.json").exists()
    adapters = {name: (out / name).read_bytes() for name in names}
    ids = torch.arange(24).view(2, 12)
    base = reopened(folder / "base")
    with torch.no_grad():
        plain = base(ids).logits
        adapted = read_adapters(base, out)(ids).logits
    steps = (out / "metrics.jsonl").read_bytes()
    assert main(["export-hf", str(out), "--out", str(folder / "exported")]) == 2
    assert "holds adapters, as peft reads them; merge them into their model with --merge" in capsys.readouterr().err
    assert main(["export-hf", str(out), "--out", str(folder / "exported"), "--merge"]) == 0
    capsys.readouterr()
    assert call_here(folder, "later", *options, "--resume", "auto", "--lora-merge") == 0
    assert "resumed at step 4" in capsys.readouterr().out
    # No step is done again.
    assert (out / "metrics.jsonl").read_bytes() == steps
    assert not [path.name for path in out.iterdir() if path.name.startswith(("adapter", "export"))]
    assert (adapted - plain).norm() > 1e-2 * plain.norm()
    for merged in (out, folder / "merged", folder / "exported"):
        with torch.no_grad():
            assert (adapted - reopened(merged)(ids).logits).norm() < 1e-5 * plain.norm(), merged
    # A Hugging Face folder like any other.
    assert main(["import-hf", str(out), "--out", str(folder / "imported")]) == 0
    assert (folder / "imported" / "checkpoints" / "step-00000000").is_dir()
    # The adapters are in the checkpoint still, bit for bit.
    assert call_here(folder, "later", *options, "--resume", "auto") == 0
    assert {name: (out / name).read_bytes() for name in names} == adapters
    assert not (out / "config.json").exists()
    assert not list(out.glob("model*"))
    with torch.no_grad():
        assert torch.equal(read_adapters(reopened(folder / "base"), out)(ids).logits, adapted)


@pytest.mark.slow
def test_tokens_that_were_added_get_rows(folder):
    """Only the new rows learn, next to the adapters; a reader needs no flag."""
    save_model("llama", folder / "small", vocab_size=285)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "base" / name, folder / "small")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_CACHE", str(folder / "cache"))
        options = ("--lora-rank", "2", "--resize-vocab", "--train-new-tokens", "--lr", "0.01")
        first, _, *others = arguments_of(folder, "grown", *options)
        assert main([first, str(folder / "small"), *others]) == 0
    assert main(["export-hf", str(folder / "grown"), "--out", str(folder / "grown-merged"), "--merge"]) == 0
    assert main(["generate", str(folder / "grown"), "--max-new-tokens", "1", "--device", "cpu"]) == 0
    before, model = reopened(folder / "small"), reopened(folder / "grown-merged")
    assert model.config.vocab_size == 290
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old, new = before.get_parameter(name), model.get_parameter(name)
        assert torch.equal(new[:285], old)
        assert ((new[285:] - old.mean(0)).norm(dim=1) > 1e-4).any()


@pytest.mark.slow
def test_adapters_of_a_quantised_base_are_merged_into_the_base_as_it_is(folder, capsys):
    options = ("--lora-rank", "4", "--lora-modules-to-save", "lm_head", "--optimizer.learning-rate", "0.05")
    assert call_here(folder, "on-nf4", *options, "--base-quantization", "nf4") == 0
    assert "on a base in nf4" in capsys.readouterr().out
    assert main(["export-hf", str(folder / "on-nf4"), "--out", str(folder / "from-nf4"), "--merge"]) == 0
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        adapted = read_adapters(reopened(folder / "base"), folder / "on-nf4")(ids).logits
        merged = reopened(folder / "from-nf4")(ids).logits
    assert (adapted - merged).norm() < 1e-5 * adapted.norm()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["base", "--data", "x", "--base-quantization", "nf4"],
            "--base-quantization nf4 without --lora-rank: a quantised",
        ),
        (["--data", "x"], "no model to start from; name its Hugging Face folder, MODEL_DIR"),
        (["base", "--data", "x", "--optimizer.lr", "1"], "unknown flag --optimizer.lr; did you mean --lr?"),
        (["base"], "no text to train on; pass --data with files or folders, or --data stdlib"),
        (["base", "--data", "x", "--lora-alpha", "3"], "--lora-alpha without --lora-rank"),
    ],
)
def test_a_mistake_is_one_line_before_any_rank_starts(capsys, argv, message):
    assert main(["finetune", *argv]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(f"shardwise finetune: error: {message}")
    assert error.count("\n") == 1


def test_a_folder_that_is_no_model_is_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "x.txt"
    data.write_text("a text")
    argv = [str(tmp_path), "--data", str(data), "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert main(["finetune", *argv]) == 2
    error = capsys.readouterr().err
    assert "config.json" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def parse(argv):
    return parse_command(FinetuneArguments, argv, "shardwise finetune")


def test_settings_from_flags_and_file(tmp_path):
    (tmp_path / "run.toml").write_text('base = "from-file"\ndata = ["a"]\n[lora]\nlora_rank = 4\n[parallel]\ntp = 2\n')
    arguments = parse_command(
        FinetuneArguments, ["--config", str(tmp_path / "run.toml"), "--lora-rank", "8"], "shardwise finetune"
    )
    settings = arguments.settings
    assert (settings.base, settings.data, settings.lora.lora_rank, settings.parallel.tp) == ("from-file", ("a",), 8, 2)
    for flag in ("--tp", "--parallel.tp"):
        settings = parse_command(
            FinetuneArguments, ["base", "--data", "a", "b", flag, "2"], "shardwise finetune"
        ).settings
        assert (settings.base, settings.data, settings.parallel.tp) == ("base", ("a", "b"), 2)


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A model with a chat template, and chats of which one has no answer."""
    folder = tmp_path_factory.mktemp("chats")
    turns = [[{"from": "human", "value": f"{n} + 1?"}, {"from": "gpt", "value": f"{n + 1}."}] for n in range(20)]
    records = [{"conversations": each} for each in [*turns[:2], turns[2][:1], *turns[3:]]]
    (folder / "chats.json").write_text(json.dumps(records))
    (folder / "held-out.jsonl").write_text('{"prompt": "1 + 1 =", "completion": " 2"}\n')
    save_model("llama", folder / "base", vocab_size=301)
    Tokenizer.train([json.dumps(turns)], 280, ("<|im_end|>", "<|im_start|>")).save(folder / "base")
    (folder / "base" / "chat_template.jinja").write_text(CHATML)
    return folder


def chat_arguments(folder, *more):
    return ["finetune", str(folder / "base"), "--data", str(folder / "chats.json"), "--device", "cpu", *more]


@pytest.mark.parametrize("coloured", [False, True])
def test_samples_are_shown(chats, capsys, monkeypatch, coloured):
    monkeypatch.setenv("FORCE_COLOR" if coloured else "NO_COLOR", "1")
    assert main(chat_arguments(chats, "--show", "3", "--tp", "2", "--out", str(chats / "none"))) == 0
    out = capsys.readouterr().out
    learned = "\033[32m1.<|im_end|>\033[0m" if coloured else "[[1.<|im_end|>\n]]"
    assert learned in out
    assert "record 3" in out
    assert "is left out: no turn of the assistant" in out
    assert "record 4" in out
    assert "record 5" not in out
    assert not (chats / "none").exists()
    assert main(chat_arguments(chats, "--show", "3", "--nproc", "2")) == 2
    assert "--show prints samples on one rank; leave --nproc 2 out" in capsys.readouterr().err


def test_what_is_shown_does_nothing_to_a_terminal(chats, capsys, tmp_path):
    (tmp_path / "evil.jsonl").write_text(json.dumps({"prompt": "\033[2J\a", "completion": "\u202eabc"}) + "\n")
    assert main([*chat_arguments(chats)[:3], str(tmp_path / "evil.jsonl"), "--show", "1", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert not {"\033", "\a", "\u202e"} & set(out)
    assert r"\x1b[2J\x07" in out


def test_texts_are_shown_as_they_are_trained_on(chats, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    texts = [f"{number} and one makes {number + 1}" for number in range(12)] + ["and so on " * 20_000]
    for name, part in (("short", texts[:-1]), ("long", texts[-1:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in part))

    def shown(*more, name="short"):
        data = ("--data", str(tmp_path / f"{name}.jsonl"), "--device", "cpu", "--show", "3")
        assert main([*chat_arguments(chats)[:2], *data, *more]) == 0
        head, *samples = capsys.readouterr().out.split("\nsample ")
        return head, [each.strip().split("\n") for each in samples]

    # A stream without a gap: where one sample ends the next begins, whichever texts it is of.
    head, samples = shown("--model.sequence-length", "32")
    assert "one after the other, cut into " in head
    ids = [[int(each.strip("[]")) for each in lines[-1].split()] for lines in samples]
    assert [len(each) for each in ids] == [33] * 3
    assert [ids[0][-1], ids[1][-1]] == [ids[1][0], ids[2][0]]
    assert "<|im_end|>" in samples[0][1].removesuffix("<|im_end|>]]")
    # Texts of their own.
    head, samples = shown("--model.sequence-length", "64", "--packing")
    assert head.startswith("12 samples in ")
    assert [lines[1] for lines in samples] == [f"[[{each}<|im_end|>]]" for each in texts[:3]]
    # What is cut is not trained on, and a text as long as a book is no help on a screen.
    _, ((title, _, last),) = shown("--model.sequence-length", "16", "--packing", name="long")
    assert title.endswith("; more than 17: --too-long cut")
    assert len(last.split()) == 17
    _, (lines,) = shown("--packing", "--too-long", "split", name="long")
    assert re.fullmatch(r"\.\.\. [\d,]+ tokens not shown \.\.\.", lines[-2])
    assert sum(map(len, lines)) < 30_000


def test_showing_leaves_nothing_to_go_on_from(tmp_path):
    assert parse(["base", "--data", "a", "--show", "1"]).resume_hint() == ""
    anew = "no checkpoint was saved; run the same command again to start anew"
    assert parse(["base", "--data", "a", "--out", "nowhere"]).resume_hint() == anew
    (tmp_path / "checkpoints").mkdir()
    assert parse(["base", "--data", "a", "--out", str(tmp_path)]).resume_hint() == anew


def test_what_the_model_has_not_is_not_recomputed(chats, capsys):
    recompute = ("--recompute.granularity", "full", "--recompute.num-layers", "9")
    assert main(chat_arguments(chats, *recompute, "--show", "1")) == 2
    assert "recompute.num-layers 9 is more than the 2 layers of the model; use 2 at most" in capsys.readouterr().err


@pytest.mark.slow
def test_chats_from_the_command_line(chats, capsys):
    out = chats / "tuned"
    more = ("--held-out", chats / "held-out.jsonl", "--epochs", "2", "--packing", "--out", out, "--tp", "2")
    command = chat_arguments(
        chats, *map(str, more), "--model.sequence-length", "64", "--training.global-batch-size", "2"
    )
    printed, _ = run_command(chats, 2, *command)
    assert "note   1 of 20 samples to train on left out: 1 since no turn of the assistant (first: " in printed
    assert "chats.json, 1 file, 20 samples" in printed
    assert "bits per byte" in printed
    steps = len((out / "metrics.jsonl").read_text().splitlines())
    # 19 samples in two epochs, two rows to a step, and more than one sample in a row.
    assert 4 < steps < 19
    assert json.loads((out / "settings.json").read_text())["training"]["steps"] == steps
    assert (out / "chat_template.jinja").read_text() == CHATML
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_CACHE", str(chats / "cache"))
        assert main([*command[:-4], "--tp", "1", "--resume", "auto", *command[-4:]]) == 0
    assert f"resumed at step {steps}" in capsys.readouterr().out


def test_epochs_and_steps_exclude_each_other(chats, capsys):
    assert main(chat_arguments(chats, "--epochs", "2", "--training.steps", "3")) == 2
    assert "--epochs 2 cannot be used with --training.steps 3" in capsys.readouterr().err
