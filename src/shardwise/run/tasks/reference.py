"""The reference of a run on preferences: what the model that it begins with says of every answer, kept on disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.core.communication.agreement import agree, decide
from shardwise.core.communication.collectives import all_reduce
from shardwise.core.errors import CheckpointError, DivergenceError
from shardwise.core.files import open_regular, write_atomically
from shardwise.data import Batch, EvaluationPairs, PairDataset
from shardwise.data.labelled import counted
from shardwise.run.tasks.recipe import Session
from shardwise.training.trainer import Trainer

FILE_NAME = "reference_log_probs.safetensors"
_PARTS = ("train", "held_out")
_WIDTHS, _BATCHES_OF_A_WIDTH = 8, 8

_Values = dict[str, NDArray[np.float64]]


def set_reference_(session: Session, model: Mapping[str, str]) -> None:
    """Give all pairs of a run their reference: what an earlier start of it computed, or else the model as it is now.

    Every rank calls, before the first step and before a checkpoint is loaded.

    Args:
        session: the run; its pairs are modified.
        model: what says which model it begins with.

    Raises:
        CheckpointError: the run's folder has log-probabilities of another model or of other pairs, or damaged ones.
        DivergenceError: the model gives an answer no finite log-probability.
        UnwritableError: they cannot be kept.
    """
    loader, windows = session.loader, session.windows
    assert isinstance(windows, EvaluationPairs)
    assert isinstance(loader.dataset, PairDataset)
    datasets = dict(zip(_PARTS, (loader.dataset, windows.dataset), strict=True))
    path, control = session.out / FILE_NAME, session.ranks.control
    shapes = {name: dataset.reference.shape for name, dataset in datasets.items()}
    identity = dict(model) | {name: dataset.sha256 for name, dataset in datasets.items()}
    restarts = session.settings.resume == "restart"

    def kept() -> _Values | None:
        return _read(path, identity, shapes) if session.ranks.is_first and not restarts else None

    values = decide(kept, lambda of_ranks: of_ranks[0], group=control)
    if values is None:
        if session.ranks.is_first:
            count = sum(map(len, datasets.values()))
            print(f"reference log-probabilities of {counted(count, 'pair')} are computed once, for {path}", flush=True)
        with session.ranks.phase("computing the reference's log-probabilities"):
            values = {name: log_probs(session.trainer, dataset) for name, dataset in datasets.items()}
        found = values

        def keep() -> None:
            for name, each in found.items():
                _check_finite(name, each)
            if session.ranks.is_first:
                content = safetensors.numpy.save(found, metadata=identity)
                write_atomically(path, lambda file: file.write(content))

        agree(keep, group=control)
    for name, dataset in datasets.items():
        dataset.reference = values[name]


def log_probs(trainer: Trainer, dataset: PairDataset) -> NDArray[np.float64]:
    """Log-probability of both answers of each pair, by the trainer's model as it is; every rank calls.

    Returns:
        ``[pairs, 2]``, the same on every rank.
    """
    micro = trainer.settings.micro_batch_size(trainer.dp_group.size())
    together = trainer.dp_group.size() * micro
    values = np.empty((len(dataset), 2))
    # Pairs that need few places are not filled up to those of the longest, if there are batches enough.
    for part in dataset.by_width(min(_WIDTHS, max(1, len(dataset) // (_BATCHES_OF_A_WIDTH * together)))):
        values[part] = _log_probs(trainer, EvaluationPairs(dataset, part), micro)
    return values


def _log_probs(trainer: Trainer, pairs: EvaluationPairs, micro: int) -> NDArray[np.float64]:
    own: list[Tensor] = []

    def add(output: Tensor, _: Batch) -> None:
        own.append(-output.sum(-1, dtype=torch.float64).view(-1, 2))

    trainer.measure(pairs, add)
    num_ranks = trainer.dp_group.size()
    num_batches = -(-len(pairs) // (num_ranks * micro))
    # Of each batch of all ranks, this rank's part; zeros where others are.
    every = torch.zeros(num_batches, num_ranks, micro, 2, dtype=torch.float64, device=trainer.device)
    if own:
        every[:, trainer.dp_group.rank()] = torch.stack(own)
    for group in (trainer.dp_group, trainer.pp_group):
        if group is not None:
            every = all_reduce(every, group=group)
    values: NDArray[np.float64] = every.view(-1, 2)[: len(pairs)].cpu().numpy()
    return values


def _check_finite(name: str, values: NDArray[np.float64]) -> None:
    wrong = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(wrong):
        raise DivergenceError(
            f"the model that the run begins with gives {len(wrong)} of {len(values)} pairs ({name}) no finite "
            f"log-probability, such as {values[wrong[0]].tolist()}; its weights are broken, or too large for "
            "--training.dtype"
        )


def _read(path: Path, identity: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> _Values | None:
    """What an earlier start of the run kept; None if there is nothing."""
    if not path.exists():
        return None
    hint = "remove it to compute them again, or choose another --out"
    try:
        with open_regular(path), safetensors.safe_open(path, "numpy") as file:
            header: dict[str, str] = file.metadata() or {}
            values: _Values = {name: file.get_tensor(name) for name in _PARTS}
    except Exception as error:  # the library raises its own kinds
        raise CheckpointError(f"{path} is damaged ({error}); {hint}") from error
    for name, now in identity.items():
        if header.get(name) != now:
            what = "of other pairs than this run's" if name in _PARTS else "of another model"
            raise CheckpointError(
                f"{path} has log-probabilities {what} ({name} was {str(header.get(name))[:12]}, and is {now[:12]}); "
                f"{hint}"
            )
    for name, shape in shapes.items():
        if values[name].shape != shape or values[name].dtype != np.float64 or not np.isfinite(values[name]).all():
            raise CheckpointError(f"{path} is damaged: {name} is not {list(shape)} finite fp64 numbers; {hint}")
    return values
