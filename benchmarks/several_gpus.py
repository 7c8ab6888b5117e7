"""``make gpus``: what two or more GPUs of one machine compute together, in ten minutes, and a dated table of it.

Each run is the command ``shardwise train``, as a user starts it. Its losses are compared with those of one rank, for
each kind of layout, with and without the Triton kernels; a run is killed and resumed; and the collectives' bandwidth is
measured. Nothing is installed, and no network is used.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu

ROOT = Path(__file__).parents[1]
BUDGET_SECONDS = 570.0
# Of one run: PyTorch and NCCL start, kernels are compiled.
_RUN_SECONDS = 150.0
NUM_STEPS = 20
# In fp32, layouts differ by the order of sums, whose errors grow from step to step. In bf16 a number has 8 bits.
BOUNDS = {"float32": 1e-4, "bfloat16": 2e-2}
SEQUENCE_PARALLEL = ("--tp", "2", "--sequence-parallel")
OVERLAP = (*SEQUENCE_PARALLEL, "--tp-comm-overlap")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "tp 2": ("--tp", "2"),
    "sequence parallelism": SEQUENCE_PARALLEL,
    "overlap": OVERLAP,
    "dp 2": (),
    "zero 1": ("--zero", "1"),
    "fsdp": ("--fsdp",),
    "pp 2": ("--pp", "2"),
    "zero-bubble": ("--pp", "2", "--pipeline-schedule", "zero-bubble"),
}
# Fast paths that can be turned off, with the variable that does it.
PATHS = {"Triton": "SHARDWISE_TRITON"}
COLLECTIVES = {
    # Bytes that a rank sends for each byte of the whole tensor, of n ranks.
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "shift": lambda n: 1.0,
}


@dataclass(frozen=True)
class Place:
    """Where the runs are.

    Attributes:
        folder: folder of all runs.
        num_gpus: number of ranks for the collectives.
        is_rehearsal: on a CPU, at sizes that take moments.
        until: no run starts later, by ``time.monotonic``.
    """

    folder: Path
    num_gpus: int
    is_rehearsal: bool
    until: float = field(default_factory=lambda: time.monotonic() + BUDGET_SECONDS)

    @property
    def seconds(self) -> float:
        """Maximum seconds of a run. A rehearsal takes the time that a busy machine needs."""
        return 24 * 3600.0 if self.is_rehearsal else _RUN_SECONDS

    def command(
        self, name: str, num_ranks: int, *flags: str, dtype: str = "float32", steps: int = NUM_STEPS
    ) -> list[str]:
        """Return the command of a run."""
        sizes = {"num-layers": 4, "hidden-size": 512, "num-heads": 8, "vocab-size": 500, "sequence-length": 256}
        if self.is_rehearsal:
            sizes |= {"num-layers": 2, "hidden-size": 32, "num-heads": 4, "vocab-size": 301, "sequence-length": 24}
        return [
            *(sys.executable, "-m", "shardwise", "train", "--data", str(self.folder / "text.txt")),
            *("--out", str(self.folder / name.replace(" ", "-").replace(",", "")), "--nproc", str(num_ranks)),
            *("--device", "cpu" if self.is_rehearsal else "cuda", "--training.dtype", dtype),
            *("--training.steps", str(steps), "--training.global-batch-size", "8"),
            *(word for key, value in sizes.items() for word in (f"--model.{key}", str(value))),
            *flags,
        ]

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        return os.environ | {"PYTHONPATH": paths, "SHARDWISE_CACHE": str(self.folder / "cache")} | dict(variables)

    def losses(self, name: str) -> dict[int, float]:
        """Return the loss of each step of a run; of a step that was made twice, the later one."""
        lines = (self.folder / name.replace(" ", "-").replace(",", "") / "metrics.jsonl").read_text().splitlines()
        return {row["step"]: row["loss"] for row in map(json.loads, lines)}


class RunError(Exception):
    """A run did not end as it should; the message has its last lines."""


def run(
    place: Place, name: str, num_ranks: int, *flags: str, variables: Mapping[str, str] | None = None, **options: Any
) -> dict[int, float]:
    """Run a command to its end, and return its losses."""
    if time.monotonic() > place.until and not place.is_rehearsal:
        raise RunError("not run: the time was used up")
    command = place.command(name, num_ranks, *flags, **options)
    with subprocess.Popen(
        command,
        env=place.environment(variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=place.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise RunError(f"not done in {place.seconds:.0f} s") from None
    if process.returncode != 0:
        raise RunError(f"exit code {process.returncode}: {' '.join(said.split()[-40:])}")
    return place.losses(name)


def difference(losses: Mapping[int, float], expected: Mapping[int, float]) -> float:
    """Return the largest relative difference of two curves of the same steps; infinite if the steps differ."""
    if losses.keys() != expected.keys():
        return math.inf
    apart = [abs(losses[step] - expected[step]) / abs(expected[step]) for step in expected]
    return max(apart) if all(map(math.isfinite, apart)) else math.inf


def compare_layouts(place: Place, layouts: Mapping[str, tuple[str, ...]]) -> list[Any]:
    """Compare each layout's losses with those of one rank, in fp32."""
    from gpus.measuring import Row

    alone, rows = run(place, "one rank", 1), []
    for name, flags in layouts.items():
        print(f"running: {name}", flush=True)
        goal = f"at most {BOUNDS['float32']:g}"
        try:
            found = difference(run(place, name, 2, *flags), alone)
        except RunError as error:
            rows.append(Row("losses of one rank", name, "failed", goal, False, str(error)))
        else:
            rows.append(Row("losses of one rank", name, f"{found:.1e} apart", goal, found <= BOUNDS["float32"]))
    return rows


