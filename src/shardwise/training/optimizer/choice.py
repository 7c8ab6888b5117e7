"""The choice of a run's optimizer, and of the object that sums its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.communication.trees import sum_in_parts
from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups
from shardwise.models.description import ModelChunks
from shardwise.models.language_model import LanguageModel
from shardwise.nn.replicated import replicas_of
from shardwise.training.bounds import refuse
from shardwise.training.exact_reduction import ExactReduction
from shardwise.training.gradients import GradientBuffers, Gradients, GradientTrees
from shardwise.training.gradients.finalize import summed_over_other_groups
from shardwise.training.optimizer.adamw import AdamW
from shardwise.training.optimizer.mixed_precision import PRECISIONS
from shardwise.training.optimizer.optimizer import LocalShards, MasterWeights, ShardedOptimizer, ZeroOptimizer
from shardwise.training.reduction import Reduction
from shardwise.training.step_settings import StepSettings


def fused_adamw(optimizer: ShardedOptimizer) -> AdamW | None:
    """Return the run's AdamW if it updates all parameters, in one kernel that may divide the gradients as well."""
    innermost: Any = getattr(optimizer, "innermost", optimizer)
    fuses = isinstance(innermost, AdamW) and innermost.why_not_fused is None and innermost.scales_gradients
    return innermost if fuses else None


def groups_of_experts(model: nn.Module, groups: Groups) -> dict[Parameter, ProcessGroup]:
    """Return, for the parameters of experts, the ranks that hold the same parts."""
    params = [param for param, replicas in replicas_of(model).items() if replicas.is_of_expert]
    if params and groups.expert_dp is None:
        raise ConfigError("the model has experts, and Groups.expert_dp is None; take the groups from a Topology")
    return {param: groups.expert_dp for param in params if groups.expert_dp is not None}


def build_optimizer(
    settings: StepSettings, model: LanguageModel | ModelChunks, chunks: Sequence[LanguageModel], groups: Groups
) -> tuple[ShardedOptimizer, Gradients, Reduction]:
    """Build the optimizer of a run, and the objects that sum its gradients and the numbers of a step over ranks.

    ``model`` is on its device; with pipeline stages, it is this rank's stage or its chunks. ``chunks`` is the same as a
    sequence.
    """
    dp_group = groups.dp
    assert dp_group is not None
    num_ranks, has_masters = dp_group.size(), PRECISIONS[settings.training.dtype].has_masters
    optimizer = settings.optimizer.make(model)
    dtype = torch.float32 if has_masters else None
    parts = chunks[0].config.exact_parts
    others = groups_of_experts(model, groups)
    if parts is not None:
        sum_in_parts(dp_group, parts)
        for group in set(others.values()):
            # Its ranks may be more than the parts, since some of them have the same tokens.
            sum_in_parts(group, max(parts, group.size()))
    if others and parts is not None:
        refuse(
            "{} cannot be used with experts in exact mode; use adamw",
            (settings.optimizer.name == "muon", "optimizer.name muon"),
        )
    if settings.parallel.shards_fully(num_ranks):
        # This imports DTensor, which is slow.
        from shardwise.training.gradients.fully_sharded import FullyShardedModel

        sharded = FullyShardedModel(chunks, group=dp_group, other_groups=others, dtype=dtype)
        return LocalShards(optimizer, sharded), sharded, Reduction(model, groups)
    sizes = [num_ranks, *(group.size() for group in others.values())]
    if max(sizes) == 1 and not has_masters and parts is None:
        plain = Gradients.of([param for param in model.parameters() if param.requires_grad])
        return optimizer, plain, Reduction(model, groups)
    splits_state = settings.parallel.zero > 0 and max(sizes) > 1
    whole = summed_over_other_groups(model, tp_group=groups.tp, embd_group=groups.embd)
    options: dict[str, Any] = {"group": dp_group, "other_groups": others, "dtype": dtype, "whole": whole}
    options["scatter"] = splits_state
    gradients: GradientBuffers | GradientTrees
    if parts is None:
        gradients, reduction = GradientBuffers(chunks, **options), Reduction
    else:
        gradients, reduction = GradientTrees(chunks, context=groups.data.group, **options), ExactReduction
    if splits_state:
        split = ZeroOptimizer(optimizer, chunks, gradients, has_masters=has_masters)
        return split, gradients, reduction(model, groups, split.parameters.shares)
    return MasterWeights(optimizer, model) if has_masters else optimizer, gradients, reduction(model, groups)
