"""Records of Parquet and Arrow files, and of folders that the library datasets saves."""

from __future__ import annotations

import json
import os
import sys

import numpy
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from shardwise.core.errors import ConfigError, DataError
from shardwise.data import example_of, preference_of, read_corpus, read_records

CHATS = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"messages": [{"role": "user", "content": "c", "name": "d"}, {"role": "assistant", "content": "\N{SNOWMAN}"}]},
]


def write_arrow(path, rows, *, stream=True):
    table = pyarrow.Table.from_pylist(rows)
    writer = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with path.open("wb") as file, writer(file, table.schema) as opened:
        opened.write_table(table, max_chunksize=1)


def messages_in(path):
    return [[dict(message) for message in example_of(record, "text").completion] for record in read_records(path)[1]]


def test_rows_are_records(tmp_path):
    table = pyarrow.Table.from_pylist(CHATS)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    write_arrow(tmp_path / "b.arrow", CHATS)
    write_arrow(tmp_path / "c.arrow", CHATS, stream=False)
    # A column of some rows only is missing in the others.
    expected = [chat["messages"] for chat in CHATS]
    for name in ("a.parquet", "b.arrow", "c.arrow"):
        assert messages_in(tmp_path / name) == expected
    assert messages_in(tmp_path) == expected, "of a folder, Parquet files are read"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x", "y"]}), tmp_path / "d.parquet")
    assert read_corpus(tmp_path / "d.parquet", text_key="body").documents == ("x", "y")
    with pytest.raises(DataError, match=r"d\.parquet', row 1: no key 'text' \(its keys: 'body'\)"):
        read_corpus(tmp_path / "d.parquet")


def call(name, **arguments):
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def tool(name, **properties):
    return {"name": name, "parameters": {"properties": properties}}


def test_nulls_of_tables_are_missing_keys(tmp_path):
    """Arrow gives each struct the keys of all rows; a null in a list, and a null of a JSON line, are the author's."""
    asked = {"role": "user", "content": "?"}
    rows = [
        {
            "messages": [asked, call("rain", at={"place": "Ulm", "days": [{"n": 1}, {"m": 2}]}, many=[1, None])],
            "tools": [tool("rain", at={"type": "object"}, many={"items": {"type": "integer"}})],
            "chat_template_kwargs": {"mode": {"deep": "x"}},
        },
        {
            "messages": [asked, call("write", content="text", value=0), {"role": "tool", "content": "done"}],
            "tools": [tool("write", content={"type": "string", "enum": ["a", "b"]}), tool("idle")],
            "chat_template_kwargs": {"mode": {"flat": ""}},
        },
    ]
    pairs = [
        {"prompt": row["messages"][:1], "chosen": row["messages"][1:2], "rejected": [asked], "tools": row["tools"]}
        for row in rows
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    write_arrow(tmp_path / "b.arrow", rows)
    for name in ("a.parquet", "b.arrow"):
        for record, row in zip(read_records(tmp_path / name)[1], rows, strict=True):
            found = example_of(record, "text")
            assert [*found.completion] == row["messages"]
            assert (found.tools, found.variables) == (row["tools"], row["chat_template_kwargs"])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(pairs), tmp_path / "pairs.parquet")
    for record, pair in zip(read_records(tmp_path / "pairs.parquet")[1], pairs, strict=True):
        found = preference_of(record)
        assert ([*found.completion], found.tools) == (pair["chosen"], pair["tools"])
    line = {"messages": [asked, call("rain", place=None)], "tools": [tool("rain", place={"default": None})]}
    (tmp_path / "line.jsonl").write_text(json.dumps(line))
    (record,) = read_records(tmp_path / "line.jsonl")[1]
    assert ([*example_of(record, "text").completion], record.value["tools"]) == (line["messages"], line["tools"])


