"""Build the wheel and the sdist of the last commit, and try both in an environment that has nothing else.

``python tests/harness/release.py dist --python python3.12`` (``make release``) checks what is in them, installs PyTorch
and then each of them with that Python, without a C compiler on the path, and runs a short demo on two ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).parents[2]
# None of these may come with Shardwise: the user has chosen a PyTorch before.
ACCELERATED = re.compile(r"torch|triton|nvidia|cuda")
DOOR = "import shardwise.megatron; shardwise.megatron.install(); from megatron.core import tensor_parallel as door; "
DOOR += "print('megatron.core is', door.__name__)"
STEPS = 5


def run(*command: str | os.PathLike[str], cwd: Path | None = None, **variables: str) -> str:
    """Return what a program prints; RuntimeError with it, if the program fails."""
    options = {"cwd": cwd, "env": os.environ | variables, "check": False}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """Build the last commit, from its files alone, into ``folder``; return the paths of the wheel and the sdist."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "source.tar")
        run("git", "archive", "--output", source, "HEAD", cwd=ROOT)
        with tarfile.open(source) as archive:
            archive.extractall(scratch, filter="data")
        source.unlink()
        # The wheel is made from the sdist: what the sdist lacks is in neither.
        backend = "from setuptools import build_meta; print('built', build_meta.build_{}(r'{}'))"
        sdist = _built(run(sys.executable, "-c", backend.format("sdist", folder.resolve()), cwd=Path(scratch)))
        with tarfile.open(folder / sdist) as archive:
            archive.extractall(scratch, filter="data")
        unpacked = Path(scratch, sdist.removesuffix(".tar.gz"))
        wheel = _built(run(sys.executable, "-c", backend.format("wheel", folder.resolve()), cwd=unpacked))
    return folder / wheel, folder / sdist


def _built(printed: str) -> str:
    return re.findall(r"^built (\S+)$", printed, re.MULTILINE)[-1]


def check_contents(wheel: Path, sdist: Path) -> None:
    """Raise AssertionError unless the wheel has the tracked files of the package and no others, and the sdist them too.

    Neither may name a folder of the machine that built it.
    """
    tracked = set(run("git", "ls-tree", "-r", "--name-only", "HEAD", cwd=ROOT).splitlines())
    package = {name.removeprefix("src/") for name in tracked if name.startswith("src/")}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert names == package, f"only in the wheel, or only tracked: {sorted(names ^ package)}"
        written = {name: archive.read(name) for name in archive.namelist()}
    with tarfile.open(sdist) as archive:
        files = {member.name.split("/", 1)[1]: member for member in archive.getmembers() if member.isfile()}
        wanted = {name for name in tracked if name.startswith(("src/", "docs/", "examples/"))}
        wanted |= {name for name in tracked if "/" not in name and name.endswith((".md", ".cff", ".toml", ".txt"))}
        assert wanted <= files.keys(), f"not in the sdist: {sorted(wanted - files.keys())}"
        assert not any(name.startswith("tests/") for name in files)
        written |= {f"sdist {name}": archive.extractfile(member).read() for name, member in files.items()}
    here = os.fsencode(ROOT)
    assert not (naming := [name for name, data in written.items() if here in data]), f"{here} is named by {naming}"
    metadata = message_from_bytes(next(data for name, data in written.items() if name.endswith(".dist-info/METADATA")))
    assert metadata["Version"] == wheel.name.split("-")[1] == sdist.name.removesuffix(".tar.gz").split("-")[1]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"


def would_install(python: str | os.PathLike[str], *what: str | os.PathLike[str]) -> dict[str, str]:
    """Return the names and versions that pip would install, without installing them."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        run(python, "-m", "pip", "install", "--quiet", "--dry-run", "--report", report, *what, cwd=ROOT)
        installed = [entry["metadata"] for entry in json.loads(report.read_text(encoding="utf-8"))["install"]]
    return {entry["name"]: entry["version"] for entry in installed}


def refuse_accelerated(installed: dict[str, str]) -> None:
    """Raise AssertionError if PyTorch or a package of CUDA comes with Shardwise."""
    found = sorted(name for name in installed if ACCELERATED.search(name.lower()))
    assert not found, f"an installation brings {found} next to the PyTorch that is there"


def try_installed(environment: Path, folder: Path) -> str:
    """Run the commands of an installed Shardwise without a C compiler; return the report of a short demo."""
    folder.mkdir(exist_ok=True)
    programs = environment / "bin"
    options = {"cwd": folder, "PATH": str(programs), "CC": "", "SHARDWISE_CACHE": str(folder / "cache")}
    package = Path(run(programs / "python", "-c", "import shardwise; print(shardwise.__path__[0])", **options).strip())
    assert package.is_relative_to(environment), package
    before = _files(package)
    print(run(programs / "shardwise", "--version", **options).strip())
    print(run(programs / "python", "-c", DOOR, **options).strip())
    assert "no C compiler" in " ".join(run(programs / "shardwise", "env", **options).split())
    demo = run(programs / "shardwise", "demo", "--steps", str(STEPS), "--out", folder / "demo", **options)
    assert "tp=2 equals tp=1" in demo, demo
    assert "no C compiler" in " ".join(demo.split()), demo
    demo = demo[demo.rindex("\ntext ") : demo.rindex("\nGo on:")]
    # A folder of packages may be read-only.
    assert _files(package) == before, sorted(_files(package) ^ before)
    return demo


def _files(package: Path) -> set[tuple[str, int]]:
    found = (path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {(str(path), path.stat().st_mtime_ns) for path in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the wheel and the sdist go")
    parser.add_argument("--python", default=sys.executable, help="the Python of the environment, by default this one")
    arguments = parser.parse_args()
    wheel, sdist = build(arguments.folder)
    check_contents(wheel, sdist)
    print(run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist).strip())
    for built in (wheel, sdist):
        print(f"{built}: {built.stat().st_size / 1e6:.2f} MB")
    with tempfile.TemporaryDirectory() as scratch:
        environment = Path(scratch, "environment")
        run(arguments.python, "-m", "venv", environment)
        python = environment / "bin" / "python"
        pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
        pip += ["-c", ROOT / "constraints.txt"]
        print(run(python, "--version").strip())
        run(*pip, "torch")
        print(f"PyTorch with its packages: {_megabytes(environment)} MB on disk")
        brought = would_install(python, wheel, "-c", ROOT / "constraints.txt")
        refuse_accelerated(brought)
        print("Shardwise brings", " ".join(sorted(f"{name}=={version}" for name, version in brought.items())))
        run(*pip, wheel)
        print(f"with Shardwise: {_megabytes(environment)} MB on disk")
        print(try_installed(environment, Path(scratch, "wheel")))
        run(*pip, "--force-reinstall", "--no-deps", sdist)
        print(try_installed(environment, Path(scratch, "sdist")))


def _megabytes(folder: Path) -> int:
    return round(sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()) / 1e6)


if __name__ == "__main__":
    main()
