"""No field of the engine's config is there for nothing: set to another value, each changes what a model is or does.

A table says for every field what is seen to change: a result, initial values, parameters, collectives, operators, or
where tensors lie. An error would not count.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.on_pretended_gpu import StepRecorder, fake_tensors, join
from harness.operators import Operators
from torch.utils._pytree import tree_map_only

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.random import seed_streams
from shardwise.core.topology import Groups, Topology
from shardwise.models.config import LayerConfig, ModelConfig
from shardwise.models.description import Model, build_model, chunks_of
from shardwise.models.experts import Experts
from shardwise.models.recomputation import Recomputation
from shardwise.models.transformer.heads import GlobalHeads, LatentAttention
from shardwise.models.transformer.rotary import RotaryScaling

VOCAB, LENGTH = 31, 6
BASE = {
    "num_layers": 4,
    "hidden_size": 12,
    "num_attention_heads": 2,
    "ffn_hidden_size": 14,
    "vocab_size": VOCAB,
    "max_sequence_length": LENGTH,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


@dataclasses.dataclass(frozen=True)
class Change:
    """Another value of a field."""

    value: Any
    seen: str
    given: dict[str, Any] = dataclasses.field(default_factory=dict)


FULL = {"recompute": Recomputation("full", "block", 1)}
SELECTIVE = {"recompute": Recomputation("selective")}
STAGES = {"pipeline_model_parallel_size": 2}
BERT = {**STAGES, "kind": "bert"}
LEARNED = {"position_embedding_type": "learned_absolute"}
CHANGES = {
    "params_dtype": Change(torch.float64, "loss"),
    "sequence_parallel": Change(True, "collectives"),
    "tp_comm_overlap": Change(True, "operators", {"sequence_parallel": True}),
    "perform_initialization": Change(False, "random numbers drawn"),
    "deterministic_mode": Change(True, "operators"),
    "gradient_accumulation_fusion": Change(True, "main gradients"),
    "delay_wgrad_compute": Change(True, "gradients"),
    "defer_embedding_wgrad_compute": Change(True, "gradients"),
    "wgrad_deferral_limit": Change(1, "gradients", {"defer_embedding_wgrad_compute": True}),
    "pipeline_model_parallel_size": Change(2, "parameters"),
    "virtual_pipeline_model_parallel_size": Change(2, "parameters", STAGES),
    "exact_parts": Change(2, "operators"),
    "num_layers": Change(3, "parameters"),
    "num_layers_in_first_pipeline_stage": Change(1, "parameters", STAGES),
    "num_layers_in_last_pipeline_stage": Change(1, "parameters", STAGES),
    "account_for_embedding_in_pipeline_split": Change(True, "parameters", {**STAGES, "num_layers": 3}),
    "account_for_loss_in_pipeline_split": Change(True, "parameters", STAGES),
    "hidden_size": Change(16, "parameters"),
    "num_attention_heads": Change(3, "loss"),
    "attention_backend": Change("local", "operators"),
    "cp_comm_type": Change("a2a", "collectives", {"cp_comm_type": "all_gather"}),
    "ep_comm_type": Change(
        "a2a", "collectives", {"experts": Experts(4, 2, 8), "add_bias_linear": False, "ep_comm_type": "all_gather"}
    ),
    "softmax_scale": Change(0.1, "loss"),
    "num_query_groups": Change(1, "parameters"),
    "ffn_hidden_size": Change(11, "parameters"),
    "kv_channels": Change(4, "parameters"),
    "hidden_dropout": Change(0.5, "loss"),
    "attention_dropout": Change(0.5, "loss"),
    "apply_residual_connection_post_layernorm": Change(True, "loss"),
    "layernorm_epsilon": Change(0.5, "loss"),
    "layernorm_zero_centered_gamma": Change(True, "initial values"),
    "add_bias_linear": Change(False, "parameters"),
    "attention_bias": Change(False, "parameters"),
    "add_qkv_bias": Change(True, "parameters", {"add_bias_linear": False}),
    "gated_linear_unit": Change(True, "parameters"),
    "experts": Change(Experts(4, 2, 8), "parameters", {"add_bias_linear": False}),
    "latent": Change(LatentAttention(6, 3, 2, 4), "parameters"),
    "global_heads": Change(GlobalHeads(1, 6, keys_are_values=True), "parameters"),
    "layer_scalar": Change(True, "parameters"),
    "activation_func": Change(F.silu, "loss"),
    "rotary_interleaved": Change(True, "loss"),
    "window_size": Change((1, 0), "loss"),
    "normalization": Change("RMSNorm", "parameters"),
    "qk_layernorm": Change(True, "parameters"),
    "init_method": Change(torch.nn.init.xavier_normal_, "initial values"),
    "output_layer_init_method": Change(torch.nn.init.xavier_normal_, "initial values"),
    "init_method_std": Change(0.5, "initial values"),
    "norm_position": Change("post", "loss"),
    "embedding_layernorm": Change(True, "parameters"),
    "final_layernorm": Change(False, "parameters"),
    "fuse_output_layer_and_loss": Change(True, "operators"),
    "parallel_residual": Change(True, "loss"),
    "residual_multiplier": Change(0.5, "loss"),
    "embedding_multiplier": Change(3.0, "loss"),
    "logits_scaling": Change(2.0, "loss"),
    "final_logit_softcap": Change(0.5, "loss"),
    "attention_logit_softcap": Change(0.1, "loss"),
    "attention_sinks": Change(True, "parameters"),
    "qk_layernorm_over_heads": Change(True, "collectives", {"qk_layernorm": True, "normalization": "RMSNorm"}),
    "value_layernorm": Change(True, "loss", {"normalization": "RMSNorm"}),
    "clip_qkv": Change(0.01, "loss"),
    "windowed_layers": Change((True, False, True, False), "loss", {"window_size": (1, 0)}),
    "rotary_layers": Change((True, False, True, False), "loss"),
    "kind": Change("bert", "parameters", STAGES),
    "vocab_size": Change(29, "parameters"),
    "max_sequence_length": Change(9, "parameters", LEARNED),
    "position_embedding_type": Change("learned_absolute", "parameters"),
    "position_offset": Change(2, "parameters", LEARNED),
    "positions_skip_padding": Change(True, "loss", {**LEARNED, "position_offset": 2, "positions_skip_padding": False}),
    "share_embeddings_and_output_weights": Change(True, "parameters"),
    "rotary_percent": Change(0.5, "loss"),
    "rotary_base": Change(100.0, "loss"),
    "rope_scaling": Change(RotaryScaling("linear", 2.0), "loss"),
    "window_rotary_base": Change(100.0, "loss", {"window_size": (2, 0)}),
    "num_tokentypes": Change(2, "parameters", BERT),
    "add_binary_head": Change(False, "parameters", BERT),
    "add_lm_head": Change(False, "parameters", {**BERT, "final_layernorm": False}),
    "recompute": Change(Recomputation("selective"), "kept bytes"),
    "recompute.method": Change(Recomputation("full", "uniform", 1), "kept bytes", FULL),
    "recompute.num_layers": Change(Recomputation("full", "block", 2), "kept bytes", FULL),
    "recompute.modules": Change(Recomputation("selective", modules=("mlp",)), "kept bytes", SELECTIVE),
}
# Seen where there is a GPU, in a test of its own.
ON_GPU = {"use_cpu_initialization"}


def model_of(config: ModelConfig, group: dist.ProcessGroup) -> Model:
    """A model split over the ranks of the group; with several stages the first chunk of this rank's."""
    num_stages = config.pipeline_model_parallel_size
    groups = Groups(tp=group)
    if config.exact_parts is not None:
        # How a group sums is the group's, and the other models' is plain.
        groups = Groups.of(Topology.create(tp=group.size()))
    if config.cp_comm_type != "auto":
        groups = Groups.of(Topology.create(cp=group.size()))
    if num_stages > 1:
        groups = Groups.of(Topology.create(pp=num_stages))
    return build_model(config, groups=groups, vp_stage=chunks_of(config)[0])