def test_maps_and_json_are_objects(tmp_path):
    """As ``datasets`` reads columns of JSON, with their own nulls; a map is an object too."""
    strings, texts = pyarrow.string(), pyarrow.json_()
    asked, said = {"role": "user", "content": "?"}, call("rain", place=None, days=[1, {"n": None}])
    arguments = said["tool_calls"][0]["function"]["arguments"]
    tools = [tool("rain", place={"default": None})]

    def messages_with(kind):
        calls = pyarrow.list_(pyarrow.struct([("function", pyarrow.struct([("name", strings), ("arguments", kind)]))]))
        return pyarrow.list_(pyarrow.struct([("role", strings), ("content", strings), ("tool_calls", calls)]))

    def calling(given):
        return [[asked, call("rain") | {"tool_calls": [{"function": {"name": "rain", "arguments": given}}]}]]

    # Arrow makes nested JSON only from texts.
    nested = pyarrow.array(calling(json.dumps(arguments)), messages_with(strings)).cast(messages_with(texts))
    whole = pyarrow.array([[json.dumps(asked), json.dumps(said)]]).cast(pyarrow.list_(texts))
    of_map = pyarrow.array(calling([("at", "Ulm")]), messages_with(pyarrow.map_(strings, strings)))
    columns = {"map": (of_map, {"at": "Ulm"}), "JSON": (nested, arguments), "messages": (whole, arguments)}
    for name, (column, value) in columns.items():
        table = pyarrow.table({"messages": column, "tools": pyarrow.array([json.dumps(tools)], texts)})
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
        (record,) = read_records(tmp_path / "a.parquet")[1]
        found = example_of(record, "text")
        assert found.completion[1]["tool_calls"][0]["function"]["arguments"] == value, name
        assert found.tools == tools
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(["{"], texts)}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet', row 1, 'text': broken JSON"):
        read_records(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": [b"x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="'text' is not a string but bytes"):
        read_corpus(tmp_path / "a.parquet")
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="two columns are named 'text'"):
        read_records(tmp_path / "a.parquet")


def test_a_saved_dataset_is_read_as_it_says(tmp_path):
    for name, chat in zip(("y.arrow", "x.arrow", "stale.arrow"), (*CHATS, CHATS[0]), strict=True):
        write_arrow(tmp_path / name, [chat])
    state = {"_data_files": [{"filename": "y.arrow"}, {"filename": "x.arrow"}]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert messages_in(tmp_path) == [chat["messages"] for chat in CHATS]
    for wrong in ([{"filename": "../y.arrow"}], [{}], [], "y.arrow"):
        (tmp_path / "state.json").write_text(json.dumps({"_data_files": wrong}))
        with pytest.raises(DataError, match="which names no files there"):
            read_records(tmp_path)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("content", [b"", b"PAR1", b"ARROW1\0\0garbage", b"\xff\xff\xff\xff\xff\xff\xff\x7f" * 4, None])
def test_garbage_is_one_error(tmp_path, suffix, content):
    path = tmp_path / f"x.{suffix}"
    if content is None:
        # Cut off in the middle.
        rows = [{"text": "word " * 999} for _ in range(9)]
        if suffix == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        else:
            write_arrow(path, rows)
        content = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"x\.{suffix}' (is no|has no text|.* or a damaged one)"):
        read_records(path)


def test_damaged_offsets_are_not_followed(tmp_path):
    """pyarrow reads where they point to, which may be no memory of the file."""
    offsets, texts = pyarrow.py_buffer(numpy.array([0, 5, 2], "<i4").tobytes()), pyarrow.py_buffer(b"hello")
    column = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, offsets, texts])
    batch = pyarrow.record_batch([column], names=["text"])
    with (tmp_path / "a.arrow").open("wb") as file, pyarrow.ipc.new_stream(file, batch.schema) as opened:
        opened.write_batch(batch)
    with pytest.raises(DataError, match=r"a\.arrow' is no Arrow file, or a damaged one: .*offset"):
        read_records(tmp_path / "a.arrow")


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_text_that_stands_in_all_rows(tmp_path, suffix):
    """A file of some kilobytes with a gigabyte of text."""
    path = tmp_path / f"a{suffix}"
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 10_000, pyarrow.int32()), ["x" * 100_000])
    table = pyarrow.table({"text": column})
    if suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(DataError, match=r"^'\S+', row \d+: the rows so far have more than \S+ bytes, over 300 times"):
        read_corpus(path)


def test_a_named_pipe_among_the_files_of_a_dataset(tmp_path):
    os.mkfifo(tmp_path / "x.arrow")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "x.arrow"}]}))
    with pytest.raises(DataError, match=r"cannot read .*x\.arrow': it is a named pipe, not a regular file"):
        read_records(tmp_path)


def test_without_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "x.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ConfigError, match=r"read with pyarrow, which is not installed; pip install 'shardwise\[data\]'"
    ):
        read_records(tmp_path / "x.parquet")
