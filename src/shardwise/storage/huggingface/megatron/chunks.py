"""Tensors of Megatron's checkpoints as chunks: boxes of a whole tensor, each stored consecutively in some file.

``torch_dist`` folders have ``.metadata`` with the place of each chunk; each is an archive of ``torch.save``, whose
header is read when the chunk is. The older form has a file for each rank, in ``mp_rank_XX[_YYY][_ZZZ]``.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from shardwise.core.atomic_files import can_be_a_name
from shardwise.core.errors import CheckpointError
from shardwise.core.json_text import shown
from shardwise.core.tensor_files import DTYPES, StoredTensor, is_shape, read_box
from shardwise.storage.huggingface.megatron.pickles import Record, read_archive, read_pickle

Shape = tuple[int, ...]
RANK_FILE = "model_optim_rng.pt"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor.

    Attributes:
        offsets, sizes: first index and number of indices in each dimension of the whole tensor.
        stored: its elements in order; if ``is_archived``, the archive that holds one tensor with them.
    """

    offsets: Shape
    sizes: Shape
    stored: StoredTensor
    is_archived: bool = False

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Read a box of this chunk, given in its own indices."""
        stored = self.stored
        if self.is_archived:
            found = read_archive(stored.file, stored.start, stored.num_bytes)
            count = math.prod(self.sizes)
            if not isinstance(found, StoredTensor) or math.prod(found.shape) != count or found.dtype != stored.dtype:
                raise CheckpointError(
                    f"{stored.file}: the archive at {stored.start} is not the tensor of {count} {stored.dtype} that "
                    ".metadata promises; use another copy of the checkpoint"
                )
            stored = replace(found, name=stored.name, file=stored.file)
        return read_box(replace(stored, shape=self.sizes), offsets, sizes)


Chunks = dict[str, list[Chunk]]
"""Chunks of each tensor by its name."""


def shape_of(name: str, chunks: Sequence[Chunk], folder: Path) -> Shape:
    """Return a tensor's shape; raise CheckpointError unless its chunks fill it once.

    The bounds of all chunks make a grid, and each of its cells must be a chunk.
    """
    ranks = {len(chunk.sizes) for chunk in chunks}
    if len(ranks) != 1 or len({chunk.stored.dtype for chunk in chunks}) != 1:
        raise CheckpointError(f"{folder}: parts of tensor {name!r} have different dtypes or numbers of dimensions")
    starts = [sorted({chunk.offsets[dim] for chunk in chunks}) for dim in range(ranks.pop())]
    ends = [max(c.offsets[dim] + c.sizes[dim] for c in chunks) for dim in range(len(starts))]
    after = [dict(itertools.pairwise([*each, end])) for each, end in zip(starts, ends, strict=True)]
    cells = {chunk.offsets for chunk in chunks}
    is_cell = all(
        offset + size == bounds[offset]
        for chunk in chunks
        for offset, size, bounds in zip(chunk.offsets, chunk.sizes, after, strict=True)
    )
    if (
        len(cells) != len(chunks)
        or not is_cell
        or len(cells) != math.prod(map(len, starts))
        or any(s[0] for s in starts)
    ):
        raise CheckpointError(
            f"{folder}: the {len(chunks)} parts of tensor {name!r} overlap, or do not fill a shape of {ends}; a "
            "file of the checkpoint is missing or damaged"
        )
    return tuple(ends)


def read_chunks(chunks: Sequence[Chunk], offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Read a box of a tensor from the chunks that have a part of it."""
    result = torch.empty(tuple(sizes), dtype=DTYPES[chunks[0].stored.dtype])
    for chunk in chunks:
        box = [
            (max(low, first), min(low + size, first + count))
            for low, size, first, count in zip(chunk.offsets, chunk.sizes, offsets, sizes, strict=True)
        ]
        if all(low < high for low, high in box):
            own = [low - first for (low, _), first in zip(box, chunk.offsets, strict=True)]
            part = result[
                tuple(slice(low - first, high - first) for (low, high), first in zip(box, offsets, strict=True))
            ]
            part.copy_(chunk.read(own, [high - low for low, high in box]))
    return result


