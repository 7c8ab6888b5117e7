"""Files are complete or absent."""

from __future__ import annotations

import threading

import pytest
from harness.watchdog import WATCHDOG_SECONDS

from shardwise.core.errors import ConfigError
from shardwise.core.files import write_atomically


def test_a_file_in_a_new_folder(tmp_path):
    path = tmp_path / "new" / "folder" / "file"
    write_atomically(path, lambda file: file.write(b"content"))
    assert path.read_bytes() == b"content"
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, lambda file: file.write(b"old"))

    def fail(file):
        file.write(b"ne")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_old_file_is_whole_until_the_new_one_is(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write(file):
        file.write(b"n")
        file.flush()
        assert path.read_bytes() == b"old"
        file.write(b"ew")

    write_atomically(path, write)
    assert path.read_bytes() == b"new"


def test_who_reads_the_old_file_goes_on_reading_it(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        write_atomically(path, lambda file: file.write(b"new"))
        assert reader.read() == b"old"


def test_writers_of_one_file_do_not_meet(tmp_path):
    path = tmp_path / "file"
    together = threading.Barrier(4, timeout=WATCHDOG_SECONDS)

    def write(value):
        def in_two_parts(file):
            file.write(value)
            file.flush()
            together.wait()
            file.write(value)

        write_atomically(path, in_two_parts)

    threads = [threading.Thread(target=write, args=(str(index).encode(),)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in {b"00", b"11", b"22", b"33"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match=r"cannot write '.*/file/inner': .*; choose a folder that can be written to"):
        write_atomically(tmp_path / "file" / "inner", lambda file: file.write(b""))
