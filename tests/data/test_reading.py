import json
import os
import re
from pathlib import Path

import pytest

from shardwise.core.errors import ConfigError, DataError
from shardwise.data import read_corpus


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def error_of(*paths: Path | str, **options: str) -> str:
    """The message of the error that reading raises: one line that names the file."""
    with pytest.raises(DataError) as raised:
        read_corpus(paths, **options)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_a_file_is_a_document_exactly_as_it_is(tmp_path):
    text = "Grüße\r\nzweite Zeile\u2028 dritte\n\n"
    corpus = read_corpus(write(tmp_path / "notes.weird", text))
    assert corpus.documents == (text,)
    assert corpus.num_bytes == len(text.encode())
    assert corpus.name == f"notes.weird, 1 file, {corpus.num_bytes} B"


def test_a_byte_order_mark_is_dropped(tmp_path):
    assert read_corpus(write(tmp_path / "a.txt", b"\xef\xbb\xbftext")).documents == ("text",)
    assert read_corpus(write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "a"}')).documents == ("a",)


def test_a_line_of_json_lines_is_a_document(tmp_path):
    texts = ["one", "zwei\nZeilen", "drei\u2028 und \u0000 vier"]
    content = "\r\n".join([json.dumps({"id": 1, "text": text}, ensure_ascii=False) for text in texts] + ["", "  "])
    assert read_corpus(write(tmp_path / "a.jsonl", content)).documents == tuple(texts)
    assert read_corpus(write(tmp_path / "b.NDJSON", content)).documents == tuple(texts)


def test_the_key_of_the_text_can_be_chosen(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "no", "content": "yes"}')
    assert read_corpus(path, text_key="content").documents == ("yes",)


def test_a_folder_is_read_in_the_order_of_paths(tmp_path):
    # Made in another order than they are read in. By parts, "a/z" comes before "a-b/c".
    for name in ("b.txt", "a-b/c.md", "a/z.py", "a/b/c.PY", "Z.rst", "lines.jsonl"):
        write(tmp_path / "data" / name, '{"text": "lines.jsonl"}' if name.endswith("jsonl") else name)
    for name in ("model.bin", ".hidden.txt", ".git/config.txt", "table.csv", "no_suffix"):
        write(tmp_path / "data" / name, b"\0")
    write(tmp_path / "data" / "empty.txt", "")
    corpus = read_corpus([tmp_path / "data"])
    assert corpus.documents == ("Z.rst", "a/b/c.PY", "a/z.py", "a-b/c.md", "b.txt", "lines.jsonl")
    assert corpus.name.startswith("data, 7 files, ")


def test_a_folder_with_splits_is_refused(tmp_path):
    """As published data sets are stored; source files may have any names."""
    cases = (["train_sft-0.jsonl", "test_sft-0.jsonl"], ["data/train/0.jsonl", "data/val/0.jsonl"])
    for number, splits in enumerate(cases):
        root = tmp_path / str(number)
        for name in splits:
            write(root / name, json.dumps({"text": name}))
        assert re.search(r"holds the splits of a dataset \(\w+, \w+\), such as '.*; name the files or", error_of(root))
        assert read_corpus(root / splits[0]).documents == (splits[0],)
    for name in ("train.py", "test.py", "trainer.jsonl", "test.jsonl", "testing.jsonl"):
        write(tmp_path / "code" / name, json.dumps({"text": name}))
    assert len(read_corpus(tmp_path / "code").documents) == 5
    write(tmp_path / "code" / "more.jsonl.gz", "x")
    assert "more.jsonl.gz' is packed, which is not read; unpack it" in error_of(tmp_path / "code")


def test_the_order_does_not_depend_on_the_file_system(tmp_path, monkeypatch):
    for name in ("a/1.txt", "a/2.txt", "b/1.txt", "c.txt"):
        write(tmp_path / name, name)
    expected = read_corpus(tmp_path)
    iterdir = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda self: sorted(iterdir(self), reverse=True))
    assert read_corpus(tmp_path).documents == expected.documents == ("a/1.txt", "a/2.txt", "b/1.txt", "c.txt")


