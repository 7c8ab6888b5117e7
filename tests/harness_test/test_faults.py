"""Every fault of the table can be planted today; ``harness/faults.py`` shows by hand that its test finds it."""

import ast
from dataclasses import replace

import pytest
from harness import faults
from harness.faults import FAULTS, ROOT, Fault, functions, planted


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_its_test_exists(fault):
    path, text = planted(fault)
    assert text != path.read_text()
    file, _, test = fault.test.partition("::")
    assert test in dict(functions(ast.parse((ROOT / file).read_text())))


def test_the_table_has_each_fault_once():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) == 43
    assert len({(fault.function, fault.old) for fault in FAULTS}) == 43


SOURCE = """
class Holder:
    def run(self):
        return 1 + 1

def run():
    return 2
"""


def test_what_cannot_be_planted_is_said(tmp_path):
    for room in ("one", "two"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "module.py").write_text(SOURCE)
    fault = Fault("a fault", "one.module:Holder.run", "1 + 1", "1 - 1", "tests/test_it.py::test_it")
    path, text = planted(fault, tmp_path)
    assert path == tmp_path / "one" / "module.py"
    assert text == SOURCE.replace("1 + 1", "1 - 1")
    for change, message in (
        ({"function": "module:Holder.run"}, r"a fault: 2 functions are .*one/module.py.*two/module.py"),
        ({"function": "one.module:Holder.walk"}, r"0 functions are .* \(looked into: one/module.py\)"),
        ({"function": "gone:run"}, r"0 functions are .* \(looked into: no file\)"),
        ({"old": "1"}, "'1' occurs 2 times in one.module:Holder.run, in one/module.py"),
        # Only in the other function of the file.
        ({"old": "return 2"}, "'return 2' occurs 0 times in one.module:Holder.run"),
        ({"new": "1 +"}, "one/module.py is no Python"),
    ):
        with pytest.raises(ValueError, match=message):
            planted(replace(fault, **change), tmp_path)


def test_names_choose_faults(capsys):
    assert faults.main(["--list", "norm counted"]) == 0
    assert capsys.readouterr().out.split() == [
        *["norm", "counted", "twice", "grad_norm:_counted_here"],
        "tests/training/gradients/test_finalize.py::test_norm_equals_the_dense_one",
    ]
    with pytest.raises(SystemExit):
        faults.main(["no such fault"])
