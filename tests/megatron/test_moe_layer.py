"""Megatron's layer of experts is the engine's on one rank: results, gradients, marks, state keys and checkpoints."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_bit_equal, assert_close_to
from torch import Tensor

from shardwise import parallel_state
from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups
from shardwise.megatron import dist_checkpointing, moe as moe_door
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from shardwise.megatron.layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.module import Float16Module
from shardwise.megatron.moe import GroupedMLP, MoELayer, MoESubmodules, SequentialMLP, TopKRouter
from shardwise.megatron.schedules import get_forward_backward_func
from shardwise.megatron.spec_utils import ModuleSpec
from shardwise.megatron.transformer_layer import TransformerLayer
from shardwise.models import GPT
from shardwise.models.experts import moe
from shardwise.models.transformer import mlp
from shardwise.nn.replicated import named_param_layouts, replicas_of
from shardwise.training.optimizer.grad_norm import global_grad_norm

V, S, B, H, E = 23, 7, 3, 12, 4
assert_near = functools.partial(assert_close_to, rtol_of_norm=1e-10)
KINDS: dict[str, dict[str, Any]] = {
    "softmax over the chosen": {"moe_aux_loss_coeff": 0.1, "moe_router_topk_scaling_factor": 1.3},
    "softmax over all, on the input": {
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.1,
        "moe_router_pre_softmax": True,
        "moe_router_topk": 1,
        "moe_apply_probs_on_input": True,
        "moe_z_loss_coeff": 0.01,
    },
    "sigmoid, groups, bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_enable_expert_bias": True,
        "moe_z_loss_coeff": 0.01,
        "moe_grouped_gemm": True,
    },
    "shared": {"moe_shared_expert_intermediate_size": 10, "moe_shared_expert_gate": True},
}
# Tensor-parallel size, number of ranks that divide the experts, and that split each; the rest is data-parallel.
LAYOUTS = [(1, 2, 1), (2, 1, 2), (2, 2, 2), (2, 2, 1)]


def config_of(**settings: Any) -> TransformerConfig:
    sizes = {"num_layers": 2, "hidden_size": H, "num_attention_heads": 4, "num_moe_experts": E}
    others = {"moe_ffn_hidden_size": 9, "init_method_std": 0.3, "add_bias_linear": False, "gated_linear_unit": True}
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_func": F.silu}
    return TransformerConfig(**sizes | others | dropout | {"params_dtype": torch.float64} | settings)


def initialize(tp: int, ep: int, etp: int, pp: int = 1) -> Groups:
    """Make the ambient topology; return the groups of a model that is whole on this rank."""
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    return Groups.alone(parallel_state.get_context_parallel_group())


def own_groups() -> Groups:
    return Groups.of(parallel_state.get_topology())


def layer_of(config: TransformerConfig, alone: Groups | None = None) -> Any:
    """The door's layer on the ambient topology, or the engine's on one rank; the bias of the choice is not 0."""
    torch.manual_seed(3)
    layer = MoELayer(config) if alone is None else moe.MoELayer(config, alone)
    if layer.router.selection_bias is not None:
        layer.router.selection_bias.copy_(torch.linspace(-0.2, 0.2, E))
    return layer


def hidden_states(seed: int = 5) -> Tensor:
    return torch.randn(S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_gradients(split: torch.nn.Module, whole: torch.nn.Module, groups: Groups) -> None:
    """Compare each gradient of ``split`` with this rank's part of that of ``whole``, whose group is of one rank."""
    expected = dict(whole.named_parameters())
    for name, param, layout in named_param_layouts(split, groups.tp.size()):
        is_expert = ".experts." in f".{name}"
        group = groups.experts if is_expert else groups.tp
        assert group is not None
        assert_near(param.grad, layout.take(expected[name].grad, group.rank()), name=name)


def build(config: TransformerConfig, alone: Groups | None = None, **ends: bool) -> Any:
    """Megatron's GPT on the ambient topology, or the engine's on one rank."""
    torch.manual_seed(3)
    if alone is None:
        spec = get_gpt_decoder_block_spec(config, False)
        return GPTModel(config, spec, V, S, position_embedding_type="rope", **ends)
    return GPT(config, V, S, groups=alone, position_embedding_type="rope")


def ids_of(number: int) -> Tensor:
    return torch.randint(V, (B, S), generator=torch.Generator().manual_seed(number))


def wrap(model: Any, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(**options), model)


