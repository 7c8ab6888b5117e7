"""Results of the catalogue, as text, JSON and a table."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.conformance.case import Case

Outcome = Literal["passed", "failed", "not offered"]

_MARKS: dict[Outcome, str] = {"passed": "passed", "failed": "**failed**", "not offered": ""}


@dataclass(frozen=True)
class Result:
    """Outcome of one case, with the first line of the difference or error, or the names that are not offered."""

    case: Case
    outcome: Outcome
    message: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """Results of a target.

    Attributes:
        target: name of the target.
        versions: versions of the libraries.
        results: a result for each case, in order.
    """

    target: str
    versions: dict[str, str]
    results: tuple[Result, ...]

    def of(self, outcome: Outcome) -> list[Result]:
        """Return the results with this outcome."""
        return [each for each in self.results if each.outcome == outcome]

    @property
    def is_sound(self) -> bool:
        """True if no case failed."""
        return not self.of("failed")

    @property
    def summary(self) -> str:
        """Number of cases for each outcome, in one line."""
        counts = {outcome: len(self.of(outcome)) for outcome in _MARKS}
        return f"{self.target}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON's types."""
        results = [
            {
                "case": each.case.name,
                "summary": each.case.summary,
                "report": each.case.report,
                "ranks": each.case.ranks,
                "outcome": each.outcome,
                "message": each.message,
                "seconds": round(each.seconds, 3),
            }
            for each in self.results
        ]
        return {"target": self.target, "versions": self.versions, "results": results}


def line_of(result: Result) -> str:
    """Return one line about a result, and two more about a failure."""
    line = f"{result.outcome:<11}  {result.case.name}"
    if result.outcome != "failed":
        return line
    return f"{line}\n{'':13}{result.message}\n{'':13}{result.case.summary} Report: {result.case.report}"


def as_markdown(reports: Sequence[Report], *, date: datetime.date | None = None) -> str:
    """Return a table of targets and cases; ``date`` of the heading is today if None."""
    versions = {name: version for report in reports for name, version in report.versions.items()}
    named = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    lines = [f"{date or datetime.date.today()}, on CPU ranks with gloo: {named}.", ""]
    lines += ["| case | report | " + " | ".join(report.target for report in reports) + " |"]
    lines += ["|---|---|" + "---|" * len(reports)]
    for row in zip(*(report.results for report in reports), strict=True):
        case = row[0].case
        cells = " | ".join(_MARKS[each.outcome] for each in row)
        lines.append(f"| `{case.name}` {case.summary} | {case.report} | {cells} |")
    totals = [f"{len(each.of('passed'))} of {len(each.results) - len(each.of('not offered'))}" for each in reports]
    lines.append("| passed | | " + " | ".join(totals) + " |")
    return "\n".join(lines)
