"""Count the files of the package that a command goes through: ``python walks.py SRC train|plan|chat``.

``SRC`` is the ``src`` folder of a checkout, so that commits can be compared. The command runs twice in this process, on
one rank, and is traced the second time. Two numbers are printed: the files that the main thread entered, and its
returns, which are calls into a file that it had entered and left before, counted once per pair of caller and callee.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class Walk:
    """A profile function that traces the calls between files."""

    def __init__(self, root: Path) -> None:
        self.files: set[str] = set()
        self.returns: set[tuple[CodeType, CodeType]] = set()
        self._root = str(root)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # Skip comprehensions and class bodies, which are parts of a function or an import.
        if event != "call" or code.co_name.startswith("<") or not code.co_filename.startswith(self._root):
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(self._root):
            caller = caller.f_back
        if caller is None or caller.f_code.co_filename == code.co_filename:
            self.files.add(code.co_filename)
            return
        if code.co_filename in self.files:
            self.returns.add((caller.f_code, code))
        self.files.add(code.co_filename)


def arguments_of(command: str, folder: Path) -> list[str]:
    """Return the command line; ``chat`` uses the model of a run of two steps in ``folder``."""
    small = ["--model.num-layers", "2", "--model.hidden-size", "32", "--model.num-heads", "2"]
    small += ["--model.vocab-size", "300", "--model.sequence-length", "32"]
    if command == "plan":
        return ["plan", *small, "--tp", "2", "--ranks", "4"]
    if command == "chat":
        return ["chat", str(folder / "run"), "--max-new-tokens", "4"]
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 400, encoding="utf-8")
    return ["train", "--data", str(text), "--out", str(folder / "run"), "--training.steps", "2", *small]


def main(source: Path, command: str) -> None:
    """Run the command and print both numbers."""
    sys.path.insert(0, str(source.resolve()))
    from shardwise.cli.main import main as shardwise

    walk = Walk(source.resolve() / "shardwise")
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / place for place in ("first", "second")]
        for folder in folders:
            folder.mkdir()
            if command == "chat":
                _quietly(shardwise, arguments_of("train", folder))
                (step,) = folder.glob("run/checkpoints/step-*")
                (step / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
        for folder in folders:
            sys.stdin = io.StringIO("Hello\n")
            # The first run does the imports, so that they are not traced.
            sys.setprofile(walk if folder is folders[-1] else None)
            try:
                _quietly(shardwise, arguments_of(command, folder))
            finally:
                sys.setprofile(None)
    print(f"{command}: {len(walk.files)} files entered, {len(walk.returns)} returns")


def _quietly(run: Callable[[list[str]], int], argv: list[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as shown:
        code = run(argv)
    if code:
        raise SystemExit(shown.getvalue())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
