"""BERT's heads on ranks that share the positions of each sample equal those on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.model_checks import alone, check_gradients, randomise_small_parameters
from models.test_context_parallel import VOCABULARY
from torch import Tensor

from shardwise.core.random import seed_streams
from shardwise.core.topology import Groups, Topology
from shardwise.models import ModelConfig
from shardwise.models.bert import Bert
from shardwise.training.gradients.finalize import finalize_gradients_

LAYOUTS: dict[int, tuple[dict[str, Any], ...]] = {2: ({"cp": 2},), 3: ({"cp": 3},), 4: ({"cp": 2, "tp": 2},)}
KINDS: dict[str, dict[str, Any]] = {
    "post-norm": {"norm_position": "post", "embedding_layernorm": True, "final_layernorm": False},
    "windows": {"window_size": (4, 3)},
}


def build(kind: str, groups: Groups, *, sequence_parallel: bool) -> Bert:
    torch.manual_seed(3)
    options: dict[str, Any] = {"num_layers": 2, "hidden_size": 20, "num_attention_heads": 4, "init_method_std": 0.2}
    options |= {"hidden_dropout": 0.2, "attention_dropout": 0.0, "params_dtype": torch.float64}
    config = ModelConfig(**options | KINDS[kind], sequence_parallel=sequence_parallel)
    model = Bert(config, VOCABULARY, 32, groups=groups, num_tokentypes=2)
    randomise_small_parameters(model, groups.tp)
    return model


def inputs_of(count: int, length: int) -> dict[str, Tensor]:
    """Samples of several lengths, which are padded."""
    generator = torch.Generator().manual_seed(count)

    def drawn(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    places, ends = torch.arange(length), length - 4 * torch.arange(count)[:, None]
    ids = (1 + drawn(VOCABULARY - 1, count, length)).masked_fill(places >= ends, 0)
    return {
        "input_ids": ids,
        "lm_labels": drawn(4, count, length).masked_fill(drawn(3, count, length) == 0, -100),
        "attention_mask": (places < ends).long(),
        "tokentype_ids": (places >= 6).long().expand(count, -1),
    }


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_one_rank(group, kind):
    """With lengths that nothing divides, down to a position for each rank, and with fewer samples than ranks."""
    for sizes in LAYOUTS[group.size()]:
        topology = Topology.create(**sizes)
        groups, one = Groups.of(topology), alone(topology)
        dense = build(kind, one, sequence_parallel=False)
        split = build(kind, groups, sequence_parallel="tp" in sizes)
        for count, length in ((3, 13), (1, group.size())):
            given, outputs = inputs_of(count, length), []
            for model in (dense, split):
                seed_streams(7, groups.tp.rank() if model is split else 0, rng="global")
                model.zero_grad()
                losses, of_pairs = model(**given)
                (losses.sum() + of_pairs.square().sum()).backward()
                outputs.append((losses, of_pairs))
            context = split.view_of(length).context
            assert context is not None
            (expected, of_all), (actual, of_own) = outputs
            torch.testing.assert_close(actual, context.own(expected, dim=1), rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(of_own, context.own_samples(of_all), rtol=1e-10, atol=1e-10)
            assert expected.abs().max() > 0
            finalize_gradients_(split, tp_group=groups.tp, dp_group=groups.dp)
            check_gradients(split, dense, groups, atol=1e-11)
