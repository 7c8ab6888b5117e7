"""The linear functions as programs call them: each with its own order of arguments."""

import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_close_to, assert_unmodified

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError, TopologyError
from shardwise.core.sharding import balanced_sizes
from shardwise.tensor_parallel.layers import (
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)

I, O = 7, 13  # noqa: E741


class Problem:
    """A column-parallel linear on this rank, and the gradients that the dense one has."""

    def __init__(self, group, s, sequence_parallel):
        t, me = group.size(), group.rank()
        rows = balanced_sizes(s, t)
        columns = balanced_sizes(O, t)
        x = torch.randn(s, 2, I, dtype=torch.float64)
        weight = torch.randn(O, I, dtype=torch.float64)
        bias = torch.randn(O, dtype=torch.float64)
        incoming = torch.randn(s, 2, O, dtype=torch.float64)
        dense = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        output = F.linear(*dense)
        output.backward(incoming)
        self.output = output.detach().split(columns, -1)[me]
        self.incoming = incoming.split(columns, -1)[me].contiguous()
        self.x = (x.split(rows)[me] if sequence_parallel else x).clone().requires_grad_()
        self.x_grad = dense[0].grad.split(rows)[me] if sequence_parallel else dense[0].grad
        self.weight = weight.split(columns)[me].clone().requires_grad_()
        self.weight_grad = dense[1].grad.split(columns)[me]
        self.bias = bias.split(columns)[me].clone().requires_grad_()
        self.bias_grad = dense[2].grad.split(columns)[me]

    def check(self, output, *, frozen):
        output.backward(self.incoming)
        assert_close_to(output.detach(), self.output, rtol_of_norm=1e-12)
        assert_close_to(self.x.grad, self.x_grad, rtol_of_norm=1e-12)
        assert_close_to(self.bias.grad, self.bias_grad, rtol_of_norm=1e-12)
        if frozen:
            assert self.weight.grad is None
        else:
            assert_close_to(self.weight.grad, self.weight_grad, rtol_of_norm=1e-12)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_each_order_of_arguments(group, sequence_parallel):
    s = 13
    reduces = not sequence_parallel
    problem = Problem(group, s, sequence_parallel)
    with assert_unmodified(problem.x, problem.weight, problem.bias, problem.incoming):
        output = linear_with_grad_accumulation_and_async_allreduce(
            problem.x, problem.weight, problem.bias, False, reduces, sequence_parallel, None, 0, None, group,
            sequence_length=s,
        )  # fmt: skip
        problem.check(output, frozen=False)
    problem = Problem(group, s, sequence_parallel)
    with assert_unmodified(problem.x, problem.weight, problem.bias, problem.incoming):
        output = linear_with_frozen_weight(
            problem.x, problem.weight, problem.bias, False, reduces, sequence_parallel, group, None, None,
            sequence_length=s,
        )  # fmt: skip
        # A frozen weight does not freeze the bias.
        problem.check(output, frozen=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_the_frozen_linear_keeps_no_input(group, sequence_parallel):
    problem, kept = Problem(group, 12, sequence_parallel), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        linear_with_frozen_weight(
            problem.x, problem.weight, problem.bias, False, not sequence_parallel, sequence_parallel, group
        )
    assert {tensor.data_ptr() for tensor in kept} == {problem.weight.data_ptr()}


@pytest.mark.ranks(2)
def test_nothing_is_reduced_unless_asked(group):
    problem = Problem(group, 12, False)
    with CollectiveCounter() as counter:
        for function in (linear_with_grad_accumulation_and_async_allreduce, linear_with_frozen_weight):
            function(problem.x, problem.weight, problem.bias, False, False, False, tp_group=None).sum().backward()
    assert counter.launches == []


@pytest.mark.ranks(2)
def test_what_cannot_be(group):
    problem = Problem(group, 12, False)
    for function in (linear_with_grad_accumulation_and_async_allreduce, linear_with_frozen_weight):
        arguments = (problem.x, problem.weight, None, False)
        with pytest.raises(ConfigError, match="allreduce_dgrad and sequence_parallel are both set"):
            function(*arguments, True, True, tp_group=group)
        for flags in ((True, False), (False, True)):
            with pytest.raises(TopologyError, match="no group was given"):
                function(*arguments, *flags, tp_group=None)
        with pytest.warns(UserWarning, match="async_grad_allreduce is deprecated") as told:
            output = function(*arguments, True, False, tp_group=group, async_grad_allreduce=False)
        assert told[0].filename == __file__
        # Unused: the gradient is reduced all the same.
        with CollectiveCounter() as counter:
            output.sum().backward()
        assert len(counter.launches) == 1
