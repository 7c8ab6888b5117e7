"""Before an exact run starts, what it relies on is tried on its device, and what does not hold is named."""

import dataclasses
import functools
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from run.test_exact_runs import LENGTH, VOCAB, alone_of, settings_of
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.core.errors import ConfigError, OutOfMemoryError
from shardwise.core.random import streams
from shardwise.core.topology import Groups, Topology
from shardwise.data import DataLoader, Encoded, SampleRows, TokenSamples
from shardwise.exact import products as exact_products
from shardwise.exact.products import ExactProducts
from shardwise.exact.strategies import ExactActivation
from shardwise.kernels import partial_attention
from shardwise.models.transformer import attention_kernels
from shardwise.models.transformer.heads import GlobalHeads
from shardwise.nn.arithmetic import Activation
from shardwise.run import session
from shardwise.run.build import build_model, config_fields, describe
from shardwise.run.exact import layer_trials, trials
from shardwise.run.exact.environment import deterministic_algorithms
from shardwise.run.exact.trials import check_device
from shardwise.run.out_of_memory import MemoryShortage
from shardwise.storage.huggingface import build_model as build_described, model_config

SIZES = {"micro_batch_size": 1, "sequence_length": LENGTH}


def model_of(kind, settings=None, **description):
    settings = settings or settings_of(kind)
    groups = alone_of(Topology.create(tp=1))
    if not description:
        return build_model(settings, VOCAB, groups=groups, device=torch.device("cpu"))
    described = dataclasses.replace(describe(settings.model, VOCAB), **description)
    config = model_config(described, **config_fields(settings, groups))
    return build_described(config, groups=groups, device=torch.device("cpu"))


