"""Compare each model of transformers that has a tensor-parallel plan, split by the plan, with the whole model.

    python benchmarks/models_by_plan.py measure --json results.json
    python benchmarks/models_by_plan.py measure --theirs 2 --json theirs-2.json
    python benchmarks/models_by_plan.py page results.json theirs-2.json > docs/models.md

``measure`` starts the ranks once, and writes the result of each class as soon as it has it; started again, it goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import time
import warnings
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from plans.comparison import results
from plans.page import page
from plans.tiny import OVERRIDES, Heads, classes, model_class

# The name of each pass, its heads, and the numbers of ranks.
PASSES = {
    "first": (Heads(), [2, 3, 4]),
    "9 heads, 3 key-value heads": (Heads(9, 3, is_odd=True), [2]),
    "12 heads, 1 key-value head": (Heads(12, 1, is_odd=True), [2]),
}
_SILENT_SECONDS = 300.0
# If one rank fails where others communicate, these fail after it, and the ranks start again with the next class.
_WAIT = datetime.timedelta(seconds=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("measure")
    measure.add_argument("--json", type=Path, required=True)
    measure.add_argument("--theirs", type=int, metavar="N", help="transformers' own tensor parallelism, on N ranks")
    measure.add_argument("--only", nargs="*", help="names of classes")
    shown = commands.add_parser("page")
    shown.add_argument("ours", type=Path)
    shown.add_argument("theirs", type=Path, nargs="*")
    arguments = parser.parse_args()
    if arguments.command == "page":
        ours, *theirs = (json.loads(path.read_text()) for path in (arguments.ours, *arguments.theirs))
        print(page(ours, theirs, OVERRIDES), end="")
    else:
        _measure(arguments.json, arguments.theirs, arguments.only)


def _measure(path: Path, theirs: int | None, only: list[str] | None) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = classes(only)
    for package, kind in found:
        # The ranks are forked, so models are imported once.
        with contextlib.suppress(Exception):
            model_class(kind, package)
    written = _read(path)
    while left := [each for each in found if each[1].__name__ not in written["classes"]]:
        _run_ranks(left, path, theirs)
        written = _read(path)
        if failed := next((each for each in left if each[1].__name__ not in written["classes"]), None):
            _write(path, *failed, {"first": {str(theirs or 2): {"verdict": "error", "reason": "a rank died or hung"}}})
            written = _read(path)


def _read(path: Path) -> dict[str, Any]:
    if path.exists():
        return json.loads(path.read_text())
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "versions": versions, "classes": {}}


def _write(path: Path, package: str, kind: type[Any], passes: dict[str, Any]) -> None:
    every = _read(path)
    every["classes"][kind.__name__] = {"package": package, "passes": passes}
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(every, indent=1))
    temporary.replace(path)


def _run_ranks(left: list[tuple[str, type[Any]]], path: Path, theirs: int | None) -> None:
    """Run ranks over the classes, until they have finished, one has died, or they are silent."""
    context, store = get_context("fork"), path.with_suffix(".store").absolute()
    store.unlink(missing_ok=True)
    size = theirs or max(max(sizes) for _, sizes in PASSES.values())
    ranks = [context.Process(target=_rank, args=(rank, size, store, left, path, theirs)) for rank in range(size)]
    for process in ranks:
        process.start()
    while any(process.is_alive() for process in ranks):
        time.sleep(0.5)
        written = path.stat().st_mtime if path.exists() else time.time()
        died = any(process.exitcode not in (None, 0) for process in ranks)
        if died or time.time() - max(written, store.stat().st_mtime if store.exists() else 0) > _SILENT_SECONDS:
            for process in ranks:
                process.kill()
    for process in ranks:
        process.join()
    store.unlink(missing_ok=True)


def _rank(rank: int, size: int, store: Path, left: list[tuple[str, type[Any]]], path: Path, theirs: int | None) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=_WAIT)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for package, kind in left:
        passes = {
            name: results(package, kind, heads, sizes, theirs=theirs is not None)
            for name, (heads, sizes) in (PASSES if theirs is None else {"first": (Heads(), [theirs])}).items()
        }
        if rank == 0:
            _write(path, package, kind, passes)
            print(
                kind.__name__,
                {name: [each["verdict"] for each in of.values()] for name, of in passes.items()},
                flush=True,
            )


if __name__ == "__main__":
    main()
