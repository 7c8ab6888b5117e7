"""Adapters in peft's files, both ways, at every number of ranks."""

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal, assert_close_to
from safetensors.torch import load_file, save_file
from storage.adapters.tiny_models import VOCABULARY, make_model, read_adapters, save_model, with_adapters

from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.core.topology import Groups, Topology
from shardwise.models.adapters import LoraConfig
from shardwise.models.generation import inference_view
from shardwise.storage.adapters import (
    add_lora_,
    load_adapter_,
    lora_disabled,
    lora_layers,
    merge_lora_,
    read_adapter_config,
    remove_lora_,
    save_adapter,
)
from shardwise.storage.adapters.targets import adapter_targets
from shardwise.storage.huggingface import load_pretrained, read_config

KINDS = ("llama", "gpt2", "bloom", "gemma4")
TARGETS = {"gemma4": ["q_proj", "k_proj", "v_proj", "o_proj"]}
# Both sides compute in fp32, in other orders.
CLOSE = 2e-6


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """For each kind: a model, its adapters by peft, some ids, and the logits without and with the adapters."""
    root = tmp_path_factory.mktemp("adapters")
    for kind in KINDS:
        model = save_model(kind, root / kind)
        ids = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            before = model(ids).logits
            options = {"targets": TARGETS.get(kind, ["q_proj", "v_proj", "up_proj", "down_proj"]), "use_rslora": True}
            adapted = with_adapters(model, **(options if kind in ("llama", "gemma4") else {}))
            adapted.save_pretrained(root / kind / "adapter")
            after = adapted(ids).logits
        save_file({"ids": ids, "before": before.clone(), "after": after.clone()}, root / kind / "expected")
    return root


def load(folder, group, **settings):
    return load_pretrained(folder, groups=Groups(tp=group), **settings)


@torch.no_grad()
def logits_of(model, ids):
    """``[b, s, v]``, as transformers has them."""
    model.eval()
    model.parallel_output = False
    return model(ids).transpose(0, 1)


@pytest.mark.ranks(1, 2, 4)
def test_an_adapter_by_peft_gives_its_logits(group, folders):
    for kind in KINDS:
        expected = load_file(folders / kind / "expected")
        architecture = read_config(folders / kind).architecture
        model = load(folders / kind, group, sequence_parallel=group.size() > 1)
        assert_close_to(logits_of(model, expected["ids"]), expected["before"], rtol_of_norm=CLOSE, name=kind)
        config = load_adapter_(model, folders / kind / "adapter", architecture)
        assert (config.r, config.lora_alpha, config.use_rslora) == (4, 6, kind in ("llama", "gemma4"))
        assert [param.requires_grad for name, param in model.named_parameters()] == [
            "lora" in name for name, _ in model.named_parameters()
        ]
        assert_close_to(logits_of(model, expected["ids"]), expected["after"], rtol_of_norm=CLOSE, name=kind)
        with lora_disabled(model):
            assert_close_to(logits_of(model, expected["ids"]), expected["before"], rtol_of_norm=CLOSE, name=kind)
        with pytest.raises(ConfigError, match="has adapters already"):
            add_lora_(model, config, architecture)
        merge_lora_(model)
        remove_lora_(model)
        assert not list(lora_layers(model))
        assert_close_to(logits_of(model, expected["ids"]), expected["after"], rtol_of_norm=CLOSE, name=kind)


@pytest.mark.ranks(1, 2, 4)
def test_an_adapter_written_again_is_the_same(group, folders, tmp_path):
    for kind in KINDS:
        architecture = read_config(folders / kind).architecture
        model = load(folders / kind, group)
        load_adapter_(model, folders / kind / "adapter", architecture)
        save_adapter(model, tmp_path / kind, architecture, base_model="the/base")
        dist.barrier(group=group)
        ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / kind, folders / kind / "adapter"))  # fmt: skip # noqa: E501
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert_bit_equal(ours[name], tensor, name=name)
        values, original = (
            json.loads((folder / "adapter_config.json").read_text())
            for folder in (tmp_path / kind, folders / kind / "adapter")
        )
        assert values.pop("base_model_name_or_path") == "the/base"
        assert set(values.pop("target_modules")) == set(original["target_modules"])
        assert values == {name: original[name] for name in values}


