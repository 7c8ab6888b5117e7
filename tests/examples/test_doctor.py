"""The example of ``docs/doctor.md``, and the page for newcomers."""

from __future__ import annotations

from harness.page import DOCS
from harness.program import Program
from run.doctor.test_report import check_page

EXAMPLE = DOCS.parent / "examples" / "doctor.py"


def run(*command, exit_code=0, folder):
    with Program(*command, folder=folder, OMP_NUM_THREADS="1") as program:
        program.finish(exit_code=exit_code)
    return program.stdout


def test_the_example_is_sound_and_its_fault_is_named(tmp_path):
    run("-P", str(EXAMPLE), "one", folder=tmp_path)
    run("-P", str(EXAMPLE), "rounding", "--perturb", folder=tmp_path)
    for name, more in (("parallel", ()), ("wrong", ("--wrong",))):
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        run(*launcher, str(EXAMPLE), name, *more, folder=tmp_path)
    doctor = ("-m", "shardwise", "doctor", "one")
    sound = run(*doctor, "parallel", "--rounding", "rounding", "--html", "page.html", folder=tmp_path)
    assert "sound: all differences are rounding" in sound
    check_page(tmp_path / "page.html")
    wrong = run(*doctor, "wrong", "--rounding", "rounding", exit_code=1, folder=tmp_path)
    (line,) = (line for line in (DOCS / "doctor.md").read_text().splitlines() if line.startswith("first fault"))
    assert line in wrong
    nothing = ("-m", "shardwise", "doctor", "one", "nothing")
    run(*nothing, exit_code=2, folder=tmp_path)


def test_the_page_for_newcomers(tmp_path):
    assert "open it in a browser" in run("-m", "shardwise", "doctor", "--explain", folder=tmp_path)
    page = check_page(tmp_path / "runs/explained/explained.html")
    text = " ".join(page.texts)
    assert "linear_fc2" in text
    assert "reduce-scatter" in text
    assert "tp: shards of dimension" in text
