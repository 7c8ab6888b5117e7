"""One choice of kernels for all ranks of a group: what one of them cannot run, none does.

Kernels round differently. A rank on a machine without a compiler, or with a GPU on which a kernel fails, would compute
what all ranks hold alike, such as norms, with other bits than the rest.
"""

import platform

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.core.communication import accounting
from shardwise.core.communication.agreement import gather_objects
from shardwise.core.communication.context import context_of
from shardwise.kernels.dispatch import HUGE_PAGES, PATHS, PLACED_OUTPUTS, REDUCE_NORM, Call, FastPath

# Where a tensor lies changes no bit of it.
_ROUND_ALIKE = (HUGE_PAGES, PLACED_OUTPUTS)


def agree_on_kernels(like: Tensor, *, group: ProcessGroup) -> list[str]:
    """Turn off on every rank, for the rest of the process, the fast paths that some rank of ``group`` cannot run.

    The first call for a group, a device and a dtype is collective: one gather of Python objects. Later ones, and calls
    in traced code, do nothing.

    Args:
        like: of the device and the dtype of the work; an ordinary tensor, or nothing happens.
        group: the ranks that must compute alike.

    Returns:
        A line for each path that is turned off by this call on ranks that could run it; the same on every rank.

    Raises:
        DesyncError: a rank is gone, or does not come within the group's time limit.
    """
    # What compilers trace, and what has no memory of its own, takes no fast path.
    if group.size() == 1 or torch.compiler.is_compiling() or type(like) not in (Tensor, Parameter):
        return []
    agreed, device = context_of(group).agreed_kernels, like.device
    if (device, like.dtype) in agreed:
        return []
    call = Call(device.type, like.dtype, device_index=device.index or 0)
    paths = [path for path in (*PATHS, REDUCE_NORM) if path.device_type == device.type and path not in _ROUND_ALIKE]
    # The caller's modes are for the model's operations, and not for trials.
    with _disable_current_modes(), accounting.uncounted():
        own = platform.node(), [path.try_out(call) for path in paths]
        every = gather_objects(own, "which kernels each can run", group=group)
    agreed.add((device, like.dtype))
    lines = [_settle(path, [(host, whys[place]) for host, whys in every]) for place, path in enumerate(paths)]
    return [line for line in lines if line is not None]


def _settle(path: FastPath, answers: list[tuple[str, str | None]]) -> str | None:
    """Choose a path for all ranks from the host of each and why it cannot run there; a line if some could."""
    refusing = [(rank, host, why) for rank, (host, why) in enumerate(answers) if why is not None]
    path.is_agreed |= not refusing
    if not refusing or len(refusing) == len(answers):
        return None
    rank, host, why = refusing[0]
    path.refusal = f"rank {rank} of {len(answers)}, on {host}, cannot run it: {why}"
    return f"{path.name}: off on all ranks of the group, since {path.refusal}"
