"""The parameters of one rank, by the layouts of the layers, and the bytes of their weights, gradients and state."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from shardwise.core.sharding import ParamLayout, holders, stage_layers
from shardwise.models.description import ModelDescription
from shardwise.models.transformer.heads import split_heads
from shardwise.run.plan.workload import Mesh, Workload
from shardwise.training.gradients.gradients import DEFAULT_BUCKET_SIZE, place

# A number of steps for each parameter, in fp32.
_STEP_BYTES = 4


@dataclass(frozen=True)
class Parameter:
    """A rank's part of a parameter.

    Attributes:
        name: within the model.
        shape: of this rank's part.
        is_matrix: a linear layer's weight in a transformer layer, which Muon updates.
        is_partial: with sequence parallelism its gradient is a sum over the tensor-parallel ranks.
        is_of_heads: its gradient is such a sum in any case, since each rank applies it to its own heads.
        num_shared: elements, of all ranks, that several of them hold: copies of key-value heads.
        is_copy: of a weight that another stage has too.
        layout: of a split parameter; None if it is whole.
    """

    name: str
    shape: tuple[int, ...]
    is_matrix: bool = False
    is_partial: bool = False
    is_of_heads: bool = False
    num_shared: int = 0
    is_copy: bool = False
    layout: ParamLayout | None = None

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class StageChunk:
    """A rank's part of the model: a pipeline stage, or one of its chunks.

    Attributes:
        layers: of the model, counted from 0.
        is_first: it has the embedding.
        is_last: it has the final norm, the output layer and the loss.
    """

    layers: range
    is_first: bool
    is_last: bool


def stage_chunks(model: ModelDescription, pp: int, virtual_stages: int = 1) -> tuple[tuple[StageChunk, ...], ...]:
    """``[stage][chunk]``, the parts of the model.

    Raises:
        ConfigError: fewer layers than parts.
    """
    stages = stage_layers(model.num_layers, pp, num_chunks=virtual_stages)
    return tuple(
        tuple(
            StageChunk(layers, stage == 0 and chunk == 0, stage == pp - 1 and chunk == virtual_stages - 1)
            for chunk, layers in enumerate(chunks)
        )
        for stage, chunks in enumerate(stages)
    )


@lru_cache(maxsize=1024)
def parameters_of(model: ModelDescription, part: StageChunk, *, tp: int, rank: int) -> tuple[Parameter, ...]:
    """The parameters of tensor-parallel rank ``rank``, in the model's order."""
    return tuple(_parameters(model, part, _Split(tp, rank)))


@dataclass(frozen=True)
class _Split:
    tp: int
    rank: int

    def column(self, name: str, features: int, width: int, *, bias: bool, sections: int = 1) -> Iterator[Parameter]:
        layout = ParamLayout.split((features, width), 0, self.tp, stride=sections)
        yield from self.linear(name, layout, bias)

    def row(
        self, name: str, features: int, width: int, *, bias: bool, sizes: list[int] | None = None
    ) -> Iterator[Parameter]:
        layout = ParamLayout.split((features, width), 1, self.tp, sizes=sizes)
        yield Parameter(f"{name}.weight", layout.local_shape(self.rank), is_matrix=True, layout=layout)
        if bias:
            yield Parameter(f"{name}.bias", (features,), is_partial=True)

    def linear(self, name: str, layout: ParamLayout, bias: bool) -> Iterator[Parameter]:
        rows, width = layout.local_shape(self.rank)
        shared = sum(stop - start for (start, stop), ranks in holders(layout).items() if len(ranks) > 1)
        yield Parameter(f"{name}.weight", (rows, width), is_matrix=True, num_shared=shared * width, layout=layout)
        if bias:
            yield Parameter(
                f"{name}.bias", (rows,), num_shared=shared, layout=replace(layout, global_shape=layout.global_shape[:1])
            )


def _norm(name: str, model: ModelDescription, width: int | None = None) -> Iterator[Parameter]:
    width = width or model.hidden_size
    yield Parameter(f"{name}.weight", (width,), is_partial=True)
    if model.normalization == "LayerNorm":
        yield Parameter(f"{name}.bias", (width,), is_partial=True)


def _parameters(model: ModelDescription, part: StageChunk, split: _Split) -> Iterator[Parameter]:
    h, v = model.hidden_size, model.vocab_size
    layout = ParamLayout.split((v, h), 0, split.tp)
    vocabulary = layout.local_shape(split.rank)
    if part.is_first:
        yield Parameter("embedding.word_embeddings.weight", vocabulary, layout=layout)
        if model.position_embedding_type == "learned_absolute":
            yield Parameter(
                "embedding.position_embeddings.weight", (model.position_offset + model.max_sequence_length, h)
            )
        if model.embedding_layernorm:
            yield from _norm("embedding.layernorm", model)
    for index in range(len(part.layers)):
        yield from _layer(f"decoder.layers.{index}.", model, split)
    if part.is_last:
        if model.final_layernorm:
            yield from _norm("decoder.final_layernorm", model)
        tied, head = model.share_embeddings_and_output_weights, model.classification
        if head is not None:
            yield Parameter("classifier.weight", (head.num_labels, h))
            if head.bias:
                yield Parameter("classifier.bias", (head.num_labels,))
        elif not (tied and part.is_first):
            yield Parameter("output_layer.weight", vocabulary, is_copy=tied, layout=layout)


