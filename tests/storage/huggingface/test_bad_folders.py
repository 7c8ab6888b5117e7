"""What is wrong with a folder is one error on every rank, which names the tensor or the field."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_references import Reference, groups_of
from safetensors.torch import load_file, save_file

from shardwise.core.errors import CheckpointError, ConfigError, ShardwiseError
from shardwise.storage.huggingface import load_pretrained
from shardwise.storage.huggingface.pretrained import read_config

DOWN = "model.layers.1.mlp.down_proj.weight"


def raised_everywhere(group: dist.ProcessGroup, call: Callable[[], object]) -> ShardwiseError:
    """The error that ``call`` raises on every rank alike."""
    with pytest.raises(ShardwiseError) as info:
        call()
    texts: list[Any] = [None] * group.size()
    dist.all_gather_object(texts, (type(info.value).__name__, str(info.value)), group=group)
    assert len(set(texts)) == 1, texts
    assert "\n" not in str(info.value)
    return info.value


def copy(source: Path, target: Path, group: dist.ProcessGroup, change: Callable[[Path], object]) -> Path:
    """A copy of a folder, changed by the first rank."""
    if group.rank() == 0:
        shutil.copytree(source, target)
        change(target)
    dist.barrier(group)
    return target


def tensors(**changes: Any) -> Callable[[Path], None]:
    """Give tensors (with ``__`` for a dot) other values, or None to leave them out."""

    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        stored = load_file(path)
        for name, value in changes.items():
            stored[name.replace("__", ".")] = value
        save_file({name: value for name, value in stored.items() if value is not None}, path)

    return change


def config(**changes: Any) -> Callable[[Path], None]:
    """Give fields of ``config.json`` other values."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def split(folder: Path) -> dict[str, Any]:
    """The same tensors in two files with an index, which is returned."""
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index: dict[str, str] = {}
    names = sorted(stored)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: stored[name] for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return index


def without_a_file(folder: Path) -> None:
    (folder / split(folder)[DOWN]).unlink()


def without_the_index(folder: Path) -> None:
    split(folder)
    (folder / "model.safetensors.index.json").unlink()


