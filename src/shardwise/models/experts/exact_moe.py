"""Layer of experts in exact mode: results have the same bits whichever ranks hold the experts.

Ranks that share a micro-batch all route all of its tokens, as one rank does, so that the router and its losses need no
sums over ranks. Experts are whole (``etp`` is 1). Those of the ranks that share a micro-batch multiply the same rows as
on one rank, and the ranks gather the outputs. If an expert is on a rank with another micro-batch, the rows of each
micro-batch go there, and are multiplied separately (``exact.expert_products``).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication import moves
from shardwise.core.communication.collectives import all_to_all
from shardwise.core.errors import ConfigError
from shardwise.core.sharding import Replicas
from shardwise.core.topology import Groups
from shardwise.exact.expert_products import linear_by_source
from shardwise.kernels.fake_device import counts_on_host
from shardwise.models.config import ModelConfig
from shardwise.models.experts.moe import ExpertWeights, MoELayer
from shardwise.models.experts.router import RoutedBatch, Router, Routing, Sequences
from shardwise.models.experts.spec import Experts
from shardwise.models.experts.token_dispatch import AllToAll, ExpertFunction
from shardwise.models.transformer.mlp import activated

# Entropies and losses of micro-batches are multiples of its inverse, so that sums of them in fp64 are not rounded.
_UNITS = float(1 << 30)


class ExactRouter(Router):
    """``Router`` for all tokens of a micro-batch, whose gradients are complete on each rank."""

    def __init__(
        self, config: ModelConfig, experts: Experts, group: ProcessGroup, groups: Groups | None = None
    ) -> None:
        super().__init__(config, experts, group, groups)
        self._balanced_in = None
        self.param_replicas |= dict.fromkeys(self.param_replicas, Replicas())

    def _project(self, tokens: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        return linear_by_source(tokens, matrix, bias, [[len(tokens)]])

    def _log_sums(self, logits: Tensor) -> Tensor:
        # ``logsumexp`` computes exponentials of the last elements of a thread's share differently.
        return logits[:, 0] - logits.log_softmax(dim=-1)[:, 0]

    @torch.no_grad()
    def count_(
        self, statistics: Tensor, routing: Routing, sequences: Sequences, loss: Tensor, fits: Tensor | None
    ) -> None:
        own = torch.zeros_like(statistics)
        super().count_(own, routing, sequences, loss, fits)
        statistics += own.mul_(_UNITS).round_().div_(_UNITS)


class ExactExperts(ExpertWeights):
    """``ExpertWeights`` with a product for each source of tokens.

    ``forward`` takes ``[n, h]``, for each source the tokens of each expert, and ``[sources][e]`` counts on the host.

    Attributes:
        is_counted: whether gradients count; False if another rank with the same tokens has the same experts.

    Raises:
        ConfigError: ranks split an expert.
    """

    is_counted = True

    def __init__(self, config: ModelConfig, experts: Experts, group: ProcessGroup, expert_tp: ProcessGroup) -> None:
        if expert_tp.size() > 1:
            raise ConfigError(
                f"exact: {expert_tp.size()} ranks split each expert, and the sum of their parts has no exact form; set "
                "etp to 1 (Topology.create(etp=1)), and divide the experts by ep"
            )
        super().__init__(config, experts, group, expert_tp)

    def _raise(self, tokens: Tensor, counts: Any) -> Tensor:
        return linear_by_source(tokens, self.up, self.up_bias, counts, is_counted=self.is_counted)

    def _lower(self, inner: Tensor, counts: Any) -> Tensor:
        bias, is_counted = self.down_bias, self.is_counted
        return linear_by_source(inner, self.down, bias, counts, transposed=True, is_counted=is_counted)


class ExactMoELayer(MoELayer):
    """``MoELayer`` with the same bits at every layout.

    Raises:
        ConfigError: ranks share positions of a sample (cp), ranks split an expert, or ranks that exchange tokens do not
            follow each other.
    """

    def __init__(self, config: ModelConfig, groups: Groups) -> None:
        super().__init__(config, groups, router=ExactRouter, experts=ExactExperts)
        if groups.data.group is not None:
            raise ConfigError(
                f"exact: {groups.data.ranks_of_sample} ranks share positions of a sample (cp), and experts have no "
                "exact form for that; leave cp at 1"
            )
        sharing = min(groups.tp, self._group, key=dist.get_world_size)
        own, every = sorted(map(dist.get_process_group_ranks, (groups.tp, self._group)), key=len)
        if own not in [every[first : first + len(own)] for first in range(0, len(every), len(own))]:
            raise ConfigError(
                f"exact: the ranks {own} share samples or experts' tokens, and do not follow each other among {every}, "
                "which share the other; use the default order of a Topology"
            )
        self.experts: ExactExperts
        self.experts._activate = activated(config, groups.tp)
        self.experts.is_counted = groups.tp.rank() < sharing.size()
        self._dispatch = ExactDispatch(self.spec, self._group, 1, sharing)

    def _routed(self, hidden: Tensor, batch: RoutedBatch) -> Tensor:
        whole, group, sizes = hidden, batch.view.group, batch.view.sizes
        if group is not None:
            whole = moves.gather(hidden, dim=0, group=group, sizes=sizes)
            batch = dataclasses.replace(batch, view=dataclasses.replace(batch.view, group=None))
        tokens = whole.reshape(-1, whole.size(-1))
        output = self._mixed(tokens, whole, batch, 0, (len(tokens),)).view(whole.shape)
        return output if group is None else moves.scatter(output, dim=0, group=group, sizes=sizes)


@dataclass(frozen=True)
class ExactDispatch(AllToAll):
    """Dispatch to experts that multiply the tokens of each micro-batch separately.

    Args:
        spec, group, num_splits: as for ``AllToAll``.
        sharing: the ranks of the group that have the same tokens, each with other experts.
    """

    sharing: ProcessGroup

    def _applied(self, experts: ExpertFunction, rows: Tensor, counts: Tensor) -> Tensor:
        sharing = self.sharing
        place, num = sharing.rank(), sharing.size()
        of_ranks = np.array(counts_on_host(counts, len(rows))).reshape(-1, self.num_own)
        sizes = of_ranks.sum(axis=1).reshape(-1, num)
        # Each rank sends the rows for the ranks in its place among those that have the same tokens.
        of_places = sizes.sum(axis=0).tolist()
        rows = _transposed(rows, sizes)
        if num > 1:
            rows = moves.scatter(rows, dim=0, group=sharing, sizes=of_places)
        if self.group.size() > num:
            outputs = self._exchanged(experts, rows, counts)
        else:
            outputs = experts(rows, of_ranks[place : place + 1].tolist())
        if num > 1:
            outputs = moves.gather(outputs, dim=0, group=sharing, sizes=of_places)
        return _transposed(outputs, sizes.T)

    def _exchanged(self, experts: ExpertFunction, rows: Tensor, counts: Tensor) -> Tensor:
        """Send rows to the ranks in this rank's place, and return the experts' outputs."""
        group, own = self.group, self.num_own
        ours = slice(self.sharing.rank(), None, self.sharing.size())
        sent = torch.zeros_like(counts).view(-1, own)
        sent[ours] = counts.view(-1, own)[ours]
        received = all_to_all(sent, group=group)
        numbers = torch.stack([sent[ours].flatten(), received[ours].flatten()])
        there, back = (np.array(each).reshape(-1, own) for each in counts_on_host(numbers, len(rows)))
        input_sizes, output_sizes = [0] * group.size(), [0] * group.size()
        input_sizes[ours], output_sizes[ours] = there.sum(axis=1).tolist(), back.sum(axis=1).tolist()
        rows = moves.all_to_all(rows, group=group, input_sizes=input_sizes, output_sizes=output_sizes)
        outputs = experts(rows, back.tolist())
        return moves.all_to_all(outputs, group=group, input_sizes=output_sizes, output_sizes=input_sizes)


def _transposed(rows: Tensor, sizes: NDArray[np.int64]) -> Tensor:
    """Reorder blocks of rows, whose ``sizes [a, b]`` are row by row, to column by column."""
    if 1 in sizes.shape:
        return rows
    blocks = rows.split(sizes.flatten().tolist())
    return torch.cat([block for column in range(sizes.shape[1]) for block in blocks[column :: sizes.shape[1]]])
