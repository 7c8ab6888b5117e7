"""Numbers that the host knows, as a tensor: a copy from its memory would wait for a GPU."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor


def host_numbers(values: Sequence[float], like: Tensor) -> Tensor:
    """A vector of ``values``, of the dtype and on the device of ``like``.

    On a GPU a kernel writes each run of equal values. Nothing is copied, so that the host does not wait, and a CUDA
    graph can be captured.
    """
    if like.is_cpu or torch.compiler.is_compiling():
        return like.new_tensor(values)
    vector, start = like.new_empty(len(values)), 0
    for value, run in groupby(values):
        stop = start + len(list(run))
        vector[start:stop].fill_(value)
        start = stop
    return vector
