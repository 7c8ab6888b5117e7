"""Adapters of models to which tokens were added, and rows that are trained alone, as in peft at any number of ranks."""

import dataclasses
import json
import warnings

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal, assert_close_to, gather_shards
from safetensors.torch import load_file, save_file
from storage.adapters.test_adapter_files import CLOSE, logits_of
from storage.adapters.tiny_models import VOCABULARY, read_adapters, save_model, with_adapters

from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.core.topology import Groups, Topology
from shardwise.models.adapters import LoraConfig
from shardwise.storage.adapters import (
    adapters_vocab_size,
    add_lora_,
    load_adapter_,
    lora_disabled,
    merge_lora_,
    remove_lora_,
    save_adapter,
    unmerge_lora_,
)
from shardwise.storage.adapters.adapter_files import _key_of_rows
from shardwise.storage.adapters.targets import trained_rows
from shardwise.storage.huggingface import load_pretrained, read_config, save_pretrained
from shardwise.training.gradients.finalize import finalize_gradients_

MORE = VOCABULARY + 5
NEW = list(range(VOCABULARY, MORE))
# Each a model, its number of ids with the added tokens, and options of peft; "gpt2" has one weight for both layers.
CASES = {
    "untied": ("llama", MORE, {"trainable_token_indices": {"embed_tokens": [107, 103, 2], "lm_head": [104, 107]}}),
    "tied": ("gpt2", MORE, {"trainable_token_indices": NEW}),
    "inside": ("gpt2", VOCABULARY, {"trainable_token_indices": {"wte": [1, 50], "lm_head": [1, 50]}}),
    "unnamed": ("llama", MORE, {"targets": ["q_proj"]}),
    "fewer": ("llama", VOCABULARY - 3, {"targets": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
}


def resized(folder, size):
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        model.resize_token_embeddings(size)
    return model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """For each case a model, the adapters by peft of the resized model, their logits and gradients of trained rows."""
    root = tmp_path_factory.mktemp("added")
    for case, (kind, size, options) in CASES.items():
        save_model(kind, root / case)
        adapted = with_adapters(resized(root / case, size), **options)
        ids = torch.arange(2 * 9).view(2, 9) * 5 % size
        ids[0, :3] = torch.tensor([size - 1, 2, size - 1])
        with torch.no_grad():
            for name, param in adapted.named_parameters():
                if "trainable_tokens_delta" in name:
                    param.add_(0.1 * torch.randn_like(param))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted.save_pretrained(root / case / "adapter")
        logits = adapted(ids).logits
        logits.log_softmax(-1)[..., [1, size - 1]].mean().backward()
        gradients = {
            name.removesuffix(".default"): param.grad
            for name, param in adapted.named_parameters()
            if "trainable_tokens_delta" in name
        }
        save_file({"ids": ids, "logits": logits.detach().contiguous(), **gradients}, root / case / "expected")
    return root


def load(folder, groups, **settings):
    architecture = read_config(folder).architecture
    size = adapters_vocab_size(folder / "adapter", architecture, VOCABULARY)
    model = load_pretrained(folder, groups=groups, vocab_size=size, **settings)
    load_adapter_(model, folder / "adapter", architecture)
    return model, architecture


@pytest.mark.slow
@pytest.mark.ranks(1, 2, 3)
def test_added_tokens_are_as_in_peft(group, folders, tmp_path):
    for case, (kind, size, _) in CASES.items():
        folder, expected = folders / case, load_file(folders / case / "expected")
        model, architecture = load(folder, Groups(tp=group), sequence_parallel=group.size() > 1)
        assert model.vocab_size == size
        is_tied = kind == "gpt2"
        assert model.share_embeddings_and_output_weights == is_tied
        model.parallel_output = False
        logits = model(expected["ids"]).transpose(0, 1)
        assert_close_to(logits.detach(), expected["logits"], rtol_of_norm=CLOSE, name=case)
        logits.log_softmax(-1)[..., [1, size - 1]].mean().backward()
        finalize_gradients_(model, tp_group=group, dp_group=None)
        theirs = {name: each for name, each in expected.items() if name.startswith("base_model")}
        for path, (rows,) in trained_rows(model, architecture).items():
            param, (layout,) = rows.trainable_tokens_delta, rows.param_layouts.values()
            gradient = gather_shards(param.grad, layout, group)
            assert_close_to(gradient, theirs.pop(_key_of_rows(path)), rtol_of_norm=10 * CLOSE, name=f"{case} {path}")
        assert not theirs
        trained = [name for name, param in model.named_parameters() if param.requires_grad and "lora" not in name]
        assert trained == (["embedding.word_embeddings.weight", "output_layer.weight"] if case == "fewer" else [])
        with lora_disabled(model):
            assert (logits_of(model, expected["ids"]) - expected["logits"]).norm() > 1e-2
        save_adapter(model, tmp_path / case, architecture, base_model=str(folder), base_vocab_size=VOCABULARY)
        dist.barrier(group=group)
        with torch.no_grad():
            again = read_adapters(resized(folder, size), tmp_path / case)(expected["ids"]).logits
        assert_close_to(again, expected["logits"], rtol_of_norm=CLOSE, name=f"{case} in peft")
        values, original = (
            json.loads((each / "adapter_config.json").read_text()) for each in (tmp_path / case, folder / "adapter")
        )
        assert values["trainable_token_indices"] == original["trainable_token_indices"]
        for change in (merge_lora_, unmerge_lora_, merge_lora_):
            change(model)
            assert_close_to(logits_of(model, expected["ids"]), expected["logits"], rtol_of_norm=CLOSE, name=case)
        remove_lora_(model)
        save_pretrained(model, tmp_path / f"{case}-merged", source=folder, architecture=architecture.model_type)
        merged = load_pretrained(tmp_path / f"{case}-merged", groups=Groups(tp=group))
        assert merged.share_embeddings_and_output_weights == is_tied
        assert_close_to(logits_of(merged, expected["ids"]), expected["logits"], rtol_of_norm=CLOSE, name=case)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_rows_of_a_tied_weight_on_two_stages(group, folders, tmp_path):
    groups = Groups.of(Topology.create(pp=2))
    for case in ("tied", "untied", "unnamed"):
        model, architecture = load(folders / case, groups)
        keys = [key for key in model.sharded_state_dict() if "trainable_tokens_delta" in key]
        if case == "tied":
            assert keys == ["embedding.word_embeddings.lora.tokens.trainable_tokens_delta"]
        save_adapter(model, tmp_path / case, architecture, base_vocab_size=VOCABULARY)
        dist.barrier(group=group)
        both = tmp_path / case, folders / case / "adapter"
        mine, other = (load_file(each / "adapter_model.safetensors") for each in both)
        for key, tensor in mine.items():
            assert_bit_equal(tensor, other[key], name=key)
        assert {key for key in other if "base_layer" not in key} - mine.keys() == (
            {_key_of_rows("lm_head")} if case == "tied" else set()
        )


@pytest.mark.slow
@pytest.mark.ranks(1)
def test_ids_that_are_not_the_models(group, folders):
    one_rank = Groups(tp=group)
    architecture = read_config(folders / "tied").architecture
    for kind, given, message in (
        (
            "llama",
            {"embed_tokens": (5, VOCABULARY)},
            rf"of model.embed_tokens has {VOCABULARY}, and the model has rows",
        ),
        ("llama", {"norm": (5,)}, r"names 'norm', which is no such layer; .* model.embed_tokens, lm_head"),
        ("gpt2", {"lm_head": (5,)}, r"of lm_head is \[5\], and of transformer.wte, the same weight, \[\]"),
        ("gpt2", {"wte": (5,), "lm_head": (6,)}, r"of lm_head is \[6\]"),
        ("llama", {"lm_head": ()}, "has no ids of lm_head"),
        ("llama", (4, 5, 4), "has 4 twice"),
        ("llama", (4, -1), "has -1;"),
    ):
        folder = folders / {"llama": "untied", "gpt2": "tied"}[kind]
        with pytest.raises(ConfigError, match=message):
            add_lora_(
                load_pretrained(folder, groups=one_rank),
                LoraConfig(r=2, trainable_token_indices=given),
                read_config(folder).architecture,
            )
    for changes in ({"target_modules": ("lm_head",)}, {"modules_to_save": ("wte",)}):
        config = LoraConfig(r=2, target_modules=("c_attn",), trainable_token_indices=(1,))
        with pytest.raises(ConfigError, match="is in modules_to_save or gets an adapter, and trainable_token_indices"):
            add_lora_(
                load_pretrained(folders / "tied", groups=one_rank), dataclasses.replace(config, **changes), architecture
            )


@pytest.mark.slow
@pytest.mark.ranks(1)
def test_adapters_of_more_tokens_name_the_way(group, folders):
    folder, one_rank = folders / "unnamed", Groups(tp=group)
    architecture = read_config(folder).architecture
    with pytest.raises(CheckpointError, match=rf"for {MORE} ids, and this model has {VOCABULARY}: .*vocab_size={MORE}"):
        load_adapter_(load_pretrained(folder, groups=one_rank), folder / "adapter", architecture)
