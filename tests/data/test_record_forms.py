"""Records of other keys are read by a form; nothing of a record is lost, and a form of strangers does no harm."""

from __future__ import annotations

import json

import pytest

from shardwise.core.errors import DataError
from shardwise.data import example_of, formed, preference_of
from shardwise.data.json_records import Record

WITH_INPUT = {"prompt": "Do: {instruction}\nWith: {input}\nSo:", "completion": " {output}"}
WITHOUT = {"prompt": "Do: {instruction}\nSo:", "completion": " {output}"}


def filled(tmp_path, form, *values):
    path = tmp_path / "form.json"
    path.write_text(form if isinstance(form, str) else json.dumps(form), encoding="utf-8")
    return [record.value for record in formed([Record("here", value) for value in values], path)]


def test_the_form_with_the_fewest_empty_places(tmp_path):
    whole = {"instruction": "Add {output}", "input": "1, 2", "output": "3", "other": 4}
    values = [whole, whole | {"input": ""}, whole | {"input": None}, {"instruction": "Add", "output": "3"}]
    values.append(whole | {"instruction": ""})
    found = filled(tmp_path, {"forms": [WITH_INPUT, WITHOUT]}, *values)
    # A text with what looks like a place is not filled again.
    short = {"prompt": "Do: Add {output}\nSo:", "completion": " 3"}
    assert found == [
        {"prompt": "Do: Add {output}\nWith: 1, 2\nSo:", "completion": " 3"},
        short,
        short,
        {"prompt": "Do: Add\nSo:", "completion": " 3"},
        {"prompt": "Do: \nWith: 1, 2\nSo:", "completion": " 3"},
    ]


def test_forms_are_records_of_all_kinds(tmp_path):
    chat = {
        "messages": [{"role": "user", "content": "{q}\n{{q}}{}"}, {"role": "assistant", "content": "{a}", "weight": 1}]
    }
    chat |= {"tools": [{"name": "f"}], "system": "{s}"}
    (value,) = filled(tmp_path, chat, {"q": "Who?", "a": "I.", "s": "Be brief."})
    example = example_of(Record("here", value), "text")
    assert [each["content"] for each in example.completion] == ["Be brief.", "Who?\n{Who?}{}", "I."]
    assert example.tools == [{"name": "f"}]
    (value,) = filled(
        tmp_path, {"prompt": "{q}", "chosen": "{good}", "rejected": "{bad}"}, {"q": "?", "good": "y", "bad": "n"}
    )
    assert preference_of(Record("here", value)).rejected == "n"
    assert filled(tmp_path, {"text": "# {title}\n{body}"}, {"title": "A", "body": "b"}) == [{"text": "# A\nb"}]


@pytest.mark.parametrize(
    ("form", "value", "message"),
    [
        (WITHOUT, "text", "here: not an object but a string, and the form in '.*form.json' needs keys"),
        (
            WITHOUT,
            {"instruction": "x", "answer": "y"},
            r"no key 'output', for which '.*' has a place \(its keys: 'inst",
        ),
        (
            {"forms": [WITH_INPUT, WITHOUT]},
            {"instruction": "x", "input": 5, "output": "y"},
            "'input' is not a string but a n",
        ),
        ({"forms": [WITH_INPUT, WITHOUT]}, {"instruction": "x"}, "no key 'output', for which"),
        (
            {"forms": [{"text": "{a}{b}"}, {"text": "{a}{c}"}]},
            {"a": "x", "b": "y", "c": "z"},
            "no form in '.*' has a place for all of 'a', 'b', 'c'; add one",
        ),
        ({"text": "no place"}, {}, "form 1: 0 places; a form needs from 1 to 100"),
        ({"text": "{a}" * 101}, {"a": "x"}, "form 1: 101 places"),
        ({"forms": {}}, {}, "'forms' is no list of objects"),
        ({"forms": []}, {}, "'forms' is no list of objects"),
        ("[1]", {}, "form.json': it must hold a JSON object, not list"),
        ("{", {}, "form.json': it is not JSON"),
        ('{"text": "' + "x" * (1 << 25) + '"}', {}, "cannot read '.*form.json'"),
        ("[" * 5000, {}, "cannot read '.*form.json'"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, form, value, message):
    with pytest.raises(DataError, match=message):
        filled(tmp_path, form, value)


def test_a_file_that_is_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "absent.json"):
        with pytest.raises(DataError, match="cannot read"):
            formed([], path)