def distributed_chunks(folder: Path) -> tuple[Chunks, dict[str, tuple[Path, int, int]]]:
    """Read the ``.metadata`` of a ``torch_dist`` folder: the chunks of tensors, and the archives of other values.

    Raises:
        CheckpointError: it is damaged or names anything outside of the closed list; a file is missing or too short;
            or two chunks overlap in a file.
    """
    path = folder / ".metadata"
    value = read_pickle(path)
    fields = value.fields if isinstance(value, Record) else {}
    listed, places = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(listed, dict) or not isinstance(places, dict):
        raise _damaged(path, "it is no description of a checkpoint")
    stored: dict[tuple[Any, Any], tuple[Path, int, int]] = {}
    used: dict[Path, list[tuple[int, int]]] = {}
    for index, place in places.items():
        if not isinstance(index, Record) or not isinstance(place, Record):
            raise _damaged(path, f"{shown(index)} is no place")
        offset = index.fields.get("offset")
        file, start, length = _place(folder, place)
        used.setdefault(file, []).append((start, length))
        stored[str(index.fields.get("fqn")), offset if isinstance(offset, tuple) else None] = file, start, length
    result: Chunks = {}
    for name, tensor in listed.items():
        if not isinstance(name, str) or not isinstance(tensor, Record):
            raise _damaged(path, f"{shown(name)} is no name of a tensor")
        if not tensor.name.endswith(".TensorStorageMetadata"):
            continue
        properties = _fields(path, tensor.fields.get("properties"))
        dtype = _NAMES.get(properties[0] if isinstance(properties, tuple) else properties.get("dtype"))
        size, chunks = _shape(path, name, tensor.fields.get("size")), tensor.fields.get("chunks")
        if dtype is None or not isinstance(chunks, list) or not chunks:
            raise _damaged(path, f"tensor {name!r} has no dtype or no parts")
        found = []
        for each in chunks:
            box = _fields(path, each)
            if isinstance(box, tuple):
                raise _damaged(path, f"a part of tensor {name!r} has no sizes")
            offsets, sizes = (_shape(path, name, box.get(key)) for key in ("offsets", "sizes"))
            if len(offsets) != len(size) or len(sizes) != len(size):
                raise _damaged(path, f"a part of tensor {name!r} has {len(sizes)} dimensions")
            if (name, offsets) not in stored:
                raise _damaged(path, f"the part of tensor {name!r} at {list(offsets)} is in no file")
            file, start, length = stored[name, offsets]
            if math.prod(sizes) * DTYPES[dtype].itemsize > length:
                raise _damaged(path, f"a part of {list(sizes)} of tensor {name!r} has {length} bytes")
            found.append(Chunk(offsets, sizes, StoredTensor(name, file, dtype, sizes, start, length), True))
        if shape_of(name, found, folder) != size:
            raise _damaged(
                path, f"the parts of tensor {name!r} fill {list(shape_of(name, found, folder))}, not {list(size)}"
            )
        result[name] = found
    for file, parts in used.items():
        _check_file(file, sorted(parts))
    return result, {name: place for (name, offset), place in stored.items() if offset is None}


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {what}; use another copy of it")


def _fields(path: Path, value: Any) -> Any:
    if not isinstance(value, Record) or not isinstance(value.state, dict | tuple) or not value.state:
        raise _damaged(path, f"{shown(value)} has no fields")
    return value.state


def _shape(path: Path, name: str, value: Any) -> Shape:
    if not isinstance(value, tuple) or not is_shape(list(value)):
        raise _damaged(path, f"tensor {name!r} has the shape or position {shown(value)}")
    return value


