"""Load a model from a Hugging Face folder. Each rank reads only the rows and columns that it holds.

Weights are quantised while they are read, so that a rank never holds more than one of them unquantised.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shardwise.core.communication.agreement import agree, gather_objects
from shardwise.core.communication.context import default_device
from shardwise.core.errors import CheckpointError
from shardwise.core.sharding import Interval, ParamShard
from shardwise.core.slow_work import told_if_slow
from shardwise.core.tensor_files import DTYPES, check_finite
from shardwise.core.topology import Groups, gather_from_stages, model_groups
from shardwise.models.by_plan.model import PlannedModel
from shardwise.models.description import Model, ModelChunks, build_model, chunks_of, model_config
from shardwise.nn import arithmetic_of
from shardwise.nn.parallel_linear import ParallelLinear
from shardwise.nn.quantization import Quantization, QuantizedTensor, check_available, quantize_shard
from shardwise.storage.huggingface.mapping import Boxes, Composition, compose
from shardwise.storage.huggingface.pretrained import PretrainedFolder
from shardwise.storage.huggingface.tensor_folder import TensorFolder, log_once, weight_dtype

# Rows of a vocabulary that are read at once to compute their mean.
_ROWS_AT_ONCE = 1024


def load_pretrained(
    folder: str | Path | PretrainedFolder,
    *,
    groups: Groups,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    max_sequence_length: int | None = None,
    vocab_size: int | None = None,
    quantization: BaseQuantization | None = None,
    **settings: Any,
) -> Model | ModelChunks:
    """Load the model in a Hugging Face folder, split over the ranks.

    Collective over the tensor- and pipeline-parallel groups. Each rank allocates its own part and reads it slice by
    slice, so that a rank needs memory only for its part and a second copy of its largest tensor.

    Args:
        folder: a folder with ``config.json`` and safetensors files, or the same opened.
        groups: the model's process groups.
        dtype: dtype of the parameters; None for the dtype of ``config.json``, or else of the first tensor.
        device: device of the parameters; None for PyTorch's default device, or this rank's GPU for groups of GPUs.
        max_sequence_length: maximum length, for models without learned positions; None for that of ``config.json``.
        vocab_size: size of the vocabulary; None for that of ``config.json``. Rows of ids that the folder lacks are the
            mean of its rows, with the same bits at every number of ranks; surplus rows are not read.
        quantization: which weights are quantised and frozen; None for none.
        **settings: fields of ``ModelConfig`` that the folder lacks, or that override its values (``hidden_dropout``).

    Returns:
        A ``GPT`` or ``Bert`` in training mode; ``ModelChunks`` of them if ``settings`` has
        ``virtual_pipeline_model_parallel_size``.

    Raises:
        ConfigError: the architecture or a value is not supported, heads or layers cannot be split over the ranks, or
            this machine cannot quantise.
        CheckpointError: a file or tensor is missing or unexpected, or has another shape than the config states. Every
            rank raises the same error, which names the field or tensor.
    """
    ranks = model_groups(groups)
    source = agree(lambda: _opened(folder, vocab_size), group=ranks)
    notes = [*source.notes, *_compare_files(source.tensors, groups)]
    if all(group.rank() == 0 for group in (*ranks, *([] if groups.dp is None else [groups.dp]))):
        for note in notes:
            log_once(note)
    settings = {"params_dtype": dtype or source.dtype, "pipeline_model_parallel_size": groups.num_stages, **settings}
    # All values are read from files, so do not initialise any.
    config = agree(lambda: model_config(source.description, perform_initialization=False, **settings), group=ranks)
    where = torch.device(device) if device is not None else default_device(groups.tp)

    def built(on: torch.device) -> list[Model]:
        sizes: dict[str, Any] = {"groups": groups, "device": on, "max_sequence_length": max_sequence_length}
        return [build_model(config, **sizes, vp_stage=chunk) for chunk in chunks_of(config)]

    # Report a size that contradicts the tensors before allocating memory for it.
    agree(lambda: _check_sizes(source), group=ranks)
    outlines = built(torch.device("meta"))
    outline_parts, _ = _compositions_and_names(outlines, source, groups)
    if quantization is None:
        models = built(where)
    else:
        agree(quantization.check, group=ranks)
        for model in outlines:
            make_room_(model, outline_parts, quantization, where)
        models = outlines
    for model in models:
        # Modules that are added to the model later must be initialised.
        model.config.perform_initialization = True
    parts, names = _compositions_and_names(models, source, groups)

    def fill() -> None:
        for shard, composition in parts.values():
            if not isinstance(shard.data, QuantizedTensor):
                fill_shard_(shard, composition, source.tensors, names)

    with told_if_slow(f"reading the weights of {source.path}"):
        agree(fill, group=ranks)
        for shard, composition in parts.values():
            if isinstance(shard.data, QuantizedTensor):
                fill_quantized_(shard, composition, source, names, groups)
    for model in models:
        if isinstance(model, PlannedModel):
            model.check_causal()
    return models[0] if config.virtual_pipeline_model_parallel_size is None else ModelChunks(models)


def _opened(folder: str | Path | PretrainedFolder, vocab_size: int | None) -> PretrainedFolder:
    source = copy.copy(folder) if isinstance(folder, PretrainedFolder) else PretrainedFolder(folder)
    if vocab_size is not None:
        source.change_vocabulary_(vocab_size)
    return source


def _check_sizes(source: PretrainedFolder) -> None:
    description, stored = source.description, source.tensors.tensors.values()
    if description.num_layers > len(stored):
        raise CheckpointError(
            f"{source.path} has {len(stored)} tensors, and its config.json asks for {description.num_layers} layers"
        )
    longest = max((size for tensor in stored for size in tensor.shape), default=0)
    experts = description.experts
    widths = {"heads": description.heads.width, "hidden states": description.hidden_size}
    if experts is not None:
        widths |= {"experts": experts.ffn_hidden_size, "shared expert": experts.shared_ffn_hidden_size or 0}
    for what, width in widths.items():
        if width > longest:
            raise CheckpointError(
                f"{source.path} has no tensor as wide as the {what} that its config.json asks for, {width}"
            )
    if experts is None:
        return
    # The names of all experts are listed next. A router has a row for each expert.
    num_layers = sum(map(experts.in_layer, range(1, description.num_layers + 1)))
    router = experts.num, description.hidden_size
    if num_layers and all(tensor.shape != router for tensor in stored):
        raise CheckpointError(
            f"{source.path} has no router of {experts.num} experts, as many as its config.json asks for"
        )
    row = source.table["decoder.layers.{layer}.mlp.experts.down"]
    is_separate = len(row((2, 1), description.heads, {"experts": "2"}).stored_shapes) > 1
    if is_separate and experts.num * num_layers > len(stored):
        raise CheckpointError(
            f"{source.path} has {len(stored)} tensors, and its config.json asks for {experts.num} experts in "
            f"{num_layers} layers"
        )


def _compositions_and_names(
    models: Sequence[Model], source: PretrainedFolder, groups: Groups
) -> tuple[dict[str, tuple[ParamShard, Composition]], dict[str, str]]:
    """Return this stage's parameters, each with its composition, and the stored names of tensors. Collective."""

    def compositions() -> dict[str, tuple[ParamShard, Composition]]:
        description, table = source.description, source.table
        return {
            key: (shard, compose(table, key, source.stored_shape(key, shard.layout.global_shape), description))
            for model in models
            for key, shard in model.sharded_state_dict().items()
        }

    parts = agree(compositions, group=model_groups(groups))
    own = sorted({name for _, composition in parts.values() for name in composition.stored_shapes})
    expected = {name for names in gather_from_stages(own, "the names of tensors", groups) for name in names}

    def check() -> dict[str, str]:
        names = source.stored_names(expected)
        for shard, composition in parts.values():
            check_shapes(source.tensors, composition, names, shard.dtype)
        return names

    return parts, agree(check, group=model_groups(groups))


