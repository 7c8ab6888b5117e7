"""The stack of transformer layers on one pipeline stage, and the norm after the last layer of the model."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError, TopologyError
from shardwise.core.initialization import part_seeded
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharded_state import sharded_state_dict
from shardwise.core.sharding import ParamShard, ShardedOffset
from shardwise.core.topology import Groups
from shardwise.kernels.dispatch import agree_on_kernels
from shardwise.models.config import ModelConfig
from shardwise.models.recomputation import Recomputation
from shardwise.models.transformer.layer import HiddenToHidden, TransformerLayer, TransformerLayerSpec
from shardwise.nn import arithmetic_of, parameter_device
from shardwise.nn.recompute import recomputed


def layers_of_this_stage(
    config: ModelConfig, pp_group: ProcessGroup | None = None, vp_stage: int | None = None
) -> range:
    """Return the layers of this rank's stage, or of its chunk ``vp_stage``, counted from 0 over the model.

    Raises:
        TopologyError: there are several stages, but no group, or a group of another size.
        ConfigError: ``vp_stage`` is missing, or is not one of the chunks.
    """
    stages = config.stage_layers()
    if len(stages) > 1 and (pp_group is None or pp_group.size() != len(stages)):
        found = "no pipeline-parallel group" if pp_group is None else f"a group of {pp_group.size()} ranks"
        raise TopologyError(
            f"pipeline_model_parallel_size is {len(stages)}, and there is {found}; give the model's groups a group "
            "'pp' of that size"
        )
    chunks = stages[0 if pp_group is None or len(stages) == 1 else pp_group.rank()]
    if vp_stage is None and len(chunks) > 1:
        raise ConfigError(f"each stage has {len(chunks)} chunks; give vp_stage, from 0 to {len(chunks) - 1}")
    chunk = vp_stage or 0
    if not 0 <= chunk < len(chunks):
        raise ConfigError(f"vp_stage is {vp_stage}; it must be from 0 to {len(chunks) - 1}")
    return chunks[chunk]


_Layer = TypeVar("_Layer")


def spans_of(layers: Sequence[_Layer], recompute: Recomputation) -> Iterator[tuple[list[_Layer], bool]]:
    """Yield runs of the layers of a stage's chunk, and whether each run is recomputed as one."""
    number = recompute.num_layers if recompute.granularity == "full" else 0
    if number and recompute.method == "uniform":
        for first in range(0, len(layers), number):
            yield list(layers[first : first + number]), True
    else:
        for place, layer in enumerate(layers):
            yield [layer], place < number


_built: ContextVar[Container[int] | None] = ContextVar("built", default=None)


@contextlib.contextmanager
def only_layers(numbers: Container[int]) -> Iterator[None]:
    """In the block each ``TransformerBlock`` builds only these of its layers, counted from 0.

    A plan rehearses few of the layers that are alike. Recomputation stays as it is for each of them.
    """
    token = _built.set(numbers)
    try:
        yield
    finally:
        _built.reset(token)