def test_name_and_hash_do_not_depend_on_the_place(tmp_path):
    for place in ("here", "there/far"):
        write(tmp_path / place / "data" / "a.txt", "text")
    here, there = (read_corpus(tmp_path / place / "data") for place in ("here", "there/far"))
    assert here == there


def test_paths_come_in_their_order_and_a_file_once(tmp_path, monkeypatch):
    one, two = write(tmp_path / "d" / "1.txt", "one"), write(tmp_path / "d" / "2.txt", "two")
    (tmp_path / "link.txt").symlink_to(two)
    corpus = read_corpus([str(tmp_path / "link.txt"), tmp_path / "d", one])
    assert corpus.documents == ("two", "one")
    assert corpus.name == "link.txt, d, 1.txt, 2 files, 6 B"
    monkeypatch.chdir(tmp_path / "d")
    assert read_corpus(".").name.startswith("d, 2 files")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_corpus("~/d").documents == ("one", "two")


def test_many_paths_make_a_short_name(tmp_path):
    paths = [write(tmp_path / f"{number}.txt", "x") for number in range(5)]
    assert read_corpus(paths).name == "0.txt, 1.txt, 2.txt and 2 more, 5 files, 5 B"


def test_link_loops_end(tmp_path):
    write(tmp_path / "a" / "b" / "x.txt", "text")
    (tmp_path / "a" / "b" / "up").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a" / "b")
    assert read_corpus(tmp_path).documents == ("text",)
    (tmp_path / "self").symlink_to(tmp_path / "self")
    assert "cannot read" in error_of(tmp_path / "self")


def test_missing_paths(tmp_path):
    assert re.search(r"'.*/nowhere' does not exist; check", error_of(tmp_path / "nowhere"))
    file = write(tmp_path / "a.txt", "x")
    assert "does not exist" in error_of(file / "below")
    (tmp_path / "broken.txt").symlink_to(tmp_path / "gone")
    assert "'" + str(tmp_path / "broken.txt") + "' does not exist (a link to nothing)" in error_of(tmp_path)


def test_no_and_empty_paths(tmp_path):
    with pytest.raises(ConfigError, match="no data given"):
        read_corpus([])
    assert "a data path is empty" in error_of("")
    assert "null" in error_of("a\0b")


def test_paths_without_text(tmp_path):
    whole = write(tmp_path / "whole.txt", "text")
    for path in (
        write(tmp_path / "empty.txt", ""),
        write(tmp_path / "blank.jsonl", "\n \n"),
        write(tmp_path / "texts.jsonl", '{"text": ""}\n'),
        write(tmp_path / "folder" / "empty.txt", "").parent,
    ):
        assert f"{str(path)!r} has no text: all that it holds is empty" in error_of(whole, path)
    write(tmp_path / "numbers" / "a.bin", "x")
    assert "has no text: none of its 1 file(s) has a suffix" in error_of(tmp_path / "numbers")
    (tmp_path / "nothing").mkdir()
    assert "has no text: none of its 0 file(s)" in error_of(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"ab\n\0cd", "binary: byte 0x00 at offset 3 (line 2)"),
        (b"ab\xffcd\0", "binary: byte 0xff at offset 2 (line 1)"),
        (b"\xef\xbb\xbfab\xff", "binary: byte 0xff at offset 5 (line 1)"),
        (b"caf\xe9", "binary: byte 0xe9 at offset 3 (line 1)"),
        ("text".encode("utf-16"), "UTF-16: byte 0xff at offset 0 (line 1)"),
        # A character of two bytes stands across the end of the first look, in which there is a NUL.
        (b"\0" + b"x" * 65534 + "é".encode(), "binary: byte 0x00 at offset 0 (line 1)"),
        (b"x" * 70_000 + b"\0", "binary: byte 0x00 at offset 70000 (line 1)"),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a"])
