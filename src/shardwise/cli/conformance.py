"""The command ``conformance``: known bugs of parallel training as small cases, on this library or another."""

import importlib
import json
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from shardwise.cli.arguments import Arguments
from shardwise.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ConformanceArguments(Arguments):
    """Run the catalogue of known bugs on CPU ranks: each case is a few lines that compare with the dense computation.

    Each case names the public report that it comes from. A case that needs a function that the target does not have
    is not offered, and not counted. The exit code is 0 if no case failed, 1 if one did, and 2 for an unknown target.
    docs/conformance.md explains how to write a target. Examples:
      shardwise conformance --target shardwise
      shardwise conformance --target dtensor --case loss/
      shardwise conformance --target path/to/file.py

    Attributes:
        target: shardwise, shardwise.megatron, megatron, transformers, dtensor, or a file of Python; or several.
        case: pattern for the names of cases, or a part of them; all cases if not given.
        list: show the cases and their reports, and run none.
        json: print JSON.
        markdown: print a table of cases and targets.
    """

    target: tuple[str, ...] = ("shardwise",)
    case: Annotated[str | None, tyro.conf.arg(metavar="PATTERN")] = None
    list: bool = False
    json: bool = False
    markdown: bool = False

    def work(self) -> None:
        # Targets import the door, which nothing under cli may do: they are found by name, in the ranks alone.
        catalogue = importlib.import_module("shardwise.conformance")
        if self.list:
            for each in importlib.import_module("shardwise.conformance.case").cases_like(self.case):
                print(f"{each.name}  ({each.ranks} ranks; {each.report})\n    {each.summary}")
            return
        if not self.target:
            raise ConfigError("--target needs at least one name")
        shows = not (self.json or self.markdown)
        line_of = importlib.import_module("shardwise.conformance.outcomes").line_of
        reports: Any = []
        for name in self.target:
            show = (lambda result: print(line_of(result), flush=True)) if shows else None
            reports.append(catalogue.run(name, self.case, on_result=show))
            if shows:
                print(reports[-1].summary)
        if self.json:
            facts = [report.as_json() for report in reports]
            print(json.dumps(facts[0] if len(facts) == 1 else facts, indent=2))
        elif self.markdown:
            print(catalogue.as_markdown(reports))
        if not all(report.is_sound for report in reports):
            raise SystemExit(1)
