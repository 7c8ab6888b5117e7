"""Megatron's base of modules, and its wrapper for half precision."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import ConfigError
from shardwise.core.sharded_state import sharded_state_dict, state_of_parts
from shardwise.core.sharding import ParamShard, ShardedOffset
from shardwise.megatron.core import parallel_state
from shardwise.megatron.core.transformer.transformer_config import TransformerConfig
from shardwise.nn.module import GroupModule
from shardwise.training.pipeline.stage import wrapped

__all__ = [
    "Float16Module",
    "MegatronModule",
    "conversion_helper",
    "float16_to_fp32",
    "fp32_to_float16",
    "param_is_not_shared",
]


def param_is_not_shared(param: Tensor) -> bool:
    """Whether ``param`` is counted on this stage: it is no later stage's copy of a tied weight."""
    return not getattr(param, "shared", False)


class MegatronModule(GroupModule):
    """Base of a program's own modules, and of the models and layers here.

    Args:
        config: kept. A class that is one of the engine's too sets it afterwards.
    """

    config: Any

    def __init__(self, config: TransformerConfig | None = None) -> None:
        super().__init__()
        self.config = config

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """``state_dict``, which a program's own module may override for its checkpoints."""
        state: dict[str, Any] = self.state_dict(prefix=prefix, keep_vars=keep_vars)
        return state

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[ShardedOffset] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ParamShard]:
        """This rank's part of every parameter and persistent buffer: its children's answers, and what it holds itself.

        Raises:
            TopologyError: neither a ``tp_group`` of its own nor an ambient one.
        """
        group = parallel_state.resolve_tensor_model_parallel_group(getattr(self, "tp_group", None))
        return state_of_parts(self, prefix, sharded_offsets, metadata, group=group)

    def set_is_first_microbatch(self) -> None:
        """Nothing happens: the flag is for caches of fp8 weights, which the config refuses."""


def conversion_helper(val: Any, conversion: Callable[[Any], Any]) -> Any:
    """``conversion`` of every item of a nest of tuples and lists."""
    if isinstance(val, (tuple, list)):
        converted = [conversion_helper(item, conversion) for item in val]
        return tuple(converted) if isinstance(val, tuple) else converted
    return conversion(val)


def fp32_to_float16(val: Any, float16_convertor: Callable[[Tensor], Tensor]) -> Any:
    """Every fp32 tensor of a nest, converted."""
    return conversion_helper(val, lambda item: float16_convertor(item) if _is_of(item, torch.float32) else item)


def float16_to_fp32(val: Any) -> Any:
    """Every fp16 or bf16 tensor of a nest in fp32."""
    return conversion_helper(val, lambda item: item.float() if _is_of(item, torch.float16, torch.bfloat16) else item)


def _is_of(item: Any, *dtypes: torch.dtype) -> bool:
    return isinstance(item, Tensor) and item.dtype in dtypes


class Float16Module(MegatronModule):
    """A model in half precision: its fp32 inputs are converted on the first stage, its outputs back on the last.

    Args:
        config: ``fp16`` or ``bf16`` says which.
        module: the model, whose parameters are converted in place.

    Raises:
        ConfigError: the config asks for neither.
    """

    def __init__(self, config: TransformerConfig, module: nn.Module) -> None:
        super().__init__(config)
        if not (config.fp16 or config.bf16):
            raise ConfigError("Float16Module needs fp16=True or bf16=True in the config; both are False")
        self.fp16, self.bf16 = config.fp16, config.bf16
        self._dtype = torch.float16 if config.fp16 else torch.bfloat16
        self.module = module.to(self._dtype)

    def forward(self, *inputs: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        """The model's; on the last stage in fp32, unless ``fp32_output`` is False."""
        model = wrapped(self.module, "pre_process")
        if model is None or model.pre_process:
            inputs = fp32_to_float16(inputs, lambda value: value.to(self._dtype))
        outputs = self.module(*inputs, **kwargs)
        return float16_to_fp32(outputs) if fp32_output and (model is None or model.post_process) else outputs

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's: no name tells of the wrapper."""
        return self.module.state_dict(*args, **kwargs)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[ShardedOffset] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ParamShard]:
        """The model's."""
        group = parallel_state.resolve_tensor_model_parallel_group(None)
        return sharded_state_dict(self.module, prefix, sharded_offsets, metadata, group=group)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Into the model."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)
