"""Folders without a table: fine-tuning equals that of one rank at every tp, and every command takes them."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import re
import shutil
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from harness.faults import Fault, plant
from harness.model_options import TRANSFORMERS
from run.run_processes import run_command, run_commands
from safetensors.torch import load_file, save_file

from shardwise.cli.main import main
from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.core.sharded_state import gather_parameter
from shardwise.core.topology import Groups
from shardwise.data.tokenizer import Tokenizer
from shardwise.models.by_plan import library
from shardwise.plan.workload import planned_workload
from shardwise.run import plan_generation, plan_run
from shardwise.run.metrics import read_metrics
from shardwise.run.settings import (
    FinetuneSettings,
    LoraSettings,
    ParallelSettings,
    PretrainedSettings,
    RecomputeSettings,
)
from shardwise.run.tasks.pretrained_model import PretrainedModel
from shardwise.run.utilisation import model_flops_per_token
from shardwise.storage.huggingface import load_pretrained, save_pretrained
from shardwise.storage.huggingface.pretrained import PretrainedFolder, config_from_json

SIZES = TRANSFORMERS | {
    "vocab_size": 301,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
# Without gates and tied; with an activation that has parameters.
KINDS = {"Arcee": {"tie_word_embeddings": True}, "Apertus": {}}
STEPS = 10
_LOCAL = "parallelism=LinearParallelism.LOCAL, **options)\n        layer.scatters"


def save(kind: str, folder: Path, **sizes: object) -> None:
    # A copy, because some configs write into the values that they are given.
    config = getattr(transformers, f"{kind}Config")(**copy.deepcopy(SIZES | sizes))
    torch.manual_seed(5)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("by_plan")
    text = Path(argparse.__file__).read_text()[:12_000]
    (root / "text.jsonl").write_text("".join(json.dumps({"text": part}) + "\n" for part in text.split("\n\n")))
    for kind, sizes in KINDS.items():
        save(kind, root / kind, **sizes)
        Tokenizer.train([text], 290).save(root / kind)
    return root


def finetune(root: Path, kind: str, out: str, tp: int, *more: object) -> str:
    arguments = [
        *("finetune", root / kind, "--out", root / out, "--data", root / "text.jsonl", "--device", "cpu", "--tp", tp),
        *("--model.sequence-length", 24, "--training.steps", STEPS, "--training.global-batch-size", 4),
        *("--training.micro-batch-size", 2, "--training.dtype", "float64", "--lr", 0.003, *more),
    ]
    return run_command(root, tp, *map(str, arguments))[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_at_tp_2_equals_one_rank_and_goes_on_at_tp_3(root: Path, kind: str) -> None:
    packing = ("--packing",)
    printed = finetune(root, kind, f"{kind}-1", 1, *packing)
    assert f"computed by {kind}ForCausalLM of transformers {transformers.__version__}\n" in printed
    recomputed = ("--recompute.granularity", "full")
    split = finetune(root, kind, f"{kind}-2", 2, "--training.save-every", 5, *packing, *recomputed)
    assert f"computed by {kind}ForCausalLM of transformers {transformers.__version__}, split by its own plan" in split
    shutil.copytree(root / f"{kind}-2", root / f"{kind}-3")
    shutil.rmtree(root / f"{kind}-3" / "checkpoints" / f"step-{STEPS:08d}")
    assert "resumed at step 5" in finetune(root, kind, f"{kind}-3", 3, "--resume", "auto", *packing)
    rows, weights = [
        [read(root / f"{kind}-{number}") for number in (1, 2, 3)]
        for read in (lambda out: read_metrics(out / "metrics.jsonl"), lambda out: load_file(out / "model.safetensors"))
    ]
    for name in ("loss", "grad_norm"):
        expected = torch.tensor([row[name] for row in rows[0]], dtype=torch.float64)
        assert len(expected) == STEPS
        for other in rows[1:]:
            found = torch.tensor([row[name] for row in other], dtype=torch.float64)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    assert all(row["mfu"] > 0 for each in rows for row in each)
    base = load_file(root / kind / "model.safetensors")
    for other in weights[1:]:
        assert other.keys() == base.keys()
        for name, expected in weights[0].items():
            torch.testing.assert_close(other[name], expected, rtol=1e-9, atol=1e-9)
    assert not any(torch.equal(weights[0][name], base[name]) for name in base if "act_fn" not in name)
    # The first loss is that of transformers' own model, and the result opens there.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opened = transformers.AutoModelForCausalLM.from_pretrained(root / f"{kind}-3")
    assert all(torch.equal(opened.state_dict()[name], weights[2][name]) for name in base)


@pytest.mark.slow
def test_a_tied_folder_with_another_head_is_read_and_written_untied(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(root / "Arcee", folder)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    head[len(head) // 2, 3] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert main(["import-hf", str(folder), "--out", str(tmp_path / "imported")]) == 0
    assert "which differ, but its config.json says that they are one (tie_word_embeddings)" in capsys.readouterr().err
    assert main(["export-hf", str(tmp_path / "imported"), "--out", str(tmp_path / "back")]) == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["tie_word_embeddings"] is False
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


@pytest.mark.slow
def test_each_command_takes_the_folder(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, imported = root / "Arcee", tmp_path / "imported"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = Tokenizer.load(folder)
    ids = torch.tensor([[*tokenizer.beginning, *tokenizer.encode("import sys\n")]])
    with torch.no_grad():
        expected = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    wanted = tokenizer.decode(expected[0, ids.size(1) :].tolist())
    greedy = ("--prompt", "import sys\n", "--max-new-tokens", "12", "--temperature", "0", "--device", "cpu")
    assert wanted in run_command(tmp_path, 2, "generate", str(folder), *greedy)[0]
    run_command(tmp_path, 3, "import-hf", str(folder), "--out", str(imported))
    assert wanted in run_command(tmp_path, 2, "generate", str(imported), *greedy)[0]
    assert main(["export-hf", str(imported), "--out", str(tmp_path / "exported")]) == 0
    base, again = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "exported"))
    assert base.keys() == again.keys()
    assert all(torch.equal(base[name], again[name]) for name in base)
    # The loss of a text, next to transformers'.
    (tmp_path / "one.txt").write_text("import sys\n")
    evaluated = run_command(
        *(tmp_path, 2, "eval", str(folder), "--data", str(tmp_path / "one.txt"), "--device", "cpu")
    )[0]
    end = torch.tensor([[tokenizer.eos_id]])
    text = torch.cat([end, ids, end], dim=1)
    with torch.no_grad():
        loss = model(text, labels=text).loss.item()
    capsys.readouterr()
    found = float(next(line for line in evaluated.splitlines() if line.startswith("loss")).split()[1])
    assert abs(found - loss) < 1e-5


FAULTS = {
    "output of a layer never summed": (
        Fault("", "by_plan.parallelize:_linear", "**options)\n        layer.scatters", _LOCAL, ""),
        "never summed",
        ("whole.model.layers.0.self_attn.o_proj", "whole.model.layers.0.self_attn"),
    ),
    "rows of the embedding never summed": (
        Fault("", "by_plan.hooks:Hooks._sum_rows", "return moves.reduce(", "return (lambda rows, group: rows)(", ""),
        "never summed",
        ("whole.model.embed_tokens",),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, *FAULTS])
def test_the_doctor_finds_a_planted_fault_and_none_in_a_sound_run(root: Path, tmp_path: Path, name: str | None) -> None:
    fault, kind, modules = FAULTS[name] if name else (None, "", ())
    command = [
        *("doctor", "finetune", root / "Arcee", "--out", tmp_path / "run", "--data", root / "text.jsonl", "--tp", 2),
        *("--device", "cpu", "--model.sequence-length", 24, "--training.steps", 2, "--json"),
        *("--training.global-batch-size", 4, "--training.dtype", "float64"),
    ]
    changed = None if fault is None else partial(plant, fault)
    ended = run_commands(tmp_path, [list(map(str, command))] * 2, changed=changed)
    assert ended[0][0] == (0 if fault is None else 1), ended
    findings = json.loads(ended[0][1][ended[0][1].index("{") :])["findings"]
    if fault is None:
        assert not findings
    else:
        assert findings[0]["module"] in modules, findings
        assert findings[0]["kind"] == kind, findings


@pytest.mark.slow
def test_preferences_and_plans(root: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": f"import {n}\n", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(24)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    options = ("--device", "cpu", "--model.sequence-length", "24", "--training.global-batch-size", "4")
    for tp in (1, 2):
        command = ("dpo", root / "Arcee", "--out", tmp_path / str(tp), "--data", tmp_path / "pairs.jsonl", "--tp", tp)
        more = ("--training.steps", "3", "--training.dtype", "float64", "--lr", "0.003")
        run_command(tmp_path, tp, *map(str, command), *options, *more)
    one, two = (read_metrics(tmp_path / out / "metrics.jsonl") for out in ("1", "2"))
    assert len(one) == 3
    for row, other in zip(one, two, strict=True):
        assert abs(row["loss"] - other["loss"]) <= 1e-9
    planned = run_command(tmp_path, 1, "plan", "finetune", str(root / "Arcee"), "--data", "x", "--tp", "2", *options)[0]
    elements = sum(tensor.numel() for tensor in load_file(root / "Arcee" / "model.safetensors").values())
    assert f"model  {elements:,} parameters" in planned


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["Ernie4_5_Moe", "MiniMaxM2", "GraniteMoeShared", "BailingHybrid"])
def test_files_with_a_tensor_for_each_expert(group: dist.ProcessGroup, tmp_path: Path, kind: str) -> None:
    experts = {"moe_intermediate_size": 10, "moe_num_experts": 3, "num_local_experts": 3, "num_experts_per_tok": 2}
    if group.rank() == 0:
        save(kind, tmp_path / "base", **experts, moe_k=2)
    dist.barrier(group)
    model = load_pretrained(tmp_path / "base", groups=Groups(tp=group))
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    for name, shard in model.sharded_state_dict().items():
        found = gather_parameter(shard.data, shard.layout, group=group)
        # transformers keeps some weights in fp32.
        assert torch.equal(found.float(), whole.state_dict()[name].float()), name
    save_pretrained(model, tmp_path / "again", source=tmp_path / "base")
    base, again = (load_file(tmp_path / each / "model.safetensors") for each in ("base", "again"))
    assert base.keys() == again.keys()
    assert any(re.search(r"\.experts\.2\.|\.input_linear\.|\.q_conv1d\.", name) for name in base)
    assert all(torch.equal(base[name], again[name]) for name in base)


LINEAR = {"layer_types": ["linear_attention", "full_attention"]}


@pytest.mark.ranks(1, 2, 3, slow=(2, 3))
def test_a_convolution_is_read_and_written_as_those_of_queries_keys_and_values(
    group: dist.ProcessGroup, tmp_path: Path
) -> None:
    base, again = tmp_path / "base", tmp_path / "again"
    name, groups = "model.layers.0.linear_attn.{}conv1d.weight", Groups(tp=group)
    if group.rank() == 0:
        # Values are twice as wide as keys.
        save("OlmoHybrid", base, **LINEAR)
    dist.barrier(group)
    save_pretrained(load_pretrained(base, groups=groups), again, source=base)
    # transformers writes three equal parts, whatever the widths.
    thirds, parts = (
        {each: load_file(folder / "model.safetensors")[name.format(f"{each}_")] for each in "qkv"}
        for folder in (base, again)
    )
    assert {len(each) for each in thirds.values()} == {len(parts["q"]) * 4 // 3}
    assert len(parts["v"]) == 2 * len(parts["q"]) == 2 * len(parts["k"])
    assert torch.equal(torch.cat([*parts.values()]), torch.cat([*thirds.values()]))
    for folder in (base, again):
        model = load_pretrained(folder, groups=groups)
        whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        shards = model.sharded_state_dict()
        assert shards.keys() == whole.state_dict().keys()
        for key, tensor in whole.state_dict().items():
            found = gather_parameter(shards[key].data, shards[key].layout, group=group)
            assert torch.equal(found.float(), tensor.float()), key


# Limits that are infinite, which transformers 4 and 5 write differently; integers in a buffer that files have.
UNUSUAL = {
    "Mamba2": {"num_heads": 6, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "DeepseekV4": {
        "q_lora_rank": 16,
        "num_key_value_heads": 1,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "rope_parameters": None,
    },
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", UNUSUAL)
def test_infinite_fields_and_buffers_of_integers(group: dist.ProcessGroup, tmp_path: Path, kind: str) -> None:
    groups = Groups(tp=group)
    save(kind, tmp_path / "5", **UNUSUAL[kind])
    text = (tmp_path / "5" / "config.json").read_text()
    shutil.copytree(tmp_path / "5", tmp_path / "4")
    (tmp_path / "4" / "config.json").write_text(re.sub(r'\{\s*"__float__": "Infinity"\s*\}', "Infinity", text))
    assert ("Infinity" in text) == (kind == "Mamba2")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "5", dtype=torch.float64).state_dict()
    for version in "54":
        model = load_pretrained(tmp_path / version, groups=groups)
        found = {name: shard.data for name, shard in model.sharded_state_dict().items()}
        assert found.keys() == whole.keys()
        for name, tensor in whole.items():
            assert torch.equal(found[name].float(), tensor.float()), name
        assert {tensor.dtype for tensor in found.values()} <= {torch.float64, torch.int64}
        save_pretrained(model, tmp_path / f"again {version}", source=tmp_path / version)
        base, again = (load_file(tmp_path / each / "model.safetensors") for each in ("5", f"again {version}"))
        assert base.keys() == again.keys()
        assert all(torch.equal(base[name], again[name]) for name in base)
        assert transformers.AutoConfig.from_pretrained(tmp_path / f"again {version}").model_type
    assert any(not tensor.is_floating_point() for tensor in found.values()) == (kind == "DeepseekV4")


@pytest.mark.ranks(1)
def test_a_text_model_that_was_part_of_another(group: dist.ProcessGroup, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    heads = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2) | {"head_dim": 16}
    config = transformers.Qwen3_5TextConfig(
        **SIZES | LINEAR | heads | {"rope_parameters": rope, "tie_word_embeddings": True}
    )
    transformers.Qwen3_5ForCausalLM(config).double().save_pretrained(tmp_path / "short")
    shutil.copytree(tmp_path / "short", tmp_path / "long")
    tensors = load_file(tmp_path / "short" / "model.safetensors")
    longer = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    # A head of its own is not lost.
    longer["lm_head.weight"] = longer["model.language_model.embed_tokens.weight"] + 1
    save_file(longer, tmp_path / "long" / "model.safetensors", {"format": "pt"})
    model = load_pretrained(tmp_path / "long", groups=Groups(tp=group))
    found = {name: shard.data for name, shard in model.sharded_state_dict().items()}
    assert torch.equal(found.pop("lm_head.weight"), longer["lm_head.weight"])
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name].float(), tensors[name].float()) for name in found)


@pytest.mark.ranks(1)
def test_tensors_that_are_made_in_another_way_are_named(group: dist.ProcessGroup, tmp_path: Path) -> None:
    save("HrmText", tmp_path)
    made = (
        r"lacks tensor '\S+gate_proj.weight' .* makes it of model.H_module.layers.0.mlp.gate_up_proj.weight, which is"
    )
    with pytest.raises(CheckpointError, match=made):
        load_pretrained(tmp_path, groups=Groups(tp=group))


def test_a_plan_counts_the_operations_of_the_utilisation(root: Path) -> None:
    sizes = {"model": PretrainedSettings(sequence_length=24), "device": "cpu"}
    plan = plan_run(root / "Arcee", command="finetune", training={"global_batch_size": 4}, **sizes)
    needed = 24 * 4 * model_flops_per_token(PretrainedFolder(root / "Arcee").description, 24)
    # In the backward, PyTorch's attention multiplies queries and keys again: 2 layers of 6 heads of width 4.
    assert plan.worst.flops == needed + 24 * 4 * 2 * (2 * 6 * 4 * 24)


# Tied and not; with a bias of the head.
GROWN = {
    "Arcee": {"tie_word_embeddings": True},
    "Apertus": {},
    "Phi": {},
    "Nemotron": {},
    "Cohere2": {},
    "Jais2": {},
}


@pytest.mark.slow
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("kind", GROWN)
def test_new_tokens_get_rows(group: dist.ProcessGroup, tmp_path: Path, kind: str) -> None:
    if group.rank() == 0:
        save(kind, tmp_path / "base", **GROWN[kind])
    dist.barrier(group)
    model = load_pretrained(tmp_path / "base", groups=Groups(tp=group), vocab_size=311)
    save_pretrained(model, tmp_path / "grown", source=tmp_path / "base")
    base, grown = (load_file(tmp_path / each / "model.safetensors") for each in ("base", "grown"))
    assert base.keys() == grown.keys()
    longer = [name for name in base if base[name].shape != grown[name].shape]
    assert longer == ["lm_head.bias", "lm_head.weight", "model.embed_tokens.weight"][-len(longer) :]
    assert len(longer) == (3 if kind == "Phi" else 1 if GROWN[kind] or kind == "Cohere2" else 2)
    for name, tensor in grown.items():
        assert torch.equal(tensor[:301] if name in longer else tensor, base[name])
        if name in longer:
            mean = base[name].mean(0)
            torch.testing.assert_close(tensor[301:], mean.expand(10, *mean.shape), rtol=1e-12, atol=1e-15)
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / each, dtype=torch.float64)
        for each in ("base", "grown")
    )
    assert after.config.vocab_size == 311
    ids = torch.arange(22).view(2, 11)
    with torch.no_grad():
        torch.testing.assert_close(after(ids).logits[..., :301], before(ids).logits, rtol=1e-12, atol=1e-12)


def test_rows_for_new_tokens_are_planned(root: Path, tmp_path: Path) -> None:
    save("Apertus", tmp_path / "small", vocab_size=280)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(root / "Apertus" / name, tmp_path / "small")
    settings = FinetuneSettings(
        base=str(tmp_path / "small"), data=("x",), out=str(tmp_path / "out"), resize_vocab=True, device="cpu"
    )
    source, planned = PretrainedModel(settings), planned_workload(settings)
    assert source.folder.description.vocab_size == planned.model.vocab_size == source.tokenizer.vocab_size == 290
    assert source.folder.new_ids == range(280, 290)
    with pytest.raises(ConfigError, match=r"290 ids, and its model rows for 280: .* --resize-vocab gives"):
        PretrainedModel(dataclasses.replace(settings, resize_vocab=False))


def test_texts_of_the_folder_are_not_planned(root: Path) -> None:
    with pytest.raises(ConfigError, match="Arcee is computed by transformers, whose caches are not planned"):
        plan_generation(root / "Arcee")


def test_convolutions_are_counted_by_a_plan(root: Path, tmp_path: Path) -> None:
    linear = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 10}
    save("Qwen3Next", tmp_path, layer_types=["linear_attention", "full_attention"], **linear)
    assert plan_run(tmp_path, command="finetune", model={"sequence_length": 8}).worst.total > 0


def test_embeddings_that_would_lack_new_ids_are_named() -> None:
    sizes = SIZES | {"rope_parameters": None, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
    for rows, message in ((301, "embed_tokens_per_layer"), (290, None)):
        config = transformers.Gemma3nTextConfig(**sizes | {"vocab_size_per_layer_input": rows})
        model = library.describe(config.to_dict() | {"architectures": ["Gemma3nForCausalLM"]})
        if message is None:
            assert library.with_vocabulary(model, 311).vocab_size == 311
        else:
            with pytest.raises(ConfigError, match=f"Gemma3nForCausalLM .* cannot get another number of ids.*{message}"):
                library.with_vocabulary(model, 311)


def test_what_needs_a_table_is_refused_by_its_flag(root: Path) -> None:
    cases = {
        "--exact": {"parallel": ParallelSettings(exact=True)},
        "--sequence-parallel": {"parallel": ParallelSettings(tp=2, sequence_parallel=True)},
        "--pp 2": {"parallel": ParallelSettings(pp=2)},
        "--cp 2": {"parallel": ParallelSettings(cp=2)},
        "--fsdp": {"parallel": ParallelSettings(fsdp=True)},
        "adapters": {"lora": LoraSettings(lora_rank=2)},
        r"--recompute selective \(core_attn\)": {"recompute": RecomputeSettings(granularity="selective")},
        "--model.dropout 0.1": {"model": PretrainedSettings(dropout=0.1)},
    }
    for flag, settings in cases.items():
        with pytest.raises(ConfigError, match=f"cannot be used with {flag}"):
            PretrainedModel(FinetuneSettings(base=str(root / "Arcee"), data=("x",), out=str(root / "no"), **settings))


def test_a_folder_goes_the_way_of_the_setting(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'model_type is "arcee"; it must be one of gpt2'):
        PretrainedFolder(root / "Arcee", "shardwise")
    save("Llama", tmp_path / "llama")
    for way in ("auto", "shardwise"):
        assert PretrainedFolder(tmp_path / "llama", way).description.transformers_config is None
    assert PretrainedFolder(tmp_path / "llama", "transformers").description.transformers_config is not None


def test_code_of_a_folder_is_not_run(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = json.loads((root / "Arcee" / "config.json").read_text())
    (tmp_path / "code.py").write_text("raise SystemExit('the code of the folder was run')")
    code = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    # A type that transformers has is computed by its own class, whatever the folder names.
    described = config_from_json(values | {"auto_map": code, "attn_implementation": "someone/kernels"})
    model = library.build(described.description)
    assert type(model) is transformers.ArceeForCausalLM
    assert model.config._attn_implementation == "sdpa"
    assert "auto_map" not in described.architecture.written(described.description, None)
    with pytest.raises(ConfigError, match=r'model_type is "of_a_folder", .* \(auto_map\), which is never run'):
        config_from_json(values | {"model_type": "of_a_folder", "auto_map": code})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config is .* must not be quantized"),
        ({"architectures": ["ArceeForSequenceClassification"]}, "a model that labels texts"),
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures is \[\"LlamaForCausalLM\"\], .* ArceeForCausalLM"),
        ({"num_hidden_layers": "two"}, "transformers does not accept it"),
        ({"model_type": "musicgen", "architectures": ["MusicgenForCausalLM"]}, "not accept it: Multiple valid text"),
        (
            {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]},
            "Qwen3_5ForCausalLM; make a folder of the text model",
        ),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "transformers has no causal model for it"),
    ],
)
def test_bad_fields_are_named(root: Path, changes: dict[str, object], message: str) -> None:
    values = json.loads((root / "Arcee" / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        config_from_json(values | changes)


def test_without_transformers_the_extra_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"no table for this model_type.*pip install 'shardwise\[transformers\]'"):
        PretrainedFolder(root / "Arcee")
