"""No test fails for being slow: none has a time limit of its own for what must succeed, and none measures a time."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "process_time_ns"}
ALLOWED = {
    # Chooses the moments of its kills, and asserts nothing of time.
    "storage/checkpoint/test_kills.py"
}


def looks_at_time(node):
    """A call that reads a clock or ends after a number of seconds; ``ranks(timeout=)`` is for what must time out."""
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    limited = any(keyword.arg == "timeout" and isinstance(keyword.value, ast.Constant) for keyword in node.keywords)
    return name in CLOCKS or (name == "timeout" and bool(node.args)) or (limited and name != "ranks")


def places(source):
    return [node.lineno for node in ast.walk(ast.parse(source)) if looks_at_time(node)]


def test_no_test_looks_at_a_clock():
    files = [
        path for path in TESTS.rglob("*.py") if path.relative_to(TESTS).parts[0] not in ("harness", "harness_test")
    ]
    assert len(files) > 100
    found = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in files
        if str(path.relative_to(TESTS)) not in ALLOWED
        for line in places(path.read_text())
    ]
    assert not found, f"{found}: wait for an event instead, by harness.program or harness.watchdog; see CONTRIBUTING.md"


def test_what_is_found():
    wrong = ["run([], timeout=60)", "assert time.monotonic() < end", "@pytest.mark.timeout(9)\ndef f(): pass"]
    right = ["run([], timeout=WATCHDOG_SECONDS)", "@pytest.mark.ranks(2, timeout=2)\ndef f(): pass", "time.sleep(1)"]
    assert [len(places(source)) for source in (*wrong, *right)] == [1, 1, 1, 0, 0, 0]
