"""Triton's interpreter runs each kernel without a GPU: all cases of it equal its definition."""

import pytest
from triton_programs import run_program


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "number"),
    [
        # Four dtypes with six cases each, and the special ones.
        ("elementwise", 4 * 6 + 5),
        # Four dtypes with four sets of options, and the special ones.
        ("loss", 20),
        ("decode", 3 + 5 + 1),
        ("reduce_norm", 4 * 2 + 4),
    ],
)
def test_interpreted_kernels_equal_their_definition(kernels, number):
    outcomes = run_program(f"interpreted_{kernels}.py", TRITON_INTERPRET="1")
    failures = [f"{case}:\n{failure}" for case, failure in outcomes.items() if failure is not None]
    assert not failures, "\n".join(failures)
    assert len(outcomes) == number