def check(model, **options):
    """Check the device with two threads, which it must leave as they were."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check_device(model, **SIZES, **options)
    finally:
        after = torch.get_num_threads()
        torch.set_num_threads(before)
    assert after == 2


def by_threads(function):
    """As of a library that sums in another order on another number of threads."""

    def otherwise(*given, **options):
        result, factor = function(*given, **options), torch.get_num_threads()
        return [x * factor for x in result] if isinstance(result, list) else result * factor

    return otherwise


@pytest.mark.slow
@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_what_differs_is_named(group, kind, monkeypatch):
    model = model_of(kind)
    state, random = streams().snapshot().states, torch.get_rng_state()
    check(model)
    assert streams().snapshot().states.keys() == state.keys()
    assert torch.equal(torch.get_rng_state(), random)
    narrow = "swiglu" if kind == "llama" else "blockwise"
    activate = getattr(trials, narrow)
    norm = "RMSNorm" if kind == "llama" else "LayerNorm"

    # As a library does that takes another way for narrow tensors.
    def by_width(*given, **options):
        return activate(*given, **options) * (1 + given[-1].size(1))

    planted = [
        (trials, narrow, by_width, r"the activation of a piece of \[16, .* on each of 2 ranks, has other bits"),
        (
            trials,
            "sums_of_squares",
            by_threads(trials.sums_of_squares),
            r"the sum of squares of a gradient \[257, 401\], on one thread, has other bits: 26 of 26 elements",
        ),
        (
            layer_trials,
            "norm_by_parts",
            by_threads(layer_trials.norm_by_parts),
            rf"a {norm} of 64 features, \[16, 1, 64\], on one thread, has",
        ),
        (
            trials,
            "look_up",
            lambda ids, weight, **_: F.embedding(ids, weight) * weight.size(0),
            r"an embedding \[264, 64\], on each of 2 ranks, has",
        ),
        (
            trials,
            "combine",
            lambda own, *given, right=trials.combine: right(own * torch.get_num_threads(), *given),
            "the loss of 16 tokens over parts of 264 ids, on one thread, has",
        ),
    ]
    for module, name, wrong, message in planted:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, wrong)
            with pytest.raises(ConfigError, match=rf"exact: on this device .cpu. .*{message}"):
                check(model)


@pytest.mark.ranks(1)
def test_products_that_differ_are_named(group, monkeypatch):
    model = model_of("gpt")
    right = {name: getattr(ExactProducts, name) for name in ("linear", "weight_gradient", "bias_gradient")}

    # As a library does that takes another way for one width only.
    def linear(self, input_, weight, bias):
        return right["linear"](self, input_, weight, bias) * (2 if weight.size(0) == 192 // 4 else 1)

    def of_biases(self, input_, weight, bias):
        return right["linear"](self, input_, weight, bias) * (1 if bias is None else bias.size(0))

    for name, wrong, message in (
        (
            "linear",
            linear,
            r"the product for the output of a linear layer, \[16, 64\] by \[192, 64\], on each of 4 ranks, has other "
            r"bits: 768 of 768 elements; the largest exact-parts that works is 2; use it, another device, other "
            "sizes, or no --exact; if other devices refuse it too, the mistake is Shardwise's own: please report it$",
        ),
        ("linear", of_biases, r"\[16, 64\] by \[136, 64\], on each of 2 ranks, .* by \[192, 64\], on each of 2 ranks"),
        (
            "weight_gradient",
            by_threads(right["weight_gradient"]),
            "the product for the weight gradient of a linear layer, .* on one thread, .*; no exact-parts works; use an",
        ),
        ("bias_gradient", by_threads(right["bias_gradient"]), "the sum for the bias gradient of a linear layer, .* on"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(ExactProducts, name, wrong)
            with pytest.raises(ConfigError, match=message):
                check(model)


@pytest.mark.ranks(1)
def test_a_product_that_depends_on_where_its_factors_begin(group, monkeypatch):
    model = model_of("gpt", settings_of("gpt", dtype="bfloat16"))

    def product(left, right, onednn):
        return (left @ right) * (1 + left.storage_offset() % 7)

    monkeypatch.setattr(exact_products, "_product", product)
    with pytest.raises(ConfigError, match=r"the product for the .* of a linear layer, .* on each of . ranks, has"):
        check(model)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("description", "packed", "kernel", "said"),
    [
        ({"attention_dropout": 0.0}, False, "attend_to_part", "8 heads 8 wide"),
        ({"attention_dropout": 0.0}, True, "attend_to_part", "8 heads 8 wide with documents"),
        (
            {"attention_dropout": 0.0, "window_size": (4, 0), "position_embedding_type": "alibi"},
            False,
            "attend_to_part",
            r"8 heads 8 wide with a window \(4, 0\)",
        ),
        (
            {"attention_dropout": 0.0, "window_size": (4, 0), "windowed_layers": (False, True)}
            | {"window_rotary_base": 100.0, "global_heads": GlobalHeads(8, 12, keys_are_values=True)},
            False,
            "attend_to_part",
            "8 heads 12 wide",
        ),
        ({}, False, "_written_out", "8 heads 8 wide with dropout"),
        ({"attention_dropout": 0.0, "attention_logit_softcap": 5.0}, False, "_written_out", "8 heads 8 wide"),
    ],
)
def test_the_attention_that_runs_is_tried(group, description, packed, kernel, said, monkeypatch):
    model = model_of("llama", **({"hidden_dropout": 0.0} | description))
    check(model, is_packed=packed)
    holder = attention_kernels if kernel == "_written_out" else partial_attention
    right, place = getattr(holder, kernel), 1 if holder is attention_kernels else 0

    # As a kernel that takes another way for few heads.
    def wrong(*given, **options):
        found = right(*given, **options)
        factor = 2 if given[place].size(1) > 2 else 1
        return found * factor if place else (found[0] * factor, found[1])

    monkeypatch.setattr(holder, kernel, wrong)
    with pytest.raises(
        ConfigError, match=rf"attention of {said}, on each of 4 ranks, .*; the largest exact-parts that works is 2;"
    ):
        check(model, is_packed=packed)


@pytest.mark.ranks(1)
def test_rows_that_are_no_whole_vectors_pass(group, monkeypatch):
    """Attention at 40 positions, and a router of 20 experts: PyTorch's softmax has another gradient on two threads."""
    settings = settings_of("llama", model={"num_experts": 20, "num_experts_per_tok": 2})
    model = model_of("llama", settings)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check_device(model, micro_batch_size=4, sequence_length=40)
        monkeypatch.setattr(ExactActivation, "softmax", Activation.softmax)
        if torch.backends.cpu.get_cpu_capability() == "AVX512":
            with pytest.raises(ConfigError, match="softmax of 160 tokens over 20 experts, on one thread, has other"):
                check_device(model, micro_batch_size=4, sequence_length=40)
    finally:
        torch.set_num_threads(before)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("num_groups", [1, 8])
def test_attention_that_is_not_deterministic_is_named(group, num_groups, monkeypatch):
    # With more parts, products of one thread's narrow matrices have other bits than those of two.
    settings = settings_of("llama", parallel={"exact_parts": 4})
    model = model_of("llama", settings, num_query_groups=num_groups, attention_dropout=0.0)
    check(model)
    right, calls = partial_attention.attend_to_part, []

    # As where threads add to the same place as they come.
    def attend(*given, **options):
        calls.append(1)
        output, sums = right(*given, **options)
        return output * (1 + 2**-20 * len(calls)), sums

    monkeypatch.setattr(partial_attention, "attend_to_part", attend)
    message = "attention of 8 heads 8 wide is not deterministic: a second run has other bits; no exact-parts works; use"
    with pytest.raises(ConfigError, match=message):
        check(model)