def check_shapes(folder: TensorFolder, composition: Composition, names: Mapping[str, str], dtype: torch.dtype) -> None:
    """Raise CheckpointError unless tensors have the model's shapes and a dtype of weights, or ``dtype`` of integers."""
    for name, shape in composition.stored_shapes.items():
        stored = folder.tensors[names[name]]
        if stored.shape != shape:
            raise CheckpointError(
                f"tensor {stored.name!r} of {stored.file} has shape {list(stored.shape)}, but config.json asks for "
                f"{list(shape)}"
            )
        if dtype.is_floating_point or DTYPES.get(stored.dtype) != dtype:
            weight_dtype(stored)


@torch.no_grad()
def fill_shard_(shard: ParamShard, composition: Composition, folder: TensorFolder, names: Mapping[str, str]) -> None:
    """Read this rank's part of a parameter into ``shard.data``, with at most as much additional memory.

    Rows beyond the stored ones are set to the mean of all stored rows. Raises CheckpointError if a value is not finite.
    """
    layout, target = shard.layout, shard.data.detach()
    if isinstance(composition, Boxes):
        _fill_boxes_(shard, composition, folder, names)
        return
    rows = _own_rows(shard)
    place, num_stored = 0, composition.shape[0]
    for start, stop in rows:
        if stop > num_stored:
            target[place + max(num_stored - start, 0) : place + stop - start] = _mean_row(composition, folder, names)
        place += stop - start
    columns: Sequence[Interval] = [(0, size) for size in composition.shape[1:]]
    if layout.dim == 1:
        columns = layout.intervals[shard.rank]
    for (name, block), intervals in _intervals_by_tensor(composition, rows).items():
        for together in _neighbours(intervals):
            first, count = together[0].start, max(stored.stop for stored in together) - together[0].start
            # A vector has no columns; use one empty interval.
            place = 0
            for start, stop in columns or [(0, 0)]:
                values = _read(folder, names[name], composition, (first, start), (count, stop - start), block)
                what = f"tensor {names[name]!r} of {folder.tensors[names[name]].file}"
                check_finite(values, what, dtype=target.dtype)
                part = target.narrow(1, place, stop - start) if columns else target
                for stored in together:
                    taken = values[stored.start - first :: stored.step][: stored.rows]
                    part[stored.place : stored.place + stored.rows].copy_(taken)
                place += stop - start


