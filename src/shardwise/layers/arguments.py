"""From a model's config to the arguments of its layers: the one place that knows both."""

from typing import Any

from torch.distributed import ProcessGroup

from shardwise.config import LayerConfig


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
