"""The benchmark of the loss, at sizes that take moments, and what it refuses to time."""

from __future__ import annotations

import json
from pathlib import Path

import loss
import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_close_to
from loss import CONTESTS, GOALS, RATIOS, check_errors, is_limit, main, memory_goals
from losses import from_logits, with_head
from losses.exact import ExactGradients
from losses.problem import LossSizes, Problem
from shared_workers import SharedWorkers, run_script
from torch.distributed.device_mesh import DeviceMesh
from workers import WorkerSpec

from shardwise.core.errors import ParityError

SIZES = LossSizes(num_tokens=70, vocab_size=22, hidden_size=6)


@pytest.mark.slow
def test_all_candidates_are_timed_and_the_json_is_whole(tmp_path, monkeypatch, capsys):
    file = tmp_path / "result.json"
    sizes = ["--num-tokens", "70", "--vocab-size", "302", "--hidden-size", "16"]
    specs: list[WorkerSpec] = []
    with monkeypatch.context() as patch:
        patch.setattr(loss, "Workers", specs.extend)
        loss.start_workers(tmp_path)
    shared = SharedWorkers(specs, tmp_path / "log")
    with shared.workers:
        arguments = [*sizes, "--dtype", "both", "--rounds", "2", "--json", str(file)]
        code = run_script(Path(loss.__file__), arguments, shared, monkeypatch)
    printed = capsys.readouterr()
    assert code == 0, printed.err + shared.log.read_text()

    report = json.loads(file.read_text())
    assert (report["benchmark"], report["num_rounds"]) == ("loss", 2)
    results = report["contests"]
    assert [(result["contest"], result["dtype"]) for result in results] == [
        (contest, dtype) for contest in CONTESTS for dtype in ("bf16", "fp32")
    ]
    for result in results:
        contest, dtype = result["contest"], result["dtype"]
        compared = {name for pair in RATIOS[contest] for name in pair}
        seconds = result["seconds_per_step"]
        assert set(seconds) == set(result["extra_mib"]) == compared
        assert all(len(values) == 2 and min(values) > 0 for values in seconds.values())
        assert {name for name in compared if not is_limit(name)} <= set(result["largest_relative_error"])
        for ratio in result["ratios"]:
            pair = ratio["numerator"], ratio["denominator"]
            assert ratio["goal"] == GOALS.get((contest, dtype, *pair))
            of_rounds = zip(*(seconds[name] for name in pair), strict=True)
            assert ratio["per_round"] == pytest.approx([a / b for a, b in of_rounds])
        assert f"{CONTESTS[contest]}: {dtype}, " in printed.out


def dense_gradients(sizes, num_ranks):
    """Of logits, hidden states and weight, over the whole vocabulary in fp64."""
    problems = [Problem.draw(sizes, torch.float64, rank, num_ranks, seed=3) for rank in range(num_ranks)]
    hidden = problems[0].hidden.clone().requires_grad_()
    weight = torch.cat([problem.weight for problem in problems]).requires_grad_()
    logits = F.linear(hidden, weight)
    logits.retain_grad()
    F.cross_entropy(logits, problems[0].target, reduction="sum").backward()
    return logits.grad, hidden.grad, weight.grad


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_candidates_compute_the_dense_gradients(group):
    of_logits, of_hidden, of_weight = dense_gradients(SIZES, 2)
    own_columns = of_logits.chunk(2, dim=1)[group.rank()].float()
    own_rows = of_weight.chunk(2)[group.rank()].float()
    problem = Problem.draw(SIZES, torch.float32, group.rank(), 2, seed=3)
    mesh = DeviceMesh.from_group(group, "cpu")
    logits = from_logits.make_logits(problem)
    exact = ExactGradients(problem, lambda rows: logits[rows].double(), group)
    made = from_logits.make_candidates(problem, group, mesh)
    assert tuple(made) == from_logits.CANDIDATES
    for name, candidate in made.items():
        # Twice: what a step overwrites is there again.
        for _ in range(2):
            candidate.prepare()
            gradients = candidate.step()
            if is_limit(name):
                assert gradients == ()
                continue
            assert_close_to(gradients[0], own_columns, rtol_of_norm=2e-6, name=name)
            assert exact.logits_error(gradients) <= 2e-6
            assert exact.logits_error([gradients[0] * 1.01]) == pytest.approx(0.01, rel=1e-3)
    exact = ExactGradients(problem, lambda rows: logits[rows], group)
    made = with_head.make_candidates(problem, group, mesh)
    assert tuple(sorted(made)) == tuple(sorted(with_head.CANDIDATES))
    for name, candidate in made.items():
        gradients = candidate.step()
        if is_limit(name):
            assert gradients == ()
            continue
        assert_close_to(gradients[0], of_hidden.float(), rtol_of_norm=5e-6, name=f"{name}: hidden")
        assert_close_to(gradients[1], own_rows, rtol_of_norm=5e-6, name=f"{name}: weight")
        assert exact.head_error(gradients) <= 1e-5
        assert exact.head_error([gradients[0], gradients[1] * 1.01]) == pytest.approx(0.01, rel=1e-2)


@pytest.mark.slow
@pytest.mark.ranks(1)
def test_one_rank_candidates_compute_the_dense_gradients(group):
    _, of_hidden, of_weight = dense_gradients(SIZES, 1)
    problem = Problem.draw(SIZES, torch.float32, 0, 1, seed=3)
    made = with_head.make_one_rank_candidates(problem, group)
    assert set(made) <= set(with_head.ONE_RANK_CANDIDATES)
    for name, candidate in made.items():
        gradients = candidate.step()
        assert_close_to(gradients[0], of_hidden.float(), rtol_of_norm=5e-6, name=f"{name}: hidden")
        assert_close_to(gradients[1], of_weight.float(), rtol_of_norm=5e-6, name=f"{name}: weight")


def test_our_gradients_must_be_right_and_others_are_told():
    check_errors({"ours": 1e-7, "dtensor": 1.0}, "logits", "fp32")
    for error in (1e-5, float("nan")):
        with pytest.raises(ParityError, match=rf"fp32 gradients of ours \(the loss of given logits.* by {error:.1e}"):
            check_errors({"ours": error, "dtensor": 1.0}, "logits", "fp32")


def test_memory_goals():
    sizes = LossSizes(num_tokens=2048, vocab_size=128_256, hidden_size=1024)
    # Gradients of 2,048 + 64,128 rows of 1,024 in bf16.
    assert memory_goals("head", "bf16", sizes)["ours_chunked"] == pytest.approx(1.05 * 129.25 + 16)
    assert memory_goals("logits", "bf16", sizes) == {"ours": 1.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "argument --rounds: 0 is not at least 1"),
        (["--contest", "theirs"], "argument --contest: invalid choice: 'theirs'"),
        (["--vocab-size", "33"], "vocab_size 33 is not a multiple of the 2 ranks"),
        (["--json", "nowhere/result.json"], "--json nowhere/result.json: there is no folder nowhere"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
