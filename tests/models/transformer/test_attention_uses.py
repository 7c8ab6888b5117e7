"""Attention's options with a cache, with dropout, packed, compiled, and with the backends that there are or are not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from harness.groups import alone
from harness.live_bytes import Peak
from harness.parity import assert_bit_equal, assert_close_to, gather_shards
from layer_cases import CASES, DOCUMENTS, LLAMA, POST_NORM, B, Case, H, S, config_of, layer_of, mask_of, rotary_of
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.random import seed_streams
from shardwise.models.generation.cache import PreallocatedCache
from shardwise.models.transformer import attention_blocks, attention_kernels, masks
from shardwise.models.transformer.attention_backends import check_attention_backend
from shardwise.models.transformer.attention_blocks import Part, of_one_width
from shardwise.models.transformer.distance_bias import alibi_slopes, local_alibi_slopes
from shardwise.models.transformer.masks import AttentionMask, AttnMaskType, document_ids_of
from shardwise.models.transformer.visibility import Rule
from shardwise.tensor_parallel.layers import named_param_layouts
from shardwise.training.gradients.finalize import finalize_gradients_


@pytest.mark.ranks(1, 2, 4, slow=(4,))
@pytest.mark.parametrize("backend", ["auto", "local"])
def test_token_by_token_is_the_whole_at_once(group, backend):
    for name in ("two key-value heads across ranks", "qwen3", "alibi on shared keys", "mistral", "bloom", "latent"):
        case = dataclasses.replace(CASES[name], options=CASES[name].options | {"attention_backend": backend})
        if name == "qwen3":
            case = dataclasses.replace(case, mask_type=AttnMaskType.causal_bottom_right)
        config, layer = layer_of(case, group)
        x = torch.randn(S, B, H, dtype=torch.float64)
        groups, head_dim = len(layer.self_attention.local_heads.queries_of_groups), config.heads[2]
        sizes = {"batch_size": B, "capacity": S, "value_dim": config.value_width}
        cache = PreallocatedCache(1, groups, head_dim, **sizes, dtype=torch.float64)
        with torch.no_grad():
            rotary = rotary_of(case, config, torch.arange(S))
            expected = layer(x, attention_mask=mask_of(case, config, group), rotary=rotary)
            outputs = []
            for chunk in torch.arange(S).split([4, 1, 1, 3]):
                rotary, mask = rotary_of(case, config, chunk), mask_of(case, config, group)
                outputs.append(layer(x[chunk], attention_mask=mask, rotary=rotary, cache=cache))
        assert_close_to(torch.cat(outputs), expected, rtol_of_norm=1e-13, name=name)


@pytest.mark.ranks(2, 4, slow=(4,))
def test_dropout_by_the_global_rule_is_that_of_one_rank(group):
    own = alone(group)
    for name in ("two key-value heads across ranks", "qwen3", "bloom", "mistral", "left padding", "packed", "latent"):
        results = []
        for ranks in (group, own):
            config, layer = layer_of(CASES[name], ranks, attention_dropout=0.3, hidden_dropout=0.2)
            seed_streams(5, ranks.rank(), rng="global")
            x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            output = layer(x, attention_mask=mask_of(CASES[name], config, ranks))
            output.square().sum().backward()
            finalize_gradients_(layer, tp_group=ranks, dp_group=own)
            gradients = [
                gather_shards(param.grad, layout, ranks)
                for _, param, layout in named_param_layouts(layer, ranks.size())
            ]
            results.append([output.detach(), *gradients])
        assert not torch.equal(layer(x, attention_mask=mask_of(CASES[name], config, own)), output)
        for actual, expected in zip(*results, strict=True):
            assert_close_to(actual, expected, rtol_of_norm=1e-11, name=name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["auto", "local"])
def test_packed_texts_are_as_apart(group, backend):
    lengths = [3, 1, 4]
    case = Case(6, 2, LLAMA | {"attention_backend": backend}, activation="silu", share=1.0, alibi=True)
    config, layer = layer_of(case, group)
    texts = [torch.randn(n, 1, H, dtype=torch.float64, requires_grad=True) for n in lengths]
    apart = [
        layer(text, attention_mask=mask_of(case, config, group), rotary=rotary_of(case, config, torch.arange(n)))
        for text, n in zip(texts, lengths, strict=True)
    ]
    expected = torch.autograd.grad(sum(output.square().sum() for output in apart), [*texts, *layer.parameters()])

    ids = document_ids_of(torch.tensor([0, 3, 4, 8]), 8)
    case = dataclasses.replace(case, documents=ids)
    rotary = rotary_of(case, config, torch.cat([torch.arange(n) for n in lengths]))
    packed = layer(torch.cat(texts), attention_mask=mask_of(case, config, group), rotary=rotary)
    assert_close_to(packed.detach(), torch.cat(apart).detach(), rtol_of_norm=1e-14)
    gradients = torch.autograd.grad(packed.square().sum(), [*texts, *layer.parameters()])
    for actual, wanted in zip(gradients, expected, strict=True):
        assert_close_to(actual, wanted, rtol_of_norm=1e-13)


@pytest.mark.ranks(1)
def test_layers_share_one_mask(group):
    _, layer = layer_of(CASES["mistral"], group)
    mask, kept = AttentionMask(document_ids=torch.zeros(B, S, dtype=torch.int64)), []
    hidden = torch.randn(S, B, H, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(layer(hidden, attention_mask=mask), attention_mask=mask)
    (made,) = mask._made.values()
    assert made.shape == (B, 1, S, S)
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in kept}
    # The attention weights are not kept, and of the mask's size there is nothing but the mask.
    assert storages.pop(made.untyped_storage()._cdata) == made.nbytes
    assert made.nbytes not in storages.values()


def test_masks_that_do_not_fit():
    with pytest.raises(ShardingError, match=r"the attention mask is of torch\.int64; it must be of bools"):
        AttentionMask(torch.ones(1, 1, 3, 3, dtype=torch.int64))
    query = torch.zeros(2, 1, 3, 4)
    with pytest.raises(ShardingError, match=r"document_ids have shape \[3\]; attention is of 2 sequences, with 3"):
        AttentionMask(document_ids=torch.zeros(3)).blocks(query, 3, Rule(True))
    with pytest.raises(ShardingError, match="with 3 queries on 5 keys"):
        AttentionMask(document_ids=torch.zeros(2, 5)).blocks(query, 5, Rule(True))


def test_no_mask_is_made_where_none_is_needed():
    def parts(num_keys=5, new=5, *, causal, window=None, **options):
        (block,) = AttentionMask().blocks(torch.zeros(2, 1, new, 4), num_keys, Rule(causal, window), **options)
        return block.parts

    everything = Part(slice(0, 5))
    assert parts(causal=True, window=(4, 0)) == (Part(slice(0, 5), is_causal=True),)
    assert parts(causal=False, window=(4, 9)) == (everything,)
    assert parts(new=1, causal=True) == (everything,)
    assert parts(num_keys=8, causal=True, has_parts=True) == (Part(slice(0, 3)), Part(slice(3, 8), is_causal=True))
    assert parts(causal=True, window=(3, 0))[0].made_bias().isfinite().sum() == 14
    assert parts(num_keys=6, causal=True)[0].made_bias().isfinite().sum() == 20


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["window on both sides", "left padding", "bloom", "sinks", "soft cap", "dropout"])
def test_memory_grows_linearly_with_the_sequence(group, monkeypatch, name):
    monkeypatch.setattr(masks, "_ROWS", 64)
    monkeypatch.setattr(attention_kernels, "_SCORES_OF_BLOCK", 1 << 17)
    seed_streams(5, 0, rng="per_rank")
    options = {"soft cap": {"attention_logit_softcap": 2.0}, "dropout": {"attention_dropout": 0.1}}
    case = Case(6, 6, options[name]) if name in options else CASES[name]
    config, layer = layer_of(case, group)
    peaks = []
    for s in (512, 1024):
        forbidden = None if case.forbidden is None else (torch.arange(s) < 3)[None, None, None]
        mask = AttentionMask(forbidden, alibi_slopes=local_alibi_slopes(config, group) if case.alibi else None)
        query, key, value = (torch.randn(s, 1, config.heads[0], 4).requires_grad_() for _ in range(3))
        with Peak(query, key, value) as peak:
            layer.self_attention.attended(query, key, value, mask).sum().backward()
        peaks.append(peak.peak)
    assert peaks[1] < 2.1 * peaks[0]


def test_blocks_have_the_keys_that_they_need():
    """Of documents of 9, 2, 3, 1 and 10 tokens, short ones share a block; a window bounds the keys from below."""
    ids = torch.tensor([0] * 9 + [1] * 2 + [2] * 3 + [3] + [4] * 10)[None]

    def blocks(window):
        made = AttentionMask(document_ids=ids).blocks(
            torch.zeros(1, 1, 25, 4), 25, Rule(True, window), rows=16, has_parts=True
        )
        return [
            (each.queries, *((part.keys, part.is_causal, part.bias is None) for part in each.parts)) for each in made
        ]

    assert blocks(window=None) == [
        (slice(0, 9), (slice(0, 9), True, True)),
        (slice(9, 15), (slice(9, 15), False, False)),
        (slice(15, 25), (slice(15, 25), True, True)),
    ]
    assert blocks(window=(3, 0))[-1] == (slice(15, 25), (slice(15, 25), False, False))
    long = AttentionMask().blocks(torch.zeros(1, 1, 25, 4), 25, Rule(True, (3, 0)), rows=10, has_parts=True)
    assert [(each.queries, each.parts[0].keys) for each in long] == [
        (slice(0, 10), slice(0, 10)),
        (slice(10, 20), slice(7, 20)),
        (slice(20, 25), slice(17, 25)),
    ]


def test_slopes_of_alibi():
    assert alibi_slopes(1).tolist() == [2.0**-8]
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(3).tolist() == [2.0**-4, 2.0**-8, 2.0**-2]


def test_documents_of_cumulative_lengths():
    # An empty document in between; what follows the last is padding.
    assert document_ids_of(torch.tensor([0, 2, 2, 5]), 6).tolist() == [[0, 0, 2, 2, 2, 3]]


@pytest.mark.ranks(1)
def test_backends(group):
    device = torch.device("cpu")

    def config(backend, **options):
        return config_of(Case(6, 2), group, attention_backend=backend, **options)

    torch.manual_seed(3)
    state = torch.get_rng_state()
    for backend in ("auto", "unfused", "local", "flash"):
        check_attention_backend(config(backend), device)
        check_attention_backend(config(backend, window_size=(2, 0)), device, masked=True)
    with pytest.raises(
        ConfigError, match=r"attention_backend 'fused' does not work on cpu in torch.float64 with heads"
    ):
        check_attention_backend(config("fused"), device)
    with pytest.raises(ConfigError, match=r"'flash' does not work on cpu .* attention_dropout 0.1 and no mask"):
        check_attention_backend(config("flash", attention_dropout=0.1), device)
    check_attention_backend(config("fused"), torch.device("meta"))
    # What the trial draws does not change how a model starts.
    assert_bit_equal(torch.get_rng_state(), state)


@pytest.mark.ranks(1)
def test_a_named_backend_is_the_one_that_runs(group):
    """Read off the operators that are called."""
    expected = {
        "flash": "aten::_scaled_dot_product_flash_attention_for_cpu",
        "unfused": "aten::_scaled_dot_product_attention_math",
        "local": "aten::bmm",
    }
    for backend, operator in expected.items():
        _, layer = layer_of(Case(6, 2, {"attention_backend": backend}), group)
        with torch.profiler.profile() as profile:
            layer.self_attention(torch.randn(S, B, H, dtype=torch.float64))
        called = {event.key for event in profile.key_averages()}
        assert operator in called
        assert ("aten::scaled_dot_product_attention" in called) == (backend != "local")


COMPILED = {
    "plain": Case(8, 4, LLAMA, activation="silu", share=1.0),
    "all of rotary and shared keys": Case(
        6, 2, {"qk_layernorm": True, "rotary_interleaved": True, "window_size": (2, 0), "attention_backend": "unfused"},
        share=0.5,
    ),
    "across ranks": Case(3, 1, {"layernorm_zero_centered_gamma": True}, activation="quick_gelu"),
    "sinks": CASES["sinks across ranks"],
    "bloom, packed": dataclasses.replace(CASES["bloom"], documents=DOCUMENTS),
    "latent": CASES["latent"],
    "bert, written out": dataclasses.replace(CASES["bert"], options=POST_NORM | {"attention_backend": "local"}),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning", "ignore:`torch.jit:DeprecationWarning"
)
@pytest.mark.parametrize("name", COMPILED)
def test_a_layer_is_one_graph(group, name):
    backend, case = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward)), COMPILED[name]
    config, layer = layer_of(case, group)
    rotary, made = rotary_of(case, config, torch.arange(S)), mask_of(case, config, group)

    def results(function):
        x = torch.randn(S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        output = function(x)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])]

    def forward(x):
        mask = AttentionMask(made.forbidden, document_ids=made.document_ids, alibi_slopes=made.alibi_slopes)
        return layer(x, attention_mask=mask, rotary=rotary)

    torch._dynamo.reset()
    compiled = torch.compile(forward, fullgraph=True, backend=backend)
    for actual, expected in zip(results(compiled), results(forward), strict=True):
        assert_close_to(actual, expected, rtol_of_norm=1e-12, name=name)


def test_a_mask_of_another_shape_is_refused():
    query = torch.zeros(2, 3, 5, 4)
    for shape in ((5, 5), (2, 1, 1, 5), (1, 3, 5, 5), (1,)):
        AttentionMask(torch.zeros(shape, dtype=torch.bool)).blocks(query, 5, Rule(True))
    for shape in ((2, 5), (2, 6, 5, 5), (2, 1, 5, 4), (1, 1, 1, 5, 5)):
        with pytest.raises(ShardingError, match=r"must broadcast to .* here \[2, 3, 5, 5\]"):
            AttentionMask(torch.zeros(shape, dtype=torch.bool)).blocks(query, 5, Rule(True))


def test_flash_attention_gets_a_width_that_it_takes(monkeypatch):
    query, key, value = torch.randn(1, 2, 3, 20), torch.randn(1, 2, 3, 20), torch.randn(1, 2, 3, 12)
    assert [each.size(-1) for each in of_one_width(query, key, value)] == [20] * 3
    monkeypatch.setattr(attention_blocks, "takes_packed", lambda query: True)
    assert [each.size(-1) for each in of_one_width(query, key, value)] == [20] * 3
    padded = of_one_width(query, key, value, direct=True)
    assert [each.size(-1) for each in padded] == [24] * 3
    for each, plain in zip(padded, (query, key, value), strict=True):
        assert torch.equal(each[..., : plain.size(-1)], plain)
        assert not each[..., plain.size(-1) :].any()
