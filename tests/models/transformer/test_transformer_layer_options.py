"""Every option of a layer, at any tensor-parallel size, equals a dense layer that shares no code with it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from dense_layer import dense_layer
from harness.groups import alone
from harness.parity import assert_close_to, assert_unmodified, gather_shards
from layer_cases import CASES, DOCUMENTS, SLOPES, B, H, S, layer_of, mask_of, rotary_of
from models.model_checks import flexible_on_a_cpu, varlen_on_a_cpu

from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import balanced_range
from shardwise.models.transformer import attention_kernels, masks
from shardwise.models.transformer.masks import AttnMaskType
from shardwise.tensor_parallel.layers import named_param_layouts
from shardwise.training.gradients.finalize import finalize_gradients_


@pytest.mark.sample(3)
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True], ids=["", "sp"])
def test_options_equal_the_dense_layer(group, sequence_parallel):
    check_options(group, sequence_parallel and group.size() > 1)


@pytest.mark.ranks(1, 2, slow=(2,))
@pytest.mark.parametrize("rows", [1, 4])
def test_options_hold_in_blocks(group, monkeypatch, rows):
    monkeypatch.setattr(masks, "_ROWS", rows)
    monkeypatch.setattr(attention_kernels, "_SCORES_OF_BLOCK", 300 * rows)
    check_options(group, sequence_parallel=False)


@pytest.mark.ranks(1, 2)
def test_documents_and_windows_need_no_mask_on_cuda(group, monkeypatch):
    """With a definition of the kernel, which PyTorch has on CUDA only."""
    used = []
    monkeypatch.setattr(attention_kernels, "takes_packed", lambda query: True)
    monkeypatch.setattr(
        "torch.nn.attention.varlen.varlen_attn",
        lambda *given, **options: used.append(1) or varlen_on_a_cpu(*given, **options),
    )
    in_order = DOCUMENTS.sort(dim=1).values
    packed = dataclasses.replace(CASES["packed"], documents=in_order)
    cases = {
        "packed": packed,
        "packed, window": dataclasses.replace(packed, options=packed.options | {"window_size": (2, 0)}),
        "packed, both sides": dataclasses.replace(
            CASES["window on both sides"], documents=in_order, options={"window_size": (1, 1)}
        ),
        "packed, uneven heads": dataclasses.replace(CASES["one key-value head"], documents=in_order),
        "packed, latent": dataclasses.replace(CASES["latent"], documents=in_order),
        "window": CASES["mistral"],
        "window on both sides": CASES["window on both sides"],
    }
    check_options(group, sequence_parallel=False, cases=cases)
    assert len(used) == len(cases)
    # A document in two pieces has a mask.
    check_options(group, sequence_parallel=False, cases={"in pieces": CASES["packed"]})
    assert len(used) == len(cases)


@pytest.mark.ranks(1, 2, slow=(2,))
def test_flexible_attention_equals_the_dense_layer(group, monkeypatch):
    """With a definition of PyTorch's FlexAttention, which has no backward on a CPU."""
    found = flexible_on_a_cpu(monkeypatch)
    check_options(group, sequence_parallel=False)
    has_functions = [
        case.alibi or case.forbidden is not None or case.documents is not None
        or not case.options.keys().isdisjoint(("window_size", "attention_sinks"))
        for case in CASES.values()
        if "attention_backend" not in case.options
    ]  # fmt: skip
    assert len(found) == sum(has_functions)


def check_options(group, sequence_parallel, cases=CASES):
    own = alone(group)
    for name, case in cases.items():
        config, layer = layer_of(case, group, sequence_parallel=sequence_parallel)
        weights = {
            key: gather_shards(param, layout, group).requires_grad_()
            for key, param, layout in named_param_layouts(layer, group.size())
        }
        whole = torch.randn(S, B, H, dtype=torch.float64, requires_grad=True)
        weighting = torch.randn(S, B, H, dtype=torch.float64)
        expected = dense_layer(
            config,
            weights,
            whole,
            causal=case.mask_type is AttnMaskType.causal,
            forbidden=case.forbidden,
            documents=case.documents,
            share=case.share,
            slopes=SLOPES[case.heads] if case.alibi else None,
            activation=case.activation,
        )
        (expected * weighting).sum().backward()

        mine = slice(*balanced_range(S, group.size(), group.rank())) if sequence_parallel else slice(None)
        x = whole.detach()[mine].clone().requires_grad_()
        inputs = {"x": x, "documents": case.documents, "forbidden": case.forbidden}
        with assert_unmodified(**{key: value for key, value in inputs.items() if value is not None}):
            output = layer(
                x,
                attention_mask=mask_of(case, config, group),
                rotary=rotary_of(case, config),
                sequence=SequenceView(S, group if sequence_parallel else None),
            )
            (output * weighting[mine]).sum().backward()
        finalize_gradients_(layer, tp_group=group, dp_group=own)
        assert_close_to(output.detach(), expected[mine].detach(), rtol_of_norm=1e-13, name=f"{name}: output")
        assert_close_to(x.grad, whole.grad[mine], rtol_of_norm=1e-12, name=f"{name}: input gradient")
        for key, param, layout in named_param_layouts(layer, group.size()):
            gradient = gather_shards(param.grad, layout, group)
            assert_close_to(gradient, weights[key].grad, rtol_of_norm=1e-12, name=f"{name}: gradient of {key}")