def observe(group: dist.ProcessGroup, options: dict[str, Any]) -> dict[str, Any]:
    """What a model of these options is and, if it is of one stage, what two micro-batches do."""
    torch.manual_seed(5)
    config = ModelConfig(**(BASE | options))
    model = model_of(config, group)
    seen: dict[str, Any] = {
        "random numbers drawn": torch.get_rng_state(),
        "parameters": sorted((shard.key, shard.layout.global_shape) for shard in model.sharded_state_dict().values()),
        "initial values": {name: param.detach().clone() for name, param in model.named_parameters()},
    }
    if config.pipeline_model_parallel_size > 1:
        return plain(seen)
    torch.manual_seed(6)
    for param in model.parameters():
        if not config.perform_initialization:
            torch.nn.init.normal_(param)
        param.main_grad = torch.zeros_like(param)
    seed_streams(7, group.rank())
    ids = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(8))
    # The first token of each row is padding where that matters.
    mask = torch.arange(LENGTH).expand(2, -1) > 0 if "positions_skip_padding" in options else None
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with CollectiveCounter() as collectives, Operators() as operators:
        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = model(ids, attention_mask=mask, labels=ids)
            loss.mean().backward()
    seen["loss"] = loss
    seen["gradients"] = {name: param.grad for name, param in model.named_parameters()}
    seen["main gradients"] = {name: param.main_grad for name, param in model.named_parameters()}
    seen["collectives"] = [launch.name for launch in collectives.launches]
    # The first large message of a group makes its shared memory, with a view in another dtype.
    seen["operators"] = set(operators.names) - {"aten::view.dtype"}
    seen["kept bytes"] = sum(storage.nbytes() for storage in kept.values())
    return plain(seen)


