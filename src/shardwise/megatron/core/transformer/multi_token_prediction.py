"""Functions of Megatron's prediction of several tokens for a program's own layers, and losses that ride on outputs."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from shardwise.core.communication.collectives import all_reduce
from shardwise.core.errors import ConfigError
from shardwise.megatron.absent import absent_names
from shardwise.megatron.core.packed_seq_params import PackedSeqParams
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection
from shardwise.megatron.core.transformer.router_replay import RouterReplay
from shardwise.megatron.surface import offer

__getattr__ = absent_names("transformer.multi_token_prediction", "transformer.moe.moe_utils")

_GROUPS_OF_EXPERTS = "ep tp cp expt_tp expt_dp tp_ep tp_cp tp_dp_cp"


def roll_tensor(
    tensor: Tensor,
    shifts: int = -1,
    dims: int = -1,
    cp_group: ProcessGroup | None = None,
    packed_seq_params: PackedSeqParams | None = None,
) -> tuple[Tensor, Tensor]:
    """Move the elements of each sequence one place to the front, and put 0 at its end.

    Args:
        tensor: any tensor of whole sequences.
        shifts: -1.
        dims: dimension of the positions; the last one for packed sequences.
        cp_group: None, or a group of one rank.
        packed_seq_params: sequences of a packed row; None for one sequence.

    Returns:
        A new tensor, and its sum.

    Raises:
        ConfigError: another ``shifts``, or ranks that share a sequence.
    """
    if shifts != -1 or (cp_group is not None and cp_group.size() > 1):
        num_ranks = 1 if cp_group is None else cp_group.size()
        raise ConfigError(
            f"roll_tensor got shifts {shifts} and {num_ranks} context-parallel ranks; it moves whole sequences by -1, "
            "so roll before the sequence is split"
        )
    rolled = tensor.roll(-1, dims)
    ends: Any = [tensor.size(dims)] if packed_seq_params is None else packed_seq_params.cu_seqlens_q[1:].tolist()  # type: ignore[index]
    rolled.index_fill_(dims, torch.tensor(ends, device=tensor.device) - 1, 0)
    return rolled, rolled.sum()


class _RidingLoss(Function):
    """Autograd function that returns ``output``, and gives ``loss`` a gradient of the scale."""

    main_loss_backward_scale: ClassVar[Any] = None

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss.detach()
        return output

    @classmethod
    def _backward(cls, ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        scale = cls.main_loss_backward_scale
        return grad_output, torch.ones_like(ctx.loss) * (1.0 if scale is None else scale)

    @classmethod
    def set_loss_scale(cls, scale: Tensor | float) -> None:
        """Set the gradient of the loss, which is 1 before."""
        cls.main_loss_backward_scale = scale


class MTPLossAutoScaler(_RidingLoss):
    """Autograd function of ``(output, loss)`` that returns ``output`` and adds ``loss`` to what is learned."""

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return MTPLossAutoScaler._backward(ctx, grad_output)


class MoEAuxLossAutoScaler(_RidingLoss):
    """The same for losses that balance experts."""

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return MoEAuxLossAutoScaler._backward(ctx, grad_output)


class MTPLossLoggingHelper:
    """Losses of a program's layers that predict further tokens, in ``tracker``."""

    tracker: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def save_loss_to_tracker(
        loss: Tensor,
        layer_number: int | None,
        num_layers: int,
        reduce_group: ProcessGroup | None = None,
        avg_group: ProcessGroup | None = None,
    ) -> None:
        """Add the loss of layer ``layer_number`` of ``num_layers``, from 0; None adds nothing.

        ``reduce_loss_in_tracker`` sums over ``reduce_group`` and takes the mean over ``avg_group``.
        """
        if layer_number is not None:
            tracker = MTPLossLoggingHelper.tracker
            values = tracker.setdefault("values", torch.zeros(num_layers, device=loss.device))
            values[layer_number] += loss.detach()
            tracker.update(reduce_group=reduce_group, avg_group=avg_group)

    @staticmethod
    def clean_loss_in_tracker() -> None:
        """Forget the losses."""
        MTPLossLoggingHelper.tracker.clear()

    @staticmethod
    def reduce_loss_in_tracker() -> None:
        """Reduce the losses. Collective in the groups."""
        tracker = MTPLossLoggingHelper.tracker
        for name in ("reduce_group", "avg_group"):
            group = tracker.get(name)
            if group is not None:
                tracker["values"] = all_reduce(tracker["values"], group=group) / (
                    group.size() if name == "avg_group" else 1
                )

    @staticmethod
    def track_mtp_metrics(
        loss_scale: float, iteration: int, writer: Any, wandb_writer: Any = None, total_loss_dict: Any = None
    ) -> None:
        """Reduce the losses, add them times ``loss_scale`` to a dict, write them to writers, and forget them."""
        MTPLossLoggingHelper.reduce_loss_in_tracker()
        for number, loss in enumerate(MTPLossLoggingHelper.tracker.get("values", ()), start=1):
            name, value = f"mtp_{number} loss", loss * loss_scale
            if total_loss_dict is not None:
                total_loss_dict[name] = total_loss_dict.get(name, 0.0) + value
            if writer is not None:
                writer.add_scalar(name, value, iteration)
            if wandb_writer is not None:
                wandb_writer.log({name: value}, iteration)
        MTPLossLoggingHelper.clean_loss_in_tracker()


