"""Megatron's number of micro-batches per step: global batch size / (micro-batch size * data-parallel size)."""

import functools
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.megatron.absent import absent_names
from shardwise.megatron.errors import AssertedConfigError
from shardwise.megatron.surface import offer

__getattr__ = absent_names("num_microbatches_calculator")


class NumMicroBatchesCalculator:
    """Computes the number of micro-batches per step.

    Args:
        global_batch_size: number of samples per step.
        micro_batch_size: number of samples per micro-batch.
        data_parallel_size: number of ranks that share a step.
        decrease_batch_size_if_needed: whether to drop samples that do not fill a micro-batch on each rank.
        rank: no effect, because nothing is logged.

    Attributes:
        num_micro_batches, current_global_batch_size, micro_batch_size: sizes of the next step.
        current_running_global_batch_size: global batch size without dropped samples.

    Raises:
        AssertedConfigError: the sizes do not divide the global batch, or leave no micro-batch.
    """

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool = False,
        rank: int = 0,
    ) -> None:
        self.micro_batch_size = micro_batch_size
        number, left_out = divmod(global_batch_size, max(1, micro_batch_size * data_parallel_size))
        if min(number, micro_batch_size, data_parallel_size) < 1 or (left_out and not decrease_batch_size_if_needed):
            raise AssertedConfigError(
                f"a global batch of {global_batch_size} samples is no whole number of micro-batches of "
                f"{micro_batch_size} on each of {data_parallel_size} data-parallel ranks; change one of them"
            )
        self.num_micro_batches = number
        self.current_global_batch_size = global_batch_size
        self.current_running_global_batch_size = global_batch_size - left_out

    def get(self) -> int:
        """Number of micro-batches."""
        return self.num_micro_batches

    def update(self, consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
        """Go to the step after ``consumed_samples``; the batch size is constant."""


class ConstantNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """Calculator for a constant batch size."""


_current: NumMicroBatchesCalculator | None = None


def _calculator() -> NumMicroBatchesCalculator:
    if _current is None:
        raise ConfigError("the number of micro-batches is not known; call init_num_microbatches_calculator first")
    return _current


def get_num_microbatches() -> int:
    """Number of micro-batches of the next step."""
    return _calculator().get()


def get_current_global_batch_size() -> int:
    """Number of samples in the next step."""
    return _calculator().current_global_batch_size


def get_micro_batch_size() -> int:
    """Number of samples in a micro-batch."""
    return _calculator().micro_batch_size


def get_current_running_global_batch_size() -> int:
    """Number of samples in the next step, without samples that the ranks cannot share evenly."""
    return _calculator().current_running_global_batch_size


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
    """Go to the step after ``consumed_samples``."""
    _calculator().update(consumed_samples, consistency_check, verbose)


def unset_num_microbatches_calculator() -> None:
    """Remove the calculator."""
    global _current
    _current = None


destroy_num_microbatches_calculator = unset_num_microbatches_calculator


def reconfigure_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: list[int] | None = None,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    data_parallel_size: int | None = None,
    decrease_batch_size_if_needed: bool = False,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> None:
    """Replace the calculator that the functions of this module use.

    Args:
        rank: no effect, because nothing is logged.
        global_batch_size, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed: as in
            ``NumMicroBatchesCalculator``.
        rampup_batch_size, step_batch_size_schedule: not supported.
        seq_length: no effect.

    Raises:
        AssertedConfigError: sizes are missing, or do not divide the global batch.
        ConfigError: the batch size is not constant.
    """
    global _current
    if rampup_batch_size is not None or step_batch_size_schedule is not None:
        raise ConfigError(
            f"rampup_batch_size is {rampup_batch_size} and step_batch_size_schedule {step_batch_size_schedule!r}, and "
            "the batch size does not change here; call reconfigure_num_microbatches_calculator to change it"
        )
    if global_batch_size is None or micro_batch_size is None or data_parallel_size is None:
        raise AssertedConfigError("give global_batch_size, micro_batch_size and data_parallel_size")
    sizes = global_batch_size, micro_batch_size, data_parallel_size
    _current = ConstantNumMicroBatchesCalculator(*sizes, decrease_batch_size_if_needed, rank)


@functools.wraps(reconfigure_num_microbatches_calculator, assigned=())
def init_num_microbatches_calculator(*args: Any, **kwargs: Any) -> None:
    """Like ``reconfigure_num_microbatches_calculator``, for the first calculator.

    Raises:
        AssertedConfigError: there is a calculator already.
    """
    if _current is not None:
        raise AssertedConfigError(
            "the calculator exists already; call reconfigure_num_microbatches_calculator to change it"
        )
    reconfigure_num_microbatches_calculator(*args, **kwargs)


offer(globals(), "destroy_num_microbatches_calculator")
