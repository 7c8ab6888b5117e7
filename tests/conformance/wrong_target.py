"""A target with mistakes, on the library's own functions: each must fail the cases that know it, and no others."""

import os
import time

import torch
import torch.distributed as dist

from shardwise.conformance.targets import shardwise_engine as engine
from shardwise.conformance.targets.shardwise_engine import (  # noqa: F401 - offered
    finalize_gradients,
    uneven,
    whole_gradients,
    whole_parameters,
)
from shardwise.nn.linear import LinearParallelism

versions = {"wrong": "1"}


def column_linear(*args, **options):
    """Each rank keeps its own part of the input's gradient."""
    layer = engine.column_linear(*args, **options)
    layer.inner.parallelism = LinearParallelism.LOCAL
    return layer


def row_linear(weight, bias, groups, **options):
    """Every rank adds the bias before the sum."""
    return engine.row_linear(weight, None if bias is None else bias * groups.tp.size(), groups, **options)


def embedding(*args, **options):
    """A crash without a message."""
    if dist.get_rank() == 1:
        os._exit(3)
    return engine.embedding(*args, **options)


def gather_sequence(tensor, groups):
    """One rank never arrives."""
    if groups.tp.rank() == 1:
        time.sleep(1000)
    return engine.gather_sequence(tensor, groups)


def scatter_sequence(tensor, groups):
    raise NotImplementedError("not on this machine")


def reduce(tensor, groups):
    """An error on one rank, while the other waits for it."""
    if groups.tp.rank() == 1:
        raise RuntimeError("no sum today\nand more lines")
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=groups.tp)
    return torch.as_tensor(total)