def _place(folder: Path, place: Record) -> tuple[Path, int, int]:
    name, start, length = (place.fields.get(key) for key in ("relative_path", "offset", "length"))
    if not isinstance(name, str) or PurePosixPath(name).name != name or not can_be_a_name(name):
        raise _damaged(folder / ".metadata", f"a tensor cannot be in a file called {shown(name)}")
    if start is None or length is None or not is_shape([start, length]):
        raise _damaged(folder / ".metadata", f"a tensor cannot be at {shown(start)} with {shown(length)} bytes")
    return folder / name, start, length


def _check_file(path: Path, parts: Sequence[tuple[int, int]]) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"cannot read {path}, which .metadata names: {error.strerror}") from error
    end = 0
    for start, length in parts:
        if start < end:
            raise CheckpointError(f"{path}: by .metadata, parts of tensors overlap at {start}; use another copy of it")
        end = start + length
    if end > size:
        raise CheckpointError(f"{path} is truncated: it has {size} bytes, and by .metadata a tensor ends at {end}")


_FOLDER = re.compile(r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?(?:_(\d{3,5}))?")
_COLUMNS = re.compile(r"(word_embeddings|output_layer|linear_qkv|linear_fc1)\.(weight|bias)$")
_ROWS = re.compile(r"(linear_proj|linear_fc2)\.weight$")
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12])\.weight|(linear_fc[12])\.weight(\d+))$")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def is_column(name: str) -> bool:
    """True for a parameter whose rows Megatron splits over tensor-parallel ranks."""
    return _COLUMNS.search(name) is not None


def is_row(name: str) -> bool:
    """True for a parameter whose columns Megatron splits over tensor-parallel ranks."""
    return _ROWS.search(name) is not None


def is_rank_folder(path: Path) -> bool:
    """True if the name is that of a rank's folder in the older form."""
    return _FOLDER.fullmatch(path.name) is not None