@pytest.mark.sample(2)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_of_a_model_is_that_of_one_rank(group, layout):
    """Micro-batches with a scaled loss, the wrapper, the norm, and the biases that balance experts."""
    alone = initialize(*layout)
    groups, kind = own_groups(), KINDS["sigmoid, groups, bias"] | {"moe_layer_freq": [0, 1]}
    num_ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    dense = build(config_of(**kind), alone)
    experts = dense.decoder.layers[1].mlp
    experts.begin(4 / (2 * num_ranks))
    for number in range(2 * num_ranks):
        ids = ids_of(number)
        (4 * dense(ids, labels=ids.roll(1, 1)).mean() / (2 * num_ranks)).backward()
    loads = experts.statistics[:E]
    model = build(config_of(sequence_parallel=layout[0] > 1, **kind))
    assert isinstance(model.decoder.layers[0].mlp, mlp.MLP)
    assert isinstance(model.decoder.layers[1].mlp, MoELayer)
    assert isinstance(model.decoder.layers[1].mlp.experts, GroupedMLP)
    wrapped = wrap(model, check_for_nan_in_grad=True, overlap_grad_reduce=True, bucket_size=300)
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.no_sync_func, model.config.grad_scale_func = wrapped.no_sync, lambda loss: 4 * loss

    def forward_step(numbers: Any, chunk: Any) -> Any:
        ids = ids_of(next(numbers))
        return chunk(ids, labels=ids.roll(1, 1)), lambda losses: (losses.mean(), {})

    run = get_forward_backward_func()
    for _ in range(2):
        wrapped.zero_grad_buffer()
        model.decoder.layers[1].mlp.router.expert_bias.zero_()
        run(
            forward_step_func=forward_step,
            data_iterator=iter([2 * rank, 2 * rank + 1]),
            model=wrapped,
            num_microbatches=2,
            seq_length=S,
            micro_batch_size=B,
        )
        assert_gradients(model, dense, groups)
        rate = model.config.moe_router_bias_update_rate
        moved = ((loads.mean() - loads).sign() * rate).float()
        assert_bit_equal(model.decoder.layers[1].mlp.router.expert_bias, moved)
    norm = global_grad_norm(dense, tp_group=alone.tp, groups=alone)
    for each in (model, wrapped):
        assert_near(global_grad_norm(each, tp_group=groups.tp, groups=groups), norm)


@pytest.mark.ranks(4)
def test_the_marks_of_experts_and_routers(group):
    initialize(2, 2, 1)
    model = build(config_of())
    for _ in range(2):
        of_experts = {name: param for name, param in model.named_parameters() if ".experts." in name}
        marked = {name for name, param in model.named_parameters() if not getattr(param, "allreduce", True)}
        assert marked == of_experts.keys()
        assert len(marked) == 4
        assert all(replicas_of(model)[param].is_of_expert for param in of_experts.values())
        assert all(param.tensor_model_parallel for param in of_experts.values())
        # Tensor-parallel ranks route different tokens.
        assert model.decoder.layers[0].mlp.router.weight.sequence_parallel
        # New parameters are marked too.
        model.to_empty(device="cpu")
        model.reset_parameters()
    parallel_state.destroy_model_parallel()
    initialize(2, 1, 2)
    model = build(config_of())
    # Their gradients are summed over the same ranks as those of dense layers.
    assert all(getattr(param, "allreduce", True) for param in model.parameters())
    wrapped = wrap(model)
    assert not any(replicas.is_of_expert for replicas in replicas_of(model).values())
    model.decoder.layers[1].mlp.experts.up.allreduce = False
    with pytest.raises(ConfigError, match=r"allreduce of parameter 'decoder\.layers\.1\.mlp\.experts\.up' was changed"):
        wrapped(ids_of(0), labels=ids_of(0))