def with_an_index_that_leads_out(folder: Path) -> None:
    index = split(folder)
    index[DOWN] = "../model.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def with_a_false_index(folder: Path) -> None:
    index = split(folder)
    other = {"1": "model-00002-of-00002.safetensors", "2": "model-00001-of-00002.safetensors"}
    index[DOWN] = other[index[DOWN][10]]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def only_a_header_length(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((10**9).to_bytes(8, "little") + b"{}")


def not_even_json(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"no")


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


BAD: list[tuple[Callable[[Path], object], type[ShardwiseError], str]] = [
    (tensors(model__layers__1__mlp__down_proj__weight=None), CheckpointError, f"lacks tensor '{DOWN}'"),
    (tensors(model__layers__7__mlp__x=torch.zeros(1)), CheckpointError, "holds tensor 'model.layers.7.mlp.x'"),
    (tensors(embed_tokens__weight=torch.zeros(1003, 24)), CheckpointError, "'model.embed_tokens.weight' twice"),
    (
        tensors(model__layers__1__mlp__down_proj__weight=torch.zeros(37, 24)),
        CheckpointError,
        f"tensor '{DOWN}' .* has shape \\[37, 24\\], but config.json asks for \\[24, 37\\]",
    ),
    (
        tensors(model__norm__weight=torch.zeros(24, dtype=torch.int8)),
        CheckpointError,
        "tensor 'model.norm.weight' .* is of dtype I8",
    ),
    (truncated, CheckpointError, "tensor 'model.* is truncated: .*model.safetensors has"),
    (
        only_a_header_length,
        CheckpointError,
        r"model.safetensors is truncated or not a safetensors file: .*; use another copy of it$",
    ),
    (not_even_json, CheckpointError, "model.safetensors is not a safetensors file"),
    (without_a_file, CheckpointError, "-of-00002.safetensors is missing, which holds tensor"),
    (without_the_index, CheckpointError, "but no model.safetensors.index.json that says which tensor is where"),
    (with_an_index_that_leads_out, CheckpointError, f"tensor '{DOWN}' cannot be in a file called '../model"),
    (with_a_false_index, CheckpointError, f"tensor '{DOWN}' is not in .*-of-00002.safetensors, where"),
    (pickled, CheckpointError, "weights only in pytorch_model.bin, a pickle, which can run code"),
    (lambda folder: (folder / "config.json").unlink(), CheckpointError, "has no config.json; give the folder"),
    (
        lambda folder: (folder / "config.json").write_text("{"),
        CheckpointError,
        "config.json cannot be used: it is not JSON",
    ),
    (lambda folder: (folder / "config.json").write_text("[]"), CheckpointError, "must hold a JSON object, not list"),
    (
        config(model_type="mamba"),
        ConfigError,
        "architectures is .*, and model_type .mamba.; it must be MambaForCausalLM",
    ),
    (config(architectures=["LlamaForQuestionAnswering"]), ConfigError, "architectures is .*QuestionAnswering"),
    (config(hidden_act="mish"), ConfigError, 'hidden_act is "mish"; it must be one of gelu'),
    (config(quantization_config={"bits": 4}), ConfigError, 'quantization_config is {"bits": 4}'),
    (
        config(quantization_config={"config_groups": {"group_0": "x" * 99}, "quant_method": "gptq"}),
        ConfigError,
        'quantization_config is {"quant_method": "gptq", .*use a folder whose weights are bf16',
    ),
    (config(dtype="int8"), ConfigError, 'dtype is "int8"'),
    (config(num_key_value_heads=4), ConfigError, "num_key_value_heads is 4; it must be a divisor of .* 6"),
    (config(num_key_value_heads=3), CheckpointError, r"k_proj.*has shape \[16.* asks for \[24"),
    (config(intermediate_size=38), CheckpointError, r"_proj.weight' .* asks for \[38, 24\]"),
    (config(num_hidden_layers=4), CheckpointError, "holds tensor 'model.layers.4.* and 12 more"),
    (config(num_hidden_layers=6), CheckpointError, "lacks tensor 'model.layers.5.* and 12 more"),
    (config(num_hidden_layers="5"), ConfigError, 'num_hidden_layers is "5"; it must be an integer'),
    (config(vocab_size=32 * 10**9), ConfigError, "vocab_size is 32000000000; it must be from 1 to"),
    (config(vocab_size=10**9), CheckpointError, r"embed_tokens.weight' .* asks for \[1000000000, 24\]"),
    (config(num_hidden_layers=60000), CheckpointError, "tensors, and its config.json asks for 60000 layers"),
    (config(num_hidden_layers=0), ConfigError, "num_hidden_layers is 0; it must be from 1"),
    (config(max_position_embeddings=-1), ConfigError, "max_sequence_length is -1; it must be from 1"),
    (config(rope_parameters={"rope_theta": 10**400}), ConfigError, r"rope_theta is 10*\.\.\.; .* finite number"),
    (config(rope_parameters={"rope_theta": 0}), ConfigError, "rotary_base is 0.0; it must be positive"),
    (config(rms_norm_eps=-1e-6), ConfigError, "layernorm_epsilon is -1e-06; it must be positive"),
    (config(rms_norm_eps=float("nan")), CheckpointError, '"rms_norm_eps" is NaN, which is not finite'),
    (config(attention_dropout=1.5), ConfigError, "attention_dropout is 1.5; it must be at least 0 and under 1"),
    (config(rms_norm_eps=None, hidden_size=True), ConfigError, "hidden_size is true; it must be an integer"),
    (
        tensors(model__norm__weight=torch.tensor([1.0] * 23 + [float("nan")])),
        CheckpointError,
        "tensor 'model.norm.weight' of .*model.safetensors has values that are not finite",
    ),
    (
        tensors(lm_head__weight=torch.tensor([0.0] * 1002 + [float("-inf")]).unsqueeze(1).repeat(1, 24)),
        CheckpointError,
        "tensor 'lm_head.weight' of .*model.safetensors has values that are not finite",
    ),
    (config(rope_parameters={"rope_type": "longest"}), ConfigError, 'rope_type is "longest"; it must be one of'),
    (config(rope_parameters={"rope_type": "longrope"}), ConfigError, "short_factor is null; it must be a list of"),
    (config(rope_parameters={"rope_type": "llama3", "factor": 8}), ConfigError, "'llama3' lacks low_freq_factor"),
    (config(rope_parameters={"rope_type": "linear", "factor": 0.5}), ConfigError, "factor of rotary scaling is 0.5"),
    (config(rope_parameters={"partial_rotary_factor": 0.5}), ConfigError, "partial_rotary_factor is 0.5"),
    (config(rope_parameters="no"), ConfigError, 'rope_parameters is "no"; it must be an object'),
    (config(num_attention_heads=1, num_key_value_heads=1), ConfigError, "1 attention heads cannot be split over 2"),
]


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("reference", ["llama"], indirect=True)
def test_bad_folders(group: dist.ProcessGroup, reference: Reference, tmp_path: Path) -> None:
    for tp, pp in ((2, 1), (1, 2)):
        groups = groups_of(tp, pp)
        # Over stages the same code finds them; some will do.
        for number, (change, kind, message) in enumerate(BAD if pp == 1 else BAD[:-1:5]):
            folder = copy(reference.folder, tmp_path / f"{tp}x{pp}-{number}", group, change)
            error = raised_everywhere(group, partial(load_pretrained, folder, groups=groups))
            assert isinstance(error, kind), error
            assert re.search(message, str(error)), (message, str(error))
    folder = copy(reference.folder, tmp_path / "split", group, split)
    assert load_pretrained(folder, groups=groups_of(1, 2)).config.num_layers == 5


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reference", ["llama"], indirect=True)
def test_more_stages_than_layers_and_one_failing_rank(
    group: dist.ProcessGroup, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = groups_of(1, 2)
    folder = copy(reference.folder, tmp_path / "short", group, config(num_hidden_layers=1))
    error = raised_everywhere(group, partial(load_pretrained, folder, groups=groups))
    assert "1 layers cannot be dealt out to 2 pipeline stages" in str(error)
    for groups in (groups_of(2, 1), groups_of(1, 2)):
        with monkeypatch.context() as patch:
            if group.rank() == 1:
                patch.setattr(os, "preadv", _failing)
            error = raised_everywhere(group, partial(load_pretrained, reference.folder, groups=groups))
        assert "cannot read tensor 'model." in str(error)
        assert "No route to host" in str(error)


def _failing(*arguments: object) -> None:
    raise OSError(113, "No route to host")


def test_a_folder_without_a_config_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json; give the folder of a model, as save_pretrained"):
        read_config(tmp_path)
    # As import-hf and import-megatron leave it.
    (tmp_path / "checkpoints").mkdir()
    to_do = re.escape(f"write its model with: shardwise export-hf {tmp_path} --out MODEL_DIR")
    with pytest.raises(CheckpointError, match=to_do):
        read_config(tmp_path)
    (tmp_path / "config.json").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)
