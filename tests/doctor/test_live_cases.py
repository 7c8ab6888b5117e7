"""The doctor on the parallelism of transformers 5.23: faults that its users meet, and runs that are sound.

If a later version of transformers is right, the cases with faults are to be taken out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from doctor.recorded import Watcher
from harness.groups import alone
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.doctor.diagnosis import Diagnosis, Finding, diagnose
from shardwise.doctor.evidence import MICRO_BATCHES, NEVER_SUMMED, SCALED

_SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
_QWEN_3_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GLM = {"use_qk_norm": True, "first_k_dense_replace": 2, "moe_intermediate_size": 32, "n_routed_experts": 4}


def model_of(architecture: str) -> Any:
    import transformers

    torch.manual_seed(3)
    if architecture == "qwen 3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_SIZES))
    if architecture == "qwen 3 moe":
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_SIZES | _QWEN_3_MOE))
    if architecture == "gemma 3":
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**_SIZES, query_pre_attn_scalar=8))
    if architecture == "glm 4.5":
        return transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**_SIZES | _GLM))
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_SIZES))


def train(model: nn.Module, watcher: Watcher, num_micro_batches: int, rows: slice = slice(None)) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    watcher.start(model, optimizer)
    for step in range(2):
        optimizer.zero_grad()
        for micro_batch in range(num_micro_batches):
            ids = torch.randint(60, (2, 12), generator=torch.Generator().manual_seed(10 * step + micro_batch))[rows]
            watcher.inputs(ids=ids)
            logits = model(input_ids=ids, use_cache=False).logits
            (F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) / num_micro_batches).backward()
        watcher.gradients()
        optimizer.step()


def diagnosed(
    architecture: str,
    num_micro_batches: int,
    group: ProcessGroup,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    shares_experts: bool = False,
) -> Diagnosis | None:
    """Diagnose a run with tensor parallelism, or one whose ranks have other samples and other experts."""
    from transformers.distributed import DistributedConfig

    model = model_of(architecture)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    alone(group)
    rank, size = group.rank(), group.size()
    if rank == 0:
        model.save_pretrained(folder / "model")
        other = torch.float64 if dtype == torch.float32 else torch.float32
        for name, each in (("one", dtype), ("rounding", other)):
            own = type(model).from_pretrained(folder / "model", dtype=each, **options).train()
            train(own, Watcher(folder / name, world_size=1), num_micro_batches)
    dist.barrier(group)
    if shares_experts:
        config, axis, rows = DistributedConfig(fsdp_size=size, ep_size=size), "dp", slice(rank, None, size)
    else:
        config, axis, rows = DistributedConfig(tp_size=size, tp_plan="auto"), "tp", slice(None)
    split = type(model).from_pretrained(folder / "model", dtype=dtype, distributed_config=config, **options)
    train(split.train(), Watcher(folder / "parallel", axes={axis: (rank, size)}), num_micro_batches, rows)
    dist.barrier(group)
    try:
        return diagnose(folder / "one", folder / "parallel", folder / "rounding") if rank == 0 else None
    finally:
        dist.barrier(group)


def check_layers(finding: Finding, branch: str, names: list[str]) -> None:
    """These parameters of a branch are wrong in each layer, and no others are; the last layer's come first."""
    assert finding.module.startswith(f"model.layers.1.{branch}."), finding.line()
    every = {f"model.layers.{layer}.{branch}.{name}" for layer in range(2) for name in names}
    assert {finding.module, *finding.others} == every


def check_norms(finding: Finding) -> None:
    check_layers(finding, "self_attn", ["q_norm.weight", "k_norm.weight"])


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("architecture", ["qwen 3", "gemma 3"])
def test_gradients_of_query_norms_are_summed_again_with_every_micro_batch(architecture, group, tmp_path):
    diagnosis = diagnosed(architecture, 2, group, tmp_path)
    if diagnosis is not None:
        assert diagnosis.first is not None
        check_norms(diagnosis.first)
        assert diagnosis.first.kind == MICRO_BATCHES
        assert "count 2, 1 times" in diagnosis.first.evidence


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("architecture", ["qwen 3", "gemma 3", "qwen 2"])
def test_with_one_micro_batch_they_are_sound(architecture, group, tmp_path):
    """Qwen 2 has a bias of keys, whose gradient is rounding that AdamW makes visible."""
    diagnosis = diagnosed(architecture, 1, group, tmp_path)
    if diagnosis is not None:
        assert diagnosis.is_sound, [finding.line() for finding in diagnosis.findings]


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_glm_keeps_one_rank_s_share_of_the_gradients_of_query_norms(group, tmp_path):
    diagnosis = diagnosed("glm 4.5", 1, group, tmp_path)
    if diagnosis is not None:
        assert diagnosis.first is not None
        check_norms(diagnosis.first)
        assert diagnosis.first.kind == NEVER_SUMMED


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_gradients_of_experts_are_halved_in_fp64(group, tmp_path):
    """On a mesh of one rank, FSDP divides gradients in fp64 and fp16 twice by the factor that transformers sets."""
    diagnosis = diagnosed("qwen 3 moe", 1, group, tmp_path, dtype=torch.float64, shares_experts=True)
    if diagnosis is not None:
        assert diagnosis.first is not None
        check_layers(diagnosis.first, "mlp.experts", ["gate_up_proj", "down_proj"])
        assert diagnosis.first.kind == SCALED
        assert "1 / the size of dp" in diagnosis.first.evidence


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_gradients_of_experts_are_sound_in_fp32(group, tmp_path):
    diagnosis = diagnosed("qwen 3 moe", 1, group, tmp_path, shares_experts=True)
    if diagnosis is not None:
        assert diagnosis.is_sound, [finding.line() for finding in diagnosis.findings]
