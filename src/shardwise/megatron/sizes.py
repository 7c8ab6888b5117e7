"""Sizes of the axes that only Megatron's groups have."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardwise.core.errors import ConfigError, TopologyError
from shardwise.core.rank_grid import ParallelSizes, RankGenerator, check_size, generate_masked_orthogonal_rank_groups

HYBRID = "hybrid"
"""Name prefix of the groups that ``hybrid_context_parallel`` adds; their size follows."""

SEPARATE_ALL_GATHER = "dp_cp_all_gather"
"""Name of the only group that is not shared with another group of the same ranks."""


@dataclass(frozen=True)
class MegatronSizes(ParallelSizes):
    """``ParallelSizes`` with Megatron's further axes.

    ====================  ==================================================================================
    levels of cp          ``hcp0 hcp1 ...``, innermost first; with ``hcp``
    parts of dp_cp        ``hybrid2 hybrid4 ...``, of 2, 4, ... ranks; with ``hybrid_context_parallel``
    optimizer instances   ``intra_dp_cp intra_expt_dp``: the part of ``dp_cp``, of ``expt_dp``, that holds one copy of
                          the optimizer state; ``intra_dist_opt``: all ranks of that copy; ``inter_dist_opt``: the same
                          shard of every copy, if there are several
    ====================  ==================================================================================

    Attributes:
        hcp: sizes of the levels of each context-parallel group, innermost (neighbouring ranks) first; None means one
            level.
        num_distributed_optimizer_instances: number of copies of the sharded optimizer state. Each part of the
            data-parallel group holds one copy; with 1, the whole group does.
        hybrid_context_parallel: whether to divide each data- and context-parallel group also into parts of 2, 4, 8, ...
            ranks, for programs that choose the number of ranks for a sample by its length.
        separate_all_gather: whether to create a second group of the data- and context-parallel ranks, so that the
            all-gather of parameters and the reduction of gradients do not wait for each other.
    """

    hcp: tuple[int, ...] | None = None
    num_distributed_optimizer_instances: int = 1
    hybrid_context_parallel: bool = False
    separate_all_gather: bool = False
    unshared: ClassVar[frozenset[str]] = frozenset((SEPARATE_ALL_GATHER,))

    def _further_lists(self, decoder: RankGenerator, experts: RankGenerator) -> dict[str, list[list[int]]]:
        separate = {SEPARATE_ALL_GATHER: decoder.get_ranks("dp-cp")} if self.separate_all_gather else {}
        instances = self._optimizer_instances(decoder, experts)
        return self._context_levels(decoder) | self._hybrid_parts(decoder) | separate | instances

    def _context_levels(self, decoder: RankGenerator) -> dict[str, list[list[int]]]:
        if self.hcp is None:
            return {}
        for size in self.hcp:
            check_size("hcp", size)
        if math.prod(self.hcp) != self.cp:
            raise ConfigError(
                f"the levels {list(self.hcp)} of context parallelism multiply to {math.prod(self.hcp)}; they must "
                f"multiply to cp {self.cp}"
            )
        return {f"hcp{level}": _level(decoder.get_ranks("cp"), self.hcp, level) for level in range(len(self.hcp))}

    def _hybrid_parts(self, decoder: RankGenerator) -> dict[str, list[list[int]]]:
        if not self.hybrid_context_parallel:
            return {}
        size = decoder.dp * decoder.cp
        if size % 2 != 0:
            raise ConfigError(
                f"hybrid_context_parallel halves the dp x cp = {size} ranks, which must be an even number"
            )
        parts = [2**power for power in range(1, size.bit_length()) if size % 2**power == 0 and 2**power < size]
        whole = decoder.get_ranks("dp-cp")
        return {f"{HYBRID}{part}": _level(whole, (part, size // part), 0) for part in parts}

    def _optimizer_instances(self, decoder: RankGenerator, experts: RankGenerator) -> dict[str, list[list[int]]]:
        instances = self.num_distributed_optimizer_instances
        check_size("num_distributed_optimizer_instances", instances)
        for what, size in (("dp x cp", decoder.dp * decoder.cp), ("expert dp", experts.dp)):
            if size % instances != 0:
                raise TopologyError(
                    f"num_distributed_optimizer_instances {instances} does not divide {what} = {size} ranks"
                )
        dense_levels = (decoder.dp * decoder.cp // instances, instances)
        expert_levels = (experts.dp // instances, instances)
        # Copies of the expert model are in the order of their expert-data-parallel ranks.
        copies = experts.get_ranks("tp-ep-pp")
        return {
            "intra_dp_cp": _level(decoder.get_ranks("dp-cp"), dense_levels, 0),
            "intra_expt_dp": _level(experts.get_ranks("dp"), expert_levels, 0),
            "intra_dist_opt": [
                sorted(rank for ranks in copies[start : start + expert_levels[0]] for rank in ranks)
                for start in range(0, len(copies), expert_levels[0])
            ],
            # A single instance has no group between instances.
            **({"inter_dist_opt": _level(experts.get_ranks("dp"), expert_levels, 1)} if instances > 1 else {}),
        }


def _level(groups: list[list[int]], sizes: Sequence[int], level: int) -> list[list[int]]:
    """Arrange each group as a grid of ``sizes``, first axis fastest, and return the groups along axis ``level``."""
    mask = [axis == level for axis in range(len(sizes))]
    return [
        [ranks[place] for place in places]
        for ranks in groups
        for places in generate_masked_orthogonal_rank_groups(len(ranks), sizes, mask)
    ]
