"""Several parts of one model on one rank, for interleaved pipeline schedules."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from shardwise.core.sharding import ParamShard, ShardedOffset
from shardwise.models.config import ModelConfig
from shardwise.models.language_model import LanguageModel


class ModelChunks(nn.ModuleList):
    """A pipeline stage's chunks of a model, in order.

    Args:
        chunks: at least one chunk; all have the same config.

    Attributes:
        config: the config of all chunks.
    """

    config: ModelConfig

    def __init__(self, chunks: Sequence[LanguageModel]) -> None:
        super().__init__(chunks)
        self.config = chunks[0].config

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[ShardedOffset] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, ParamShard]:
        """This rank's part of every parameter, by its name in the whole model: nothing tells of chunks.

        Args:
            prefix: put before each name.
            sharded_offsets: ``(axis, index, count)`` of leading axes that stack this model with others of one name.
            metadata: handed on to the chunks.

        Raises:
            ShardingError: ``sharded_offsets`` do not fit together.
        """
        entries: dict[str, ParamShard] = {}
        for chunk in self:
            assert isinstance(chunk, LanguageModel)
            entries |= chunk.sharded_state_dict(prefix, sharded_offsets, metadata)
        return entries
