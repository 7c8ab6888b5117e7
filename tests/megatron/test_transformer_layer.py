"""Megatron's layer, attention and MLP, alone and in specs, hold what the engine's do; parts may be a program's own."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch
from harness.parity import assert_bit_equal, assert_close_to

from shardwise import parallel_state
from shardwise.core.errors import ConfigError
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.layer_parts import (
    MLP,
    Attention,
    DotProductAttention,
    FusedLayerNorm,
    MLPSubmodules,
    SelfAttention,
    SelfAttentionSubmodules,
    TELayerNormColumnParallelLinear,
    get_bias_dropout_add,
)
from shardwise.megatron.layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.module import MegatronModule
from shardwise.megatron.packed_seq_params import PackedSeqParams
from shardwise.megatron.rotary_pos_embedding import RotaryEmbedding
from shardwise.megatron.spec_utils import IdentityFuncOp, IdentityOp, ModuleSpec
from shardwise.megatron.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
    layer_spec_of,
)
from shardwise.models.generation import PreallocatedCache
from shardwise.models.transformer import attention, layer, mlp
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.models.transformer.masks import AttentionMask, AttnMaskType
from shardwise.models.transformer.rotary import RotaryScaling
from shardwise.tensor_parallel import ColumnParallelLinear, RowParallelLinear

V, S, B, H, D = 23, 7, 2, 12, 4


def config_of(**settings):
    sizes = {"num_layers": 2, "hidden_size": H, "num_attention_heads": 6, "num_query_groups": 3, "kv_channels": D}
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "init_method_std": 0.3}
    return TransformerConfig(**sizes | dropout | {"params_dtype": torch.float64} | settings)


def spec_of(**parts):
    """The local spec, with parts replaced."""
    spec = get_gpt_layer_local_spec()
    return replace(spec, submodules=replace(spec.submodules, **parts))


def gpt(spec, config=None, **options):
    torch.manual_seed(3)
    return GPTModel(config or config_of(), spec, V, S, **{"position_embedding_type": "rope"} | options)


class OwnMLP(MegatronModule):
    """As a program writes one: two layers of Megatron's, and a pair for its result."""

    def __init__(self, config, submodules, tp_group=None):
        super().__init__(config)
        options = {"config": config, "skip_bias_add": True, "tp_group": tp_group}
        inner = config.ffn_hidden_size
        self.up = submodules.linear_fc1(H, inner, init_method=config.init_method, bias=True, **options)
        self.down = submodules.linear_fc2(
            inner, H, init_method=config.output_layer_init_method, bias=True, input_is_parallel=True, **options
        )

    def forward(self, hidden):
        inner, bias = self.up(hidden)
        return self.down(torch.tanh(inner + bias))


class OwnAttention(SelfAttention):
    """A program's attention on Megatron's, which says how it was called."""

    def forward(self, hidden_states, attention_mask=None, **arguments):
        self.was_given = {name for name, value in arguments.items() if value is not None}
        output, bias = super().forward(hidden_states, attention_mask, **arguments)
        return 2 * output, 2 * bias + 1


class OwnNorm(torch.nn.Module):
    def __init__(self, config, hidden_size, eps):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 2.0, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, hidden):
        return self.weight * hidden / (hidden.abs().mean(-1, keepdim=True) + self.eps)


