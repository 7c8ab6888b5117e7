"""A whole model and its optimizer's state, saved at one tensor x pipeline layout and loaded at another, bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from checkpoint_states import stored_tensors
from harness.parity import assert_bit_equal
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from shardwise.core.topology import Topology
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.models.bert import BertModel
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.process_groups_config import ProcessGroupCollection
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.storage.checkpoint import ParamShard, load, save
from shardwise.training.optimizer.adamw import AdamW
from shardwise.training.optimizer.optimizer import optimizer_state

LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 1), (3, 1)]
VOCABULARY, LENGTH = 101, 9
# By kind: fields of the config, and arguments of a GPT.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (
        {
            "num_query_groups": 2,
            "ffn_hidden_size": 35,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "normalization": "RMSNorm",
            "add_qkv_bias": True,
            "add_bias_linear": False,
        },
        {"position_embedding_type": "learned_absolute"},
    ),
    "alibi": (
        {"hidden_size": 28, "num_attention_heads": 7, "embedding_layernorm": True},
        {"position_embedding_type": "alibi"},
    ),
    "bert": ({"norm_position": "post", "embedding_layernorm": True, "final_layernorm": False}, {}),
}


class Place:
    """This rank's place in a layout: its groups, and those that save and load together."""

    def __init__(self, tp: int, pp: int) -> None:
        self.tp, self.pp = tp, pp
        size = 4 if 4 % (tp * pp) == 0 else tp * pp
        self.everyone = dist.new_group(range(size))
        self.takes_part = dist.get_rank() < size
        if size == 4:
            topology = Topology.create(tp=tp, pp=pp)
            self.groups = ProcessGroupCollection.from_topology(topology)
            self.stage = topology.rank("pp")
        else:
            self.groups, self.stage = ProcessGroupCollection(tp=self.everyone), 0

    def state(self, seed: int, *, tied: bool, kind: str = "llama", chunks: int = 1) -> dict[str, ParamShard]:
        """A model of 5 layers, and all that a run stores of it.

        The same values of one seed in every layout.
        """
        settings, options = KINDS[kind]
        config = TransformerConfig(
            **{"num_layers": 5, "hidden_size": 24, "num_attention_heads": 6} | settings,
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        )
        parts = []
        for chunk in range(chunks):
            torch.manual_seed(seed)
            arguments = {
                "vocab_size": VOCABULARY,
                "max_sequence_length": LENGTH,
                "pre_process": self.stage == 0 and chunk == 0,
                "post_process": self.stage == self.pp - 1 and chunk == chunks - 1,
                "share_embeddings_and_output_weights": tied,
                "pg_collection": self.groups,
                "vp_stage": chunk if chunks > 1 else None,
            }
            if kind == "bert":
                parts.append(BertModel(config, 2, TransformerLayerSpec(), **arguments))
            else:
                parts.append(GPTModel(config, TransformerLayerSpec(), **arguments, **options))
        model = nn.ModuleList(parts)
        weights = {name: shard for part in parts for name, shard in part.sharded_state_dict().items()}
        optimizer = AdamW(model, learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.99), epsilon=1e-8)
        moments = optimizer_state(weights, optimizer)
        for name, shard in (weights | moments).items():
            # Biases and moments would be zero, and the last stage's copy of a tied weight not yet the first's.
            if name in moments or shard.data.dim() == 1 or name == "embedding.word_embeddings.weight":
                generator = torch.Generator().manual_seed(1000 * seed + len(name) + sum(map(ord, name)))
                whole = torch.randn(shard.layout.global_shape, generator=generator)
                shard.data.detach().copy_(shard.layout.take(whole, shard.rank))
        return weights | moments


def assert_states_equal(found: dict[str, ParamShard], expected: dict[str, ParamShard]) -> None:
    assert found.keys() == expected.keys()
    for name, shard in expected.items():
        assert_bit_equal(found[name].data, shard.data, name=name)


def whole_shapes(tied: bool) -> dict[str, torch.Size]:
    """What is stored, as one rank without a group would hold it."""
    h, kv, f = 24, 8, 35
    layer = {
        "input_layernorm.weight": [h],
        "self_attention.linear_qkv.weight": [h + 2 * kv, h],
        "self_attention.linear_qkv.bias": [h + 2 * kv],
        "self_attention.linear_proj.weight": [h, h],
        "pre_mlp_layernorm.weight": [h],
        "mlp.linear_fc1.weight": [2 * f, h],
        "mlp.linear_fc2.weight": [h, f],
    }
    model = {f"decoder.layers.{n}.{name}": shape for n in range(5) for name, shape in layer.items()}
    model |= {
        "embedding.word_embeddings.weight": [VOCABULARY, h],
        "embedding.position_embeddings.weight": [LENGTH, h],
        "decoder.final_layernorm.weight": [h],
    }
    if not tied:
        model["output_layer.weight"] = [VOCABULARY, h]
    moments = {f"{kind}.{name}": shape for kind in ("exp_avg", "exp_avg_sq") for name, shape in model.items()}
    return {name: torch.Size(shape) for name, shape in (model | moments).items()}


