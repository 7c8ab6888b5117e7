"""Muon of models that transformers computes: one rank's updates at every layout, and those of a table of ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from harness.model_options import TRANSFORMERS
from harness.parity import assert_close_to, gather_shards
from torch import Tensor
from training.optimizer.test_muon import OPTIONS, give_gradients, newton_schulz

from shardwise.core.topology import Groups
from shardwise.models.by_plan import library
from shardwise.models.by_plan.model import PlannedModel
from shardwise.nn import named_param_layouts
from shardwise.training.optimizer.muon import Muon

SIZES = TRANSFORMERS | {
    "vocab_size": 37,
    "moe_intermediate_size": 10,
    "num_hidden_layers": 1,
    "num_experts": 3,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
HALVES = [slice(22), slice(22, 44)]
# Other sizes, and the rows of each matrix in the weights of some names; other weights are one matrix each.
KINDS: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "Apertus": ({}, {}),
    "Phi3": ({}, {"qkv_proj.weight": [slice(24), slice(24, 36), slice(36, 48)], "gate_up_proj.weight": HALVES}),
    "GPTNeoX": (
        {"num_key_value_heads": 6},
        {"query_key_value.weight": [[12 * head + 4 * p + i for head in range(6) for i in range(4)] for p in range(3)]},
    ),
    "GraniteMoe": ({}, {"gate_up_proj": HALVES}),
    "Llama4": ({}, {"gate_up_proj": HALVES}),
    "DeepseekV3": (LATENT | {"first_k_dense_replace": 1}, {}),
}


# Seven have each kind.
@pytest.mark.sample(7)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kind", KINDS)
def test_updates_are_those_of_whole_matrices(group: dist.ProcessGroup, kind: str) -> None:
    sizes, rows = KINDS[kind]
    config = getattr(transformers, "Llama4TextConfig" if kind == "Llama4" else f"{kind}Config")(**SIZES | sizes)
    fields = config.to_dict() | {"architectures": [f"{kind}ForCausalLM"]}
    description = library.describe({name: value for name, value in fields.items() if value is not None})
    model = PlannedModel(replace(description, params_dtype=torch.float64), groups=Groups(tp=group))
    wholes = {}
    generator = torch.Generator().manual_seed(4)
    for name, param, layout in named_param_layouts(model, group.size()):
        wholes[name] = torch.randn(layout.global_shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            param.copy_(layout.take(wholes[name], group.rank()))
    muon = Muon(model, **OPTIONS)
    matrices = {id(param) for param in muon._parts}
    names = {name for name, param in model.named_parameters() if id(param) in matrices}
    momenta = {name: torch.zeros_like(wholes[name]) for name in names}
    for step in range(2):
        for name, gradient in give_gradients(model, group, step).items():
            if name in names:
                momenta[name] = 0.9 * momenta[name] + 0.1 * gradient
                update_(wholes[name], 0.1 * gradient + 0.9 * momenta[name], rows_of(name, rows), kind == "Llama4")
        muon.step()
    for name, param, layout in named_param_layouts(model, group.size()):
        if name in names:
            found = gather_shards(param.detach(), layout, group)
            assert_close_to(found, wholes[name], rtol_of_norm=1e-12, name=name)
    linear = {name for name in wholes if ".layers." in name and wholes[name].dim() > 1 and "conv" not in name}
    assert names == {name for name in linear if ".gate." not in name and "router" not in name}


def rows_of(name: str, rows: dict[str, list[Any]]) -> list[Any]:
    return next((each for ending, each in rows.items() if name.endswith(ending)), [slice(None)])


def update_(whole: Tensor, nesterov: Tensor, rows: list[Any], turns: bool) -> None:
    """The formula, on each whole matrix by itself."""
    whole *= 1 - 1.5 * 0.02 * 0.1
    for weight, gradient in zip(whole, nesterov, strict=True) if whole.dim() == 3 else [(whole, nesterov)]:
        if turns and whole.dim() == 3:
            weight, gradient = weight.T, gradient.T
        for each in rows:
            part = gradient[each]
            weight[each] -= 1.5 * 0.02 * 0.2 * max(part.shape) ** 0.5 * newton_schulz(part)
