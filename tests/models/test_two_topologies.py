"""Models of different topologies live in one process: nothing of one is the other's."""

from __future__ import annotations

import pytest
import torch
from harness.parity import assert_bit_equal

from shardwise.core.random import seed_streams
from shardwise.core.topology import Groups, Topology
from shardwise.models.config import ModelConfig
from shardwise.models.gpt import GPT
from shardwise.training.gradients.finalize import finalize_gradients_
from shardwise.training.optimizer.clipping import clip_grad_norm_

VOCAB, LENGTH, STEPS = 53, 6, 3


class Training:
    """A GPT on its topology, with an optimizer and a batch of its own."""

    def __init__(self, seed: int, *, sequence_parallel: bool, **axes: int) -> None:
        self.seed = seed
        self.topology = Topology.create(**axes)
        self.groups = Groups.of(self.topology)
        config = ModelConfig(
            num_layers=2,
            hidden_size=12,
            num_attention_heads=3,
            ffn_hidden_size=17,
            hidden_dropout=0.2,
            attention_dropout=0.2,
            sequence_parallel=sequence_parallel,
        )
        torch.manual_seed(seed)
        self.model = GPT(config, VOCAB, LENGTH, groups=self.groups, share_embeddings_and_output_weights=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        assert self.groups.dp is not None
        number, share = len(self.losses), self.groups.dp.rank()
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * number + share)
        ids = torch.randint(VOCAB, (2, LENGTH), generator=generator)
        seed_streams(1000 * self.seed + 10 * number + share, self.groups.tp.rank())
        self.optimizer.zero_grad()
        loss = self.model(ids, labels=ids).mean() / self.groups.dp.size()
        loss.backward()
        finalize_gradients_(self.model, tp_group=self.groups.tp, dp_group=self.groups.dp)
        clip_grad_norm_(self.model, 0.5, tp_group=self.groups.tp)
        self.optimizer.step()
        self.losses.append(loss.detach())


def split(seed: int) -> Training:
    """Two ranks split every layer; the sequence too, so that gathered inputs lie in the group's buffers."""
    return Training(seed, sequence_parallel=True, tp=2)


def replicated(seed: int) -> Training:
    """Every rank holds a whole model, and sees samples of its own."""
    return Training(seed, sequence_parallel=False, tp=1)


@pytest.mark.ranks(2)
def test_steps_of_two_models_alternate(group):
    alone = []
    for make, seed in ((split, 1), (replicated, 2)):
        training = make(seed)
        for _ in range(STEPS):
            training.step()
        alone.append(training)
    both = [split(1), replicated(2)]
    assert [training.topology.size("dp") for training in both] == [1, 2]
    assert [training.groups.tp.size() for training in both] == [2, 1]
    for _ in range(STEPS):
        for training in both:
            training.step()
    for together, by_itself in zip(both, alone, strict=True):
        assert len({float(loss) for loss in together.losses}) == STEPS
        assert_bit_equal(torch.stack(together.losses), torch.stack(by_itself.losses))
        expected = dict(by_itself.model.named_parameters())
        for name, param in together.model.named_parameters():
            assert_bit_equal(param.data, expected[name].data, name=name)


@pytest.mark.ranks(2)
def test_the_graphs_of_two_models_cross(group):
    """Both forwards come first, and then both backwards, the first model's first."""

    def gradients(interleaved: bool) -> list[dict[str, torch.Tensor]]:
        trainings = [split(1), replicated(2)]
        losses = []
        for training in trainings:
            seed_streams(7, training.groups.tp.rank())
            ids = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCAB
            losses.append(training.model(ids, labels=ids).mean())
            if not interleaved:
                losses[-1].backward()
        for loss in losses if interleaved else ():
            loss.backward()
        return [
            {name: param.grad for name, param in training.model.named_parameters() if param.grad is not None}
            for training in trainings
        ]

    for crossed, apart in zip(gradients(True), gradients(False), strict=True):
        assert crossed.keys() == apart.keys()
        assert len(crossed) > 10
        for name, grad in crossed.items():
            assert_bit_equal(grad, apart[name], name=name)