@pytest.mark.slow
@pytest.mark.ranks(1)
def test_an_adapter_for_a_pattern_is_written_with_it(group, folders, tmp_path):
    architecture = read_config(folders / "llama").architecture
    pattern = r".*layers\.1\..*(q_proj|down_proj)"
    with_adapters(make_model("llama"), targets=pattern).save_pretrained(tmp_path / "theirs")
    model = load(folders / "llama", group)
    load_adapter_(model, tmp_path / "theirs", architecture)
    save_adapter(model, tmp_path / "ours", architecture)
    values = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert values["target_modules"] == pattern
    ids = load_file(folders / "llama" / "expected")["ids"]
    theirs = read_adapters(make_model("llama"), tmp_path / "ours")
    with torch.no_grad():
        assert_close_to(logits_of(model, ids), theirs(ids).logits, rtol_of_norm=CLOSE)


CHOICES = (
    {"target_modules": ("q_proj", "down_proj"), "layers_to_transform": (1,)},
    {"target_modules": ("q_proj", "layers.0.mlp.down_proj", "lm_head"), "layers_to_transform": (0, 5)},
    {"target_modules": ("model.layers.0.mlp.up_proj", "v_proj"), "layers_to_transform": (1,)},
    {"target_modules": ("q_proj",), "layers_to_transform": (1,), "layers_pattern": ("blocks", "layers")},
    {"target_modules": ("q_proj",), "layers_to_transform": (1,), "layers_pattern": ("blocks",)},
    {"target_modules": ("q_proj", "lm_head"), "layers_to_transform": ()},
    {
        "target_modules": ("q_proj", "down_proj", "up_proj"),
        "exclude_modules": ("layers.0.self_attn.q_proj", "proj", "up_proj"),
    },
    {"target_modules": r".*_proj", "exclude_modules": r".*mlp.*"},
)


def test_which_layers_get_adapters_is_what_peft_chooses():
    import peft
    from peft.tuners.tuners_utils import check_target_module_exists

    names = ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")
    paths = [f"model.layers.{number}.{name}" for number in range(2) for name in names]
    for choice in CHOICES:
        ours = LoraConfig(**choice)
        lists = {name: list(value) if isinstance(value, tuple) else value for name, value in choice.items()}
        theirs = peft.LoraConfig(**lists)
        expected = [path for path in (*paths, "lm_head") if check_target_module_exists(theirs, path)]
        assert [path for path in (*paths, "lm_head") if ours.chooses(path, in_layers=path in paths)] == expected, choice


@pytest.mark.ranks(2)
def test_adapters_of_some_layers_are_those_of_peft(group, folders, tmp_path):
    """With what chooses layers, and with what leaves them out; and a file that contradicts it is refused."""
    architecture = read_config(folders / "llama").architecture
    ids = load_file(folders / "llama" / "expected")["ids"]
    for number in (0, 6):
        choice = dict(CHOICES[number])
        theirs = with_adapters(make_model("llama"), targets=choice.pop("target_modules"), **{name: list(value) for name, value in choice.items()})  # fmt: skip # noqa: E501
        folder = tmp_path / str(number)
        if group.rank() == 0:
            theirs.save_pretrained(folder)
        dist.barrier(group=group)
        model = load(folders / "llama", group)
        load_adapter_(model, folder, architecture)
        with torch.no_grad():
            assert_close_to(logits_of(model, ids), theirs(ids).logits, rtol_of_norm=CLOSE)
        save_adapter(model, tmp_path / "again", architecture)
        dist.barrier(group=group)
        for name in ("layers_to_transform", "layers_pattern", "exclude_modules"):
            one, two = (json.loads((each / "adapter_config.json").read_text())[name] for each in (folder, tmp_path / "again"))  # fmt: skip # noqa: E501
            assert (one and sorted(one)) == (two and sorted(two))
        assert load_file(tmp_path / "again" / "adapter_model.safetensors").keys() == load_file(folder / "adapter_model.safetensors").keys()  # fmt: skip # noqa: E501
        dist.barrier(group=group)
    model = load(folders / "llama", group)
    for options, message in (
        ({"layers_to_transform": (0, 2)}, "layers_to_transform has 2, .* it has layers 0 to 1"),
        ({"layers_to_transform": (0,), "layers_pattern": ("h",)}, r"no such layer; it has none by \('h',\)"),
        ({"exclude_modules": r".*"}, r"no layer to adapt by target_modules \('q_proj',\), exclude_modules '\.\*'"),
    ):
        with pytest.raises(ConfigError, match=message):
            add_lora_(model, LoraConfig(target_modules=("q_proj",), **options), architecture)
    add_lora_(model, LoraConfig(layers_to_transform=(1,), exclude_modules=("o_proj",)), architecture)
    names = ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up", "mlp.down")
    adapted = {site.path for site in adapter_targets(model, architecture) if site.adapter is not None}
    assert adapted == {f"model.layers.1.{name}_proj" for name in names}


