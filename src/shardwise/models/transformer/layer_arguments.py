"""From a model's config to the arguments of its layers: the one place that knows both."""

from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from shardwise.models.config import LayerConfig, ModelConfig
from shardwise.nn.norm import NORMS


def layer_arguments(config: LayerConfig, *, group: ProcessGroup, linear: bool = True) -> dict[str, Any]:
    """What a layer of a model is made with, beside its sizes and initial values.

    Args:
        config: of the model.
        group: the ranks that share the layer.
        linear: for a ColumnLinear or a RowLinear; else for another layer with parameters.
    """
    arguments: dict[str, Any] = {
        "group": group,
        "dtype": config.params_dtype,
        "initialize": config.perform_initialization,
        "init_on_cpu": config.use_cpu_initialization,
    }
    if linear:
        arguments |= {
            "sequence_parallel": config.sequence_parallel,
            "overlap": config.tp_comm_overlap,
            "fuse_weight_gradient": config.gradient_accumulation_fusion,
            "delay_weight_gradient": config.delay_wgrad_compute,
        }
    return arguments


def make_norm(config: ModelConfig, width: int | None = None) -> nn.Module:
    """The norm that ``config`` names, on PyTorch's default device.

    Every rank holds its parameters whole. With sequence parallelism each rank sees only a part of the tokens, so their
    gradients are partial sums (``param.sequence_parallel``).

    Args:
        config: kind, epsilon, dtype and sequence parallelism.
        width: of what is normalised; ``hidden_size`` if None.
    """
    kind = NORMS[config.normalization, config.layernorm_zero_centered_gamma]
    norm = kind(width or config.hidden_size, eps=config.layernorm_epsilon, dtype=config.params_dtype)
    for param in norm.parameters():
        # By parts a gradient is whole as soon as it is made.
        param.sequence_parallel = config.sequence_parallel and config.exact_parts is None  # type: ignore[attr-defined]
    return norm
