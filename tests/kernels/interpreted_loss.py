"""Run as a program under TRITON_INTERPRET=1: each case of the Triton kernels against the reference, as JSON.

A process of its own, since Triton reads the variable when it is imported.
"""

import numpy
import torch
from failing_cases import print_failures

from shardwise.kernels import dispatch, loss_reference, loss_triton
from shardwise.kernels.dispatch import loss_kernels

OPTIONS = {
    "plain": {},
    "cap": {"softcap": 5.0},
    "temperature": {"temperature": 0.7},
    "cap and temperature": {"softcap": 3.0, "temperature": 1.7},
}
# Of the numbers in the wide type, and of the result's rounding; the interpreter cuts bf16 off where the GPU rounds.
RTOL = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def logits_of(num_rows, num_columns, dtype, scale=3.0):
    # Rows of a wider matrix, as where the vocabulary is padded; of the usual 1005 columns they begin at multiples of 16
    # bytes, of others they may not.
    return (scale * torch.randn(num_rows, num_columns + 3, dtype=torch.float64)).to(dtype)[:, :num_columns]


def target_of(num_rows, num_columns):
    target = torch.randint(num_columns, (num_rows,))
    target[::3] = -1
    return target


def check_close(actual, expected, rtol, what, atol=1e-2):
    assert actual.dtype == expected.dtype, what
    finite = expected.isfinite()
    assert torch.equal(actual[~finite].nan_to_num(7.0), expected[~finite].nan_to_num(7.0)), (what, actual, expected)
    error = (actual[finite].double() - expected[finite].double()).abs()
    bound = rtol * expected[finite].double().abs() + rtol * atol
    assert bool((error <= bound).all()), (what, float((error / bound).max()) if error.numel() else 0.0)


def check_statistics(dtype, options, num_rows=4, num_columns=1005):
    logits, target = logits_of(num_rows, num_columns, dtype), target_of(num_rows, num_columns)
    wide = loss_reference.compute_dtype(dtype)
    for want_sum in (False, True):
        # The definition, in fp64.
        exponentials = logits.to(torch.float64, copy=True)
        expected = loss_reference.row_statistics(
            exponentials, target, want_sum=want_sum, exponentiate_=True, **options
        ).to(wide)
        before = logits.clone()
        actual = loss_triton.row_statistics(logits, target, want_sum=want_sum, **options)
        assert torch.equal(logits, before)
        check_close(actual, expected, RTOL[wide], "statistics")
        in_place = logits.clone()
        actual = loss_triton.row_statistics(in_place, target, want_sum=want_sum, exponentiate_=True, **options)
        check_close(actual, expected, RTOL[wide], "statistics")
        check_close(in_place, exponentials.to(dtype), RTOL[dtype], "exponentials")
        # Autograd hears of the write.
        assert in_place._version == 1


def check_gradient(dtype, options, num_rows=4, num_columns=1005):
    logits, target = logits_of(num_rows, num_columns, dtype), target_of(num_rows, num_columns)
    shift = loss_reference.row_statistics(logits, target, **options)[:, 0]
    scale, at_target, rest = (torch.rand(num_rows, dtype=shift.dtype) for _ in range(3))
    # An ignored token: nothing, whatever its logits are.
    scale[1] = at_target[1] = rest[1] = 0.0
    logits[1, -1] = torch.nan
    for given in ((shift, scale, at_target), (shift, scale, at_target, rest)):
        expected = torch.empty(num_rows, num_columns, dtype=torch.float64)
        loss_reference.gradient_(expected, logits.double(), target, *(x.double() for x in given), **options)
        actual = torch.full_like(logits, torch.nan)
        loss_triton.gradient_(actual, logits, target, *given, **options)
        check_close(actual, expected.to(dtype), RTOL[dtype], "gradient", atol=1.0)
        in_place = logits.clone()
        loss_triton.gradient_(in_place, in_place, target, *given, **options)
        assert torch.equal(in_place, actual)
        assert in_place._version == 1
        assert not actual[1].any()


def check_widths():
    """Less than a block, whole blocks, and one more; blocks of the smallest and the largest size."""
    for num_columns in (1, 16, 17, 4096, 4097):
        check_statistics(torch.float32, {}, 2, num_columns)
        check_gradient(torch.float32, {}, 2, num_columns)


def check_extremes():
    """Forbidden ids, rows of nothing else, huge logits, rows with NaN."""
    logits = torch.randn(8, 5000)
    logits[0, ::2] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 4999] = 1e4
    logits[3] -= 1e4
    logits[4] = 3e38
    logits[5, 4500] = torch.nan
    logits[6, 4500] = torch.inf
    logits[7, :4096] = -torch.inf
    target = torch.tensor([0, 1, 2, 3, 4, 5, 6, -1])
    for want_sum in (False, True):
        expected = loss_reference.row_statistics(logits, target, want_sum=want_sum)
        # The interpreter is NumPy, which warns of inf - inf.
        with numpy.errstate(invalid="ignore"):
            actual = loss_triton.row_statistics(logits, target, want_sum=want_sum)
        # A row with NaN or inf is told by its sum of exponentials; what else it has does not matter.
        assert bool(actual[5:7, 1].isnan().all())
        numbers = [0, 1, 2, 3, 4, 7]
        check_close(actual[numbers], expected[numbers], 2e-6, "statistics")


def check_what_is_left_to_the_reference():
    """Columns that do not lie side by side, and no logits at all; the CPU here stands for a GPU."""
    dispatch.LOSS_TRITON.device_type = "cpu"
    dispatch.LOSS_TRITON.missing = lambda call: None
    logits, across = torch.randn(4, 50), torch.randn(50, 4).t()
    assert loss_kernels(logits, softcap=5.0) is loss_triton
    assert loss_kernels(across[:, :1]) is loss_triton
    for matrices in ((across,), (logits, across), (torch.empty(0, 5),), (torch.empty(5, 0),)):
        assert loss_kernels(*matrices) is loss_reference


def check_rows_beyond_32_bits():
    """Three rows, the last of which begins more than 2^31 elements after the first. Untouched memory is not taken."""
    stride, num_columns = 2**30 + 8, 40
    memory = torch.empty(2 * stride + num_columns, dtype=torch.bfloat16)
    logits = memory.as_strided((3, num_columns), (stride, 1))
    logits.copy_(torch.randn(3, num_columns))
    target = torch.tensor([3, -1, 39])
    expected = loss_reference.row_statistics(logits.clone(), target)
    check_close(loss_triton.row_statistics(logits, target), expected, 2e-6, "statistics")
    row = torch.rand(3)
    gradient = torch.empty(3, num_columns, dtype=torch.bfloat16)
    loss_reference.gradient_(gradient, logits.clone(), target, row, row, row, row)
    loss_triton.gradient_(logits, logits, target, row, row, row, row)
    check_close(logits.clone(), gradient, 2**-7, "gradient")


def cases():
    for dtype in RTOL:
        for name, options in OPTIONS.items():
            yield f"{dtype}, {name}", lambda d=dtype, o=options: (check_statistics(d, o), check_gradient(d, o))
    for check in (check_widths, check_extremes, check_what_is_left_to_the_reference, check_rows_beyond_32_bits):
        yield check.__name__, check


def main():
    torch.manual_seed(0)
    print_failures(cases())


if __name__ == "__main__":
    main()
