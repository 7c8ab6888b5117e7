"""A run of training on the pretended GPU, as `shardwise train` starts it but for the text."""

from functools import partial

import numpy as np
import pytest
import torch

from shardwise.core import initialization
from shardwise.data import Corpus, HeldOut, TokenRows, TokenStream, WindowRows
from shardwise.models.adapters import LoraConfig
from shardwise.run import run
from shardwise.run.banner import banner
from shardwise.run.processes.ranks import Ranks
from shardwise.run.session import open_session
from shardwise.run.settings import (
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    RecomputeSettings,
    Settings,
    TrainingSettings,
)
from shardwise.run.tasks.task import Method, Task
from shardwise.run.tasks.task_data import TaskData
from shardwise.run.tasks.texts import NewModel
from shardwise.storage.adapters import add_lora_
from shardwise.storage.huggingface.architectures import ARCHITECTURES

V = 128256
LLAMA_3_8B = {
    "hidden_size": 4096,
    "num_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "vocab_size": V,
    "tie_embeddings": False,
}


class Tokens:
    """In the place of a tokenizer of that many ids, which no small text could train."""

    vocab_size = V
    sha256 = ""

    def save(self, folder):
        """There is nothing to save."""


class MadeUpTokens(Method):
    """In the place of a text."""

    def __init__(self, sequence_length):
        self.sequence_length = sequence_length

    def read(self, ranks):
        s = self.sequence_length
        corpus = Corpus("zeros", ("0",))
        train, held_out = (TokenStream("zeros", np.zeros(n * s + 1, dtype=np.uint32), 0, 4 * n * s) for n in (80, 2))
        held_out = HeldOut(WindowRows(held_out, s))
        return TaskData(corpus.name, corpus.sha256, Tokens(), TokenRows(train, s), held_out)


class WithAdapters(NewModel):
    """Adapters as `shardwise finetune` adds them."""

    def build(self, settings, data, *, groups, device):
        model = super().build(settings, data, groups=groups, device=device)
        add_lora_(model, LoraConfig(r=16, lora_alpha=32, target_modules=("all-linear",)), ARCHITECTURES["llama"])
        return model


def task_of(source, settings):
    return Task(settings, source(settings), MadeUpTokens(settings.model.sequence_length))


def run_two_steps(
    folder,
    around,
    *,
    world_size,
    rank=0,
    parallel=(),
    training=(),
    model=(),
    recompute=(),
    optimizer="adamw",
    adapters=False,
):
    """Train one step, and a second one: in the first, ranks compare their calls. Return the banner."""
    # Initial values are numbers, which nobody asks for here.
    initialization.fill_normal_ = lambda *_, **__: None
    settings = Settings(
        data=("-",),
        out=folder,
        model=ModelSettings(**dict(model)),
        parallel=ParallelSettings(**dict(parallel)),
        recompute=RecomputeSettings(**dict(recompute)),
        optimizer=OptimizerSettings(name=optimizer),
        training=TrainingSettings(**{"steps": 3, "eval_every": 0} | dict(training)),
    )
    own = run._Training._step

    def step(self, number, *others):
        if number == 2:
            raise InterruptedError
        return around(number, partial(own, self, number, *others))

    run._Training._step = step
    ranks = Ranks(rank, 0, world_size, torch.device("cuda", 0))
    session = open_session(settings, ranks, partial(task_of, WithAdapters if adapters else NewModel))
    said = banner(session)
    try:
        with pytest.raises(InterruptedError):
            run.train(session)
    finally:
        run._Training._step = own
    return said
