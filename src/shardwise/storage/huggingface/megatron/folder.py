"""A Megatron checkpoint as a Hugging Face folder: names of this library, and arguments as ``config.json``."""

import copy
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from shardwise.core.atomic_files import read_regular
from shardwise.core.errors import CheckpointError
from shardwise.core.json_text import shown
from shardwise.core.tensor_files import DTYPES, StoredTensor
from shardwise.storage.huggingface.megatron.arguments import config_of
from shardwise.storage.huggingface.megatron.chunks import (
    Chunk,
    Chunks,
    arguments_in,
    distributed_chunks,
    is_rank_folder,
    rank_chunks,
    read_chunks,
    shape_of,
)
from shardwise.storage.huggingface.megatron.pickles import read_archive
from shardwise.storage.huggingface.tensor_folder import TensorFolder

LATEST_NAME = "latest_checkpointed_iteration.txt"
COMMON_NAME = "common.pt"
# Since Megatron Core 0.19, what is in common.pt is an item of the .distcp files.
_COMMON_ITEM = "common_state/shard_0_1"
# Transformer Engine has the norms in the linear layers behind them.
RENAMED = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
_IGNORED = re.compile(r"optimizer\.|rng_state|rerun_state_machine_state|.*(_extra_state|local_tokens_per_expert)")
_STACKED = re.compile(r"decoder\.layers\.(?=[a-z_])")
# With metadata for singleton local shards, experts and the halves of gated layers have separate tensors.
_SINGLE = re.compile(
    r"(.*mlp\.(?:experts\.)?)(?:(?<=experts\.)experts\.(\d{1,9})\.)?(linear_fc[12]\.(?:weight|bias))(_[wv])?"
)


class MegatronFolder(TensorFolder):
    """A ``TensorFolder`` of Megatron's checkpoint of one iteration.

    Attributes:
        folder: the given folder.
        path: folder of the iteration.
        config: the arguments, as content of ``config.json``.
        args: all arguments.
        iteration: number of steps; 0 if the checkpoint does not say.

    Raises:
        CheckpointError: the folder is no checkpoint of Megatron, a file is missing or damaged, or a pickle names
            anything outside of the closed list.
        ConfigError: an argument that matters has a value that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, _iteration_folder(folder)
        self.bytes_read, self.copies, self.indexed = 0, [], set()
        if (self.path / ".metadata").exists():
            self.stored, self.places = distributed_chunks(self.path)
            item, file = self.places.get(_COMMON_ITEM), self.path / COMMON_NAME
            if item is None or file.exists():
                self.common = read_archive(file)
            else:
                items, file = read_archive(*item), item[0]
                self.common = items[0] if isinstance(items, list) and items else None
            self.args = arguments_in(file, self.common)
        else:
            self.args, self.stored = rank_chunks(self.path)
            self.common, self.places = {}, {}
        iteration = self.common.get("iteration", self.args.get("iteration", 0))
        self.iteration = iteration if type(iteration) is int and 0 <= iteration < 10**12 else 0
        self.config = config_of(self.args, str(self.path))
        self.chunks: Chunks = {}
        for name, chunks in self.stored.items():
            if not _IGNORED.match(name):
                for own, chunk in _placed(name, chunks):
                    self.chunks.setdefault(own, []).append(chunk)
        if not self.config.get("untie_embeddings_and_output_weights"):
            # The last stage's copy, in files of ranks.
            self.chunks.pop("output_layer.weight", None)
        self.tensors = {}
        for name, chunks in self.chunks.items():
            dtype, shape = chunks[0].stored.dtype, shape_of(name, chunks, self.path)
            self.tensors[name] = StoredTensor(
                name, chunks[0].stored.file, dtype, shape, 0, math.prod(shape) * DTYPES[dtype].itemsize
            )

    def with_chunks(self, chunks: Chunks) -> "MegatronFolder":
        """Return a folder with other values of the same tensors."""
        result = copy.copy(self)
        result.chunks = chunks
        return result

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Like ``TensorFolder.read``, from the chunks that have a part of the box."""
        box = read_chunks(self.chunks[name], offsets, sizes)
        self.bytes_read += box.nbytes
        return box


def is_megatron(path: Path) -> bool:
    """True for a folder of Megatron's checkpoints, or of one of its iterations."""
    if not path.is_dir():
        return False
    return (path / LATEST_NAME).is_file() or _is_iteration(path)


def _is_iteration(path: Path) -> bool:
    has_ranks = any(is_rank_folder(each) for each in path.iterdir() if each.name.startswith("mp_rank_"))
    return has_ranks or all((path / each).exists() for each in (".metadata", "metadata.json"))


def _iteration_folder(folder: Path) -> Path:
    if _is_iteration(folder):
        return folder
    path = folder / LATEST_NAME
    try:
        latest = read_regular(path, limit=100).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}, which names the newest iteration: {error}") from error
    if latest != "release" and not re.fullmatch(r"\d{1,12}", latest):
        raise CheckpointError(f"{path} has {shown(latest)}; it must be the number of an iteration, or release")
    chosen = folder / (latest if latest == "release" else f"iter_{int(latest):07d}")
    if not os.path.isdir(chosen) or not _is_iteration(chosen):
        raise CheckpointError(
            f"{chosen}, the newest iteration by {LATEST_NAME}, is missing or has neither .metadata and metadata.json "
            "(torch_dist) nor folders mp_rank_*; other formats are not read. Save as torch_dist"
        )
    return chosen


def _placed(name: str, chunks: Sequence[Chunk]) -> list[tuple[str, Chunk]]:
    """Return the chunks by this library's names of tensors: one for each layer, with all experts, and both halves."""
    for old, new in RENAMED:
        name = name.replace(old, new)
    result: list[tuple[str, Chunk]] = []
    half = None
    lead: tuple[int, ...] = ()
    if (match := _SINGLE.fullmatch(name)) and (match[2] or match[4]):
        half = match[4]
        lead = () if match[2] is None else (int(match[2]),)
        name = match[1] + ("experts." if lead else "") + match[3]
    stacked = _STACKED.match(name)
    for chunk in chunks:
        own, offsets, sizes = name, chunk.offsets, chunk.sizes
        if stacked:
            if not sizes or sizes[0] != 1:
                raise CheckpointError(f"tensor {name!r} has parts of {list(sizes)}; each must be of one layer")
            own = f"decoder.layers.{offsets[0]}.{name[stacked.end() :]}"
            offsets, sizes = offsets[1:], sizes[1:]
        if half == "_v":
            rows = max(each.offsets[-len(sizes)] + each.sizes[-len(sizes)] for each in chunks)
            offsets = (offsets[0] + rows, *offsets[1:])
        result.append((own, replace(chunk, offsets=(*lead, *offsets), sizes=((1,) if lead else ()) + sizes)))
    return result
