"""Reduction of the numbers of a step with the same bits at every layout."""

from torch import Tensor

from shardwise.core.communication.collectives import reduce_numbers
from shardwise.core.errors import ConfigError
from shardwise.training.gradients import Total
from shardwise.training.objective import CrossEntropy, Objective
from shardwise.training.optimizer.exact_grad_norm import exact_grad_norm
from shardwise.training.reduction import Numbers, Reduction


class ExactReduction(Reduction):
    """Reduces sums and the norm without rounding in between."""

    def check_objective(self, objective: Objective) -> None:
        if self._groups.data.group is not None and not isinstance(objective, CrossEntropy):
            raise ConfigError(
                f"exact: ranks share samples (cp), and the sums of {type(objective).__name__} over them have no "
                "exact form; leave cp at 1, or use no exact mode"
            )

    def reduce_evaluation(self, total: Total, largest: Tensor) -> Numbers:
        _, largest = reduce_numbers([], largest, groups=self.groups)
        return Numbers(total.over(self.groups[1:]), largest.new_zeros(()), largest)

    def reduce_step(self, total: Total, largest: Tensor, routing: Tensor | None) -> Numbers:
        norm = exact_grad_norm(
            self._model, tp_group=self._groups.tp, pp_group=self._pp_group, shares=self.shares, groups=self._groups
        )
        # Tensor-parallel ranks count the same tokens.
        counted = [] if routing is None else [(routing, self.groups[1:])]
        summed, largest = reduce_numbers(counted, largest, groups=self.groups)
        return Numbers(total.over(self.groups[1:]), norm, largest, *summed)
