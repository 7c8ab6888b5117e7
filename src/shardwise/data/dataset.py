"""Samples to learn from, and windows that cover a text exactly once to judge by."""

import math

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import ConfigError, DataError
from shardwise.data.tokens import TokenStream

IGNORE_INDEX = -100
"""The label of a position that counts for nothing."""

Sample = tuple[NDArray[np.int64], NDArray[np.int64]]
"""``(tokens [s], labels [s])``, each label the token that follows."""


def _check_sequence_length(sequence_length: int) -> None:
    if sequence_length < 1:
        raise ConfigError(f"sequence_length {sequence_length} must be at least 1")


class TokenDataset:
    """A token stream cut into samples of one length.

    The stream is read as a ring: it ends with the end of a document and goes on with the start of one. So a sample may
    start anywhere, and shifting all samples by an offset gives each the same length.

    Args:
        stream: the tokens.
        sequence_length: ``s``, tokens in a sample.

    Raises:
        ConfigError: ``sequence_length`` is less than 1.
        DataError: the stream is shorter than one sample and the label behind it.
    """

    def __init__(self, stream: TokenStream, sequence_length: int) -> None:
        _check_sequence_length(sequence_length)
        if stream.num_tokens < sequence_length + 1:
            raise DataError(
                f"the corpus {stream.name!r} has {stream.num_tokens} tokens, fewer than one sample of sequence_length "
                f"{sequence_length} and 1; use a sequence_length of at most {stream.num_tokens - 1}, or more text"
            )
        self.stream = stream
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        """Number of samples that do not overlap."""
        return self.stream.num_tokens // self.sequence_length

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index`` of the stream as it is."""
        return self.sample(index)

    def sample(self, index: int, offset: int = 0) -> Sample:
        """One sample.

        Args:
            index: the sample's index, less than ``len``.
            offset: tokens by which all samples are shifted.

        Returns:
            ``(tokens [s], labels [s])``, int64, new arrays.

        Raises:
            IndexError: there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is not one of {len(self)}")
        start = (index * self.sequence_length + offset) % self.stream.num_tokens
        window = self.stream.tokens[start : start + self.sequence_length + 1]
        missing = self.sequence_length + 1 - len(window)
        if missing:
            window = np.concatenate([window, self.stream.tokens[:missing]])
        return window[:-1].astype(np.int64), window[1:].astype(np.int64)


class EvaluationWindows:
    """Windows of a token stream in which every token is a label exactly once.

    The first token is predicted from an end-of-text token in front of it. The last window is filled with tokens whose
    labels count for nothing.

    Args:
        stream: the tokens.
        sequence_length: ``s``, tokens in a window. The stream may be shorter.

    Raises:
        ConfigError: ``sequence_length`` is less than 1.
    """

    def __init__(self, stream: TokenStream, sequence_length: int) -> None:
        _check_sequence_length(sequence_length)
        self.stream = stream
        self.sequence_length = sequence_length

    @property
    def num_bytes(self) -> int:
        """Size of the text behind the labels in UTF-8, in bytes."""
        return self.stream.num_bytes

    def bits_per_byte(self, total_nll: float) -> float:
        """Bits that the model spends on a byte of the text, the ends of documents included.

        Args:
            total_nll: sum over all labels that count of ``-ln p(label)``.
        """
        return total_nll / math.log(2) / self.num_bytes

    def __len__(self) -> int:
        """Number of windows."""
        return -(-self.stream.num_tokens // self.sequence_length)

    def __getitem__(self, index: int) -> Sample:
        """Window ``index``: ``(tokens [s], labels [s])``, int64, new arrays.

        Raises:
            IndexError: there is no such window.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} is not one of {len(self)}")
        tokens, labels = self.padding()
        start = index * self.sequence_length
        targets = self.stream.tokens[start : start + self.sequence_length]
        labels[: len(targets)] = targets
        tokens[1 : len(targets)] = targets[:-1]
        if index > 0:
            tokens[0] = self.stream.tokens[start - 1]
        return tokens, labels

    def text_lengths(self, index: int) -> tuple[()]:
        """Nothing: every window is as long as all others."""
        return ()

    def padding(self) -> Sample:
        """A window of end-of-text tokens in which no label counts."""
        shape = (self.sequence_length,)
        return np.full(shape, self.stream.eos_id, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
