"""Reports of a diagnosis: text, JSON, and one HTML page that needs no network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from shardwise.core.atomic_files import write_output
from shardwise.doctor.diagnosis import Diagnosis, Finding
from shardwise.doctor.findings import MOST_ROUNDING, PASSES, Judged, shown_kind, shown_layouts
from shardwise.run.quantities import shown_bytes

_SHOWN = 6
_PASSES = ("forward", "backward", "update")


def as_text(diagnosis: Diagnosis) -> str:
    """Return the summary for the terminal."""
    lines = [_compared_line(diagnosis)]
    lines += [f"note: {note}" for note in diagnosis.notes]
    if diagnosis.is_sound:
        return "\n".join([*lines, diagnosis.sound_line])
    for number, finding in enumerate(diagnosis.findings):
        lines.append(f"{'first fault' if number == 0 else 'also wrong'}: {finding.line()}")
        if math.isfinite(finding.ratio):
            lines.append(
                f"  the difference is {finding.relative:.1e} of the tensor's size, {finding.ratio:,.0f} times the "
                f"expected rounding of {finding.expected:.1e}"
            )
        if finding.others:
            more = len(finding.others) - _SHOWN
            names = ", ".join(finding.others[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
            lines.append(f"  wrong as well: {names}")
    if len(diagnosis.findings) > 1:
        lines.append("what comes later may follow from the first fault")
    return "\n".join(lines)


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the findings, and each compared tensor with its layout and its distance, for ``json.dumps``."""
    return {
        "sound": diagnosis.is_sound,
        "findings": [_finite(asdict(finding)) for finding in diagnosis.findings],
        "rounding_is_measured": diagnosis.rounding_is_measured,
        "notes": diagnosis.notes,
        "not_recorded": diagnosis.not_recorded,
        "axes": diagnosis.axes,
        "tensors": [
            _finite(
                asdict(each.key)
                | {"layouts": {axis: shown_kind(kind) for axis, kind in each.layouts.items()}}
                | {"ratio": each.ratio, "relative": each.relative, "expected": each.expected}
            )
            for each in diagnosis.judged
        ],
    }


def write_page(
    diagnosis: Diagnosis, path: str | Path, *, title: str, flag: str = "file", explains: bool = False
) -> None:
    """Write one HTML page: the modules as a column, with layouts, moves and errors."""
    from jinja2 import Environment

    rows = _rows(diagnosis)
    classes = {row.name: row.kind for row in rows}
    template = resources.files("shardwise.doctor").joinpath("page.html").read_text(encoding="utf-8")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    text = page.render(
        title=title,
        explains=explains,
        sound=diagnosis.sound_line if diagnosis.is_sound else "",
        findings=[(finding, _anchor(_owner(finding.module, classes))) for finding in diagnosis.findings],
        summary=_compared_line(diagnosis),
        notes=diagnosis.notes,
        axes=[(axis, size) for axis, size in diagnosis.axes.items() if size > 1],
        rows=rows,
        limit=MOST_ROUNDING,
    )
    write_output(path, lambda file: file.write(text.encode()), flag=flag)


@dataclass(frozen=True)
class _Bar:
    """The largest ratio of a module's tensors in a pass, and its length on a logarithmic scale in percent."""

    name: str
    ratio: float
    length: float
    is_wrong: bool


@dataclass(frozen=True)
class _Row:
    name: str
    anchor: str
    depth: int
    kind: str
    bars: Sequence[_Bar]
    tensors: Sequence[tuple[str, str, str, str]]
    moves: Sequence[tuple[str, int, str]]
    findings: Sequence[Finding]

    @property
    def short_name(self) -> str:
        return self.name.rpartition(".")[2] or "the model"


