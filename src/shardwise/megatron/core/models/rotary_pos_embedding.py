"""Megatron's rotary angles, computed from the engine's frequencies."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError
from shardwise.core.sequence_view import ContextShard
from shardwise.kernels.elementwise import rotate
from shardwise.megatron.absent import absent_names
from shardwise.megatron.core.packed_seq_params import PackedSeqParams
from shardwise.megatron.core.transformer.layer_parts import _cos_and_sin
from shardwise.megatron.core.transformer.transformer_config import TransformerConfig
from shardwise.models.transformer import rotary
from shardwise.models.transformer.rotary import RotaryScaling

__all__ = ["RotaryEmbedding", "apply_rotary_pos_emb", "get_pos_emb_on_this_cp_rank"]

__getattr__ = absent_names("models.common.embeddings.rotary_pos_embedding", "models.common.embeddings.rope_utils")


class RotaryEmbedding(rotary.RotaryEmbedding):
    """Rotary angles of the positions 0, 1, 2 and so on.

    Args:
        kv_channels: size of a head.
        rotary_percent: fraction of the head that is rotated.
        rotary_interleaved: whether pairs are elements ``2i`` and ``2i + 1`` instead of ``i`` and ``i + d/2``.
        seq_len_interpolation_factor: divisor of the positions; None means 1.
        rotary_base: base of the geometric sequence of wavelengths.
        rope_scaling: whether to lower the frequencies as in Llama 3.1, with an original context of 8192 tokens.
        rope_scaling_factor: divisor of the lowest frequencies.
        use_cpu_initialization: no effect, because the angles move with the module.
        cp_group: None, or a group of one rank.

    Raises:
        ConfigError: a value out of range, or ranks that share a sequence.
    """

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        use_cpu_initialization: bool = False,
        cp_group: ProcessGroup | None = None,
    ) -> None:
        scaling = RotaryScaling("llama3", rope_scaling_factor, 8192) if rope_scaling else None
        super().__init__(kv_channels, rotary_percent, rotary_base, scaling)
        self.rotary_interleaved = rotary_interleaved
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        _check_alone(cp_group)

    @property
    def inv_freq(self) -> Tensor:
        """``[d/2]`` angles per position."""
        return self.inverse_frequencies

    def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angles of the positions from ``offset`` on, ``[s, d/2]`` in fp32."""
        frequencies = self.inverse_frequencies
        # The product is in fp64.
        positions = torch.arange(offset, offset + max_seq_len, dtype=frequencies.dtype, device=frequencies.device)
        if self.seq_len_interpolation_factor is not None:
            positions = positions / self.seq_len_interpolation_factor
        return torch.outer(positions, frequencies).float()

    def forward(  # type: ignore[override]  # Megatron's returns angles.
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: ProcessGroup | None = None
    ) -> Tensor:
        """Return the angles of both elements of each pair, ``[s, 1, 1, d]``, for positions from ``offset`` on.

        Args:
            max_seq_len: number of positions, ``s``.
            offset: the first position.
            packed_seq: no effect.
            cp_group: None, or a group of one rank.
        """
        _check_alone(cp_group)
        angles = self.get_freqs_non_repeated(max_seq_len, offset)
        both = angles.repeat_interleave(2, -1) if self.rotary_interleaved else torch.cat((angles, angles), -1)
        return both[:, None, None, :]

    get_emb = forward

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Tensor,
        transformer_config: TransformerConfig,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> int:
        """Number of positions of a sequence, or of the longest sequence in a packed row.

        Args:
            transformer_input: ``[s, b, h]``, or this rank's shard with sequence parallelism.
            transformer_config: config with ``sequence_parallel``.
            packed_seq_params: sequences of a packed row, with ``max_seqlen_q``.
            inference_context, transformer: no effect.
        """
        if packed_seq_params is not None and packed_seq_params.max_seqlen_q is not None:
            return packed_seq_params.max_seqlen_q
        shards = transformer_config.tensor_model_parallel_size if transformer_config.sequence_parallel else 1
        return transformer_input.size(0) * shards


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    config: TransformerConfig,
    cu_seqlens: Tensor | None = None,
    mscale: float = 1.0,
    cp_group: ProcessGroup | None = None,
) -> Tensor:
    """Rotate queries or keys.

    Args:
        t: ``[s, b, heads, d]``, or with ``cu_seqlens`` a packed row ``[s, heads, d]``; not modified.
        freqs: ``[s, 1, 1, d]`` angles from ``RotaryEmbedding``; for a packed row, at least up to the longest sequence.
        config: config with ``rotary_interleaved``, which selects the pairs.
        cu_seqlens: integers ``[n + 1]``, the start of each sequence in a packed row and the end of the last one.
        mscale: factor of cosine and sine.
        cp_group: None, or a group of one rank.

    Returns:
        A new tensor of the same shape.
    """
    _check_alone(cp_group)
    if cu_seqlens is not None:
        row = PackedSeqParams(cu_seqlens_q=cu_seqlens)
        _, positions = row.documents_and_positions(torch.Size((1, t.size(0))))
        whole = apply_rotary_pos_emb(t.unsqueeze(1), freqs[positions[0]], config, mscale=mscale)
        return whole.squeeze(1)
    return _apply_rotary_pos_emb_bshd(t, freqs, config.rotary_interleaved, mscale=mscale)


def _apply_rotary_pos_emb_bshd(
    t: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
) -> Tensor:
    """Rotate ``t``, ``[s, b, heads, d]``, as ``apply_rotary_pos_emb``."""
    if multi_latent_attention:
        raise ConfigError("multi_latent_attention is True; there is no multi-latent attention here, so leave it out")
    cos, sin = (mscale * value for value in _cos_and_sin(freqs, rotary_interleaved, torch.float32))
    return rotate(t, cos.to(t.dtype), sin.to(t.dtype), interleaved=rotary_interleaved)


def get_pos_emb_on_this_cp_rank(pos_emb: Tensor, seq_dim: int, cp_group: ProcessGroup) -> Tensor:
    """Return the positions of a tensor that a context-parallel rank has, which are two runs of equal length.

    Args:
        pos_emb: any tensor of all positions, such as angles ``[s, 1, 1, d]``.
        seq_dim: dimension of the positions.
        cp_group: context-parallel group.
    """
    return ContextShard(pos_emb.size(seq_dim), cp_group).own(pos_emb, dim=seq_dim)


def _check_alone(cp_group: ProcessGroup | None) -> None:
    if cp_group is not None and cp_group.size() > 1:
        raise ConfigError(
            f"cp_group has {cp_group.size()} ranks, and attention here needs the whole sequence; leave it out"
        )
