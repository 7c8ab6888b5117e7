"""Experts on any ranks are the experts of one rank: outputs, gradients of inputs and of every parameter."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.model_options import NO_DROPOUT
from models.model_checks import alone, check_gradients
from torch import Tensor, nn

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError
from shardwise.core.random import seed_streams
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import ParamShard, balanced_range
from shardwise.core.topology import Groups, Topology
from shardwise.models import GPT, ModelConfig
from shardwise.models.experts import ClampedGate, Experts
from shardwise.models.experts.moe import MoELayer
from shardwise.models.transformer.heads import LatentAttention
from shardwise.nn.replicated import named_param_layouts
from shardwise.training.gradients.finalize import finalize_gradients_
from shardwise.training.optimizer.grad_norm import global_grad_norm

VOCABULARY, LENGTH, WIDTH = 97, 13, 20
MIXTRAL = Experts(num=8, per_token=2, ffn_hidden_size=22, aux_loss=0.1)
KINDS = {
    "softmax": MIXTRAL,
    "softmax after the choice, weights on the input": dataclasses.replace(
        MIXTRAL, softmax_after_choice=True, normalizes_weights=False, weighs_input=True, z_loss=0.01, aux_loss=0.0
    ),
    "sigmoid, groups": dataclasses.replace(
        MIXTRAL, scores="sigmoid", num_groups=4, groups_per_token=2, weight_scale=1.7, per_token=3
    ),
    "groups, no normalization": dataclasses.replace(
        MIXTRAL, num_groups=2, groups_per_token=1, normalizes_weights=False, balances="micro_batch"
    ),
    "biases, clamped": dataclasses.replace(
        MIXTRAL, biases=True, gate=ClampedGate(limit=0.3), softmax_after_choice=True, normalizes_weights=False
    ),
    "pooled over layers": dataclasses.replace(MIXTRAL, pools_layers=True, z_loss=0.01),
    "shared, with a gate": dataclasses.replace(
        MIXTRAL, shared_ffn_hidden_size=26, shared_gate=True, layers=(False, True)
    ),
}
# Numbers of ranks: tensor-parallel, expert-parallel, and those that split an expert.
LAYOUTS = {
    "ep 4": {"tp": 1, "ep": 4, "etp": 1},
    "ep 2, dp 2 of experts": {"tp": 1, "ep": 2, "etp": 1},
    "dp 4": {"tp": 1, "ep": 1, "etp": 1},
    "tp 2, ep 2, etp 2": {"tp": 2, "ep": 2, "etp": 2},
    "tp 2, ep 4, etp 1": {"tp": 2, "ep": 4, "etp": 1},
    "tp 2, etp 1": {"tp": 2, "ep": 1, "etp": 1},
    "tp 1, etp 4": {"tp": 1, "ep": 1, "etp": 4},
    "tp 4, ep 2, etp 2": {"tp": 4, "ep": 2, "etp": 2},
}


def config(experts: Experts, **options: Any) -> ModelConfig:
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": WIDTH, "num_attention_heads": 5, "init_method_std": 0.2}
    if options.get("tp", 1) in (2, 4):
        sizes |= {"num_attention_heads": 4, "kv_channels": 6}
    options.pop("tp", None)
    sizes |= {"gated_linear_unit": True} | options
    return ModelConfig(
        **sizes,
        **NO_DROPOUT,
        normalization="RMSNorm",
        activation_func=F.silu,
        add_bias_linear=False,
        params_dtype=torch.float64,
        experts=experts,
    )


def build(experts: Experts, groups: Groups, **options: Any) -> GPT:
    torch.manual_seed(3)
    own = config(experts, **options)
    model = GPT(own, VOCABULARY, LENGTH, groups=groups, position_embedding_type="rope")
    with torch.no_grad():
        for name, shard in model.sharded_state_dict().items():
            if name.endswith("bias"):
                draw_bias_(shard)
    return model


def draw_bias_(shard: ParamShard) -> None:
    """Give a bias values other than 0, the same ones at every layout."""
    whole = torch.randn(shard.layout.global_shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    shard.data.copy_(shard.layout.take(whole, shard.rank))


def samples(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(VOCABULARY, (2, LENGTH), generator=generator)


def train(model: nn.Module, batches: list[int], scale: float) -> list[Tensor]:
    """Losses of batches of a step; gradients are those of their sum, times ``scale``."""
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.loss_scale = scale
    losses = []
    for batch in batches:
        ids = samples(batch)
        losses.append(model(ids, labels=ids.roll(1, 1)))
        (losses[-1].mean() * scale).backward()
    return [loss.detach() for loss in losses]


def check_layout(
    topology: Topology, experts: Experts, *, latent: LatentAttention | None = None, **options: Any
) -> None:
    groups, tp = Groups.of(topology), topology.size("tp")
    dp = topology.size("dp")
    dense = build(experts, alone(topology), tp=tp, latent=latent)
    split = build(experts, groups, tp=tp, latent=latent, **options)
    expected = train(dense, list(range(dp)), 1 / dp)[topology.rank("dp")]
    (actual,) = train(split, [topology.rank("dp")], 1 / dp)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    finalize_gradients_(split, tp_group=groups.tp, dp_group=groups.dp, expert_dp_group=groups.expert_dp)
    check_gradients(split, dense, groups, atol=1e-12)
    norm = global_grad_norm(dense, tp_group=alone(topology).tp, groups=alone(topology))
    torch.testing.assert_close(global_grad_norm(split, tp_group=groups.tp, groups=groups), norm, rtol=1e-12, atol=0.0)


@pytest.mark.sample(8)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("way", ["a2a", "all_gather"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_one_rank(layout, way, group):
    sizes = LAYOUTS[layout]
    topology = Topology.create(**sizes)
    gathered = ("softmax", "softmax after the choice, weights on the input", "biases, clamped")
    for kind in (KINDS if way == "a2a" else gathered) if layout in ("tp 2, ep 2, etp 2", "ep 4") else ["softmax"]:
        check_layout(topology, KINDS[kind], ep_comm_type=way)
        if sizes["tp"] > 1:
            check_layout(topology, KINDS[kind], ep_comm_type=way, sequence_parallel=True)
    if way == "all_gather":
        return
    latent = LatentAttention(9, plain_width=4, rotary_width=2, value_width=5, query_rank=7)
    if sizes["tp"] > 1:
        for sequence_parallel in (False, True):
            check_layout(topology, KINDS["sigmoid, groups"], latent=latent, sequence_parallel=sequence_parallel)


def moe_layer(experts: Experts, groups: Groups, kind: type[MoELayer] = MoELayer, **options: Any) -> MoELayer:
    torch.manual_seed(5)
    layer = kind(config(experts, **options), groups)
    with torch.no_grad():
        for module in (layer.router, layer.experts):
            for name, shard in module.sharded_state_dict().items():
                if name.endswith("bias"):
                    draw_bias_(shard)
    return layer


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["a2a", "all_gather"])
@pytest.mark.parametrize("num_groups", [1, 4])
def test_ranks_and_experts_without_tokens(group, num_groups, way):
    """One token on two ranks, whose router prefers the experts of one of them."""
    topology = Topology.create(tp=2, ep=2, etp=1)
    groups, one = Groups.of(topology), alone(topology)
    spec = dataclasses.replace(MIXTRAL, per_token=1, aux_loss=0.0, num_groups=num_groups)
    split, dense = moe_layer(spec, groups, tp=2, ep_comm_type=way), moe_layer(spec, one, tp=2)
    hidden = torch.randn(1, 1, WIDTH, dtype=torch.float64)
    inputs = [hidden.clone().requires_grad_() for _ in range(2)]
    outputs = [layer(each) for layer, each in zip((split, dense), inputs, strict=True)]
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-12, atol=1e-14)
    layout = split.experts.param_layouts["up"]
    own = layout.take(dense.experts.up.grad, group.rank())
    torch.testing.assert_close(split.experts.up.grad, own, rtol=1e-12, atol=1e-14)
    assert (own.view(4, -1) == 0).all(dim=1).sum() >= 3, "a gradient of zeros for experts without tokens"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", [{"tp": 1, "ep": 2}, {"tp": 2, "ep": 1}], ids=["ep", "etp"])
def test_collectives(layout, group):
    """An exchange of counts, one there and one back; without sequence parallelism a gather of the output."""
    topology = Topology.create(**layout)
    tp = layout["tp"]
    layer = moe_layer(MIXTRAL, Groups.of(topology), tp=tp, ep_comm_type="a2a")
    hidden = torch.randn(6, 1, WIDTH, dtype=torch.float64, requires_grad=True)
    with CollectiveCounter() as forward:
        output = layer(hidden)
    counts = ["all_reduce"] if tp > 1 else []
    gathers = ["all_gather"] if tp > 1 else []
    assert sorted(launch.name for launch in forward.launches) == sorted(["all_to_all"] * 3 + counts + gathers)
    rows = 6 * MIXTRAL.per_token // tp * tp
    assert sum(launch.num_bytes for launch in forward.launches if launch.name == "all_to_all") >= rows * WIDTH * 8
    with CollectiveCounter() as backward:
        output.sum().backward()
    # The input's gradient is gathered from the ranks that routed its tokens.
    assert sorted(launch.name for launch in backward.launches) == sorted(["all_to_all"] * 2 + gathers)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("per_token", "layout", "gathers"),
    [(2, {"ep": 2}, False), (3, {"ep": 2}, True), (1, {"tp": 2}, False), (2, {"tp": 2}, True)],
    ids=["as many bytes", "ep", "one choice", "etp"],
)
def test_tokens_are_gathered_if_that_sends_fewer_bytes(per_token, layout, gathers, group):
    """Tokens and choices are gathered, and sums reduced; gradients take the same moves back."""
    groups = Groups.of(Topology.create(**layout))
    layer = moe_layer(dataclasses.replace(MIXTRAL, per_token=per_token), groups, tp=2, sequence_parallel=True)
    hidden = torch.randn(6, 2, WIDTH, dtype=torch.float64, requires_grad=True)
    with CollectiveCounter() as forward:
        output = layer(hidden)
    assert any(launch.name == "all_to_all" for launch in forward.launches) is not gathers
    if not gathers:
        return
    rows = 12 * WIDTH * 8
    sizes = [(launch.name, launch.num_bytes) for launch in forward.launches if launch.name != "all_reduce"]
    choices = 12 * 2 * per_token * 8
    assert sizes == [("all_gather", 9 * 8), ("all_gather", rows), ("all_gather", choices), ("reduce_scatter", 2 * rows)]
    with CollectiveCounter() as backward:
        output.sum().backward()
    sizes = sorted((launch.name, launch.num_bytes) for launch in backward.launches)
    assert sizes == [("all_gather", rows), ("reduce_scatter", 2 * choices), ("reduce_scatter", 2 * rows)]


def dense_experts(layer: MoELayer, hidden: Tensor) -> Tensor:
    """GPT-OSS's experts, token by token and expert by expert."""
    spec, router, experts = layer.spec, layer.router, layer.experts
    assert spec.gate is not None
    f = spec.ffn_hidden_size
    up, down = experts.up.view(spec.num, 2 * f, WIDTH), experts.down.view(spec.num, f, WIDTH)
    up_bias, down_bias = experts.up_bias.view(spec.num, 2 * f), experts.down_bias.view(spec.num, WIDTH)
    outputs = []
    for token in hidden.view(-1, WIDTH):
        logits = router.weight @ token + router.bias
        chosen = logits.argsort(descending=True)[: spec.per_token]
        total = logits[chosen].exp().sum()
        output = torch.zeros(WIDTH, dtype=torch.float64)
        for expert in chosen.tolist():
            inner = up[expert] @ token + up_bias[expert]
            gate, linear = inner[:f].clamp(max=spec.gate.limit), inner[f:].clamp(-spec.gate.limit, spec.gate.limit)
            inner = (linear + 1) * gate / (1 + (-spec.gate.alpha * gate).exp())
            output = output + logits[expert].exp() / total * (inner @ down[expert] + down_bias[expert])
        outputs.append(output)
    return torch.stack(outputs).view(hidden.shape)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_biases_and_the_clamped_gate_equal_a_definition(sequence_parallel, group):
    """On ranks that split each expert, and add its bias once."""
    topology = Topology.create(tp=group.size())
    groups, spec = Groups.of(topology), dataclasses.replace(KINDS["biases, clamped"], aux_loss=0.0)
    dense = moe_layer(spec, alone(topology), num_attention_heads=6, kv_channels=6)
    split = moe_layer(spec, groups, num_attention_heads=6, kv_channels=6, sequence_parallel=sequence_parallel)
    whole = torch.randn(LENGTH, 2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    weighting = torch.randn(whole.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    whole.requires_grad_()
    expected = dense_experts(dense, whole)
    (expected * weighting).sum().backward()
    mine = slice(*balanced_range(LENGTH, group.size(), group.rank())) if sequence_parallel else slice(None)
    x = whole.detach()[mine].clone().requires_grad_()
    view = SequenceView(LENGTH, groups.tp if sequence_parallel else None)
    output = split(x, sequence=view)
    (output * weighting[mine]).sum().backward()
    finalize_gradients_(split, tp_group=groups.tp, dp_group=groups.dp, expert_dp_group=groups.expert_dp)
    torch.testing.assert_close(output, expected[mine], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(x.grad, whole.grad[mine], rtol=1e-10, atol=1e-12)
    wanted = dict(dense.named_parameters())
    for name, param, layout in named_param_layouts(split, group.size()):
        own = layout.take(wanted[name].grad, group.rank())
        torch.testing.assert_close(
            param.grad, own, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.ranks(1)
def test_experts_together_start_at_the_scale_of_an_mlp(group):
    layers = []
    for scale in (1.0, 2.0):
        torch.manual_seed(5)
        layers.append(moe_layer(dataclasses.replace(MIXTRAL, init_scale=scale), Groups(tp=group)))
    one, two = (dict(layer.named_parameters()) for layer in layers)
    for name, param in one.items():
        torch.testing.assert_close(two[name], param * (2.0 if name == "experts.down" else 1.0), rtol=1e-6, atol=0.0)
    with pytest.raises(ConfigError, match=r"init_scale 2.0 is a factor of init_method_std, and this model has another"):
        moe_layer(
            dataclasses.replace(MIXTRAL, init_scale=2.0), Groups(tp=group), output_layer_init_method=nn.init.zeros_
        )


def test_wrong_experts():
    for values, message in (
        ({"per_token": 9}, "per_token is 9, and there are 8 experts"),
        ({"num_groups": 3}, "num_groups 3 does not divide the 8 experts"),
        ({"num_groups": 4, "per_token": 3}, "per_token is 3, and 1 groups have 2 experts"),
        ({"scores": "relu"}, "scores is 'relu'; it must be one of softmax, sigmoid"),
        ({"pools_layers": True, "aux_loss": 0.0}, "pools_layers is about aux_loss, which is 0; set both"),
        ({"capacity_factor": 0.0}, r"capacity_factor is 0\.0; it must be a finite number over 0, or None"),
        ({"drops_by": "position"}, "drops_by 'position' is about capacity_factor, which is None; set both"),
        ({"centers_bias": True}, "centers_bias is about bias_rate, which is 0; set both"),
        ({"balances": "tokens"}, "balances is 'tokens'; it must be one of sequence, micro_batch, global"),
        ({"shared_gate": True}, "shared_gate is about the MLP of shared_ffn_hidden_size"),
        ({"aux_loss": float("nan")}, "aux_loss is nan; it must be a finite number"),
    ):
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(MIXTRAL, **values)
    with pytest.raises(ConfigError, match=r"limit of the gate is 0\.0; it must be a finite number over 0"):
        ClampedGate(limit=0.0)
    with pytest.raises(ConfigError, match=r"experts\.gate is about gated_linear_unit, which is False; set both"):
        config(KINDS["biases, clamped"], gated_linear_unit=False)
    with pytest.raises(ConfigError, match="layers is \\(True,\\); it must be a bool for each of the 2 layers"):
        config(dataclasses.replace(MIXTRAL, layers=(True,)))
    with pytest.raises(ConfigError, match="ep_comm_type is 'p2p'; it must be one of auto, all_gather, a2a"):
        config(MIXTRAL, ep_comm_type="p2p")


@pytest.mark.ranks(2)
def test_experts_that_ranks_cannot_divide(group):
    groups = Groups.of(Topology.create(tp=1, ep=2))
    with pytest.raises(ConfigError, match="num 5 is not a multiple of the 2 ranks that divide them"):
        moe_layer(dataclasses.replace(MIXTRAL, num=5), groups)


@pytest.mark.ranks(2)
def test_the_examples_of_the_page(group, tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "experts.md").read_text()
    example, routing = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    model = names["model"]
    ids = torch.randint(1000, (2, 16))
    seed_streams(2, 0)
    model(ids, labels=ids).mean().backward()
    assert isinstance(model.decoder.layers[1].mlp, MoELayer)
    assert all(param.grad is not None for param in model.parameters())
    names |= {"num_steps": 2, "ids": ids}
    exec(routing.replace('"routing"', repr(str(tmp_path / "routing"))).replace("...", "model(ids)"), names)
    assert len(list((tmp_path / "routing").glob("step_*.safetensors"))) == 2
