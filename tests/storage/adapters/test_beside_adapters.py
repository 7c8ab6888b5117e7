"""Adapters on embedding and output layer, trained biases and modules: as in peft, at every number of ranks."""

import json

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal, assert_close_to, gather_shards
from safetensors.torch import load_file
from storage.adapters.test_adapter_files import CLOSE, load, logits_of
from storage.adapters.tiny_models import VOCABULARY, save_expected, save_model, with_adapters

from shardwise.core.topology import Groups, Topology
from shardwise.models.adapters import LoraConfig
from shardwise.storage.adapters import (
    add_lora_,
    load_adapter_,
    lora_disabled,
    merge_lora_,
    remove_lora_,
    save_adapter,
    unmerge_lora_,
)
from shardwise.storage.adapters.adapter_files import _key_of, _key_of_base
from shardwise.storage.adapters.model import trained_of
from shardwise.storage.adapters.targets import adapter_targets
from shardwise.storage.huggingface import load_pretrained, read_config, save_pretrained
from shardwise.training.gradients.finalize import finalize_gradients_

# Each a model and what of it is trained; "gpt2" has one weight for embedding and output layer.
CASES = {
    "outer": ("llama", {"targets": ["embed_tokens", "lm_head", "q_proj"], "rank_pattern": {"lm_head": 3}}),
    "whole": ("llama", {"targets": ["q_proj", "down_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
    "biases": ("qwen2", {"targets": ["q_proj", "v_proj", "o_proj"], "bias": "lora_only", "modules_to_save": ["mlp"]}),
    "tied": ("gpt2", {"targets": ["c_attn"], "bias": "all", "modules_to_save": ["wte"]}),
    "dora": ("gpt2", {"targets": ["wte", "lm_head", "mlp.c_proj"], "use_dora": True, "use_rslora": True}),
    "patterns": (
        "llama",
        {
            "targets": r".*(q_proj|v_proj|o_proj|gate_proj|down_proj)",
            "use_dora": True,
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.gate_proj": 5},
            "alpha_pattern": {"v_proj": 11, "down_proj": 3},
        },
    ),
    "strengths": ("gpt2", {"use_dora": True, "alpha_pattern": {"c_attn": 9}}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """For each case a model, its adapters by peft, logits without and with them, and all gradients."""
    root = tmp_path_factory.mktemp("beside")
    ids = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(7))
    for case, (kind, options) in CASES.items():
        model = save_model(kind, root / case)
        with torch.no_grad():
            before = model(ids).logits
        adapted = with_adapters(model, **options)
        with torch.no_grad():
            for name, param in adapted.named_parameters():
                if param.requires_grad and "lora_" not in name:
                    param.add_(0.1 * torch.randn_like(param))
                elif "lora_embedding_A" in name:
                    param.normal_(std=0.2)
        save_expected(adapted, root / case, ids, before=before)
    return root


def gradients_of(model, architecture, group):
    """Whole gradients by their keys in peft's files."""
    found, adapted = {}, set()
    for site in adapter_targets(model, architecture):
        for name, layout in () if site.adapter is None else site.adapter.param_layouts.items():
            adapted.add(site.path)
            found[_key_of(site.path, name)] = gather_shards(site.adapter.get_parameter(name).grad, layout, group)
    for each in trained_of(model).parameters:
        whole = gather_shards(each.base.param.grad, each.base.layout, group)
        for name, tensor in each.base.composition.to_stored(whole).items():
            if name in each.tensors:
                found[_key_of_base(name, adapted)] = tensor
            else:
                assert not tensor.any(), f"{name} is frozen"
    return found


@pytest.mark.slow
@pytest.mark.ranks(1, 2, 3, 4)
def test_what_is_trained_beside_adapters_is_as_in_peft(group, folders, tmp_path):
    for case in CASES:
        folder = folders / case
        expected = load_file(folder / "expected")
        architecture = read_config(folder).architecture
        model = load(folder, group, sequence_parallel=group.size() > 1)
        load_adapter_(model, folder / "adapter", architecture)
        model.parallel_output = False
        logits = model(expected["ids"]).transpose(0, 1)
        assert_close_to(logits.detach(), expected["after"], rtol_of_norm=CLOSE, name=case)
        logits.log_softmax(-1)[..., 3].mean().backward()
        finalize_gradients_(model, tp_group=group, dp_group=None)
        gradients = gradients_of(model, architecture, group)
        theirs = {name[len("gradient.") :]: each for name, each in expected.items() if name.startswith("gradient.")}
        assert gradients.keys() == theirs.keys()
        for name, gradient in theirs.items():
            assert_close_to(gradients[name], gradient, rtol_of_norm=10 * CLOSE, name=f"{name} at {group.size()}")
        with lora_disabled(model):
            assert_close_to(logits_of(model, expected["ids"]), expected["before"], rtol_of_norm=CLOSE, name=case)
        save_adapter(model, tmp_path / case, architecture)
        dist.barrier(group=group)
        check_files(tmp_path / case, folder / "adapter")
        merge_lora_(model)
        assert_close_to(logits_of(model, expected["ids"]), expected["after"], rtol_of_norm=CLOSE, name=f"{case} merged")
        with lora_disabled(model):
            assert_close_to(
                logits_of(model, expected["ids"]), expected["after"], rtol_of_norm=CLOSE, name=f"{case} stays"
            )
        unmerge_lora_(model)
        assert_close_to(logits_of(model, expected["ids"]), expected["after"], rtol_of_norm=CLOSE, name=case)
        merge_lora_(model)
        remove_lora_(model)
        save_pretrained(model, tmp_path / f"{case}-merged", source=folder, architecture=architecture.model_type)
        again = load(tmp_path / f"{case}-merged", group)
        assert_close_to(logits_of(again, expected["ids"]), expected["after"], rtol_of_norm=CLOSE, name=f"{case} again")


def check_files(ours, theirs):
    """The same tensors but for base weights of embeddings, which peft writes too, and the same configuration."""
    mine, other = (load_file(each / "adapter_model.safetensors") for each in (ours, theirs))
    assert {name for name in other if not name.endswith("base_layer.weight")} == mine.keys()
    for name, tensor in mine.items():
        assert_bit_equal(tensor, other[name], name=name)
    values, original = (json.loads((each / "adapter_config.json").read_text()) for each in (ours, theirs))
    assert set(values.pop("target_modules")) == set(original["target_modules"])
    # Where matrices of both orientations are adapted, peft keeps what it met last, and corrects it when it reads.
    del values["base_model_name_or_path"], values["fan_in_fan_out"]
    assert values == {name: original[name] for name in values}


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_stages_train_beside_adapters_what_they_hold(group, folders, tmp_path):
    """Embedding on the first stage, output layer on the last; gpt2's are tied, and part ways."""
    groups = Groups.of(Topology.create(pp=2))
    for case in ("tied", "dora", "biases"):
        architecture = read_config(folders / case).architecture
        model = load_pretrained(folders / case, groups=groups)
        load_adapter_(model, folders / case / "adapter", architecture)
        assert not model.share_embeddings_and_output_weights
        save_adapter(model, tmp_path / case, architecture)
        dist.barrier(group=group)
        check_files(tmp_path / case, folders / case / "adapter")


@pytest.mark.ranks(2)
def test_patterns_are_written_without_adapters_in_layers(group, folders, tmp_path):
    architecture = read_config(folders / "outer").architecture
    model = load(folders / "outer", group)
    config = LoraConfig(
        r=5, lora_alpha=2.5, target_modules=("embed_tokens", "lm_head"), rank_pattern={"embed_tokens": 3}
    )
    add_lora_(model, config, architecture)
    save_adapter(model, tmp_path / "adapter", architecture)
    dist.barrier(group=group)
    assert load_adapter_(load(folders / "outer", group), tmp_path / "adapter", architecture) == config


@pytest.mark.ranks(2)
def test_taking_away_what_is_not_merged_gives_the_model_back(group, folders):
    expected = load_file(folders / "tied" / "expected")
    architecture = read_config(folders / "tied").architecture
    model = load(folders / "tied", group)
    add_lora_(model, LoraConfig(r=2, bias="all", modules_to_save=("wte", "ln_f")), architecture)
    assert_close_to(logits_of(model, expected["ids"]), expected["before"], rtol_of_norm=CLOSE)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 if param.requires_grad else 0.0)
    assert (logits_of(model, expected["ids"]) - expected["before"]).norm() > 1e-2
    remove_lora_(model)
    assert_close_to(logits_of(model, expected["ids"]), expected["before"], rtol_of_norm=CLOSE)
