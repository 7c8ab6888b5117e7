"""Training steps of exact and plain runs, on a single process and on two tensor-parallel ranks."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import NUM_RANKS, join_ranks, leave_ranks, seconds_of

from shardwise.core.topology import Groups, Topology
from shardwise.data import Batch
from shardwise.kernels.host_memory import keep_freed_memory
from shardwise.run.build import build_model
from shardwise.run.exact.trials import check_device
from shardwise.run.settings import ModelSettings, ParallelSettings, Settings, TrainingSettings
from shardwise.training.trainer import Trainer
from steps.problem import LlamaSizes

EXACT_VARIANTS = ("exact", "plain", "plain_whole")
"""Exact; plain with the same micro-batches; plain with all samples at once, the default."""

_SEED = 1


def settings_of(sizes: LlamaSizes, variant: str, tp: int) -> Settings:
    """Return the settings of a run of the variant."""
    model = ModelSettings(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        num_heads=sizes.num_heads,
        ffn_hidden_size=sizes.ffn_hidden_size,
        vocab_size=sizes.vocab_size,
        sequence_length=sizes.sequence_length,
        tie_embeddings=sizes.tie_embeddings,
    )
    exact = Settings(
        data=("none",),
        model=model,
        parallel=ParallelSettings(tp=tp, exact=True),
        training=TrainingSettings(global_batch_size=sizes.batch_size),
    )
    if variant == "exact":
        return exact
    micro = None if variant == "plain_whole" else exact.micro_batch_size(1)
    training = TrainingSettings(global_batch_size=sizes.batch_size, micro_batch_size=micro)
    return Settings(data=("none",), model=model, parallel=ParallelSettings(tp=tp), training=training)


class ExactRunner:
    """One rank's trainers of all variants, each with its own groups.

    Args:
        store: file through which two ranks connect; None for a single rank.
        rank: rank of this process.
    """

    def __init__(self, store: str | None, rank: int) -> None:
        # As in a run.
        keep_freed_memory()
        self._folder = tempfile.TemporaryDirectory()
        self._tp = 1 if store is None else NUM_RANKS
        self._joined: Topology | None = None
        if store is None:
            alone = dist.FileStore(str(Path(self._folder.name) / "store"), 1)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
        else:
            self._joined = join_ranks(store, rank)
        self._topologies: list[Topology] = []
        self._trainers: dict[str, Trainer] = {}

    def prepare(self, sizes: LlamaSizes) -> int:
        """Create the trainers, and return the number of this rank's parameters."""
        self._leave_topologies()
        generator = torch.Generator().manual_seed(_SEED)
        ids = torch.randint(sizes.vocab_size, (sizes.batch_size, sizes.sequence_length + 1), generator=generator)
        self._ids = ids
        for variant in EXACT_VARIANTS:
            settings = settings_of(sizes, variant, self._tp)
            topology = Topology.create(tp=self._tp)
            self._topologies.append(topology)
            groups = Groups.of(topology)
            torch.default_generator.manual_seed(_SEED)
            model = build_model(settings, sizes.vocab_size, groups=groups, device=torch.device("cpu"))
            self._trainers[variant] = Trainer(settings, model, groups)
        return sum(param.numel() for param in self._trainers["exact"].model.parameters())

    def run_steps(self, variant: str, num_steps: int) -> list[tuple[str, str]]:
        """Run some steps, and return every bit of the loss and the gradient norm of each."""
        return [self._step(variant, step) for step in range(num_steps)]

    def check(self) -> float:
        """Return the seconds that the trials of an exact run take."""
        trainer = self._trainers["exact"]
        settings = trainer.settings
        sizes = {"micro_batch_size": settings.micro_batch_size(1), "sequence_length": settings.sequence_length}
        start = time.perf_counter()
        check_device(trainer.model, **sizes)
        return time.perf_counter() - start

    def time_steps(self, variant: str, num_steps: int) -> float:
        """Return the seconds of ``num_steps`` steps."""
        return seconds_of(lambda: self._step(variant, 0), num_steps, together=self._tp > 1)

    def _step(self, variant: str, step: int) -> tuple[str, str]:
        trainer = self._trainers[variant]
        rows = self._ids.split(trainer.settings.micro_batch_size(1))
        result = trainer.step(step, [Batch(row[:, :-1], row[:, 1:]) for row in rows])
        return result.loss.hex(), result.grad_norm.hex()

    def close(self) -> None:
        """Leave the process groups."""
        self._leave_topologies()
        if self._joined is None:
            dist.destroy_process_group()
        else:
            leave_ranks(self._joined)
        self._folder.cleanup()

    def _leave_topologies(self) -> None:
        self._trainers = {}
        for topology in self._topologies:
            topology.destroy()
        self._topologies = []
