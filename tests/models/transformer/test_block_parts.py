"""Attention and MLP alone: what they communicate, and that recomputing them communicates nothing more."""

import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_bit_equal, assert_close_to

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import balanced_range
from shardwise.megatron.config import TransformerConfig
from shardwise.models.transformer.attention import SelfAttention
from shardwise.models.transformer.mlp import MLP
from shardwise.nn.recompute import recomputed
from shardwise.nn.replicated import replicas_of
from shardwise.tensor_parallel.layers import named_param_layouts

H = 14


def attention(config, group):
    return SelfAttention(config, 1, group)


def part_and_input(make, group, s, sequence_parallel, **options):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=7,
        ffn_hidden_size=29,
        sequence_parallel=sequence_parallel,
        params_dtype=torch.float64,
        init_method_std=0.5,
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0} | options,
    )
    part = make(config, group)
    x = torch.randn(s, 2, H, dtype=torch.float64)
    if sequence_parallel:
        start, stop = balanced_range(s, group.size(), group.rank())
        x = x[start:stop]
    return part, x.clone().requires_grad_()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("make", [attention, MLP])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_recomputation_adds_no_collective(group, make, sequence_parallel, gated):
    s = 13
    options = {"gated_linear_unit": gated, "activation_func": F.silu if gated else F.gelu}
    part, x = part_and_input(make, group, s, sequence_parallel, **options)
    launches, results = [], []
    for call in (lambda function, *args, **kwargs: function(*args, **kwargs), recomputed):
        part.zero_grad()
        x.grad = None
        with CollectiveCounter() as counter:
            output = call(part, x, sequence=SequenceView(s, group if sequence_parallel else None))
            output.backward(torch.ones_like(output))
        launches.append(sorted(launch.name for launch in counter.launches))
        results.append([output.detach(), x.grad, *(param.grad for param in part.parameters())])
    assert launches[0] == launches[1]
    # Korthikanti et al. 2022: g and its conjugate, and one more gather of the input for the weight's gradient.
    assert launches[0] == (["all_gather"] * 3 + ["reduce_scatter"] * 2 if sequence_parallel else ["all_reduce"] * 2)
    for plain, again in zip(*results, strict=True):
        assert_bit_equal(again, plain)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("make", [attention, MLP])
def test_a_shard_of_the_sequence_gives_a_shard_of_the_result(group, make):
    s = 13
    torch.manual_seed(3)
    split, own = part_and_input(make, group, s, True)
    torch.manual_seed(3)
    whole, x = part_and_input(make, group, s, False)
    start, stop = balanced_range(s, group.size(), group.rank())
    with torch.no_grad():
        own.copy_(x[start:stop])
    expected = whole(x)
    output = split(own, sequence=SequenceView(s, group))
    assert_close_to(output.detach(), expected[start:stop].detach(), rtol_of_norm=1e-12)
    expected.square().sum().backward()
    output.square().sum().backward()
    assert_close_to(own.grad, x.grad[start:stop], rtol_of_norm=1e-12)
    others = {name: param for name, param, _ in named_param_layouts(whole, group.size())}
    replicas = replicas_of(split)
    for name, param, _ in named_param_layouts(split, group.size()):
        if "tp" in replicas[param].summed_over:
            torch.distributed.all_reduce(param.grad, group=group)
        assert_close_to(param.grad, others[name].grad, rtol_of_norm=1e-11, name=name)
