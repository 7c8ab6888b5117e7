"""A model whose optimizer state does not fit a rank's limit of memory (``ulimit -v``) trains with ``--zero 1``."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import math
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.forked import run_forked

from shardwise.core.topology import Groups, Topology
from shardwise.data import Batch
from shardwise.plan.plan import make_plan
from shardwise.plan.workload import mesh_of, workload_of
from shardwise.run.build import config_fields, describe
from shardwise.run.out_of_memory import is_out_of_memory
from shardwise.run.settings import ModelSettings, ParallelSettings, Settings, TrainingSettings
from shardwise.storage.huggingface import build_model, model_config
from shardwise.training.trainer import Trainer

SETTINGS = Settings(
    data=("text",),
    model=ModelSettings(num_layers=4, hidden_size=1024, num_heads=8, vocab_size=301, sequence_length=4),
    training=TrainingSettings(global_batch_size=4),
)


def zero_settings(zero):
    return dataclasses.replace(SETTINGS, parallel=ParallelSettings(zero=zero))


@contextlib.contextmanager
def within(more):
    """No more than ``more`` bytes of address space beyond what is taken now."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        # What was freed is given back, and not used again unseen.
        ctypes.CDLL(None).malloc_trim(0)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture(scope="module")
def planned_states():
    """Bytes of the optimizer's state on each of four ranks: whole, and with zero."""
    found = []
    for zero in (0, 1):
        settings = zero_settings(zero)
        workload = workload_of(settings, describe(settings.model, settings.model.vocab_size))
        found.append(make_plan(workload, mesh_of(settings, 4)).worst.step.optimizer)
    return found


def made(settings, groups):
    """A trainer, its weights and buffers there, its optimizer's state not yet."""
    description = describe(settings.model, settings.model.vocab_size)
    fields = config_fields(settings, groups) | {"perform_initialization": False}
    model = build_model(model_config(description, **fields), groups=groups, device=torch.device("cpu"))
    with torch.no_grad():
        for param in model.parameters():
            # Values do not matter here, and drawing them takes seconds.
            param.fill_(0.01)
    return Trainer(settings, model, groups)


@pytest.mark.slow
def test_state_that_does_not_fit_trains_with_zero(tmp_path, planned_states):
    """In processes of its own, because ranks of the pool have freed memory, which they use again unseen."""
    whole, shared_out = planned_states
    assert 3.9 < whole / shared_out < 4.1
    limit = (3 * whole + shared_out) // 4
    done = run_forked(train_within, [(tmp_path / "store", rank, limit) for rank in range(4)], tmp_path)
    assert [code for code, _ in done] == [0] * 4, done


def train_within(store, rank, limit):
    """Train on one of four ranks within ``limit``: with whole state it fails, with a share it does not."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 4), rank=rank, world_size=4)
    groups = Groups.of(Topology.create())
    tokens = torch.randint(301, (1, 4))
    failing = made(zero_settings(0), groups)
    with within(limit), pytest.raises((RuntimeError, MemoryError)) as failure:
        failing.step(0, [Batch(tokens, tokens)])
    assert is_out_of_memory(failure.value)
    del failing, failure
    training = made(zero_settings(1), groups)
    with within(limit):
        results = [training.step(step, [Batch(tokens, tokens)]) for step in range(2)]
    assert all(math.isfinite(result.loss) for result in results)
    assert results[0].loss != results[1].loss