def test_trials_of_large_layers_are_bounded(monkeypatch):
    """Counted on the meta device, for an output layer of which a tensor-parallel rank of eight has an eighth."""
    largest, multiplications = [], []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, given=(), options=None):
            result = function(*given, **(options or {}))
            largest.extend(x.numel() for x in [result] if isinstance(x, torch.Tensor))
            if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                left, right = given[-2:]
                multiplications.append(left.numel() * right.size(1))
            return result

    rows, parts = 4096, 8
    numbers = functools.partial(torch.empty, dtype=torch.bfloat16, device="meta")
    run = SimpleNamespace(rows=rows, numbers=numbers, tokens=tuple)
    for split in ("output", "input"):
        kind = layer_trials.LinearKind(split, 128_256, 8_192, 1)
        with Counted():
            for _ in *layer_trials.try_split(run, kind, parts), *layer_trials.try_summed(run, kind, parts):
                pass
    # Of what is summed, two parts; of the rest a few hundred columns around each cut.
    assert max(largest) == rows * 2 * 128_256 // parts
    assert max(multiplications) <= rows * 8_192 * 8 * (256 + 64)
    # All trials of both layers together take fewer than one product of one of them.
    assert sum(multiplications) < rows * 128_256 * 8_192


@pytest.mark.parametrize(
    ("width", "most", "cut"), [(100, 200, 100), (4008, 1000, 1000), (300, 10, 300), (5000, 10, 264)]
)
def test_a_width_is_cut_to_one_of_the_same_remainder(width, most, cut):
    assert layer_trials._cut(width, most) == cut
    assert cut == width or cut % 64 == width % 64


@pytest.mark.ranks(1)
def test_few_heads_of_many_are_tried(group, monkeypatch):
    model = model_of("llama", attention_dropout=0.0)
    monkeypatch.setattr(layer_trials, "_MOST_SCORES", 4 * LENGTH**2)
    seen, right = set(), partial_attention.attend_to_part

    def attend(query, *given, **options):
        seen.add(query.size(1))
        return right(query, *given, **options)

    monkeypatch.setattr(partial_attention, "attend_to_part", attend)
    check(model)
    assert seen == {4, 2, 1}


def test_deterministic_algorithms_of_cuda_only(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with deterministic_algorithms(torch.device("cpu")):
        assert not torch.are_deterministic_algorithms_enabled()
    with deterministic_algorithms(torch.device("cuda")):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.ranks(1)
def test_a_session_tells_of_packing_and_explains_what_runs_out_of_memory(group, monkeypatch):
    settings = settings_of("gpt")
    shortage = MemoryShortage(settings, describe(settings.model, VOCAB), ranks=None, available=0)
    # Not a process for each.
    monkeypatch.setattr(MemoryShortage, "_details", lambda self: "")
    encoded = Encoded(np.arange(1, 6), np.full(5, True), np.full(5, 3))
    samples = TokenSamples.of("some", [encoded] * 4, eos_id=0)
    for packing in (True, False):
        loader, told = DataLoader(SampleRows(samples, LENGTH, packing=packing), 2, seed=0), []

        def check_device(*_, told=told, **options):
            told.append(options["is_packed"])
            raise MemoryError

        monkeypatch.setattr(session, "check_device", check_device)
        with pytest.raises(OutOfMemoryError, match="out of memory on a rank"):
            session._try_device(settings, SimpleNamespace(config=None), Groups(tp=group), loader, shortage)
        assert told == [packing]


@pytest.mark.ranks(1)
def test_tokens_of_ranks_that_share_samples(group):
    model = model_of("llama")
    check_device(model, micro_batch_size=2, sequence_length=64, context=4)
    with pytest.raises(ConfigError, match=r"4 context-parallel ranks share 64 tokens .* fewer than 32 rows"):
        check_device(model, micro_batch_size=1, sequence_length=64, context=4)


@pytest.mark.ranks(1)
def test_products_that_depend_on_the_number_of_tokens(group, monkeypatch):
    linear = ExactProducts.linear

    def by_rows(self, input_, *others):
        output = linear(self, input_, *others)
        return output + input_.size(0) if self.split == "output" else output

    monkeypatch.setattr(ExactProducts, "linear", by_rows)
    model = model_of("llama")
    check_device(model, micro_batch_size=2, sequence_length=64)
    with pytest.raises(ConfigError, match=r"the product for the output of a linear layer, .* of 1 in 2 tokens"):
        check_device(model, micro_batch_size=2, sequence_length=64, context=2)
