"""Adapters of experts and routers in peft's files, both ways, and merged, at several layouts."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal, assert_close_to, gather_shards
from safetensors.torch import load_file, save_file
from storage.adapters.test_adapter_files import CLOSE, logits_of
from storage.adapters.tiny_models import VOCABULARY, make_model, read_adapters, save_expected, save_model, with_adapters

from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.core.topology import Groups, Topology
from shardwise.models.adapters import LoraConfig
from shardwise.storage.adapters import (
    add_lora_,
    load_adapter_,
    lora_disabled,
    lora_layers,
    merge_lora_,
    remove_lora_,
    save_adapter,
)
from shardwise.storage.adapters.adapter_files import _key_of
from shardwise.storage.adapters.targets import adapter_targets, paths_in_files
from shardwise.storage.huggingface import load_pretrained, read_config, save_pretrained
from shardwise.training.gradients.finalize import finalize_gradients_

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
# Each a model and peft's options: names that stand for parameters, one of two parameters, other ranks, and routers.
CASES = {
    "all": ("mixtral", {"targets": "all-linear"}),
    "names": ("glm4_moe", {"targets": ["v_proj", "gate", "gate_proj", "up_proj", "down_proj"], "use_rslora": True}),
    "up": (
        "qwen3_moe",
        {
            "targets": ["q_proj"],
            "target_parameters": BOTH[:1],
            "rank_pattern": {"gate_up_proj": 5},
            "alpha_pattern": {"q_proj": 9, r"layers\.1\..*_up_proj": 2},
        },
    ),
    "down": ("qwen2_moe", {"targets": ["o_proj", "up_proj"], "target_parameters": [BOTH[1], "gate.weight"]}),
    "only": ("qwen2_moe", {"targets": [], "target_parameters": BOTH, "rank_pattern": {"gate_up_proj": 5}}),
    "latent": ("deepseek_v3", {"targets": ["q_b_proj", "o_proj", "gate", "gate_proj", "up_proj", "down_proj"]}),
    "biases": (
        "gpt_oss",
        {"targets": ["v_proj"], "target_parameters": [*BOTH, "router.weight"], "rank_pattern": {"down_proj": 5}},
    ),
    "biases, up": ("gpt_oss", {"targets": "all-linear", "target_parameters": ["gate_up_proj"]}),
    "granite": ("granitemoe", {"targets": ["k_proj"], "target_parameters": [*BOTH, "router.weight"]}),
}
LAYOUTS = {1: ({},), 2: ({"ep": 2}, {"tp": 2}, {"tp": 2, "ep": 2, "etp": 1}), 4: ({"tp": 2, "ep": 2},)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """For each case: a model, its adapters by peft, ids, logits, the gradients of all factors, and merged weights."""
    root = tmp_path_factory.mktemp("experts")
    ids = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(7))
    for case, (kind, options) in CASES.items():
        model = save_model(kind, root / case)
        with torch.no_grad():
            before = model(ids).logits
        save_expected(with_adapters(model, **options), root / case, ids, merges=True, before=before)
    return root


def gradients_of(model, architecture):
    """Whole gradients by their keys in peft's files."""
    targets = [target for target in adapter_targets(model, architecture) if target.adapter is not None]
    parameters = {target.path for target in targets if target.parameter is not None}
    files = paths_in_files({target.path for target in targets}, parameters)
    found = {}
    for target in targets:
        for name, layout in target.adapter.param_layouts.items():
            whole = gather_shards(target.adapter.get_parameter(name).grad, layout, target.adapter.group)
            found[_key_of(files[target.path], name)] = target.adapter.to_file(name, whole)
    return found


@pytest.mark.slow
@pytest.mark.ranks(1, 2, 4)
def test_adapters_by_peft_compute_and_merge_as_in_peft(group, folders, tmp_path):
    for sizes in LAYOUTS[group.size()]:
        groups = Groups.of(Topology.create(**sizes))
        for case in CASES:
            check_case(folders / case, groups, tmp_path / f"{case}{sizes}", case)