def test_binary_files(tmp_path, content, what, name):
    path = write(tmp_path / "d" / name, content)
    assert f"{str(path)!r} is not UTF-8 text but {what}; convert" in error_of(path)
    if path.suffix:
        assert error_of(path.parent) == error_of(path)


@pytest.mark.parametrize("name", ["a.csv", "a.TSV"])
def test_a_table_as_text_is_refused(tmp_path, name):
    (tmp_path / name).write_text("question,answer\n1,2\n")
    with pytest.raises(
        DataError, match=rf"{name}' is a table \({name[1:].lower()}\), .* convert it to JSON lines .* \.txt"
    ):
        read_corpus(tmp_path / name)


def test_a_binary_file_as_large_as_a_disk_is_not_read_whole(tmp_path):
    path = write(tmp_path / "model.bin", b"PK\0")
    # More than any memory; no block of it is written.
    os.truncate(path, 1 << 42)
    assert "byte 0x00 at offset 2" in error_of(path)


def test_a_character_across_the_first_look_is_whole(tmp_path):
    text = "x" * 65535 + "é"
    assert read_corpus(write(tmp_path / "a.txt", text)).documents == (text,)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (
            '{"text": "a", "of": {"text": 1, "x": 2, "text": 3}}',
            'line 2: JSON that cannot be read: it has "text" twice in one object',
        ),
        ('{"text": "a"', "line 2: broken JSON: Expecting ',' delimiter at column 13"),
        ('{"text": "a"} {"text": "b"}', "line 2: broken JSON: Extra data at column 15"),
        ('{"text": "a', "line 2: broken JSON: Unterminated string starting at column 10"),
        ("[" * 100_000, "line 2: JSON that cannot be read"),
        ('{"text": ' + "1" * 5000 + "}", "line 2: JSON that cannot be read"),
        ('["text"]', "line 2: not a JSON object but a list"),
        ("null", "line 2: not a JSON object but null"),
        ('{"body": "a", "id": 1}', "line 2: no key 'text' (its keys: 'body', 'id')"),
        ("{}", "line 2: no key 'text' (its keys: none)"),
        ('{"text": null}', "line 2: 'text' is not a string but null"),
        ('{"text": 1.5}', "line 2: 'text' is not a string but a number"),
        ('{"text": ["a"]}', "line 2: 'text' is not a string but a list"),
        ('{"text": "\\ud83d"}', "line 2: a lone surrogate \\ud83d in 'text'"),
    ],
)
def test_broken_lines(tmp_path, line, what):
    path = write(tmp_path / "a.jsonl", '{"text": "fine"}\n' + line + '\n{"text": "fine"}\n')
    assert f"{str(path)!r}, {what}" in error_of(path)


ARRAY = '[\n{"id": 1, "text": "one"},\n"zwei\\n]",\r\n {"text": "", "score": NaN}, {"text": "d,r[e]i\u2028"}]\n'


def test_a_record_of_a_json_array_is_a_document(tmp_path):
    texts = ("one", "zwei\n]", "d,r[e]i\u2028")
    assert read_corpus(write(tmp_path / "list.json", ARRAY)).documents == texts
    assert read_corpus(write(tmp_path / "mark.JSON", b"\xef\xbb\xbf \n" + ARRAY.encode())).documents == texts
    assert read_corpus(write(tmp_path / "strings.json", '["a"]')).documents == ("a",)
    path = write(tmp_path / "key.json", '[{"text": "no", "content": "yes"}]')
    assert read_corpus(path, text_key="content").documents == ("yes",)


