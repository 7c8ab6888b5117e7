"""Files are complete or absent."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from harness.watchdog import WATCHDOG_SECONDS

from shardwise.core.atomic_files import check_output, write_atomically, write_output
from shardwise.core.errors import ConfigError, UnwritableError


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


def output(path: Path) -> None:
    write_output(path, lambda file: file.write(b"content"), flag="--flag")


@pytest.mark.parametrize("target", ["old", "new"])
def test_an_output_at_a_link_goes_to_its_target(tmp_path, target):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "old").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "inner" / target)
    with (tmp_path / "inner" / "old").open() as reader:
        output(tmp_path / "link")
        assert reader.read() == "old"
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "inner" / target).read_text() == "content"


def test_an_output_to_a_pipe_and_to_a_device_is_written_through(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(UnwritableError, match="pipe': no process reads it; choose another --flag"):
        output(path)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        output(path)
        assert reader.read() == b"content"
    assert stat.S_ISFIFO(path.stat().st_mode)
    (tmp_path / "device").symlink_to("/dev/null")
    output(tmp_path / "device")
    assert (tmp_path / "device").is_char_device()


def test_an_output_that_is_larger_than_a_pipe(tmp_path):
    path, content = tmp_path / "pipe", bytes(1 << 20)
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    writer = threading.Thread(target=write_output, args=(path, lambda file: file.write(content)), kwargs={"flag": "x"})
    writer.start()
    with open(descriptor, "rb") as reader:
        # Without a writer the end of the pipe would be read at once.
        found = b""
        while len(found) < len(content):
            found += reader.read1()
    writer.join()
    assert found == content


def test_an_output_to_the_own_standard_output_follows_what_was_printed(tmp_path):
    program = (
        "from shardwise.core.atomic_files import write_output; print('before')\n"
        "write_output('/dev/stdout', lambda file: file.write(b'content\\n'), flag='--flag'); print('after')"
    )
    with (tmp_path / "log").open("wb") as log:
        subprocess.run([sys.executable, "-c", program], stdout=log, check=True)
    assert (tmp_path / "log").read_text() == "before\ncontent\nafter\n"


def test_outputs_that_are_refused(tmp_path):
    """Before and at the write, and nothing is made."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "to folder").symlink_to("folder")
    (tmp_path / "file").write_text("theirs")
    (tmp_path / "loop").symlink_to("loop")
    for name, said in (
        ("folder", "it is a folder"),
        ("to folder", "it is a folder"),
        ("file/page", "is a file"),
        ("loop", os.strerror(errno.ELOOP)),
        ("a\0b", "no file's name"),
    ):
        for attempt in (output, lambda path: check_output(path, flag="--flag")):
            with pytest.raises(UnwritableError, match=said):
                attempt(tmp_path / name)
    assert (tmp_path / "file").read_text() == "theirs"
    assert len(list(tmp_path.iterdir())) == 4