def check_case(folder, groups, out, case):
    expected, architecture = load_file(folder / "expected"), read_config(folder).architecture
    model = load_pretrained(folder, groups=groups, sequence_parallel=groups.tp.size() > 1)
    load_adapter_(model, folder / "adapter", architecture)
    assert all(param.requires_grad == ("lora" in name) for name, param in model.named_parameters())
    model.parallel_output = False
    logits = model(expected["ids"]).transpose(0, 1)
    assert_close_to(logits.detach(), expected["after"], rtol_of_norm=CLOSE, name=case)
    # Every data-parallel rank has the same samples.
    (logits.log_softmax(-1)[..., 3].mean() / groups.dp.size()).backward()
    finalize_gradients_(model, tp_group=groups.tp, dp_group=groups.dp, expert_dp_group=groups.expert_dp)
    gradients = gradients_of(model, architecture)
    theirs = {name[len("gradient.") :]: each for name, each in expected.items() if name.startswith("gradient.")}
    assert gradients.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert_close_to(gradients[name], gradient, rtol_of_norm=10 * CLOSE, name=f"{name} of {case}")
    with lora_disabled(model):
        assert_close_to(logits_of(model, expected["ids"]), expected["before"], rtol_of_norm=CLOSE, name=case)
    save_adapter(model, out, architecture)
    dist.barrier()
    check_files(out, folder / "adapter")
    merge_lora_(model)
    assert_close_to(logits_of(model, expected["ids"]), expected["after"], rtol_of_norm=CLOSE, name=f"{case} merged")
    remove_lora_(model)
    assert not list(lora_layers(model))
    save_pretrained(model, out / "merged", source=folder, architecture=architecture.model_type)
    if dist.get_rank() == 0:
        import transformers

        again = transformers.AutoModelForCausalLM.from_pretrained(out / "merged").state_dict()
        for name, tensor in again.items():
            assert_close_to(tensor, expected[f"merged.{name}"], rtol_of_norm=CLOSE, name=f"{name} of {case}")
    dist.barrier()


def check_files(ours, theirs):
    mine, other = (load_file(each / "adapter_model.safetensors") for each in (ours, theirs))
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        assert_bit_equal(tensor, other[name], name=name)
    values, original = (json.loads((each / "adapter_config.json").read_text()) for each in (ours, theirs))
    for name in ("target_modules", "target_parameters"):
        assert set(values.pop(name) or []) == set(original[name] or []), name
    del values["base_model_name_or_path"]
    assert values == {name: original[name] for name in values}


# Names of targets that peft converts, parameters of one layer, and paths instead of a pattern.
WRITTEN = (
    ("all", {}),
    ("biases", {"target_modules": ("q_proj",), "target_parameters": ("gate_up_proj", "down_proj", "router.weight")}),
    ("up", {}),
    (
        "names",
        {"target_modules": ("q_proj", "gate"), "target_parameters": ("gate_up_proj",), "layers_to_transform": (1,)},
    ),
    (
        "only",
        {"target_modules": (), "target_parameters": ("layers.1.mlp.experts.gate_up_proj", "down_proj", "gate.weight")},
    ),
    ("all", {"target_modules": r".*layers\.1\..*(q|v)_proj", "target_parameters": ("gate.weight",)}),
)


@pytest.mark.ranks(2)
def test_adapters_written_here_give_their_logits_in_peft(group, folders, tmp_path):
    groups = Groups.of(Topology.create(tp=2, ep=2, etp=1))
    for number, (case, options) in enumerate(WRITTEN):
        folder, out, architecture = folders / case, tmp_path / str(number), read_config(folders / case).architecture
        expected = load_file(folder / "expected")
        model = load_pretrained(folder, groups=groups)
        torch.manual_seed(4)
        add_lora_(model, LoraConfig(r=3, lora_alpha=5, **options), architecture)
        assert_close_to(logits_of(model, expected["ids"]), expected["before"], rtol_of_norm=CLOSE, name=case)
        with torch.no_grad():
            for layer in lora_layers(model):
                for adapter in layer.lora.values():
                    layout = adapter.param_layouts["lora_B"]
                    adapter.lora_B.copy_(layout.take(0.2 * torch.randn(layout.global_shape), adapter.group.rank()))
        save_adapter(model, out, architecture)
        logits = logits_of(model, expected["ids"])
        dist.barrier(group=group)
        if group.rank() == 0:
            with torch.no_grad():
                theirs = read_adapters(make_model(CASES[case][0]), out)(expected["ids"]).logits
            assert_close_to(logits, theirs, rtol_of_norm=CLOSE, name=f"{case} {options}")
            assert (logits - expected["before"]).norm() > 1e-2 * expected["before"].norm()
        dist.barrier(group=group)


@pytest.mark.ranks(2)
def test_new_adapters_start_like_those_of_peft_at_any_layout(group, folders):
    architecture, started = read_config(folders / "all").architecture, []
    for sizes in ({"ep": 2}, {"tp": 2}):
        model = load_pretrained(folders / "all", groups=Groups.of(Topology.create(**sizes)))
        torch.manual_seed(3)
        add_lora_(model, LoraConfig(r=3), architecture)
        wholes = {}
        for target in adapter_targets(model, architecture):
            adapter = target.adapter
            if target.parameter is not None:
                for name, layout in adapter.param_layouts.items():
                    whole = gather_shards(adapter.get_parameter(name).detach(), layout, adapter.group)
                    wholes[target.path, name] = adapter.to_file(name, whole)
        started.append(wholes)
    assert started[0]
    for (path, name), whole in started[0].items():
        assert_bit_equal(started[1][path, name], whole, name=f"{path} {name}")
        bound = whole.size(1) ** -0.5
        assert 0.9 * bound < whole.abs().max() <= bound if name == "lora_A" else not whole.any()


