"""What plans say of adapters and of a frozen base, in 32, 16, 8 or 4 bits, is what is there."""

from __future__ import annotations

import json

import pytest
import torch
from run.plan.planned_models import workload_of
from storage.adapters.test_quantized_base import SIZES
from storage.adapters.tiny_models import save_model

from shardwise.cli.main import main
from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups
from shardwise.models.adapters import LoraConfig
from shardwise.nn.quantization import QuantizedTensor
from shardwise.run.plan.parameters import stage_chunks
from shardwise.run.plan.plan import make_plan, plan_rank
from shardwise.run.plan.workload import Adaptation, Mesh
from shardwise.storage.adapters import add_lora_
from shardwise.storage.adapters.model import trained_of
from shardwise.storage.huggingface import BaseQuantization, load_pretrained, read_config

# Sizes of nobody; of "gpt2" embedding and output layer are one weight, and it has biases.
CASES = {
    "all": ("llama", LoraConfig(r=3)),
    "outer": ("llama", LoraConfig(r=3, target_modules=("embed_tokens", "lm_head", "v_proj"), use_dora=True)),
    "whole": ("llama", LoraConfig(r=2, target_modules=("k_proj",), modules_to_save=("lm_head", "norm", "mlp"))),
    "tied": ("gpt2", LoraConfig(r=2, rank_pattern={"c_attn": 5}, bias="lora_only")),
    "untied": ("gpt2", LoraConfig(r=2, target_modules=("wte", "c_attn"), bias="all", modules_to_save=("ln_f",))),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("planned")
    save_model("llama", root / "llama", **SIZES)
    save_model("gpt2", root / "gpt2")
    return root


def bytes_of(tensor):
    return tensor.num_bytes if isinstance(tensor, QuantizedTensor) else tensor.numel() * tensor.itemsize


@pytest.mark.slow
@pytest.mark.ranks(1, 2, 3)
def test_bytes_are_those_of_the_plan(group, folders):
    t, rank = group.size(), group.rank()
    for kind, config in CASES.values():
        read = read_config(folders / kind)
        for dtype, quantization in ((torch.float32, None), (torch.float32, "int8"), (torch.bfloat16, "nf4")):
            made = None if quantization is None else BaseQuantization(quantization, config.saves)
            model = load_pretrained(folders / kind, groups=Groups(tp=group), dtype=dtype, quantization=made)
            add_lora_(model, config, read.architecture)
            adaptation = Adaptation(config, read.architecture.model_type, quantization)
            workload = workload_of(read.description, dtype, adaptation=adaptation)
            (parts,) = stage_chunks(read.description, 1)
            plan = plan_rank(workload, Mesh(tp=t), 0, parts, rank)
            where = f"{kind} {config} {dtype} {quantization} at {t}"
            weights = sum(map(bytes_of, model.parameters()))
            originals = sum(bytes_of(each.original) for each in trained_of(model).parameters)
            assert plan.weights == weights + originals, where
            trained = [param for param in model.parameters() if param.requires_grad]
            assert plan.gradients == sum(param.numel() * param.itemsize for param in trained), where
            for param in trained:
                param.grad = torch.zeros_like(param)
            optimizer = torch.optim.AdamW(trained)
            optimizer.step()
            state = [tensor for each in optimizer.state.values() for tensor in each.values()]
            assert plan.optimizer == sum(map(bytes_of, state)), where
            assert plan.num_parameters == sum(param.numel() for param in model.parameters())


def test_a_base_in_fewer_bits_is_planned_from_the_command_line(folders, capsys):
    found, plan = {}, ["plan", str(folders / "llama"), "--lora-rank", "4", "--model.sequence-length", "16"]
    for kind in ("none", "int8", "nf4"):
        assert main([*plan, "--base-quantization", kind, "--json", "--tp", "2"]) == 0
        found[kind] = json.loads(capsys.readouterr().out)["stages"][0]["weights"]
    assert found["nf4"] < found["int8"] < found["none"]
    assert main([*plan, "--lora-targets", "qproj"]) == 2
    assert "did you mean q_proj?" in capsys.readouterr().err
    read = read_config(folders / "llama")
    adaptation = Adaptation(LoraConfig(), "llama", "nf4")
    with pytest.raises(ConfigError, match="fsdp cannot split a base in nf4"):
        make_plan(workload_of(read.description, adaptation=adaptation, global_batch_size=2), Mesh(dp=2, fsdp=True))