def group_limited_topk(
    scores: Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
) -> tuple[Tensor, Tensor]:
    """Return the scores and experts of the ``topk`` best of the ``group_topk`` best groups, ``[num_tokens, topk]``.

    A group's score is the sum of its ``topk // group_topk`` highest; ``scores`` are ``[num_tokens, num_experts]``.
    """
    grouped = scores.view(num_tokens, num_groups, num_experts // num_groups)
    best = grouped.topk(topk // group_topk, dim=-1).values.sum(dim=-1).topk(group_topk, dim=-1).indices
    is_best = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)
    result = grouped.masked_fill(~is_best.unsqueeze(-1), -torch.inf).flatten(1).topk(topk, dim=-1)
    return result.values, result.indices


def topk_routing_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    fused: bool = False,
    router_replay: RouterReplay | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of tokens.

    Args:
        logits: ``[n, num_experts]``.
        topk: number of experts of a token.
        use_pre_softmax: whether the softmax is over all experts instead of the chosen ones.
        num_groups, group_topk: numbers of groups of experts, and of those that a token considers; None for all.
        scaling_factor: factor of the weights; None for 1.
        score_function: "softmax" or "sigmoid".
        expert_bias: ``[num_experts]``, added to scores of a sigmoid for the choice; or None.
        fused: no effect.
        router_replay: record and replay of the choices; or None.

    Returns:
        ``[n, num_experts]``: the weight of each expert for each token, 0 unless it is chosen; and whether it is chosen.

    Raises:
        ConfigError: another ``score_function``.
    """
    if score_function not in ("softmax", "sigmoid"):
        raise ConfigError(f"score_function is {score_function!r}; it must be 'softmax' or 'sigmoid'")

    def choose(scores: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        if group_topk and num_groups:
            return group_limited_topk(scores, topk, len(scores), scores.size(1), num_groups, group_topk)
        best = scores.topk(topk, dim=1)
        return best.values, best.indices

    is_sigmoid = score_function == "sigmoid"
    scores = logits
    if is_sigmoid or use_pre_softmax:
        wide = logits.float().sigmoid() if is_sigmoid else logits.softmax(dim=-1, dtype=torch.float32)
        scores = wide.type_as(logits)
    considered = scores + expert_bias if is_sigmoid and expert_bias is not None else scores
    chosen = choose(considered)[1]
    if router_replay is not None:
        chosen = router_replay.get_replay_topk(considered, topk, num_groups, group_topk, choose)[1]
    weights = scores.gather(1, chosen)
    if is_sigmoid and topk > 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    if not is_sigmoid and not use_pre_softmax:
        weights = weights.softmax(dim=-1, dtype=torch.float32).type_as(logits)
    if scaling_factor:
        weights = weights * scaling_factor
    is_chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
    return torch.zeros_like(logits).scatter(1, chosen, weights.type_as(logits)), is_chosen


def get_default_pg_collection() -> ProcessGroupCollection:
    """Return the groups of experts and their tokens in the ambient topology; raise NotInitializedError without one."""
    return ProcessGroupCollection.use_mpu_process_groups(_GROUPS_OF_EXPERTS.split())


def router_gating_linear(inp: Tensor, weight: Tensor, bias: Tensor | None, router_dtype: torch.dtype) -> Tensor:
    """Return the logits of a router, computed in its dtype.

    Args:
        inp: ``[..., h]``.
        weight: ``[experts, h]``.
        bias: ``[experts]``, or None.
        router_dtype: dtype of the product and of the result ``[..., experts]``; gradients have their tensors' dtypes.
    """
    return F.linear(inp.to(router_dtype), weight.to(router_dtype), None if bias is None else bias.to(router_dtype))


def compute_routing_scores_for_aux_loss(
    logits: Tensor, topk: int, score_function: str, fused: bool = False, padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return whether each expert has one of the ``topk`` highest scores, and the scores, whose sum is 1.

    Args:
        logits: ``[n, num_experts]``.
        topk: number of experts of a token.
        score_function: "softmax" or "sigmoid".
        fused: no effect.
        padding_mask: ``[n]`` bools, True for padding, which has no experts; None without padding.

    Raises:
        ConfigError: another ``score_function``.
    """
    if score_function not in ("softmax", "sigmoid"):
        raise ConfigError(f"score_function is {score_function!r}; it must be 'softmax' or 'sigmoid'")
    if score_function == "softmax":
        scores = logits.softmax(dim=-1, dtype=torch.float32)
    else:
        scores = logits.sigmoid()
        scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
    is_chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, scores.topk(topk, dim=1).indices, True)
    if padding_mask is None:
        return is_chosen, scores
    is_token = ~padding_mask.unsqueeze(-1)
    return is_chosen & is_token, scores * is_token


offer(globals())
