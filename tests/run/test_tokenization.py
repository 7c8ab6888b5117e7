"""``shardwise tokenize``: the tokens of texts of every kind, and an ended call that goes on."""

import json

import numpy as np
import pytest

from shardwise.cli.main import main
from shardwise.core.errors import ConfigError, DataError
from shardwise.data.indexed import IndexedTokens
from shardwise.data.tokenizer import Tokenizer
from shardwise.run import tokenize
from shardwise.run.commands import tokenization

TEXTS = [f"text {number}: " + "grass and snow, " * (number % 7) + "ä\nend" for number in range(40)]


@pytest.fixture
def files(tmp_path):
    Tokenizer.train(TEXTS, 290).save(tmp_path / "tok")
    (tmp_path / "web").mkdir()
    for number, text in enumerate(TEXTS[:5]):
        (tmp_path / "web" / f"{number}.txt").write_text(text)
    lines = [json.dumps({"text": text}) for text in [*TEXTS[5:20], ""]]
    (tmp_path / "more.jsonl").write_text("\n".join(lines))
    return tmp_path


def expected(folder, texts):
    tokenizer = Tokenizer.load(folder / "tok")
    return [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]


def written(path):
    tokens = IndexedTokens(path)
    assert tokens.document_indices.tolist() == list(range(len(tokens) + 1))
    return [tokens.get(number).tolist() for number in range(len(tokens))]


def test_texts_of_files_and_folders_in_order(files):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": TEXTS[20:30]})
    parquet.write_table(table, files / "table.parquet")
    (files / "saved").mkdir()
    with pyarrow.ipc.new_stream(files / "saved" / "data.arrow", table.schema) as stream:
        stream.write_table(pyarrow.table({"text": TEXTS[30:]}))
    (files / "saved" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    data = [files / name for name in ("web", "more.jsonl", "table.parquet", "saved")]
    seen = []
    done = tokenize(data, files / "tok", out=files / "all", workers=1, on_progress=lambda *each: seen.append(each))
    assert written(done.index) == expected(files, TEXTS)
    assert (done.num_documents, done.num_resumed, IndexedTokens(done.index).dtype) == (40, 0, np.uint16)
    assert seen[-1][2] == done.num_tokens == IndexedTokens(done.index).num_tokens
    assert not (files / "all.parts").exists()


def test_an_ended_call_goes_on(files, monkeypatch):
    monkeypatch.setattr(tokenization, "_GROUP_CHARS", 100)
    monkeypatch.setattr(tokenization, "_PART_TOKENS", 100)
    data = [files / "web", files / "more.jsonl"]
    whole = tokenize(data, files / "tok", out=files / "whole", workers=1)

    def end(done, total, tokens):
        if tokens > whole.num_tokens // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(data, files / "tok", out=files / "ended", workers=1, on_progress=end)
    with pytest.raises(ConfigError, match="parts of a call with other text_key"):
        tokenize(data, files / "tok", out=files / "ended", workers=1, text_key="body")
    done = tokenize(data, files / "tok", out=files / "ended", workers=1)
    assert 5 < done.num_resumed < 20
    for suffix in (".bin", ".idx"):
        assert done.index.with_suffix(suffix).read_bytes() == whole.index.with_suffix(suffix).read_bytes()
    assert (done.num_tokens, done.num_documents) == (whole.num_tokens, whole.num_documents)
    with pytest.raises(ConfigError, match=r"ended.idx' exists; remove it"):
        tokenize(data, files / "tok", out=files / "ended.idx", workers=1)


def test_files_of_others_in_the_folder_of_parts_stay(files):
    folder = files / "x.parts"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"for the parts of this call, and has 'notes\.txt', which no"):
        tokenize(files / "web", files / "tok", out=files / "x", workers=1)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    # A folder of that name does not make this call's files of others.
    (files / "x.bin").write_text("mine")
    with pytest.raises(ConfigError, match=r"x.bin' exists; remove it"):
        tokenize(files / "web", files / "tok", out=files / "x", workers=1)
    assert (files / "x.bin").read_text() == "mine"


def test_bad_input_is_named(files):
    (files / "bad.jsonl").write_text('{"text": "a"}\n{"text": "b"\n')
    with pytest.raises(DataError, match=r"bad.jsonl', line 2: broken JSON: Expecting ',' delimiter at column 13"):
        tokenize(files / "bad.jsonl", files / "tok", out=files / "x", workers=1)
    (files / "bad.jsonl").write_bytes(b'{"text": "a"}\n\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"byte 0xff at offset 25 \(line 3\)"):
        tokenize(files / "bad.jsonl", files / "tok", out=files / "y", workers=1)
    (files / "empty.txt").write_text("")
    with pytest.raises(DataError, match="there is no text in"):
        tokenize(files / "empty.txt", files / "tok", out=files / "z", workers=1)


@pytest.mark.slow
def test_several_processes_write_the_same_files(files, monkeypatch, capsys):
    monkeypatch.setattr(tokenization, "_GROUP_CHARS", 50)
    argv = ["tokenize", "--data", str(files / "web"), str(files / "more.jsonl"), "--tokenizer", str(files / "tok")]
    assert main([*argv, "--out", str(files / "two"), "--workers", "2"]) == 0
    assert "20 documents" in capsys.readouterr().out
    assert written(files / "two") == expected(files, TEXTS[:20])
