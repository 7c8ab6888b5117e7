"""The compiled CPU kernels against the reference in fp64, and what happens where nothing can be compiled."""

import pytest
import torch
from harness.parity import assert_bit_equal, assert_close_to

from shardwise.kernels import compiled as loss_cpu, dispatch, loss_reference
from shardwise.kernels.compiled import compile_c
from shardwise.kernels.dispatch import loss_kernels

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def compiled(monkeypatch):
    """Compiled code at any size."""
    if (reason := loss_cpu.why_not("loss_cpu.c")) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(dispatch.LOSS_CPU, "min_size", 1)


def rows_of(n, v, dtype, level=0.0):
    logits = (level + 4 * torch.randn(n, v)).to(dtype)
    target = torch.randint(-1, v, (n,))
    target[0], target[-1] = -1, v - 1
    return logits, target


def numbers_of(n, maximum):
    """Shift, scale and target of a gradient, with one ignored row."""
    scale, at_target, rest = torch.rand(n), torch.randn(n), torch.rand(n) / 10
    for of_rows in (scale, at_target, rest):
        of_rows[1] = 0.0
    return maximum + torch.rand(n), scale, at_target, rest


# Around the lengths that the inner loops take at once, and several chunks.
@pytest.mark.parametrize("num_columns", [1, 63, 64, 65, 1023, 1024, 3 * 1024 + 77])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("compiled")
def test_equal_to_the_reference(dtype, num_columns):
    for level, temperature in ((0.0, 1.0), (0.0, 0.7), (1e4, 1.0), (-1e4, 1.0)):
        logits, target = rows_of(5, num_columns, dtype, level)
        exact = loss_reference.row_statistics(logits.double(), target, temperature=temperature, want_sum=True)
        statistics = loss_cpu.row_statistics(logits, target, temperature=temperature, want_sum=True)
        assert_close_to(statistics[:, 0].double(), exact[:, 0], rtol_of_norm=1e-7)
        assert_close_to(statistics[:, 1].double(), exact[:, 1], rtol_of_norm=2e-6, name="sum of exponentials")
        owned = target >= 0
        assert bool((statistics[~owned, 2] == -torch.inf).all())
        for column in (statistics[owned, 2], exact[owned, 2]), (statistics[:, 3], exact[:, 3]):
            assert float((column[0].double() - column[1]).abs().max()) <= 2e-6 * (1 + float(column[1].abs().max()))
        three = loss_cpu.row_statistics(logits, target, temperature=temperature)
        assert_bit_equal(three, statistics[:, :3].contiguous())

        shift, scale, at_target, rest = numbers_of(5, statistics[:, 0])
        for uniform in (None, rest):
            numbers = [target, shift, scale, at_target, uniform]
            wide = [x.double() if x is not None and x.is_floating_point() else x for x in numbers]
            exact = torch.empty(5, num_columns, dtype=torch.float64)
            loss_reference.gradient_(exact, logits.double(), *wide, temperature=temperature)
            gradient = torch.empty_like(logits)
            loss_cpu.gradient_(gradient, logits, *numbers, temperature=temperature)
            rounding = 2e-6 if dtype == torch.float32 else 2.0**-8
            assert_close_to(gradient.double(), exact, rtol_of_norm=rounding, name="gradient")
            inplace = logits.clone()
            loss_cpu.gradient_(inplace, inplace, *numbers, temperature=temperature)
            assert_bit_equal(inplace, gradient)

        exponentials, exact = logits.clone(), logits.double()
        statistics = loss_cpu.row_statistics(
            exponentials, target, temperature=temperature, want_sum=True, exponentiate_=True
        )
        assert_bit_equal(statistics[:, :3].contiguous(), three)
        loss_reference.row_statistics(exact, target, temperature=temperature, exponentiate_=True)
        assert_close_to(exponentials.double(), exact, rtol_of_norm=2.0**-8 if dtype == torch.bfloat16 else 2e-6)
        assert exponentials[owned].gather(1, target[owned, None]).tolist() == [[0.0]] * int(owned.sum())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("compiled")
