"""The parameters of one rank, by the layouts that the layers are made by."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwise.core.sharding import ParamLayout, holders, stage_layers
from shardwise.models.description import ModelDescription
from shardwise.models.transformer.heads import split_heads


@dataclass(frozen=True)
class Parameter:
    """A rank's part of a parameter.

    Attributes:
        name: within the model.
        shape: of this rank's part.
        is_matrix: a linear layer's weight in a transformer layer, which Muon updates.
        is_partial: with sequence parallelism its gradient is a sum over the tensor-parallel ranks.
        is_of_heads: it is so in any case, since each rank applies it to its own heads.
        num_shared: elements, of all ranks, that several of them hold: copies of key-value heads.
        is_copy: of a weight that is another stage's too.
        layout: where this rank's part of a linear layer's parameter, or of an embedding, lies; None of what is whole.
    """

    name: str
    shape: tuple[int, ...]
    is_matrix: bool = False
    is_partial: bool = False
    is_of_heads: bool = False
    num_shared: int = 0
    is_copy: bool = False
    layout: ParamLayout | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Part:
    """What a rank holds of the model: a pipeline stage, or one of its chunks.

    Attributes:
        layers: of the model, counted from 0.
        is_first: the embedding is here.
        is_last: final norm, output layer and loss are here.
    """

    layers: range
    is_first: bool
    is_last: bool


def parts_of(model: ModelDescription, pp: int, virtual_stages: int = 1) -> tuple[tuple[Part, ...], ...]:
    """``[stage][chunk]``, the parts of the model.

    Raises:
        ConfigError: fewer layers than parts.
    """
    stages = stage_layers(model.num_layers, pp, num_chunks=virtual_stages)
    return tuple(
        tuple(
            Part(layers, stage == 0 and chunk == 0, stage == pp - 1 and chunk == virtual_stages - 1)
            for chunk, layers in enumerate(chunks)
        )
        for stage, chunks in enumerate(stages)
    )


@lru_cache(maxsize=1024)
def parameters_of(model: ModelDescription, part: Part, *, tp: int, rank: int) -> tuple[Parameter, ...]:
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


def _parameters(model: ModelDescription, part: Part, split: _Split) -> Iterator[Parameter]:
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
