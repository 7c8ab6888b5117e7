"""Write a model as a ``torch_dist`` checkpoint that Megatron Core loads at any layout, one parameter at a time."""

import argparse
import io
import json
import os
import pickle
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.core.communication.agreement import agree
from shardwise.core.sharded_state import gather_parameter
from shardwise.core.tensor_files import check_finite, write_errors
from shardwise.models.config import ModelConfig
from shardwise.models.description import Model, describe_model
from shardwise.storage.checkpoint.folder import fsync
from shardwise.storage.huggingface.exporting import begun_folder
from shardwise.storage.huggingface.mapping import compose
from shardwise.storage.huggingface.megatron.arguments import MEGATRON
from shardwise.storage.huggingface.megatron.folder import COMMON_NAME, LATEST_NAME, RENAMED
from shardwise.storage.huggingface.pretrained import written_as

_FILE = "__0_0.distcp"
_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# With these, Megatron looks for a key for each layer, and for experts and halves of gated layers together.
_CONTENT = {"singleton_local_shards": False, "non_homogeneous_layers": True}


def save_megatron(model: Model, folder: Path, *, iteration: int, dtype: torch.dtype | None = None) -> None:
    """Write a model as the newest iteration in a folder of Megatron's checkpoints, without the state of an optimizer.

    Collective over the model's tensor-parallel group. In addition to its part of the model, a rank needs memory for
    two of the largest parameters. The folder gets its name when every byte is on the disk.

    Args:
        model: a ``GPT`` on one pipeline stage; not modified.
        folder: destination; must not exist, or must be empty.
        iteration: number of steps that the model was trained for.
        dtype: dtype of the weights; None for their own.

    Raises:
        ConfigError: Megatron has no arguments for the model, or ``folder`` exists.
        CheckpointError: the folder cannot be written, or a weight is not finite. Every rank raises the same error.
    """
    group, target = model.groups.tp, Path(os.path.abspath(folder))
    description = describe_model(model)
    arguments = agree(lambda: written_as(MEGATRON, description, None, None), group=group)
    args = {name: value for name, value in arguments.items() if name not in ("architectures", "model_type")}
    parallel = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    args |= {**dict.fromkeys(parallel, 1), "params_dtype": dtype or model.config.params_dtype, "iteration": iteration}
    # Megatron compares these with its own when it loads.
    args |= {"add_position_embedding": True, "make_vocab_size_divisible_by": 1, "tokenizer_type": None}
    is_first = group.rank() == 0
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    with ExitStack() as stack:
        agree(lambda: stack.enter_context(begun_folder(target, partial)) if is_first else None, group=group)
        # Megatron has no iteration 0; it reads such a checkpoint as a released model.
        latest = str(iteration) if iteration else "release"
        inner = partial / (f"iter_{iteration:07d}" if iteration else latest)
        writer = agree(lambda: _Writer(stack, inner) if is_first else None, group=group)
        failure: Exception | None = None
        for key, shard in model.sharded_state_dict().items():
            composition = compose(MEGATRON.table, key, shard.layout.global_shape, description)
            own = model.groups.experts if shard.replicas.is_of_expert else None
            whole = gather_parameter(shard.data, shard.layout, group=own or group)
            if writer is not None and failure is None:
                try:
                    stored = composition.to_stored(whole)
                    writer.write({_key(name, description): tensor for name, tensor in stored.items()}, dtype)
                except Exception as error:
                    # The other ranks need this one in the gathers that follow.
                    failure = error

        def finish() -> None:
            if failure is not None:
                raise failure
            if writer is not None:
                writer.finish(args, iteration)
                with write_errors(target):
                    (partial / LATEST_NAME).write_text(latest)
                    for path in partial.rglob("*"):
                        fsync(path)
                    partial.rename(target)
                    fsync(target.parent)

        agree(finish, group=group)


class _Writer:
    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._folder, self._places = folder, dict[MetadataIndex, _StorageInfo]()
        self._metadata = Metadata({}, storage_data=self._places)
        with write_errors(folder):
            folder.mkdir()
            self._file = stack.enter_context((folder / _FILE).open("wb"))

    def write(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
        for key, tensor in tensors.items():
            check_finite(tensor, f"tensor {key!r}", dtype=dtype)
            stored = tensor.detach().to("cpu", dtype or tensor.dtype).clone()
            zero = torch.Size([0] * tensor.dim())
            chunk = ChunkStorageMetadata(zero, stored.shape)
            properties = TensorProperties(dtype=stored.dtype)
            self._metadata.state_dict_metadata[key] = TensorStorageMetadata(properties, stored.shape, [chunk])
            self._add(MetadataIndex(key, zero), stored)
            for name in _extra_states(key, stored):
                self._metadata.state_dict_metadata[name] = BytesStorageMetadata()
                self._add(MetadataIndex(name), [None])

    def _add(self, index: MetadataIndex, value: object) -> None:
        archive = io.BytesIO()
        torch.save(value, archive)
        self._places[index] = _StorageInfo(_FILE, self._file.tell(), archive.tell())
        with write_errors(self._folder / _FILE):
            self._file.write(archive.getbuffer())

    def finish(self, args: Mapping[str, object], iteration: int) -> None:
        common = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": iteration}
        with write_errors(self._folder):
            self._file.close()
            torch.save(common | {"content_metadata": _CONTENT}, self._folder / COMMON_NAME)
            (self._folder / ".metadata").write_bytes(pickle.dumps(self._metadata))
            (self._folder / "metadata.json").write_text(json.dumps(_BACKENDS))


def _key(name: str, config: ModelConfig) -> str:
    """Return Megatron's key of a tensor; the norm before experts is a module, with Transformer Engine."""
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    has_experts = layer and config.experts is not None and config.experts.in_layer(int(layer[1]) + 1)
    for theirs, ours in RENAMED[: 1 if has_experts else None]:
        name = name.replace(ours, theirs)
    return name


def _extra_states(key: str, tensor: Tensor) -> Iterator[str]:
    """Yield the keys of the extra states that Megatron looks for next to a weight; all are None without FP8."""
    module, _, leaf = key.rpartition(".")
    if leaf != "weight" or module.startswith(("embedding.", "output_layer")) or module.endswith("router"):
        return
    num = len(tensor) if ".experts.experts." in module else 1
    for each in range(num):
        yield f"{module}._extra_state/shard_{each}_{num}"
    if module.endswith(".linear_proj"):
        yield f"{module.removesuffix('linear_proj')}core_attention._extra_state/shard_0_1"
