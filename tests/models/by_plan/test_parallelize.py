"""Models of transformers that their own plan splits equal the whole model: logits, all gradients, norm, checkpoint."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from harness.model_options import TRANSFORMERS
from harness.parity import assert_bit_equal
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise import Groups, parallelize
from shardwise.core.errors import ConfigError, DesyncError
from shardwise.core.sharded_state import gather_parameter, sharded_state_dict
from shardwise.models.by_plan.attention import heads_of
from shardwise.models.by_plan.styles import STYLES
from shardwise.nn import named_param_layouts
from shardwise.nn.replicated import replicas_of
from shardwise.training.gradients.finalize import finalize_gradients_
from shardwise.training.optimizer.grad_norm import global_grad_norm

SIZES = TRANSFORMERS | {
    "vocab_size": 37,
    "moe_intermediate_size": 10,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
}
LATENT = {
    "num_key_value_heads": 6,
    "head_dim": 2,
    "n_routed_experts": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LONGCAT = {"num_layers": 1, "ffn_hidden_size": 22, "expert_ffn_hidden_size": 10, "zero_expert_num": 2, "moe_topk": 3}
# Name of the model's classes, other sizes, and the number of ranks.
MODELS = {
    "dense": ("Llama", {}, 3),
    "fewer key-value heads than ranks": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}, 3),
    "uneven groups, biases": ("Qwen2", {"num_key_value_heads": 3}, 2),
    "packed": ("Phi3", {}, 3),
    "norms of heads": ("Qwen3", {"tie_word_embeddings": True}, 2),
    "norms that the plan leaves out": ("Glm4Moe", {"use_qk_norm": True, "first_k_dense_replace": 2}, 2),
    "norms with weights for each head": ("Cohere", {"use_qk_norm": True, "num_key_value_heads": 3}, 2),
    "activations with parameters": ("Apertus", {}, 2),
    "experts": ("Qwen3Moe", {}, 3),
    # As wide as there are heads.
    "latent attention": ("DeepseekV2", LATENT | {"q_lora_rank": 6}, 3),
    "experts that change nothing": ("LongcatFlash", LATENT | LONGCAT, 2),
}


def made(kind: str, sizes: dict[str, Any]) -> Any:
    config = getattr(transformers, f"{kind}Config")(**SIZES | sizes)
    # Grouped products of PyTorch have no fp64.
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(5)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).double().train()
    with torch.no_grad():
        for param in model.parameters():
            # Norms are not 1 and biases not 0.
            param.add_(torch.randn_like(param), alpha=0.2)
    return model


def run(model: nn.Module) -> Tensor:
    """Accumulate the gradients of two micro-batches with different numbers of labels; return the logits."""
    ids = torch.randint(1, 37, (2, 2, 7), generator=torch.Generator().manual_seed(6))
    labels = ids.clone()
    labels[1, :, 2:] = -100
    logits = []
    for each, learned in zip(ids, labels, strict=True):
        logits.append(model(input_ids=each, use_cache=False).logits)
        loss = F.cross_entropy(logits[-1].flatten(0, 1), learned.flatten(), reduction="sum") / 18
        loss.backward()
    return torch.stack(logits).detach()


@pytest.mark.slow
@pytest.mark.sample(6)
@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_split_by_its_plan_equals_the_whole_one(group: ProcessGroup, name: str) -> None:
    kind, sizes, num_ranks = MODELS[name]
    members = torch.distributed.new_group(list(range(num_ranks)))
    if group.rank() >= num_ranks:
        return
    group = members
    whole = made(kind, sizes)
    model = parallelize(copy.deepcopy(whole), Groups(tp=group))
    torch.testing.assert_close(run(model), run(whole), rtol=1e-6, atol=1e-6)
    finalize_gradients_(model, tp_group=group, dp_group=None)
    dense = {name: param.grad for name, param in whole.named_parameters()}
    for own, param, layout in named_param_layouts(model, num_ranks):
        expected = dense.pop(own)
        assert (param.grad is None) == (expected is None), own
        if expected is not None:
            found = gather_parameter(param.grad, layout, group=group)
            # Rotary positions are computed in fp32.
            torch.testing.assert_close(
                found, expected, rtol=1e-6, atol=1e-6, msg=lambda text, own=own: f"{own}: {text}"
            )
    assert not dense
    norm = torch.stack([param.grad.norm() for param in whole.parameters() if param.grad is not None]).norm()
    torch.testing.assert_close(global_grad_norm(model, tp_group=group), norm, rtol=1e-6, atol=0)
    # The parts of all ranks, by their names in a checkpoint, are the whole parameters.
    stored = sharded_state_dict(model, group=group)
    values = dict(whole.named_parameters())
    assert stored.keys() >= values.keys()
    for own, value in values.items():
        assert_bit_equal(gather_parameter(stored[own].data, stored[own].layout, group=group), value.detach())


@pytest.mark.ranks(2)
def test_a_model_on_meta_has_the_layouts_of_a_loaded_one(group: ProcessGroup) -> None:
    with torch.device("meta"):
        unloaded = made("Qwen3", {})
    unloaded = parallelize(unloaded, Groups(tp=group))
    loaded = parallelize(made("Qwen3", {}), Groups(tp=group))
    assert all(param.is_meta for param in unloaded.parameters())
    both = [
        [(name, param.shape, layout) for name, param, layout in named_param_layouts(model, 2)]
        for model in (unloaded, loaded)
    ]
    assert both[0] == both[1]
    assert list(replicas_of(unloaded).values()) == list(replicas_of(loaded).values())


@pytest.mark.ranks(2)
def test_two_models_and_a_copy_live_in_one_process(group: ProcessGroup) -> None:
    first, second = (parallelize(made("Llama", {}), Groups(tp=group)) for _ in range(2))
    copied = copy.deepcopy(first)
    ids = torch.arange(1, 9).view(1, 8)
    expected = first(input_ids=ids).logits
    with torch.no_grad():
        for param in second.parameters():
            param.zero_()
    assert_bit_equal(copied(input_ids=ids).logits, expected)
    assert not second(input_ids=ids).logits.any()


@pytest.mark.ranks(2)
def test_generation_with_the_cache_and_checkpointed_gradients_equal_the_whole_model(group: ProcessGroup) -> None:
    whole = made("Qwen3", {"num_key_value_heads": 1})
    model = parallelize(copy.deepcopy(whole), Groups(tp=group))
    ids = torch.arange(1, 9).view(1, 8)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.eval().generate(ids, **options), whole.eval().generate(ids, **options))
    plain = copy.deepcopy(model).train()
    run(plain)
    model.train().activation_checkpointing_enable()
    run(model)
    for own, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(2)
def test_models_that_cannot_be_split_are_refused_and_unchanged(group: ProcessGroup) -> None:
    groups = Groups(tp=group)

    def refused(model: Any, message: str) -> None:
        before = [(name, type(module)) for name, module in model.named_modules()]
        with pytest.raises(ConfigError, match=message):
            parallelize(model, groups)
        assert before == [(name, type(module)) for name, module in model.named_modules()]

    refused(nn.Linear(2, 2), "Linear is not a model of transformers; pass one")
    without_plan = made("Llama", {})
    without_plan._tp_plan = {}
    refused(without_plan, "LlamaForCausalLM has no tensor-parallel plan")
    of_another_version = made("Llama", {})
    of_another_version._tp_plan = of_another_version._tp_plan | {"model.norm": "diagonal"}
    refused(
        of_another_version, r"model.norm: the plan of LlamaForCausalLM has the style 'diagonal'.*styles are colwise"
    )
    of_sequences = made("Llama", {})
    of_sequences._tp_plan = of_sequences._tp_plan | {"model.norm": "sequence_parallel"}
    refused(of_sequences, "model.norm: .*'sequence_parallel', which cannot be carried out: it splits the sequence")
    tied = made("Llama", {"tie_word_embeddings": True})
    tied._tp_plan = tied._tp_plan | {"lm_head": "rowwise_split_input"}
    refused(tied, "lm_head: rowwise_split_input splits a parameter that model.embed_tokens: embedding_rowwise splits")
    shared = made("Llama", {})
    shared.model.other = nn.Embedding(37, 24)
    shared.model.other.weight = shared.model.layers[0].mlp.up_proj.weight
    refused(shared, r"model.other.weight is the parameter that model.layers.0.mlp.up_proj: colwise splits")
    refused(torch.compile(made("Llama", {}), backend="eager"), "it is compiled")
    quantized = made("Llama", {})
    quantized.hf_quantizer = object()
    refused(quantized, "it is quantized")
    refused(made("Llama", {"num_attention_heads": 1, "num_key_value_heads": 1}), "1 attention heads cannot be split")
    refused(made("Llama", {"intermediate_size": 1}), r"mlp.gate_proj: colwise splits dimension 0 of \[1, 24\]")
    makes_none = made("Llama", {})
    makes_none._tp_plan = {
        name: style for name, style in makes_none._tp_plan.items() if name[-7:] not in ("up_proj", "te_proj")
    }
    refused(
        makes_none, "layers.0.mlp.down_proj: rowwise reads split features, and the plan splits none of model.layers.0"
    )
    of_all_heads = made("Olmo2", {})
    of_all_heads._tp_plan = of_all_heads._tp_plan | {"model.layers.*.self_attn.q_proj": "colwise"}
    of_all_heads._tp_plan.pop("model.layers.*.self_attn.q_norm", None)
    refused(
        of_all_heads, "self_attn.q_norm: .* splits q_proj, and q_norm normalizes the features of all heads together"
    )
    biased = made("Llama", {"mlp_bias": True})
    biased.model.layers[0].mlp.down_proj.__class__ = type("Own", (nn.Linear,), {"forward": lambda self, x: x})
    refused(biased, "layers.0.mlp.down_proj: rowwise of a Own with a bias adds it on every rank")
    of_heads = r"layers.0.self_attn.A has an element for each of 3 heads, and the plan splits the heads and not it"
    refused(made("Doge", {"is_moe": False}), of_heads)
    of_copies = (
        r"dt_proj: rowwise sums over 1 key-value heads, of which 2 tensor-parallel ranks hold copies; use at most 1"
    )
    refused(made("Doge", {"is_moe": False, "num_key_value_heads": 1}), of_copies)
    adapted = made("Llama", {})
    adapted.peft_config = {}
    refused(adapted, "it has adapters; add them afterwards")
    refused(nn.parallel.DistributedDataParallel(made("Llama", {}), process_group=group), "is not a model of transf")
    small = made("Llama", {})
    small.lm_head.weight = nn.Parameter(torch.zeros(37, 24, dtype=torch.int8), requires_grad=False)
    refused(small, "lm_head.weight is a Parameter of torch.int8, and parameters must be plain")
    split = parallelize(made("Llama", {}), groups)
    refused(split, "is split already")


@pytest.mark.ranks(2)
def test_ranks_with_other_weights_are_refused(group: ProcessGroup) -> None:
    model = made("Llama", {})
    with torch.no_grad():
        # Not the first element.
        model.lm_head.weight[1:].add_(group.rank())
    with pytest.raises(DesyncError, match="the weights of the whole model"):
        parallelize(model, Groups(tp=group))
    assert type(model.lm_head) is nn.Linear
    # Without values, by plan and shapes.
    with torch.device("meta"):
        planless, wider = made("Llama", {}), made("Llama", {"intermediate_size": 24 + group.rank()})
    if group.rank() == 1:
        planless._tp_plan = {name: style for name, style in planless._tp_plan.items() if "mlp" not in name}
    for other in (planless, wider):
        with pytest.raises(DesyncError, match="the plan and the shapes of the model"):
            parallelize(other, Groups(tp=group))
        assert type(other.lm_head) is nn.Linear


@pytest.mark.ranks(2)
def test_what_a_layer_would_lose_is_refused_and_its_state_is_kept(group: ProcessGroup) -> None:
    ways = {
        "hook": [
            lambda layer: layer.register_forward_hook(print),
            lambda layer: layer.register_forward_pre_hook(print),
            lambda layer: layer.register_full_backward_hook(print),
            lambda layer: layer.weight.register_hook(print),
            lambda layer: layer.weight.register_post_accumulate_grad_hook(print),
        ],
        "forward": [lambda layer: setattr(layer, "forward", layer.forward)],
        "scale": [lambda layer: layer.register_buffer("scale", torch.ones(1))],
        "gain": [lambda layer: layer.register_parameter("gain", nn.Parameter(torch.ones(37)))],
    }
    for lost, changes in ways.items():
        for change in changes:
            model = made("Llama", {})
            change(model.lm_head)
            with pytest.raises(ConfigError, match=f"lm_head: .* replaces a Linear, and its {lost} would be lost"):
                parallelize(model, Groups(tp=group))
    model = made("Llama", {}).eval()
    model.lm_head.weight.requires_grad_(False)
    model = parallelize(model, Groups(tp=group))
    assert not any(module.training for module in model.modules())
    assert {name for name, param in model.named_parameters() if not param.requires_grad} == {"lm_head.weight"}


class _WithMore(nn.Embedding):
    """Rows with a norm, and one that is a parameter of its own."""

    def __init__(self, id_of_own: int) -> None:
        super().__init__(37, 24)
        self.own, self.norm, self.eoi_token_index = nn.Parameter(torch.ones(24)), nn.LayerNorm(24), id_of_own

    def forward(self, ids: Tensor) -> Tensor:
        is_own = (ids == self.eoi_token_index).unsqueeze(-1)
        return torch.where(is_own, self.own, self.norm(super().forward(ids)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("part", [0, 1])
def test_what_else_an_embedding_has_gets_the_gradients_of_all_ranks(group: ProcessGroup, part: int) -> None:
    whole = made("Llama", {})
    # An id of each rank, which the texts have.
    ids = torch.randint(1, 37, (28,), generator=torch.Generator().manual_seed(6)).tolist()
    whole.model.embed_tokens = _WithMore(next(each for each in ids if each // 19 == part)).double()
    model = parallelize(copy.deepcopy(whole), Groups(tp=group))
    torch.testing.assert_close(run(model), run(whole), rtol=1e-6, atol=1e-6)
    finalize_gradients_(model, tp_group=group, dp_group=None)
    dense = {name: param.grad for name, param in whole.named_parameters()}
    for name, param, layout in named_param_layouts(model, 2):
        found = gather_parameter(param.grad, layout, group=group)
        torch.testing.assert_close(found, dense[name], rtol=1e-6, atol=1e-6, msg=lambda text, name=name: name + text)


@pytest.mark.ranks(1)
def test_one_rank_needs_no_plan(group: ProcessGroup) -> None:
    whole = made("Doge", {"is_moe": False})
    model = parallelize(copy.deepcopy(whole), Groups(tp=group))
    assert_bit_equal(run(model), run(whole))


@pytest.mark.ranks(2)
def test_a_reused_module_is_split_once(group: ProcessGroup) -> None:
    whole = made("Llama", {})
    first, second = whole.model.layers
    second.mlp, second.self_attn.o_proj = first.mlp, first.self_attn.o_proj
    whole.model.register_buffer("number", torch.tensor([3.0]))
    model = parallelize(copy.deepcopy(whole), Groups(tp=group))
    assert model.model.layers[1].mlp is model.model.layers[0].mlp
    buffer = sharded_state_dict(model, group=group)["model.number"]
    assert buffer.layout.dim is None
    assert buffer.data.item() == 3.0
    torch.testing.assert_close(run(model), run(whole), rtol=1e-6, atol=1e-6)
    dense = {name: param.grad for name, param in whole.named_parameters()}
    finalize_gradients_(model, tp_group=group, dp_group=None)
    found = {name: (param.grad, layout) for name, param, layout in named_param_layouts(model, 2)}
    assert found.keys() == dense.keys()
    for name, (grad, layout) in found.items():
        torch.testing.assert_close(gather_parameter(grad, layout, group=group), dense[name], rtol=1e-6, atol=1e-6)


def test_the_heads_of_a_layer_with_others_than_the_configuration_says() -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 6}
    config = transformers.Gemma4TextConfig(**sizes, attention_k_eq_v=True, num_global_key_value_heads=1)
    attention = nn.Module()
    attention.config, attention.head_dim = config, 8
    for layer, groups in ((0, 2), (5, 1)):
        attention.layer_idx = layer
        heads = heads_of(attention, config, 2)
        assert heads is not None
        assert (heads.queries, heads.groups) == (4, groups)


def test_each_style_of_transformers_has_a_row_with_its_layouts() -> None:
    import transformers.distributed.expert_parallel
    import transformers.distributed.tensor_parallel  # noqa: F401  # Registers them.
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    assert set(ALL_PARALLEL_STYLES.keys()) == set(STYLES)
    from shardwise.models.by_plan import styles

    assert styles.__doc__ is not None
    for name, style in STYLES.items():
        assert style.refusal or f"\n{name} " in styles.__doc__, name