def _fill_boxes_(shard: ParamShard, composition: Boxes, folder: TensorFolder, names: Mapping[str, str]) -> None:
    layout, target = shard.layout, shard.data.detach()
    dim, length = layout.dim or 0, (*composition.shape, 1)[layout.dim or 0]
    runs = [(0, length)] if layout.dim is None else layout.intervals[shard.rank]
    for box in composition.boxes:
        stored, place = folder.tensors[names[box.tensor]], 0
        for start, stop in runs:
            offsets, sizes, places = [0] * len(box.sizes), list(box.sizes), list(box.offsets)
            if places:
                low, high = max(start, places[dim]), min(stop, places[dim] + sizes[dim])
                offsets[dim], sizes[dim], places[dim] = low - places[dim], max(0, high - low), place + low - start
            place += stop - start
            if 0 in sizes:
                continue
            first = int(box.is_of_expert)
            values = folder.read(stored.name, offsets[first:], sizes[first:]).view(sizes)
            check_finite(values, f"tensor {stored.name!r} of {stored.file}", dtype=target.dtype)
            target[tuple(slice(at, at + size) for at, size in zip(places, sizes, strict=True))].copy_(values)


def _mean_row(composition: Composition, folder: TensorFolder, names: Mapping[str, str]) -> Tensor:
    """Return the mean of all rows of a parameter that is stored as one tensor, in fp64.

    Pairs of rows are added one by one, in the same order at every number of ranks and of threads.
    """
    (piece,) = composition.pieces
    stored = folder.tensors[names[piece.tensor]]
    total = torch.zeros(composition.shape[1:], dtype=torch.float64)
    for start in range(0, piece.rows, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, piece.rows - start)
        box = (start, *(0 for _ in total.shape)), (count, *total.shape)
        rows = _read(folder, stored.name, composition, *box, piece.block)
        check_finite(rows, f"tensor {stored.name!r} of {stored.file}")
        rows = rows.double()
        while len(rows) > 1:
            half = len(rows) // 2
            rows[:half] += rows[-half:]
            rows = rows[: len(rows) - half]
        total += rows[0]
    return total / piece.rows


def _own_rows(shard: ParamShard) -> Sequence[Interval]:
    layout = shard.layout
    return layout.intervals[shard.rank] if layout.dim == 0 else [(0, layout.global_shape[0])]


def _read(
    folder: TensorFolder,
    name: str,
    composition: Composition,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    block: int | None,
) -> Tensor:
    """Read rows and columns (of a vector, rows) of a stored tensor, or of a block, in the parameter's orientation."""
    dims = len(composition.shape)
    order = slice(None, None, -1) if composition.turns else slice(dims)
    offsets, sizes = offsets[order], sizes[order]
    if block is None:
        values = folder.read(name, offsets, sizes)
    else:
        values = folder.read(name, (block, *offsets), (1, *sizes)).squeeze(0)
    return values.t() if composition.turns else values


