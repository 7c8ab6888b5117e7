"""Weights that are quantised as they are read, so that a rank never holds more than one of them as it is stored."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from shardwise.core.communication.agreement import agree
from shardwise.core.errors import ConfigError
from shardwise.core.sharding import ParamShard
from shardwise.core.topology import Groups
from shardwise.nn import arithmetic_of
from shardwise.nn.parallel_linear import ParallelLinear
from shardwise.nn.quantization import Quantization, QuantizedTensor, check_available, quantize_shard
from shardwise.storage.huggingface.filling import fill_shard_
from shardwise.storage.huggingface.mapping import Composition
from shardwise.storage.huggingface.pretrained_folder import PretrainedFolder


@dataclass(frozen=True)
class BaseQuantization:
    """What becomes of a model's linear layers, the output layer included if it has a weight of its own.

    Attributes:
        kind: "int8", with a scale for each row, or "nf4", with one for 64 columns.
        keeps: whether a module, by its Hugging Face path, stays as it is; it may be trained.
    """

    kind: Quantization
    keeps: Callable[[str], bool] = lambda path: False

    def check(self) -> None:
        """Raise ConfigError, with the reason, if this machine cannot do it."""
        check_available(self.kind)


def make_room_(
    model: nn.Module,
    parts: Mapping[str, tuple[ParamShard, Composition]],
    quantization: BaseQuantization,
    where: torch.device,
) -> None:
    """Allocate a model that was made on the meta device, its linear layers' weights quantised and without values.

    Raises:
        ConfigError: the weights are of fp64, or of a model that sums over parts.
    """
    whole: Any = model
    # A weight that is the embedding's too stays as that is, also where the last stage has a copy of it.
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
        # It must not be allocated with the others.
        layer.weight = Parameter(shard.data.new_empty(0), requires_grad=False)
    model.to_empty(device=where)
    for layer, shard in chosen:
        like = torch.empty(0, dtype=shard.dtype, device=where)
        empty = QuantizedTensor.empty(quantization.kind, shard.layout, layer.group.rank(), like)
        layer.weight = Parameter(empty, requires_grad=False)


def fill_quantized_(
    shard: ParamShard,
    composition: Composition,
    source: PretrainedFolder,
    names: Mapping[str, str],
    groups: Groups,
) -> None:
    """Read and quantise one weight; every tensor-parallel rank calls."""
    weight = shard.data
    assert isinstance(weight, QuantizedTensor)

    def read() -> torch.Tensor:
        values = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        fill_shard_(shard.with_data(values), composition, source.tensors, names)
        if not values.isfinite().all():
            stored = ", ".join(composition.stored_shapes)
            raise ConfigError(f"{source.path} has values that are not finite in {stored}; they cannot be quantised")
        return values

    made = quantize_shard(weight.kind, agree(read, group=groups.tp), shard.layout, groups.tp)
    weight.codes.copy_(made.codes)
    weight.scales.copy_(made.scales)
