"""Megatron's record and replay of the experts that routers choose, by layer."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, ClassVar

from torch import Tensor

from shardwise.core.errors import DataError
from shardwise.megatron.surface import offer


class RouterReplayAction(Enum):
    """Whether routers record their choices, take the given ones, or take those of earlier forward passes again."""

    RECORD = "record"
    REPLAY_FORWARD = "replay_forward"
    REPLAY_BACKWARD = "replay_backward"


class RouterReplay:
    """Record and replay of one router; a config with ``moe_enable_routing_replay`` gives one to each, in this order.

    Attributes:
        target_topk_idx: ``[n, k]``, the experts of this rank's tokens in a replayed forward pass; or None.
        recorded_topk_idx: ``[n, k]``, the experts of the last recorded forward pass; or None.
        replay_backward_list: experts that recomputations in the backward take, first the oldest.
        router_replay_action: None if the router chooses.
    """

    global_router_replay_instances: ClassVar[list["RouterReplay"]] = []

    def __init__(self) -> None:
        self.target_topk_idx: Tensor | None = None
        self.recorded_topk_idx: Tensor | None = None
        self.replay_backward_list: list[Tensor] = []
        self.router_replay_action: RouterReplayAction | None = None
        RouterReplay.global_router_replay_instances.append(self)

    @staticmethod
    def set_replay_data(all_layers_topk_indices: Sequence[Tensor]) -> None:
        """Set the experts for each router, in the order of their construction.

        Raises:
            DataError: there are more or fewer routers.
        """
        routers = RouterReplay.global_router_replay_instances
        if len(all_layers_topk_indices) != len(routers):
            raise DataError(f"{len(all_layers_topk_indices)} tensors for {len(routers)} routers; give one each")
        for router, indices in zip(routers, all_layers_topk_indices, strict=True):
            router.set_target_indices(indices)

    @staticmethod
    def get_recorded_data() -> list[Tensor | None]:
        """Return the recorded experts of all routers."""
        return [router.recorded_topk_idx for router in RouterReplay.global_router_replay_instances]

    @staticmethod
    def clear_global_indices() -> None:
        """Forget the experts of all routers."""
        for router in RouterReplay.global_router_replay_instances:
            router.clear_indices()

    @staticmethod
    def set_global_router_replay_action(router_replay_action: RouterReplayAction | None) -> None:
        """Set the action of all routers."""
        for router in RouterReplay.global_router_replay_instances:
            router.router_replay_action = router_replay_action

    @staticmethod
    def clear_global_router_replay_action() -> None:
        """Let all routers choose."""
        RouterReplay.set_global_router_replay_action(None)

    @staticmethod
    def clear_global_router_replay_instances() -> None:
        """Forget all routers, such as those of an earlier model."""
        RouterReplay.global_router_replay_instances.clear()

    def set_target_indices(self, topk_indices: Tensor) -> None:
        """Set the experts for the next replay."""
        self.target_topk_idx = topk_indices
        self.replay_backward_list.append(topk_indices)

    def get_recorded_indices(self) -> Tensor | None:
        """Return the recorded experts."""
        return self.recorded_topk_idx

    def record_indices(self, topk_indices: Tensor) -> None:
        """Record experts."""
        self.recorded_topk_idx = topk_indices

    def clear_indices(self) -> None:
        """Forget the experts."""
        self.target_topk_idx = self.recorded_topk_idx = None
        self.replay_backward_list = []

    def set_router_replay_action(self, router_replay_action: RouterReplayAction) -> None:
        """Set the action."""
        self.router_replay_action = router_replay_action

    def clear_router_replay_action(self) -> None:
        """Let the router choose."""
        self.router_replay_action = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of experts, and the experts: the replayed ones, or those of ``default_compute_topk``.

        Args:
            scores: ``[n, num_experts]``.
            topk, num_groups, group_topk: arguments of ``default_compute_topk``.
            default_compute_topk: function that chooses; None takes the ``topk`` highest.
        """
        choose: Any = default_compute_topk or (lambda scores, topk, *_: scores.topk(topk, dim=-1))
        chosen = self.reroute(choose(scores, topk, num_groups, group_topk)[1])
        return scores.gather(1, chosen), chosen

    def reroute(self, chosen: Tensor) -> Tensor:
        """Record experts ``[n, k]``, or return others instead, by the action.

        Raises:
            DataError: there are no experts to replay, or experts of other tokens.
        """
        action = self.router_replay_action
        if action is RouterReplayAction.RECORD:
            self.record_indices(chosen)
        if action in (None, RouterReplayAction.RECORD):
            return chosen
        target = self.target_topk_idx
        if action is RouterReplayAction.REPLAY_BACKWARD:
            target = self.replay_backward_list.pop(0) if self.replay_backward_list else None
        if target is None or target.shape != chosen.shape:
            found = "none" if target is None else f"shape {list(target.shape)}"
            raise DataError(
                f"{action} has {found} of the experts, and the tokens need shape {list(chosen.shape)}; set them for "
                "each forward pass by RouterReplay.set_replay_data"
            )
        return target.to(chosen)


offer(globals())
