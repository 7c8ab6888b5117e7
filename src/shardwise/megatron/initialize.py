"""Megatron-DeepSpeed's ``megatron.initialize``: seeding, without its command line."""

import random
from typing import Any, NoReturn

import numpy as np
import torch

from shardwise.core.errors import ConfigError
from shardwise.megatron.core import parallel_state
from shardwise.megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

__all__ = ["initialize_megatron", "set_jit_fusion_options"]


def initialize_megatron(*args: Any, **options: Any) -> NoReturn:
    """Raise an error, because Megatron reads its command line here and Shardwise does not.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "megatron.initialize takes sizes and seed from Megatron's command line, which is not read here; call "
        "torch.distributed.init_process_group(), initialize_model_parallel() with the sizes, and "
        "model_parallel_cuda_manual_seed() with the seed"
    )


# It needs the same arguments.
_initialize_distributed = initialize_megatron


def set_jit_fusion_options() -> None:
    """Do nothing, because no kernel here uses TorchScript."""


def _set_random_seed(seed_: int, data_parallel_random_init: bool = False) -> None:
    """Seed Python's, NumPy's and PyTorch's generators and the random streams, differently on each pipeline stage.

    Args:
        seed_: seed, the same on every rank.
        data_parallel_random_init: whether to seed differently on each data-parallel rank too.

    Raises:
        ConfigError: ``seed_`` is not positive.
        NotInitializedError: ``initialize_model_parallel`` was not called.
    """
    if seed_ is None or seed_ <= 0:
        raise ConfigError(f"the seed is {seed_}; it must be a positive number")
    seed = seed_ + 100 * parallel_state.get_pipeline_model_parallel_rank()
    if data_parallel_random_init:
        seed += 10 * parallel_state.get_data_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
