"""Megatron's description of sequences packed into one row."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError, ShardingError
from shardwise.models.transformer.masks import document_ids_of

__all__ = ["PackedSeqParams"]


@dataclass
class PackedSeqParams:
    """Bounds of the sequences of a packed row; tokens attend within their sequence.

    Attributes:
        qkv_format: ``"thd"`` or None.
        cu_seqlens_q: integers ``[n + 1]``, the start of each of the ``n`` sequences and the end of the last one.
        cu_seqlens_kv: bounds of the keys: equal to ``cu_seqlens_q``, or None.
        cu_seqlens_q_padded: bounds of the sequences in the row including padding, if sequences are padded.
        cu_seqlens_kv_padded: equal to ``cu_seqlens_q_padded``, or None.
        max_seqlen_q, max_seqlen_kv, total_tokens, seq_idx, tokens_per_sample, pad_between_seqs, cp_scatter_cache:
            no effect.
        local_cp_size, cp_group: ranks that share a sequence; more than one is an error.
    """

    qkv_format: str | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    local_cp_size: int | None = None
    cp_group: ProcessGroup | None = None
    total_tokens: int | None = None
    seq_idx: Tensor | None = None
    tokens_per_sample: int | None = None
    pad_between_seqs: bool | None = None
    cp_scatter_cache: Any = None

    def documents_and_positions(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Return the index of each token's sequence, and the token's position in that sequence; ``[1, s]`` each.

        Padding after a sequence counts as a separate sequence.

        Args:
            shape: shape of the row's ids, ``[1, s]``.

        Raises:
            ConfigError: another format, other sequences for keys, or ranks that share a sequence.
            ShardingError: several rows, or sequences that are not consecutive in the row. On CUDA wrong values trigger
                an assertion on the device instead (``torch._assert_async``).
        """
        starts = self._checked(shape)
        assert self.cu_seqlens_q is not None
        documents = document_ids_of(starts, shape[1])
        positions = torch.arange(shape[1], device=starts.device) - starts.long()[documents]
        if self.cu_seqlens_q_padded is not None:
            lengths = self.cu_seqlens_q.diff()
            # All tokens after the last sequence count as padding already.
            is_padding = positions >= torch.cat((lengths, lengths.new_full((1,), shape[1])))[documents]
            documents = torch.where(is_padding, -1 - documents, documents)
        return documents, positions

    def _checked(self, shape: torch.Size) -> Tensor:
        """Return the starts of the sequences in the row and the end of the last one, after checks."""
        if self.qkv_format not in (None, "thd") or self.cu_seqlens_q is None:
            raise ConfigError(
                f"packed_seq_params has qkv_format {self.qkv_format!r} and cu_seqlens_q "
                f"{'None' if self.cu_seqlens_q is None else 'given'}; describe packed rows by qkv_format='thd' and "
                "cu_seqlens_q, and leave packed_seq_params out for others"
            )
        if (self.local_cp_size or 1) > 1 or (self.cp_group is not None and self.cp_group.size() > 1):
            raise ConfigError(
                "packed_seq_params lets ranks share a sequence (local_cp_size, cp_group), and attention here needs the "
                "whole sequence; leave both out"
            )
        if len(shape) != 2 or shape[0] != 1:
            raise ShardingError(
                f"packed_seq_params describes one row, and input_ids have the shape {list(shape)}; pack all sequences "
                "into one row, [1, tokens]"
            )
        for name in ("cu_seqlens_q", "cu_seqlens_q_padded"):
            queries, other = getattr(self, name), name.replace("_q", "_kv")
            keys = getattr(self, other)
            if keys is None or keys is queries:
                continue
            alike = queries is not None and keys.shape == queries.shape
            _require(
                (keys == queries).all() if alike else torch.tensor(False),
                ConfigError(f"packed_seq_params has another {other} than {name}; sequences attend to themselves here"),
            )
        starts = self.cu_seqlens_q if self.cu_seqlens_q_padded is None else self.cu_seqlens_q_padded
        lengths, fits = starts.diff(), torch.tensor(False)
        if starts.shape == self.cu_seqlens_q.shape:
            fits = (starts[0] == 0) & (lengths >= self.cu_seqlens_q.diff()).all() & (lengths >= 0).all()
            fits = fits & (starts[-1] <= shape[1])
        _require(
            fits,
            ShardingError(
                f"packed_seq_params does not fit a row of {shape[1]} tokens; its sequences begin at 0, one after the "
                "other, and end within the row, and with padding (cu_seqlens_q_padded) are at least as long as without"
            ),
        )
        return starts


def _require(holds: Tensor, error: Exception) -> None:
    """Raise ``error`` unless ``holds``; on CUDA assert on the device, so that the host does not wait."""
    if holds.is_cuda:
        torch._assert_async(holds, str(error))
    elif not holds:
        raise error