class TransformerBlock(HiddenToHidden):
    """Consecutive layers, and the norm after the model's last layer.

    Args:
        config, spec, tp_group, groups: as for ``TransformerLayer``.
        layers: layers of the model in this block, counted from 0; all if None.
        post_process: whether this is the end of the model, with the final norm (``config.final_layernorm``).
        seed: source of each layer's seed, so that a layer's initial values do not depend on its stage. If None, all
            layers draw from the default generators in turn.

    Attributes:
        before_span: callback before each of ``spans_of`` and after the last, with the hidden states, if not None.
        layers: indexed from 0 on every stage; ``layer_number`` of each is its number in the model, from 1.
        final_layernorm: final norm or None.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: TransformerLayerSpec,
        tp_group: ProcessGroup,
        *,
        layers: range | None = None,
        post_process: bool = True,
        seed: int | None = None,
        groups: Groups | None = None,
    ) -> None:
        super().__init__()
        self.tp_group = tp_group
        self._sequence_parallel = config.sequence_parallel
        self._num_layers = config.num_layers
        self._recompute = config.recompute
        self.before_span: Callable[[Tensor], None] | None = None
        self._norm = arithmetic_of(tp_group).norm(tp_group, sequence_parallel=config.sequence_parallel)
        self.layers = nn.ModuleList()
        own: Sequence[int] = range(config.num_layers) if layers is None else layers
        if (wanted := _built.get()) is not None:
            first = own[: self._recompute.num_layers]
            own, first = ([index for index in each if index in wanted] for each in (own, first))
            if self._recompute.method == "block":
                self._recompute = dataclasses.replace(self._recompute, num_layers=max(1, len(first)))
        for index in own:
            with part_seeded(seed, *_part(index + 1)):
                self.layers.append(TransformerLayer(config, spec, index + 1, self.tp_group, groups))
        self.final_layernorm: nn.Module | None = None
        if post_process and config.final_layernorm:
            with parameter_device(self.tp_group, on_cpu=config.use_cpu_initialization):
                self.final_layernorm = spec.norm(config)

    def seeded_parts(self) -> Iterator[tuple[tuple[object, ...], nn.Module]]:
        """Yield each layer, after the values that are mixed into its seed."""
        for layer in self.layers:
            assert isinstance(layer, TransformerLayer)
            yield _part(layer.layer_number), layer

    def forward(self, hidden: Tensor, *, sequence: SequenceView | None = None, **attention: Any) -> Tensor:
        """Map ``[s, b, h]`` (``[s/t, b, h]`` with sequence parallelism) to the same shape.

        All keyword arguments are those of ``TransformerLayer.forward``.
        """
        for line in agree_on_kernels(hidden, group=self.tp_group):
            if self.tp_group.rank() == 0:
                warnings.warn(line, stacklevel=2)
        for layers, is_recomputed in spans_of(list(self.layers), self._recompute):
            if self.before_span is not None:
                self.before_span(hidden)
            # With a cache, a recomputation would append to it again.
            run = recomputed if is_recomputed and attention.get("cache") is None else _call
            hidden = run(_through, layers, hidden, sequence=sequence, **attention)
        if self.before_span is not None:
            self.before_span(hidden)
        if self.final_layernorm is not None:
            hidden = self._norm(self.final_layernorm, hidden)
        return hidden

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[ShardedOffset] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ParamShard]:
        """Like ``ShardedModule.sharded_state_dict``; names contain the layer's number in the whole model, from 0.

        If ``non_homogeneous_layers`` in ``metadata`` is False, the tensors of all layers are stacked: keys have no
        number, and each entry is one of ``num_layers`` along a leading axis.
        """
        entries: dict[str, ParamShard] = {}
        for layer in self.layers:
            assert isinstance(layer, TransformerLayer)
            name = f"{prefix}layers.{layer.layer_number - 1}."
            key, offsets = name, tuple(sharded_offsets)
            if (metadata or {}).get("non_homogeneous_layers") is False:
                key, offsets = f"{prefix}layers.", (*offsets, (len(offsets), layer.layer_number - 1, self._num_layers))
            part = sharded_state_dict(layer, key, offsets, metadata, group=self.tp_group)
            entries |= {name + entry.removeprefix(key): shard for entry, shard in part.items()}
        if self.final_layernorm is not None:
            name = f"{prefix}final_layernorm."
            entries |= sharded_state_dict(self.final_layernorm, name, sharded_offsets, metadata, group=self.tp_group)
        return entries


def _through(layers: Sequence[nn.Module], hidden: Tensor, **keywords: Any) -> Tensor:
    for layer in layers:
        hidden = layer(hidden, **keywords)
    return hidden


def _call(function: Callable[..., Tensor], *args: Any, **keywords: Any) -> Tensor:
    return function(*args, **keywords)


def _part(layer_number: int) -> tuple[object, ...]:
    return ("layer", layer_number)