def test_a_json_file_may_hold_json_lines(tmp_path):
    lines = '{"text": "one"}\n\n{"text": "[zwei]"}\n'
    assert read_corpus(write(tmp_path / "lines.json", lines)).documents == ("one", "[zwei]")
    # What is a text of its own under another name.
    assert read_corpus(write(tmp_path / "list.txt", ARRAY)).documents == (ARRAY,)
    write(tmp_path / "folder" / "config.json", "[")
    write(tmp_path / "folder" / "a.txt", "a")
    assert read_corpus(tmp_path / "folder").documents == ("a",)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("[]", "has no text: all that it holds is empty"),
        (" \n", "has no text: all that it holds is empty"),
        ('["a",\n 3]', "record 2 (line 2): neither a JSON object nor a string but a number"),
        ('["a",\n NaN]', "record 2 (line 2): neither a JSON object nor a string but a number"),
        ('["a", ["b"]]', "record 2 (line 1): neither a JSON object nor a string but a list"),
        ('[{"text": NaN}]', "record 1 (line 1): 'text' is not a string but a number"),
        ('[{"body": "a"}]', "record 1 (line 1): no key 'text' (its keys: 'body')"),
        ('["\\ud83d"]', "record 1 (line 1): a lone surrogate \\ud83d in the text"),
        ("[", "record 1 (line 1): the file ends within it"),
        ('["a"', "record 1 (line 1): the file ends after it, within the array; it is cut off"),
        ('["a",\n', "record 2 (line 2): the file ends within it"),
        ('["a",\n{"text": "b', "record 2 (line 2): the file ends within it; it is cut off, or a quote is missing"),
        ('["a",\n{"text": ', "record 2 (line 2): the file ends within it"),
        (
            '["a", {"text": "a", "text": "b"}]',
            'record 2 (line 1): JSON that cannot be read: it has "text" twice in one object',
        ),
        ('["a",]', "record 2 (line 1): broken JSON: Expecting value at line 1, column 6"),
        ('[{"text": "a"}\n{"text": "b"}]', "record 1 (line 1): '{' after it, at line 2, column 1, where ',' or ']'"),
        ('["a"]\n["b"]', "line 2, column 1: '[' after the end of the array"),
        ('["a"]\n{"text": "b"}', "line 2, column 1: '{' after the end of the array"),
        ("[" * 1_000_000, "record 1 (line 1): JSON that cannot be read: maximum recursion depth"),
        ('["a", {"text": ' + "1" * 5000 + "}]", "record 2 (line 1): JSON that cannot be read"),
        ('{\n  "text": "a"\n}', "line 1, column 1: a JSON object over several lines"),
        ('{"data": ["a"]}', "line 1: no key 'text' (its keys: 'data')"),
        ('{"text": "a"}\n{"text": "b"', "line 2: broken JSON: Expecting ',' delimiter at column 13"),
        ('{"text": "a"}\n["b"]', "line 2: not a JSON object but a list"),
        ('\n "a"', "line 2, column 2: '\"' begins neither a JSON array of records nor JSON lines"),
        ("NaN", "line 1, column 1: 'N' begins neither a JSON array"),
        ("plain words", "line 1, column 1: 'p' begins neither a JSON array"),
    ],
)
def test_json_files_that_hold_something_else(tmp_path, content, what):
    path = write(tmp_path / "list.json", content)
    message = error_of(path)
    assert what in message
    assert str(path) in message
    assert len(message) < 400


def test_what_may_not_be_read(tmp_path, monkeypatch):
    path = write(tmp_path / "d" / "a.txt", "text")

    def refuse(self, *_):
        raise PermissionError(13, "Permission denied", str(self))

    # Not by chmod, since a superuser reads all the same.
    for owner, function, named in ((os, "open", path), (os, "scandir", path.parent), (Path, "stat", path.parent)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, function, refuse)
            message = error_of(path.parent)
        assert message == f"cannot read {str(named)!r}: Permission denied; check the path and its permissions"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    assert "neither a file nor a folder" in error_of(tmp_path / "pipe.txt")
    assert "is no regular file" in error_of(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_file_that_becomes_a_pipe_does_not_hang(tmp_path, monkeypatch):
    path = write(tmp_path / "text.txt", "text")

    def files_of(root):
        path.unlink()
        os.mkfifo(path)
        return [path]

    monkeypatch.setattr("shardwise.data.reading.files_of", files_of)
    assert "it is a named pipe, not a regular file" in error_of(path)
