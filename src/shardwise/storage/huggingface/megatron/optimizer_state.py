"""State of Megatron's distributed optimizer in the form ``dp_reshardable``: fp32 weights and AdamW's means.

Each tensor- and pipeline-parallel rank has buckets, flat tensors of its parameters one after the other, in reverse
order, each from a multiple of 64 elements on; the parameters of a bucket are not named. Their order here is that of
Megatron's modules, and every fp32 weight is compared with the weight of the model, so that another order is found.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.core.json_text import shown
from shardwise.core.sharding import ParamShard
from shardwise.core.tensor_files import DTYPES, StoredTensor
from shardwise.models.description import Model
from shardwise.storage.huggingface.loading import fill_shard_
from shardwise.storage.huggingface.mapping import compose
from shardwise.storage.huggingface.megatron.chunks import (
    Chunk,
    Chunks,
    is_column,
    is_row,
    parts_of,
    read_chunks,
    size_in,
)
from shardwise.storage.huggingface.megatron.folder import MegatronFolder
from shardwise.storage.huggingface.megatron.pickles import read_archive
from shardwise.storage.huggingface.pretrained import PretrainedFolder

KINDS = ("param", "exp_avg", "exp_avg_sq")
_FORM = "dp_reshardable"
_ALIGNMENT = 64
_BUCKET = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_[^/]*\.bucket_idx_(\d+)\.(\w+)"
)
_OUTPUT = "output_layer.weight"


@dataclass(frozen=True)
class _Piece(Chunk):
    """A box of a parameter in a bucket, ``start`` elements from its begin."""

    bucket: Sequence[Chunk] = ()
    start: int = 0

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        row = math.prod(self.sizes[1:])
        flat = read_chunks(self.bucket, (self.start + offsets[0] * row,), (sizes[0] * row,))
        rows = flat.view(sizes[0], *self.sizes[1:])
        return rows[(slice(None), *(slice(at, at + n) for at, n in zip(offsets[1:], sizes[1:], strict=True)))]


def load_optimizer_state(source: PretrainedFolder, model: Model) -> tuple[dict[str, ParamShard], int]:
    """Read the optimizer state of the model's parameters on this rank.

    Args:
        source: Megatron's checkpoint, opened.
        model: the model of it, with its weights.

    Returns:
        ``model.KEY`` with the fp32 weight, ``optimizer.exp_avg.KEY`` and ``optimizer.exp_avg_sq.KEY`` of each
        parameter; and the number of steps that the optimizer took.

    Raises:
        ConfigError: the state is in another form, or the model is split in a way that is not read.
        CheckpointError: the state is damaged, or its weights are not those of the model.
    """
    folder = source.tensors
    assert isinstance(folder, MegatronFolder)
    steps = _check_form(folder)
    by_kind = {kind: folder.with_chunks(chunks) for kind, chunks in _chunks(folder).items()}
    names = {name: name for name in folder.tensors}
    result: dict[str, ParamShard] = {}
    for key, shard in model.sharded_state_dict().items():
        shape = source.stored_shape(key, shard.layout.global_shape)
        composition = compose(source.table, key, shape, source.description)
        for kind, tensors in by_kind.items():
            values = torch.empty_like(shard.data, dtype=torch.float32)
            fill_shard_(shard.with_data(values), composition, tensors, names)
            if kind == KINDS[0] and not torch.equal(values.to(shard.dtype), shard.data):
                raise CheckpointError(
                    f"{folder.path}: the optimizer's fp32 weight of {key} is not the model's weight: the order of the "
                    "parameters in its buckets is not that of Megatron Core 0.16; import without --optimizer"
                )
            name = f"model.{key}" if kind == KINDS[0] else f"optimizer.{kind}.{key}"
            result[name] = shard.with_data(values).with_key(name)
    return result, steps


def _check_form(folder: MegatronFolder) -> int:
    """Return the number of steps; raise ConfigError if the state is in another form."""
    args, common = folder.args, folder.common.get("optimizer")
    form = common.get("param_state_sharding_type") if isinstance(common, dict) else None
    what = None
    if form != _FORM:
        held = f"in the form {shown(form)}" if form else "not of a distributed optimizer, or missing"
        what = f"its optimizer state is {held}, and {_FORM} is read"
    elif args.get("optimizer", "adam") != "adam":
        what = f"its optimizer is {shown(args['optimizer'])}, and the state of adam is read"
    elif args.get("num_experts") is not None:
        what = "the optimizer state of a model with experts is not read"
    elif args.get("virtual_pipeline_model_parallel_size") is not None:
        what = "the optimizer state of interleaved stages is not read"
    elif args.get("num_layers", 0) % size_in(folder.path, args, "pipeline_model_parallel_size"):
        what = "the optimizer state of stages with different numbers of layers is not read"
    if what is not None:
        raise ConfigError(f"{folder.path}: {what}; import the weights alone, without --optimizer")
    place = folder.places.get("optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1")
    content = None if place is None else read_archive(*place)
    groups = content[0] if isinstance(content, list) and content else content
    groups = groups.get("param_groups") if isinstance(groups, dict) else None
    first = groups[0] if isinstance(groups, list) and groups else None
    steps = first.get("step") if isinstance(first, dict) else None
    if not isinstance(steps, int | float) or steps != int(steps) or not 0 <= steps <= folder.iteration:
        raise CheckpointError(
            f"{folder.path}: the optimizer took {shown(steps)} steps, which must be a number of at most the "
            f"{folder.iteration} iterations"
        )
    return int(steps)


def _chunks(folder: MegatronFolder) -> dict[str, Chunks]:
    """Return where each kind of state of each parameter lies."""
    buckets: dict[tuple[int, str], dict[int, list[Chunk]]] = {}
    for name, chunks in folder.stored.items():
        match = _BUCKET.fullmatch(name)
        if match is not None and match[4] in KINDS:
            if match[2] != "0":
                raise ConfigError(f"{folder.path}: buffers of several dtypes are not read; import without --optimizer")
            buckets.setdefault((int(match[1]), match[4]), {})[int(match[3])] = chunks
    tp, pp = (size_in(folder.path, folder.args, f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline"))
    result: dict[str, Chunks] = {kind: {} for kind in KINDS}
    for stage in range(pp):
        names = list(_order(folder, stage, pp))
        for rank in range(tp):
            for kind in KINDS:
                own = buckets.get((stage * tp + rank, kind), {})
                places = _places([(name, _local_shape(folder, name, tp)) for name in reversed(names)], own, folder.path)
                for name, shape, bucket, start in places:
                    if name == _OUTPUT and name not in folder.tensors:
                        # The last stage's copy of the embedding.
                        continue
                    size = DTYPES[bucket[0].stored.dtype].itemsize
                    stored = replace(
                        bucket[0].stored, shape=shape, start=start * size, num_bytes=math.prod(shape) * size
                    )
                    found = result[kind].setdefault(name, [])
                    for part in parts_of(name, stored, rank, tp, folder.args, None):
                        if all(part.offsets != other.offsets for other in found):
                            found.append(
                                _Piece(part.offsets, part.sizes, stored, bucket=bucket, start=part.stored.start // size)
                            )
    return result


def _order(folder: MegatronFolder, stage: int, pp: int) -> Iterator[str]:
    """Yield the names of a stage's parameters in the order of Megatron's modules."""
    parts = ["input_layernorm", "self_attention.linear_proj"]
    if folder.args.get("transformer_impl", "transformer_engine") == "transformer_engine":
        # The norm is in the linear layer behind it.
        parts.reverse()
    parts += [f"self_attention.{each}" for each in ("linear_qkv", "q_layernorm", "k_layernorm")]
    parts += ["pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2"]
    count = folder.args["num_layers"] // pp
    modules = [f"embedding.{each}_embeddings" for each in ("word", "position")] if stage == 0 else []
    modules += [f"decoder.layers.{at}.{part}" for at in range(stage * count, (stage + 1) * count) for part in parts]
    if stage == pp - 1:
        modules.append("decoder.final_layernorm")
    for module in modules:
        yield from (name for kind in ("weight", "bias") if (name := f"{module}.{kind}") in folder.tensors)
    if stage == pp - 1 and (_OUTPUT in folder.tensors or pp > 1):
        yield _OUTPUT


def _local_shape(folder: MegatronFolder, name: str, tp: int) -> tuple[int, ...]:
    tensor: StoredTensor = folder.tensors.get(name) or folder.tensors["embedding.word_embeddings.weight"]
    dim = 0 if is_column(name) else 1 if is_row(name) else None
    return tuple(size // tp if at == dim else size for at, size in enumerate(tensor.shape))


def _places(
    params: Sequence[tuple[str, tuple[int, ...]]], buckets: dict[int, list[Chunk]], path: Path
) -> Iterator[tuple[str, tuple[int, ...], list[Chunk], int]]:
    """Yield each parameter's bucket and its first element there."""
    sizes = {index: sum(chunk.sizes[0] for chunk in chunks) for index, chunks in buckets.items()}
    index = at = 0
    for name, shape in params:
        start, count = -(-at // _ALIGNMENT) * _ALIGNMENT, math.prod(shape)
        # A bucket ends behind its last parameter, or where the next one would begin.
        if index in sizes and start + count > sizes[index] and sizes[index] in (at, start):
            index, start = index + 1, 0
        if index not in sizes or start + count > sizes[index]:
            raise CheckpointError(
                f"{path}: the buckets of the optimizer, of {list(sizes.values())} elements, have no place for the "
                f"{count} of {name}; import without --optimizer"
            )
        yield name, shape, buckets[index], start
        at = start + count
    if index + 1 != len(sizes) or sizes[index] != at:
        raise CheckpointError(
            f"{path}: the buckets of the optimizer have {list(sizes.values())} elements, and the parameters end at {at}"
            f" of the {index + 1}th; import without --optimizer"
        )
