"""What the harness says when a test on ranks goes wrong, and that the next test does not suffer for it."""

import math
import os
import re
import sys
from pathlib import Path

import pytest
from harness import plugin
from harness.watchdog import WATCHDOG_SECONDS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Of one run of ``wrong_bodies.py``: the report of the call of each test, by its name."""
    path = tmp_path_factory.mktemp("bodies") / "test_bodies.py"
    path.write_text(Path(__file__).with_name("wrong_bodies.py").read_text())
    collected = {}

    class Collect:
        def pytest_runtest_logreport(self, report):
            if report.when == "call":
                collected[report.nodeid.split("::")[1]] = report

    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(path.parent), str(path)]
    with pytest.MonkeyPatch.context() as patch:
        # Whoever waits for ranks that will not come, once one has failed, now waits for the watchdog.
        patch.setattr(plugin, "TEST_TIMEOUT", math.inf)
        code = pytest.main(options, plugins=[plugin, Collect()])
    del sys.modules["test_bodies"]
    assert code == pytest.ExitCode.TESTS_FAILED
    return collected


def text_of(report):
    assert report.failed
    return str(report.longrepr)


def test_the_rank_that_failed_is_named_and_its_traceback_shown(reports):
    text = text_of(reports["test_assertion"])
    assert text.startswith("rank 1 of 2 failed in the test: assert 2 == 3\n")
    assert re.search(r"^  rank 0: still running, at .*test_bodies.py:\d+ in test_assertion$", text, re.MULTILINE)
    assert re.search(r"^  rank 1: failed: assert 2 == 3$", text, re.MULTILINE)
    assert re.search(r"test_bodies.py:\d+: in test_assertion\n    assert group.size\(\) == 3$", text, re.MULTILINE)
    assert "harness/worker.py" not in text
    assert reports["test_assertion"].duration < WATCHDOG_SECONDS


def test_what_the_ranks_printed_is_shown_with_their_names(reports):
    assert reports["test_assertion"].capstdout == "[rank 0] printed by 0\n[rank 1] printed by 1\n"


def test_the_first_failure_comes_first(reports):
    text = text_of(reports["test_both_fail"])
    assert re.match(r"rank 1 of 2 failed in the test: (\w+\.)?TellsWhenReportedError: rank 1\n", text)
    assert re.search(r"^  rank 0: failed \d+ ms later: ValueError: rank 0$", text, re.MULTILINE)


def test_a_dead_rank_is_told_from_its_failing_peers(reports):
    text = text_of(reports["test_killed"])
    assert text.startswith("rank 1 of 2 was killed by SIGKILL during the test\n")
    assert re.search(r"^  rank 0: failed: RuntimeError", text, re.MULTILINE)
    assert text_of(reports["test_exit"]).startswith("rank 0 of 2 ended its process with exit code 3 during the test\n")


def test_a_crash_shows_the_stack(reports):
    text = text_of(reports["test_segmentation_fault"])
    assert text.startswith("rank 1 of 2 was killed by SIGSEGV during the test\n")
    assert re.search(r"stack of rank 1 when it died:\n.*Segmentation fault\n(.*\n)*.* in test_segm", text)


def test_system_exit_is_a_failure_of_the_test(reports):
    assert re.match(r"rank [01] of 2 failed in the test: SystemExit: out\n", text_of(reports["test_system_exit"]))


def test_a_waiting_rank_is_named_with_its_stack(reports):
    text = text_of(reports["test_waits"])
    assert text.startswith("rank 0 of 2 still in the test at its time limit of 2 s\n")
    assert "  rank 1: passed\n" in text
    assert re.search(
        r"\nstack of rank 0:\nStack \(most recent call first\):\n(.*\n)*.* in barrier\n(.*\n)*.* in test_waits$", text
    )
    assert 2 <= reports["test_waits"].duration < WATCHDOG_SECONDS


@pytest.mark.parametrize("after", ["assertion", "killed", "waits"])
def test_the_next_test_passes(reports, after):
    assert reports[f"test_after_{after}"].passed


def test_skip_and_xfail_must_be_of_every_rank(reports):
    assert reports["test_skip"].skipped
    assert "together" in str(reports["test_skip"].longrepr)
    assert reports["test_xfail"].skipped
    assert reports["test_xfail"].wasxfail == "known"
    assert reports["test_expected_to_fail"].skipped
    text = text_of(reports["test_skip_on_one"])
    assert text == "the 2 ranks disagree on the test\n  rank 0: skipped: alone\n  rank 1: passed"


def test_a_failing_example_is_told_once(reports):
    text = text_of(reports["test_example"])
    assert re.match(r"rank 1 of 2 failed in the test: assert \((\d+) < 10 or 1 == 0\)\n", text)
    example = re.search(r"Falsifying example: test_example\(n=(\d+)\)", text)
    assert example is not None
    # Run again, it would meet the other rank in some other example.
    assert reports["test_example"].capstdout.splitlines().count(f"[rank 1] {example[1]}") == 1
    assert reports["test_example"].duration < WATCHDOG_SECONDS


def test_an_argument_that_cannot_be_sent_is_named(reports):
    assert text_of(reports["test_unpicklable[lambda]"]).startswith("argument 'value' of a test on ranks cannot be sent")


def test_the_model_parallel_state_is_destroyed(reports):
    assert reports["test_set_parallel_state"].passed
    assert reports["test_parallel_state_destroyed"].passed
    text = text_of(reports["test_parallel_state_fails"])
    assert re.match(r"rank \d of 2 failed in the cleaning up after the test: ZeroDivisionError", text)
