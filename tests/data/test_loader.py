import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from shardwise.core.errors import ConfigError
from shardwise.data import (
    IGNORE_INDEX,
    BatchSchedule,
    DataLoader,
    Encoded,
    HeldOut,
    PairRows,
    SampleRows,
    TokenRows,
    TokenSamples,
    TokenStream,
    WindowRows,
)

FROZEN_ORDER = [[2, 3, 5, 0, 1, 6, 7, 4], [7, 3, 4, 6, 0, 5, 2, 1]]
FROZEN_OFFSETS = [4, 2, 1, 4, 0, 4]

COUNTS = st.integers(1, 40)


def stream_of(num_tokens: int) -> TokenStream:
    """Tokens 1, 2, 3, ... of a text of ten bytes."""
    return TokenStream("numbers", np.arange(1, num_tokens + 1, dtype=np.uint16), 0, num_bytes=10)


def loader_of(global_batch_size: int, seed: int = 3) -> DataLoader:
    """A loader of 12 samples of 5 tokens."""
    return DataLoader(TokenRows(stream_of(64), 5), global_batch_size, seed)


def rows(batches) -> list[list[int]]:
    """Tokens and labels of each sample, in order."""
    return [row for batch in batches for row in torch.cat([batch.tokens, batch.labels], dim=1).tolist()]


