"""A tuned model stops, in transformers too, at the token with which its chat template ends a turn."""

from __future__ import annotations

import json

import pytest
from storage.adapters.tiny_models import save_model

from shardwise.cli.main import main
from shardwise.data import Example, ExampleEncoder
from shardwise.data.tokenizer import ChatTemplate, Tokenizer
from shardwise.run.settings import SampleSettings
from shardwise.run.tasks.pretrained_model import FolderTokenizer
from shardwise.run.tasks.samples import prepare_samples

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)
TEXT, START, END = range(3)
ASKED, SAID = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}


def make_tokenizer(folder, **generation):
    Tokenizer.train(["Who? I."], 262, ("<|endoftext|>", "<|im_start|>", "<|im_end|>")).save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))


def stops(folder, name="generation_config.json"):
    return json.loads((folder / name).read_text())["eos_token_id"]


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, [END, TEXT]),
        ({"eos_token_id": TEXT, "top_k": 5}, [END, TEXT]),
        ({"eos_token_id": [TEXT, END, START]}, [END, TEXT, START]),
        ({"eos_token_id": END}, None),
        ({"eos_token_id": [END, TEXT]}, None),
    ],
)
def test_the_learned_end_comes_first(tmp_path, monkeypatch, generation, expected):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    base = tmp_path / "base"
    make_tokenizer(base, **generation)
    (base / "config.json").write_text(json.dumps({"eos_token_id": TEXT}))
    tokenizer = FolderTokenizer.load(base)
    tokenizer.source = base
    examples = [Example(str(number), None, (ASKED, SAID | {"content": f"I{number}."})) for number in range(4)]
    encoder = ExampleEncoder(tokenizer, ChatTemplate.load(base))
    data = prepare_samples(
        "chats", examples, None, encoder, SampleSettings(), sequence_length=64, held_out_fraction=0.3
    )
    tokenizer.save(tmp_path / "out")
    if expected is None:
        assert data.notes == ()
        assert (tmp_path / "out" / "generation_config.json").read_bytes() == (
            base / "generation_config.json"
        ).read_bytes()
        return
    (note,) = data.notes
    assert note.startswith(
        f"what is learned ends with '<|im_end|>' ({END}), so the result's eos_token_id is {expected}"
    )
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == generation | {"eos_token_id": expected}


@pytest.mark.slow
def test_every_folder_that_is_written_has_the_learned_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    base = tmp_path / "base"
    save_model("llama", base, vocab_size=301)
    make_tokenizer(base, eos_token_id=TEXT)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"eos_token_id": TEXT}))
    messages = [[ASKED, SAID | {"content": f"I{number}."}] for number in range(9)]
    pairs = [{"prompt": [ASKED], "chosen": [SAID], "rejected": [each[1]]} for each in messages]
    for name, records in (("chats", [{"messages": each} for each in messages]), ("pairs", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))

    def run(command, data, out, *more):
        arguments = [command, str(base), "--data", str(tmp_path / f"{data}.jsonl"), "--out", str(tmp_path / out)]
        arguments += ["--device", "cpu", "--training.steps", "1", "--training.global-batch-size", "2", *more]
        assert main(arguments) == 0
        assert f"ends with '<|im_end|>' ({END})" in capsys.readouterr().out

    run("finetune", "chats", "tuned")
    run("dpo", "pairs", "preferred")
    run("finetune", "chats", "adapters", "--lora-rank", "2")
    run("finetune", "chats", "merged", "--lora-rank", "2", "--lora-merge")
    assert main(["export-hf", str(tmp_path / "adapters"), "--merge", "--out", str(tmp_path / "exported")]) == 0
    assert main(["import-hf", str(tmp_path / "tuned"), "--out", str(tmp_path / "imported")]) == 0
    assert main(["export-hf", str(tmp_path / "imported"), "--out", str(tmp_path / "again")]) == 0
    for out in ("tuned", "preferred", "adapters", "merged", "exported", "again"):
        assert stops(tmp_path / out) == [END, TEXT], out
        if out != "adapters":
            assert stops(tmp_path / out, "config.json") == END, out
