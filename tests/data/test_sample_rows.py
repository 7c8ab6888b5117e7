"""Samples in rows: nothing lost, nothing twice, the same at every layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardwise.core.errors import DataError
from shardwise.data import IGNORE_INDEX, DataLoader, Encoded, HeldOut, SampleRows, TokenSamples


def samples_of(lengths, masked=2):
    """Each token differs from all others; the first ``masked`` of a sample are not learned."""
    encoded, first = [], 1
    for length in lengths:
        ids = np.arange(first, first + length)
        encoded.append(Encoded(ids, np.arange(length) >= masked, np.full(length, 3)))
        first += length
    return TokenSamples.of("some", encoded, eos_id=0)


def labels_of(rows):
    return sorted(int(label) for row in rows for label in row["labels"] if label != IGNORE_INDEX)


@pytest.mark.parametrize("packing", [False, True])
def test_every_label_once_behind_its_token(packing):
    samples = samples_of([5, 9, 3, 7, 4, 13, 3])
    dataset = SampleRows(samples, 12, packing=packing)
    rows = [dataset.row(index) for index in range(len(dataset))]
    assert labels_of(rows) == samples.tokens[samples.learned].tolist()
    for index, row in enumerate(rows):
        tokens, labels = row["tokens"], row["labels"]
        counts = labels != IGNORE_INDEX
        assert (labels[counts] == tokens[counts] + 1).all()
        assert counts.sum() == dataset.labels[index]
    assert dataset.num_bytes == 3 * samples.learned.sum()
    # 37 places in rows of 12.
    assert len(dataset) == (4 if packing else 7)
    # A first token is no label, even if it is learned.
    whole = SampleRows(samples_of([8, 6], masked=0), 12, packing=packing)
    assert (len(whole), whole.labels.sum(), whole.num_bytes) == (1 if packing else 2, 7 + 5, 3 * (7 + 5))
    if packing:
        for row in rows:
            tokens, positions, documents = row["tokens"], row["position_ids"], row["document_ids"]
            begins = np.flatnonzero(positions == 0)
            assert {int(tokens[begin]) for begin in begins} <= {0, *samples.starts + 1}
            assert len(set(documents[documents >= 0].tolist())) == len(begins)


@pytest.mark.parametrize("packing", [False, True])
def test_what_a_step_computes(packing):
    """Padding included: the rows of the batch, or the stretches of one document id."""
    loader = DataLoader(SampleRows(samples_of([5, 9, 3, 7, 4, 13, 3]), 24, packing=packing), 2, seed=1)
    for step in range(3):
        (batch,) = loader.batch(step)
        counts = [batch.tokens.size(1)] * 2
        if packing:
            counts = [int((row == number).sum()) for row in batch.document_ids for number in row.unique()]
        computed = loader.computed(step)
        assert sorted(computed[computed > 0].tolist()) == sorted(counts)
        assert loader.num_learned(step) == (batch.labels != IGNORE_INDEX).sum()
        assert loader.num_tokens(step) < computed.sum()


@pytest.mark.parametrize(
    ("too_long", "labels"),
    [("cut", [3, 4, 5, 14, 15]), ("split", [3, 4, 5, 6, 7, 8, 9, 10, 11, 14, 15]), ("drop", [14, 15])],
)
def test_samples_that_are_too_long(too_long, labels):
    dataset = SampleRows(samples_of([11, 4]), 4, too_long=too_long)
    assert labels_of([dataset.row(index) for index in range(len(dataset))]) == labels
    assert (dataset.num_too_long, dataset.num_masked) == (1, 0)
    with pytest.raises(
        DataError, match=r"nothing of 'some' is left .* 1 of 1 samples are longer than .* 3 \+ 1 tokens"
    ):
        SampleRows(samples_of([11], masked=9), 3, too_long="cut" if too_long == "split" else too_long)


def test_parts_in_which_nothing_is_learned():
    dataset = SampleRows(samples_of([11, 4], masked=6), 4, too_long="split")
    assert dataset.num_masked == 2
    assert labels_of([dataset.row(index) for index in range(len(dataset))]) == [7, 8, 9, 10, 11]
    # Pieces end with their samples, and the first token of a piece is no label of it.
    assert SampleRows(samples_of([9]), 4, too_long="split").num_masked == 0
    one = Encoded(np.arange(11), np.arange(11) == 4, np.ones(11, np.int64))
    dataset = SampleRows(TokenSamples.of("one", [one], eos_id=0), 4, too_long="split")
    assert (dataset.num_masked, len(dataset), labels_of([dataset.row(0)])) == (2, 1, [4])


@pytest.mark.parametrize("packing", [False, True])
def test_batches_are_the_same_at_every_layout(packing):
    dataset = SampleRows(samples_of([5, 9, 3, 7, 4, 13, 3, 8, 8]), 12, packing=packing)
    loader = DataLoader(dataset, 4, seed=7)
    for step in range(3):
        (whole,) = loader.batch(step)
        parts = [batch for rank in range(2) for batch in loader.batch(step, rank, 2, 1)]
        assert len(whole.tensors) == (4 if packing else 2)
        split = [torch.cat([batch.tensors[name] for batch in parts]) for name in whole.tensors]
        assert all(tensor.equal(each) for tensor, each in zip(whole.tensors.values(), split, strict=True))
        assert (whole.labels != IGNORE_INDEX).sum() == loader.num_labels(step)
    epoch = [label for step in range(len(dataset) // 4) for label in next(loader.batch(step)).labels.flatten().tolist()]
    counted = [label for label in epoch if label != IGNORE_INDEX]
    assert len(set(counted)) == len(counted) > 20


def test_rows_are_at_least_as_long_as_asked_for():
    rows = SampleRows(samples_of([3, 8]), 12, packing=False, shortest=4)
    assert [rows.width(np.array([index])) for index in (0, 1)] == [4, 7]
    rows = SampleRows(samples_of([3, 8]), 12, packing=False, multiple_of=4)
    assert [rows.width(np.array([index])) for index in (0, 1)] == [4, 8]


@pytest.mark.parametrize("packing", [False, True])
def test_measuring_counts_every_label_once(packing):
    samples = samples_of([5, 9, 3, 7, 4, 13, 3])
    windows = HeldOut(SampleRows(samples, 12, packing=packing))
    batches = [batch for rank in range(2) for batch in windows.batches(3, rank, 2)]
    labels = sorted(label for batch in batches for label in batch.labels.flatten().tolist() if label != IGNORE_INDEX)
    assert labels == samples.tokens[samples.learned].tolist()
    assert windows.num_labels == len(labels)
    assert windows.bits_per_byte(np.log(2) * 3 * len(labels)) == pytest.approx(1.0)
    with_lengths = [batch for rank in range(2) for batch in windows.batches(3, rank, 2, with_lengths=True)]
    for batch_with_lengths, batch in zip(with_lengths, batches, strict=True):
        assert len(batch_with_lengths.tensors) - 2 == (2 if packing else 1)
        assert torch.equal(batch_with_lengths.tokens, batch.tokens)
    if not packing:
        # What only fills a batch has the last row's length.
        assert [batch.lengths.tolist() for batch in with_lengths] == [[4, 8, 2], [2] * 3, [6, 3, 12], [2] * 3]
