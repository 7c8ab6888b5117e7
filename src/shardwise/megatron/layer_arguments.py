"""What layers and their parts do with Megatron's arguments: refuse them, or turn them into the engine's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.errors import ConfigError
from shardwise.megatron.packed_seq_params import PackedSeqParams
from shardwise.megatron.process_groups_config import ProcessGroupCollection
from shardwise.megatron.spec_utils import get_module
from shardwise.parallel_state import resolve_tensor_model_parallel_group
from shardwise.transformer.masks import AttentionMask


def check_part(parts: Any, name: str, only: Any) -> None:
    found = get_module(getattr(parts, name))
    if found is not only:
        raise ConfigError(
            f"{name} of {type(parts).__name__} is {getattr(found, '__name__', found)}; here it is "
            f"{getattr(only, '__name__', only)}, and a program may replace the norms, the attention and the MLP as wholes"
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
    rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None,
    packed_seq_params: PackedSeqParams | None,
) -> dict[str, Any]:
    """``attention_mask`` and ``rotary`` of the engine's forward."""
    if isinstance(rotary_pos_emb, tuple):
        if rotary_pos_emb[0] is not rotary_pos_emb[1] and not torch.equal(*rotary_pos_emb):
            raise ConfigError("rotary_pos_emb has other angles for keys than for queries; give one tensor for both")
        rotary_pos_emb = rotary_pos_emb[0]
    documents = None
    if packed_seq_params is not None:
        s, b = hidden_states.shape[:2]
        if module.config.sequence_parallel:
            s *= module.tp_group.size()
        documents, positions = packed_seq_params.documents_and_positions(torch.Size((b, s)))
        if rotary_pos_emb is not None:
            rotary_pos_emb = rotary_pos_emb[positions[0]]
    rotary = None
    if rotary_pos_emb is not None:
        half = rotary_pos_emb.size(-1) // 2
        angles = rotary_pos_emb[..., ::2] if module.config.rotary_interleaved else rotary_pos_emb[..., :half]
        rotary = (angles.cos().to(hidden_states.dtype), angles.sin().to(hidden_states.dtype))
    return {"attention_mask": AttentionMask(attention_mask, document_ids=documents), "rotary": rotary}
