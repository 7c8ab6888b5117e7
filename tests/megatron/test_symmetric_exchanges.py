"""Megatron's exchanges in symmetric memory, by collectives where there is none, and by the ranks' blocks elsewhere."""

import threading
from types import SimpleNamespace

import pytest
import torch
from harness.parity import assert_bit_equal, assert_close_to

from shardwise.core.communication.symmetric_memory import GlobalSymmetricMemoryBuffer
from shardwise.megatron import symmetric_exchanges
from shardwise.megatron.errors import AssertedShardingError

S, H, T = 6, 5, 2


def inputs(rank):
    generator = torch.Generator().manual_seed(rank)
    partial = torch.randn(S, 1, H, dtype=torch.float64, generator=generator)
    residual = torch.randn(S // T, 1, H, dtype=torch.float64, generator=generator)
    return partial, residual


def expected():
    """The sum, the new residual, and its norm, of all ranks."""
    total = sum(inputs(rank)[0] for rank in range(T))
    new = total + torch.cat([inputs(rank)[1] for rank in range(T)])
    weight = torch.arange(1.0, H + 1, dtype=torch.float64)
    return total, new, weight, new * (new.square().mean(-1, keepdim=True) + 0.1).rsqrt() * weight


def exchange_all(rank, tensor_of, handle):
    """All three functions; ``tensor_of(shape)`` is in symmetric memory."""
    partial, residual = inputs(rank)
    total, new, weight, normed = expected()
    own = slice(rank * S // T, (rank + 1) * S // T)

    block = tensor_of((S, 1, H))
    block.copy_(partial)
    part = torch.empty_like(residual)
    assert symmetric_exchanges.multimem_reduce_scatter(part, block, handle) is part
    assert_close_to(part, total[own], rtol_of_norm=1e-15)

    assert symmetric_exchanges.multimem_all_gather(block, part, handle, barrier_before=True) is block
    assert_close_to(block, total, rtol_of_norm=1e-15)

    handle.barrier(channel=0) if hasattr(handle, "barrier") else None
    block.copy_(partial)
    output = torch.empty_like(residual)
    symmetric_exchanges.fused_multimem_rs_add_norm_ag(output, block, handle, residual, weight, 0.1)
    assert_close_to(output, new[own], rtol_of_norm=1e-15)
    assert_close_to(block, normed, rtol_of_norm=1e-14)
    assert_bit_equal(residual, inputs(rank)[1], name="residual, unmodified")
    with pytest.raises(AssertedShardingError, match=r"2 ranks with 30 elements each have 60, and .* has 30"):
        symmetric_exchanges.multimem_all_gather(block, block, handle)


@pytest.mark.ranks(2)
def test_by_collectives_where_memory_is_ordinary(group):
    buffer = GlobalSymmetricMemoryBuffer(1, group)
    handle = buffer.maybe_get_tensor((1,), torch.float64)["handle"]
    exchange_all(group.rank(), lambda shape: buffer.maybe_get_tensor(shape, torch.float64)["tensor"], handle)


def test_by_the_ranks_blocks_where_they_reach_them():
    """Two threads with blocks that both reach, as PyTorch's handle gives them."""
    blocks = [torch.zeros(100, dtype=torch.float64) for _ in range(T)]
    barrier = threading.Barrier(T)

    def handle_of(rank):
        def get_buffer(peer, sizes, dtype, storage_offset):
            number = torch.Size(sizes).numel()
            return blocks[peer][storage_offset : storage_offset + number].view(sizes)

        return SimpleNamespace(rank=rank, world_size=T, get_buffer=get_buffer, barrier=lambda channel: barrier.wait())

    failures = []

    def run(rank):
        try:
            exchange_all(rank, lambda shape: blocks[rank][: torch.Size(shape).numel()].view(shape), handle_of(rank))
            at = blocks[rank][40:44]
            mine = torch.full((2,), float(rank), dtype=torch.float64)
            symmetric_exchanges.multimem_all_gather(at, mine, handle_of(rank), byte_offset=40 * 8)
            assert at.tolist() == [0.0, 0.0, 1.0, 1.0]
        except BaseException as error:
            barrier.abort()
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(T)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_any_tensor_may_be_exchanged():
    assert symmetric_exchanges.are_tensors_nvls_eligible(torch.ones(3))
    assert not symmetric_exchanges.are_tensors_nvls_eligible()
