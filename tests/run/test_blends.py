"""Runs on blends and on token files: what they take, how they resume, and what they refuse."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest

from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.data import DataLoader
from shardwise.data.indexed import IndexedWriter
from shardwise.data.tokenizer import Tokenizer
from shardwise.run.run import run
from shardwise.run.settings import CorpusSettings
from shardwise.run.tasks.texts import NewTexts
from tests.run.tiny import tiny_settings


@pytest.fixture
def sources(tmp_path):
    """A folder of texts, JSON lines, and token files with the tokenizer that made them."""
    random = np.random.default_rng(0)
    words = ["".join(map(chr, random.integers(97, 123, 4))) for _ in range(300)]

    def texts(count):
        return [" ".join(random.choice(words, 200)) for _ in range(count)]

    (tmp_path / "web").mkdir()
    for number, text in enumerate(texts(5)):
        (tmp_path / "web" / f"{number}.txt").write_text(text)
    (tmp_path / "code.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(3)))
    tokenizer = Tokenizer.train(texts(9), 301)
    tokenizer.save(tmp_path / "tok")
    for name in "ab":
        with IndexedWriter(tmp_path / f"{name}.bin", np.uint16) as writer:
            for text in texts(20):
                writer.add([*tokenizer.encode(text), tokenizer.eos_id])
                writer.end_document()
            writer.finish(tmp_path / f"{name}.idx")
    return tmp_path


def settings_of(folder, data, *, resume="never", steps=4, **corpus):
    data = tuple(str(folder / word) if word[0].isalpha() else word for word in data.split())
    plain = tiny_settings(folder, model={"num_layers": 1}, resume=resume, steps=steps)
    return dataclasses.replace(plain, data=data, corpus=CorpusSettings(held_out_fraction=0.05, **corpus))


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_blend_of_texts_and_token_files(sources):
    data = NewTexts(
        settings_of(sources, "0.5 web 0.25 code.jsonl 0.25 a.idx", steps=100, tokenizer=str(sources / "tok"))
    ).prepare()
    loader = DataLoader(data.train, 4, 1)
    firsts = data.train.firsts
    taken = np.concatenate([loader.schedule.global_batch(step) for step in range(100)])
    assert np.bincount(np.searchsorted(firsts, taken, side="right") - 1).tolist() == [200, 100, 100]
    assert all(next(loader.batch(step)).tokens.shape == (4, 24) for step in (0, 99))
    assert [line.split(":")[0].split(",")[0] for line in data.blend] == ["0.5 web", "0.25 code.jsonl", "0.25 a.idx"]
    rows = [len(part) for part in data.train.parts[:2]]
    assert f"taken {200 / rows[0]:.2f} times" in data.blend[0]
    assert {"SHA-256 of source 2 (code.jsonl)", "share of source 3"} <= data.identity.keys()
    assert data.held_out.rows.num_bytes > 0
    assert data.bits_per_nat > 0


def test_sources_that_share_texts(sources):
    """Each holds out a part of its own, which another source may learn."""
    lines = (sources / "code.jsonl").read_text().splitlines(keepends=True)
    # In the order in which documents are held out: the first source holds out what the second learns.
    lines.sort(key=lambda line: hashlib.sha256(f"0:{json.loads(line)['text']}".encode()).digest())
    settings = settings_of(sources, "0.5 code.jsonl 0.5 more.jsonl", tokenizer=str(sources / "tok"))
    settings = dataclasses.replace(settings, corpus=dataclasses.replace(settings.corpus, held_out_fraction=0.5))
    for second, count in ((lines[:2], 1), (lines[1:], 0)):
        (sources / "code.jsonl").write_text("".join(lines[1:]))
        (sources / "more.jsonl").write_text("".join(second))
        notes = NewTexts(settings).prepare().overlap
        assert [note.split(" also ")[0] for note in notes] == ["1 of 2 held-out samples are"] * count


def test_token_files_alone_are_taken_in_their_own_order(sources):
    one, two = (
        NewTexts(settings_of(sources, words, tokenizer=str(sources / "tok"), split="18,2")).prepare()
        for words in ("a.idx", "a.idx b.idx")
    )
    assert DataLoader(one.train, 4, 1).schedule.global_batch(1).tolist() == [4, 5, 6, 7]
    assert "times" in one.blend[0]
    assert len(two.train) == sum(len(part) for part in two.train.parts) > 16
    assert two.sha256 != one.sha256


def test_what_has_no_effect_or_no_sense_is_refused(sources):
    tok = str(sources / "tok")
    for words, corpus, problem in (
        ("a.idx", {}, "do not have their tokenizer; .* --corpus.tokenizer"),
        ("a.idx web", {"tokenizer": tok}, "token files .* and others need weights"),
        ("web", {"split": "9,1"}, "--corpus.split 9,1 is for token files"),
        ("a.idx", {"tokenizer": tok, "split": "1,0"}, "0 to measure on; change --corpus.split"),
        ("a.idx", {"tokenizer": tok, "split": "1,-1"}, "split is '1,-1'; give up to three weights"),
    ):
        with pytest.raises(ConfigError, match=problem):
            NewTexts(settings_of(sources, words, **corpus)).prepare()
    with pytest.raises(ConfigError, match="the run takes 40000 samples, and its token files have"):
        NewTexts(settings_of(sources, "a.idx b.idx", tokenizer=tok, steps=10_000)).prepare()


@pytest.mark.slow
def test_a_resumed_blend_goes_on_as_if_it_had_not_stopped(sources, capsys):
    data = "0.6 web 0.3 code.jsonl 0.1 a.idx"
    tok = {"tokenizer": str(sources / "tok")}
    run(settings_of(sources, data, steps=6, **tok))
    whole = losses(sources)
    run(settings_of(sources, data, steps=3, resume="restart", **tok))
    run(settings_of(sources, data, steps=6, resume="auto", **tok))
    assert losses(sources) == whole
    assert "0.6 web, 5 files" in capsys.readouterr().out
    with (sources / "code.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(CheckpointError, match=r"SHA-256 of source 2 \(code.jsonl\) was '"):
        run(settings_of(sources, data, steps=7, resume="auto", **tok))
