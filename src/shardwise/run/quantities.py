"""Numbers of bytes as people write them."""

import re

from shardwise.core.errors import ConfigError

_UNITS = {"": 1, "B": 1, **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)}}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", 1)}


def shown_bytes(number: int) -> str:
    """In the unit that fits, to three digits or more.

    >>> shown_bytes(999), shown_bytes(80 << 30), shown_bytes(1_500_000)
    ('999 B', '80.0 GiB', '1.43 MiB')
    """
    size, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1000 or unit == "TiB":
            break
        size /= 1024
    return f"{number} B" if unit == "B" else f"{size:.{2 if size < 10 else 1}f} {unit}"


def read_bytes(text: str) -> int:
    """A number of bytes as people write it.

    >>> read_bytes("80GiB"), read_bytes("1.5 GB"), read_bytes("4096")
    (85899345920, 1500000000, 4096)
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)", text.strip(), re.ASCII)
    if match is None or match[2] not in _UNITS or float(match[1]) * _UNITS[match[2]] < 1:
        raise ConfigError(f"{text!r} is not a number of bytes; write it as 80GiB, 40.5GB or 1024MiB")
    return int(float(match[1]) * _UNITS[match[2]])
