"""The benchmark of a training step, at sizes that take moments."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import train_step
from shared_workers import SharedWorkers, run_script
from steps.runner import RANK_VARIANTS, SINGLE_VARIANTS
from train_step import check_parity
from workers import WorkerSpec

from shardwise.core.errors import ParityError

SCRIPT = Path(train_step.__file__)
SIZES = {
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "ffn_hidden_size": 24,
    "vocab_size": 64,
    "sequence_length": 16,
    "batch_size": 2,
}
TINY = [str(word) for name, value in SIZES.items() for word in ("--" + name.replace("_", "-"), value)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedWorkers]:
    """The workers of all variants."""
    specs: list[WorkerSpec] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(train_step, "Workers", specs.extend)
        train_step.start_workers((*RANK_VARIANTS, *SINGLE_VARIANTS), tmp_path_factory.mktemp("ranks"))
    shared = SharedWorkers(specs, tmp_path_factory.mktemp("workers") / "log")
    with shared.workers:
        yield shared


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tied", "variants"),
    [
        (False, (*RANK_VARIANTS, *SINGLE_VARIANTS)),
        (True, ("ours", "ours_sp", "dtensor", "dtensor_sp", "raw", "single")),
    ],
    ids=["untied", "tied"],
)
def test_all_variants_train_alike_and_the_json_is_whole(tmp_path, monkeypatch, capsys, shared, tied, variants):
    file = tmp_path / "result.json"
    arguments = ["--model", "llama", *TINY, "--tie-embeddings" if tied else "--no-tie-embeddings"]
    arguments += ["--rounds", "2", "--steps", "1", "--json", str(file), "--variants", *variants]

    code = run_script(SCRIPT, arguments, shared, monkeypatch)

    printed = capsys.readouterr()
    assert code == 0, printed.err + shared.log.read_text()
    report = json.loads(file.read_text())
    assert report["benchmark"] == "train_step"
    (result,) = report["models"]
    assert result["model"] == "llama"
    assert result["sizes"] == SIZES | {"tie_embeddings": tied}
    h, f, v = 16, 24, 64
    assert result["num_parameters"] == 2 * (4 * h * h + 3 * h * f + 2 * h) + h + v * h * (1 if tied else 2)

    assert list(result["first_steps"]) == list(variants)
    expected = result["first_steps"]["single"]
    # Fresh weights know nothing of random tokens, and training lowers the loss.
    assert expected["losses"][0] == pytest.approx(math.log(v), rel=0.25)
    assert expected["losses"][2] < expected["losses"][1] < expected["losses"][0]
    for steps in result["first_steps"].values():
        assert steps["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert steps["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-5)
    assert 0 <= result["first_loss_relative_difference"] <= 1e-6

    seconds = result["seconds_per_step"]
    assert list(seconds) == list(variants)
    assert all(len(values) == 2 and min(values) > 0 for values in seconds.values())
    pairs = {(ratio["numerator"], ratio["denominator"]) for ratio in result["ratios"]}
    assert pairs == {pair for pair in train_step.RATIOS if set(pair) <= set(variants)}
    assert all(f"{numerator} / {denominator}" in printed.out for numerator, denominator in pairs)


STEPS = [(4.0, 2.0), (3.0, 1.0)]


def test_rounding_is_allowed():
    assert check_parity({"a": STEPS, "b": [(4.0 + 2e-6, 2.0 + 2e-6), (3.0, 1.0)]}) == pytest.approx(5e-7)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([(4.00001, 2.0), (3.0, 1.0)], "loss of step 1 is 4.00001 with b and 4.0 with a"),
        ([(4.0, 2.0), (3.00001, 1.0)], "loss of step 2 is 3.00001 with b and 3.0 with a"),
        ([(4.0, 2.0), (3.0, 1.01)], "gradient norm of step 2 is 1.01 with b and 1.0 with a"),
        ([(math.nan, 2.0), (3.0, 1.0)], "loss of step 1 is nan with b and 4.0 with a"),
    ],
)
def test_another_result_is_an_error(steps, message):
    with pytest.raises(ParityError, match=message):
        check_parity({"a": STEPS, "b": steps})