@given(num_samples=COUNTS, global_batch_size=COUNTS, seed=st.integers(0, 2**63))
def test_every_sample_comes_once_in_each_epoch(num_samples, global_batch_size, seed):
    schedule = BatchSchedule(num_samples, global_batch_size, seed)
    num_steps = -(-3 * num_samples // global_batch_size)
    order = np.concatenate([schedule.global_batch(step) for step in range(num_steps)])
    epochs = np.concatenate([schedule.epochs(step) for step in range(num_steps)])
    for epoch in range(3):
        part = slice(epoch * num_samples, (epoch + 1) * num_samples)
        assert sorted(order[part]) == list(range(num_samples))
        assert set(epochs[part]) == {epoch}


def test_the_order_does_not_depend_on_the_batch_size():
    orders = [
        np.concatenate([BatchSchedule(10, size, 5).global_batch(step) for step in range(60 // size)]).tolist()
        for size in (1, 4, 6, 30)
    ]
    assert all(order == orders[0] for order in orders)


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [tuple(BatchSchedule(50, 50, seed).global_batch(step)) for seed in (0, 1) for step in (0, 1, 2)]
    assert len(set(orders)) == len(orders)
    assert tuple(range(50)) not in orders


def test_the_order_is_this_one_for_ever():
    # A run that is resumed under another version of NumPy must see the samples that it would have seen.
    schedule = BatchSchedule(8, 8, seed=42)
    assert [schedule.global_batch(step).tolist() for step in (0, 1)] == FROZEN_ORDER
    assert [loader_of(12).rows.in_epoch(42, epoch).offset for epoch in range(6)] == FROZEN_OFFSETS


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 6, 12])
def test_ranks_and_micro_batches_in_order_are_the_global_batch(dp_size):
    loader = loader_of(12)
    for step in (0, 1, 7):
        whole = rows(loader.batch(step))
        assert len(whole) == 12
        for micro_batch_size in (1, 2, 3, 4, 6, 12):
            if 12 % (dp_size * micro_batch_size):
                continue
            parts = [list(loader.batch(step, rank, dp_size, micro_batch_size)) for rank in range(dp_size)]
            assert {len(part) for part in parts} == {12 // dp_size // micro_batch_size}
            assert [row for part in parts for row in rows(part)] == whole


def test_a_batch_is_made_of_the_samples_of_the_schedule():
    loader = loader_of(5)
    for step in (0, 2):  # step 2 ends the first epoch and begins the second
        samples, epochs = loader.schedule.global_batch(step), loader.schedule.epochs(step)
        (batch,) = loader.batch(step)
        tokens, labels = batch.tokens, batch.labels
        assert tokens.dtype == labels.dtype == torch.int64
        assert tokens.shape == labels.shape == (5, 5)
        for row, (sample, epoch) in enumerate(zip(samples, epochs, strict=True)):
            expected = loader.rows.in_epoch(loader.schedule.seed, int(epoch)).row(int(sample))
            assert tokens[row].tolist() == expected["tokens"].tolist()
            assert labels[row].tolist() == expected["labels"].tolist()
    assert set(epochs) == {0, 1}


def pair_rows() -> PairRows:
    """Seven pairs of samples of different lengths, of which two tokens are the prompt."""
    lengths = [4 + each % 5 for each in range(14)]
    encoded = [Encoded(np.arange(n), np.arange(n) >= 2, np.ones(n, np.int64)) for n in lengths]
    made = PairRows(TokenSamples.of("pairs", encoded, 0), 9)
    made.reference = np.arange(14.0).reshape(7, 2)
    return made


@pytest.mark.parametrize("kind", ["stream", "pairs", "packed", "unpacked"])
def test_after_the_last_sample_there_is_padding(kind):
    """A batch keeps its order and shape; without an end, its places have samples of the next epoch."""
    if kind in ("stream", "pairs"):
        made = loader_of(4).rows if kind == "stream" else pair_rows()
    else:
        made = SampleRows(pair_rows().samples, 9, packing=kind == "packed")
    end = len(made) + 1 + len(made) % 2
    loader, filled = DataLoader(made, 4, 3, end=end), DataLoader(made, 4, 3)
    learned = []
    for step in range(-(-end // 4)):
        whole = {name: [] for name in next(loader.batch(step, with_lengths=True)).tensors}
        for part in (0, 1):
            for batch in loader.batch(step, part, 2, 1, with_lengths=True):
                for name, tensor in batch.tensors.items():
                    whole[name].append(tensor)
        whole = {name: torch.cat(tensors) for name, tensors in whole.items()}
        (before,) = filled.batch(step, with_lengths=True)
        rows_of_sample = len(before.tokens) // 4
        kept = min(4, end - 4 * step) * rows_of_sample
        for name, tensor in before.tensors.items():
            assert torch.equal(whole[name][:kept], tensor[:kept]), name
            assert whole[name].shape == tensor.shape
        rest = {name: tensor[kept:] for name, tensor in whole.items()}
        assert (rest["labels"] == IGNORE_INDEX).all()
        assert (rest.get("lengths", torch.zeros(1)) == 0).all()
        assert (rest.get("document_ids", torch.tensor(-1)) == -1).all()
        assert loader.num_learned(step) == (whole["labels"] != IGNORE_INDEX).sum()
        learned += loader.schedule.global_batch(step)[: loader.num_samples(step)].tolist()
    assert loader.num_samples(step) < 4, "the last batch is not full"
    assert sorted(set(learned)) == list(range(len(made)))
    assert len(learned) == end


def test_any_step_can_be_asked_for_first():
    forward = [rows(loader_of(6).batch(step)) for step in range(10)]
    backward = [rows(loader_of(6).batch(step)) for step in reversed(range(10))]
    assert forward == backward[::-1]


def test_texts_are_cut_anew_in_each_epoch():
    loader = loader_of(12)
    starts = [{row[0] % 5 for row in rows(loader.batch(step))} for step in range(8)]
    assert len(set(map(frozenset, starts))) > 2
    assert all(0 <= loader.rows.in_epoch(3, epoch).offset < 5 for epoch in range(100))


def test_torch_may_write_into_a_batch():
    loader = loader_of(12)
    before = rows(loader.batch(0))
    for batch in loader.batch(0):
        batch.tokens.zero_()
        batch.labels.zero_()
    assert rows(loader.batch(0)) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (0, 0, 4, 2),
            r"global_batch_size 12 is not divisible by data-parallel size 4 x micro_batch_size 2 = 8; .* such as 8",
        ),
        ((0, 0, 5), r"global_batch_size 12 is not divisible by data-parallel size 5 x micro_batch_size 2 = 10"),
        ((0, 0, 24), r"not divisible by data-parallel size 24 x micro_batch_size 1 = 24; use a multiple such as 24"),
        ((0, 2, 2, 1), "data-parallel rank 2 is not one of 2"),
        ((0, -1, 2, 1), "data-parallel rank -1 is not one of 2"),
        ((0, 0, 1, 0), "micro_batch_size 0 must be at least 1"),
        ((0, 0, 0), "data-parallel size 0 .* must be at least 1"),
        ((-1,), "step -1 must be at least 0"),
    ],
)
def test_impossible_batches_are_refused_at_the_call(arguments, message):
    with pytest.raises(ConfigError, match=message):
        loader_of(12).batch(*arguments)


@pytest.mark.parametrize("sizes", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_impossible_schedules(sizes):
    with pytest.raises(
        ConfigError, match=f"num_samples {sizes[0]} and global_batch_size {sizes[1]} .*seed {sizes[2]} "
    ):
        BatchSchedule(*sizes)


@given(num_tokens=st.integers(1, 50), micro_batch_size=st.integers(1, 4), dp_size=st.integers(1, 4))
def test_evaluation_has_every_token_as_a_label_once_over_all_ranks(num_tokens, micro_batch_size, dp_size):
    windows = HeldOut(WindowRows(stream_of(num_tokens), 4))
    ranks = [list(windows.batches(micro_batch_size, rank, dp_size)) for rank in range(dp_size)]
    assert len({len(batches) for batches in ranks}) == 1
    batches = [batch for of_rank in ranks for batch in of_rank]
    assert all(tensor.shape == (micro_batch_size, 4) for batch in batches for tensor in batch.tensors.values())
    assert all(tensor.dtype == torch.int64 for batch in batches for tensor in batch.tensors.values())
    labels = torch.cat([batch.labels for batch in batches]).flatten()
    assert sorted(labels[labels != IGNORE_INDEX].tolist()) == list(range(1, num_tokens + 1))
    # No rank has a batch more than it must have.
    assert len(ranks[0]) == -(-len(windows) // (micro_batch_size * dp_size))


def test_evaluation_on_one_rank_is_in_the_order_of_the_text():
    windows = HeldOut(WindowRows(stream_of(10), 4))
    labels = torch.cat([batch.labels for batch in windows.batches(2)]).flatten()
    assert labels.tolist() == [*range(1, 11), *[IGNORE_INDEX] * 6]


def test_impossible_evaluations():
    windows = HeldOut(WindowRows(stream_of(10), 4))
    with pytest.raises(ConfigError, match="micro_batch_size 0 must be at least 1"):
        windows.batches(0)
    with pytest.raises(ConfigError, match="data-parallel rank 1 is not one of 1"):
        windows.batches(1, 1, 1)


def test_a_part_of_held_out_rows_is_spread_and_has_its_share_of_the_bytes():
    whole = HeldOut(WindowRows(stream_of(40), 4))
    part = whole.part(3)
    assert len(whole) == 10
    assert part._indices.tolist() == [0, 3, 6]
    assert part.bits_per_byte(3.0) == pytest.approx(whole.bits_per_byte(3.0) * whole.num_labels / part.num_labels)
    assert whole.part(10) is whole
