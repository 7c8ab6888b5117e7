"""What layers and their parts do with Megatron's arguments: refuse them, or turn them into the engine's."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError
from shardwise.megatron.core.packed_seq_params import PackedSeqParams
from shardwise.megatron.core.parallel_state import resolve_tensor_model_parallel_group
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection
from shardwise.megatron.core.transformer.spec_utils import get_module
from shardwise.models.config import ModelConfig
from shardwise.models.transformer.masks import AttentionMask


def check_part(parts: Any, name: str, only: Any) -> None:
    found = get_module(getattr(parts, name))
    if found is not only:
        raise ConfigError(
            f"{name} of {type(parts).__name__} is {getattr(found, '__name__', found)}; here it is "
            f"{getattr(only, '__name__', only)}, and a program may replace norms, attention and MLP as wholes"
        )


def refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(f"{name} is given, which a layer's parts do not take here; leave it out")


def tp_group_of(collection: ProcessGroupCollection | None) -> ProcessGroup:
    return resolve_tensor_model_parallel_group(getattr(collection, "tp", None))


def engine_arguments(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    *,
    rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
    inference_context: Any = None,
    packed_seq_params: PackedSeqParams | None = None,
    **others: Any,
) -> dict[str, Any]:
    """The engine's keyword arguments of a layer or of its attention; ``others`` must be None."""
    refuse(**others)
    if isinstance(rotary_pos_emb, tuple):
        if rotary_pos_emb[0] is not rotary_pos_emb[1] and not torch.equal(*rotary_pos_emb):
            raise ConfigError("rotary_pos_emb has other angles for keys than for queries; give one tensor for both")
        rotary_pos_emb = rotary_pos_emb[0]
    documents = None
    if packed_seq_params is not None:
        s, b = hidden_states.shape[:2]
        s *= module.tp_group.size() if module.config.sequence_parallel else 1
        documents, positions = packed_seq_params.documents_and_positions(torch.Size((b, s)))
        rotary_pos_emb = None if rotary_pos_emb is None else rotary_pos_emb[positions[0]]
    return {
        "attention_mask": AttentionMask(attention_mask, document_ids=documents),
        "rotary": None if rotary_pos_emb is None else cos_and_sin(rotary_pos_emb, module.config, hidden_states.dtype),
        "cache": inference_context,
    }


def cos_and_sin(angles: Tensor, config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of angles ``[s, 1, 1, d]`` of both elements of each pair, as the engine takes them: ``[s, 1, 1, d/2]``."""
    angles = angles[..., ::2] if config.rotary_interleaved else angles[..., : angles.size(-1) // 2]
    return angles.cos().to(dtype), angles.sin().to(dtype)
