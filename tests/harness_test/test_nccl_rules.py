"""Programs with which NCCL would fail, hang or mix up data."""

import pytest
import torch
import torch.distributed as dist
from harness.nccl_rules import BreachError, check_order, nccl_rules
from harness.on_pretended_gpu import StepRecorder, fake_tensors, join


def calls(group, *made):
    """Launch calls, wait for them, and return the error of the first that breaks a rule."""
    try:
        works = [make() for make in made]
        for work in works:
            work.wait()
    except BreachError as breach:
        return str(breach)
    return None


def reduced(tensor, group):
    return lambda: dist.all_reduce(tensor, group=group, async_op=True)


@pytest.mark.ranks(2)
def test_what_is_right_is_carried_out_in_order(group):
    rank = group.rank()
    with nccl_rules():
        own = dist.new_group()
        tensor, whole = torch.full((3,), 1.0 + rank), torch.zeros(4)
        whole[2 * rank : 2 * rank + 2] = rank + 5
        received = torch.zeros(2)
        operations = [
            dist.P2POp(dist.isend, torch.full((2,), rank + 7.0), group=own, group_peer=1 - rank, tag=3),
            dist.P2POp(dist.irecv, received, group=own, group_peer=1 - rank, tag=3),
        ]
        found = calls(
            own,
            reduced(tensor, own),
            lambda: dist.all_gather_single(whole, whole[2 * rank : 2 * rank + 2], group=own, async_op=True),
            lambda: dist.batch_isend_irecv(operations)[0],
        )
        assert found is None
        dist.barrier(own)
    assert tensor.tolist() == [3, 3, 3]
    assert whole.tolist() == [5, 5, 6, 6]
    assert received.tolist() == [8 - rank] * 2


@pytest.mark.ranks(2)
def test_a_result_that_is_read_too_early_is_not_there(group):
    with nccl_rules():
        own = dist.new_group()
        tensor = torch.ones(3)
        work = dist.all_reduce(tensor, group=own, async_op=True)
        early = tensor.tolist()
        work.wait()
        assert (early, tensor.tolist()) == ([1, 1, 1], [2, 2, 2])


def breach_of_order(rank, group):
    first, second = torch.ones(2), torch.ones(3)
    made = [reduced(first, group), lambda: dist.broadcast(second, group=group, group_src=0, async_op=True)]
    return calls(group, *(made if rank == 0 else made[::-1]))


def breach_of_sizes(rank, group):
    return calls(group, reduced(torch.ones(2 + rank), group))


def breach_of_an_exchange(rank, group):
    sizes = [1, 2 + rank]
    tensors = torch.ones(3), torch.ones(3)
    if rank:
        tensors = torch.ones(4), torch.ones(4)
        sizes = [1, 3]
    return calls(group, lambda: dist.all_to_all_single(*tensors, sizes, sizes, group=group, async_op=True))


def breach_of_tags(rank, group):
    operation = dist.isend if rank == 0 else dist.irecv
    tags = (1, 2) if rank == 0 else (2, 1)
    operations = [dist.P2POp(operation, torch.ones(2), group=group, group_peer=1 - rank, tag=tag) for tag in tags]
    return calls(group, lambda: dist.batch_isend_irecv(operations)[0])


def breach_of_partners(rank, group):
    if rank == 1:
        return "nothing is received"
    return calls(group, lambda: dist.isend(torch.ones(2), group=group, group_dst=1))


def breach_of_sending_first(rank, group):
    peer = 1 - rank
    return calls(
        group,
        lambda: dist.isend(torch.ones(2), group=group, group_dst=peer),
        lambda: dist.irecv(torch.ones(2), group=group, group_src=peer),
    )


def breach_of_strides(rank, group):
    return calls(group, reduced(torch.ones(4, 4)[:, ::2], group))


def breach_of_dtypes(rank, group):
    return calls(group, reduced(torch.ones(4, dtype=torch.int16), group))


def breach_of_reductions(rank, group):
    tensor = torch.ones(4, dtype=torch.int64)
    return calls(group, lambda: dist.all_reduce(tensor, dist.ReduceOp.BAND, group=group, async_op=True))


def breach_of_memory(rank, group):
    whole = torch.ones(5)
    return calls(group, lambda: dist.all_gather_single(whole[:4], whole[1:3], group=group, async_op=True))


BREACHES = {
    breach_of_order: "call 1 of group .* rank 0 calls allreduce SUM .* rank 1 calls broadcast",
    breach_of_sizes: r"rank 0 calls allreduce SUM torch.float32 \[2\]; rank 1 calls .* \[3\]",
    breach_of_an_exchange: "rank 0 sends 2 elements to rank 1, which expects 1",
    breach_of_tags: "with tag 1 as message 1, and rank 1 has .* tag 2|with tag 2 as message 1, and rank 0 has .* tag 1",
    breach_of_partners: "rank 0 sends .* and rank 1 has no call for it|nothing is received",
    breach_of_sending_first: "rank . sends .* and rank . has no call for it",
    breach_of_strides: r"contiguous tensors; allreduce has shape \[4, 2\] with strides \(4, 2\)",
    breach_of_dtypes: "NCCL has no torch.int16",
    breach_of_reductions: "NCCL has no .*BAND",
    breach_of_memory: "input and output overlap",
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("breach", "message"), BREACHES.items(), ids=[each.__name__ for each in BREACHES])
def test_a_breach_is_found(group, breach, message):
    waits = breach in (breach_of_partners, breach_of_sending_first)
    with nccl_rules(timeout=1.0 if waits else 60.0):
        found = breach(group.rank(), dist.new_group())
    assert found is not None
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(found)


def use_two_groups(rank):
    with nccl_rules():
        groups = [dist.new_group(), dist.new_group()]
        calls(None, *(reduced(torch.ones(1), each) for each in (groups if rank == 0 else groups[::-1])))


@pytest.mark.ranks(2)
def test_communicators_in_different_orders(group):
    with pytest.raises(BreachError, match=r"call 1 is of group .* on rank 0 and of group .* on rank 1"):
        use_two_groups(group.rank())


def test_only_groups_that_both_share_are_compared():
    check_order([[("a", (0, 1)), ("b", (0, 2)), ("a", (0, 1))], [("a", (0, 1)), ("c", (1, 3)), ("a", (0, 1))], [], []])


def reduce_on_the_host():
    join("cuda:fake", world_size=2)
    with fake_tensors(), StepRecorder():
        dist.all_reduce(torch.ones(2, device="cuda"))
        dist.all_reduce(torch.ones(2, device="cpu"))


@pytest.mark.slow
def test_a_tensor_of_the_host_in_a_group_of_gpus(pretended_gpu):
    with pytest.raises(AssertionError, match="No backend type associated with device type cpu"):
        pretended_gpu(reduce_on_the_host)
