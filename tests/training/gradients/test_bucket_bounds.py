"""Parameters in a flat buffer: each in one bucket, and every bucket a whole number of ranks long."""

from hypothesis import given, strategies as st

from shardwise.training.gradients.base import place

sizes = st.lists(st.integers(0, 200), min_size=1, max_size=12)


@given(sizes, st.none() | st.integers(1, 300), st.integers(1, 7))
def test_every_parameter_lies_in_its_bucket_and_ranks_divide_buckets(sizes, bucket_size, world_size):
    placement = place(sizes, bucket_size=bucket_size, world_size=world_size)
    assert [index for bucket in placement.buckets for index in bucket] == list(range(len(sizes)))
    assert len(placement.bounds) == len(placement.buckets) + 1
    end = 0
    for number, indices in enumerate(placement.buckets):
        start, stop = placement.bounds[number], placement.bounds[number + 1]
        assert (stop - start) % world_size == 0
        assert len(indices) == 1 or bucket_size is None or stop - start <= bucket_size
        for index in indices:
            assert placement.starts[index] % 16 == 0
            assert placement.starts[index] >= max(end, start)
            end = placement.starts[index] + sizes[index]
        assert end <= stop
    if bucket_size is None:
        assert len(placement.buckets) == 1
