"""Messages between stages by Megatron's communicator: what arrives is what was sent, in either direction."""

import pytest
import torch
from harness.parity import assert_bit_equal

from shardwise import parallel_state
from shardwise.core.errors import ConfigError
from shardwise.megatron import p2p_communication as p2p
from shardwise.megatron.config import ModelParallelConfig
from shardwise.megatron.p2p_communication import P2PCommunicator, is_single_shape


def sent_by(rank, number):
    return torch.arange(6.0, dtype=torch.float64).view(3, 2) + 100 * rank + 10 * number


@pytest.mark.ranks(2, 3)
def test_what_arrives_is_what_was_sent(group):
    talk = P2PCommunicator(group, ModelParallelConfig(pipeline_dtype=torch.float64))
    me, t = group.rank(), group.size()
    first, last, shape = talk.is_pp_first_stage, talk.is_pp_last_stage, (3, 2)
    assert (first, last, talk.current_stage, talk.total_stages) == (me == 0, me == t - 1, me, t)
    assert (talk.next_rank, talk.prev_rank) == ((me + 1) % t, (me - 1) % t)

    # Down the stages and back, one tensor and a list of two.
    received = talk.recv_forward(shape, first)
    assert (received is None) == first
    if not first:
        assert_bit_equal(received.detach(), sent_by(me - 1, 0))
        assert received.requires_grad
    talk.send_forward(sent_by(me, 0).t().contiguous().t(), last)
    gradients = talk.recv_backward([shape, torch.Size(shape)], last)
    for number, gradient in enumerate(gradients):
        assert (gradient is None) == last
        if not last:
            assert_bit_equal(gradient.detach(), sent_by(me + 1, number))
    talk.send_backward([sent_by(me, 0), sent_by(me, 1)], first)

    # Both ways between two neighbours.
    if me % 2 == 0:
        arrived, whose = talk.send_forward_recv_backward(sent_by(me, 2), shape, last), me + 1
        assert (arrived is None) == last
    else:
        arrived, whose = talk.send_backward_recv_forward(sent_by(me, 2), shape, False), me - 1
    if arrived is not None:
        assert_bit_equal(arrived.detach(), sent_by(whose, 2))

    # Round the circle; of two stages both neighbours are one rank.
    forward, backward = sent_by(me, 3), sent_by(me, 4)
    states, gradient = talk.send_forward_backward_recv_forward_backward(forward, backward, True, True, shape)
    assert_bit_equal(states.detach(), sent_by((me - 1) % t, 3))
    assert_bit_equal(gradient.detach(), sent_by((me + 1) % t, 4))
    assert_bit_equal(talk.send_forward_recv_forward(forward, True, shape).detach(), sent_by((me - 1) % t, 3))
    later, works = talk.send_backward_recv_backward(backward, True, shape, overlap_p2p_comm=True)
    for work in works:
        work.wait()
    assert_bit_equal(later.detach(), sent_by((me + 1) % t, 4))
    assert talk.send_forward_recv_forward(None, False, shape) is None

    with pytest.raises(ConfigError, match=r"a tensor of torch\.float32 is to be sent, and pipeline_dtype is .*64"):
        talk.send_forward(torch.zeros(3, 2), False)


@pytest.mark.ranks(2)
def test_with_variable_lengths_the_senders_shape_counts(group):
    talk = P2PCommunicator(group, ModelParallelConfig(pipeline_dtype=torch.float64, variable_seq_lengths=True))
    me, guess = group.rank(), (9, 9, 4)
    # Hidden states of other lengths in both directions at once, and gradients of none.
    mine, theirs = (torch.full((3 + 4 * rank, 1 + rank, 4), float(rank), dtype=torch.float64) for rank in (me, 1 - me))
    states, gradient = talk.send_forward_backward_recv_forward_backward(mine, mine[:0], True, True, guess)
    assert_bit_equal(states.detach(), theirs)
    assert states.requires_grad
    assert gradient.shape == (0, 2 - me, 4)
    later, works = talk.send_forward_recv_forward(mine[1:], True, guess, overlap_p2p_comm=True)
    for work in works:
        work.wait()
    assert_bit_equal(later.detach(), theirs[1:])
    if me == 0:
        talk.send_forward([mine, mine[:1]], False)
    else:
        for received, expected in zip(talk.recv_forward([guess, guess], False), (theirs, theirs[:1]), strict=True):
            assert_bit_equal(received.detach(), expected)


def test_a_shape_is_told_from_a_list_of_them():
    assert is_single_shape((3, 2))
    assert is_single_shape(torch.Size([]))
    assert not is_single_shape([(3, 2)])
    assert not is_single_shape([])


@pytest.mark.ranks(2)
def test_functions_of_older_releases(group):
    parallel_state.initialize_model_parallel(1, 2)
    config = ModelParallelConfig(pipeline_dtype=torch.float64)
    if group.rank() == 0:
        assert p2p.recv_forward((3, 2), config) is None
        p2p.send_forward(sent_by(0, 0), config)
        gradient = p2p.send_forward_recv_backward(sent_by(0, 1), (3, 2), config)
        assert_bit_equal(gradient.detach(), sent_by(1, 0))
        assert_bit_equal(p2p.recv_backward((3, 2), config).detach(), sent_by(1, 1))
        p2p.send_backward(sent_by(0, 2), config)
    else:
        assert_bit_equal(p2p.recv_forward((3, 2), config).detach(), sent_by(0, 0))
        states = p2p.send_backward_recv_forward(sent_by(1, 0), (3, 2), config)
        assert_bit_equal(states.detach(), sent_by(0, 1))
        p2p.send_backward(sent_by(1, 1), config)
        p2p.send_forward(sent_by(1, 2), config)
        assert p2p.recv_backward((3, 2), config) is None


def test_the_order_of_interleaved_passes():
    assert p2p.get_schedule_table(5, 2, 2) == [
        *((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1), (4, 0), (4, 1))
    ]
