"""What plans say of adapters and of a frozen base, in 32, 16, 8 or 4 bits, is what is there."""

from __future__ import annotations

import json

import pytest
from plan.planned_models import bytes_of, planned, state_of, workload_of
from storage.adapters.test_quantized_base import SIZES
from storage.adapters.tiny_models import save_model

from shardwise.cli.main import main
from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups, Topology
from shardwise.models.adapters import LoraConfig
from shardwise.nn import named_param_layouts
from shardwise.nn.quantization import QuantizedTensor
from shardwise.plan.plan import make_plan
from shardwise.plan.workload import Adaptation, Mesh
from shardwise.storage.adapters import add_lora_
from shardwise.storage.adapters.model import trained_of
from shardwise.storage.huggingface import BaseQuantization, load_pretrained, read_config
from shardwise.training.optimizer.mixed_precision import PRECISIONS
from shardwise.training.trainer import Trainer

# Sizes of nobody; of "gpt2" embedding and output layer are one weight, and it has biases.
CASES = {
    "all": ("llama", "float32", None, LoraConfig(r=3)),
    "int8": ("llama", "float32", "int8", LoraConfig(r=3)),
    "outer": (
        "llama",
        "bfloat16",
        "nf4",
        LoraConfig(r=3, target_modules=("embed_tokens", "lm_head", "v_proj"), use_dora=True),
    ),
    "whole": (
        "llama",
        "bfloat16",
        "nf4",
        LoraConfig(r=2, target_modules=("k_proj",), modules_to_save=("lm_head", "norm", "mlp")),
    ),
    "tied": ("gpt2", "bfloat16", None, LoraConfig(r=2, rank_pattern={"c_attn": 5}, bias="lora_only")),
    "untied": (
        "gpt2",
        "float32",
        "int8",
        LoraConfig(r=2, target_modules=("wte", "c_attn"), bias="all", modules_to_save=("ln_f",)),
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("planned")
    save_model("llama", root / "llama", **SIZES)
    save_model("gpt2", root / "gpt2")
    return root


@pytest.fixture
def plans(folders, case):
    """Settings, and the plans of three ranks."""
    kind, dtype, quantization, config = CASES[case]
    read = read_config(folders / kind)
    adaptation = Adaptation(config, read.architecture.model_type, quantization)
    workload = workload_of(read.description, dtype=dtype, adaptation=adaptation, tp=3)
    return workload.settings, [plan.step for plan in planned(workload, 3, range(3)).values()]


def parts_of(tensors):
    """Tensors without subclasses: of a quantised one its codes and scales."""
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensor):
            names, _ = tensor.__tensor_flatten__()
            yield from (getattr(tensor, name) for name in names)
        else:
            yield tensor


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.ranks(3)
@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_plan(group, folders, plans, case):
    kind, dtype, quantization, config = CASES[case]
    settings, steps = plans
    step, read = steps[group.rank()], read_config(folders / kind)
    made = None if quantization is None else BaseQuantization(quantization, config.saves)
    params_dtype, groups = PRECISIONS[dtype].params_dtype, Groups.of(Topology.create(tp=3))
    model = load_pretrained(folders / kind, groups=groups, dtype=params_dtype, quantization=made)
    add_lora_(model, config, read.architecture)
    assert step.num_parameters == sum(param.numel() for param in model.parameters())
    trainer = Trainer(settings, model, groups)
    for _, param, layout in named_param_layouts(model, 3):
        if param.requires_grad:
            trainer.optimizer.state_of(param, layout)
    state = state_of(trainer)
    assert (step.masters, step.optimizer) == (state["masters"], state["optimizer"])
    trained = [param for param in model.parameters() if param.requires_grad]
    # Without a buffer the backward makes them.
    assert step.gradients == (state["gradients"] or sum(param.nbytes for param in trained))
    assert step.weights == bytes_of(parts_of(model.parameters()))
    originals = [each.original for each in trained_of(model).parameters]
    assert step.others == bytes_of([*originals, *model.buffers()])


@pytest.mark.matrix
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
    workload = workload_of(read.description, adaptation=adaptation, training={"global_batch_size": 6})
    with pytest.raises(ConfigError, match="fsdp cannot split a base in nf4"):
        make_plan(workload, Mesh(dp=2, fsdp=True, micro_batch_size=3))
