"""Distribution of a model's layers over pipeline stages, as Megatron writes it: ``"Et*2|t*3|tL"``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from shardwise.megatron.core import parallel_state
from shardwise.megatron.core.enums import LayerType
from shardwise.megatron.errors import AssertedConfigError
from shardwise.megatron.surface import offer

_BY_LETTER = {"E": LayerType.embedding, "t": LayerType.decoder, "m": LayerType.mtp, "L": LayerType.loss}
_REPEATED = re.compile(r"\(([^()]*)\)\*(\d+)|(.)\*(\d+)")
_LONGEST = 100_000


class PipelineParallelLayerLayout:
    """The layers of each part of a model.

    Args:
        layout: for each part of the model in order (that of chunk ``c`` on stage ``p`` is number
            ``c * pipeline_model_parallel_size + p``), a list of ``LayerType`` or their names. Or a string: ``|`` ends a
            part, ``E``, ``t``, ``m`` and ``L`` are embedding, decoder, mtp and loss, ``x*n`` and ``(xy|)*n`` repeat,
            and commas are ignored.
        pipeline_model_parallel_size: number of stages.

    Attributes:
        input_data: the argument ``layout``.
        pipeline_model_parallel_size, virtual_pipeline_model_parallel_size: numbers of stages, and of chunks on each.
        layout: ``[stage][chunk]``, lists of ``LayerType``.
        flatten_layout: all layers in the order of the model.

    Raises:
        AssertedConfigError: another form, or a number of parts that the stages do not divide.
    """

    def __init__(self, layout: str | list[Any], pipeline_model_parallel_size: int) -> None:
        self.input_data = layout
        parts = self.parse_str_to_list(layout) if isinstance(layout, str) else list(map(_layers_of, layout))
        p = self.pipeline_model_parallel_size = pipeline_model_parallel_size
        if not parts or len(parts) % p:
            raise AssertedConfigError(
                f"pipeline_model_parallel_layout {self!r} has {len(parts)} parts, which {p} pipeline stages do not "
                "divide; give each stage as many, which may be empty"
            )
        self.virtual_pipeline_model_parallel_size = len(parts) // p
        self.layout = [parts[stage::p] for stage in range(p)]
        self.flatten_layout = [layer for part in parts for layer in part]

    def __repr__(self) -> str:
        return str(self.input_data)

    def validate_layer_layout(self, num_layers: int, mtp_num_layers: int | None) -> bool:
        """Raise AssertedConfigError unless the layout is that of a model; return False, as without ``mtp`` layers.

        A model has the embedding, ``num_layers`` decoder layers and the loss, in this order.
        """
        expected = [LayerType.embedding, *[LayerType.decoder] * num_layers, LayerType.loss]
        if mtp_num_layers or self.flatten_layout != expected:
            found = ", ".join(f"{self.flatten_layout.count(kind)} {kind.name}" for kind in LayerType)
            raise AssertedConfigError(
                f"pipeline_model_parallel_layout {self!r} has {found}; here it must have the embedding, {num_layers} "
                "decoder layers (num_layers) and the loss, in this order"
            )
        return False

    def stage_layers(self, layer_type: LayerType = LayerType.decoder) -> tuple[tuple[range, ...], ...]:
        """Return the layers of a type of each chunk of each stage, ``[stage][chunk]``, counted from 0."""
        p, v = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
        ends = [0, *accumulate(self.layout[part % p][part // p].count(layer_type) for part in range(p * v))]
        parts = [range(*ends[part : part + 2]) for part in range(p * v)]
        return tuple(tuple(parts[stage::p]) for stage in range(p))

    def get_layer_id_list(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> list[int]:
        """Return the layers of a type of a stage (None: this rank's) or of its chunk, counted from 0 over the model."""
        return list(self._chunk(layer_type, vp_stage, pp_rank))

    def get_num_layers_to_build(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Return the number of the layers of ``get_layer_id_list``."""
        return len(self._chunk(layer_type, vp_stage, pp_rank))

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Return the number of layers of a type before those of ``get_layer_id_list``."""
        return self._chunk(layer_type, vp_stage, pp_rank).start

    def _chunk(self, layer_type: LayerType, vp_stage: int | None, pp_rank: int | None) -> range:
        stage = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
        chunks = self.stage_layers(layer_type)[stage]
        if vp_stage is None and len(chunks) > 1:
            raise AssertedConfigError(f"each stage has {len(chunks)} chunks; give vp_stage")
        return chunks[vp_stage or 0]

    @staticmethod
    def from_str(layout: str, pipeline_model_parallel_size: int) -> PipelineParallelLayerLayout:
        """Make a layout from a string."""
        return PipelineParallelLayerLayout(layout, pipeline_model_parallel_size)

    @staticmethod
    def get_num_stages_from_str(layout: str) -> int:
        """Return the number of parts in a string, over all stages."""
        return len(PipelineParallelLayerLayout.parse_str_to_list(layout))

    @staticmethod
    def parse_str_to_list(layout_str: str) -> list[list[LayerType]]:
        """Return the layers of each part in a string; raise AssertedConfigError for other letters."""
        text = layout_str.replace(",", "")
        while (found := _REPEATED.search(text)) is not None:
            group, times, letter, number = found.groups()
            what, count = (group, int(times)) if times else (letter, int(number))
            if len(text) + len(what) * count > _LONGEST:
                raise AssertedConfigError(f"pipeline_model_parallel_layout {layout_str!r} has over {_LONGEST} layers")
            text = text[: found.start()] + what * count + text[found.end() :]
        unknown = set(text) - {*_BY_LETTER, "|"}
        if unknown:
            raise AssertedConfigError(
                f"pipeline_model_parallel_layout {layout_str!r} has {', '.join(sorted(map(repr, unknown)))}; it may "
                f"have {', '.join(_BY_LETTER)} for layers, | between parts, and *n after a letter or (...)"
            )
        return [[_BY_LETTER[letter] for letter in part] for part in text.split("|")]


def _layers_of(part: Any) -> list[LayerType]:
    def found() -> Iterator[LayerType]:
        for layer in part:
            name = layer.strip().lower() if isinstance(layer, str) else str(getattr(layer, "name", layer))
            if name not in LayerType.__members__:
                raise AssertedConfigError(
                    f"pipeline_model_parallel_layout has the layer {layer!r}; it must be one of "
                    f"{', '.join(LayerType.__members__)}"
                )
            yield LayerType[name]

    if not isinstance(part, list):
        raise AssertedConfigError(f"pipeline_model_parallel_layout has the part {part!r}; it must be a list of layers")
    return list(found())


offer(globals())
