"""A rank's parameters of a frozen model, in 16, 8 or 4 bits, and of the adapters that are trained on it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from shardwise.core.sharding import ParamLayout, holders
from shardwise.models.adapters.adapter import section_layout
from shardwise.models.adapters.config import LoraConfig
from shardwise.models.description import ModelDescription
from shardwise.nn.quantization import QUANTIZATIONS, Quantization
from shardwise.run.plan.parameters import (
    Parameter,
    StageChunk,
    StateBytes,
    buffer_elements,
    has_buffers,
    parameters_of,
    rows_of_first_rank,
    stage_chunks,
    state_bytes,
)
from shardwise.run.plan.workload import Adaptation, Mesh, Workload
from shardwise.storage.adapters.config_file import check_targets, trained_tensors
from shardwise.storage.huggingface.architectures import ARCHITECTURES
from shardwise.storage.huggingface.mapping import Composition, compose

_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
_OUTER = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass
class Adapted:
    """The parameters of one part of the model on one rank.

    Attributes:
        adapters: factors, in fp32 or wider.
        trained: parameters of the model itself that are trained.
        frozen: those that are not.
        quantized: of these, those that are kept as codes.
        ranks: sum of the ranks of all adapters.
    """

    adapters: list[Parameter] = field(default_factory=list)
    trained: list[Parameter] = field(default_factory=list)
    frozen: list[Parameter] = field(default_factory=list)
    quantized: list[Parameter] = field(default_factory=list)
    ranks: int = 0

    @property
    def learned(self) -> list[Parameter]:
        """All that is trained."""
        return [*self.trained, *self.adapters]


def base_of(model: ModelDescription, adaptation: Adaptation) -> ModelDescription:
    """The model with adapters: embedding and output layer become two weights where an adapter changes one of them."""
    if not model.share_embeddings_and_output_weights:
        return model
    config = adaptation.config
    for key in _OUTER:
        (path,) = (name.removesuffix(".weight") for name in _composition(model, adaptation, key, (1, 1)).stored_shapes)
        if config.chooses(path, in_layers=False) or config.saves(path):
            return replace(model, share_embeddings_and_output_weights=False)
    return model


def check_adaptation(model: ModelDescription, adaptation: Adaptation) -> None:
    """Raise ConfigError for targets, patterns or modules that name nothing."""
    ((whole,),) = stage_chunks(model, 1)
    in_layers: set[str] = set()
    outer: set[str] = set()
    tensors: set[str] = set()
    for param in parameters_of(replace(model, share_embeddings_and_output_weights=False), whole, tp=1, rank=0):
        names = _composition(model, adaptation, param.name, param.shape).stored_shapes
        tensors |= names.keys()
        if len(param.shape) == 2 and param.layout is not None:
            (outer if param.name in _OUTER else in_layers).update(name.removesuffix(".weight") for name in names)
    check_targets(in_layers, outer, tensors, adaptation.config)


def adapted(
    model: ModelDescription,
    adaptation: Adaptation,
    part: StageChunk,
    params: Sequence[Parameter],
    *,
    is_tied: bool,
    tp: int,
    rank: int,
) -> Adapted:
    """Sort a rank's parameters ``params``; ``is_tied``: the base has no weight of the output layer."""
    found, config = Adapted(), adaptation.config
    for param in params:
        key = _LAYER.sub(lambda number: str(part.layers[int(number[0])]), param.name)
        shape = param.shape if param.layout is None else param.layout.global_shape
        composition = _composition(model, adaptation, key, shape)
        names = list(composition.stored_shapes)
        is_outer = key in _OUTER
        paths = [name.rpartition(".")[0] for name in names]
        chosen = {path for path in paths if config.chooses(path, in_layers=not is_outer)}
        if param.name.endswith(".bias") or param.is_matrix or is_outer:
            # A bias is one of a layer with an adapter if its weight can have one.
            is_of_matrix = any(other.name == f"{param.name[:-5]}.weight" and other.is_matrix for other in params)
            chosen = chosen if (param.layout is not None and len(shape) == 2) or is_of_matrix else set()
        else:
            chosen = set()
        if trained_tensors(config, names, chosen):
            found.trained.append(param)
        else:
            found.frozen.append(param)
            if adaptation.quantization is not None and (
                param.is_matrix or (key == "output_layer.weight" and not is_tied)
            ):
                found.quantized.append(param)
        if len(shape) == 2 and chosen and param.layout is not None:
            for path in sorted(chosen):
                r = config.at(path).r
                found.ranks += r
                found.adapters += _factors(param, param.layout, composition, f"{path}.weight", r, config, tp, rank)
    return found