def _layer(prefix: str, model: ModelDescription, split: _Split) -> Iterator[Parameter]:
    h, d, f = model.hidden_size, model.kv_channels, model.ffn_hidden_size
    sections = 2 if model.gated_linear_unit else 1
    heads = split_heads(model.num_attention_heads, model.num_query_groups, split.tp)
    is_before, is_after = model.norm_position in ("pre", "sandwich"), model.norm_position != "pre"
    attention, mlp = f"{prefix}self_attention.", f"{prefix}mlp."
    if is_before:
        yield from _norm(f"{prefix}input_layernorm", model)
    yield from split.linear(f"{attention}linear_qkv", heads.qkv_layout((h,), d), model.qkv_bias)
    if model.qk_layernorm:
        counts = {"q_layernorm": model.num_attention_heads, "k_layernorm": model.num_query_groups}
        for name, count in counts.items():
            width = d * count if model.qk_layernorm_over_heads else d
            for param in _norm(f"{attention}{name}", model, width):
                yield replace(param, is_partial=False, is_of_heads=True)
    sizes = [n * d for n in heads.query_sizes()]
    yield from split.row(
        f"{attention}linear_proj", h, model.num_attention_heads * d, bias=model.attention_bias, sizes=sizes
    )
    if is_after:
        yield from _norm(f"{prefix}post_self_attn_layernorm", model)
    if is_before:
        yield from _norm(f"{prefix}pre_mlp_layernorm", model)
    yield from split.column(f"{mlp}linear_fc1", sections * f, h, bias=model.mlp_bias, sections=sections)
    yield from split.row(f"{mlp}linear_fc2", h, f, bias=model.mlp_bias)
    if is_after:
        yield from _norm(f"{prefix}post_mlp_layernorm", model)


@dataclass(frozen=True)
class StateBytes:
    """The bytes that one rank holds from step to step.

    Attributes:
        weights: parameters; with zero in buffers.
        gradients: whole, in their buffers if there are any.
        masters: fp32 copies of parameters in 16 bits.
        optimizer: its state of each parameter.
    """

    weights: int
    gradients: int
    masters: int
    optimizer: int


def state_bytes(workload: Workload, mesh: Mesh, params: Sequence[Parameter]) -> StateBytes:
    """The state of a rank with the parameters ``params``, all of which are trained."""
    e, wide = workload.element_bytes, workload.gradient_bytes
    # Of AdamW two moments and a number of steps for each parameter, of Muon's matrices one moment.
    matrices = [param for param in params if param.is_matrix and workload.optimizer == "muon"]
    steps = len(params) - len(matrices)
    if mesh.shards_fully:
        # The first data-parallel rank has the most; weights of 16 bits are kept in fp32.
        elements = sum(rows_of_first_rank(param, mesh.dp) for param in params)
        kinds = 2 * elements - sum(rows_of_first_rank(param, mesh.dp) for param in matrices)
        return StateBytes(wide * elements, wide * elements, 0, wide * kinds + _STEP_BYTES * steps)
    if mesh.splits_state:
        return _shared_out(workload, mesh, params)
    elements = sum(param.numel for param in params)
    gradients = buffer_elements(params, mesh.dp) if has_buffers(workload, mesh) else elements
    kinds = 2 * elements - sum(param.numel for param in matrices)
    return StateBytes(
        weights=e * elements,
        gradients=wide * gradients,
        masters=4 * elements if workload.has_masters else 0,
        optimizer=wide * kinds + _STEP_BYTES * steps,
    )


def _shared_out(workload: Workload, mesh: Mesh, params: Sequence[Parameter]) -> StateBytes:
    """With zero, of the data-parallel rank that has the most."""
    wide, shares = workload.gradient_bytes, shares_of(workload, mesh, params)
    is_muon = workload.optimizer == "muon"
    masters = [4 * owned if workload.has_masters else 0 for owned in shares.owned]
    kinds = [
        wide * (2 * owned - (matrices if is_muon else 0))
        for owned, matrices in zip(shares.owned, shares.matrices, strict=True)
    ]
    most = max(range(mesh.dp), key=lambda rank: masters[rank] + kinds[rank])
    steps = sum(not (is_muon and param.is_matrix) for param in params)
    return StateBytes(
        weights=workload.element_bytes * (shares.scattered + shares.whole),
        gradients=wide * (shares.scattered + shares.whole),
        masters=masters[most],
        optimizer=kinds[most] + _STEP_BYTES * steps,
    )