class _StoredInterval(NamedTuple):
    """Rows of a stored tensor, each ``step`` after the one before, and the first row's position in this rank's part."""

    start: int
    rows: int
    place: int
    step: int

    @property
    def stop(self) -> int:
        return self.start + (self.rows - 1) * self.step + 1


def _intervals_by_tensor(
    composition: Composition, rows: Sequence[Interval]
) -> dict[tuple[str, int | None], list[_StoredInterval]]:
    result: dict[tuple[str, int | None], list[_StoredInterval]] = {}
    place = 0
    for first, last in rows:
        for start, piece in zip(composition.starts, composition.pieces, strict=True):
            low, high = max(first, start), min(last, start + piece.rows)
            if low < high:
                begin = piece.start + (low - start) * piece.step
                stored = _StoredInterval(begin, high - low, place + low - first, piece.step)
                result.setdefault((piece.tensor, piece.block), []).append(stored)
        place += last - first
    return result


def _neighbours(intervals: Sequence[_StoredInterval]) -> list[list[_StoredInterval]]:
    """Group intervals that follow each other or alternate in the file, to read each group at once."""
    result: list[list[_StoredInterval]] = []
    stop = -1
    for stored in sorted(intervals):
        if stored.start <= stop:
            result[-1].append(stored)
        else:
            result.append([stored])
        stop = max(stop, stored.stop)
    return result


def _compare_files(folder: TensorFolder, groups: Groups) -> list[str]:
    """Compare tensors that stand in several files, each on one rank; see ``TensorFolder.judge_copies``. Collective."""
    if not folder.copies:
        return []
    first, step = groups.stage * groups.tp.size() + groups.tp.rank(), groups.num_stages * groups.tp.size()
    own = agree(lambda: folder.differing_copies(first, step), group=model_groups(groups))
    what = "the tensors that differ"
    of_stages = gather_from_stages(gather_objects(own, what, group=groups.tp), what, groups)
    return folder.judge_copies(sorted(chain.from_iterable(chain.from_iterable(of_stages))))


@dataclass(frozen=True)
class BaseQuantization:
    """Quantisation of a model's linear layers, but for modules whose Hugging Face paths ``keeps`` accepts."""

    kind: Quantization
    keeps: Callable[[str], bool] = lambda path: False

    def check(self) -> None:
        """Raise ConfigError with the reason if this machine cannot quantise."""
        check_available(self.kind)


def make_room_(
    model: nn.Module,
    parts: Mapping[str, tuple[ParamShard, Composition]],
    quantization: BaseQuantization,
    where: torch.device,
) -> None:
    """Quantise the weights of linear layers, without values, and allocate those of a model on the meta device."""
    whole: Any = model
    # Do not quantise a tied output weight, nor its copy on the last stage.
    tied = getattr(whole, "output_layer", None) if whole.share_embeddings_and_output_weights else None
    owners = {
        id(layer.weight): layer for layer in model.modules() if isinstance(layer, ParallelLinear) and layer is not tied
    }
    chosen: list[tuple[ParallelLinear, ParamShard]] = []
    for shard, composition in parts.values():
        layer = owners.get(id(shard.data))
        if layer is None or any(quantization.keeps(name.removesuffix(".weight")) for name in composition.stored_shapes):
            continue
        arithmetic_of(layer.group).refuse(f"a base in {quantization.kind} has no exact sums; leave one of the two out")
        chosen.append((layer, shard))
        # Do not allocate this weight with the others.
        layer.weight = Parameter(shard.data.new_empty(0), requires_grad=False)
    if any(param.is_meta for param in model.parameters()):
        model.to_empty(device=where)
    for layer, shard in chosen:
        like = torch.empty(0, dtype=shard.dtype, device=where)
        empty = QuantizedTensor.empty(quantization.kind, shard.layout, layer.group.rank(), like)
        layer.weight = Parameter(empty, requires_grad=False)


def fill_quantized_(
    shard: ParamShard, composition: Composition, source: PretrainedFolder, names: Mapping[str, str], groups: Groups
) -> None:
    """Read and quantise one weight; called on every tensor-parallel rank."""
    weight = shard.data
    assert isinstance(weight, QuantizedTensor)

    def read() -> torch.Tensor:
        values = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        fill_shard_(shard.with_data(values), composition, source.tensors, names)
        return values

    made = quantize_shard(weight.kind, agree(read, group=groups.tp), shard.layout, groups.tp)
    weight.codes.copy_(made.codes)
    weight.scales.copy_(made.scales)
