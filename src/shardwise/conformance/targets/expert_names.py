"""The tensors of experts under this library's names, whole: how the protocol's are put together, and back."""

import torch
from torch import Tensor

_SAME = {
    "router": "router.weight",
    "router_bias": "router.bias",
    "router_a": "router.lora.weight.lora_A",
    "router_b": "router.lora.weight.lora_B",
    "shared_down": "shared.linear_fc2.weight",
    "shared_scale": "shared_gate.weight",
}
_JOINED = {
    ("gate", "up"): "experts.up",
    ("gate_bias", "up_bias"): "experts.up_bias",
    ("inner_a",): "experts.lora.up.lora_A",
    ("inner_b",): "experts.lora.up.lora_B",
    ("down_bias",): "experts.down_bias",
}
"""Tensors whose rows follow each other in each expert."""
_TRANSPOSED = {"down": "experts.down", "outer_a": "experts.lora.down.lora_A", "outer_b": "experts.lora.down.lora_B"}


def to_engine(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a layer of experts, from the tensors of ``DenseExperts``."""
    result = {theirs: weights[ours] for ours, theirs in _SAME.items() if ours in weights}
    for names, theirs in _JOINED.items():
        if names[0] in weights:
            result[theirs] = torch.cat([weights[name] for name in names], 1).flatten(0, 1)
    result |= {
        theirs: weights[ours].transpose(1, 2).flatten(0, 1) for ours, theirs in _TRANSPOSED.items() if ours in weights
    }
    if "shared_gate" in weights:
        result["shared.linear_fc1.weight"] = torch.cat([weights["shared_gate"], weights["shared_up"]])
    return result


def from_engine(tensors: dict[str, Tensor], num: int) -> dict[str, Tensor]:
    """Return whole tensors of ``num`` experts and their router under the protocol's names."""
    result = {ours: tensors[theirs] for ours, theirs in _SAME.items() if theirs in tensors}
    of_experts = {name: each.unflatten(0, (num, -1)) for name, each in tensors.items() if name.startswith("experts.")}
    for names, theirs in _JOINED.items():
        if theirs in of_experts:
            result |= dict(zip(names, of_experts[theirs].chunk(len(names), 1), strict=True))
    result |= {ours: of_experts[theirs].transpose(1, 2) for ours, theirs in _TRANSPOSED.items() if theirs in of_experts}
    if "shared.linear_fc1.weight" in tensors:
        result["shared_gate"], result["shared_up"] = tensors["shared.linear_fc1.weight"].chunk(2)
    return result
