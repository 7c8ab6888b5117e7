"""A settings file, in TOML."""

import re
import tomllib
from pathlib import Path
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.core.files import read_regular

_MAX_BYTES = 1_000_000
_MAX_DEPTH = 16
# A key of many parts, for each of which the reader keeps all before it.
_LONG_KEY = re.compile(
    r"""^[ \t\[]*+(?:[ \t]*+(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.){17}""",
    re.MULTILINE,
)


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file.

    Raises:
        ConfigError: it is not TOML, and the message names the line; it is no regular file, larger than ``_MAX_BYTES``,
            or nested deeper than settings are.
    """
    try:
        text = read_regular(path, limit=_MAX_BYTES).decode()
        if _LONG_KEY.search(text) is None and _depth(values := tomllib.loads(text)) <= _MAX_DEPTH:
            return values
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    # Among them TOMLDecodeError, text that is not UTF-8, and integers of more digits than Python reads.
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    except RecursionError:
        pass  # It is nested deeper still.
    raise ConfigError(f"{path} is nested more than {_MAX_DEPTH} deep; settings stand in tables of one level")


def _depth(value: object) -> int:
    """How many tables and lists stand within each other."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max((1 + _depth(each) for each in inner), default=0)
