"""Reduction of the numbers of a step over the ranks."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from shardwise.core.communication.collectives import reduce_numbers
from shardwise.core.topology import Groups
from shardwise.models.description import ModelChunks
from shardwise.models.language_model import LanguageModel
from shardwise.training.gradients import Share, Total
from shardwise.training.objective import Objective
from shardwise.training.optimizer.grad_norm import own_squares


class Numbers(NamedTuple):
    """Numbers of a step that are the same on every rank.

    Attributes:
        sums: sums of the objective over data-parallel ranks and stages, ``[n]``.
        norm: global gradient norm, a scalar.
        largest: maximum over all ranks of each rank report, and of whether a check failed.
        routing: sums of ``MoELayer.statistics`` over all ranks, for each layer of the model, flattened; None without
            experts.
    """

    sums: Tensor
    norm: Tensor
    largest: Tensor
    routing: Tensor | None = None


class Reduction:
    """Reduces the numbers of a step, with one collective for each group.

    Args:
        model: the model, or this rank's stage or chunks of it.
        shares: as for ``global_grad_norm``.
    """

    def __init__(
        self, model: LanguageModel | ModelChunks, groups: Groups, shares: Mapping[Parameter, Share] | None = None
    ) -> None:
        self._model, self._groups, self.shares = model, groups, shares
        self._pp_group = groups.pp if groups.num_stages > 1 else None
        self.groups = [group for group in (groups.tp, groups.dp, self._pp_group) if group is not None]

    def check_objective(self, objective: Objective) -> None:
        """Raise ConfigError if the sums of ``objective`` cannot be reduced."""

    def reduce_evaluation(self, total: Total, largest: Tensor) -> Numbers:
        """Reduce sums and maxima; the norm is 0."""
        (summed,), largest = reduce_numbers([(total.tensor, self.groups[1:])], largest, groups=self.groups)
        return Numbers(summed, largest.new_zeros(()), largest)

    def reduce_step(self, total: Total, largest: Tensor, routing: Tensor | None) -> Numbers:
        """Reduce the numbers of a step, with its complete gradients; ``routing`` is None without experts."""
        squares = own_squares(
            self._model,
            tp_group=self._groups.tp,
            pp_group=self._pp_group,
            shares=self.shares,
            model_groups=self._groups,
        )
        sums = [(total.tensor, self.groups[1:]), *((each.view(1), over) for each, over in squares)]
        if routing is not None:
            sums.append((routing, self.groups))
        (summed, *others), largest = reduce_numbers(sums, largest, groups=self.groups)
        of_norm, of_routing = others[: len(squares)], others[len(squares) :]
        return Numbers(summed, torch.cat(of_norm).sum().sqrt(), largest, *of_routing)
