"""Layers whose parameters are split over the tensor-parallel group, and the linear functions behind them.

Each layer keeps ``param_layouts``: for each of its own parameters, where this rank's part lies in the whole one.
Weights start with the values of the dense layer, whatever the number of ranks (``shardwise.core.initialization``).
"""

from shardwise.megatron.core.tensor_parallel.attributes import (
    _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS,  # noqa: F401 (programs import it from here)
    copy_tensor_model_parallel_attributes,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from shardwise.megatron.core.tensor_parallel.column import ColumnParallelLinear
from shardwise.megatron.core.tensor_parallel.embedding import VocabParallelEmbedding
from shardwise.megatron.core.tensor_parallel.linear_functions import (
    LinearWithFrozenWeight,
    LinearWithGradAccumulationAndAsyncCommunication,
    drain_embedding_wgrad_compute,
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from shardwise.megatron.core.tensor_parallel.private_names import (  # noqa: F401
    HAVE_TE,
    _grad_accum_fusion_available,
    _initialize_affine_weight_cpu,
    _initialize_affine_weight_gpu,
    custom_bwd,
    custom_fwd,
    dist_all_gather_func,
    dist_reduce_scatter_func,
)
from shardwise.megatron.core.tensor_parallel.row import RowParallelLinear
from shardwise.nn.module import named_param_layouts

__all__ = [
    "ColumnParallelLinear",
    "LinearWithFrozenWeight",
    "LinearWithGradAccumulationAndAsyncCommunication",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "copy_tensor_model_parallel_attributes",
    "drain_embedding_wgrad_compute",
    "linear_with_frozen_weight",
    "linear_with_grad_accumulation_and_async_allreduce",
    "named_param_layouts",
    "param_is_not_tensor_parallel_duplicate",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
]
