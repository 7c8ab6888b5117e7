"""Files that are complete or absent."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from shardwise.errors import ConfigError


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Create or replace a file, complete or not at all, also when several processes do it at once.

    Args:
        path: the file; its folder is made if missing.
        write: called with the open binary file; its result is not used.

    Raises:
        ConfigError: the folder cannot be made or written to.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot write {str(path)!r}: {reason}; choose a folder that can be written to") from error
