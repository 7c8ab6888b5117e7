"""``shardwise chat`` and ``shardwise eval`` as a user calls them: what transformers' model says to the same."""

from __future__ import annotations

import io
import json
import sys
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from run.run_processes import run_command
from storage.adapters.tiny_models import save_model

from shardwise.cli.main import main
from shardwise.data import ExampleEncoder, example_of
from shardwise.data.json_records import Record
from shardwise.data.tokenizer import ChatTemplate, Tokenizer

CHATML = (
    "{% for message in messages %}{% if message.content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    save_model("llama", folder / "model", vocab_size=301, dtype=torch.float64, seed=5, max_position_embeddings=256)
    text = "user assistant What is 1 + 1? 2. And 2 + 2? 4. " * 5
    Tokenizer.train([text], 275, ("<|endoftext|>", "<|im_end|>", "<|im_start|>")).save(folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(CHATML)
    chats = [
        [{"role": "user", "content": f"What is {n} + {n}?"}, {"role": "assistant", "content": f"{2 * n}."}]
        for n in range(9)
    ]
    lines = [*({"messages": chat} for chat in chats), {"prompt": "1 + 1 =", "completion": " 2"}, {"text": text[:40]}]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "plain.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64).eval()


def greedy(model, ids, stops=()):
    new = []
    with torch.no_grad():
        while len(new) < TOKENS:
            token = int(model(torch.tensor([[*ids, *new]])).logits[0, -1].argmax())
            if token in stops:
                break
            new.append(token)
    return new


def talk(folder, lines, monkeypatch, *more):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    options = ("--temperature", "0", "--max-new-tokens", str(TOKENS), "--device", "cpu")
    return main(["chat", str(folder / "model"), *options, *more])


def test_answers_are_to_the_whole_conversation(folder, model, monkeypatch, capsys):
    encoder = ExampleEncoder(Tokenizer.load(folder / "model"), ChatTemplate(CHATML))
    turns, expected = [{"role": "system", "content": "Be."}], []
    for said in ("1 + 1?", "And 2 + 2?"):
        turns.append({"role": "user", "content": said})
        answer = encoder.tokenizer.decode(greedy(model, encoder.prompt_ids(tuple(turns))))
        turns.append({"role": "assistant", "content": answer})
        expected.append(answer)
    lines = ["1 + 1?", "", "no", "And 2 + 2?", "/reset", "1 + 1?", "/exit", "never read"]
    assert talk(folder, lines, monkeypatch, "--system", "Be.") == 0
    out, err = capsys.readouterr()
    assert out == "".join(f"{answer}\n" for answer in [*expected, expected[0]])
    assert "refuses the messages: not that" in err
    # Without an answer the command ends with an error.
    assert talk(folder, ["no", "", "no"], monkeypatch) == 2
    assert "shardwise chat: error: no turn was answered, because the chat template refuses" in capsys.readouterr().err


def test_every_end_ends_an_answer(folder, model, monkeypatch, capsys):
    """Those of generation_config.json, and the token that ends a turn of the template."""
    encoder = ExampleEncoder(Tokenizer.load(folder / "model"), ChatTemplate(CHATML))
    assert encoder.turn_end_ids() == (1,)
    new = greedy(model, encoder.prompt_ids(({"role": "user", "content": "1 + 1?"},)))
    for stops in ([299, new[3]], [new[1], 299]):
        config = folder / "model" / "generation_config.json"
        config.write_text(json.dumps({"eos_token_id": stops}))
        try:
            assert talk(folder, ["1 + 1?"], monkeypatch) == 0
        finally:
            config.unlink()
        kept = new[: min(new.index(stop) for stop in stops if stop in new)]
        assert capsys.readouterr().out == encoder.tokenizer.decode(kept) + "\n"


def test_chats_of_a_file_are_answered_by_the_template(folder, model, tmp_path, capsys):
    encoder = ExampleEncoder(Tokenizer.load(folder / "model"), ChatTemplate(CHATML))
    system, asked = {"role": "system", "content": "Be."}, {"role": "user", "content": "1 + 1?"}
    records = [
        {"messages": [asked]},
        {"system": "Be.", "messages": [{"from": "human", "value": "1 + 1?"}]},
        {"messages": [asked, {"role": "assistant", "content": "2."}]},
        {"messages": [asked | {"content": "no"}]},
        {"messages": [asked], "prompt": "1 + 1?"},
        {"messages": [asked | {"content": "<|im_end|>"}]},
        {"messages": []},
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = [
        "--temperature",
        "0",
        "--max-new-tokens",
        str(TOKENS),
        "--device",
        "cpu",
        "--json",
        "--no-special-tokens",
    ]
    assert main(["generate", str(folder / "model"), "--prompts", str(tmp_path / "chats.jsonl"), *options]) == 2
    lines = sorted(map(json.loads, capsys.readouterr().out.splitlines()), key=lambda line: line["prompt"])
    for line, messages in zip(lines, ((asked,), (system, asked)), strict=False):
        ids = encoder.prompt_ids(messages)
        assert line["prompt_tokens"] == ids
        assert line["text"] == encoder.tokenizer.decode(greedy(model, ids, (0, 1)))
    for line, error in zip(
        lines[2:],
        ("nothing to answer", "not that", "both prompt and messages", "spells a special token", "has no message"),
        strict=True,
    ):
        assert error in line["error"]


def measured(printed):
    names = {"loss": "loss", "perplexity": "perplexity", "bits per byte": "bits per byte"}
    rows = {name: line for line in printed.splitlines() for name in names if line.startswith(name)}
    return {name: float(line.removeprefix(name).split()[0]) for name, line in rows.items()}


def test_what_a_model_is_measured_to_be(folder, model, capsys):
    encoder = ExampleEncoder(Tokenizer.load(folder / "model"), ChatTemplate(CHATML))
    total, labels, num_bytes = 0.0, 0, 0
    for line in (folder / "data.jsonl").read_text().splitlines():
        encoded = encoder.encode(example_of(Record("here", json.loads(line)), "text"))
        ids, learned = torch.from_numpy(encoded.ids), torch.from_numpy(encoded.learned)[1:]
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        total += float(F.cross_entropy(logits[learned], ids[1:][learned], reduction="sum"))
        labels += int(learned.sum())
        num_bytes += int(encoded.num_bytes[1:][learned.numpy()].sum())
    data = ["--data", str(folder / "data.jsonl"), "--device", "cpu"]
    assert main(["eval", str(folder / "model"), *data]) == 0
    values = measured(capsys.readouterr().out)
    assert values["loss"] == pytest.approx(total / labels, abs=1e-5)
    assert values["perplexity"] == pytest.approx(torch.tensor(total / labels).exp().item(), rel=1e-4)
    assert values["bits per byte"] == pytest.approx(total / labels / 0.6931471805599453 * labels / num_bytes, abs=1e-4)


def read_from(path):
    """Let standard input come from a file."""
    sys.stdin = path.open()


@pytest.mark.slow
def test_two_ranks_talk_and_measure_alike(folder, model, monkeypatch, capsys, tmp_path):
    plain = [
        "eval",
        str(folder / "model"),
        "--data",
        str(folder / "plain.txt"),
        "--device",
        "cpu",
        "--sequence-length",
        "31",
    ]
    assert main(plain) == 0
    alone = measured(capsys.readouterr().out)
    printed, _ = run_command(tmp_path, 2, *plain, "--tp", "2")
    assert measured(printed) == pytest.approx(alone, abs=1e-5)
    assert talk(folder, ["1 + 1?", "And?"], monkeypatch) == 0
    said = capsys.readouterr().out
    (tmp_path / "said").write_text("1 + 1?\nAnd?\n")
    options = ("--temperature", "0", "--max-new-tokens", str(TOKENS), "--device", "cpu", "--tp", "2")
    read = partial(read_from, tmp_path / "said")
    assert run_command(tmp_path, 2, "chat", folder / "model", *options, changed=read)[0] == said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["eval", "MODEL"], "no data to measure on; pass --data with files or folders"),
        (["eval", "MODEL", "--data", "none"], "data path 'none' does not exist"),
        (["eval", "MODEL", "--data", "DATA", "--sequence-length", "999"], "--sequence-length 999 is more than 256"),
        (["chat", "BARE"], "has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)"),
    ],
)
def test_mistakes_are_one_line(folder, tmp_path, capsys, argv, message):
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in (folder / "model").iterdir():
        if path.name != "chat_template.jinja":
            (bare / path.name).symlink_to(path)
    places = {"MODEL": str(folder / "model"), "BARE": str(bare), "DATA": str(folder / "data.jsonl")}
    assert main([places.get(word, word) for word in argv]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
