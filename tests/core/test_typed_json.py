"""Values from JSON are of their declared types, or the field and the reason are named."""

from typing import Annotated, Any, Literal, TypedDict

import pytest

from shardwise.core.typed_json import Count, problem


class Optional(TypedDict, total=False):
    note: str


class Row(Optional):
    kind: Literal["a", "b"]
    size: Count | None
    scale: float
    pairs: dict[str, list[tuple[Annotated[int, -1], bool]]]
    names: Annotated[list[str] | str, "a name, or some", len] | None
    more: Any


GOOD = {"kind": "a", "size": None, "scale": 1, "pairs": {"x": [[-1, True]]}, "names": ["n"], "more": [{}], "unknown": 0}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"size": 3, "scale": 0.5, "note": "n", "pairs": {}}, None),
        ({"kind": "c"}, '.kind is "c"; it must be one of a, b'),
        ({"kind": None}, ".kind is null; it must be one of a, b"),
        ({"size": True}, f".size is true; it must be an integer from 0 to {2**63 - 1} or null"),
        ({"size": 2**63}, f".size is {2**63}; it must be an integer from 0 to {2**63 - 1} or null"),
        ({"size": 1.0}, f".size is 1.0; it must be an integer from 0 to {2**63 - 1} or null"),
        ({"scale": "1"}, '.scale is "1"; it must be a number'),
        ({"scale": False}, ".scale is false; it must be a number"),
        ({"pairs": []}, ".pairs is []; it must be an object"),
        ({"pairs": {"x": 1}}, ".pairs.x is 1; it must be a list"),
        ({"pairs": {"x": [[0]]}}, ".pairs.x[0] is [0]; it must be a list of 2"),
        (
            {"pairs": {"x": [[0, True], [-2, True]]}},
            f".pairs.x[1][0] is -2; it must be an integer from -1 to {2**63 - 1}",
        ),
        ({"pairs": {"x": [[0, 1]]}}, ".pairs.x[0][1] is 1; it must be true or false"),
        ({"note": None}, ".note is null; it must be a string"),
        ({"names": "n"}, None),
        ({"names": None}, None),
        ({"names": []}, ".names is []; it must be a name, or some or null"),
        ({"names": ["n", 1]}, '.names is ["n", 1]; it must be a name, or some or null'),
    ],
)
def test_what_is_wrong_is_named(changed, said):
    assert problem(GOOD | changed, Row) == said


def test_a_field_that_is_missing_and_no_object():
    assert problem({name: value for name, value in GOOD.items() if name != "more"}, Row) == ".more is missing"
    assert problem([], Row) == " is []; it must be an object"