@pytest.mark.ranks(2)
def test_adapters_of_one_stage_only(group, folders, tmp_path):
    """The other stage has none to add, and none to save."""
    groups = Groups.of(Topology.create(pp=2))
    architecture = read_config(folders / "llama").architecture
    for stage in (0, 1):
        target = f"layers.{stage}.mlp.down_proj"
        model = load_pretrained(folders / "llama", groups=groups)
        add_lora_(model, LoraConfig(r=3, target_modules=(target,)), architecture)
        assert bool(list(lora_layers(model))) == (group.rank() == stage)
        if group.rank() == stage:
            with pytest.raises(ConfigError, match="layers for inference have no adapters, and this model has; merge"):
                inference_view(model, fused=False)
        save_adapter(model, tmp_path / str(stage), architecture)
        dist.barrier(group=group)
        stored = load_file(tmp_path / str(stage) / "adapter_model.safetensors")
        assert {name.partition(".lora_")[0] for name in stored} == {f"base_model.model.model.{target}"}
        with pytest.raises(ConfigError, match="has adapters already"):
            add_lora_(model, LoraConfig(r=3), architecture)
    model = load_pretrained(folders / "llama", groups=groups)
    with pytest.raises(ConfigError, match=r"no linear layer 'layers\.2\.mlp\.down_proj'"):
        add_lora_(model, LoraConfig(r=3, target_modules=("layers.2.mlp.down_proj",)), architecture)
    with pytest.raises(ConfigError, match="no adapters to save"):
        save_adapter(load_pretrained(folders / "llama", groups=groups), tmp_path / "none", architecture)


@pytest.mark.ranks(2)
def test_stages_choose_the_same_layers_of_a_model_with_experts(group, tmp_path):
    """At two stages as at two tensor-parallel ranks; peft takes a name of an MLP's layer for that of experts."""
    if group.rank() == 0:
        save_model("deepseek_v3", tmp_path / "model")
    dist.barrier(group=group)
    architecture = read_config(tmp_path / "model").architecture
    for sizes in ({"tp": 2}, {"pp": 2}):
        groups = Groups.of(Topology.create(**sizes))
        model = load_pretrained(tmp_path / "model", groups=groups)
        with pytest.raises(ConfigError, match=r"no linear layer 'q_a_proj' to adapt .*q_a_proj is none"):
            add_lora_(model, LoraConfig(r=3, target_modules=("q_a_proj",)), architecture)
        add_lora_(model, LoraConfig(r=3, target_modules=("all-linear",)), architecture)
        folder = tmp_path / "".join(sizes)
        save_adapter(model, folder, architecture)
        dist.barrier(group=group)
        load_adapter_(load_pretrained(tmp_path / "model", groups=groups), folder, architecture)
        stored = load_file(folder / "adapter_model.safetensors").keys()
        assert {name.partition(".lora_")[0].removeprefix("base_model.model.model.layers.") for name in stored} == {
            *(f"{layer}.self_attn.{name}" for layer in (0, 1) for name in ("q_b_proj", "kv_b_proj", "o_proj")),
            *("1.mlp.gate", "1.mlp.experts", "1.mlp.experts.base_layer"),
        }


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_an_adapter_written_at_two_ranks_gives_its_logits_in_peft(group, folders, tmp_path):
    for kind, targets in (("llama", ("q_proj", "k_proj", "o_proj", "gate_proj")), ("gpt2", ("c_attn", "c_proj")), ("bloom", ("all-linear",))):  # fmt: skip # noqa: E501
        expected = load_file(folders / kind / "expected")
        check_that_peft_reads_what_is_written(group, kind, folders / kind, targets, expected, tmp_path / kind)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_adapters_of_other_attention_give_their_logits_in_peft(group, tmp_path):
    """Layers of Llama's names in Mistral and Qwen 3; latents in DeepSeek."""
    kinds = {
        "mistral": ("k_proj", "v_proj", "o_proj", "up_proj"),
        "qwen3": ("all-linear",),
        "deepseek_v3": ("all-linear",),
    }
    for kind, targets in kinds.items():
        if group.rank() == 0:
            model = save_model(kind, tmp_path / kind)
            ids = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
            with torch.no_grad():
                save_file({"ids": ids, "before": model(ids).logits.clone()}, tmp_path / kind / "expected")
        dist.barrier(group=group)
        expected = load_file(tmp_path / kind / "expected")
        check_that_peft_reads_what_is_written(group, kind, tmp_path / kind, targets, expected, tmp_path / kind / "ours")


