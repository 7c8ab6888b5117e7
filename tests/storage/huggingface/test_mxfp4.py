"""Folders of GPT-OSS whose experts are in MXFP4: every rank reads transformers' values, bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal
from hf_references import groups_of, transformers_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.storage.huggingface import load_pretrained, save_pretrained
from shardwise.storage.huggingface.mxfp4 import dequantized
from shardwise.storage.huggingface.pretrained import PretrainedFolder

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in ``packed`` and, dequantised by transformers, in ``plain``."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    root, generator = tmp_path_factory.mktemp("mxfp4"), torch.Generator().manual_seed(6)
    # Blocks that the boundaries between three ranks cut.
    model = transformers_model("gpt_oss", hidden_size=32, intermediate_size=64).bfloat16()
    model.save_pretrained(root / "plain")
    shutil.copytree(root / "plain", root / "packed")
    plain = load_file(root / "plain/model.safetensors")
    packed: dict[str, Tensor] = {}
    for name in list(plain):
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = plain[name]
            continue
        num, width, rows = plain[name].shape
        blocks = torch.randint(256, (num, rows, width // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 126, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(plain, root / "plain/model.safetensors", {"format": "pt"})
    save_file(packed, root / "packed/model.safetensors", {"format": "pt"})
    config = json.loads((root / "packed/config.json").read_text())
    (root / "packed/config.json").write_text(json.dumps(config | {"quantization_config": MXFP4}))
    return root


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_those_of_transformers(dtype: torch.dtype) -> None:
    """All 256 bytes with all 256 exponents; the last one overflows."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).repeat(1, 1, 256, 1)
    scales = torch.arange(256, dtype=torch.uint8).expand(1, 16, 256).contiguous()
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    integers = torch.int32 if dtype is torch.float32 else torch.int16
    actual = dequantized(blocks, scales).to(dtype).contiguous()
    assert torch.equal(actual.view(integers), expected.view(integers))


@pytest.mark.slow
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_layout_reads_the_same(
    group: dist.ProcessGroup, folders: Path, tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[PretrainedFolder] = []

    class Watched(PretrainedFolder):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            opened.append(self)

    monkeypatch.setattr("shardwise.storage.huggingface.loading.PretrainedFolder", Watched)
    for ep in {1, group.size()}:
        groups = groups_of(group.size(), 1, ep)
        packed, plain = (load_pretrained(folders / name, groups=groups, dtype=dtype) for name in ("packed", "plain"))
        expected = plain.state_dict()
        for key, tensor in packed.state_dict().items():
            assert_bit_equal(tensor, expected[key], name=key)
        # The experts, which are most of the model, take 17 bytes for 32 values.
        assert opened[-2].tensors.bytes_read < 0.6 * opened[-1].tensors.bytes_read
        folder = tmp_path / str(ep)
        save_pretrained(packed, folder, source=folders / "packed", dtype=torch.bfloat16)
        config = json.loads((folder / "config.json").read_text())
        assert "quantization_config" not in config
        wanted, written = load_file(folders / "plain/model.safetensors"), load_file(folder / "model.safetensors")
        assert written.keys() == wanted.keys()
        for key, tensor in written.items():
            assert_bit_equal(tensor, wanted[key], name=key)


@pytest.mark.slow
def test_transformers_reads_the_folder_alike(folders: Path, one_rank: Any) -> None:
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folders / "packed", quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    expected = load_file(folders / "plain/model.safetensors")
    for key, tensor in theirs.state_dict().items():
        assert_bit_equal(tensor, expected[key], name=key)


EXPERTS = "model.layers.1.mlp.experts."


def without_scales(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    del tensors[EXPERTS + "down_proj_scales"]


def other_scales(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors[EXPERTS + "down_proj_scales"] = tensors[EXPERTS + "down_proj_scales"][:, 1:].contiguous()


def flat_blocks(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors[EXPERTS + "down_proj_blocks"] = tensors[EXPERTS + "down_proj_blocks"].flatten(2)


def not_said(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    del config["quantization_config"]


def another_method(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["quantization_config"] = {"quant_method": "fp8"}


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (without_scales, CheckpointError, r"needs a tensor '.*down_proj_scales' of dtype U8 and shape \[6, 32, 2\]"),
        (other_scales, CheckpointError, r"needs a tensor '.*down_proj_scales' of dtype U8 and shape \[6, 32, 2\]"),
        (flat_blocks, CheckpointError, r"shape \[6, 32, 32\]; blocks of MXFP4 are of dtype U8 and shape \[experts"),
        (not_said, CheckpointError, "lacks tensor .*gate_up_proj|lacks tensor .*down_proj"),
        (another_method, ConfigError, r"null: weights must not be quantized, or of quant_method mxfp4"),
    ],
)
def test_damaged_folders(
    folders: Path,
    tmp_path: Path,
    one_rank: Any,
    change: Callable[[dict[str, Tensor], dict[str, Any]], None],
    kind: type[Exception],
    message: str,
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(folders / "packed", folder)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(kind, match=message):
        load_pretrained(folder, groups=one_rank)
