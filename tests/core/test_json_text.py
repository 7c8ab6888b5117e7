"""JSON from strangers is an object of finite numbers, with each key once, and not deep; or it is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from shardwise.core.json_text import MAX_DEPTH, parse_json, read_json, shown

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@pytest.mark.slow
@given(st.dictionaries(st.text(), VALUES), st.booleans())
def test_what_python_writes_is_read(value, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        text.decode()
    except UnicodeDecodeError:
        return
    assert parse_json(text) == value
    assert parse_json(b"\xef\xbb\xbf" + text) == value


@given(st.text('"\\\\[]{}a', max_size=40))
def test_brackets_in_strings_do_not_count(text):
    value = {"key": "[" * 200 + text, "x": [["]" * 200 + text]]}
    assert parse_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "not JSON: Expecting value"),
        (b"[1]", "must hold a JSON object, not list"),
        (b'{"a": 1, "a": 1}', 'has "a" twice'),
        (b'{"x": {"a": NaN}}', 'its "a" is NaN, which is not finite'),
        (b'{"a": [1, [2, -Infinity]]}', 'its "a" is \\[1, \\[2, -Infinity'),
        (b'{"a": 1e999}', "not finite"),
        (b'{"a": "\xff"}', "not UTF-8: can't decode byte 0xff at 7"),
        (b'{"a": ' + b"9" * 5000 + b"}", "limit"),
        (b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "nested more than 64 deep"),
        (b'{"a": ' + b"[" * 100, "not JSON: Expecting value"),
        (b'{"a": ' * 100_000, "nested more than 64 deep"),
        (b'{"\\"' + b"[" * 10, "not JSON: Unterminated string"),
    ],
)
def test_what_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        parse_json(text)


def test_infinite_numbers_are_named_where_they_may_be():
    text = b'{"a": [0, Infinity], "b": -Infinity}'
    assert parse_json(text, names_infinity=True) == {
        "a": [0, {"__float__": "Infinity"}],
        "b": {"__float__": "-Infinity"},
    }
    with pytest.raises(ValueError, match='its "a" is NaN, which is not finite'):
        parse_json(b'{"a": NaN}', names_infinity=True)


def test_as_deep_as_it_may_be():
    assert parse_json(b'{"a": ' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}")


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "file.json"
    path.write_text("{}" + " " * 100)
    assert read_json(path, limit=102) == {}
    with pytest.raises(OSError, match="102 bytes, and such a file at most 101"):
        read_json(path, limit=101)


def test_a_value_in_a_message():
    assert shown({"a": None}) == '{"a": null}'
    assert shown("x" * 200) == '"' + "x" * 79 + "..."
    assert shown(10**5000) == "a value that cannot be shown"