@pytest.mark.ranks(2)
def test_a_spec_makes_the_engine_s_layer(group):
    parallel_state.initialize_model_parallel(2)
    ids = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(1))
    expected = gpt(TransformerLayerSpec())(ids, labels=ids)
    as_submodule = functools.partial(MLP.as_mlp_submodule, submodules=MLPSubmodules())
    for spec in (
        get_gpt_layer_local_spec(),
        get_gpt_layer_with_transformer_engine_spec(),
        spec_of(mlp=as_submodule),
        ModuleSpec(
            TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=FusedLayerNorm,
                self_attention=ModuleSpec(
                    ("shardwise.megatron.layer_parts", "SelfAttention"),
                    params={"attn_mask_type": AttnMaskType.causal},
                    submodules=SelfAttentionSubmodules(ColumnParallelLinear, DotProductAttention, RowParallelLinear),
                ),
                self_attn_bda=get_bias_dropout_add,
                pre_mlp_layernorm=FusedLayerNorm,
                mlp=ModuleSpec(MLP, submodules=MLPSubmodules(ColumnParallelLinear, RowParallelLinear)),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
    ):
        model = gpt(spec)
        # The engine's own classes, so that there are layers for inference of them.
        assert {type(each) for each in model.decoder.layers} == {layer.TransformerLayer}
        assert type(model.decoder.layers[0].self_attention) is attention.SelfAttention
        assert type(model.decoder.layers[0].mlp) is mlp.MLP
        assert_bit_equal(model(ids, labels=ids), expected)
    qk = config_of(qk_layernorm=True)
    given = SelfAttentionSubmodules(q_layernorm=FusedLayerNorm, k_layernorm=FusedLayerNorm)
    causal = {"attn_mask_type": AttnMaskType.causal}
    spec = spec_of(self_attention=ModuleSpec(SelfAttention, params=causal, submodules=given))
    assert_bit_equal(gpt(spec, qk)(ids), gpt(TransformerLayerSpec(), qk)(ids))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_program_s_own_mlp_and_norm_equal_the_dense_ones(group, sequence_parallel):
    parallel_state.initialize_model_parallel(2)
    config = config_of(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    spec = spec_of(
        mlp=ModuleSpec(OwnMLP, submodules=MLPSubmodules()), input_layernorm=OwnNorm, pre_mlp_layernorm=OwnNorm
    )
    torch.manual_seed(3)
    own = layer.TransformerLayer(config, layer_spec_of(spec, config), 1, group)
    norm, block = own.pre_mlp_layernorm, own.mlp
    assert type(norm) is OwnNorm
    assert norm.eps == config.layernorm_epsilon
    assert block.up.tp_group is group
    torch.nn.init.normal_(block.down.bias, generator=torch.Generator().manual_seed(2))
    hidden = torch.randn(2 * B, 1, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    shard = hidden.chunk(2)[group.rank()] if sequence_parallel else hidden
    # The dense one, of whole weights.
    up, down = (torch.cat(_gathered(each.weight, group), dim) for each, dim in ((block.up, 0), (block.down, 1)))
    up_bias = torch.cat(_gathered(block.up.bias, group))
    expected = torch.tanh(hidden @ up.t() + up_bias) @ down.t() + block.down.bias
    actual = block(shard, sequence=None)
    assert_close_to(actual, expected.chunk(2)[group.rank()] if sequence_parallel else expected, rtol_of_norm=1e-13)
    assert_bit_equal(copy.deepcopy(own).mlp(shard), actual, name="a copy's")
    # The layer's sharded state has its parameters by their names in the program's module.
    state = layer_state_of(own)
    assert state["mlp.up.weight"].global_shape == (config.ffn_hidden_size, H)
    assert "input_layernorm.weight" in state


def _gathered(tensor, group):
    whole = [torch.empty_like(tensor) for _ in range(group.size())]
    torch.distributed.all_gather(whole, tensor.detach().contiguous(), group=group)
    return whole


def layer_state_of(module):
    from shardwise.core.sharded_state import sharded_state_dict

    return sharded_state_dict(module, group=parallel_state.get_tensor_model_parallel_group())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_program_s_own_attention_is_called_as_in_megatron(group, interleaved):
    parallel_state.initialize_model_parallel(2)
    config = config_of(rotary_interleaved=interleaved)
    causal = {"attn_mask_type": AttnMaskType.causal}

    class Doubled(attention.SelfAttention):
        def forward(self, *args, **arguments):
            return 2 * super().forward(*args, **arguments) + 1

    own = gpt(spec_of(self_attention=ModuleSpec(OwnAttention, params=causal)), config)
    expected = gpt(TransformerLayerSpec(attention=Doubled), config)
    ids = torch.randint(V, (1, S), generator=torch.Generator().manual_seed(1))
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 3, 7]))
    for options in ({}, {"packed_seq_params": packed}, {"attention_mask": torch.rand(1, 1, S, S) < 0.2}):
        assert_close_to(own(ids, **options), expected(ids, **options), rtol_of_norm=1e-12)
    assert own.decoder.layers[0].self_attention.was_given == {"rotary_pos_emb"}
    caches = [PreallocatedCache.for_model(model, batch_size=1, capacity=S) for model in (own, expected)]
    for start, stop in ((0, 4), (4, S)):
        at = torch.arange(start, stop)
        parts = [
            model(ids[:, start:stop], at, inference_context=cache)
            for model, cache in zip((own, expected), caches, strict=True)
        ]
        assert_close_to(*parts, rtol_of_norm=1e-12)
    with pytest.raises(ConfigError, match=r"OwnAttention is an attention of the program, and the model has ALiBi"):
        gpt(spec_of(self_attention=OwnAttention), position_embedding_type="alibi")(ids)
    yarn = RotaryScaling("yarn", 4.0, 32)
    with pytest.raises(ConfigError, match=r"'yarn' multiplies cosine and sine by 1\.1.* is not told"):
        gpt(spec_of(self_attention=OwnAttention), rope_scaling=yarn)
    gpt(get_gpt_layer_local_spec(), rope_scaling=yarn)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("interleaved", [False, True])
