"""Numbers of bytes for people, and from them."""

import pytest

from shardwise.core.errors import ConfigError
from shardwise.run.quantities import read_bytes, shown_bytes


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (80 << 30, "80.0 GiB"), (3 << 50, "3072.0 TiB")],
)
def test_bytes_are_shown_in_the_unit_that_fits(number, text):
    assert shown_bytes(number) == text


@pytest.mark.parametrize(
    ("text", "number"), [("80GiB", 80 << 30), ("1.5 GB", 1_500_000_000), ("7", 7), ("2MiB", 2 << 20), ("1TB", 10**12)]
)
def test_bytes_are_read_with_units_of_both_kinds(text, number):
    assert read_bytes(text) == number


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e9", "80 gib", "0", "0.1", "nan", "1.2.3GiB", "٣GiB"])
def test_what_is_no_number_of_bytes_is_refused(text):
    with pytest.raises(ConfigError, match="is not a number of bytes; write it as 80GiB"):
        read_bytes(text)
