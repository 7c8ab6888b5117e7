"""The number of micro-batches of a step, as Megatron counts them."""

import pytest

from shardwise.core.errors import ConfigError
from shardwise.megatron import num_microbatches_calculator as calculator
from shardwise.megatron.errors import AssertedConfigError


@pytest.fixture(autouse=True)
def _forgotten():
    calculator.unset_num_microbatches_calculator()
    yield
    calculator.destroy_num_microbatches_calculator()


def test_the_batch_is_shared_out():
    with pytest.raises(ConfigError, match="call init_num_microbatches_calculator first"):
        calculator.get_num_microbatches()
    calculator.init_num_microbatches_calculator(0, None, 24, 2, 3)
    assert calculator.get_num_microbatches() == 4
    calculator.update_num_microbatches(1000)
    assert calculator.get_num_microbatches() == 4
    assert calculator.get_micro_batch_size() == 2
    assert calculator.get_current_global_batch_size() == calculator.get_current_running_global_batch_size() == 24
    with pytest.raises(AssertionError, match="exists already; call reconfigure"):
        calculator.init_num_microbatches_calculator(0, None, 24, 2, 3)
    calculator.reconfigure_num_microbatches_calculator(0, None, 25, 2, 3, decrease_batch_size_if_needed=True)
    assert calculator.get_num_microbatches() == 4
    assert calculator.get_current_global_batch_size() == 25
    assert calculator.get_current_running_global_batch_size() == 24
    assert calculator.ConstantNumMicroBatchesCalculator(8, 1, 2, False, 0).get() == 4


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((25, 2, 3), "25 samples is no whole number of micro-batches of 2 on each of 3"),
        ((0, 2, 3), "0 samples is no whole number"),
        ((24, 0, 3), "micro-batches of 0 on each"),
        ((24, 2, None), "give global_batch_size, micro_batch_size and data_parallel_size"),
    ],
)
def test_sizes_that_do_not_fit(sizes, message):
    with pytest.raises(AssertedConfigError, match=message):
        calculator.init_num_microbatches_calculator(0, None, *sizes)
    with pytest.raises(ConfigError, match="init_num_microbatches_calculator first"):
        calculator.get_num_microbatches()


def test_a_batch_that_grows_is_refused():
    with pytest.raises(ConfigError, match=r"rampup_batch_size is \[2, 2, 8\] .* the batch size does not change"):
        calculator.init_num_microbatches_calculator(0, [2, 2, 8], 24, 2, 3)
    with pytest.raises(ConfigError, match="step_batch_size_schedule '0:8', and the batch size does"):
        calculator.init_num_microbatches_calculator(0, None, 24, 2, 3, step_batch_size_schedule="0:8")
    with pytest.raises(ConfigError, match="StepBatchsizeNumMicroBatchesCalculator is not offered here"):
        calculator.StepBatchsizeNumMicroBatchesCalculator(2, 3, False, 0, "0:8")
