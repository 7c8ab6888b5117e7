"""The command ``shardwise conformance``: its output, its formats and its exit codes."""

import json

import pytest

from shardwise.cli.main import main

CASES = "transposed"
SUM = """
import torch.distributed as dist
versions = {"library": "7"}
def reduce(tensor, groups):
    total = tensor.contiguous()
    dist.all_reduce(total, group=groups.tp)
    return total * FACTOR
"""


@pytest.fixture
def command(capsys):
    def run(*arguments, code):
        """Return what the command prints: standard output and standard error."""
        assert main(["conformance", *arguments]) == code
        return capsys.readouterr()

    return run


@pytest.fixture
def targets(tmp_path):
    """A right target and a wrong one."""
    files = [tmp_path / "right.py", tmp_path / "wrong.py"]
    for file, factor in zip(files, "12", strict=True):
        file.write_text(SUM.replace("FACTOR", factor))
    return [str(file) for file in files]


def test_text_has_a_line_for_each_case_and_exit_code_0(command, targets):
    lines = command("--target", targets[0], "--case", CASES, code=0).out.splitlines()
    assert lines == [
        "not offered  linear/transposed_gradient_is_summed",
        "not offered  linear/copied_input_sums_a_transposed_gradient",
        "passed       linear/reduced_output_sums_a_transposed_tensor",
        f"{targets[0]}: 1 passed, 0 failed, 2 not offered",
    ]


@pytest.mark.slow
def test_json_of_several_targets_and_exit_code_1(command, targets):
    facts = json.loads(command("--target", *targets, "--case", "linear/reduced*", "--json", code=1).out)
    assert [each["target"] for each in facts] == targets
    assert facts[0]["versions"]["library"] == "7"
    right, wrong = (each["results"][0] for each in facts)
    assert (right["outcome"], right["ranks"], right["report"]) == ("passed", 2, "NovaSky-AI/SkyRL#1886")
    assert wrong["outcome"] == "failed"
    assert "the sum at [0, 0] is" in wrong["message"]


def test_an_unknown_target_is_one_line_and_exit_code_2(command):
    done = command("--target", "nothing", code=2)
    assert done.err.startswith("shardwise conformance: error: unknown target 'nothing'; give a file of Python")
    assert done.err.count("\n") == 1


def test_the_list_shows_reports_and_starts_nothing(command):
    lines = command("--list", "--case", "linear/reduced", code=0).out.splitlines()
    assert lines[0] == "linear/reduced_output_sums_a_transposed_tensor  (2 ranks; NovaSky-AI/SkyRL#1886)"
    assert len(lines) == 2
