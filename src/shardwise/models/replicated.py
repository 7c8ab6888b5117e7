"""Parameters of a model that every tensor-parallel rank holds whole: small tables and small linear layers."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.collectives.primitives import check_alike
from shardwise.config import TransformerConfig
from shardwise.sharding import ParamLayout
from shardwise.tensor_parallel.module import TensorParallelModule
from shardwise.validation import check_ids


class ReplicatedEmbedding(TensorParallelModule):
    """A table that every rank holds whole, such as that of learned positions.

    Args:
        num_embeddings: number of rows.
        what: what the row numbers are, for errors.
        config: width, dtype and initialisation.
        tp_group: tensor-parallel group; the ambient one if None.

    Attributes:
        weight: ``[num_embeddings, h]``.
    """

    def __init__(
        self, num_embeddings: int, *, what: str, config: TransformerConfig, tp_group: ProcessGroup | None = None
    ) -> None:
        super().__init__(config, tp_group)
        self.what = what
        assert config.init_method is not None
        self.weight: Tensor
        layout = ParamLayout.replicated((num_embeddings, config.hidden_size), self.tp_size)
        self._make_parameter("weight", layout, config.init_method)

    def forward(self, input_: Tensor) -> Tensor:
        """Row numbers of any shape to ``[..., h]``.

        Raises:
            VocabularyError: a number that is no row.
        """
        check_alike(partial(check_ids, input_, self.weight.size(0), what=self.what), group=self.tp_group)
        return F.embedding(input_, self.weight)

    def first(self, count: int) -> Tensor:
        """The first ``count`` rows, ``[count, h]``: a view, without a look at any number."""
        return self.weight[:count]


class ReplicatedLinear(TensorParallelModule):
    """A linear layer that every rank holds whole.

    Args:
        output_size: width of the output; the input's is ``config.hidden_size``.
        config: width, dtype and initialisation.
        sequence_shards: each rank applies the layer to its own part of the sequence, so that gradients are partial
            sums (``param.sequence_parallel``).
        tp_group: tensor-parallel group; the ambient one if None.

    Attributes:
        weight: ``[output_size, h]``.
        bias: ``[output_size]``.
    """

    def __init__(
        self,
        output_size: int,
        *,
        config: TransformerConfig,
        sequence_shards: bool = False,
        tp_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(config, tp_group)
        assert config.init_method is not None
        self.weight: Tensor
        self.bias: Tensor
        layout = ParamLayout.replicated((output_size, config.hidden_size), self.tp_size)
        self._make_parameter("weight", layout, config.init_method, partial_gradient=sequence_shards)
        bias_layout = ParamLayout.replicated((output_size,), self.tp_size)
        self._make_parameter("bias", bias_layout, torch.nn.init.zeros_, partial_gradient=sequence_shards)

    def forward(self, input_: Tensor) -> Tensor:
        """``[..., h]`` to ``[..., output_size]``."""
        return F.linear(input_, self.weight, self.bias)