def _rows(diagnosis: Diagnosis) -> list[_Row]:
    tensors: dict[str, list[Judged]] = {}
    for each in diagnosis.judged:
        is_param = each.key.what in ("used", "gradient", "updated")
        name = each.key.name.rpartition(".")[0] if is_param else each.key.name
        tensors.setdefault(name, []).append(each)
    classes = {call["name"]: call["class"] for call in diagnosis.calls}
    moves: dict[str, list[list[Any]]] = {}
    for call in diagnosis.calls:
        if call["step"] == 0 and call["micro_batch"] == 0:
            moves.setdefault(call["name"], []).extend(call["moves"])
    names = sorted(classes, key=_by_path(list(dict.fromkeys(call["name"] for call in diagnosis.calls))))
    return [
        _Row(
            name,
            _anchor(name),
            name.count(".") + 1 if name else 0,
            classes[name],
            [_bar(where, tensors.get(name, ())) for where in _PASSES],
            [_described(each) for each in tensors.get(name, ()) if each.key.step == 0 and each.key.micro_batch <= 0],
            _summed(moves.get(name, ())),
            [finding for finding in diagnosis.findings if _owner(finding.module, classes) == name],
        )
        for name in names
    ]


def _by_path(names: Sequence[str]) -> Any:
    """Return a sort key: modules in the order of the first call inside them, each after the modules around it."""
    first: dict[str, int] = {}
    for place, name in enumerate(names):
        parts = name.split(".")
        for length in range(len(parts) + 1):
            first.setdefault(".".join(parts[:length]), place)

    def key(name: str) -> list[tuple[int, str]]:
        parts = name.split(".") if name else []
        around = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
        return [(first[each], each) for each in around]

    return key


def _owner(name: str, classes: dict[str, str]) -> str:
    while name and name not in classes:
        name = name.rpartition(".")[0]
    return name


def _bar(where: str, tensors: Sequence[Judged]) -> _Bar:
    own = [each for each in tensors if PASSES[each.key.what] == where]
    ratio = max((each.ratio for each in own), default=0.0)
    # One percent of the width for a hundredth of the expected rounding, all of it for a million times.
    length = 0.0 if not own else min(100.0, max(1.0, 100 * (math.log10(max(ratio, 1e-2)) + 2) / 8))
    return _Bar(where, ratio, length, any(each.is_wrong for each in own))


def _described(judged: Judged) -> tuple[str, str, str, str]:
    key = judged.key
    name = key.name.rpartition(".")[2] if key.what in ("used", "gradient", "updated") else ""
    what = " ".join(filter(None, (name, key.what, key.leaf)))
    shape = " x ".join(map(str, judged.whole.shape)) or "scalar"
    layouts = shown_layouts(judged.layouts)
    local = next(iter(judged.shards.values())).shape
    here = " x ".join(map(str, local)) or "scalar"
    return what, shape, here, layouts


def _summed(moves: Sequence[Sequence[Any]]) -> list[tuple[str, int, str]]:
    counts = Counter((name, num_bytes) for name, num_bytes in moves)
    return [(name.replace("_", "-"), count, shown_bytes(num_bytes)) for (name, num_bytes), count in counts.items()]


def _compared_line(diagnosis: Diagnosis) -> str:
    layout = ", ".join(f"{axis} {size}" for axis, size in diagnosis.axes.items() if size > 1) or "one rank"
    worst = max((each for each in diagnosis.judged if not each.is_excused), key=lambda each: each.ratio, default=None)
    line = f"compared {len(diagnosis.judged):,} tensors of {diagnosis.steps} steps at {layout} with one rank"
    if worst is None:
        return line
    rounding = "measured" if diagnosis.rounding_is_measured else "estimated"
    where = f"{worst.key.what} of {worst.key.name or 'the model'}, step {worst.key.step}"
    return f"{line}; the largest difference is {worst.ratio:.3g} times the {rounding} rounding ({where})"


def _anchor(name: str) -> str:
    return "module-" + (name.replace(".", "-") or "root")


def _finite(facts: dict[str, Any]) -> dict[str, Any]:
    """Replace infinite numbers, which JSON does not have, by None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in facts.items()
    }
