import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardwise.core.errors import ConfigError, DataError
from shardwise.data import IGNORE_INDEX, HeldOut, TokenRows, TokenStream, WindowRows

EOS = 0


def stream_of(num_tokens: int) -> TokenStream:
    """Tokens 1, 2, 3, ... and an end-of-text token, of a text of ten bytes."""
    tokens = np.arange(1, num_tokens + 1, dtype=np.uint16)
    tokens[-1] = EOS
    return TokenStream("numbers", tokens, EOS, num_bytes=10)


def test_labels_are_the_tokens_that_follow():
    dataset = TokenRows(stream_of(11), 3)
    assert len(dataset) == 3
    tokens, labels = dataset.row(1).values()
    assert tokens.dtype == labels.dtype == np.int64
    assert tokens.tolist() == [4, 5, 6]
    assert labels.tolist() == [5, 6, 7]
    tokens[0] = labels[0] = 99
    assert dataset.row(1)["tokens"].tolist() == [4, 5, 6]


def test_the_stream_is_a_ring():
    dataset = TokenRows(stream_of(6), 3)
    assert dataset.row(1)["labels"].tolist() == [5, EOS, 1]
    tokens, labels = TokenRows(stream_of(6), 3, offset=2).row(1).values()
    assert tokens.tolist() == [EOS, 1, 2]
    assert labels.tolist() == [1, 2, 3]
    tokens, labels = TokenRows(stream_of(6), 3, offset=1).row(1).values()
    assert (tokens.tolist(), labels.tolist()) == ([5, EOS, 1], [EOS, 1, 2])


@given(num_tokens=st.integers(2, 60), sequence_length=st.integers(1, 20), offset=st.integers(0, 100))
def test_samples_at_any_offset_hold_distinct_tokens_in_order(num_tokens, sequence_length, offset):
    if num_tokens <= sequence_length:
        return
    stream = stream_of(num_tokens)
    dataset = TokenRows(stream, sequence_length, offset)
    samples = [dataset.row(index).values() for index in range(len(dataset))]
    ring = np.roll(stream.tokens, -offset).astype(np.int64)
    used = len(dataset) * sequence_length
    assert num_tokens - used < sequence_length
    np.testing.assert_array_equal(np.concatenate([tokens for tokens, _ in samples]), ring[:used])
    np.testing.assert_array_equal(np.concatenate([labels for _, labels in samples]), np.roll(ring, -1)[:used])


def test_there_are_no_other_samples():
    dataset = TokenRows(stream_of(11), 3)
    for index in (3, -1):
        with pytest.raises(IndexError, match=f"sample {index} is not one of 3"):
            dataset.row(index)


def test_too_few_tokens():
    assert len(TokenRows(stream_of(9), 8)) == 1
    with pytest.raises(DataError, match=r"'numbers' has 8 tokens.* sequence_length 8 .*at most 7, or more text"):
        TokenRows(stream_of(8), 8)


@pytest.mark.parametrize("kind", [TokenRows, WindowRows])
def test_sequence_length_is_a_count(kind):
    with pytest.raises(ConfigError, match="sequence_length 0 must be at least 1"):
        kind(stream_of(8), 0)


def test_windows_by_hand():
    windows = WindowRows(stream_of(5), 3)
    assert len(windows) == 2
    first, second = (tuple(windows.row(index).values()) for index in range(2))
    assert (first[0].tolist(), first[1].tolist()) == ([EOS, 1, 2], [1, 2, 3])
    assert (second[0].tolist(), second[1].tolist()) == ([3, 4, EOS], [4, EOS, IGNORE_INDEX])
    assert first[0].dtype == second[1].dtype == np.int64
    padding = tuple(windows.padding(3).values())
    assert (padding[0].tolist(), padding[1].tolist()) == ([EOS] * 3, [IGNORE_INDEX] * 3)


@given(num_tokens=st.integers(1, 60), sequence_length=st.integers(1, 70))
def test_windows_have_every_token_as_a_label_once(num_tokens, sequence_length):
    stream = stream_of(num_tokens)
    windows = WindowRows(stream, sequence_length)
    tokens, labels = (
        np.concatenate([windows.row(index)[name] for index in range(len(windows))]) for name in ("tokens", "labels")
    )
    assert tokens.shape == labels.shape == (len(windows) * sequence_length,)
    counts = labels != IGNORE_INDEX
    assert counts.sum() == windows.stream.num_tokens
    np.testing.assert_array_equal(labels[counts], stream.tokens)
    # Each label's context is the token before it, and an end of text before the first.
    np.testing.assert_array_equal(tokens[counts], [EOS, *stream.tokens[:-1]])
    with pytest.raises(IndexError, match=f"window {len(windows)} is not one of"):
        windows.row(len(windows))


def test_bits_per_byte():
    windows = HeldOut(WindowRows(stream_of(5), 3))
    assert windows.rows.num_bytes == 10
    assert windows.bits_per_byte(20 * math.log(2)) == pytest.approx(2.0)
