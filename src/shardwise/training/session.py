"""Everything that a run needs, set up on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.communication.agreement import agree, check_same, gather_objects
from shardwise.communication.transports import transport_name
from shardwise.data import DataLoader, EvaluationWindows, TokenDataset
from shardwise.layers import named_param_layouts
from shardwise.models.chunks import ModelChunks
from shardwise.models.gpt import GPT
from shardwise.topology import Groups, Topology
from shardwise.training.build import build_chunks, build_model
from shardwise.training.ranks import Ranks
from shardwise.training.settings import RunSettings, Settings
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
        transport: how the tensor-parallel ranks' tensors travel.
        num_parameters: of the whole model, tied weights counted once.
        build: the run's model, with an optimizer, as it starts, on the groups of any topology.
        base: what the model starts from, as checkpoints record it.
    """

    settings: RunSettings
    ranks: Ranks
    topology: Topology
    texts: Texts
    loader: DataLoader
    windows: EvaluationWindows
    trainer: Trainer
    transport: str
    num_parameters: int
    build: Callable[[Topology], Trainer]
    base: Mapping[str, Any] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        """The run's folder."""
        return Path(self.settings.out)

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.out / "checkpoints"


def gather_texts(settings: Settings, ranks: Ranks) -> Texts:
    """``share_texts`` of ``prepare_texts``."""
    return share_texts(lambda: prepare_texts(settings), ranks)


def share_texts(prepare: Callable[[], Texts], ranks: Ranks) -> Texts:
    """``prepare()`` on every rank; the first of each machine does the work and the others find it in the cache.

    Raises:
        ShardwiseError: what went wrong on any rank, on every rank.
        DesyncError: the ranks read different texts.
    """
    with ranks.phase("reading the text"):
        texts = agree(lambda: prepare() if ranks.local_rank == 0 else None, group=ranks.control)
        texts = agree(lambda: texts or prepare(), group=ranks.control)
    assert texts is not None
    if texts.note is not None and ranks.is_first:
        print(f"note   {texts.note}", flush=True)
    check_same(texts.corpus.sha256, "the text (its SHA-256)", group=ranks.control)
    check_same(texts.tokenizer.sha256, "the tokenizer (its SHA-256)", group=ranks.control)
    return texts


def make_trainer(settings: Settings, texts: Texts, topology: Topology, device: torch.device) -> Trainer:
    """Model and optimizer from the run's seed: the same weights at every layout."""
    torch.default_generator.manual_seed(settings.training.seed)
    groups = Groups.of(topology)
    chunked = topology.size("pp") > 1 and settings.parallel.virtual_stages > 1
    build = build_chunks if chunked else build_model
    return trainer_of(settings, build(settings, texts.tokenizer.vocab_size, groups=groups, device=device), topology)


def trainer_of(settings: RunSettings, model: GPT | ModelChunks, topology: Topology) -> Trainer:
    """A trainer of a built model on the groups of ``topology``."""
    return Trainer(
        settings,
        model,
        tp_group=topology.group("tp"),
        dp_group=topology.group("dp"),
        pp_group=topology.group("pp"),
        embd_group=topology.group("embd") if "embd" in topology else None,
    )


def open_session(settings: Settings, ranks: Ranks, texts: Texts) -> Session:
    """Set up a run that trains a new model.

    Raises:
        ConfigError: the settings do not fit the ranks.
        DataError: the text is too short for the settings.
    """
    return assemble_session(
        settings, ranks, texts, lambda topology: make_trainer(settings, texts, topology, ranks.device)
    )


def assemble_session(
    settings: RunSettings,
    ranks: Ranks,
    texts: Texts,
    build: Callable[[Topology], Trainer],
    *,
    base: Mapping[str, Any] | None = None,
) -> Session:
    """Set up a run of any model.

    Args:
        settings: of the run.
        ranks: who this process is.
        texts: what is trained and measured on.
        build: see ``Session``.
        base: see ``Session``.

    Raises:
        ConfigError: the settings do not fit the ranks.
        DataError: the text is too short for the settings.
    """
    settings.check_world(ranks.world_size)
    train = TokenDataset(texts.train_tokens, settings.sequence_length)
    loader = DataLoader(train, settings.training.global_batch_size, settings.training.seed)
    windows = EvaluationWindows(texts.held_out_tokens, settings.sequence_length)
    topology = Topology.create(tp=settings.parallel.tp, pp=settings.parallel.pp, validate=settings.validate)
    trainer = build(topology)
    return Session(
        settings,
        ranks,
        topology,
        texts,
        loader,
        windows,
        trainer,
        transport=transport_name(topology.group("tp"), ranks.device),
        num_parameters=count_parameters(trainer.model, topology),
        build=build,
        base=base or {},
    )


def count_parameters(model: nn.Module, topology: Topology) -> int:
    """Parameters of the whole model, over all ranks and stages that share it; every rank calls."""
    own = sum(
        math.prod(layout.global_shape)
        for _, param, layout in named_param_layouts(model, topology.size("tp"))
        if not getattr(param, "shared", False)
    )
    if topology.size("pp") == 1:
        return own
    return sum(gather_objects(own, "the number of parameters", group=topology.group("pp")))