def megatrons_routing(logits: Tensor, config: TransformerConfig, bias: Tensor | None) -> Tensor:
    """Weights ``[n, experts]`` by the rules of Megatron's documentation, token by token."""
    weights = torch.zeros_like(logits)
    k, is_sigmoid = config.moe_router_topk, config.moe_router_score_function == "sigmoid"
    for token, row in enumerate(logits):
        scores = row.sigmoid() if is_sigmoid else row.softmax(0) if config.moe_router_pre_softmax else row
        considered = scores if bias is None else scores + bias
        if config.moe_router_group_topk:
            groups = considered.view(config.moe_router_num_groups, -1)
            best = groups.sort(descending=True).values[:, : k // config.moe_router_group_topk].sum(1)
            left_out = best.argsort(descending=True)[config.moe_router_group_topk :]
            groups = groups.clone()
            groups[left_out] = -torch.inf
            considered = groups.flatten()
        chosen = considered.argsort(descending=True)[:k]
        own = scores[chosen]
        if is_sigmoid and k > 1:
            own = own / own.sum()
        if not is_sigmoid and not config.moe_router_pre_softmax:
            own = own.softmax(0)
        weights[token, chosen] = own * (config.moe_router_topk_scaling_factor or 1.0)
    return weights


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_router_s_choice_is_megatron_s(group, kind):
    initialize(1, 1, 1)
    config = config_of(**KINDS[kind])
    layer = layer_of(config)
    probs, chosen = layer.router(hidden_states())
    logits = hidden_states().view(-1, H) @ layer.router.weight.T
    expected = megatrons_routing(logits, config, layer.router.expert_bias)
    assert_near(probs, expected)
    assert_bit_equal(chosen, expected > 0)
    with pytest.raises(ConfigError, match="padding_mask is given"):
        layer.router(hidden_states(), torch.ones(B, S))


@pytest.mark.ranks(1)
def test_balance_losses_count_the_experts_of_the_highest_scores(group):
    """Of the scores without bias and groups, over each sequence; the gradient of the router's weight shows it."""
    initialize(1, 1, 1)
    kind = KINDS["sigmoid, groups, bias"] | {"moe_z_loss_coeff": None}
    layer = layer_of(config_of(**kind, moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.1))
    layer.router.expert_bias.copy_(torch.tensor([5.0, 5.0, -5.0, -5.0]))
    output, _ = layer(hidden_states())
    (gradient,) = torch.autograd.grad((output * 0).sum(), layer.router.weight)
    weight = layer.router.weight.detach().clone().requires_grad_()
    scores = (hidden_states() @ weight.T).sigmoid()
    scores = scores / scores.sum(-1, keepdim=True)
    loss = torch.zeros((), dtype=torch.float64)
    for sequence in scores.unbind(1):
        share = F.one_hot(sequence.topk(2).indices, E).double().sum((0, 1)) / (2 * S)
        loss = loss + 0.1 * E * (share * sequence.mean(0)).sum() / B
    loss.backward()
    assert_near(gradient, weight.grad)


@pytest.mark.ranks(4)
def test_state_keys_are_megatron_s(group):
    initialize(2, 2, 2)
    shared = {"shared_experts.linear_fc1.weight", "shared_experts.linear_fc2.weight", "shared_experts.gate_weight"}
    of_mlps = {f"experts.local_experts.{expert}.linear_fc{part}.weight" for expert in range(2) for part in (1, 2)}
    for grouped, of_experts in ((False, of_mlps), (True, {"experts.weight1", "experts.weight2"})):
        bias = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
        layer = layer_of(config_of(moe_grouped_gemm=grouped, **KINDS["shared"], **bias))
        state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        assert state.keys() == shared | of_experts | {"router.weight", "router.expert_bias"}
        first = 2 * parallel_state.get_expert_model_parallel_rank()
        assert layer.local_expert_indices == [first, first + 1]
        up, down = layer.experts.up.view(2, -1, H), layer.experts.down.view(2, -1, H)
        if grouped:
            # As Megatron computes: tokens times a part of each.
            assert state["experts.weight1"].shape == (H, up.size(0) * up.size(1))
            assert_bit_equal(state["experts.weight1"].view(2, H, -1)[1], up[1].T)
            assert_bit_equal(state["experts.weight2"].view(2, -1, H), down)
        else:
            assert_bit_equal(state["experts.local_experts.1.linear_fc1.weight"], up[1])
            assert_bit_equal(state["experts.local_experts.1.linear_fc2.weight"], down[1].T)
        other = MoELayer(layer.config)
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        other.load_state_dict(state)
        tensors = dict(other.named_parameters()) | dict(other.named_buffers())
        for name, own in (*layer.named_parameters(), *layer.named_buffers()):
            assert_bit_equal(tensors[name], own)
        copied = copy.deepcopy(layer)
        assert copied.state_dict().keys() == state.keys()
        del state[min(of_experts)]
        with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .*experts.up"):
            other.load_state_dict(state)


@pytest.mark.ranks(4)
def test_a_checkpoint_opens_at_another_layout(group, tmp_path):
    kind = KINDS["sigmoid, groups, bias"] | {"moe_shared_expert_intermediate_size": 10}
    initialize(1, 4, 1)
    model = build(config_of(**kind))
    for layer in model.decoder.layers:
        layer.mlp.router.expert_bias.fill_(0.5)
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    dist_checkpointing.save(model.sharded_state_dict(metadata=metadata), tmp_path)
    for layout, num_stages in (((2, 2, 2), 1), ((1, 2, 1), 2)):
        parallel_state.destroy_model_parallel()
        initialize(*layout, num_stages)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        ends = {"pre_process": stage == 0, "post_process": stage == num_stages - 1}
        model = build(config_of(pipeline_model_parallel_size=num_stages, **kind), **ends)
        # Initial values are the same at every layout.
        expected = {name: param.detach().clone() for name, param in model.named_parameters()}
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        state = dist_checkpointing.load(model.sharded_state_dict(), tmp_path)
        state = {name: tensor.clone() for name, tensor in state.items()}
        for param in model.parameters():
            param.data.zero_()
        # Its names number the layers of the whole model.
        model.load_state_dict(state)
        for name, param in model.named_parameters():
            assert_bit_equal(param, expected[name])
        assert_bit_equal(model.decoder.layers[0].mlp.router.expert_bias, torch.full((E,), 0.5))


@pytest.mark.ranks(1)
def test_the_spec_says_which_layers_have_experts(group):
    initialize(1, 1, 1)
    config = config_of(moe_layer_freq=2)
    with pytest.raises(ConfigError, match="moe_layer_freq is 2, and the spec is of a layer with experts; get_gpt"):
        GPTModel(config, get_gpt_layer_local_spec(E), V, S)
    mixed = GPTModel(config, get_gpt_decoder_block_spec(config, True), V, S)
    assert [isinstance(layer.mlp, MoELayer) for layer in mixed.decoder.layers] == [True, False]
    dense = GPTModel(config_of(), get_gpt_layer_local_spec(), V, S)
    assert not any(isinstance(layer.mlp, moe.MoELayer) for layer in dense.decoder.layers)
    with pytest.raises(ConfigError, match="a layer's mlp is MoELayer, and num_moe_experts of the config is None"):
        GPTModel(config_of(num_moe_experts=None), get_gpt_layer_local_spec(E), V, S)
    parts = get_gpt_layer_local_spec(E, moe_grouped_gemm=True).submodules
    torch.manual_seed(3)
    layer = TransformerLayer(config_of(), parts)
    assert isinstance(layer.mlp.experts, GroupedMLP)
    output, none = layer(hidden_states())
    assert (output.shape, none) == ((S, B, H), None)
    with pytest.raises(ConfigError, match="layers for inference are made of MLP"):
        GPTModel(config_of(use_inference_optimized_layers=True), get_gpt_layer_local_spec(E), V, S)


@pytest.mark.ranks(1)
def test_parts_of_a_layer(group):
    initialize(1, 1, 1)
    config = config_of()
    layer = MoELayer(config, MoESubmodules(ModuleSpec(SequentialMLP)), layer_number=2)
    assert (layer.layer_number, layer.num_local_experts, layer.local_expert_indices) == (2, E, [*range(E)])
    assert layer.shared_experts is None
    assert layer.router.expert_bias is None
    assert isinstance(layer.router, moe_door.Router)
    assert not isinstance(layer, moe_door.Router)
    # Experts alone: tokens of one after those of another, with their weights.
    tokens, counts, probs = hidden_states().view(-1, H)[:6], torch.tensor([1, 0, 3, 2]), torch.rand(6).double()
    output, none = layer.experts(tokens, counts, probs)
    assert none is None
    assert_near(output, layer.experts(tokens, counts) * probs[:, None])
    weighed = MoELayer(config_of(moe_apply_probs_on_input=True))
    assert_near(weighed.experts(tokens, counts, probs)[0], weighed.experts(tokens * probs[:, None], counts))
    for make, message in (
        (lambda: SequentialMLP(3, config), "num_local_experts is 3, and each rank has 4 of the 4 experts here; pass 4"),
        (lambda: MoELayer(config_of(num_moe_experts=None)), "num_moe_experts of the config is None"),
        (lambda: TopKRouter(config_of(num_moe_experts=None)), "num_moe_experts of the config is None"),
        (lambda: MoELayer(config, MoESubmodules(torch.nn.Linear)), "experts of MoESubmodules is .*Linear"),
        (lambda: MoELayer(config, MoESubmodules(router=torch.nn.Linear)), "router of MoESubmodules is Linear; here"),
        (lambda: MoELayer(config, MoESubmodules(shared_experts=torch.nn.Linear)), "shared_experts of MoESubmodules"),
        (lambda: layer(hidden_states(), padding_mask=torch.ones(B, S)), "padding_mask is given"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


@pytest.mark.ranks(1)
def test_the_bias_of_the_choice_stays_in_fp32(group):
    initialize(1, 1, 1)
    kind = KINDS["sigmoid, groups, bias"]
    config = config_of(bf16=True, params_dtype=torch.bfloat16, **kind)
    model = Float16Module(config, layer_of(config))
    assert model.module.router.expert_bias.dtype == torch.float32
    assert model.module.router.weight.dtype == torch.bfloat16
    assert model(hidden_states().float())[0].dtype == torch.float32
