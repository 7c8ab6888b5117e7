"""A program's own parts of a layer: built as in Megatron, and called with Megatron's arguments."""

import functools
import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection
from shardwise.megatron.core.transformer import module
from shardwise.models.config import ModelConfig
from shardwise.models.transformer.masks import AttentionMask


def own_norm(part: Any, config: ModelConfig) -> nn.Module:
    width, eps = config.hidden_size, config.layernorm_epsilon
    norm: nn.Module = module.build_module(part, config=config, hidden_size=width, eps=eps)
    return norm


def own_attention(part: Any, config: ModelConfig, layer_number: int, group: ProcessGroup) -> nn.Module:
    """Build a program's own attention, which the engine's layer calls with Megatron's arguments."""
    options = _accepted(part, pg_collection=ProcessGroupCollection(tp=group))
    before = functools.partial(_call_of_attention, interleaved=config.rotary_interleaved)
    return _built(part, before, config=config, layer_number=layer_number, **options)


def own_experts(part: Any, config: ModelConfig, groups: Groups) -> nn.Module:
    own = {"tp": groups.tp} | ({} if groups.cp is None else {"cp": groups.cp, "dp_cp": groups.dp})
    own |= {"tp_ep": groups.experts, "expt_tp": groups.expert_tp, "expt_dp": groups.expert_dp}
    built: nn.Module = module.build_module(part, config=config, pg_collection=ProcessGroupCollection(**own))
    built.register_forward_hook(_add_bias)
    return built


def own_mlp(part: Any, config: ModelConfig, group: ProcessGroup) -> nn.Module:
    options = _accepted(part, pg_collection=ProcessGroupCollection(tp=group), is_mtp_layer=False)
    if "pg_collection" not in options:
        options |= _accepted(part, tp_group=group)
    return _built(part, lambda _, args, __: (args, {}), config=config, **options)


def _built(part: Any, before: Any, **arguments: Any) -> nn.Module:
    """Build a program's own module; ``before`` converts the arguments of each call."""
    built: nn.Module = module.build_module(part, **arguments)
    built.register_forward_pre_hook(before, with_kwargs=True)
    built.register_forward_hook(_add_bias)
    return built


def _accepted(part: Any, **options: Any) -> dict[str, Any]:
    """Return the ``options`` that the class of a spec accepts."""
    parameters = inspect.signature(module.get_module(part)).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in options.items() if takes_any or name in parameters}


def _call_of_attention(
    called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, interleaved: bool
) -> tuple[Any, dict[str, Any]]:
    """Convert the engine's keyword arguments to Megatron's."""
    mask: AttentionMask = kwargs["attention_mask"]
    if mask.alibi_slopes is not None:
        raise ConfigError(
            f"{type(called).__name__} is an attention of the program, and the model has ALiBi, which only "
            "SelfAttention knows; use another position_embedding_type"
        )
    forbidden, ids = mask.forbidden, mask.document_ids
    if ids is not None:
        others = (ids[:, :, None] != ids[:, None, :]).unsqueeze(1)
        forbidden = others if forbidden is None else forbidden | others
    call: dict[str, Any] = {"attention_mask": forbidden}
    if kwargs.get("cache") is not None:
        call["inference_context"] = kwargs["cache"]
    if kwargs.get("rotary") is not None:
        cos, sin = kwargs["rotary"]
        wide = torch.promote_types(cos.dtype, torch.float32)
        angles = torch.atan2(sin.to(wide), cos.to(wide))
        call["rotary_pos_emb"] = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    return args, call


def _add_bias(called: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if not isinstance(output, tuple):
        return output
    product, bias = output[:2]
    return product if bias is None else product + bias