def rank_chunks(folder: Path) -> tuple[dict[str, Any], Chunks]:
    """Read the files of all ranks in the older form; return the arguments of the first, and the chunks.

    Raises:
        CheckpointError: a file is missing or damaged, names anything outside of the closed list, or has another form.
    """
    found = {path.name: path / RANK_FILE for path in folder.iterdir() if is_rank_folder(path)}
    first = read_archive(found[min(found)])
    args = arguments_in(found[min(found)], first)
    tp, pp, ep = (
        size_in(found[min(found)], args, f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline", "expert")
    )
    expert_tp = args.get("expert_tensor_parallel_size") or tp
    if expert_tp not in (1, tp):
        raise CheckpointError(
            f"{folder}: expert_tensor_parallel_size is {shown(expert_tp)}, and tensor_model_parallel_size {tp}; files "
            "of ranks are read if it is 1 or the same. Save the checkpoint as torch_dist"
        )
    loaded: dict[tuple[int, int, int], Mapping[str, Any]] = {}
    for t, p, e in itertools.product(range(tp), range(pp), range(ep)):
        name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
        if name in found:
            loaded[t, p, e] = read_archive(found[name])
        elif expert_tp == tp or ep == 1:
            raise CheckpointError(f"{folder} lacks {name}, a rank of tp {tp}, pp {pp} and ep {ep} of its arguments")
    result: Chunks = {}
    offsets = _layers_before(folder, loaded)
    for (t, p, e), content in loaded.items():
        file = found[f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")]
        for index, state in enumerate(_states(file, content)):
            local = [int(match[1]) + 1 for name in state if (match := _EXPERT.search(name)) and match[1]]
            local += [int(match[4]) + 1 for name in state if (match := _EXPERT.search(name)) and match[4]]
            for name, tensor in state.items():
                if not isinstance(tensor, StoredTensor):
                    continue
                whole, before = name, offsets[index, p]
                if match := _LAYER.match(name):
                    whole = f"decoder.layers.{int(match[1]) + before}.{name[match.end() :]}"
                shard, expert = t, None
                if match := _EXPERT.search(whole):
                    expert = int(match[1] or match[4]) + e * max(local)
                    shard = t if expert_tp == tp else 0
                    whole = f"{whole[: match.start()]}mlp.experts.experts.{match[2] or match[3]}.weight"
                stored = replace(tensor, name=whole, file=file)
                chunks = result.setdefault(whole, [])
                for chunk in parts_of(whole, stored, shard, expert_tp if expert is not None else tp, args, expert):
                    if all(chunk.offsets != other.offsets for other in chunks):
                        chunks.append(chunk)
    return args, result


def arguments_in(path: Path, content: Any) -> dict[str, Any]:
    """Return the arguments in what Megatron saved; raise CheckpointError if there are none."""
    args = content.get("args") if isinstance(content, dict) else None
    if not isinstance(args, Record) or not args.fields:
        raise CheckpointError(
            f"{path} has no args, which Megatron's training saves and which say what the model is; save with them"
        )
    return args.fields


def size_in(path: Path, args: Mapping[str, Any], name: str) -> int:
    """Return the argument that is a number of ranks."""
    value = args.get(name, 1)
    if type(value) is not int or not 1 <= value <= 1 << 16:
        raise CheckpointError(f"{path}: the argument {name} is {shown(value)}; it must be from 1 to {1 << 16}")
    return value


def _states(path: Path, content: Any) -> Iterator[dict[str, Any]]:
    """Return the tensors of each chunk of the model on a rank."""
    numbered = {int(match[1]): each for each in content if (match := re.fullmatch(r"model(\d+)", str(each)))}
    for name in ["model"] if "model" in content else [numbered[number] for number in sorted(numbered)]:
        state = content[name]
        is_flat = isinstance(state, dict) and all(isinstance(each, str) for each in state)
        if not is_flat or "language_model" in state:
            raise CheckpointError(
                f"{path}: {name} is not the state of a GPTModel of Megatron Core; convert checkpoints of older "
                "models in Megatron first (tools/checkpoint/convert.py)"
            )
        yield state


def _layers_before(
    folder: Path, loaded: Mapping[tuple[int, int, int], Mapping[str, Any]]
) -> dict[tuple[int, int], int]:
    """Return the number of layers before each chunk of the model on each stage."""
    counts: dict[tuple[int, int], int] = {}
    for (_, p, _), content in loaded.items():
        for index, state in enumerate(_states(folder, content)):
            layers = [int(match[1]) + 1 for name in state if (match := _LAYER.match(name))]
            counts[index, p] = max(layers, default=0)
    before = itertools.accumulate((counts[key] for key in sorted(counts)), initial=0)
    return dict(zip(sorted(counts), before, strict=False))


def parts_of(
    name: str, stored: StoredTensor, shard: int, num_shards: int, args: Mapping[str, Any], expert: int | None
) -> Iterator[Chunk]:
    """Return where a rank's tensor lies in the whole one; a gated first layer has two halves on each rank."""
    shape = stored.shape
    offsets = [0] * len(shape)
    splits_rows = bool(shape) and is_column(name)
    sections = 2 if splits_rows and "linear_fc1" in name and args.get("swiglu") else 1
    if shape and shape[0] % sections:
        raise CheckpointError(f"{stored.file}: tensor {name!r} has {shape[0]} rows, which are not two halves")
    if is_row(name) and len(shape) == 2:
        offsets[1] = shard * shape[1]
    lead, one = ((), ()) if expert is None else ((expert,), (1,))
    for section in range(sections):
        part, sizes, size = stored, shape, stored.num_bytes // sections
        if splits_rows:
            sizes = (shape[0] // sections, *shape[1:])
            offsets[0] = (section * num_shards + shard) * sizes[0]
            part = replace(stored, start=stored.start + section * size, num_bytes=size, shape=sizes)
        yield Chunk((*lead, *offsets), (*one, *sizes), part)