def plain(seen: dict[str, Any]) -> dict[str, Any]:
    """Tensors as numbers with their dtype, which compare as a whole."""
    return tree_map_only(torch.Tensor, lambda tensor: (tensor.dtype, tensor.tolist()), seen)


def test_the_table_has_every_field():
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    names |= {f"recompute.{field.name}" for field in dataclasses.fields(Recomputation)} - {"recompute.granularity"}
    # A model of another class: tests/run/test_folders_by_plan.py.
    names.remove("transformers_config")
    assert names == CHANGES.keys() | ON_GPU
    assert {field.name for field in dataclasses.fields(LayerConfig)} <= CHANGES.keys() | ON_GPU
    assert not CHANGES.keys() & ON_GPU


@pytest.mark.sample(24)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CHANGES)
def test_a_field_changes_something(group, name):
    change = CHANGES[name]
    before, again = observe(group, change.given), observe(group, change.given)
    assert [what for what in before if before[what] != again[what]] == [], "the same config gives the same"
    after = observe(group, change.given | {name.partition(".")[0]: change.value})
    # Stages may differ in whether they see it: the last has no embedding.
    differs = torch.tensor(float(before[change.seen] != after[change.seen]))
    dist.all_reduce(differs, group=group)
    assert differs > 0, f"{name}={change.value!r} leaves {change.seen} as they were"


def devices(on_cpu: bool) -> set[str]:
    group = join(world_size=2, rank=1)
    with fake_tensors(), StepRecorder():
        model = model_of(ModelConfig(**BASE, use_cpu_initialization=on_cpu), group)
        return {str(param.device) for param in model.parameters()}


@pytest.mark.slow
def test_where_initial_values_are_drawn(pretended_gpu):
    assert pretended_gpu(devices, False) == {"cuda:0"}
    assert pretended_gpu(devices, True) == {"cpu"}
