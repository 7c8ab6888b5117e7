"""What loading reads and holds: this rank's part of the model, and one tensor more."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal
from harness.peaks import LivePeak, resident_peak
from hf_references import MODELS, Reference, groups_of, layouts
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise.core.sharding import ParamLayout, ParamShard
from shardwise.core.tensor_files import read_box
from shardwise.models.transformer.heads import Heads
from shardwise.storage.huggingface import build_model, config_from_json, load_pretrained, model_config, save_pretrained
from shardwise.storage.huggingface.loading import fill_shard_
from shardwise.storage.huggingface.mapping import Composition, Piece, joint_experts
from shardwise.storage.huggingface.pretrained import PretrainedFolder
from shardwise.storage.huggingface.tensor_folder import TensorFolder


@pytest.fixture(scope="module")
def every_reference(make: Callable[[str], Reference]) -> list[Reference]:
    return [make(name) for name in MODELS]


def own_bytes(model: torch.nn.Module) -> int:
    factors = [buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]
    return sum(each.nbytes for each in [*model.parameters(), *factors])


def bytes_of_buffers(model: torch.nn.Module) -> int:
    """Bytes of the biases of routers, which stay in fp32."""
    return sum(buffer.nbytes for name, buffer in model.named_buffers() if name.endswith("selection_bias"))


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.ranks(1, 2, 4)
def test_each_rank_reads_its_own_bytes_once(
    group: dist.ProcessGroup, every_reference: list[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[TensorFolder] = []

    class Watched(PretrainedFolder):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            opened.append(self.tensors)

    monkeypatch.setattr("shardwise.storage.huggingface.loading.PretrainedFolder", Watched)
    groups = {(tp, pp): groups_of(tp, pp) for tp, pp in layouts(group.size())}
    for reference in every_reference:
        for layout in groups:
            model = load_pretrained(reference.folder, groups=groups[layout])
            assert opened[-1].bytes_read == own_bytes(model) + bytes_of_buffers(model), (reference.name, layout)
            assert {param.dtype for param in model.parameters()} == {torch.float32}
        half = load_pretrained(reference.folder, groups=groups[layouts(group.size())[0]], dtype=torch.bfloat16)
        assert opened[-1].bytes_read == 2 * own_bytes(half) + bytes_of_buffers(half)
        assert {param.dtype for param in half.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("reference", ["llama_tied"], indirect=True)
def test_a_copy_of_a_tied_weight_is_compared_a_few_rows_at_a_time(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load_file(reference.folder / "model.safetensors")
    head = tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    shutil.copy(reference.folder / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    read: list[int] = []

    def watched(*arguments: Any) -> Tensor:
        box = read_box(*arguments)
        read.append(box.nbytes)
        return box

    monkeypatch.setattr("shardwise.storage.huggingface.tensor_folder.read_box", watched)
    monkeypatch.setattr("shardwise.storage.huggingface.tensor_folder._COMPARED_BYTES", 5000)
    assert PretrainedFolder(tmp_path).description.share_embeddings_and_output_weights
    assert max(read) <= 5000
    assert sum(read) == 2 * head.nbytes
    # The last row of all is found too.
    head[-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert not PretrainedFolder(tmp_path).description.share_embeddings_and_output_weights


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_any_layout_is_read(tmp_path: Path, transposed: bool, dim: int) -> None:
    """Several runs of rows or columns on a rank, some of them on both; rows from two tensors in turns."""
    top, bottom = torch.arange(60.0).view(6, 10), -torch.arange(40.0).view(4, 10)
    whole = torch.cat([top[:4], bottom[2:], top[4:], bottom[:2]])
    pieces = (Piece("top", 0, 4), Piece("bottom", 2, 2), Piece("top", 4, 2), Piece("bottom", 0, 2))
    composition = Composition((10, 10), pieces, transposed)
    stored = composition.to_stored(whole)
    for name, tensor in (("top", top), ("bottom", bottom)):
        assert_bit_equal(stored[name], tensor.t() if transposed else tensor, name=name)
    save_file(stored, tmp_path / "model.safetensors")
    folder = TensorFolder(tmp_path)
    layout = ParamLayout.of_intervals((10, 10), dim, [[(5, 9), (0, 3)], [(3, 6), (9, 10)]])
    for rank in range(2):
        expected = layout.take(whole, rank)
        shard = ParamShard("weight", torch.empty_like(expected), layout, rank)
        fill_shard_(shard, composition, folder, {"top": "top", "bottom": "bottom"})
        assert_bit_equal(shard.data, expected)
    assert folder.bytes_read == 4 * 10 * (7 + 4)


@pytest.mark.parametrize("transposed", [False, True])
def test_gate_and_up_in_turns_are_read_at_once(tmp_path: Path, transposed: bool) -> None:
    """Two experts of five inner features, in one tensor; ranks that split each expert read their parts alone."""
    stored = torch.arange(2 * 10 * 3.0).view(2, 10, 3)
    # The rows of the gate, then those of the up projection, of each expert.
    whole = torch.cat([each[first::2] for each in stored for first in (0, 1)])
    source = joint_experts("{layer}.gate_up", sections=2, transposed=transposed)
    composition = source(tuple(whole.shape), Heads(1, 1, 1), {"layer": "7", "experts": "2"})
    taken = composition.to_stored(whole)
    assert taken.keys() == {"7.gate_up"}
    assert_bit_equal(taken["7.gate_up"], stored.transpose(1, 2) if transposed else stored)
    save_file(taken, tmp_path / "model.safetensors")
    folder = TensorFolder(tmp_path)
    layout = ParamLayout.split(whole.shape, 0, 2, stride=4)
    for rank in range(2):
        shard = ParamShard("up", torch.empty(layout.local_shape(rank)), layout, rank)
        fill_shard_(shard, composition, folder, {"7.gate_up": "7.gate_up"})
        assert_bit_equal(shard.data, layout.take(whole, rank))
    assert folder.bytes_read == stored.nbytes


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures as Linux does")
@pytest.mark.ranks(4)
def test_peak_memory_at_four_ranks(group: dist.ProcessGroup, tmp_path: Path) -> None:
    """Two megabytes are allowed for what is no tensor: module objects, file headers."""
    write_large_model(tmp_path / "large")
    largest = 12289 * 512 * 4
    loaded: list[torch.nn.Module] = []
    for tp, pp in layouts(4):
        groups = groups_of(tp, pp)
        # Buffers, imports and connections of a first time are not of loading.
        load_pretrained(tmp_path / "large", groups=groups)
        dist.barrier(group)
        peaks = []
        # Short of memory, the system takes back pages of libraries during a call, which lowers its peak: the higher of
        # two counts.
        for _ in range(2):
            loaded.clear()
            peaks.append(
                resident_peak(lambda groups=groups: loaded.append(load_pretrained(tmp_path / "large", groups=groups)))
            )
        peak, shard = max(peaks), own_bytes(loaded[-1])
        loaded.clear()
        allowed = 1.3 * (shard + largest) + (2 << 20)
        assert shard < peak < allowed, f"tp {tp}, pp {pp}: {peak / 1e6:.1f} MB, shard {shard / 1e6:.1f} MB"
        model = load_pretrained(tmp_path / "large", groups=groups)
        # By tensors: on a busy machine, blocks that were freed stay in the process for a while.
        with LivePeak() as tensors:
            tensors.count(model.parameters())
            own = tensors.live
            save_pretrained(model, tmp_path / f"{tp}x{pp}", max_file_size=10**7)
        needed = tensors.peak - own
        assert largest <= needed < 2 * largest, f"export at tp {tp}, pp {pp}: {needed / 1e6:.1f} MB"


def write_large_model(folder: Path) -> None:
    """A Llama of about 110 MB; every rank calls."""
    config = config_from_json(
        {
            "model_type": "llama",
            "hidden_size": 512,
            "intermediate_size": 1376,
            "num_hidden_layers": 5,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 12289,
            "tie_word_embeddings": False,
        }
    )
    groups = groups_of(4, 1)
    settings = model_config(config.description)
    save_pretrained(build_model(settings, groups=groups), folder, max_file_size=10**8)
