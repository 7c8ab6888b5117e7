"""The library and its door pass every case that they offer; a wrong target fails the right ones, and no rank hangs."""

from pathlib import Path

import pytest

from shardwise.conformance import all_cases, as_markdown, run
from shardwise.conformance.case import cases_like
from shardwise.core.errors import ConfigError

WRONG = Path(__file__).parent / "wrong_target.py"
# Every function of the door but checkpoints at least once.
COVER = [
    "adapters/merged*",
    "adapters/row_factors_with*",
    "attention/query_and_key_norms_with*",
    "data/p*",
    "data/unequal*",
    "linear/column*",
    "linear/row*",
    "linear/skipped*",
    "linear/*transposed*",
    "loss/*smoothing*",
    "loss/uneven*",
    "pipeline/interleaved*",
    "pipeline/tied_gradients_are*",
    "randomness/recomputation*",
    "sequence/norm*",
    "sequence/*gather*",
    "sequence/*uneven*",
    "vocabulary/e*",
]


def failures_of(report):
    return "\n".join(f"{each.case.name}: {each.message}" for each in report.of("failed"))


OTHERS = [each.name for each in all_cases() if each not in cases_like(COVER)]


@pytest.mark.parametrize("cases", [COVER, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["cover", "others"])
def test_the_library_passes_every_case(cases):
    report = run("shardwise", cases)
    assert not failures_of(report)
    assert not report.of("not offered")
    assert len(cases_like(COVER)) + len(OTHERS) == len(all_cases()) >= 60


@pytest.mark.parametrize("cases", [COVER, pytest.param(None, marks=pytest.mark.matrix)], ids=["cover", "all"])
def test_the_door_passes_every_case_that_it_offers(cases):
    report = run("shardwise.megatron", cases)
    assert not failures_of(report)
    # The optimizer that splits its state, experts, and parts of models, are the library's own.
    own = {"optimizer.split_state", "expert_layer", "other_models", "context_model", "latent_attention", "sinks"}
    assert all(own.intersection(each.case.needs) for each in report.of("not offered"))


@pytest.mark.slow
def test_the_ring_of_pytorch_passes_the_cases_of_context_parallelism_that_it_offers():
    report = run("dtensor", "context/*")
    assert not failures_of(report)
    assert len(report.of("passed")) == 7


def test_mistakes_fail_the_cases_that_know_them():
    cases = [
        "vocabulary/repeated*",
        "sequence/scatter*",
        "loss/equals*",
        "linear/[bio]*",
        "linear/*equals*",
        "linear/red*",
    ]
    report = run(WRONG, cases)
    results = {each.case.name: each for each in report.results}

    def message(name):
        assert results[name].outcome == "failed", results[name]
        return results[name].message

    assert "the gradient of the input at [0, 0, 0] is" in message("linear/input_gradient_is_summed")
    assert "the gradient of the input" in message("linear/column_equals_dense")
    assert "the output for zeros at [0, 0, 0] is 200 and must be 100" in message("linear/bias_is_added_once")
    assert results["linear/output_is_this_ranks_part"].outcome == "passed"
    assert message("vocabulary/repeated_ids_sum_their_gradients").endswith("rank 1 ended with exit code 3")
    assert message("linear/reduced_output_sums_a_transposed_tensor") == "rank 1: RuntimeError: no sum today"
    assert results["sequence/scatter_gathers_gradients"].outcome == "not offered"
    assert results["sequence/scatter_gathers_gradients"].message.endswith("not on this machine")
    assert results["loss/equals_dense"].outcome == "not offered"
    assert results["loss/equals_dense"].message == "cross_entropy"
    assert not report.is_sound
    assert "**failed**" in as_markdown([report])
    assert f"{len(report.of('failed'))} failed" in report.summary


def test_a_hang_ends_with_its_time_limit():
    report = run(WRONG, "sequence/gather*", seconds=1)
    assert [each.outcome for each in report.results] == ["failed"]
    assert report.results[0].message.endswith("did not end within the time limit")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("colossal", r"unknown target 'colossal'; give a file of Python, or one of shardwise, shardwise\.megatron, "),
        ("nowhere.py", r"the target nowhere\.py is not a file"),
    ],
)
def test_an_unknown_target_is_one_error(target, message):
    with pytest.raises(ConfigError, match=message):
        run(target)


def test_a_target_that_cannot_be_imported_is_one_error(tmp_path):
    target = tmp_path / "broken.py"
    target.write_text("import nothing_of_this_name\n")
    with pytest.raises(ConfigError, match=r"cannot be imported: ModuleNotFoundError: No module named 'nothing_of_t"):
        run(target, "linear/column_equals_dense")


def test_an_unknown_case_is_one_error():
    with pytest.raises(ConfigError, match=r"no case matches 'colours/'; the themes are adapters, attention, "):
        run("shardwise", "colours/")


def test_each_case_names_a_report_and_says_what_must_hold():
    for each in all_cases():
        assert each.summary.endswith("."), each.name
        assert "#" in each.report or "class of bug" in each.report, each.name
        assert 2 <= each.ranks <= 4, each.name
