"""Everything that a run needs, set up on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.collectives.agreement import agree, check_same
from shardwise.collectives.primitives import carrier
from shardwise.data import DataLoader, EvaluationWindows, TokenDataset
from shardwise.process_groups_config import ProcessGroupCollection
from shardwise.topology import Topology
from shardwise.training.build import build_model
from shardwise.training.ranks import Ranks
from shardwise.training.settings import Settings
from shardwise.training.texts import Texts, prepare_texts
from shardwise.training.trainer import Trainer


@dataclass(frozen=True)
class Session:
    """One rank's view of a run.

    Attributes:
        settings: of the run.
        ranks: who this process is.
        topology: the groups.
        texts: what is trained and measured on.
        loader: training batches.
        windows: held-out windows.
        trainer: model and optimizer.
        carrier: how the tensor-parallel ranks' tensors travel.
    """

    settings: Settings
    ranks: Ranks
    topology: Topology
    texts: Texts
    loader: DataLoader
    windows: EvaluationWindows
    trainer: Trainer
    carrier: str

    @property
    def out(self) -> Path:
        """The run's folder."""
        return Path(self.settings.out)

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.out / "checkpoints"


def gather_texts(settings: Settings, ranks: Ranks) -> Texts:
    """``prepare_texts`` on every rank; the first of each machine does the work and the others find it in the cache.

    Raises:
        ShardwiseError: what went wrong on any rank, on every rank.
        DesyncError: the ranks read different texts.
    """
    world = dist.group.WORLD
    assert world is not None
    texts = agree(lambda: prepare_texts(settings) if ranks.local_rank == 0 else None, group=world)
    texts = agree(lambda: texts or prepare_texts(settings), group=world)
    assert texts is not None
    check_same(texts.corpus.sha256, "the text (its SHA-256)", group=world)
    check_same(texts.tokenizer.sha256, "the tokenizer (its SHA-256)", group=world)
    return texts


def make_trainer(settings: Settings, texts: Texts, topology: Topology, device: torch.device) -> Trainer:
    """Model and optimizer from the run's seed: the same weights at every layout."""
    torch.default_generator.manual_seed(settings.training.seed)
    groups = ProcessGroupCollection.from_topology(topology)
    model = build_model(settings, texts.tokenizer.vocab_size, pg_collection=groups, device=device)
    return Trainer(settings, model, tp_group=topology.group("tp"), dp_group=topology.group("dp"))


def open_session(settings: Settings, ranks: Ranks, texts: Texts) -> Session:
    """Set up a run.

    Raises:
        ConfigError: the settings do not fit the ranks.
        DataError: the text is too short for the settings.
    """
    settings.check_world(ranks.world_size)
    train = TokenDataset(texts.train_tokens, settings.model.sequence_length)
    loader = DataLoader(train, settings.training.global_batch_size, settings.training.seed)
    windows = EvaluationWindows(texts.held_out_tokens, settings.model.sequence_length)
    topology = Topology.create(tp=settings.parallel.tp)
    trainer = make_trainer(settings, texts, topology, ranks.device)
    return Session(
        settings,
        ranks,
        topology,
        texts,
        loader,
        windows,
        trainer,
        carrier=carrier(topology.group("tp"), ranks.device),
    )