def test_layers_alone_equal_the_engine_s(group, interleaved):
    parallel_state.initialize_model_parallel(group.size())
    split = group.size() > 1
    config = config_of(rotary_interleaved=interleaved, tensor_model_parallel_size=group.size(), sequence_parallel=split)
    hidden = torch.randn(8, 1, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    shard = hidden.chunk(group.size())[group.rank()]
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 3, 8]))
    angles = RotaryEmbedding(D, 1.0, rotary_interleaved=interleaved)
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])
    engine_rotary = attention_rotary(positions)
    documents = torch.tensor([[0] * 3 + [1] * 5])
    forbidden = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(2)) < 0.3
    cases = [
        ({"rotary_pos_emb": angles(8)}, {"rotary": attention_rotary(torch.arange(8))}),
        (
            {"rotary_pos_emb": (angles(5), angles(5)), "packed_seq_params": packed},
            {"rotary": engine_rotary, "attention_mask": AttentionMask(document_ids=documents)},
        ),
        ({"attention_mask": forbidden, "context": None}, {"attention_mask": AttentionMask(forbidden)}),
    ]
    causal = AttnMaskType.causal
    made = {
        SelfAttention: lambda: SelfAttention(config, layer_number=2, attn_mask_type=causal),
        TransformerLayer: lambda: TransformerLayer(config, get_gpt_layer_local_spec().submodules, 2),
    }
    engine = {
        SelfAttention: lambda: attention.SelfAttention(config, 2, group, attn_mask_type=causal),
        TransformerLayer: lambda: layer.TransformerLayer(config, TransformerLayerSpec(), 2, group),
    }
    for kind in made:
        torch.manual_seed(3)
        ours = made[kind]()
        torch.manual_seed(3)
        theirs = engine[kind]()
        for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            if param.dim() == 1:
                param.data += 0.5
                other.data += 0.5
        assert isinstance(ours, MegatronModule)
        assert ours.config is config
        assert ours.layer_number == 2
        for arguments, engine_arguments in cases:
            x, y = (shard.clone().requires_grad_() for _ in range(2))
            output, bias = ours(x, **arguments)
            expected = theirs(y, **engine_arguments)
            assert bias is (ours.linear_proj.bias if kind is SelfAttention else None)
            output = output if bias is None else output + bias
            assert_close_to(output, expected, rtol_of_norm=1e-12)
            output.square().sum().backward()
            expected.square().sum().backward()
            assert_close_to(x.grad, y.grad, rtol_of_norm=1e-12)
        for (name, param), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert_close_to(param.grad, other.grad, rtol_of_norm=1e-12, name=name)
        assert ours.sharded_state_dict("a.").keys() == {f"a.{name}" for name in layer_state_of(theirs)}
        with pytest.raises(ConfigError, match="attention_bias is given, which a layer's parts do not take here"):
            ours(shard, attention_bias=torch.ones(1))
    torch.manual_seed(3)
    ours = MLP(config, MLPSubmodules(), ffn_hidden_size=20)
    torch.manual_seed(3)
    theirs = mlp.MLP(
        config_of(ffn_hidden_size=20, tensor_model_parallel_size=group.size(), sequence_parallel=split), group
    )
    theirs.linear_fc2.bias.data += 0.5
    output, bias = ours(shard)
    assert bias is ours.linear_fc2.bias
    assert_close_to(output + bias + 0.5, theirs(shard), rtol_of_norm=1e-12)
    with pytest.raises(ConfigError, match=r"rotary_pos_emb has other angles for keys"):
        made[SelfAttention]()(shard, rotary_pos_emb=(angles(8), angles(8) + 1))
    dropped = TransformerLayer(config, get_gpt_layer_local_spec().submodules, hidden_dropout=0.7)
    assert dropped.dropout.p == 0.7


def attention_rotary(positions):
    """Cosine and sine of heads of width 4, from the formula."""
    angles = (positions.double()[:, None] * torch.tensor([1.0, 0.01], dtype=torch.float64))[:, None, None, :]
    return angles.float().cos().double(), angles.float().sin().double()


