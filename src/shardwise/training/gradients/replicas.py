"""Check by hashes, before the first step and on demand, that ranks hold the same values of replicated parameters.

Without the check, ranks that were seeded differently or read different files would train without an error: each would
apply its own norms to shared hidden states, and gradients of different models would be averaged.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.communication import accounting
from shardwise.core.communication.agreement import agree, gather_objects
from shardwise.core.communication.collectives import all_gather, all_reduce
from shardwise.core.communication.context import default_device, device_of_host_facts, is_rehearsal
from shardwise.core.errors import DesyncError
from shardwise.core.initialization import philox
from shardwise.core.sharding.balanced import is_sharded, local_rows
from shardwise.nn.replicated import named_param_layouts, replicas_of

# Length of the run of random weights, which repeats; and number of elements hashed at a time. On a CPU, they fit into
# the second-level cache, and into memory that the allocator keeps.
_RUN = 1 << 11
_AT_ONCE_ON_CPU, _AT_ONCE = 1 << 14, 1 << 24
SEEDS = (
    "seed all ranks alike before the model is made (by torch.manual_seed; on a CPU model_parallel_cuda_manual_seed "
    "does it too), or load the same weights on all"
)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(
    model: nn.Module,
    *,
    tp_group: ProcessGroup,
    dp_group: ProcessGroup | None = None,
    pp_group: ProcessGroup | None = None,
    expert_dp_group: ProcessGroup | None = None,
    remedy: str = SEEDS,
) -> None:
    """Raise DesyncError on every rank unless all replicas of each parameter are equal. Collective.

    The ranks of ``tp_group`` compare parameters that are not split, the ranks of ``dp_group`` parameters whose rows are
    not sharded; both only parameters whose ``Replicas.same_over`` includes the axis. A model on the meta device passes.
    Each rank contributes two numbers per group; parameters' hashes are exchanged only if these differ. The host waits
    for a GPU.

    Args:
        model: the model, which is not modified.
        tp_group: the ranks that split each layer.
        dp_group: the ranks that see different samples; None to skip that comparison.
        pp_group: the stages of the model, which all raise an error of any stage; None if there is one stage, or if the
            caller tells the others.
        expert_dp_group: the ranks that hold the same parts of the same experts; None to skip that comparison.
        remedy: end of the message about a parameter that differs.
    """
    replicas = replicas_of(model)
    named = [each for each in named_param_layouts(model, tp_group.size()) if replicas[each[1]].same_over]
    every = (tp_group, dp_group, pp_group, expert_dp_group)
    groups = [group for group in every if group is not None and group.size() > 1]
    if not groups or any(param.is_meta for _, param, _ in named):
        return
    over_tp, over_dp = tp_group.size() > 1, dp_group is not None and dp_group.size() > 1
    device = named[0][1].device if named else default_device(tp_group)
    of_tp = {
        name: param
        for name, param, layout in named
        if over_tp and layout.dim is None and "tp" in replicas[param].same_over
    }
    of_dp = {
        name: param
        for name, param, _ in named
        if over_dp and not is_sharded(param) and "dp" in replicas[param].same_over
    }
    of_experts = {
        name: param
        for name, param, _ in named
        if expert_dp_group is not None
        and expert_dp_group.size() > 1
        and replicas[param].is_of_expert
        and not is_sharded(param)
    }
    compared = of_tp | of_dp | of_experts
    if is_rehearsal(tp_group):
        # Fake tensors have no values.
        return
    with accounting.uncounted():
        hashes = dict(zip(compared, fingerprints(list(compared.values())), strict=True))
        # Make both comparisons even if the first fails, because it may not fail on other ranks.
        shapes = {name: list(param.shape) for name, param in compared.items()}
        errors = [_difference({name: hashes[name] for name in of_tp}, shapes, "tensor", tp_group, device, remedy)]
        if dp_group is not None:
            errors.append(_difference({name: hashes[name] for name in of_dp}, shapes, "data", dp_group, device, remedy))
        if of_experts and expert_dp_group is not None:
            own = {name: hashes[name] for name in of_experts}
            errors.append(_difference(own, shapes, "expert-data", expert_dp_group, device, remedy))
        error = next((error for error in errors if error is not None), None)
        found = torch.tensor(float(error is not None))
        for group in groups if len(groups) > 1 else ():
            found = all_reduce(found.to(device_of_host_facts(group, device)), group=group, op=dist.ReduceOp.MAX)
        if len(groups) > 1 and found:
            agree(partial(_raise, error), group=groups)
        _raise(error)


def _raise(error: DesyncError | None) -> None:
    if error is not None:
        raise error


def _difference(
    hashes: Mapping[str, Tensor],
    shapes: Mapping[str, list[int]],
    parallel: str,
    group: ProcessGroup,
    device: torch.device,
    remedy: str,
) -> DesyncError | None:
    """Return the error if the hashes differ between ranks, the same on every rank of ``group``; else None."""
    if group.size() == 1:
        return None
    hashes = dict(sorted(hashes.items()))
    values = torch.stack(list(hashes.values())) if hashes else torch.zeros(0, dtype=torch.int64, device=device)
    own = torch.cat([fingerprints([values]), values.new_full((1,), len(hashes))])
    every = all_gather(own.to(device_of_host_facts(group, device)).unsqueeze(0), group=group).tolist()
    if all(numbers == every[0] for numbers in every):
        return None
    by_name = gather_objects(
        {name: (value, shapes[name]) for name, value in zip(hashes, values.tolist(), strict=True)},
        f"the hashes of the {parallel}-parallel parameters",
        group=group,
    )
    names = dict.fromkeys(name for own in by_name for name in own)
    first, *more = (name for name in names if any(own.get(name) != by_name[0].get(name) for own in by_name))
    ranks = dist.get_process_group_ranks(group)
    what = f"parameter {first!r}{f' and {len(more)} more' if more else ''}"
    forms = [f"of shape {own[first][1]}" if first in own else "missing" for own in by_name]
    other = next((place for place, form in enumerate(forms) if form != forms[0]), None)
    if other is not None:
        return DesyncError(
            f"{what}: {forms[0]} on rank {ranks[0]} and {forms[other]} on rank {ranks[other]}, and {parallel}-parallel "
            "ranks must make the same model; give all ranks the same settings"
        )
    others = [str(rank) for rank, own in zip(ranks, by_name, strict=True) if own[first] != by_name[0][first]]
    return DesyncError(
        f"{what}: rank{'s' * (len(others) > 1)} "
        f"{', '.join(others)} hold{'s' * (len(others) == 1)} other values than rank {ranks[0]}, and "
        f"{parallel}-parallel ranks must hold the same; {remedy}"
    )


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """Hash the bits of each tensor; return ``[n]`` int64 on the device of the first tensor.

    Different bits have the same hash with a probability of 2^-48. Each rank hashes its own sharded rows. All stored
    parts of a quantized tensor are hashed. Each run of elements, as integers, is multiplied by the same random numbers
    and summed modulo 2^64; the sums are hashed the same way until one is left.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    counter = torch.arange(_RUN, device=tensors[0].device)
    nothing = torch.zeros_like(counter)
    high, low, *_ = philox((counter, nothing, nothing, nothing), key=0)
    weights = (high << 32) | low
    return torch.stack([_fingerprint(tensor, weights.to(tensor.device)).to(weights.device) for tensor in tensors])


def _fingerprint(tensor: Tensor, weights: Tensor) -> Tensor:
    tensor = local_rows(tensor.detach())
    if type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return _fingerprint(torch.stack([_fingerprint(getattr(tensor, name), weights) for name in names]), weights)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.reshape(-1).view(_INTEGERS[tensor.element_size()])
    at_once = _AT_ONCE_ON_CPU if tensor.is_cpu else _AT_ONCE
    while True:
        whole = bits.numel() // _RUN * _RUN
        # Products with a narrower integer dtype are int64 too.
        sums = [(part.view(-1, _RUN) * weights).sum(dim=1) for part in bits[:whole].split(at_once) if whole]
        sums.append((bits[whole:] * weights[: bits.numel() - whole]).sum(dim=0, keepdim=True))
        bits = torch.cat(sums)
        if bits.numel() == 1:
            return bits[0]
