"""``shardwise generate`` of many prompts, and ``shardwise score``: what goes wrong with one leaves the others."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import tokenizers
from cli.test_generate import Run
from run.run_processes import run_command, run_commands

from shardwise.cli.main import run_subcommand
from shardwise.core.errors import ConfigError, DataError
from shardwise.data.tokenizer import TextStream, Tokenizer
from shardwise.models.generation import BatchEngine, LogProb, Sampling
from shardwise.run import generate_many, score
from shardwise.run.commands.given_texts import text_to_measure
from shardwise.run.commands.many_texts import Sample

generate, measure = partial(run_subcommand, "generate"), partial(run_subcommand, "score")
TOP_50 = Sampling(0.8, top_k=50)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("run"))


def lines_of(capsys):
    written = capsys.readouterr()
    return [json.loads(line) for line in written.out.splitlines()], written.err


def test_several_prompts_are_shown_in_their_order(run, capsys):
    arguments = [str(run.folder), "--prompt", "def f(", "--prompt", "größe", "--max-new-tokens", "20", "--n", "2"]
    assert generate([*arguments, "--seed", "3", "--batch-size", "2"]) == 0
    texts = [run.text(prompt, 20, TOP_50, seed=seed) for prompt in ("def f(", "größe") for seed in (3, 4)]
    assert len(set(texts)) == 4
    assert capsys.readouterr().out == "\n".join(texts)


def test_json_lines_with_settings_of_their_own(run, capsys, tmp_path, monkeypatch):
    ids = run.tokenizer.encode("def f(")
    records = [
        {"prompt": "größe", "seed": 7},
        {"tokens": ids, "max_new_tokens": 3, "temperature": 0},
        {"prompt": "x", "top_p": 0.9, "top_k": 0},
    ]
    content = "".join(json.dumps(each) + "\n" for each in records)
    (tmp_path / "prompts.jsonl").write_text(content)
    (tmp_path / "prompts.txt").write_text("größe\nx\n")
    arguments = [str(run.folder), "--max-new-tokens", "10", "--json"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    for source in (tmp_path / "prompts.jsonl", "-"):
        assert generate([*arguments, "--prompts", str(source)]) == 0
        lines, _ = lines_of(capsys)
        lines.sort(key=lambda line: line["prompt"])
        expected = [
            run.text("größe", 10, TOP_50, seed=7).removeprefix("größe"),
            run.text("def f(", 3, Sampling(0.0)).removeprefix("def f("),
            run.text("x", 10, Sampling(0.8, top_p=0.9)).removeprefix("x"),
        ]
        assert [line["text"] + "\n" for line in lines] == expected
        assert [line["reason"] for line in lines] == ["length"] * 3
        assert lines[1]["prompt_tokens"] == ids
        assert run.tokenizer.decode(lines[1]["tokens"]) == lines[1]["text"]
    assert generate([str(run.folder), "--max-new-tokens", "10", "--prompts", str(tmp_path / "prompts.txt")]) == 0
    assert capsys.readouterr().out == run.text("größe", 10, TOP_50) + "\n" + run.text("x", 10, TOP_50)


def test_bad_prompts_are_named_and_the_others_answered(run, capsys, tmp_path):
    lines = [
        '{"prompt": "x"}', '{"prompt": ', "[1]", '{"promt": "x"}', '{"prompt": 3}', '{"tokens": [1, true]}', "",
        '{"tokens": [1, 9999]}', '{"prompt": "x", "topk": 3}', '{"prompt": "x", "temperature": -1}', '{"tokens": []}',
        json.dumps({"tokens": [1] * 33}), '{"prompt": "x", "max_new_tokens": 25}', '{"prompt": "x", "stop": ""}',
        '{"prompt": "\\ud800"}', '{"prompt": "x", "top_p": 2}', '{"prompt": "x", "tokens": [1]}',
    ]  # fmt: skip
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(lines))
    arguments = ["--prompts", str(file), "--json", "--max-new-tokens", "2", "--cache-tokens", "16"]
    with pytest.raises(DataError, match="14 of the prompts could not be answered; the output says why"):
        generate([str(run.folder), *arguments])
    found, _ = lines_of(capsys)
    errors = {line["prompt"]: line["error"] for line in found if "error" in line}
    # An empty prompt begins with the token that ends a text.
    assert sorted(line["prompt"] for line in found if "error" not in line) == [0, 9]
    for number, (line, message) in enumerate(
        (
            (2, "broken JSON: Expecting value at column 12"),
            (3, "neither a JSON object nor a string but a list; it must be like"),
            (4, "no key 'prompt' (its keys: 'promt')"),
            (5, "'prompt' is not a string but a number"),
            (6, "'tokens' must be a list of integers"),
            (8, "token id 9999 at position 1 is outside the vocabulary of 290 ids"),
            (9, "unknown setting topk; did you mean top_k?"),
            (10, "temperature is -1.0; it must be from 0 to"),
            (11, ""),
            (12, "the prompt has 33 tokens, and the model reads 32 at once"),
            (13, "take 2 pages of 16, and the cache has 1"),
            (14, "stop is ''"),
            (15, "a lone surrogate"),
            (16, "top_p is 2.0; it must be over 0 and at most 1"),
            (17, "it has both prompt and tokens; leave one out"),
        ),
        start=1,
    ):
        if not message:
            continue
        assert errors[number].startswith(f"{str(file)!r}, line {line}: "), errors[number]
        assert message in errors[number]
        assert errors[number].count(str(file)) == 1


def test_null_settings_of_a_prompt_are_as_if_not_given(run):
    given = {"temperature": 0.7, "top_k": 5, "max_new_tokens": 8, "seed": 3, "stop": "zzz", "device": "cpu"}
    nulls = dict.fromkeys(("tokens", "messages", "temperature", "top_k", "max_new_tokens", "seed", "stop"))
    expected = generate_many(run.folder, ["def f("], **given)
    assert generate_many(run.folder, [{"prompt": "def f("} | nulls], **given) == expected


def test_stop_strings_are_cut_off_across_tokens(run, capsys):
    text = run.text("def f(", 30, TOP_50).removeprefix("def f(").removesuffix("\n")
    stop = text[9:13]
    place = text.index(stop)
    for flags in ([], ["--json"]):
        arguments = [str(run.folder), "--prompt", "def f(", "--max-new-tokens", "30", "--stop", "zzz", "--stop", stop]
        assert generate([*arguments, *flags]) == 0
        written = capsys.readouterr().out
        if flags:
            line = json.loads(written)
            assert (line["text"], line["reason"]) == (text[:place], "stop")
            assert stop in run.tokenizer.decode(line["tokens"])
        else:
            assert written == "def f(" + text[:place] + "\n"
    # A prompt's own stop strings replace the given ones.
    prompt = {"prompt": "def f(", "stop": "zzz"}
    (sample,) = generate_many(run.folder, [prompt], stop=stop, max_new_tokens=30, device="cpu")
    assert (sample.text, sample.reason) == (text, "length")


def test_the_end_may_complete_a_stop_string(run, monkeypatch):
    """The text of the last tokens is sometimes known only then."""
    monkeypatch.setattr(TextStream, "finish", lambda _: "zz")
    (sample,) = generate_many(run.folder, ["x"], stop="zz", max_new_tokens=3, device="cpu")
    assert (sample.reason, sample.text.endswith("zz"), len(sample.tokens)) == ("stop", False, 3)


def test_log_probs_of_generation_are_those_of_scoring(run, capsys, tmp_path):
    """Of an empty prompt too, which is the token that ends a text."""
    prompts = [part for prompt in ("def f(", "größe", "") for part in ("--prompt", prompt)]
    arguments = [str(run.folder), *prompts, "--max-new-tokens", "8", "--json"]
    assert generate([*arguments, "--log-probs", "2", "--prompt-log-probs", "0", "--temperature", "0.7"]) == 0
    generated, _ = lines_of(capsys)
    generated.sort(key=lambda line: line["prompt"])
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in generated))
    flags = ["--texts", str(tmp_path / "texts.jsonl"), "--temperature", "0.7", "--top-log-probs", "2"]
    assert measure([str(run.folder), *flags]) == 0
    scored, _ = lines_of(capsys)
    scored.sort(key=lambda line: line["number"])
    for own, again in zip(generated, scored, strict=True):
        assert own["temperature"] == again["temperature"] == 0.7
        assert own["tokens"] == again["tokens"]
        assert again["log_probs"] == pytest.approx(own["log_probs"])
        assert again["sum"] == pytest.approx(sum(own["log_probs"]))
        for mine, theirs in zip(own["top_log_probs"], again["top_log_probs"], strict=True):
            assert [token for token, _ in mine] == [token for token, _ in theirs]
        assert len(own.get("prompt_log_probs", [])) == len(own["prompt_tokens"]) - 1
    # Less than log-probabilities may have, which nobody asked for.
    assert generate([*arguments, "--temperature", "1e-7"]) == 0


def test_scores_of_texts_and_of_completions(run):
    whole, part, long, no_record, again = score(
        run.folder,
        ["def f(", {"prompt": "def ", "completion": "f("}, {"tokens": [1] * 33}, 3, "def f("],
        temperature=2.0,
        device="cpu",
    )
    ids = run.tokenizer.encode("def f(")
    assert whole.tokens == tuple(ids)
    assert whole.log_probs[0] is None
    assert whole.sum == pytest.approx(sum(each.value for each in whole.log_probs[1:]))
    assert again.sum == pytest.approx(whole.sum)
    assert run.tokenizer.decode(list(part.tokens)) == "f("
    assert all(each is not None for each in part.log_probs)
    assert "text 3: the prompt has 33 tokens" in long.error
    assert "text 4: neither a JSON object nor a string but a number" in no_record.error


def test_the_token_before_each_text_is_read_and_not_measured(tmp_path):
    run = Run(tmp_path, marks_beginnings=True)
    first, last, ids = ([*run.tokenizer.encode(text)] for text in ("def ", "f(", "def f("))
    whole, again, part, split = score(
        run.folder,
        [
            "def f(", {"prompt_tokens": [290], "tokens": ids},
            {"prompt": "def ", "completion": "f("}, {"prompt_tokens": [290, *first], "tokens": last},
        ],
        device="cpu",
    )  # fmt: skip
    assert None not in whole.log_probs
    assert (whole.tokens, part.tokens) == (tuple(ids), tuple(last))
    assert (whole.sum, part.sum) == pytest.approx((again.sum, split.sum))


def test_a_completion_is_encoded_behind_its_prompt(tmp_path):
    """As in fine-tuning: the tokenizer of Llama 2 puts a blank before each text, which a completion does not have."""
    vocab = {name: number for number, name in enumerate(["</s>", "\u2581", "a", "b", "\u2581b"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("\u2581", "b")]))
    normalizer = tokenizers.normalizers
    backend.normalizer = normalizer.Sequence([normalizer.Prepend("\u2581"), normalizer.Replace(" ", "\u2581")])
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path, "</s>")
    for prompt, completion, measured in (("a", "b", [3]), ("a", " b", [4]), ("a ", "b", [4]), ("", "b", [4])):
        record = {"prompt": prompt, "completion": completion}
        ids, first = text_to_measure("here", record, tokenizer, parse_special=True)
        assert (ids, ids[first:]) == (tokenizer.encode(prompt + completion), measured)


def test_samples_arrive_as_soon_as_they_are_done(run):
    """What is finished before an interruption has been passed on."""
    seen = []

    def interrupt(sample):
        seen.append(sample)
        raise KeyboardInterrupt

    last = {"prompt": "x", "max_new_tokens": 2, "seed": 2**63 - 1}
    prompts = [{"prompt": "x", "max_new_tokens": 12}, last]
    with pytest.raises(KeyboardInterrupt):
        generate_many(run.folder, prompts, device="cpu", on_sample=interrupt)
    assert [sample.prompt for sample in seen] == [1]
    # One at a time.
    with pytest.raises(KeyboardInterrupt):
        generate_many(run.folder, prompts, device="cpu", batch_size=1, on_sample=interrupt)
    assert [sample.prompt for sample in seen] == [1, 0]
    assert [sample.error for sample in generate_many(run.folder, prompts, device="cpu")] == [None, None]
    long, cool = {"tokens": [1] * 33}, {"prompt": "x", "max_new_tokens": 2, "temperature": 0.5}
    seeded, refused, *texts = generate_many(run.folder, [last, long, cool], n=2, log_probs=0, device="cpu")
    assert "seed is 9223372036854775807, and 2 texts have it and those after it" in seeded.error
    assert "the prompt has 33 tokens" in refused.error
    assert [(each.prompt, each.sample, each.temperature) for each in texts] == [(2, 0, 0.5), (2, 1, 0.5)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", "x", "--prompts", "-"], "--prompt cannot be used with --prompts"),
        (["--log-probs", "1"], "--log-probs is printed as JSON; add --json"),
        (["--prompts", "nowhere.jsonl"], "--prompts: 'nowhere.jsonl' does not exist"),
        (["--stop", ""], "stop is ''"),
        (["--n", "0"], "--n is 0; it must be from 1"),
    ],
)
def test_flags_that_cannot_be(run, flags, message):
    with pytest.raises(ConfigError, match=message):
        generate([str(run.folder), *flags])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("mark.txt", b"\xef\xbb\xbfx\n"),
        ("lines.txt", b"x\r\n"),
        ("mark.jsonl", b'\xef\xbb\xbf{"prompt": "x"}\n'),
        ("array.json", b'[\n  {"prompt":\n "x"}\n]\n'),
    ],
)
def test_forms_of_files(run, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    (sample,) = generate_many(run.folder, tmp_path / name, max_new_tokens=1, device="cpu")
    assert sample.prompt_text == "x"


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        (5, {}, "the texts are 5; give the name of a file, or a list of texts"),
        ({"prompt": "x"}, {}, "the texts are .*; give the name of a file"),
        (["x"], {"stop": 5}, "stop is 5; it must be a string or a list"),
        (["x"], {"stop": None}, "stop is None; it must be a string or a list"),
        # Text of a file of settings, which is true to Python.
        (["x"], {"special_tokens": "false"}, "special_tokens is 'false'; it must be true or false"),
    ],
)
def test_arguments_that_cannot_be(run, texts, settings, message):
    with pytest.raises(ConfigError, match=message):
        generate_many(run.folder, texts, device="cpu", **settings)


def test_values_of_python_that_are_none_of_json(run):
    texts = [{1: "x"}, {"tokens": b"ab"}, {"prompt": "x", "temperature": 1e-30}]
    keys, raw, cold = generate_many(run.folder, texts, device="cpu", max_new_tokens=1, log_probs=0)
    assert "its keys are 1; they must be strings" in keys.error
    assert "'tokens' must be a list of integers" in raw.error
    assert "temperature of log-probabilities is 1e-30; it must be at least 1e-06" in cold.error


def test_the_temperature_of_log_probabilities_is_told():
    measured = Sample(0, prompt_log_probs=(LogProb(-1.0),), temperature=2.0).to_json()
    assert (measured["temperature"], measured["prompt_log_probs"]) == (2.0, [-1.0])
    assert "temperature" not in Sample(0, temperature=2.0).to_json()


def test_a_prompt_is_not_measured_as_if_it_were_not_there(run):
    found, empty = score(run.folder, [{"prompt": "def ", "text": "f("}, ""], device="cpu")
    assert empty.error == "text 2: the text has no tokens; give it at least one"
    assert found.error == "text 1: no key 'completion' after the 'prompt' (its keys: 'prompt', 'text')"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("--nproc", "2"), ("--pp", "2")], ids=["tp 2", "pp 2"])
def test_the_same_texts_on_two_ranks(run, tmp_path, layout):
    (tmp_path / "prompts.txt").write_text("größe\ndef f(\nx\n")
    arguments = ["--prompts", tmp_path / "prompts.txt", "--max-new-tokens", "20", *layout]
    output, _ = run_command(tmp_path, 2, "generate", run.folder, *arguments)
    assert output == "\n".join(run.text(prompt, 20, TOP_50) for prompt in ("größe", "def f(", "x"))
    # One prompt grows on the screen.
    output, _ = run_command(tmp_path, 2, "generate", run.folder, "--prompt", "x", "--max-new-tokens", "20", *layout)
    assert output == run.text("x", 20, TOP_50)


def die_at_the_tenth_step():
    steps, right = itertools.count(), BatchEngine.step

    def step(engine):
        if os.environ["RANK"] == "1" and next(steps) == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return right(engine)

    BatchEngine.step = step


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("--nproc", "2"), ("--pp", "2")], ids=["tp 2", "pp 2"])
def test_what_is_finished_is_kept_if_a_rank_dies(run, tmp_path, layout):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n{"prompt": "x", "max_new_tokens": 2}\n')
    command = ("generate", run.folder, "--prompts", tmp_path / "prompts.jsonl", "--json", "--max-new-tokens", "20")
    first, second = run_commands(tmp_path, [(*command, *layout)] * 2, changed=die_at_the_tenth_step)
    assert second[0] == -signal.SIGKILL
    assert first[0] == 1
    assert [json.loads(line)["prompt"] for line in first[1].splitlines()] == [1]
    # Either its connection is closed first, or the watch sees that its process is gone.
    assert any(how in first[2] for how in ("ended", "died"))


@pytest.mark.slow
def test_exact_log_probabilities_on_two_ranks_and_on_one(tmp_path):
    folder = Path(__file__).parents[1] / "data/old_runs/exact"
    exact = ("--exact", "--exact-parts", "2", "--device", "cpu")
    (tmp_path / "prompts.txt").write_text("3 things: grass\nWhat\nsnow and coal\n")
    flags = ("--prompts", tmp_path / "prompts.txt", "--max-new-tokens", "9", "--json", "--log-probs", "0")
    output, _ = run_command(tmp_path, 2, "generate", folder, *flags, *exact)
    staged, _ = run_command(tmp_path, 2, "generate", folder, *flags, *exact, "--pp", "2")
    assert sorted(staged.splitlines()) == sorted(output.splitlines())
    (tmp_path / "texts.jsonl").write_text(output)
    scored, notes = run_command(tmp_path, 1, "score", folder, "--texts", tmp_path / "texts.jsonl", *exact)
    assert "layers: those of training, exact" in notes
    written, scores = ([json.loads(line) for line in each.splitlines()] for each in (output, scored))
    assert len(written) == 3
    for text, own in zip(written, sorted(scores, key=lambda each: each["number"]), strict=True):
        assert own["log_probs"] == text["log_probs"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--exact"], r"--exact has no exact form of training\.dtype float64"),
        (["--exact", "--exact-parts", "6"], "parallel.exact-parts is 6; it must be a power of two"),
        (["--exact-parts", "2"], "--exact-parts 2 is for exact generation, and --exact is off"),
    ],
)
def test_exact_generation_is_refused_in_the_words_of_training(run, flags, message):
    with pytest.raises(ConfigError, match=message):
        generate([str(run.folder), "--device", "cpu", *flags])