def compare_paths(place: Place) -> list[Any]:
    """Compare bf16 losses with a fast path and without it."""
    from gpus.measuring import Row

    rows = []
    for path, variable in PATHS.items():
        goal = f"at most {BOUNDS['bfloat16']:g}"
        try:
            curves = [
                run(place, f"{path} {value}", 2, *OVERLAP, dtype="bfloat16", variables={variable: value})
                for value in ("1", "0")
            ]
        except RunError as error:
            rows.append(Row("bf16 with a fast path and without", path, "failed", goal, False, str(error)))
        else:
            found = difference(*curves)
            rows.append(
                Row("bf16 with a fast path and without", path, f"{found:.1e} apart", goal, found <= BOUNDS["bfloat16"])
            )
    return rows


def kill_and_resume(place: Place, *, steps: int) -> list[Any]:
    """Kill a rank after the first checkpoint, resume, and compare the losses with those of a run to the end."""
    from gpus.measuring import Row

    flags = ("--tp", "2", "--training.save-every", str(max(2, steps // 20)))
    try:
        whole = run(place, "whole", 2, *flags, steps=steps)
        killed = _kill_a_rank(place, flags, steps)
        resumed = run(place, "killed", 2, *flags, "--resume", "auto", steps=steps)
    except RunError as error:
        return [Row("killed and resumed", "tp 2", "failed", "the same losses", False, str(error))]
    found = difference(resumed, whole)
    bound = BOUNDS["float32"]
    return [Row("killed and resumed", "tp 2", f"{found:.1e} apart", f"at most {bound:g}", killed and found <= bound)]


def _kill_a_rank(place: Place, flags: Sequence[str], steps: int) -> bool:
    """Start a run and kill one of its ranks after a checkpoint; return whether the run ended by this, with an error."""
    command = place.command("killed", 2, *flags, steps=steps)
    with subprocess.Popen(
        command,
        env=place.environment({}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        until = time.monotonic() + place.seconds
        while process.poll() is None and not any((place.folder / "killed" / "checkpoints").glob("step-*")):
            if time.monotonic() > until:
                os.killpg(process.pid, signal.SIGKILL)
                raise RunError(f"no checkpoint in {place.seconds:.0f} s")
            time.sleep(0.01)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if process.poll() is None and children:
            os.kill(int(children[-1]), signal.SIGKILL)
        try:
            code = process.wait(place.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise RunError("the run did not end when one of its ranks was killed") from None
    return code not in (0, None)


class Collectives:
    """A rank that measures collectives; a worker of ``workers.Workers``."""

    def __init__(self, store: str, rank: int, num_ranks: int, device: str) -> None:
        import torch
        import torch.distributed as dist

        self.device = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
        if device == "cuda":
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)  # type: ignore[attr-defined]
        assert dist.group.WORLD is not None
        self.group = dist.group.WORLD

    def seconds(self, name: str, num_bytes: int, repeats: int) -> float:
        """Return the median seconds of a collective, of which the whole tensor has ``num_bytes``."""
        import torch
        from gpus.measuring import milliseconds

        from shardwise.core.communication import collectives
        from shardwise.core.communication.transports import choose_transport

        n = self.group.size()
        whole = torch.ones(num_bytes // 4 // n * n, device=self.device)
        part, sizes = whole[: len(whole) // n], (len(whole) // n,) * n
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: collectives.all_reduce(whole, group=self.group, may_overwrite=True),
            "all_gather": lambda: collectives.all_gather(part, group=self.group, dim=0),
            "reduce_scatter": lambda: collectives.reduce_scatter(whole, group=self.group, dim=0),
            "all_to_all": lambda: collectives.all_to_all(
                whole, group=self.group, output_sizes=sizes, input_sizes=sizes
            ),
            "shift": lambda: (
                choose_transport("shift", whole, self.group).shift(whole, self.group, 1, (len(whole),) * n, None).wait()
            ),
        }
        return milliseconds(calls[name], self.device, repeats=repeats) / 1000

    def close(self) -> None:
        """Leave the group."""
        import torch.distributed as dist

        dist.destroy_process_group()


def measure_collectives(place: Place, *, sizes: Sequence[int], repeats: int) -> list[Any]:
    """Measure each collective over all GPUs."""
    from gpus.measuring import Row
    from workers import Workers, WorkerSpec

    n, device = place.num_gpus, "cpu" if place.is_rehearsal else "cuda"
    store = str(place.folder / "store")
    specs = [WorkerSpec(f"rank {rank}", 1, Collectives, (store, rank, n, device)) for rank in range(n)]
    rows = []
    with Workers(specs) as workers:
        for name, share in COLLECTIVES.items():
            for num_bytes in sizes:
                took = max(workers.call([spec.name for spec in specs], "seconds", name, num_bytes, repeats))
                rate = num_bytes * share(n) / took / 1e9
                size = f"{num_bytes / 2**20:g} MiB"
                rows.append(
                    Row(f"bandwidth, {n} ranks", f"{name}, {size}", f"{rate:.3g} GB/s", note=f"{took * 1e6:.0f} us")
                )
    return rows


def why_not(*, rehearsal: bool) -> str | None:
    """Return in one line what is missing here; None if nothing is."""
    if (reason := gpu.why_not(rehearsal=rehearsal)) is not None or rehearsal:
        return reason and reason.replace("make gpu", "make gpus")
    import torch

    found = torch.cuda.device_count()
    return None if found > 1 else f"make gpus needs at least two GPUs; PyTorch sees {found}; one is for make gpu"


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything and return the exit code: 0 if every goal is met, else 1 or 2."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rehearsal", action="store_true", help="two ranks on a CPU, at sizes that take moments")
    choices = [*LAYOUTS, "fast paths", "kill", "bandwidth"]
    parser.add_argument(
        "--only", nargs="+", choices=choices, default=choices, help="layouts, and other parts; all if none"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the table")
    arguments = parser.parse_args(argv)
    rehearsal = arguments.rehearsal
    if (reason := why_not(rehearsal=rehearsal)) is not None:
        print(f"make gpus: {reason}", file=sys.stderr)
        return 2
    import torch
    from gpus.measuring import Row

    arguments.out.mkdir(parents=True, exist_ok=True)
    layouts = {name: flags for name, flags in LAYOUTS.items() if name in arguments.only}
    rows: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="shardwise-gpus-") as folder:
        place = Place(Path(folder), 2 if rehearsal else torch.cuda.device_count(), rehearsal)
        # A text that every Python has.
        place.folder.joinpath("text.txt").write_text(
            Path(argparse.__file__).read_text()[: 20_000 if rehearsal else None]
        )
        sizes, repeats, steps = ([1 << 16], 2, 40) if rehearsal else ([1 << 20, 1 << 24, 1 << 28], 20, 400)
        parts: dict[str, Callable[[], list[Any]]] = {
            "layouts": lambda: compare_layouts(place, layouts),
            "fast paths": lambda: compare_paths(place),
            "kill": lambda: kill_and_resume(place, steps=steps),
            "bandwidth": lambda: measure_collectives(place, sizes=sizes, repeats=repeats),
        }
        for name, measure in parts.items():
            if name not in arguments.only and not (name == "layouts" and layouts):
                continue
            print(f"running: {name}", flush=True)
            try:
                rows += measure()
            # The others may succeed. The table lists the failure.
            except Exception as error:
                reason = " ".join(str(error).split())[:300]
                rows.append(Row(name, "", f"failed: {type(error).__name__}", met=False, note=reason))
    date, facts = datetime.date.today().isoformat(), gpu.facts_of(rehearsal=rehearsal) | {"GPUs": place.num_gpus}
    text = gpu.text_of(rows, facts, date, title="On several GPUs")
    path = arguments.out / f"gpus-{date}.md"
    path.write_text(text)
    values = {"benchmark": "gpus", "date": date, "machine": facts, "rows": [vars(row) for row in rows]}
    path.with_suffix(".json").write_text(json.dumps(values, indent=2) + "\n")
    print(f"\n{text}\nwritten to {path}")
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    sys.exit(main())