WRONG = {
    "bda": (lambda: spec_of(mlp_bda=IdentityFuncOp), r"mlp_bda of .* is IdentityFuncOp; here it is get_bias_dropout"),
    "cross": (lambda: spec_of(cross_attention=SelfAttention), r"cross_attention of .* is SelfAttention; .* IdentityOp"),
    "no mlp": (lambda: spec_of(mlp=IdentityOp), r"mlp of a layer's submodules is not given"),
    "norms": (lambda: spec_of(input_layernorm=OwnNorm), r"input_layernorm is .*OwnNorm.* and pre_mlp_layernorm"),
    "linear": (
        lambda: spec_of(mlp=ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=torch.nn.Linear))),
        r"linear_fc1 of MLPSubmodules is Linear; here it is ColumnParallelLinear",
    ),
    "activation": (
        lambda: spec_of(mlp=ModuleSpec(MLP, submodules=MLPSubmodules(activation_func=torch.nn.GELU))),
        r"activation_func of MLPSubmodules is given",
    ),
    "core": (
        lambda: spec_of(
            self_attention=ModuleSpec(SelfAttention, submodules=SelfAttentionSubmodules(core_attention=torch.nn.Linear))
        ),
        r"core_attention of SelfAttentionSubmodules is Linear; here it is DotProductAttention",
    ),
    "qk": (
        lambda: spec_of(
            self_attention=ModuleSpec(SelfAttention, submodules=SelfAttentionSubmodules(q_layernorm=FusedLayerNorm))
        ),
        r"q_layernorm is given, and the config's qk_layernorm is False",
    ),
    "params": (lambda: spec_of(self_attention=ModuleSpec(SelfAttention, params={"x": 1})), r"has params \['x'\]"),
    "another layer": (lambda: ModuleSpec(torch.nn.Linear), r"give a ModuleSpec of TransformerLayer"),
    "no submodules": (lambda: ModuleSpec(TransformerLayer), r"a layer's submodules are None"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_layer_does_not_have_is_refused(case):
    make, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        layer_spec_of(make(), config_of())


class Doubled(torch.nn.Module):
    """A program's wrapper of a linear layer, which does not double a bias that the layer leaves to its caller."""

    def __init__(self, to_wrap):
        super().__init__()
        self.to_wrap = to_wrap

    def forward(self, x, *args, **kwargs):
        output, bias = self.to_wrap(x, *args, **kwargs)
        return output * 2, bias

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return self.to_wrap.sharded_state_dict(prefix, sharded_offsets, metadata)


def double_(model, kinds):
    """Wrap all modules of ``kinds`` under the layers of a model, and return their names."""
    found = [(name, part) for name, part in model.decoder.named_modules() if isinstance(part, kinds)]
    for name, part in found:
        owner, _, child = name.rpartition(".")
        setattr(model.decoder.get_submodule(owner), child, Doubled(part))
    return [name for name, _ in found]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_program_may_wrap_linear_layers(group, sequence_parallel):
    """Selected by Megatron's classes, once and again after a forward; doubled outputs are those of doubled weights."""
    parallel_state.initialize_model_parallel(2)
    settings = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel, "add_qkv_bias": True}
    config = config_of(**settings)
    wrapped, oracle = (gpt(get_gpt_layer_local_spec(), config) for _ in range(2))
    with torch.no_grad():
        for name, param in wrapped.named_parameters():
            if name.endswith("bias"):
                param.add_(torch.linspace(0, 1, len(param), dtype=torch.float64))
    oracle.load_state_dict(wrapped.state_dict())
    kinds, keys = (ColumnParallelLinear, RowParallelLinear), wrapped.sharded_state_dict().keys()
    ids = torch.arange(B * 6).view(B, 6) % V

    def loss_of(model):
        model.zero_grad()
        loss = model(ids, None, None, labels=ids).sum()
        loss.backward()
        return loss

    for factor in (2, 4):
        if factor == 2:
            names = double_(wrapped, kinds)
            assert sorted(name.rpartition(".")[2] for name in names) == sorted(
                2 * ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
            )
        else:
            double_(wrapped, Doubled)
        with torch.no_grad():
            for name in names:
                layer = oracle.decoder.get_submodule(name)
                layer.weight.mul_(2)
                if name.endswith("qkv"):
                    layer.bias.mul_(2)
        assert_close_to(loss_of(wrapped), loss_of(oracle), rtol_of_norm=1e-13)
        for name in names:
            own = next(part for part in wrapped.decoder.get_submodule(name).modules() if isinstance(part, kinds))
            expected = oracle.decoder.get_submodule(name).weight.grad * factor
            assert_close_to(own.weight.grad, expected, rtol_of_norm=1e-10)
        assert wrapped.sharded_state_dict().keys() == keys
    if sequence_parallel:
        with pytest.raises(
            ConfigError, match="a sequence of 7 positions is split over 2 ranks, and a program's Doubled"
        ):
            wrapped(torch.zeros(B, 7, dtype=torch.int64), None, None)


