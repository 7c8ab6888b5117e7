"""Set a short timeout for a call that must time out, after all calls that must succeed."""

import datetime

import torch
from torch.distributed import ProcessGroup

from shardwise.core.communication.transports.shared_memory import channel_of


def set_time_limit(group: ProcessGroup, seconds: float) -> None:
    """Set the timeout of ``group`` for later waits of this rank.

    A group that is created with a short ``timeout`` may fail to connect on a busy machine.
    """
    group._get_backend(torch.device("cpu"))._set_default_timeout(datetime.timedelta(seconds=seconds))
    if (channel := channel_of(group)) is not None:
        channel._timeout = seconds
