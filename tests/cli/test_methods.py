"""``shardwise dpo`` as a user calls it: a folder in, one that others open out."""

from __future__ import annotations

import json

import pytest
from run.run_processes import run_command
from run.test_chats import TEMPLATE
from storage.adapters.tiny_models import save_model

from shardwise.cli.main import main
from shardwise.data.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dpo")
    pairs = [
        {"prompt": f"{number} + 1 =", "chosen": f" {number + 1}", "rejected": f" {number}"} for number in range(40)
    ]
    text = json.dumps(pairs)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    for name, vocab_size, of in (("base", 301, names), ("other", 290, names[:1])):
        save_model("llama", folder / name, vocab_size=vocab_size)
        Tokenizer.train([text], 280, of).save(folder / name)
    (folder / "base" / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def arguments_of(folder, command, *more, data="pairs.jsonl"):
    return [
        *(command, str(folder / "base"), "--data", str(folder / data), "--model.sequence-length", "16"),
        *("--training.steps", "3", "--training.global-batch-size", "4", "--device", "cpu", *more),
    ]


@pytest.mark.slow
def test_preferences_on_two_ranks(folder):
    command = arguments_of(folder, "dpo", "--out", str(folder / "out"), "--lora-rank", "2", "--lora-merge", "--tp", "2")
    printed, progress = run_command(folder, 2, *command)
    assert "reference log-probabilities of 40 pairs" in printed
    assert "held-out pairs: loss 0." in printed
    assert "rewards/accuracies" in progress
    import transformers

    transformers.AutoModelForCausalLM.from_pretrained(folder / "out")
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert rows[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"} <= rows[0].keys()


def test_a_look_at_pairs(folder, capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    (folder / "chat.jsonl").write_text(
        json.dumps(
            {
                "chosen": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}],
                "rejected": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "3"}],
            }
        )
    )
    assert main(arguments_of(folder, "dpo", "--show", "1", data="chat.jsonl")) == 0
    shown = capsys.readouterr().out
    prompt = "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n"
    for name, answer in (("chosen", "2"), ("rejected", "3")):
        assert f", {name}: " in shown
        assert f"{prompt}[[{answer}<|im_end|>\n]]" in shown
    assert main(arguments_of(folder, "finetune", "--out", str(folder / "no"))) == 2
    assert "pairs.jsonl', line 1: a preference ('chosen' and 'rejected'); use shardwise dpo" in capsys.readouterr().err
    assert main(arguments_of(folder, "dpo", "--show", "1", "--beta", "nan")) == 2
    assert "--beta is nan; it must be a number" in capsys.readouterr().err
