"""What is read wrongly without a word: texts, tokens and models that others made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from run.run_processes import run_command
from storage.adapters.tiny_models import read_adapters, save_model
from tokenizers import AddedToken

from shardwise.cli.main import main
from shardwise.data.tokenizer import Tokenizer

CHAT = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n  A <think>model</think>.<|im_end|>\n"
NUM_IDS = 301


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of transformers with a tokenizer in a chat format."""
    folder = tmp_path_factory.mktemp("model") / "chat"
    save_model("llama", folder, vocab_size=NUM_IDS)
    backend = tokenizers.Tokenizer.from_str(
        Tokenizer.train(["Who are you? A model of words, user and assistant.\n"], 290)._backend.to_str()
    )
    backend.add_special_tokens([AddedToken("<|im_start|>", rstrip=True), AddedToken("<|im_end|>", lstrip=True)])
    backend.add_tokens([AddedToken("<think>"), AddedToken("</think>", single_word=True)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def flags(tmp_path: Path, data: Path) -> list[str]:
    held_out = ["--corpus.held-out-fraction", "0.2", "--model.sequence-length", "8", "--device", "cpu"]
    return ["--data", str(data), "--out", str(tmp_path / "run"), "--training.steps", "1", *held_out]


def test_finetuning_reads_special_tokens_as_transformers_does(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a run that read them so does not go on with them as letters, nor take such ids from the cache."""
    import transformers

    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    # Equal documents, so that all of one are held out, or a part of one.
    texts = [f"{CHAT}{number}" for number in range(12)]
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    expected = {}
    for parse in (True, False):
        options = {"add_special_tokens": False, "split_special_tokens": not parse}
        expected[parse] = sum(len(theirs(text, **options)["input_ids"]) + 1 for text in texts)
    assert expected[True] < expected[False] - 300
    asked = {}
    for parse, flag in ((True, []), (False, ["--no-special-tokens", "--resume", "restart"])):
        before = set((tmp_path / "cache").glob("*.npy"))
        assert main(["finetune", str(model), *flags(tmp_path, data), *flag]) == 0
        streams = [np.load(path) for path in set((tmp_path / "cache").glob("*.npy")) - before]
        assert len(streams) == 2
        # One document may be cut in two, each with an end.
        assert expected[parse] <= sum(map(len, streams)) <= expected[parse] + 12
        ids = {int(token) for stream in streams for token in stream}
        asked[parse] = theirs.convert_tokens_to_ids("<|im_start|>") in ids
    assert asked == {True: True, False: False}
    capsys.readouterr()
    assert main(["finetune", str(model), *flags(tmp_path, data), "--resume", "auto"]) == 2
    assert "special-tokens was False and is True" in capsys.readouterr().err


def generate_here(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[str, str]:
    capsys.readouterr()
    assert main(["generate", *map(str, argv), "--device", "cpu"]) == 0
    return capsys.readouterr()


def test_a_model_says_how_it_generates_also_after_import_and_export(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each end of a text ends it, and what cannot be followed is said; the words are those of transformers."""
    import torch
    import transformers

    folder = Path(shutil.copytree(model, tmp_path / "model"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = "<|im_start|>user\nWho"
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    whole = theirs.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)[0].tolist()
    new = whole[ids.size(1) :]
    # A token that is nobody's end of a text, where the text has not had it before.
    place = next(place for place in range(5, 20) if new[place] not in new[:place] and new[place] < 290)
    wishes = {"do_sample": False, "eos_token_id": [NUM_IDS + 5, new[place]], "max_new_tokens": 20, "num_beams": 3}
    (folder / "generation_config.json").write_text(json.dumps(wishes))
    assert main(["import-hf", str(folder), "--out", str(tmp_path / "run")]) == 0
    assert main(["export-hf", str(tmp_path / "run"), "--out", str(tmp_path / "back")]) == 0
    assert json.loads((tmp_path / "back/generation_config.json").read_text()) == wishes
    out, notes = generate_here(capsys, tmp_path / "run", "--prompt", prompt)
    assert out == prompt + tokenizer.decode(new[:place]) + "\n"
    assert notes == (
        "shardwise generate: generation_config.json asks for what is not supported, and is ignored: num_beams 3\n"
        "shardwise generate: eos_token_id 306 is outside the model's 301 ids and ends no text\n"
        "shardwise generate: layers: those for inference, which are faster than those of training\n"
    )
    # A flag wins, and prompts of strangers do not spell tokens.
    assert generate_here(capsys, tmp_path / "run", "--prompt", prompt, "--max-new-tokens", "2")[0] != out
    assert generate_here(capsys, tmp_path / "run", "--prompt", prompt, "--no-special-tokens")[0] != out


def test_adapters_find_their_model_or_say_how_to_give_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Adapters of finetune, on an import at two ranks, write what peft does; the model may have moved meanwhile."""
    import torch
    import transformers

    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path(shutil.copytree(model, tmp_path / "base"))
    (tmp_path / "chats.txt").write_text(CHAT * 20)
    finetune = ["finetune", "base", *flags(tmp_path, tmp_path / "chats.txt"), "--lora-rank", "4"]
    assert main([*finetune, "--optimizer.learning-rate", "0.5", "--optimizer.warmup-steps", "0"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained("base")
    prompt = "Who are"
    texts = []
    for adapted in (False, True):
        theirs = transformers.AutoModelForCausalLM.from_pretrained("base").eval()
        theirs = read_adapters(theirs, tmp_path / "run") if adapted else theirs
        ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        new = theirs.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
        # Ours ends where the text ends; transformers is told to go on.
        texts.append(prompt + tokenizer.decode(new[ids.size(1) :]).partition("<|endoftext|>")[0] + "\n")
    assert texts[0] != texts[1]
    greedy = ["--prompt", prompt, "--temperature", "0", "--max-new-tokens", "8", "--device", "cpu"]
    assert main(["import-hf", "base", "--out", "imported"]) == 0
    on_two_ranks = ["generate", "imported", "--adapter", "run", "--nproc", "2", *greedy]
    assert run_command(tmp_path, 2, *on_two_ranks)[0] == texts[1]
    for given, text in ((["imported"], texts[0]), (["run"], texts[1])):
        capfd.readouterr()
        assert main(["generate", *given, *greedy]) == 0
        assert capfd.readouterr().out == text
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    assert main(["generate", "run", *greedy]) == 2
    error = capfd.readouterr().err
    base = tmp_path / "base"
    assert (
        f"run holds adapters of the model {base}: there is no folder {base}; give the model's folder yourself" in error
    )
    assert error.count("\n") == 1
    assert main(["generate", "elsewhere", "--adapter", "run", *greedy]) == 0
    assert capfd.readouterr().out == texts[1]


def test_data_that_is_no_list_of_records(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is one line that names the file and the place, and leaves nothing."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "list.json"
    for content, place in (
        ('[{"text": "a"}, {"text": NaN}]', "record 2 (line 1)"),
        ('[{"text": "a"},\n{"text": "b', "record 2 (line 2)"),
        ("[" * 3_000_000, "record 1 (line 1)"),
        ('["a", ' + "9" * 1_000_000 + "]", "record 2 (line 1)"),
        ('{\n"data": ["a"]}', "line 1, column 1"),
        ("Infinity", "line 1, column 1"),
    ):
        data.write_text(content)
        for command in (["finetune", str(model)], ["train"]):
            argv = flags(tmp_path, data)
            assert main([*command, *(argv if command[0] == "finetune" else argv[:4])]) == 2
            error = capsys.readouterr().err
            assert str(data) in error
            assert place in error
            assert error.count("\n") == 1
            assert len(error) < 500
            assert not (tmp_path / "run").exists()


def test_a_tokenizer_and_a_chat_template_that_never_end(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is one line, from whatever command reads a text with it."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    folder, many = tmp_path / "model", "x" * 50
    shutil.copytree(model, folder)
    values = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, values["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    loops = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text("{{ messages[0].content * 10 ** 9 }}" + loops)
    texts, prompts, chats = (tmp_path / f"{name}.jsonl" for name in ("texts", "prompts", "chats"))
    texts.write_text(json.dumps({"text": f"{many} and more"}) * 1 + "\n" + json.dumps({"text": many}) + "\n")
    prompts.write_text("".join(json.dumps({"prompt": "a", "completion": many + each}) + "\n" for each in "ab"))
    turns = [[{"role": "user", "content": each}, {"role": "assistant", "content": each}] for each in "ab"]
    chats.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    for argv, said in (
        (["generate", str(folder), "--prompt", many], "cannot encode the text 'xxx"),
        (["finetune", str(folder), *flags(tmp_path, texts)], "cannot encode the text 'xxx"),
        (["finetune", str(folder), *flags(tmp_path, prompts)], "cannot encode the text 'axxx"),
        (["finetune", str(folder), *flags(tmp_path, chats)], "chat_template.jinja makes a value of more than"),
        (["chat", str(folder)], "chat_template.jinja makes a value of more than"),
    ):
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
