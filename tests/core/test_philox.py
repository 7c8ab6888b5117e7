"""Numbers by a counter: the published words, normal numbers, and the same bits for any part of a matrix."""

import math
import statistics

import pytest
import torch
from harness.operators import Operators
from harness.parity import assert_bit_equal

from shardwise.core import initialization as philox_module
from shardwise.core.initialization import fill_normal_, philox

ALL_ONES = 0xFFFFFFFF
KEY = 0x1234_5678_9ABC_DEF0
# Bits of fp32, in rows 0 and 9 of columns 0 to 2.
GOLDEN = [[-1073164648, 1069086598, 1059690357], [1057050254, -1075727875, 1071093653]]


def normals(rows, columns, dtype=torch.float32, key=KEY, **options):
    """The part of a whole matrix at these ranges of rows and columns."""
    out = torch.empty(len(rows), len(columns), dtype=dtype)
    fill_normal_(out, key=key, rows=torch.tensor(rows, dtype=torch.int64), column=columns.start, **options)
    return out


# Random123's kat_vectors for philox4x32-10.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ALL_ONES,) * 4, (ALL_ONES << 32) + ALL_ONES, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0x299F31D0 << 32) + 0xA4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_published_words(counter, key, words):
    assert " ".join(f"{int(word):08x}" for word in philox([torch.tensor(word) for word in counter], key)) == words


def test_normals_are_those_of_box_and_muller():
    """Logarithm, cosine and sine by Python's own library, of the words of one counter."""
    column, row = 7, (3 << 32) + 5
    words = [int(word) for word in philox([torch.tensor(word) for word in (column, 5, 3, 0)], KEY)]
    expected = []
    for first, second in (words[:2], words[2:]):
        radius = math.sqrt(-2 * math.log((first + 0.5) / 2**32))
        angle = ((second & (1 << 30) - 1) - (1 << 29) + 0.5) * math.pi / 2**31
        large, small = math.cos(angle) * (-1 if second >> 30 & 1 else 1), math.sin(angle)
        expected += [radius * part for part in ((small, large) if second >> 31 else (large, small))]
    found = normals([row], range(4 * column, 4 * column + 4), torch.float64)[0]
    assert found.tolist() == pytest.approx(expected, abs=1e-11)
    shifted = normals([row], range(4 * column, 4 * column + 4), torch.float64, mean=2.0, std=0.5)[0]
    assert shifted.tolist() == pytest.approx([2 + 0.5 * value for value in expected], abs=1e-11)


def test_the_values_stay_as_they_are():
    """What runs started from, on every machine: a change here changes what a seed means."""
    assert normals([0, 9], range(3)).view(torch.int32).tolist() == GOLDEN


def test_only_operations_whose_result_is_defined_to_the_bit():
    with Operators() as operators:
        normals(range(3), range(1, 9))
    exact = "mul add sub div sqrt where ge _to_copy copy bitwise_and bitwise_or bitwise_xor __rshift__ rsub"
    moves = "arange empty new_zeros view slice select unsqueeze alias detach lift_fresh"
    found = {name.removeprefix("aten::").partition(".")[0] for name in operators.names}
    assert {name if name.startswith("__") else name.rstrip("_") for name in found} <= {*exact.split(), *moves.split()}


@pytest.mark.parametrize("at_once", [1, 5, 1 << 14])
def test_any_part_is_the_part_of_the_whole(monkeypatch, at_once):
    monkeypatch.setattr(philox_module, "_COUNTERS_PER_THREAD", at_once)
    whole = normals(range(40), range(83))
    for first, last in ((0, 1), (1, 83), (2, 3), (3, 4), (5, 22), (80, 83), (82, 83), (8, 8)):
        assert_bit_equal(normals(range(40), range(first, last)), whole[:, first:last].contiguous())
        assert_bit_equal(normals([7], range(first, last)), whole[7:8, first:last].contiguous())
    rows = [39, 0, 13, 13]
    assert_bit_equal(normals(rows, range(11, 70)), whole[rows, 11:70].contiguous())


def test_a_view_is_filled_and_nothing_beside_it():
    around = torch.zeros(5, 30)
    fill_normal_(around[1:4, 6:19], key=KEY, rows=torch.arange(3), column=2)
    assert_bit_equal(around[1:4, 6:19].contiguous(), normals(range(3), range(2, 15)))
    assert int(around.count_nonzero()) == 3 * 13


def test_narrower_dtypes_are_the_rounded_ones():
    wide, single = (normals(range(50), range(60), dtype, std=0.02) for dtype in (torch.float64, torch.float32))
    assert_bit_equal(single, wide.float())
    for dtype in (torch.bfloat16, torch.float16):
        assert_bit_equal(normals(range(50), range(60), dtype, std=0.02), single.to(dtype))


def test_they_are_normal_and_independent():
    n = 1 << 18
    drawn = normals(range(512), range(512), torch.float64)
    # Five standard errors of each moment.
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float(drawn.pow(power).mean()) - expected) < 5 * math.sqrt(variance / n), power
    # Kolmogorov and Smirnov; 1.95 is exceeded once in a thousand times.
    ordered = drawn.flatten().sort().values
    uniform = torch.special.ndtr(ordered)
    assert float((uniform - (torch.arange(n) + 0.5) / n).abs().max()) * math.sqrt(n) < 1.95
    assert 4.2 < float(drawn.abs().max()) < statistics.NormalDist().inv_cdf(1 - 1e-9)
    other = normals(range(512), range(512), torch.float64, key=KEY + 1)
    neighbours = {
        "columns 1": (drawn[:, 1:], drawn[:, :-1]),
        "columns 2": (drawn[:, 2:], drawn[:, :-2]),
        "columns 4": (drawn[:, 4:], drawn[:, :-4]),
        "rows": (drawn[1:], drawn[:-1]),
        "keys": (drawn, other),
        "squares": (drawn[:, 1::2].square() - 1, drawn[:, ::2].square() - 1),
    }
    for name, (one, two) in neighbours.items():
        correlation = float((one * two).mean() / (one.std() * two.std()))
        assert abs(correlation) < 5 / math.sqrt(one.numel()), name
