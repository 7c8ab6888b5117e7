"""The weight gradients of experts can wait for a later step of the zero-bubble schedule, and are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.parity import assert_close_to
from models.experts.test_moe import KINDS, LENGTH, WIDTH, moe_layer
from run.tiny_layouts import losses_of, trainer_of

from shardwise.core.topology import Groups, Topology
from shardwise.run.settings import ParallelSettings, RecomputeSettings


@pytest.mark.ranks(1)
@pytest.mark.parametrize("frozen", [None, "up", "down"])
def test_gradients_of_weights_wait_and_all_others_do_not(group, frozen):
    layers = [
        moe_layer(KINDS["biases, clamped"], Groups.alone(group), delay_wgrad_compute=delays) for delays in (False, True)
    ]
    inputs: list[torch.Tensor] = []
    for layer in layers:
        if frozen is not None:
            layer.experts.get_parameter(frozen).requires_grad_(False)
        for number in range(2):
            x = torch.randn(LENGTH, 2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
            inputs.append(x.requires_grad_())
            layer(x).square().sum().backward()
    for first, second in zip(inputs[:2], inputs[2:], strict=True):
        assert_close_to(second.grad, first.grad, rtol_of_norm=1e-13, name="input")
    now, later = layers
    trained = [name for name in ("up", "down") if name != frozen]
    assert all(later.experts.get_parameter(name).grad is None for name in trained)
    told: list[Any] = []
    for module in later.experts.delayed.values():
        module.register_weight_gradient_hook(told.append)
    later.experts.backward_dw()
    assert [id(each) for each in told] == [id(later.experts.get_parameter(name)) for name in trained]
    for name, param in now.named_parameters():
        gradient = later.get_parameter(name).grad
        assert (gradient is None) == (param.grad is None) == (name == f"experts.{frozen}")
        if gradient is not None:
            assert_close_to(gradient, param.grad, rtol_of_norm=1e-13, name=name)


LAYOUTS = {
    "ep 2": (ParallelSettings(pp=2, ep=2, pipeline_schedule="zero-bubble"), None),
    "zero": (ParallelSettings(pp=2, ep=2, zero=1, pipeline_schedule="zero-bubble"), None),
    "tp 2, recomputed": (
        ParallelSettings(pp=2, tp=2, ep=2, etp=1, sequence_parallel=True, pipeline_schedule="zero-bubble"),
        RecomputeSettings(granularity="full"),
    ),
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "expert_ffn_hidden_size": 12}


@pytest.mark.ranks(4)
def test_runs_train_as_one_rank(group, tmp_path):
    options: dict[str, Any] = {"model": EXPERTS, "global_batch_size": 8, "micro_batch_size": 1, "dtype": "float64"}
    expected = losses_of(trainer_of(tmp_path, **options), 4)
    assert expected[3] != expected[0]
    for name, (parallel, recompute) in LAYOUTS.items():
        groups = Groups.of(Topology.create(tp=parallel.tp, pp=2, ep=2, etp=parallel.etp))
        losses = losses_of(trainer_of(tmp_path, parallel, recompute, groups=groups, **options), 4)
        assert_close_to(losses, expected, rtol_of_norm=1e-11, name=name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grouped_products_train_as_without_delay(group, tmp_path, dtype):
    """In bf16 gradients are summed in fp32 buffers."""
    options: dict[str, Any] = {"model": EXPERTS | {"hidden_size": 32}, "dtype": dtype, "micro_batch_size": 1}
    groups = Groups.of(Topology.create(pp=2))
    usual, zero_bubble = (
        losses_of(trainer_of(tmp_path, ParallelSettings(pp=2, pipeline_schedule=name), groups=groups, **options), 4)
        for name in ("1f1b", "zero-bubble")
    )
    assert_close_to(zero_bubble, usual, rtol_of_norm=1e-6 if dtype == "float32" else 1e-3, name=dtype)