def check_that_peft_reads_what_is_written(group, kind, folder, targets, expected, out):
    """``targets`` of the model in ``folder`` get adapters here: peft, which reads them from ``out``, computes the same
    logits."""
    architecture = read_config(folder).architecture
    model = load(folder, group, sequence_parallel=True)
    torch.manual_seed(4)
    add_lora_(model, LoraConfig(r=3, lora_alpha=5, target_modules=targets), architecture)
    assert_close_to(logits_of(model, expected["ids"]), expected["before"], rtol_of_norm=CLOSE, name=kind)
    with torch.no_grad():
        for layer in lora_layers(model):
            for adapter in layer.lora.values():
                layout = adapter.param_layouts["lora_B"]
                adapter.lora_B.copy_(layout.take(0.2 * torch.randn(layout.global_shape), group.rank()))
    save_adapter(model, out, architecture)
    logits = logits_of(model, expected["ids"])
    dist.barrier(group=group)
    if group.rank() == 0:
        theirs = read_adapters(make_model(kind), out)
        with torch.no_grad():
            assert_close_to(logits, theirs(expected["ids"]).logits, rtol_of_norm=CLOSE, name=kind)
        assert (logits - expected["before"]).norm() > 1e-2 * expected["before"].norm()
    dist.barrier(group=group)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_what_is_wrong_is_said_on_every_rank(group, folders, tmp_path):
    architecture = read_config(folders / "llama").architecture
    model = load(folders / "llama", group)
    before = dict(model.named_parameters())

    def refused(error, message, change):
        """``change`` spoils a copy of the adapter: its configuration and its tensors."""
        folder = tmp_path / "spoilt"
        dist.barrier(group=group)
        if group.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(folders / "llama" / "adapter", folder)
            config = json.loads((folder / "adapter_config.json").read_text())
            tensors = load_file(folder / "adapter_model.safetensors")
            change(config, tensors)
            (folder / "adapter_config.json").write_text(json.dumps(config))
            save_file(tensors, folder / "adapter_model.safetensors")
        dist.barrier(group=group)
        with pytest.raises(error, match=message):
            load_adapter_(model, folder, architecture)
        assert dict(model.named_parameters()).keys() == before.keys()

    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    refused(CheckpointError, r"of another model: 'base_model.*q_proj.lora_A.weight' has shape \[4, 35\]",
            lambda config, tensors: tensors.update({first: tensors[first][:, 1:].contiguous()}))  # fmt: skip
    refused(CheckpointError, r"lacks 'base_model.*q_proj\.lora_A\.weight'|lacks base_model.*lora_A",
            lambda config, tensors: tensors.pop(first))  # fmt: skip
    refused(CheckpointError, r"has 'base_model.model.model.layers.7.*', for which this model has no place",
            lambda config, tensors: tensors.update({first.replace("0", "7"): tensors[first].clone()}))  # fmt: skip
    refused(CheckpointError, "lacks every tensor", lambda config, tensors: tensors.clear())
    q_proj, more = (
        r"of model\.layers\.0\.self_attn\.q_proj, model\.layers\.1\.self_attn\.q_proj",
        "in adapter_config.json there",
    )
    refused(CheckpointError, rf"adapters {q_proj}; by target_modules \('v_proj', 'up_proj', 'down_proj'\) {more}",
            lambda config, tensors: config.update(target_modules=["v_proj", "up_proj", "down_proj"]))  # fmt: skip
    refused(CheckpointError, r"q_proj and 1 more; by .*layers_to_transform \(1,\) in adapter_config\.json there",
            lambda config, tensors: config.update(layers_to_transform=1))  # fmt: skip
    refused(CheckpointError, rf"adapters {q_proj}; by .*exclude_modules \('q_proj',\) {more}",
            lambda config, tensors: config.update(exclude_modules=["q_proj"]))  # fmt: skip
    refused(CheckpointError, rf"adapters {q_proj}; by .*modules_to_save \('q_proj',\) {more}",
            lambda config, tensors: config.update(modules_to_save=["q_proj"]))  # fmt: skip
    refused(CheckpointError, r"lacks base_model\.model\.model\.layers\.0\.mlp\.gate_proj\.lora_A\.weight",
            lambda config, tensors: config["target_modules"].append("gate_proj"))  # fmt: skip
    refused(CheckpointError, 'layers_to_transform is "1"; it must be a list of layers\' numbers',
            lambda config, tensors: config.update(layers_to_transform="1"))  # fmt: skip
    refused(ConfigError, r"layers_to_transform is \(1,\) and target_modules is '\.\*_proj'",
            lambda config, tensors: config.update(layers_to_transform=[1], target_modules=".*_proj"))  # fmt: skip
    refused(ConfigError, r"layers_pattern is \('layers',\) without layers_to_transform",
            lambda config, tensors: config.update(layers_pattern="layers"))  # fmt: skip
    refused(ConfigError, "the LoRA rank is 0", lambda config, tensors: config.update(r=0))
    refused(CheckpointError, r"lacks 'base_model.*lora_magnitude_vector'|lacks base_model.*lora_magnitude_vector",
            lambda config, tensors: config.update(use_dora=True))  # fmt: skip
    refused(CheckpointError, r"q_proj.lora_A.weight' has shape \[4, 36\], this model needs \[5, 36\]",
            lambda config, tensors: config.update(rank_pattern={"q_proj": 5}))  # fmt: skip
    refused(CheckpointError, r"rank_pattern\.q_proj is \"5\"; it must be an integer",
            lambda config, tensors: config.update(rank_pattern={"q_proj": "5"}))  # fmt: skip
    refused(ConfigError, "lora_bias is True, which is not supported", lambda config, _: config.update(lora_bias=True))
    refused(ConfigError, "the biases to train are 'some'; use one of none, all, lora_only",
            lambda config, tensors: config.update(bias="some"))  # fmt: skip
    refused(CheckpointError, r"lacks base_model\.model\.model\.norm\.weight",
            lambda config, tensors: config.update(modules_to_save=["model.norm"]))  # fmt: skip
    refused(ConfigError, r"modules_to_save has '\.\./\.\./x', which no module's path ends with",
            lambda config, tensors: config.update(modules_to_save=["../../x"]))  # fmt: skip
    refused(CheckpointError, r"model\.norm\.weight', and adapter_config\.json does not say that it is trained",
            lambda config, tensors: tensors.update({"base_model.model.model.norm.weight": torch.ones(36)}))  # fmt: skip
    refused(ConfigError, "peft_type is 'IA3'", lambda config, tensors: config.update(peft_type="IA3"))
    refused(ConfigError, "task_type is SEQ_CLS", lambda config, tensors: config.update(task_type="SEQ_CLS"))
    refused(ConfigError, "task_type is TOKEN_CLS", lambda config, tensors: config.update(task_type="TOKEN_CLS"))
    refused(ConfigError, "init_lora_weights is 'pissa'", lambda config, tensors: config.update(init_lora_weights="pissa"))  # fmt: skip # noqa: E501
    with pytest.raises(CheckpointError, match=r"of another model: it has 'base_model\.model\.transformer"):
        load_adapter_(model, folders / "gpt2" / "adapter", architecture)
    with pytest.raises(CheckpointError, match=r"there is no folder .*nowhere"):
        load_adapter_(model, folders / "nowhere", architecture)
    with pytest.raises(
        ConfigError,
        match=r"no linear layer .qproj. to adapt; did you mean q_proj\?; it has down_proj, embed_tokens, gate_",
    ):
        add_lora_(model, LoraConfig(target_modules=("v_proj", "qproj")), architecture)
    for pattern in (".*", ".*layers.*"):
        with pytest.raises(
            ConfigError, match=r"names model\.layers\.0\.input_layernorm too, which cannot have an adapter"
        ):
            add_lora_(model, LoraConfig(target_modules=pattern), architecture)
    for names, message in (
        (("lm_haed",), "'lm_haed', which no module's path ends with; did you mean lm_head?"),
        (("xyz",), "which no module's path ends with; it has down_proj, embed_tokens,"),
        (("v_proj",), r"'v_proj', and model\.layers\.0\.self_attn\.v_proj gets an adapter too"),
        (("gate_proj",), r"model\.layers\.0\.mlp\.gate_proj, which is one parameter with .*up_proj"),
    ):
        with pytest.raises(ConfigError, match=message):
            add_lora_(model, LoraConfig(target_modules=("v_proj",), modules_to_save=names), architecture)
    with pytest.raises(ConfigError, match=r"a regular expression of whole paths; \('q_proj',\) is a name"):
        add_lora_(model, LoraConfig(target_modules="q_proj"), architecture)
    with pytest.raises(ConfigError, match="rank_pattern has 'qproj', which names no layer with an adapter"):
        add_lora_(model, LoraConfig(rank_pattern={"qproj": 2}), architecture)
    with pytest.raises(ConfigError, match="no adapters to save"):
        save_adapter(model, tmp_path / "none", architecture)
    # Nothing of all this has touched it.
    add_lora_(model, LoraConfig(target_modules=("self_attn.v_proj",)), architecture)
    assert [list(layer.lora) for layer in lora_layers(model)] == [["v_proj"], ["v_proj"]]


