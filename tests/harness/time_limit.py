"""A small time limit for what must time out, set when all that must succeed has."""

import datetime

import torch
from torch.distributed import ProcessGroup

from shardwise.core.communication.transports.shared_memory import channel_of


def set_time_limit(group: ProcessGroup, seconds: float) -> None:
    """From now on a rank waits so long in ``group``, as if it had been made with that ``timeout``.

    Made with it, the group could fail to connect on a busy machine.
    """
    group._get_backend(torch.device("cpu"))._set_default_timeout(datetime.timedelta(seconds=seconds))
    if (channel := channel_of(group)) is not None:
        channel._timeout = seconds
