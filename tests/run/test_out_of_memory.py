"""A run that needs more memory than there is says what it needs, and what to change."""

from __future__ import annotations

import argparse
import errno
import json
import resource
from pathlib import Path

import pytest
import torch
from harness.program import run
from run.run_processes import run_commands
from run.tiny import tiny_settings

from shardwise.cli.reporting import describe
from shardwise.core.errors import ConfigError, OutOfMemoryError
from shardwise.models.recomputation import Recomputation
from shardwise.plan.advice import advice, changes
from shardwise.plan.workload import Mesh
from shardwise.run import out_of_memory
from shardwise.run.build import describe as model_of
from shardwise.run.out_of_memory import MemoryShortage, is_out_of_memory
from shardwise.run.processes.ranks import Ranks

CPU = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory: you tried to allocate 4294967296 bytes."


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError(CPU), True),
        (MemoryError(), True),
        (MemoryError("std::bad_alloc"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (OutOfMemoryError("said already"), False),
        (ConfigError("out of memory"), False),
    ],
)
def test_what_is_out_of_memory(error, expected):
    assert is_out_of_memory(error) == expected


def advised(folder, available, *, world_size=1):
    """The lines of the advice for a run whose ranks have ``available`` bytes."""
    settings = tiny_settings(folder, global_batch_size=16)
    return advice(settings, model_of(settings.model, 301), "cpu", world_size, available).split("\n")


def test_advice_where_nothing_fits_or_all_should(tmp_path):
    assert advised(tmp_path, 1_000)[-1].startswith("No layout of 1 ranks needs as little as 900 B of each; use more")
    assert advised(tmp_path, 1 << 40)[-1].startswith("By the plan 921.6 GiB are enough")
    assert advised(tmp_path, 0)[-1].startswith("shardwise plan ... --fit")


@pytest.mark.slow
def test_a_fresh_process_gives_the_plan_and_the_smallest_change(tmp_path, monkeypatch):
    monkeypatch.setattr("shardwise.run.out_of_memory._SECONDS", 3600)
    settings = tiny_settings(tmp_path, global_batch_size=16)
    ranks = Ranks(0, 0, 1, torch.device("cpu"))
    shortage = MemoryShortage(settings, model_of(settings.model, 301), ranks, 2_500_000)
    with pytest.raises(OutOfMemoryError) as found, shortage.explained():
        raise RuntimeError(CPU)
    text, code = describe(found.value)
    assert code == 1
    message, *lines = text.split("\n")
    assert message == "out of memory on a rank, which asked for 4.00 GiB more; the run has about 2.38 MiB here"
    assert any(line.split()[:4] == ["stage", "layers", "weights", "gradients"] for line in lines)
    assert lines[-1].startswith("The smallest change that fits, with ")
    assert lines[-1].endswith(": --training.micro-batch-size 8")


def test_other_errors_pass(tmp_path):
    settings = tiny_settings(tmp_path)
    shortage = MemoryShortage(settings, model_of(settings.model, 301), Ranks(0, 0, 1, torch.device("cpu")), 0)
    with pytest.raises(RuntimeError, match="shapes"), shortage.explained():
        raise RuntimeError("shapes")


def test_changes_are_flags():
    before = Mesh(dp=4, micro_batch_size=4)
    after = Mesh(tp=2, dp=2, sequence_parallel=True, fsdp=True, recomputation=Recomputation("full"))
    flags = ["--tp 2", "--sequence-parallel", "--fsdp", "--recompute.granularity full", "--training.micro-batch-size 1"]
    assert changes(before, after) == flags
    selective = Mesh(dp=4, micro_batch_size=4, recomputation=Recomputation("selective", modules=("mlp", "core_attn")))
    assert changes(before, selective) == ["--recompute.granularity selective --recompute.modules mlp core_attn"]
    assert changes(before, before) == []
    # A dense model has no --etp, also where an exact run counts with 1; one stage has no need of another schedule.
    assert changes(Mesh(dp=4, etp=1), Mesh(tp=2, dp=2)) == ["--tp 2"]
    assert changes(Mesh(dp=4, schedule="gpipe"), Mesh(dp=4, zero=1)) == ["--zero 1"]
    assert changes(Mesh(dp=8), Mesh(dp=8, ep=8, etp=1)) == ["--ep 8"]
    assert changes(Mesh(dp=8, ep=8), Mesh(tp=2, dp=4, ep=4, etp=1)) == ["--tp 2", "--ep 4", "--etp 1"]
    staged = Mesh(pp=2, virtual_stages=2, schedule="interleaved")
    assert changes(staged, Mesh(dp=2)) == ["--pp 1", "--pipeline-schedule 1f1b", "--virtual-stages 1"]
    split = Mesh(tp=2, sequence_parallel=True)
    flags = ["--parallel.no-sequence-parallel", "--parallel.no-tp-comm-overlap"]
    assert changes(split, Mesh(tp=2), overlaps=True) == flags