def test_files_that_are_no_adapter(tmp_path):
    with pytest.raises(CheckpointError, match=r"no adapter at"):
        read_adapter_config(tmp_path)
    for text in ("", "[]", '{"peft_type": "LORA"}', '{"peft_type": "LORA", "r": "x"}'):
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(CheckpointError, match="is not an adapter's configuration"):
            read_adapter_config(tmp_path)


def test_fields_of_other_types_are_named(tmp_path):
    good = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}

    def read(**changed):
        (tmp_path / "adapter_config.json").write_text(json.dumps(good | changed))
        return read_adapter_config(tmp_path)

    for changed, said in (
        ({"r": None}, "its r is missing"),
        ({"r": 4.0}, r"its r is 4\.0; it must be an integer"),
        ({"lora_alpha": 10**400}, "its lora_alpha is 10.*; it must be a finite number"),
        ({"lora_dropout": True}, "its lora_dropout is true"),
        ({"target_modules": None}, "its target_modules is missing"),
        ({"target_modules": ["q_proj", 1]}, r'its target_modules is \["q_proj", 1\]; it must be a list of names, or'),
        ({"use_dora": 1}, "its use_dora is 1; it must be true or false"),
        ({"rank_pattern": ["a"]}, "its rank_pattern is .*; it must be an object"),
        ({"alpha_pattern": {"a": None}}, r"its alpha_pattern\.a is null"),
        ({"modules_to_save": "head"}, "its modules_to_save is"),
        ({"layers_to_transform": [0, True]}, r"its layers_to_transform is \[0, true\]; it must be a list of layers"),
    ):
        with pytest.raises(CheckpointError, match=f"is not an adapter's configuration: {said}"):
            read(**changed)
    for changed in ({"lora_alpha": 1e308}, {"alpha_pattern": {"q": -65505}}):
        with pytest.raises(ConfigError, match=r"alpha.* is .*; it must be from -65504\.0 to 65504\.0"):
            read(**changed)
    # An empty value means none, and a single layer or list of layers is one of them.
    assert read(rank_pattern=None, modules_to_save="", use_dora=None, unknown=[]) == read()
    config = read(layers_to_transform=3, layers_pattern="h", alpha_pattern={"q": 65504})
    assert (config.layers_to_transform, config.layers_pattern, config.alpha_pattern) == ((3,), ("h",), {"q": 65504.0})


