"""Time for which a save blocks training: asynchronous saves against synchronous saves, which wait for the disk.

    python benchmarks/checkpoint.py --json checkpoint.json
    python benchmarks/checkpoint.py --device cuda --mebibytes 8192 --folder /scratch

One rank has the state of a Llama's layers with AdamW's two moments, all in fp32. In each of several alternating rounds,
each kind of save runs once, into a folder that keeps two checkpoints. A synchronous save blocks from start to end. An
asynchronous save blocks while it plans and copies, and again while it publishes after its thread has written; the time
between is not measured, and nothing is computed in it. Before the measurement, the files of both kinds are compared
byte for byte.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import (
    Spread,
    add_common_flags,
    format_table,
    measure_in_rounds,
    parse_arguments,
    positive_int,
    ratios_of,
    run_benchmark,
)

from shardwise.core.errors import ParityError
from shardwise.core.sharding import ParamLayout
from shardwise.storage.checkpoint import ParamShard, PendingSave, Snapshot, save

KINDS = ("asynchronous", "synchronous")
GOAL = 0.15
"""Maximum ratio of blocked times that meets the goal."""

# Weights of a layer (queries, keys and values; output; gate and up; down): rows and columns over the hidden size.
_SHAPES = {"qkv": (1.5, 1.0), "proj": (1.0, 1.0), "fc1": (5.5, 1.0), "fc2": (1.0, 2.75)}
_HIDDEN = 512


def make_state(num_bytes: int, device: str) -> dict[str, ParamShard]:
    """Create weights and moments with a total size of about ``num_bytes``."""
    of_layer = {name: (int(rows * _HIDDEN), int(columns * _HIDDEN)) for name, (rows, columns) in _SHAPES.items()}
    per_layer = 3 * 4 * sum(math.prod(shape) for shape in of_layer.values())
    generator = torch.Generator(device).manual_seed(1234)
    state = {}
    # At least one layer, with a width that fits.
    shrink = min(1.0, math.sqrt(num_bytes / per_layer))
    for layer in range(max(1, num_bytes // per_layer)):
        for name, (rows, columns) in of_layer.items():
            shape = (max(1, int(rows * shrink)), max(1, int(columns * shrink)))
            for kind in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
                key = f"{kind}.layers.{layer}.{name}"
                data = torch.randn(shape, generator=generator, device=device)
                state[key] = ParamShard(key, data, ParamLayout.replicated(shape, 1), 0)
    return state


class Saver:
    """Saves a state with both kinds of saves, each into its own folder.

    Args:
        root: parent of the folders.
        num_bytes: approximate size of the state.
        device: device of the state.
    """

    def __init__(self, root: Path, num_bytes: int, device: str) -> None:
        self.state = make_state(num_bytes, device)
        self.num_bytes = sum(shard.data.nbytes for shard in self.state.values())
        self.phases: dict[str, list[float]] = {"copy": [], "publish": []}
        self._root, self._step, self._snapshot = root, 0, Snapshot()
        group = dist.group.WORLD
        assert group is not None
        self._group = group

    def seconds(self, kind: str) -> float:
        """Save, and return the seconds for which the save blocks."""
        root, self._step = self._root / kind, self._step + 1
        begun = time.perf_counter()
        if kind == "synchronous":
            save(root, self._step, self.state, group=self._group, keep=2)
            return time.perf_counter() - begun
        pending = PendingSave(root, self._step, self.state, group=self._group, keep=2, snapshot=self._snapshot)
        copied = time.perf_counter() - begun
        pending.wait()
        begun = time.perf_counter()
        pending.complete()
        published = time.perf_counter() - begun
        self.phases["copy"].append(copied)
        self.phases["publish"].append(published)
        return copied + published

    def check(self) -> None:
        """Run both kinds of saves, which also allocates the snapshot; raise ParityError if the files differ."""
        files = []
        for kind in KINDS:
            self.seconds(kind)
            (path,) = (self._root / kind).glob("step-*/*.safetensors")
            files.append(path.read_bytes())
        if files[0] != files[1]:
            raise ParityError("the asynchronous save wrote other bytes than the synchronous one")
        self.phases = {name: [] for name in self.phases}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Print the table and return the content of the JSON file."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            saver = Saver(Path(folder), arguments.mebibytes << 20, arguments.device)
            saver.check()
            values = measure_in_rounds(KINDS, saver.seconds, num_rounds=arguments.rounds)
        finally:
            dist.destroy_process_group()
    (ratio,) = ratios_of(values, [KINDS])
    spreads = {kind: Spread.of(seconds) for kind, seconds in values.items()}
    spreads |= {f"of it {name}": Spread.of(seconds[-arguments.rounds :]) for name, seconds in saver.phases.items()}
    rows = [
        (name, *(f"{1000 * value:.1f}" for value in (spread.min, spread.median, spread.max)))
        for name, spread in spreads.items()
    ]
    print(f"{saver.num_bytes / 2**20:.0f} MiB on {arguments.device}: milliseconds for which a save blocks")
    print(format_table(("", "min", "median", "max"), rows))
    low, middle, high = ratio.spread.min, ratio.spread.median, ratio.spread.max
    met = "met" if middle <= GOAL else "missed"
    print(f"asynchronous / synchronous: {middle:.3f} ({low:.3f} to {high:.3f}), goal {GOAL}: {met}")
    return {
        "device": arguments.device,
        "num_bytes": saver.num_bytes,
        "seconds": {name: asdict(spread) for name, spread in spreads.items()},
        "ratio": ratio.to_json(),
        "goal": GOAL,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mebibytes", type=positive_int, default=512, help="of the state; default: 512")
    parser.add_argument("--device", default="cpu", help="where the state is; default: cpu")
    parser.add_argument("--folder", type=Path, help="on the disk that is to be written to; default: the temporary one")
    add_common_flags(parser, default_rounds=5)
    arguments = parse_arguments(parser, argv)
    return run_benchmark("checkpoint", arguments, lambda: measure(arguments))


if __name__ == "__main__":
    sys.exit(main())
