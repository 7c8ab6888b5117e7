"""Triton's kernels on the GPU against their definitions: every case, more than 2^31 elements, repeated for races."""

from __future__ import annotations

import interpreted_adamw
import interpreted_elementwise
import interpreted_loss
import interpreted_reduce_norm
import pytest
import torch
import torch.distributed as dist
from conftest import REHEARSED

from shardwise.kernels import dispatch, loss_reference, loss_triton, triton_trial
from shardwise.kernels.elementwise import swiglu
from shardwise.kernels.norms import add_rms_norm


def all_cases():
    """Name and function of each case that the interpreter runs too, but for those that are about the interpreter."""
    for module in (interpreted_loss, interpreted_elementwise):
        for name, run in module.cases():
            if name != "check_what_is_left_to_the_reference":
                yield f"{module.__name__}: {name}", run
    for *sizes, bias, layer_norm in interpreted_reduce_norm.cases():
        name = f"reduce_norm: {sizes}, {bias=}, {layer_norm=}"
        yield name, lambda s=sizes, b=bias, n=layer_norm: interpreted_reduce_norm.check(*s, bias=b, layer_norm=n)


CASES = dict(all_cases())
# The suite has the others interpreted anyway.
NAMES = list(CASES) if not REHEARSED else [name for name in CASES if "float32" in name][::4]


@pytest.fixture
def one_rank():
    """A group of this process, for layers."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("kernels_on_the_device")
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_equals_its_definition(one_rank, device, name):
    torch.manual_seed(0)
    paths = [(path, path.device_type) for path in interpreted_elementwise.PATHS]
    try:
        with torch.device(device):
            CASES[name]()
    finally:
        for path, device_type in paths:
            path.device_type = device_type


@pytest.mark.usefixtures("kernels_on_the_device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_update_is_as_close_to_the_definition_as_pytorchs(device, dtype):
    path = dispatch.ADAMW_TRITON
    before = path.device_type, path.missing
    try:
        with torch.device(device):
            interpreted_adamw.check_distances(1 if REHEARSED else 100, dtype, 2.7)
    finally:
        path.device_type, path.missing = before


# On a CPU, PyTorch's FlexAttention has no backward.
@pytest.mark.parametrize("name", sorted(set(triton_trial.NAMES) - ({"flexible_attention"} if REHEARSED else set())))
def test_the_trial_of_a_kernel_succeeds_whatever_the_default_device(device, name):
    """By it ranks choose whether to use the kernel at all."""
    dtypes = [torch.float32] if REHEARSED else [torch.float32, torch.bfloat16, torch.float16]
    with torch.device("meta"):
        for dtype in dtypes:
            assert all(triton_trial.outcomes(name, dtype, device)), dtype


def of_rows(tensor, rows):
    return torch.cat([tensor[part] for part in rows]).double()


def test_the_loss_of_more_than_2_31_logits(device, full):
    """Of the first rows and the last, which no 32-bit offset finds."""
    num_rows, num_columns = (16_500, 131_072) if full else (40, 1_030)
    assert not full or num_rows * num_columns > 2**31
    torch.manual_seed(0)
    logits = torch.empty(num_rows, num_columns, dtype=torch.bfloat16, device=device).normal_(std=3.0)
    target = torch.randint(num_columns, (num_rows,), device=device)
    rows = (slice(0, 3), slice(num_rows - 3, num_rows))
    before = of_rows(logits, rows)
    of_target = torch.cat([target[part] for part in rows])
    expected = loss_reference.row_statistics(before.clone(), of_target)
    found = loss_triton.row_statistics(logits, target)
    torch.testing.assert_close(of_rows(found, rows), expected, rtol=1e-5, atol=1e-5)
    shift = found[:, 0].contiguous()
    scale = torch.full((num_rows,), 0.5, dtype=shift.dtype, device=device)
    gradient = torch.empty_like(before)
    parts = [torch.cat([x[part] for part in rows]).double() for x in (shift, scale, scale)]
    loss_reference.gradient_(gradient, before, of_target, *parts)
    loss_triton.gradient_(logits, logits, target, shift, scale, scale)
    torch.testing.assert_close(of_rows(logits, rows), gradient, rtol=2**-7, atol=1e-6)


@pytest.mark.usefixtures("kernels_on_the_device")
def test_elementwise_kernels_of_more_than_2_31_elements(device, full):
    num_rows, width = (270_000, 8_192) if full else (30, 40)
    assert not full or num_rows * width > 2**31
    torch.manual_seed(0)
    rows = (slice(0, 2), slice(num_rows - 2, num_rows))
    inner = torch.empty(num_rows, width, dtype=torch.bfloat16, device=device).normal_()
    gate, up = of_rows(inner, rows).chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(of_rows(swiglu(inner), rows), expected, rtol=2**-6, atol=2**-6)
    weight = torch.ones(width, dtype=torch.bfloat16, device=device)
    total, normed = add_rms_norm(inner, inner, weight, 1e-5)
    torch.testing.assert_close(of_rows(total, rows), 2 * of_rows(inner, rows), rtol=2**-7, atol=0.0)
    exact = torch.nn.functional.rms_norm(2 * of_rows(inner, rows), (width,), eps=1e-5)
    torch.testing.assert_close(of_rows(normed, rows), exact, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("num_columns", [40, 50_257])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_200_repeats_have_the_same_bits(device, full, dtype, num_columns):
    """A thread that reads what another has overwritten does so now and then."""
    num_rows, repeats = (512, 200) if full else (4, 3)
    num_columns = num_columns if full else min(num_columns, 300)
    torch.manual_seed(0)
    logits = torch.randn(num_rows, num_columns, device=device).to(dtype)
    target = torch.randint(num_columns, (num_rows,), device=device)

    def once():
        memory = logits.clone()
        found = loss_triton.row_statistics(memory, target, want_sum=True, exponentiate_=True)
        scale = torch.full((num_rows,), 0.5, dtype=found.dtype, device=device)
        gradient = logits.clone()
        loss_triton.gradient_(gradient, gradient, target, found[:, 0].contiguous(), scale, scale, scale)
        return memory, found, gradient

    first = once()
    differ = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(repeats):
        for one, other in zip(once(), first, strict=True):
            differ += (one != other).any()
    assert int(differ) == 0