@pytest.mark.ranks(2)
def test_new_adapters_of_a_loaded_model_have_their_initial_values(group, folders):
    """The weights of the model, read from a file, had none."""
    architecture = read_config(folders / "llama").architecture
    started = []
    for _ in range(2):
        model = load(folders / "llama", group)
        torch.manual_seed(3)
        add_lora_(model, LoraConfig(r=3), architecture)
        started.append([adapter for layer in lora_layers(model) for adapter in layer.lora.values()])
    for one, two in zip(*started, strict=True):
        assert_bit_equal(one.lora_A, two.lora_A, name="A")
        assert 0 < one.lora_A.abs().max() <= one.param_layouts["lora_A"].global_shape[1] ** -0.5
        assert not one.lora_B.any()
        # As memory that nobody wrote would not be.
        assert one.lora_A.unique().numel() == one.lora_A.numel()


@pytest.mark.ranks(2)
def test_replicas_hear_that_the_first_cannot_write(group, folders, tmp_path):
    groups = Groups.of(Topology.create())
    model = load_pretrained(folders / "llama", groups=groups)
    architecture = read_config(folders / "llama").architecture
    add_lora_(model, LoraConfig(r=2, lora_alpha=4, target_modules=("q_proj",)), architecture)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match="cannot write"):
        save_adapter(model, tmp_path / "file", architecture)