def _composition(model: ModelDescription, adaptation: Adaptation, key: str, shape: tuple[int, ...]) -> Composition:
    return compose(ARCHITECTURES[adaptation.architecture].table, key, shape, model.heads)


def _factors(
    param: Parameter,
    layout: ParamLayout,
    composition: Composition,
    tensor: str,
    r: int,
    config: LoraConfig,
    tp: int,
    rank: int,
) -> list[Parameter]:
    rows, width = layout.global_shape
    name = f"{param.name.removesuffix('weight')}lora.{tensor.split('.')[-2]}."
    several = tp > 1
    if param.name == _OUTER[0]:
        made = [Parameter(f"{name}lora_embedding_A", (r, param.shape[0]))]
        made.append(Parameter(f"{name}lora_embedding_B", (width, r), is_of_heads=several))
        lengths = Parameter(f"{name}lora_magnitude_vector", (width,), is_of_heads=several)
    elif layout.dim == 1:
        made = [Parameter(f"{name}lora_A", (r, param.shape[1]))]
        made.append(Parameter(f"{name}lora_B", (rows, r), is_of_heads=several))
        lengths = Parameter(f"{name}lora_magnitude_vector", (rows,), is_of_heads=several)
    else:
        own = [
            torch.arange(start, start + piece.rows)
            for start, piece in zip(composition.starts, composition.pieces, strict=True)
            if piece.tensor == tensor
        ]
        section = section_layout(torch.cat(own), layout, r)
        shared = sum(stop - start for (start, stop), ranks in holders(section).items() if len(ranks) > 1)
        local = section.local_size(rank)
        made = [Parameter(f"{name}lora_A", (r, width), is_partial=True)]
        made.append(Parameter(f"{name}lora_B", (local, r), num_shared=shared * r))
        lengths = Parameter(f"{name}lora_magnitude_vector", (local,), num_shared=shared)
    return [*made, lengths] if config.use_dora else made


def quantized_bytes(kind: Quantization, layout: ParamLayout, rank: int) -> int:
    """Bytes of a rank's part of a weight that is kept as codes, with its scales."""
    rows, columns = layout.local_shape(rank)
    form = QUANTIZATIONS[kind]
    codes = rows * -(-columns // form.per_byte)
    if form.block is None:
        return codes + 4 * rows
    runs = layout.intervals[rank] if layout.dim == 1 else ((0, columns),)
    blocks = {block for start, stop in runs for block in range(start // form.block, -(-stop // form.block))}
    # Scales, and of each column which is its.
    return codes + 4 * rows * len(blocks) + 4 * columns


def adapted_state(workload: Workload, mesh: Mesh, parts: Sequence[Adapted], rank: int) -> StateBytes:
    """The state of a rank with adapters; ``state_bytes`` is that of a model that is trained whole."""
    adaptation, e = workload.adaptation, workload.element_bytes
    assert adaptation is not None
    adapters = [param for part in parts for param in part.adapters]
    trained = [param for part in parts for param in part.trained]
    wide = replace(workload, element_bytes=max(4, e), has_masters=False)
    of_adapters, of_base = state_bytes(wide, mesh, adapters), state_bytes(workload, mesh, trained)
    gradients = of_adapters.gradients + of_base.gradients
    if has_buffers(workload, mesh) and not mesh.splits_state:
        gradients = wide.element_bytes * buffer_elements([*trained, *adapters], mesh.dp)
    held = 0
    for part in parts:
        codes = {param.name for param in part.quantized}
        for param in part.frozen:
            if param.name in codes:
                assert adaptation.quantization is not None
                assert param.layout is not None
                held += quantized_bytes(adaptation.quantization, param.layout, rank)
            else:
                held += e * (rows_of_first_rank(param, mesh.dp) if mesh.shards_fully else param.numel)
        # The model keeps the first values of its trained parameters.
        held += e * sum(param.numel for param in part.trained)
    return StateBytes(
        held + of_adapters.weights + of_base.weights,
        gradients,
        of_adapters.masters + of_base.masters,
        of_adapters.optimizer + of_base.optimizer,
    )
