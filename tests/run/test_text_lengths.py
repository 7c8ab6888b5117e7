"""Rotary frequencies that depend on the length of a text are those of the text alone, whatever it is trained beside."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
from run.test_chats import TEMPLATE
from run.test_dpo import pairs_of, write_lines
from storage.adapters.tiny_models import save_model

from shardwise.data import Batch
from shardwise.data.tokenizer import Tokenizer
from shardwise.run.processes.ranks import Ranks
from shardwise.run.session import open_session
from shardwise.run.settings import (
    DpoSettings,
    FinetuneSettings,
    ParallelSettings,
    PretrainedSettings,
    SampleSettings,
    TrainingSettings,
)
from shardwise.run.tasks.preference import log_probs

CONTEXT = 19
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 5.0],
    "rope_theta": 100.0,
    "original_max_position_embeddings": CONTEXT,
}
LAYOUTS = (
    (ParallelSettings(tp=2), 4),
    (ParallelSettings(tp=2), 1),
    (ParallelSettings(), 2),
    (ParallelSettings(), 1),
    (ParallelSettings(pp=2), 1),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A model with LongRoPE, and data."""
    root = tmp_path_factory.mktemp("lengths")
    pairs = pairs_of(16)
    chats = [{"messages": [*pair["prompt"], *pair["chosen"]]} for pair in pairs]
    for name, records in (("pairs", pairs), ("chats", chats)):
        write_lines(root / f"{name}.jsonl", records)
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer = Tokenizer.train([json.dumps(pairs), "user\n assistant\n" * 9], 300, names)
    save_model("llama", root / "llama", vocab_size=301, dtype=torch.float64, rope_parameters=dict(LONGROPE))
    tokenizer.save(root / "llama")
    (root / "llama" / "chat_template.jinja").write_text(TEMPLATE)
    return root


def open_run(root, out, what, parallel, micro_batch_size, monkeypatch):
    data = "pairs" if what == "pairs" else "chats"
    options = {
        "base": str(root / "llama"),
        "data": (str(root / f"{data}.jsonl"),),
        "out": str(out),
        "device": "cpu",
        "model": PretrainedSettings(sequence_length=60),
        "parallel": parallel,
        "training": TrainingSettings(steps=2, global_batch_size=4, micro_batch_size=micro_batch_size, dtype="float64"),
    }
    kind = DpoSettings if what == "pairs" else FinetuneSettings
    options["samples"] = SampleSettings(packing=what == "packed")
    monkeypatch.setenv("SHARDWISE_CACHE", str(root / f"cache-{dist.get_world_size()}"))
    ranks = Ranks(dist.get_rank(), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    return open_session(kind(**options), ranks)


def texts_of(batch, what):
    """Each text of a batch as a batch of its own, without anything behind it."""
    tokens, labels = batch.tokens, batch.labels
    for row in range(len(tokens)):
        if what != "packed":
            length = int(batch.lengths[row])
            yield Batch(tokens[row : row + 1, :length], labels[row : row + 1, :length])
            continue
        documents = batch.document_ids[row]
        for number in documents[documents >= 0].unique():
            yield Batch(tokens[row : row + 1, documents == number], labels[row : row + 1, documents == number])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["unpacked", "packed"])
def test_losses_are_those_of_texts_alone(group, root, tmp_path, monkeypatch, what):
    """In any micro-batch, over tensor-parallel and data-parallel ranks, and over stages."""
    expected = None
    for parallel, micro_batch_size in LAYOUTS:
        session = open_run(root, tmp_path / "run", what, parallel, micro_batch_size, monkeypatch)
        trainer, objective = session.trainer, session.trainer.objective
        if expected is None:
            (batch,) = session.loader.batch(0, with_lengths=True)
            texts = list(texts_of(batch, what))
            assert {len(text.tokens[0]) > CONTEXT for text in texts} == {False, True}
            with torch.no_grad():
                alone = sum(objective.sums(trainer.model(**objective.inputs(text)), text)[0] for text in texts)
            expected = float(alone) / session.loader.num_labels(0)
        assert trainer.train_step(0, session.loader).loss == pytest.approx(expected, rel=1e-11)
        session.topology.destroy()


@pytest.mark.ranks(2)
def test_answers_are_as_likely_as_alone(group, root, tmp_path, monkeypatch):
    session = open_run(root, tmp_path / "run", "pairs", ParallelSettings(), 2, monkeypatch)
    dataset, trainer = session.loader.rows, session.trainer
    lengths = np.concatenate([dataset.row(index)["lengths"] for index in range(len(dataset))])
    assert lengths.min() <= CONTEXT < lengths.max()
    found = log_probs(trainer, dataset)
    alone = np.empty_like(found)
    with torch.no_grad():
        for index in range(len(dataset)):
            row = dataset.row(index)
            tokens, labels = torch.from_numpy(row["tokens"]), torch.from_numpy(row["labels"])
            for side, length in enumerate(row["lengths"].tolist()):
                loss = trainer.model(tokens[side : side + 1, :length], labels=labels[side : side + 1, :length])
                alone[index, side] = -loss.sum()
    np.testing.assert_allclose(found, alone, rtol=1e-11)
