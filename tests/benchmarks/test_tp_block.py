"""The benchmark of tensor-parallel blocks, at sizes that take moments, and what it refuses to time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import tp_block
from blocks import bare
from blocks.bare import make_bare
from blocks.candidates import make_dtensor, make_ours
from blocks.problem import BLOCKS, BlockSizes, Problem
from blocks.runner import CANDIDATES, LINEARS, differences
from shared_workers import SharedWorkers, run_script
from torch.distributed.device_mesh import DeviceMesh
from tp_block import check_agreement
from workers import WorkerSpec

from shardwise.core.errors import ParityError

SCRIPT = Path(tp_block.__file__)
SIZES = {"hidden_size": 16, "ffn_hidden_size": 24, "num_heads": 2, "sequence_length": 6, "batch_size": 3}
TINY = [str(word) for name, value in SIZES.items() for word in ("--" + name.replace("_", "-"), value)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedWorkers]:
    """The two ranks."""
    specs: list[WorkerSpec] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(tp_block, "Workers", specs.extend)
        tp_block.start_workers(tmp_path_factory.mktemp("ranks"))
    shared = SharedWorkers(specs, tmp_path_factory.mktemp("workers") / "log", forked=False)
    with shared.workers:
        yield shared
    # Until their very end, at which PyTorch warns.
    assert "unwaited" not in shared.log.read_text()


@pytest.mark.matrix
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_all_candidates_are_timed_and_the_json_is_whole(tmp_path, monkeypatch, capsys, shared, sequence_parallel):
    file = tmp_path / "result.json"
    options = ("--sequence-parallel", "--no-bias") if sequence_parallel else ()
    arguments = ["--size", "small", *TINY, "--rounds", "2", "--steps", "1", "--linear-calls", "20"]

    code = run_script(SCRIPT, [*arguments, "--json", str(file), *options], shared, monkeypatch)

    printed = capsys.readouterr()
    assert code == 0, printed.err + shared.log.read_text()
    assert "unwaited" not in printed.err + shared.log.read_text()
    report = json.loads(file.read_text())
    assert report["benchmark"] == "tp_block"
    assert [result["block"] for result in report["blocks"]] == list(BLOCKS)
    for result in report["blocks"]:
        assert result["size"] == "small"
        assert result["sizes"] == SIZES | {"bias": not sequence_parallel}
        assert result["sequence_parallel"] == sequence_parallel
        assert 0 <= result["largest_relative_difference"] <= 1e-6
        seconds = result["seconds_per_step"]
        assert list(seconds) == list(CANDIDATES)
        assert all(len(values) == 2 and min(values) > 0 for values in seconds.values())
        goals = {(ratio["numerator"], ratio["denominator"]): ratio["goal"] for ratio in result["ratios"]}
        assert goals == {("ours", "dtensor"): 0.45, ("ours", "bare"): 1.02, ("bare", "dtensor"): None}
    linear = report["linear"]
    ours, theirs = (linear["microseconds_per_call"][name] for name in LINEARS)
    overhead = linear["overhead_microseconds"]
    assert overhead["per_round"] == pytest.approx([a - b for a, b in zip(ours, theirs, strict=True)])
    assert overhead["goal"] == 10.0
    for words in ("ours / dtensor", "ours / bare", "0.45", "1.02", "ColumnParallelLinear", "10.00"):
        assert words in printed.out


def candidates(group, block, sequence_parallel, bias=True):
    problem = Problem.draw(block, BlockSizes(**SIZES, bias=bias), seed=3)
    mesh = DeviceMesh.from_group(group, "cpu")
    return problem, {
        "ours": make_ours(problem, group, sequence_parallel=sequence_parallel),
        "dtensor": make_dtensor(problem, mesh, sequence_parallel=sequence_parallel),
        "bare": make_bare(problem, group, sequence_parallel=sequence_parallel),
    }


def results_of(made):
    return {name: candidate.results() for name, candidate in made.items()}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("wrong", "tensor"), [("_Row", "output"), ("_Column", "input gradient"), ("_Column", "gradient of column.weight")]
)
def test_a_wrong_candidate_is_not_timed(group, monkeypatch, wrong, tensor):
    """Each mistake is in one place, and the message names what it spoils."""
    function = getattr(bare, wrong)

    class Wrong(function):
        @staticmethod
        def forward(ctx, x, weight, bias, group):
            output = function.forward(ctx, x, weight, bias, group)
            return output + bias if tensor == "output" else output

        @staticmethod
        def backward(ctx, grad):
            grad_x, grad_weight, grad_bias, _ = function.backward(ctx, grad)
            if tensor == "input gradient":
                dist.all_reduce(grad_x, group=ctx.group)
            if tensor == "gradient of column.weight":
                grad_weight *= 1.0001
            return grad_x, grad_weight, grad_bias, None

    monkeypatch.setattr(bare, wrong, Wrong)
    _, made = candidates(group, "mlp", sequence_parallel=False)
    with pytest.raises(ParityError, match=rf"^{tensor} on rank {group.rank()} differs between ours and bare by "):
        check_agreement(differences(results_of(made)), group.rank())


def test_what_is_missing_or_of_another_shape_differs():
    x = torch.ones(3)
    assert differences({"a": {"x": x}, "b": {"x": x + 1e-3}})["b"]["x"] == pytest.approx(1e-3, rel=1e-3)
    assert differences({"a": {"x": x}, "b": {"x": torch.ones(1)}}) == {"b": {"x": math.inf}}
    assert differences({"a": {"x": x}, "b": {"y": x}}) == {"b": {"x": math.inf, "y": math.inf}}
    with pytest.raises(ParityError, match=r"x on rank 0 differs between ours and b by nan"):
        check_agreement(differences({"a": {"x": x}, "b": {"x": x * math.nan}}), 0)
