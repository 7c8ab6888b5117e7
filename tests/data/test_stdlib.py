import platform
import re
import sysconfig
import zlib
from pathlib import Path

import pytest

from shardwise.core.errors import DataError
from shardwise.data import stdlib_corpus


@pytest.fixture(scope="module")
def corpus():
    return stdlib_corpus()


@pytest.mark.slow
def test_this_pythons_library_is_a_corpus(corpus):
    assert re.fullmatch(rf"\w+ {platform.python_version()} standard library, \d+ files, \d+\.\d MB", corpus.name)
    assert 4e6 < corpus.num_bytes < 20e6
    root = Path(sysconfig.get_paths()["stdlib"])
    assert (root / "json" / "decoder.py").read_bytes().decode() in corpus.documents
    assert (root / "__future__.py").read_bytes().decode() == corpus.documents[0]
    assert corpus == stdlib_corpus()


def test_it_says_nothing_of_the_machine(corpus):
    text = "\n".join(corpus.documents)
    # What _sysconfigdata begins with: how and where this Python was built.
    assert "'CONFIG_ARGS':" not in text


def test_two_hundred_kilobytes_can_be_held_out(corpus):
    train, held_out = corpus.split(held_out_bytes=200_000)
    assert 200_000 <= held_out.num_bytes < 201_000
    assert train.num_bytes == corpus.num_bytes - held_out.num_bytes
    # Neither repetitive nor noise.
    assert 1 < 8 * len(zlib.compress(held_out.to_bytes(), 9)) / held_out.num_bytes < 3


def make_library(folder: Path, num_files: int = 100) -> Path:
    folder.mkdir()
    for number in range(num_files):
        (folder / f"m{number:03}.py").write_text(f"x = {number}\n")
    return folder


def test_what_is_left_out(tmp_path):
    root = make_library(tmp_path / "lib")
    expected = stdlib_corpus(root)
    left_out = "test/a.py json/tests/a.py idlelib/idle_test/a.py site-packages/a/b.py dist-packages/a.py ensurepip/a.py"
    for name in (*left_out.split(), "config-3.11-x/a.py", "_sysconfigdata__linux_.py", "lib2to3/tests/a.py", "a.txt"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("left = 'out'\n")
    (root / "empty.py").touch()
    (root / "undecodable.py").write_bytes(b"# caf\xe9\n")
    (root / "undecodable_below.py").write_bytes(b"\n\n\n\n# caf\xe9\n")
    (root / "unknown.py").write_bytes(b"# coding: klingon\n")
    assert stdlib_corpus(root) == expected


def test_a_declared_encoding_is_heeded_and_lines_stay(tmp_path):
    root = make_library(tmp_path / "lib")
    (root / "a.py").write_bytes(b"# coding: latin-1\r\n# caf\xe9\r\n")
    (root / "b.py").write_bytes(b"\xef\xbb\xbf# BOM\n")
    (root / "l" / "z").mkdir(parents=True)
    (root / "l" / "z" / "c.py").write_text("# in a folder\n")
    documents = stdlib_corpus(root).documents
    assert documents[:4] == ("# coding: latin-1\r\n# café\r\n", "# BOM\n", "# in a folder\n", "x = 0\n")


@pytest.mark.parametrize("num_files", [0, 99])
def test_a_stripped_library(tmp_path, num_files):
    root = make_library(tmp_path / "lib", num_files)
    with pytest.raises(DataError, match=rf"sources of .* are not in .*lib': {num_files} files, fewer than 100; use"):
        stdlib_corpus(root)


def test_a_library_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match=r"sources of .* are not in .*python311\.zip'"):
        stdlib_corpus(tmp_path / "python311.zip")


def test_a_library_that_may_not_be_read(tmp_path, monkeypatch):
    root = make_library(tmp_path / "lib")

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"cannot read the standard library's .*m000\.py': Permission denied"):
        stdlib_corpus(root)
