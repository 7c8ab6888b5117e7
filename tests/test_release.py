"""The wheel and the sdist; `make release` also tries them in a new environment."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from harness import release

import shardwise

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def test_the_version_stands_in_one_place_and_the_citation_agrees():
    assert PROJECT["dynamic"] == ["version"]
    assert "version" not in CITATION
    assert re.match(rf"## {re.escape(shardwise.__version__)}\b", (ROOT / "CHANGELOG.md").read_text().split("\n\n")[1])
    assert (CITATION["license"], CITATION["title"].lower()) == (PROJECT["license"], PROJECT["name"])
    assert CITATION["authors"] == PROJECT["authors"]


def test_what_brings_cuda_is_refused():
    release.refuse_accelerated({"numpy": "2.4.6", "shardwise": "0.1.0"})
    with pytest.raises(AssertionError, match=r"brings \['nvidia-nccl-cu13', 'torch'\]"):
        release.refuse_accelerated({"torch": "2.13.0", "nvidia-nccl-cu13": "2.29", "numpy": "2.4.6"})


@pytest.mark.slow
def test_the_wheel_has_the_packages_files_and_installs_alone_next_to_this_pytorch(tmp_path):
    try:
        wheel, sdist = release.build(tmp_path)
    except (RuntimeError, FileNotFoundError) as error:
        pytest.skip(f"no git repository to build from: {error}")
    release.check_contents(wheel, sdist)
    # Without an index, as what it needs is here: the PyTorch that is here satisfies it, with CUDA or without.
    nothing_else = ["--no-index", "--force-reinstall", "--no-deps"]
    assert release.would_install(sys.executable, wheel, *nothing_else) == {"shardwise": shardwise.__version__}
    target = ["--no-index", "--upgrade"]
    release.refuse_accelerated(release.would_install(sys.executable, wheel, *target))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    # A copy that is not this checkout finds its C sources and tables.
    code = (
        "import shardwise, torch, shardwise.kernels.compiled as compiled; print(shardwise.__path__[0]); "
        "print(compiled.why_no_compiler() or compiled.why_not('loss_cpu.c')); "
        "import shardwise.megatron; shardwise.megatron.install(); from megatron.core import parallel_state"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "installed"), "PATH": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n", 1)[0] == str(tmp_path / "installed" / "shardwise")
    assert "no C compiler" in done.stdout