def test_infinities_and_nan_as_in_the_reference(dtype):
    inf, nan = torch.inf, torch.nan
    logits = torch.randn(6, 2100).to(dtype)
    logits[0, :1500] = -inf
    logits[1] = -inf
    logits[2, 1::2] = -inf
    logits[3, 1700] = nan
    logits[4, 5] = inf
    logits[5, 2090] = -3e38
    target = torch.tensor([3, 5, 2, 8, 9, 2090])
    ours = loss_cpu.row_statistics(logits, target)
    theirs = loss_reference.row_statistics(logits, target)
    assert_close_to(ours[[0, 1, 2, 5]], theirs[[0, 1, 2, 5]], rtol_of_norm=1e-6)
    assert ours[[0, 1], 2].tolist() == [-inf, -inf]
    assert bool(ours[3:5, 1].isnan().all())
    assert bool(theirs[3:5, 1].isnan().all())
    # Rows of zeros stay zeros whatever the logits are, and a forbidden id has no gradient at all.
    gradient = torch.empty_like(logits)
    zeros = torch.zeros(6)
    scale = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    for kernels in (loss_cpu, loss_reference):
        gradient.fill_(torch.nan)
        kernels.gradient_(gradient, logits, torch.full((6,), -1), ours[:, 0], scale, zeros)
        assert gradient[[1, 3, 4]].abs().sum().item() == 0.0
        assert gradient[2, 1::2].abs().sum().item() == 0.0
        assert gradient[2, ::2].min().item() > 0.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("compiled")
def test_strides_and_threads_change_nothing(dtype):
    whole, target = rows_of(7, 300, dtype)
    inside = torch.empty(7, 411, dtype=dtype)[:, 50:350].copy_(whole)
    expected = loss_cpu.row_statistics(whole, target)
    numbers = numbers_of(7, expected[:, 0])
    gradient = torch.empty_like(whole)
    loss_cpu.gradient_(gradient, whole, target, *numbers)
    before = torch.get_num_threads()
    for num_threads in (1, 3, 16):
        torch.set_num_threads(num_threads)
        try:
            assert_bit_equal(loss_cpu.row_statistics(inside, target), expected)
            strided = torch.full((7, 500), 9.0, dtype=dtype)
            loss_cpu.gradient_(strided[:, 100:400], inside, target, *numbers)
        finally:
            torch.set_num_threads(before)
        assert_bit_equal(strided[:, 100:400].contiguous(), gradient)
        assert strided[:, :100].eq(9.0).all()
        assert strided[:, 400:].eq(9.0).all()
    # Columns that do not lie side by side are the reference's.
    across = whole.t().contiguous().t()
    assert loss_kernels(whole, inside) is loss_cpu
    for matrices in ((across,), (whole, across)):
        assert loss_kernels(*matrices) is loss_reference


@pytest.mark.usefixtures("compiled")
def test_autograd_is_told_of_what_is_written():
    logits, target = rows_of(3, 200, torch.float32)
    for write in (
        lambda x: loss_cpu.row_statistics(x, target, exponentiate_=True),
        lambda x: loss_cpu.gradient_(x, x, target, *(torch.ones(3),) * 3),
    ):
        x = logits.clone()
        version = x._version
        write(x)
        assert x._version > version


def test_small_and_other_logits_are_the_references(monkeypatch):
    def never(source, defines):
        raise AssertionError("compiled for nothing")

    monkeypatch.setattr("shardwise.kernels.compiled.compile_c", never)
    logits, _ = rows_of(4, 100, torch.float32)
    assert loss_kernels(logits) is loss_reference
    monkeypatch.setattr(dispatch.LOSS_CPU, "min_size", 1)
    for other in (logits.double(), logits.half(), logits[:, :0]):
        assert loss_kernels(other) is loss_reference
    assert loss_kernels(logits, softcap=5.0) is loss_reference
    nothing = loss_reference.row_statistics(logits[:, :0], torch.full((4,), -1))
    assert nothing.tolist() == [[-torch.inf, 0.0, -torch.inf]] * 4


@pytest.mark.parametrize("trouble", ["no compiler", "a compiler that fails", "a compiler that cannot be run"])
def test_without_a_compiler_the_reference_computes_and_the_reason_is_told(monkeypatch, tmp_path, trouble):
    path = tmp_path / "cc"
    expected = {"no compiler": "no C compiler"}.get(trouble, str(path))
    if trouble == "a compiler that fails":
        path.write_text("#!/bin/sh\necho out of order >&2\nexit 1\n")
        path.chmod(0o755)
        expected = f"{path}: out of order"
    elif trouble == "a compiler that cannot be run":
        path.write_text("#!/nowhere/interpreter\n")
        path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing") if trouble == "no compiler" else str(tmp_path))
    monkeypatch.setattr(dispatch.LOSS_CPU, "min_size", 1)
    compile_c.cache_clear()
    try:
        logits, _ = rows_of(4, 100, torch.float32)
        assert loss_kernels(logits) is loss_reference
        assert loss_cpu.why_not("loss_cpu.c").startswith(expected)
    finally:
        compile_c.cache_clear()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("default", ["dtype", "device"])
def test_defaults_of_the_program_do_not_matter(default, monkeypatch):
    logits, target = rows_of(5, 64, torch.float32)
    expected = loss_cpu.row_statistics(logits, target)
    try:
        if default == "dtype":
            torch.set_default_dtype(torch.float64)
        else:
            torch.set_default_device("meta")
        assert_bit_equal(loss_cpu.row_statistics(logits, target), expected)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
