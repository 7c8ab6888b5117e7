"""fp32 copies of a model in 16 bits: updated as an fp32 model with the same gradients would be, and rounded."""

from __future__ import annotations

import pytest
import torch
from harness.parity import assert_bit_equal
from torch import nn

from shardwise.core.sharding import ParamLayout
from shardwise.training.optimizer.adamw import AdamW
from shardwise.training.optimizer.optimizer import MasterWeights

OPTIONS = {"learning_rate": 3e-5, "weight_decay": 0.1, "betas": (0.9, 0.95), "epsilon": 1e-8}
STEPS = 40


def model_of(dtype):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model[2].bias.requires_grad_(False)
    # The same values in both.
    return model.to(torch.bfloat16).to(dtype)


def gradients(step, model, dtype):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(param.shape, generator=generator).to(torch.bfloat16).to(dtype) for param in model.parameters()]


def trained(model, optimizer, *, main_grads=False):
    for step in range(STEPS):
        optimizer.zero_grad()
        for param, gradient in zip(model.parameters(), gradients(step, model, param_dtype(model)), strict=True):
            if not param.requires_grad:
                continue
            if main_grads:
                param.main_grad = gradient.float()
            else:
                param.grad = gradient
        optimizer.step()


def param_dtype(model):
    return next(model.parameters()).dtype


@pytest.mark.parametrize("main_grads", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_copies_are_updated_as_an_fp32_model_would_be(dtype, main_grads):
    whole, model = model_of(torch.float32), model_of(dtype)
    expected = AdamW(whole, **OPTIONS)
    optimizer = MasterWeights(AdamW(model, **OPTIONS), model)
    start = [param.detach().clone() for param in model.parameters()]
    trained(whole, expected)
    trained(model, optimizer, main_grads=main_grads)
    for param, reference, before in zip(model.parameters(), whole.parameters(), start, strict=True):
        assert param.dtype == dtype
        if not param.requires_grad:
            assert_bit_equal(param, before, name="frozen")
            continue
        assert_bit_equal(optimizer.weight_of(param), reference.detach(), name="copy")
        assert_bit_equal(param.detach(), reference.detach().to(dtype), name="rounded")
        # What a checkpoint stores of the optimizer is the copy's.
        for kind, (moment, _) in optimizer.state_of(param, ParamLayout.replicated(param.shape, 1)).items():
            assert_bit_equal(moment, expected.state[reference][kind], name=kind)
    assert {state["exp_avg"].dtype for state in optimizer.optimizer.state.values()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_after_loading_the_model_is_its_copies_rounded(dtype):
    """A checkpoint has the copies alone; what the model's weights were before does not matter."""
    stored, model = model_of(torch.float32), model_of(dtype)
    optimizer = MasterWeights(AdamW(model, **OPTIONS), model)
    frozen = model[2].bias.detach().clone()
    with torch.no_grad():
        for param, whole in zip(model.parameters(), stored.parameters(), strict=True):
            if param.requires_grad:
                whole.add_(torch.randn_like(whole) * 1e-3)
                optimizer.weight_of(param).copy_(whole)
                param.fill_(torch.nan)
    optimizer.set_step_(7)
    for param, whole in zip(model.parameters(), stored.parameters(), strict=True):
        if param.requires_grad:
            assert not torch.equal(whole, whole.to(dtype).float())
            assert_bit_equal(param.detach(), whole.detach().to(dtype), name="rounded")
    assert_bit_equal(model[2].bias.detach(), frozen, name="frozen")


def test_small_steps_are_not_lost():
    """In bf16 by itself most weights stay where they were."""
    whole, copied, pure = model_of(torch.float32), model_of(torch.bfloat16), model_of(torch.bfloat16)
    start = whole[0].weight.detach().clone()
    trained(whole, AdamW(whole, **OPTIONS))
    optimizer = MasterWeights(AdamW(copied, **OPTIONS), copied)
    trained(copied, optimizer)
    trained(pure, AdamW(pure, **OPTIONS))
    moved = (whole[0].weight - start).norm()
    assert (optimizer.weight_of(copied[0].weight) - whole[0].weight).norm() == 0
    assert (pure[0].weight.float() - whole[0].weight).norm() > 0.3 * moved
