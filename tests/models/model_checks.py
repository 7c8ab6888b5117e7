"""What tests of models share: whole weights and gradients, logits of all ranks, small parameters that hide nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_close_to, gather_all, gather_shards
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from shardwise.core.topology import Groups, Topology
from shardwise.kernels import dispatch, flexible_attention
from shardwise.models.transformer import attention_kernels
from shardwise.nn.replicated import replicas_of
from shardwise.tensor_parallel.layers import named_param_layouts
from shardwise.training.gradients.finalize import finalize_gradients_


def randomise_small_parameters(model: nn.Module, group: ProcessGroup) -> None:
    """Biases start at 0 and norms at 1, which would hide mistakes in them. The same numbers on every rank."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, param, layout in named_param_layouts(model, group.size()):
            if len(layout.global_shape) == 1:
                noise = torch.randn(layout.global_shape, generator=generator, dtype=param.dtype) * 0.2
                param += layout.take(noise, group.rank())


def whole_weights(model: nn.Module, group: ProcessGroup) -> dict[str, Tensor]:
    """Every parameter, gathered, ready for gradients."""
    return {
        name: gather_shards(param, layout, group).requires_grad_()
        for name, param, layout in named_param_layouts(model, group.size())
    }


def whole_logits(logits: Tensor, group: ProcessGroup) -> Tensor:
    """``[b, s, v/t]`` to ``[b, s, v]``."""
    return torch.cat(gather_all(logits, group), dim=-1)


def assert_gradients_are(weights: dict[str, Tensor], model: nn.Module, group: ProcessGroup, *, rtol: float) -> None:
    """Finish the model's gradients and hold them against those of the whole weights, by the global norm.

    By the global norm, because some gradients, such as a key bias's, are zero in truth.
    """
    finalize_gradients_(model, tp_group=group, dp_group=Topology.create(tp=group.size()).group("dp"))
    norm = torch.stack([weight.grad.norm() for weight in weights.values()]).norm()
    for name, param, layout in named_param_layouts(model, group.size()):
        error = (gather_shards(param.grad, layout, group) - weights[name].grad).norm()
        assert error <= rtol * norm, f"gradient of {name}: {float(error):.2e} of a norm of {float(norm):.2e}"
        # Where it is not zero in truth, by its own norm too.
        if weights[name].grad.norm() > 1e-6 * norm:
            assert_close_to(
                gather_shards(param.grad, layout, group), weights[name].grad, rtol_of_norm=100 * rtol, name=name
            )


def alone(topology: Topology) -> Groups:
    """Groups of a model that is whole on this rank."""
    return Groups.alone(next(group for group in topology.groups() if group.size() == 1))


def check_gradients(split, dense, groups, *, atol):
    """Each gradient of this rank is its part of the whole model's, which has the same samples on one rank."""
    replicas, whole = replicas_of(split), dict(dense.named_parameters())
    for name, param, layout in named_param_layouts(split, groups.tp.size()):
        group = groups.experts if replicas[param].is_of_expert else groups.tp
        assert param.grad is not None, name
        own = layout.take(whole[name].grad, group.rank())
        torch.testing.assert_close(
            param.grad, own, rtol=1e-10, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def varlen_on_a_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    most_queries: int,
    most_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What ``torch.nn.attention.varlen.varlen_attn`` documents, written with a mask; PyTorch has it on CUDA only."""
    starts = [each.tolist() for each in (query_starts, key_starts)]
    assert starts[0][0] == starts[1][0] == 0
    assert (starts[0][-1], starts[1][-1]) == (len(query), len(key))
    results, most = [], [0, 0]
    for first, last, first_key, last_key in zip(*(each[i:] for each in starts for i in (0, 1)), strict=False):
        new, seen = last - first, last_key - first_key
        most = [max(most[0], new), max(most[1], seen)]
        # Both end at the same position.
        distances = torch.arange(seen - new, seen)[:, None] - torch.arange(seen)
        (before, after), allowed = window_size, torch.ones(new, seen, dtype=torch.bool)
        if before >= 0:
            allowed &= distances <= before
        if after >= 0:
            allowed &= distances >= -after
        own, keys, values = query[first:last], key[first_key:last_key], value[first_key:last_key]
        results.append(
            F.scaled_dot_product_attention(
                *(each.transpose(0, 1) for each in (own, keys, values)),
                attn_mask=allowed,
                scale=scale,
                enable_gqa=enable_gqa,
            ).transpose(0, 1)
        )
    assert most == [most_queries, most_keys]
    return torch.cat(results)


def flexible_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Let attention use ``flexible_attention`` with a definition of FlexAttention; return its future outputs.

    PyTorch's own FlexAttention has no backward on a CPU.
    """
    found: list[Tensor] = []

    def defined(*given: Any, **options: Any) -> tuple[Tensor, AuxOutput]:
        output, sums = flexible_attention_defined(*given, **options)
        found.append(output)
        return output, AuxOutput(lse=sums)

    for name, value in {"device_type": "cpu", "dtypes": (), "min_size": 1, "missing": lambda call: None}.items():
        monkeypatch.setattr(dispatch.FLEXIBLE_ATTENTION, name, value)
    monkeypatch.setattr(attention_kernels, "_NARROWEST", 1)
    monkeypatch.setattr(flexible_attention, "flex_attention", defined)
    return found


def flexible_attention_defined(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score_mod: flexible_attention.Changed | None,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
    return_aux: AuxRequest,
) -> tuple[Tensor, Tensor]:
    """What ``torch.nn.attention.flex_attention.flex_attention`` documents, written out; with log-sum-exp."""
    assert enable_gqa == (query.size(1) > key.size(1))
    key, value = (each.repeat_interleave(query.size(1) // key.size(1), dim=1) for each in (key, value))
    scores = query @ key.mT * scale
    places = torch.meshgrid(*(torch.arange(size) for size in scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, *places)
    seen = block_mask.mask_mod(*places).expand(scores.shape)
    # The blocks of the mask have each key that a query sees.
    rows, columns = (place[0, 0] // size for place, size in zip(places[2:], block_mask.BLOCK_SIZE, strict=True))
    assert bool((block_mask.to_dense()[..., rows, columns].bool() | ~seen).all())
    scores = scores.masked_fill(~seen, -torch.inf)
    sums = scores.logsumexp(dim=-1)
    weights = (scores - sums.masked_fill(sums == -torch.inf, 0.0).unsqueeze(-1)).exp()
    return weights @ value, sums