def assert_each_byte_is_written_once(folder: Path, tied: bool) -> None:
    expected = whole_shapes(tied)
    if (folder / "meta.json").exists():
        stored: dict[str, int] = {}
        for key, tensor in stored_tensors(folder).items():
            name = key.partition("[")[0]
            stored[name] = stored.get(name, 0) + tensor.numel()
    else:
        metadata = FileSystemReader(folder).read_metadata()
        tensors = metadata.state_dict_metadata
        assert {name: tensor.size for name, tensor in tensors.items()} == expected
        stored = {name: sum(math.prod(chunk.sizes) for chunk in tensor.chunks) for name, tensor in tensors.items()}
        assert len(metadata.storage_data) == sum(len(tensor.chunks) for tensor in tensors.values())
    assert stored == {name: math.prod(shape) for name, shape in expected.items()}


def save_with(storage: str, folder: Path, state: dict[str, ParamShard], group: ProcessGroup) -> Path:
    if storage == "ours":
        return save(folder, 0, state, group=group)
    dcp.save(state, storage_writer=FileSystemWriter(folder), process_group=group)
    return folder


def load_with(storage: str, folder: Path, state: dict[str, ParamShard], group: ProcessGroup) -> None:
    if storage == "ours":
        load(folder, state, group=group)
    else:
        dcp.load(state, storage_reader=FileSystemReader(folder), process_group=group)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("storage", "tied"), [("ours", False), pytest.param("dcp", True, marks=pytest.mark.matrix)])
def test_any_layout_of_a_model_to_any_other(group: ProcessGroup, tmp_path: Path, storage: str, tied: bool) -> None:
    places = {layout: Place(*layout) for layout in LAYOUTS}
    expected = {layout: place.state(1, tied=tied) for layout, place in places.items() if place.takes_part}
    # From all layouts to that with stages, and from that to all.
    targets = {layout: LAYOUTS if layout == (2, 2) else [(2, 2)] for layout in LAYOUTS}
    for saved, place in places.items():
        folder = tmp_path / f"{saved}"
        if place.takes_part:
            path = save_with(storage, folder, expected[saved], place.everyone)
            if place.everyone.rank() == 0:
                assert_each_byte_is_written_once(path, tied)
        dist.barrier(group)
        for loaded in targets[saved]:
            if places[loaded].takes_part:
                state = places[loaded].state(2, tied=tied)
                name = next(iter(state))
                assert not torch.equal(state[name].data, expected[loaded][name].data)
                folder_of_step = folder / "step-00000000" if storage == "ours" else folder
                load_with(storage, folder_of_step, state, places[loaded].everyone)
                assert_states_equal(state, expected[loaded])
    dist.barrier(group)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("kind", "chunks"),
    [
        pytest.param("bert", 1, marks=pytest.mark.matrix),
        pytest.param("alibi", 1, marks=pytest.mark.matrix),
        ("llama", 2),
    ],
)
def test_other_models_through_torchs_checkpoints(group: ProcessGroup, tmp_path: Path, kind: str, chunks: int) -> None:
    """From two stages, with two chunks each or one, to all other layouts, and back."""
    staged = Place(2, 2)
    expected = staged.state(1, tied=True, kind=kind, chunks=chunks)
    save_with("dcp", tmp_path / "staged", expected, staged.everyone)
    dist.barrier(group)
    for layout in [(1, 1), (4, 1), (3, 1), (2, 2)]:
        place = Place(*layout)
        if place.takes_part:
            state = place.state(2, tied=True, kind=kind)
            load_with("dcp", tmp_path / "staged", state, place.everyone)
            assert_states_equal(state, place.state(1, tied=True, kind=kind))
            save_with("dcp", tmp_path / f"{layout}", state, place.everyone)
        dist.barrier(group)
        again = staged.state(2, tied=True, kind=kind, chunks=chunks)
        load_with("dcp", tmp_path / f"{layout}", again, staged.everyone)
        assert_states_equal(again, expected)
        dist.barrier(group)
