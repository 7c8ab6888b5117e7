"""The local steps of the loss, put together as a program would, against the dense loss."""

import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_bit_equal, assert_close_to, assert_unmodified

from shardwise.core.sharding import balanced_sizes
from shardwise.tensor_parallel.cross_entropy import VocabParallelCrossEntropy, vocab_parallel_cross_entropy


def reduced(tensor, group, op=torch.distributed.ReduceOp.SUM):
    result = tensor.clone()
    torch.distributed.all_reduce(result, op=op, group=group)
    return result


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2 * 2**-8)], ids=str
)
def test_together_they_are_the_loss(group, dtype, rtol):
    sizes = balanced_sizes(101, group.size())
    start, stop = sum(sizes[: group.rank()]), sum(sizes[: group.rank() + 1])
    whole = (3 * torch.randn(5, 2, 101, dtype=torch.float64)).to(dtype)
    target = torch.randint(101, (5, 2))
    grad_output = torch.rand(5, 2, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))
    dense = whole.double().clone().requires_grad_()
    expected = F.cross_entropy(dense.flatten(0, 1), target.flatten(), reduction="none").view(5, 2)
    expected.backward(grad_output.double())

    steps, logits = VocabParallelCrossEntropy, whole[..., start:stop].contiguous()
    with assert_unmodified(logits, target, grad_output):
        wide, maximum = steps.calculate_logits_max(logits)
        maximum = reduced(maximum, group, torch.distributed.ReduceOp.MAX)
        with assert_unmodified(wide, maximum):
            mask, masked, predicted, total, exponentials = steps.calculate_predicted_logits(
                wide, target, maximum, start, stop
            )
        predicted, total = reduced(predicted, group), reduced(total, group)
        with assert_unmodified(exponentials, predicted, total):
            softmax, loss = steps.calculate_cross_entropy_loss(exponentials, predicted, total)
        with assert_unmodified(softmax, mask, masked):
            grad_2d, arange, update, grad_input = steps.prepare_gradient_calculation_operands(softmax, mask)
            gradient = steps.calculate_gradients(grad_2d, arange, masked, update, grad_input, grad_output)
    assert loss.dtype == wide.dtype == grad_output.dtype
    assert_bit_equal(mask, (target < start) | (target >= stop))
    assert masked.shape == (10,)
    assert_close_to(loss.double(), expected.detach(), rtol_of_norm=1e-12 if dtype == torch.float64 else 1e-5)
    error = torch.linalg.vector_norm(gradient.double() - dense.grad[..., start:stop])
    assert float(error) <= rtol * float(torch.linalg.vector_norm(dense.grad))
    # One definition of the loss.
    one = vocab_parallel_cross_entropy(logits, target, tp_group=group, vocab_size=101)
    assert_close_to(loss, one, rtol_of_norm=1e-12 if dtype == torch.float64 else 1e-6)