LIMITED = """
import json, resource, sys
from pathlib import Path
import torch
from shardwise.cli.main import main
# Room for all but the model's own tensors.
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (2 << 30), resource.RLIM_INFINITY))
sys.exit(main(json.loads(sys.argv[1])))
"""


def limit_memory():
    """The same, in a rank that is forked, which makes no plan after its error: other tests do."""
    out_of_memory._SECONDS = 0
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (2 << 30), resource.RLIM_INFINITY))


@pytest.mark.slow
def test_a_sample_beyond_the_limit_of_memory_trains_on_ranks_that_share_it(tmp_path):
    text = tmp_path / "text.txt"
    with open(argparse.__file__) as file:
        text.write_text(file.read())
    sizes = {"num-layers": 6, "hidden-size": 32, "num-heads": 2, "ffn-hidden-size": 8192, "vocab-size": 300}
    argv = ["train", "--data", str(text), "--device", "cpu", "--model.sequence-length", "4096"]
    argv += [word for name, value in sizes.items() for word in (f"--model.{name}", str(value))]
    argv += ["--training.steps", "1", "--training.global-batch-size", "1"]
    # One rank keeps 2.3 GiB for the backward, and four about 0.6 GiB each.
    for ranks, exit_code in ((1, 1), (4, 0)):
        more = ["--out", str(tmp_path / f"run {ranks}"), "--cp", str(ranks)]
        ended = run_commands(tmp_path, [[*argv, *more]] * ranks, changed=limit_memory, OMP_NUM_THREADS=1)
        assert [code for code, _, _ in ended] == [exit_code] * ranks, ended
        assert ("out of memory on a rank" in ended[0][2]) == (ranks == 1)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.matrix), 2])
def test_a_run_beyond_its_limit_of_memory(tmp_path, tp):
    text = tmp_path / "text.txt"
    with open(argparse.__file__) as file:
        text.write_text(file.read())
    sizes = {"num-layers": 2, "hidden-size": 32, "num-heads": 2, "ffn-hidden-size": 65536, "vocab-size": 300}
    argv = ["train", "--data", str(text), "--out", str(tmp_path / "run"), "--device", "cpu", "--tp", str(tp)]
    argv += [word for name, value in sizes.items() for word in (f"--model.{name}", str(value))]
    argv += ["--training.steps", "1", "--training.global-batch-size", "16"]
    argv += ["--model.sequence-length", "512"]
    # One tensor of the MLP alone takes 4 GiB.
    cache = {"OMP_NUM_THREADS": "1", "SHARDWISE_CACHE": tmp_path / "cache"}
    done = run("-c", LIMITED, json.dumps(argv), exit_code=1, **cache)
    error = [line for line in done.stderr.splitlines() if "NNPACK" not in line]
    first = next(place for place, line in enumerate(error) if "error: " in line)
    assert "out of memory on a rank, which asked for " in error[first]
    if "timed out after 30 seconds" in error[-1]:
        # A busy machine makes no plan within the seconds that the other ranks wait.
        assert "Use a smaller --training.micro-batch-size" in error[-1]
    else:
        assert "Most memory: tensor-parallel rank 0 of stage 0, " in done.stderr
        assert "The smallest change that fits, with " in error[-1]
        assert "--training.micro-batch-size " in error[-1]
    assert done.stderr.count("error: ") == 1
