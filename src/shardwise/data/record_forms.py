"""Read records of any keys by a form: a record whose texts have places for a record's texts, ``{instruction}``.

A file has one form, or several under ``"forms"``, for records with and without some texts::

    {"forms": [
        {"prompt": "### Task:\\n{instruction}\\n### Data:\\n{input}\\n### Answer:\\n", "completion": "{output}"},
        {"prompt": "### Task:\\n{instruction}\\n### Answer:\\n", "completion": "{output}"}
    ]}

A form fits a record that has all keys of its places. No text may be lost: the form must also have a place for each text
that is not empty and for which any form has a place. Of the forms that fit, the one with the fewest empty texts is
used; then the first.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.core.errors import DataError
from shardwise.core.json_text import read_json
from shardwise.data.json_records import Record, keys_of, kind_of
from shardwise.data.reading import AnyPath, read_records

_PLACE = re.compile(r"\{(\w+)\}")
# The texts of a record are copied to each place, so a file of strangers must not have too many.
_MOST_PLACES = 100


class Form(NamedTuple):
    """A record with places, and the keys that they name."""

    record: Mapping[str, Any]
    keys: frozenset[str]


def read_forms(path: AnyPath) -> list[Form]:
    """Read the forms in a JSON file; DataError if it cannot be read, or a form has no places or too many."""
    try:
        value = read_json(Path(path).expanduser())
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    forms = value["forms"] if value.keys() == {"forms"} else [value]
    if not isinstance(forms, list) or not forms or not all(isinstance(form, dict) for form in forms):
        raise DataError(f"{str(path)!r}: 'forms' is no list of objects; give it records with places such as {{output}}")
    found = []
    for number, form in enumerate(forms, 1):
        places = [place for text in _texts_of(form) for place in _PLACE.findall(text)]
        if not 1 <= len(places) <= _MOST_PLACES:
            raise DataError(
                f"{str(path)!r}, form {number}: {len(places)} places; a form needs from 1 to {_MOST_PLACES}, such as "
                '"prompt": "{instruction}", "completion": "{output}"'
            )
        found.append(Form(form, frozenset(places)))
    return found


def formed(records: Iterable[Record], path: AnyPath) -> list[Record]:
    """Fill the form in a file, or the best of several, with the texts of each record; DataError if none fits."""
    forms = read_forms(path)
    keys = sorted(frozenset[str]().union(*(form.keys for form in forms)))
    return [Record(record.where, _filled(record, forms, keys, str(path))) for record in records]


def read_by_form(
    paths: AnyPath | Iterable[AnyPath],
    form: AnyPath | None,
    has_text: Callable[[Record], bool] = lambda record: bool(record.value),
) -> tuple[str, list[Record]]:
    """Read records as ``read_records``, or without ``has_text`` and by the form in a file if one is given."""
    if form is None:
        return read_records(paths, has_text=has_text)
    name, records = read_records(paths)
    return name, formed(records, form)


def _filled(record: Record, forms: list[Form], keys: list[str], path: str) -> Any:
    where, value = record.where, record.value
    if not isinstance(value, dict):
        raise DataError(f"{where}: not an object but {kind_of(value)}, and the form in {path!r} needs keys")
    texts = {key: "" if value[key] is None else value[key] for key in keys if key in value}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise DataError(f"{where}: {key!r} is not a string but {kind_of(text)}; make it a string")
    whole = [form for form in forms if form.keys <= texts.keys()]
    if not whole:
        missing = min(forms[-1].keys - texts.keys())
        raise DataError(
            f"{where}: no key {missing!r}, for which {path!r} has a place (its keys: {keys_of(value)}); repair the "
            "record, or add a form without the place"
        )
    given = {key for key, text in texts.items() if text}
    fitting = [form for form in whole if given <= form.keys]
    if not fitting:
        raise DataError(
            f"{where}: no form in {path!r} has a place for all of {', '.join(map(repr, sorted(given)))}; add one"
        )
    best = min(fitting, key=lambda form: len(form.keys - given))
    return _replaced(best.record, texts)


def _replaced(value: Any, texts: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return _PLACE.sub(lambda place: texts[place[1]], value)
    if isinstance(value, dict):
        return {key: _replaced(each, texts) for key, each in value.items()}
    return [_replaced(each, texts) for each in value] if isinstance(value, list) else value


def _texts_of(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts_of(each)