def has_buffers(workload: Workload, mesh: Mesh) -> bool:
    """True if gradients lie in buffers: they are reduced, or summed in another dtype than the parameters'."""
    return (mesh.dp > 1 or workload.has_masters) and not mesh.shards_fully


def buffer_elements(params: Sequence[Parameter], dp: int) -> int:
    """Elements of the buffers of gradients, padding included."""
    return _buffer_elements(tuple(param.numel for param in reversed(params)), dp)


@lru_cache(maxsize=1024)
def _buffer_elements(sizes: tuple[int, ...], dp: int) -> int:
    return place(sizes, bucket_size=DEFAULT_BUCKET_SIZE, world_size=dp).bounds[-1] if sizes else 0


def rows_of_first_rank(param: Parameter, dp: int) -> int:
    """Elements of a parameter on the first rank, which has the most, when ranks share out its rows."""
    rows, *rest = param.shape
    return -(-rows // dp) * math.prod(rest)


def units_of(
    workload: Workload, part: StageChunk, params: Sequence[Parameter]
) -> tuple[list[Parameter], list[list[Parameter]]]:
    """The groups that fsdp gathers: the rest of a part, which stays whole, and its layers and a separate embedding."""
    tied = workload.model.share_embeddings_and_output_weights
    rest: list[Parameter] = []
    units: dict[str, list[Parameter]] = {}
    for param in params:
        words = param.name.split(".")
        if words[1] == "layers":
            units.setdefault(words[2], []).append(param)
        elif words[0] == "embedding" and not tied:
            units.setdefault("embedding", []).append(param)
        else:
            rest.append(param)
    return rest, list(units.values())


def gathered_bytes(
    workload: Workload, mesh: Mesh, parts: Sequence[StageChunk], params: Sequence[Sequence[Parameter]]
) -> int:
    """With fsdp, bytes that are whole at one time: the rest of each part, the largest unit, accumulated gradients."""
    whole = largest = 0
    for part, own in zip(parts, params, strict=True):
        rest, units = units_of(workload, part, own)
        whole += sum(param.numel for param in rest)
        largest = max([largest, *(sum(param.numel for param in unit) for unit in units)])
    accumulated = 0
    if mesh.num_micro_batches(workload) > 1:
        accumulated = workload.gradient_bytes * sum(param.numel for own in params for param in own)
    return workload.element_bytes * (whole + largest) + accumulated


@dataclass(frozen=True)
class Shares:
    """Buffers of gradients, after which parameters lie too.

    Attributes:
        scattered: elements, padding included, whose sums go to their owners.
        whole: elements, padding included, whose sums go to every rank, as they are summed over other ranks too.
        owned: by data-parallel rank, elements without padding.
        matrices: by data-parallel rank, those of matrices.
    """

    scattered: int
    whole: int
    owned: tuple[int, ...]
    matrices: tuple[int, ...]


def shares_of(workload: Workload, mesh: Mesh, params: Sequence[Parameter]) -> Shares:
    """The buffers of a rank with the parameters ``params``."""
    owned, matrices = [0] * mesh.dp, [0] * mesh.dp
    ends = []
    for is_whole in (False, True):
        # As the buffers have them: the last first.
        indices = [
            index
            for index in reversed(range(len(params)))
            if is_summed_elsewhere(workload, mesh, params[index]) is is_whole
        ]
        if not indices:
            ends.append(0)
            continue
        placement = place(
            [params[index].numel for index in indices], bucket_size=DEFAULT_BUCKET_SIZE, world_size=mesh.dp
        )
        ends.append(placement.bounds[-1])
        for number, places in enumerate(placement.buckets):
            first = placement.bounds[number]
            size = (placement.bounds[number + 1] - first) // mesh.dp
            for each in places:
                param, start = params[indices[each]], placement.starts[each] - first
                stop = start + param.numel
                for rank in range(start // size, -(-stop // size)) if size else ():
                    count = min(stop, (rank + 1) * size) - max(start, rank * size)
                    owned[rank] += count
                    matrices[rank] += count if param.is_matrix else 0
    return Shares(ends[0], ends[1], tuple(owned), tuple(matrices))


def is_summed_elsewhere(workload: Workload, mesh: Mesh, param: Parameter) -> bool:
    """True if a gradient is summed over tensor-parallel ranks or stages too."""
    if mesh.tp > 1 and (param.is_of_heads or param.num_shared or (param.is_partial and mesh.splits_sequence)):
        return True
    return mesh.pp > 1 and is_tied(workload, param)


def is_tied(workload: Workload, param: Parameter) -> bool:
    """True for a weight that embedding and output layer have in common."""
    is_embedding = param.name == "embedding.word_embeddings.weight"
    return param.is_copy or (workload.model.share_embeddings_and_output_weights and is_embedding)
