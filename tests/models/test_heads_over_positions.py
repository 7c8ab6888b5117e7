"""BERT and classification heads whose ranks share the positions of each sample equal those on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.model_checks import alone, check_gradients, randomise_small_parameters
from models.test_context_parallel import VOCABULARY
from torch import Tensor

from shardwise.core.random import seed_streams
from shardwise.core.topology import Groups, Topology
from shardwise.models import GPT, Classification, ModelConfig
from shardwise.models.bert import Bert
from shardwise.training.optimizer.gradients import finalize_gradients_

LAYOUTS: dict[int, tuple[dict[str, Any], ...]] = {2: ({"cp": 2},), 3: ({"cp": 3},), 4: ({"cp": 2, "tp": 2},)}
# With dropout of hidden states and of the head's input, whose masks are those of whole samples.
SEQUENCES = Classification("sequence-classification", 5, bias=True, pad_token_id=0, dropout=0.3)
TOKENS = Classification("token-classification", 4, dropout=0.3)
KINDS: dict[str, tuple[type[GPT] | type[Bert], dict[str, Any], Classification | None]] = {
    "bert": (Bert, {"norm_position": "post", "embedding_layernorm": True, "final_layernorm": False}, None),
    "windowed bert": (Bert, {"window_size": (4, 3)}, None),
    "bert, sequences": (Bert, {}, SEQUENCES.with_problem("single_label_classification")),
    "bert, tokens": (Bert, {}, TOKENS),
    "gpt, sequences": (GPT, {}, SEQUENCES.with_problem("multi_label_classification")),
    "gpt, numbers": (GPT, {}, SEQUENCES.with_problem("regression")),
    "gpt, tokens": (GPT, {"window_size": (5, 0)}, TOKENS),
}


def build(kind: str, groups: Groups, *, sequence_parallel: bool) -> GPT | Bert:
    architecture, changes, head = KINDS[kind]
    torch.manual_seed(3)
    options: dict[str, Any] = {"num_layers": 2, "hidden_size": 20, "num_attention_heads": 4, "init_method_std": 0.2}
    options |= {"hidden_dropout": 0.2, "attention_dropout": 0.0, "params_dtype": torch.float64}
    config = ModelConfig(**options | changes, sequence_parallel=sequence_parallel)
    more = {"num_tokentypes": 2} if architecture is Bert else {}
    model = architecture(config, VOCABULARY, 32, groups=groups, classification=head, **more)
    randomise_small_parameters(model, groups.tp)
    return model


def inputs_of(kind: str, count: int, length: int) -> dict[str, Tensor]:
    """Samples of several lengths, which are padded; heads of sequences read another position in each."""
    architecture, _, head = KINDS[kind]
    generator = torch.Generator().manual_seed(count)

    def drawn(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    places, ends = torch.arange(length), length - 4 * torch.arange(count)[:, None]
    ids = (1 + drawn(VOCABULARY - 1, count, length)).masked_fill(places >= ends, 0)
    if head is None or head.is_of_tokens:
        labels = drawn(4, count, length).masked_fill(drawn(3, count, length) == 0, -100)
    else:
        labels = drawn(5, count) if head.problem_type == "single_label_classification" else drawn(2, count, 5).double()
    named = {"input_ids": ids, "lm_labels" if head is None else "labels": labels}
    if architecture is GPT:
        return named
    return named | {"attention_mask": (places < ends).long(), "tokentype_ids": (places >= 6).long().expand(count, -1)}


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
            given, outputs = inputs_of(kind, count, length), []
            for model in (dense, split):
                seed_streams(7, groups.tp.rank() if model is split else 0, rng="global")
                model.zero_grad()
                output = model(**given)
                losses, of_pairs = output if isinstance(output, tuple) else (output, None)
                (losses.sum() + (0 if of_pairs is None else of_pairs.square().sum())).backward()
                outputs.append((losses, of_pairs))
            context = split.view_of(length).context
            assert context is not None
            (expected, of_all), (actual, of_own) = outputs
            is_bert = KINDS[kind][2] is None
            own = context.own(expected, dim=1) if is_bert else context.own_samples(expected)
            torch.testing.assert_close(actual, own, rtol=1e-10, atol=1e-10)
            if is_bert:
                torch.testing.assert_close(of_own, context.own_samples(of_all), rtol=1e-10, atol=1e-10)
            assert expected.abs().max() > 0
            finalize_gradients_(split, tp_group=groups.tp, dp_group=groups.dp)
            check_gradients(split, dense, groups, atol=1e-11)
