"""Parameters of the base model that are trained beside adapters: biases, and modules that are trained whole."""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import ConfigError
from shardwise.core.sharding import ParamLayout
from shardwise.core.sharding.balanced import first_row, is_sharded, local_rows
from shardwise.models.adapters.lora_layers import LoraColumn
from shardwise.models.transformer.heads import Heads
from shardwise.models.transformer_model import TransformerModel
from shardwise.nn.quantization import QuantizedTensor
from shardwise.storage.huggingface.architectures import Architecture
from shardwise.storage.huggingface.mapping import Composition, compose


@dataclass(frozen=True)
class BaseParameter:
    """A parameter of the base model.

    Attributes:
        owner, name: the module that has it, and its name there.
        layout: where each rank's part lies.
        composition: the tensors of Hugging Face's that it is made of.
    """

    owner: nn.Module
    name: str
    layout: ParamLayout
    composition: Composition

    @property
    def param(self) -> nn.Parameter:
        """The parameter as it is now: what splits a model may replace it."""
        return self.owner.get_parameter(self.name)

    @torch.no_grad()
    def fill_(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        """Write whole tensors of Hugging Face's, all of the parameter's or some, into this rank's part."""
        values, given = torch.zeros(self.layout.global_shape), torch.zeros(self.layout.global_shape, dtype=torch.bool)
        values = values.to(next(iter(tensors.values())).dtype)
        for start, piece in zip(self.composition.starts, self.composition.pieces, strict=True):
            if piece.tensor in tensors:
                stored = tensors[piece.tensor].t() if self.composition.turns else tensors[piece.tensor]
                values[start : start + piece.rows] = stored[piece.start : piece.start + piece.rows]
                given[start : start + piece.rows] = True
        param = self.param
        given, values = (self.layout.take(each, rank).to(param.device) for each in (given, values))
        param.copy_(torch.where(given, values.to(param.dtype), param))


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter that is trained, or some rows of it.

    Attributes:
        base: the parameter.
        tensors: the tensors in it that are trained.
        original: this rank's part as it was before.
    """

    base: BaseParameter
    tensors: tuple[str, ...]
    original: Tensor

    @torch.no_grad()
    def exchange(self, values: Tensor | None = None) -> Tensor:
        """Write values of this rank's part into the parameter, the original ones if None; returns those before."""
        param: Tensor = self.base.param
        values = self.original if values is None else values
        if is_sharded(param):
            param = local_rows(self.base.param)
            if values.size(0) != param.size(0):
                values = values.narrow(0, first_row(self.base.param), param.size(0))
        before = param.detach().clone()
        param.copy_(values)
        return before


@dataclass
class Trained:
    """What is trained of a model itself.

    Attributes:
        parameters: of this stage.
        merged: it belongs to the model now, and is not taken out.
    """

    parameters: list[TrainedParameter] = field(default_factory=list)
    merged: bool = False


def trained_of(model: nn.Module) -> Trained:
    """What is trained of a model itself beside its adapters; nothing where it has none."""
    found: Any = getattr(model, "lora_trained", None)
    return Trained() if found is None else found


def base_parameters(model: TransformerModel, architecture: Architecture) -> list[BaseParameter]:
    """The parameters of a model without adapters, those of this stage."""
    owners = {
        id(param): (module, name)
        for module in model.modules()
        for name, param in module.named_parameters(recurse=False)
    }
    heads, table = Heads(*model.config.heads), architecture.table_of(model.classification)
    return [
        BaseParameter(*owners[id(shard.data)], shard.layout, compose(table, key, shard.layout.global_shape, heads))
        for key, shard in model.sharded_state_dict().items()
        if id(shard.data) in owners
    ]


def check_trainable(parameters: list[BaseParameter], tensors: Set[str], modules: Collection[str]) -> None:
    """Raise ConfigError for a weight of which only a part is to be trained whole.

    Args:
        parameters: of this stage.
        tensors: what is to be trained.
        modules: paths of layers with adapters, of whose biases a part will do.
    """
    for base in parameters:
        within = list(base.composition.stored_shapes)
        if isinstance(base.param, QuantizedTensor) and not tensors.isdisjoint(within):
            raise ConfigError(
                f"{within[0]} is in {base.param.kind}, which cannot be trained; leave it out, or load the model "
                "with it as it is"
            )
        others = [name for name in within if name not in tensors]
        if not others or len(others) == len(within):
            continue
        if base.name == "bias" and any(name.rpartition(".")[0] in modules for name in within):
            continue
        one = next(name for name in within if name in tensors)
        raise ConfigError(
            f"modules_to_save names {one.rpartition('.')[0]}, which is one parameter with "
            f"{', '.join(name.rpartition('.')[0] for name in others)} here; name these too"
        )


def train_(model: TransformerModel, parameters: list[BaseParameter], tensors: Collection[str]) -> None:
    """Train what the tensors name, in place: adapters are there already."""
    trained = Trained()
    for base in parameters:
        chosen = tuple(name for name in base.composition.stored_shapes if name in tensors)
        if not chosen:
            continue
        base.param.requires_grad_(True)
        trained.parameters.append(TrainedParameter(base, chosen, base.param.detach().clone()))
        if len(chosen) < len(base.composition.stored_shapes):
            assert isinstance(base.owner, LoraColumn)
            rows = torch.zeros(base.layout.global_shape, dtype=torch.bool)
            for start, piece in zip(base.composition.starts, base.composition.pieces, strict=True):
                rows[start : start + piece.rows] = piece.tensor in chosen
            rank = base.owner.group.rank()
            base.owner.lora_bias_rows = base.layout.take(rows, rank).to(base.param.device)
    plain: Any = model
    plain.lora_trained = trained


@contextlib.contextmanager
def originals(model: nn.Module) -> Iterator[None]:
    """Within, what is trained of the model itself has the values that it had before, unless it is merged."""
    trained = trained_of(model)
    taken = [] if trained.merged else [(each, each.exchange()) for each in trained.parameters]
    try:
        yield
    finally:
        for each, values in taken:
            each.exchange(values)