@pytest.mark.ranks(2)
def test_what_is_wrong_is_said_on_every_rank(group, folders, tmp_path):
    groups = Groups.of(Topology.create(ep=2))
    for case, options, message in (
        ("all", {"target_parameters": ("gate_up",)}, r"no parameter 'gate_up' of experts or routers to adapt; it has experts\.down_proj, experts\.gate_up_proj, gate\.weight"),  # noqa: E501
        ("all", {"target_modules": ("gate_up_proj",)}, "no linear layer 'gate_up_proj' to adapt; it is a parameter, which target_parameters names"),  # noqa: E501
        ("all", {"target_modules": ("q_proj", "w1")}, "target_modules has 'w1' and not 'w3', and both are one parameter of experts"),  # noqa: E501
        ("names", {"target_modules": ("shared_experts.up_proj",)}, r"'shared_experts\.up_proj', which peft takes for the experts and routers of all layers"),  # noqa: E501
        ("names", {"target_modules": r".*shared_experts\.up_proj"}, "no linear layer .* to adapt"),
        ("all", {"lora_dropout": 0.1}, "lora_dropout is 0.1, which adapters of experts and routers do not have in peft"),  # noqa: E501
        ("all", {"use_dora": True}, "use_dora is True, which adapters of experts and routers do not have in peft"),
        ("up", {"rank_pattern": {"gate_proj": 4}}, "rank_pattern has 'gate_proj', which names no layer with an adapter"),  # noqa: E501
        ("all", {"target_modules": ("q_proj",), "modules_to_save": ("experts",)}, r"modules_to_save names .*experts.* which peft's files cannot hold"),  # noqa: E501
        ("biases", {"target_modules": ("q_proj",), "modules_to_save": ("experts",)}, r"modules_to_save names .*experts, which peft's files cannot hold"),  # noqa: E501
        ("biases", {"target_modules": ("q_proj",), "modules_to_save": ("router",)}, r"modules_to_save names .*router, which peft's files cannot hold"),  # noqa: E501
        ("all", {"target_modules": ("q_proj",), "modules_to_save": ("gate",)}, r"modules_to_save names .*block_sparse_moe\.gate, which peft's files cannot hold"),  # noqa: E501
    ):  # fmt: skip
        architecture = read_config(folders / case).architecture
        model = load_pretrained(folders / case, groups=groups)
        with pytest.raises(ConfigError, match=message):
            add_lora_(model, LoraConfig(**options), architecture)
    assert not list(lora_layers(model))
    wide = load_pretrained(folders / "all", groups=Groups.of(Topology.create(tp=2)))
    with pytest.raises(ConfigError, match="the LoRA rank 1 of experts is less than the 2 ranks that split each"):
        add_lora_(wide, LoraConfig(r=1), read_config(folders / "all").architecture)
    assert not list(lora_layers(wide))
    folder = folders / "all"
    tensors, values = load_file(folder / "adapter" / "adapter_model.safetensors"), json.loads((folder / "adapter" / "adapter_config.json").read_text())  # fmt: skip # noqa: E501
    old = "base_model.model.model.layers.0.block_sparse_moe.experts.0.w1.lora_A.weight"
    first = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
    for number, (change, message) in enumerate((
        (lambda config, files: files.update({old: torch.ones(3, 24)}), "an adapter of one expert as peft stored it with transformers 4"),  # noqa: E501
        (lambda config, files: files.pop(first), r"lacks base_model\.model\.model\.layers\.0\.mlp\.experts\.lora_A"),
        (lambda config, files: files.update({first: torch.ones(4, 13)}), r"has shape \[4, 13\], this model needs \[24, 13\]"),  # noqa: E501
        (lambda config, files: config.update(target_parameters="x"), 'target_parameters is "x"; it must be a list of names'),  # noqa: E501
    )):  # fmt: skip
        config, files, out = dict(values), dict(tensors), tmp_path / str(number)
        change(config, files)
        if group.rank() == 0:
            out.mkdir()
            save_file(files, out / "adapter_model.safetensors")
            (out / "adapter_config.json").write_text(json.dumps(config))
        dist.barrier(group=group)
        with pytest.raises(CheckpointError, match=message):
            load_adapter_(model, out, read_config(folder).architecture)
