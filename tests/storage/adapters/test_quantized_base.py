"""A frozen base in 8 and 4 bits: logits of the library's own, at every number of ranks; training, and its bytes."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
import torch.distributed as dist
from harness.groups import alone
from harness.parity import assert_bit_equal, assert_close_to
from safetensors.torch import load_file, save_file
from storage.adapters.test_adapter_files import CLOSE, load, logits_of
from storage.adapters.test_finetuning import LORA, losses_of, open_run, root, settings_of  # noqa: F401 - root is a fixture
from storage.adapters.tiny_models import VOCABULARY, make_model, save_model, with_adapters

from shardwise.core.errors import ConfigError
from shardwise.core.sharding import ParamLayout
from shardwise.core.topology import Groups, Topology
from shardwise.models.adapters import LoraConfig
from shardwise.nn import quantization
from shardwise.nn.quantization import QuantizedTensor, quantize_shard
from shardwise.run.settings import FinetuneSettings, LoraSettings
from shardwise.storage.adapters import add_lora_, load_adapter_, merge_lora_, save_adapter
from shardwise.storage.huggingface import BaseQuantization, load_pretrained, read_config, save_pretrained

KINDS = ("int8", "nf4")
# Two blocks of nf4, the second of 8 or 6 columns: ranks cut inside of blocks.
SIZES = {"hidden_size": 72, "intermediate_size": 70, "num_attention_heads": 6, "head_dim": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with adapters by peft, and the logits and the adapters' gradients on a base that a library quantised."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    folder = tmp_path_factory.mktemp("quantized")
    model = save_model("llama", folder / "model", **SIZES)
    ids = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(7))
    adapted = with_adapters(model)
    adapted.save_pretrained(folder / "adapter")
    expected = {"ids": ids}
    with torch.no_grad():
        plain = make_model("llama", **SIZES)
        expected["full"] = plain(ids).logits
        quantize_(plain, Int8WeightOnlyConfig())
        expected["int8"] = plain(ids).logits
    save_file(expected, folder / "expected")
    return folder


def quantized(folder, group, kind, keeps=(), **settings):
    quantization = BaseQuantization(kind, lambda path: path.endswith(tuple(keeps)) if keeps else False)
    return load(folder / "model", group, quantization=quantization, **settings)


def weights_of(model):
    return {name: param for name, param in model.named_parameters() if isinstance(param, QuantizedTensor)}


@pytest.mark.slow
@pytest.mark.ranks(1, 2, 3)
def test_logits_are_those_of_the_library_at_every_number_of_ranks(group, folder):
    expected = load_file(folder / "expected")
    architecture = read_config(folder / "model").architecture
    one = Groups(tp=alone(group)).tp
    for kind in KINDS:
        for sequence_parallel in {False, group.size() > 1}:
            model = quantized(folder, group, kind, sequence_parallel=sequence_parallel)
            # Query, key and value, and gate and up, are a weight each; the output layer too, the embedding not.
            assert len(weights_of(model)) == 4 * 2 + 1
            logits = logits_of(model, expected["ids"])
            assert_close_to(logits, logits_of(quantized(folder, one, kind), expected["ids"]), rtol_of_norm=CLOSE)
            if kind == "int8":
                assert_close_to(logits, expected["int8"], rtol_of_norm=CLOSE)
            assert (logits - expected["full"]).norm() > 1e-4 * expected["full"].norm()
        load_adapter_(model, folder / "adapter", architecture)
        # The same product as of a model whose weights are what the codes stand for.
        dense = load(folder / "model", one)
        with torch.no_grad():
            for layer_name, layer in dense.named_modules():
                if f"{layer_name}.weight" in weights_of(model):
                    layout = ParamLayout.replicated(layer.weight.shape, 1)
                    layer.weight.copy_(quantize_shard(kind, layer.weight, layout, one).dequantize())
        load_adapter_(dense, folder / "adapter", architecture)
        assert_close_to(logits_of(model, expected["ids"]), logits_of(dense, expected["ids"]), rtol_of_norm=CLOSE)


@pytest.mark.slow
@pytest.mark.ranks(1, 2)
def test_a_run_on_a_quantised_base_trains_adapters(group, root, tmp_path, monkeypatch):  # noqa: F811 - a fixture
    """Losses do not depend on the ranks, whichever they are; the file is an adapter of the base as it is."""
    for kind in KINDS:
        lora = dataclasses.replace(LORA, base_quantization=kind, lora_modules_to_save=("lm_head",))
        found = []
        for tp in {1, group.size()}:
            settings = settings_of(root, "llama", tmp_path / f"{kind}{tp}", tp=tp, lora=lora)
            session, task = open_run(settings, root, monkeypatch)
            model = session.trainer.model
            assert len(weights_of(model)) == 4 * 2
            before = {name: param.codes.clone() for name, param in weights_of(model).items()}
            found.append(losses_of(session))
            assert found[-1][-1] < found[-1][0] - 0.02
            for name, param in weights_of(model).items():
                assert_bit_equal(param.codes, before[name], name=name)
            with pytest.raises(ConfigError, match="cannot be merged into a base in"):
                merge_lora_(model)
            with pytest.raises(ConfigError, match="is not written; save its adapters"):
                save_pretrained(model, tmp_path / "none")
            task.write(session)
            dist.barrier(group=group)
            assert (tmp_path / f"{kind}{tp}" / "adapter_config.json").exists()
            session.topology.destroy()
        assert found[0] == pytest.approx(found[-1], rel=1e-5)


@pytest.mark.ranks(2)
def test_the_copy_of_a_tied_weight_on_the_last_stage_is_not_quantised(group, tmp_path):
    if group.rank() == 0:
        save_model("gpt2", tmp_path / "model")
    dist.barrier(group=group)
    model = load_pretrained(
        tmp_path / "model", groups=Groups.of(Topology.create(pp=2)), quantization=BaseQuantization("int8")
    )
    assert len(weights_of(model)) == 4
    assert all(name.startswith("decoder.layers.") for name in weights_of(model))


@pytest.mark.ranks(2)
def test_what_a_quantised_base_cannot_do_is_said_on_every_rank(group, folder, monkeypatch, tmp_path):
    architecture = read_config(folder / "model").architecture
    model = quantized(folder, group, "nf4")
    with pytest.raises(ConfigError, match=r"lm_head\.weight is in nf4, which cannot be trained"):
        add_lora_(model, LoraConfig(r=2, modules_to_save=("lm_head",)), architecture)
    model = quantized(folder, group, "nf4", keeps=("lm_head",))
    add_lora_(model, LoraConfig(r=2, modules_to_save=("lm_head",)), architecture)
    save_adapter(model, tmp_path / "ours", architecture)
    quantization._torchao.cache_clear()
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ConfigError, match=r"a base in int8 needs torchao, which cannot be imported .*pip install"):
        quantized(folder, group, "int8")


def test_settings_that_a_quantised_base_excludes():
    for options, message in (
        ({"base_quantization": "nf4"}, "--base-quantization nf4 without --lora-rank: a quantised base is frozen"),
        ({"base_quantization": "int8", "lora_rank": 2, "lora_merge": True}, "int8 cannot be used with --lora-merge"),
    ):
        with pytest.raises(ConfigError, match=message):
            LoraSettings(**options)
    lora = LoraSettings(lora_rank=2, base_quantization="nf4")
    usual = FinetuneSettings(base="x", data=("y",)).parallel
    for flag in ("fsdp", "exact"):
        with pytest.raises(ConfigError, match=f"--base-quantization nf4 cannot be used with --{flag}"):
            FinetuneSettings(base="x", data=("y",), lora=lora, parallel=dataclasses.replace(usual, **{flag: True}))
