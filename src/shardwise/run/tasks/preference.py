"""Direct preference optimization: train a model to prefer the better answer of each pair.

Preferences from ``--data`` are split, encoded and fitted to the sequence length.

The log-probability of every answer under the reference model, which is the initial model, is stored on disk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.atomic_files import open_regular, write_atomically
from shardwise.core.communication import moves
from shardwise.core.communication.agreement import agree, decide
from shardwise.core.communication.collectives import all_reduce, split_for_rank
from shardwise.core.errors import CheckpointError, ConfigError, DivergenceError
from shardwise.core.topology import Groups
from shardwise.data import (
    IGNORE_INDEX,
    Batch,
    HeldOut,
    PairRows,
    Preference,
    PreferenceEncoder,
    UnusableExampleError,
    preference_of,
    read_by_form,
)
from shardwise.data.blend import BlendedRows, parse_blend
from shardwise.data.examples import common_length
from shardwise.data.json_records import counted
from shardwise.data.tokenizer import ChatTemplate
from shardwise.nn.loss.cross_entropy import preference_loss
from shardwise.run.settings import DpoSettings, PreferenceSettings, SampleSettings
from shardwise.run.tasks.pretrained_model import PretrainedModel
from shardwise.run.tasks.samples import LOOKED_AT, prepare_rows
from shardwise.run.tasks.sources import is_token_file, prepare_sources
from shardwise.run.tasks.task import Method, Session
from shardwise.run.tasks.task_data import TaskData
from shardwise.training.objective import Objective
from shardwise.training.trainer import Trainer

FILE_NAME = "reference_log_probs.safetensors"
_PARTS = ("train", "held_out")
_WIDTHS, _BATCHES_OF_A_WIDTH = 8, 8

_Values = dict[str, NDArray[np.float64]]


def set_reference_(session: Session, model: Mapping[str, str]) -> None:
    """Set the reference of all pairs of a run: stored by an earlier start of the run, or computed by the current model.

    Every rank calls, before the first step and before a checkpoint is loaded.
    """
    datasets: dict[str, PairRows] = {}
    for part, rows in zip(_PARTS, (session.loader.rows, session.data.held_out.rows), strict=True):
        sources = rows.parts if isinstance(rows, BlendedRows) else (rows,)
        for number, each in enumerate(sources):
            assert isinstance(each, PairRows)
            datasets[part if len(sources) == 1 else f"{part} {number + 1}"] = each
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


def log_probs(trainer: Trainer, dataset: PairRows) -> NDArray[np.float64]:
    """Compute the log-probability of both answers of each pair under the trainer's current model; every rank calls."""
    micro = trainer.settings.micro_batch_size(trainer.num_sample_ranks)
    together = trainer.num_sample_ranks * micro
    values = np.empty((len(dataset), 2))
    # Group pairs by length to reduce padding, if there are enough batches.
    for part in dataset.by_width(min(_WIDTHS, max(1, len(dataset) // (_BATCHES_OF_A_WIDTH * together)))):
        values[part] = _log_probs(trainer, HeldOut(dataset, part), micro)
    return values


def _log_probs(trainer: Trainer, pairs: HeldOut, micro: int) -> NDArray[np.float64]:
    own: list[Tensor] = []

    def add(output: Tensor, _: Batch) -> None:
        own.append(-output.sum(-1, dtype=torch.float64).view(-1, 2))

    trainer.measure(pairs, add)
    num_ranks = trainer.num_sample_ranks
    num_batches = -(-len(pairs) // (num_ranks * micro))
    # Each rank fills its part of the batches, or its positions' part of their sums; the all-reduce adds all parts.
    every = torch.zeros(num_batches, num_ranks, micro, 2, dtype=torch.float64, device=trainer.device)
    if own:
        every[:, trainer.sample_rank] = torch.stack(own)
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
    """Return the values stored by an earlier start of the run; None if there are none."""
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


def prepare_pairs(
    name: str,
    examples: Sequence[Preference],
    held_out: Sequence[Preference] | None,
    encoder: PreferenceEncoder,
    settings: SampleSettings,
    *,
    sequence_length: int,
    held_out_fraction: float,
    shortest: int = 1,
) -> TaskData:
    """Split and encode pairs, or load them from the cache; arguments and errors as for ``prepare_samples``."""
    too_long = settings.too_long
    assert too_long != "split"
    beginning = encoder.tokenizer.beginning
    rows_of = partial(
        PairRows, sequence_length=sequence_length, too_long=too_long, beginning=beginning, shortest=shortest
    )
    notes = _notes_on_prompts(encoder, examples)
    identity = {"too_long": too_long}
    return prepare_rows(name, examples, held_out, encoder, rows_of, held_out_fraction, "pair", identity, notes)


def _notes_on_prompts(encoder: PreferenceEncoder, examples: Sequence[Preference]) -> list[str]:
    """Return a note if one of the first prompts does not end at a token boundary."""
    for example in examples[:LOOKED_AT]:
        try:
            chosen, _ = encoder.encode_all(example)
            alone = encoder.prompt_of(example)
        except UnusableExampleError:
            continue
        if common_length(alone, chosen.ids[~chosen.learned].tolist()) < len(alone):
            return [
                f"the last tokens of a prompt are others once an answer follows (first: {example.where}), and are "
                "compared as a part of the answer"
            ]
    return []


@dataclass(frozen=True)
class PreferenceObjective(Objective):
    """Mean loss of pairs, and rewards: ``beta`` times the log-probability ratio of an answer to the reference."""

    settings: PreferenceSettings
    group: ProcessGroup | None = None

    shares_samples = True
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
    curves = ("loss", "held_out_loss")
    unit = "loss of a pair"

    def sums(self, output: Tensor, batch: Batch, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
        """Sums over pairs; a pair without labels is padding and is ignored. See ``Objective``."""
        assert batch.reference is not None
        # Computed in fp64: the small differences are between sums over many tokens.
        log_probs = -output.sum(-1, dtype=torch.float64).view(-1, 2)
        reference, learned = batch.reference.view(-1, 2), (batch.labels != IGNORE_INDEX).sum(-1).view(-1, 2)
        if self.group is not None:
            # The sums have parts on all ranks that share the pairs. Each of these ranks goes on with some of the pairs.
            log_probs = moves.reduce_scatter(log_probs, dim=0, group=self.group)
            reference, learned = (split_for_rank(each, dim=0, group=self.group) for each in (reference, learned))
        chosen, rejected = (log_probs - reference).unbind(1)
        num_chosen, num_rejected = learned.unbind(1)
        settings, is_filling = self.settings, num_chosen == 0
        loss = preference_loss(
            chosen,
            rejected,
            beta=settings.beta,
            kind=settings.loss_type,
            label_smoothing=settings.label_smoothing,
            num_chosen=num_chosen,
            num_rejected=num_rejected,
        ).masked_fill(is_filling, 0.0)
        rewards = settings.beta * torch.stack([chosen, rejected]).detach()
        margins = rewards[0] - rewards[1]
        numbers = torch.cat([rewards, margins.unsqueeze(0), (margins > 0).double().unsqueeze(0)])
        return loss.sum(), numbers.masked_fill(is_filling, 0.0).sum(1)

    def held_out(self, sums: Sequence[float], held_out: HeldOut) -> dict[str, float]:
        means = self.reported([each / len(held_out) for each in sums], 0.0)
        return {f"held_out_{name}": value for name, value in means.items()}

    def outcome(self, held_out: dict[str, float]) -> str:
        """The loss, and the share of pairs whose better answer has the higher reward."""
        return (
            f"held-out pairs: loss {held_out['held_out_loss']:.3f}, the chosen answer has the higher reward in "
            f"{held_out['held_out_rewards/accuracies']:.1%} of them"
        )


class Preferences(Method):
    """Train a pretrained model on preferences between two answers.

    The reference is the initial model: its log-probabilities of all answers are computed before the first step and
    stored in the run's folder.
    """

    def __init__(self, source: PretrainedModel) -> None:
        assert isinstance(source.settings, DpoSettings)
        self.source, self.settings = source, source.settings

    def encoder(self) -> PreferenceEncoder:
        """Create the encoder of pairs. Raises DataError if the folder's chat template is invalid."""
        template = ChatTemplate.load(self.source.folder.path)
        return PreferenceEncoder(self.source.tokenizer, template, parse_special=self.settings.special_tokens)

    def to_show(self) -> list[Preference]:
        """Return the pairs in the order of the data. Raises as ``read_records`` and ``preference_of``."""
        return self._pairs(parse_blend(self.settings.data)[0])[1]

    def _pairs(self, paths: Sequence[str]) -> tuple[str, list[Preference]]:
        name, records = read_by_form(paths, self.settings.samples.prompt_template)
        return name, [preference_of(record) for record in records]

    def prepare(self) -> TaskData:
        if any(map(is_token_file, self.settings.data)):
            raise ConfigError("token files (.idx) hold no preferences; give records with 'chosen' and 'rejected'")
        return prepare_sources(self.settings, self.source.tokenizer, self._prepare)

    def _prepare(self, paths: Sequence[str]) -> TaskData:
        settings, measured = self.settings, self.settings.samples.held_out
        name, examples = self._pairs(paths)
        return prepare_pairs(
            name,
            examples,
            self._pairs(measured)[1] if measured else None,
            self.encoder(),
            settings.samples,
            sequence_length=settings.sequence_length,
            held_out_fraction=settings.corpus.held_out_fraction,
            shortest=settings.parallel.cp,
        )

    def objective(self, data: TaskData, groups: Groups, device: torch.device) -> Objective:
        return PreferenceObjective(self.settings.preference, groups.data.group)

    def before(self, session: Session) -> None:
        """Set the reference log-probabilities; every rank calls. Raises as ``set_reference_``."""
        set_reference_(session, self.source.digests())