@pytest.mark.ranks(1)
def test_wrapped_layers_have_no_norm_of_transformer_engine(group):
    parallel_state.initialize_model_parallel(1)
    config = config_of()
    model = gpt(get_gpt_layer_with_transformer_engine_spec(), config)
    double_(model, (TELayerNormColumnParallelLinear,))
    with pytest.raises(ConfigError, match="build the model by get_gpt_layer_local_spec"):
        model(torch.zeros(B, S, dtype=torch.int64), None, None)
    alone = SelfAttention(config, layer_number=1), MLP(config)
    x = torch.randn(S, B, H, dtype=torch.float64)
    for part, last in zip(alone, ("linear_proj", "linear_fc2"), strict=True):
        linear = getattr(part, last)
        torch.nn.init.ones_(linear.bias)
        output, bias = part(x)
        setattr(part, last, Doubled(linear))
        both, none = part(x)
        assert none is None
        assert_close_to(both, output * 2 + bias, rtol_of_norm=1e-13)


def test_an_mlp_is_dense():
    with pytest.raises(ConfigError, match=r"is_expert=True; it is dense here"):
        MLP(config_of(), is_expert=True)


def test_attention_of_its_own_is_no_subclass_of_the_base():
    with pytest.raises(ConfigError, match=r"^Own is a subclass of Attention, which has no parts here; derive it from"):
        type("Own", (Attention,), {})(config_of(), layer_number=1)
    assert issubclass(SelfAttention, Attention)


def test_where_a_stage_s_layers_begin():
    config = config_of(num_layers=7, pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=3)
    assert [get_transformer_layer_offset(config, pp_rank=stage) for stage in range(2)] == [0, 3]
    chunks = config_of(num_layers=8, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    offsets = [get_transformer_layer_offset(chunks, chunk, stage) for chunk in range(2) for stage in range(2)]
    assert offsets == [0, 2, 4, 6]
    assert get_transformer_layer_offset(config_of()) == 0
    with pytest.raises(ConfigError, match=r"pp_rank is 0 and vp_stage None, of 2 stages with 2 chunks each"):
        get_transformer_layer_offset(chunks, pp_rank=0)
    with pytest.raises(ConfigError, match=r"vp_stage is 2; it must be from 0 to 1"):
        get_transformer_layer_offset(chunks, 2, 0)


@pytest.mark.ranks(2)
def test_a_layer_counts_those_of_earlier_stages(group):
    parallel_state.initialize_model_parallel(1, 2)
    config, parts = config_of(num_layers=8, pipeline_model_parallel_size=2), get_gpt_layer_local_spec().submodules
    assert TransformerLayer(config, parts, 2).layer_number == 2 + 4 * group.rank()
    assert TransformerLayer(config, parts, 2, pp_layer_offset=3).layer_number == 5
    assert TransformerLayer(config, parts, 2, add_layer_offset=False).layer_number == 2


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_norm_by_megatron_s_arguments(kind):
    norm = FusedLayerNorm(config_of(normalization=kind), 5, eps=0.5)
    x = torch.randn(3, 5, dtype=torch.float64)
    centered = x - x.mean(-1, keepdim=True) if kind == "LayerNorm" else x
    expected = centered / (centered.square().mean(-1, keepdim=True) + 0.5).sqrt()
    assert_close_to(norm(x), expected, rtol_of_norm=1e-14)


def test_bias_dropout_and_residual_in_one_function():
    x, bias, residual = torch.ones(1000), torch.ones(1000), torch.full((1000,), 5.0)
    assert get_bias_dropout_add(False, True)((x, bias), residual, 0.5).tolist() == [7.0] * 1000
    dropped = get_bias_dropout_add(True, False)((x, None), residual, 0.5)
    assert set(dropped.tolist()) == {5.0, 7.0}
