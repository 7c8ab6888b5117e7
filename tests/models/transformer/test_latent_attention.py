"""Latent attention: what it communicates, and configs that cannot be."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from harness.groups import alone
from harness.parity import assert_bit_equal
from layer_cases import CASES, B, H, S, config_of, layer_of

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError
from shardwise.core.sequence_view import SequenceView
from shardwise.models.transformer.attention import SelfAttention
from shardwise.models.transformer.heads import LatentAttention
from shardwise.models.transformer.latent_attention import LatentSelfAttention
from shardwise.nn import named_param_layouts
from shardwise.training.step_settings import OptimizerSettings

LATENT = CASES["latent"]
WIDTHS = LATENT.options["latent"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_ranks_exchange_latents_and_not_hidden_states(group, sequence_parallel):
    attention = LatentSelfAttention(config_of(LATENT, group, sequence_parallel=sequence_parallel), 1, group)
    positions = SequenceView(S, group if sequence_parallel else None)
    hidden = torch.randn(positions.size, B, H, dtype=torch.float64, requires_grad=True)
    # The latents of queries and of keys and values, and the rotated part of the keys.
    widths = [WIDTHS.query_rank, WIDTHS.key_value_rank, WIDTHS.rotary_width]
    with CollectiveCounter() as forward:
        output = attention(hidden, sequence=positions)
    with CollectiveCounter() as backward:
        output.sum().backward()
    found = [sorted(launch.name for launch in counter.launches) for counter in (forward, backward)]
    if sequence_parallel:
        # A layer gathers its input again in the backward.
        gathers = len(widths)
        assert found[0] == ["all_gather"] * gathers + ["reduce_scatter"]
        assert found[1] == ["all_gather"] * gathers + ["reduce_scatter"] * gathers
    else:
        assert found == [["all_reduce"], ["all_reduce"] * len(widths)]
        num_bytes = sorted(launch.num_bytes for launch in backward.launches)
        assert num_bytes == sorted(8 * S * B * width for width in widths)


@pytest.mark.ranks(3)
def test_initial_values_are_those_of_one_rank(group):
    own, made = alone(group), []
    for ranks in (group, own):
        torch.manual_seed(6)
        made.append(LatentSelfAttention(config_of(LATENT, ranks), 1, ranks))
    whole = dict(made[1].named_parameters())
    for name, param, layout in named_param_layouts(made[0], group.size()):
        assert_bit_equal(param, layout.take(whole[name], group.rank()), name=name)


def test_values_that_cannot_be():
    for values, message in (
        ({"key_value_rank": 0}, "latent: key_value_rank is 0; it must be an integer from 1 to 1073741824"),
        ({"query_rank": 2.0}, "latent: query_rank is 2.0; it must be an integer from 1 to 1073741824"),
        ({"rotary_width": 3}, "latent: rotary_width is 3; pairs are rotated, so it must be even"),
    ):
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(WIDTHS, **values)


@pytest.mark.ranks(1)
def test_options_that_exclude_latents(group):
    for options, message in (
        ({"exact_parts": 2}, "latent cannot be used with exact_parts"),
        ({"qk_layernorm": True}, "latent cannot be used with qk_layernorm"),
        ({"latent": LatentAttention(5, 2, 4, 3)}, "kv_channels is 7, and latent makes it 6; leave it out"),
    ):
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(config_of(LATENT, group), **options)
    with pytest.raises(ConfigError, match="num_query_groups is 3, and latent makes it 6"):
        config_of(dataclasses.replace(LATENT, heads=6, groups=3), group)
    with pytest.raises(ConfigError, match="SelfAttention has no latents"):
        SelfAttention(config_of(LATENT, group), 1, group)
    _, layer = layer_of(LATENT, group)
    with pytest.raises(ConfigError, match="muon cannot be used with latent attention"):
        OptimizerSettings(name="muon").make(layer)
