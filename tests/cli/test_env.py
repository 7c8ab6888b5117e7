"""``shardwise env`` tells what is there, and survives what is broken."""

import json
import os
import sys

import pytest
import torch

import shardwise
from shardwise.cli.env_report import as_table, fast_paths, gather, versions
from shardwise.cli.main import main
from shardwise.kernels import compiled


@pytest.fixture(scope="module")
def report():
    # The command sets it too.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return gather()


def test_json_is_what_the_table_shows(capsys, report):
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report
    table = as_table(report)
    for name, version in report["versions"].items():
        assert f"\n{name} " in f"\n{table}"
        assert version in table
    for name, value in report["environment"].items():
        assert (f"\n{name} " in table) == (value is not None)
    assert main(["env"]) == 0
    assert capsys.readouterr().out == table + "\n"


def test_versions_and_backends(report):
    assert report["versions"]["shardwise"] == shardwise.__version__
    assert report["versions"]["torch"] == torch.__version__
    assert report["distributed backends"]["gloo"] == "used by CPU ranks"
    if not torch.cuda.is_available():
        assert report["machine"]["accelerators"] == []


def test_a_fast_path_is_on_where_it_runs():
    paths = {path.name: path for path in fast_paths([torch.device("cpu")])}
    assert paths["fused AdamW on cpu"].on
    assert paths["fused attention on cpu"].why == "flash (float32, bfloat16); none with dropout"
    assert paths["shared memory between CPU ranks"].on
    refusal = compiled.why_not("loss_cpu.c")
    assert paths["compiled loss on cpu"].on == (refusal is None)
    assert refusal is None or paths["compiled loss on cpu"].why == refusal


def test_shared_memory_that_is_switched_off_says_so(monkeypatch):
    monkeypatch.setenv("SHARDWISE_SHARED_MEMORY", "0")
    paths = {path.name: path for path in fast_paths([])}
    path = paths["shared memory between CPU ranks"]
    assert (path.on, path.why) == (False, "SHARDWISE_SHARED_MEMORY=0")


def test_a_fast_path_that_does_not_run_says_why(monkeypatch):
    def refuse(*arguments, **options):
        raise RuntimeError("no kernel\nand a stack of C++")

    monkeypatch.setattr(torch.optim, "AdamW", refuse)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    paths = fast_paths([torch.device("cpu")])
    assert [(path.on, path.why) for path in paths[:2]] == [(False, "no kernel"), (False, "flash: no kernel")]


def test_an_optional_package_that_breaks_is_reported(tmp_path, monkeypatch):
    (tmp_path / "matplotlib.py").write_text("raise SystemError('built for another numpy')")
    (tmp_path / "tensorboard.py").write_text("import a_package_that_is_not_there")
    for name in ("matplotlib", "tensorboard", "triton"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = versions()
    assert found["matplotlib"] == "does not import: SystemError: built for another numpy"
    assert found["tensorboard"] == "does not import: No module named 'a_package_that_is_not_there'"
