"""Adapters of a whole model, by Hugging Face's names of layers, and base parameters that are trained with them."""

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.core.communication.agreement import agree
from shardwise.core.errors import ConfigError
from shardwise.core.initialization import draw_seed, part_seeded
from shardwise.core.sharding import ParamLayout
from shardwise.core.sharding.balanced import first_row, is_sharded, local_rows
from shardwise.core.topology import gather_from_stages, model_groups
from shardwise.models.adapters.config import LoraConfig
from shardwise.models.adapters.lora_embedding import LoraEmbedding
from shardwise.models.adapters.lora_experts import LoraExperts, LoraRouter, check_experts
from shardwise.models.adapters.lora_layers import LoraColumn, LoraLayer, LoraLinear
from shardwise.models.adapters.trained_rows import TrainedRows, TrainedRowsColumn, TrainedRowsEmbedding
from shardwise.models.experts.moe import ExpertWeights
from shardwise.models.experts.router import Router
from shardwise.models.transformer_model import TransformerModel
from shardwise.nn import ColumnLinear, VocabEmbedding
from shardwise.nn.quantization import QuantizedTensor
from shardwise.storage.adapters.config_file import check_targets, rows_to_train, trained_tensors, with_parameters
from shardwise.storage.adapters.targets import AdapterTarget, adapter_targets, all_paths, outer_paths
from shardwise.storage.huggingface.architectures import Architecture
from shardwise.storage.huggingface.mapping import Composition, compose


def all_tensors(model: TransformerModel, architecture: Architecture) -> set[str]:
    """Return Hugging Face's names of all weights and biases, also tied ones. Collective over the stages."""
    own = {name for base in base_parameters(model, architecture) for name in base.composition.stored_shapes}
    own |= {f"{path}.weight" for path in outer_paths(model, architecture)}
    return {name for names in gather_from_stages(own, "the names of tensors", model.groups) for name in names}


def add_lora_(model: TransformerModel, config: LoraConfig, architecture: Architecture) -> None:
    """Add adapters to a model in place, and freeze all other parameters that the config does not train.

    Collective over the model's ranks. Initial values depend on the state of PyTorch's default generator and on the
    layer's name, so they are the same for any number of ranks and stages. ``B`` (of an embedding, ``A``) is 0, so the
    output does not change.

    Args:
        model: a model without adapters; untied if the embedding or the output layer gets an adapter or is trained.
        config: rank, scale and targets.
        architecture: the architecture that defines the names of targets.

    Raises:
        ConfigError: the model lacks a target, or already has adapters.
    """
    check_without_adapters(model)
    paths, tensors = all_paths(model, architecture), all_tensors(model, architecture)
    config = with_parameters(config, paths, architecture.module_targets)
    check_targets(paths, tensors, config)
    chosen = paths.chosen(config)
    add_adapters_(model, config, architecture, chosen, trained_tensors(config, tensors, chosen))


def check_without_adapters(model: TransformerModel) -> None:
    """Raise ConfigError on every rank if any stage of a model has adapters."""

    def check() -> None:
        if any(True for _ in lora_layers(model)):
            raise ConfigError("the model has adapters already; merge them or remove them first")

    agree(check, group=model_groups(model.groups))


def add_adapters_(
    model: TransformerModel, config: LoraConfig, architecture: Architecture, chosen: Collection[str], trained: Set[str]
) -> None:
    """Add adapters to a model without any at the paths ``chosen``, and train the base tensors ``trained``."""

    outer = outer_paths(model, architecture)
    is_tied = model.share_embeddings_and_output_weights
    rows = dict[str, tuple[int, ...]]()

    def check() -> None:
        rows.update(rows_to_train(config, list(outer), model.vocab_size, is_tied=is_tied))
        check_trainable(base_parameters(model, architecture), trained, chosen, architecture)
        for target in adapter_targets(model, architecture):
            if target.path in chosen and isinstance(target.layer, ExpertWeights):
                check_experts(target.layer, config.at(target.path))
            is_output = target.layer is getattr(model, "output_layer", None)
            if target.path in chosen and is_output and config.lora_dropout > 0 and model.splits_context:
                # It may run on the tokens with a label alone, in whose order its mask is drawn.
                raise ConfigError(
                    f"lora_dropout is {config.lora_dropout}, {target.path} has an adapter, and ranks share samples "
                    "(cp); leave this target out, or set lora_dropout to 0 or cp to 1"
                )

    agree(check, group=model_groups(model.groups))
    if is_tied and any(path in chosen or f"{path}.weight" in trained for path in outer):
        model.untie_()
    parameters = base_parameters(model, architecture)
    together: dict[int, list[AdapterTarget]] = {}
    for target in adapter_targets(model, architecture):
        if target.path in chosen:
            together.setdefault(id(target.layer), []).append(target)
    model.requires_grad_(False)
    seed = draw_seed()
    for targets in together.values():
        first, sections = targets[0], {target.name: target.section for target in targets}
        with part_seeded(seed, first.path):
            if isinstance(first.layer, VocabEmbedding):
                LoraEmbedding.add(first.layer, config.at(first.path), first.name)
            elif isinstance(first.layer, Router):
                LoraRouter.add(first.layer, config.at(first.path))
            elif isinstance(first.layer, ExpertWeights):
                LoraExperts.add(first.layer, {target.name: config.at(target.path) for target in targets}, sections)
            else:
                LoraLinear.add(first.layer, config, sections, {target.name: target.path for target in targets})
    _train_rows_(model, {outer[path][0]: ids for path, ids in rows.items()}, config)
    for layer in lora_layers(model):
        # Files have the patterns too.
        layer.lora_config = config
    # Layers with adapters get their number in the model, so that stages draw the same random numbers.
    parts: list[tuple[Any, int]] = [(part, part.layer_number) for part in cast(Iterable[Any], model.block.layers)]
    if model.post_process:
        parts.append((model.output_layer, model.config.num_layers + 1))
    for part, number in parts:
        for layer in lora_layers(part):
            layer.layer_number = number
    train_(model, parameters, trained)


def _train_rows_(model: TransformerModel, rows: Mapping[str, Sequence[int]], config: LoraConfig) -> None:
    """Train rows of the embedding and the output layer, given by their names in the model, in place."""
    modules = dict(model.named_modules())
    embedding, output = modules.get("embedding.word_embeddings"), modules.get("output_layer")
    shared: TrainedRows | None = None
    of_embedding = rows.get("embedding.word_embeddings", ())
    if of_embedding and isinstance(embedding, VocabEmbedding):
        shared = TrainedRowsEmbedding.add(embedding, of_embedding, config)
    is_tied = model.share_embeddings_and_output_weights
    of_output = (shared or of_embedding) if is_tied else rows.get("output_layer", ())
    if of_output and isinstance(output, ColumnLinear):
        TrainedRowsColumn.add(output, of_output, config)


def lora_layers(model: nn.Module) -> Iterator[LoraLayer]:
    """Yield the layers that have adapters."""
    return (module for module in model.modules() if isinstance(module, LoraLayer))


def merge_lora_(model: nn.Module) -> None:
    """Add every adapter's product to its weight in place; other trained parameters count as merged too."""
    for layer in lora_layers(model):
        layer.merge_()
    trained_of(model).merged = True


def unmerge_lora_(model: nn.Module) -> None:
    """Subtract the products from the weights in place, which restores the weights up to one rounding."""
    for layer in lora_layers(model):
        layer.unmerge_()
    trained_of(model).merged = False


def remove_lora_(model: nn.Module) -> None:
    """Remove all adapters in place. Merged products stay in the weights, and frozen parameters stay frozen.

    Other trained parameters are reset to their original values unless they are merged.
    """
    for layer in list(lora_layers(model)):
        layer.remove()
    trained = trained_of(model)
    if not trained.merged:
        for each in trained.parameters:
            each.exchange()
    plain: Any = model
    plain.lora_trained = None


@contextlib.contextmanager
def lora_disabled(model: nn.Module) -> Iterator[None]:
    """Within the context, disable unmerged adapters, and restore original values of other trained parameters."""
    before = [(layer, layer.lora_enabled) for layer in lora_layers(model)]
    for layer, _ in before:
        layer.lora_enabled = False
    try:
        with originals(model):
            yield
    finally:
        for layer, enabled in before:
            layer.lora_enabled = enabled


@dataclass(frozen=True)
class BaseParameter:
    """A parameter of the base model: its module and name, its layout, and Hugging Face's tensors in it."""

    owner: nn.Module
    name: str
    layout: ParamLayout
    composition: Composition

    @property
    def param(self) -> nn.Parameter:
        """The current parameter, because sharding a model replaces its parameters."""
        return self.owner.get_parameter(self.name)

    @torch.no_grad()
    def fill_(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        """Copy this rank's part from whole Hugging Face tensors, which may be only some of the parameter's."""
        values, given = torch.zeros(self.layout.global_shape), torch.zeros(self.layout.global_shape, dtype=torch.bool)
        values = values.to(next(iter(tensors.values())).dtype)
        for start, piece in zip(self.composition.starts, self.composition.pieces, strict=True):
            if piece.tensor in tensors:
                values[start : start + piece.rows] = self.composition.rows_of(piece, tensors[piece.tensor])
                given[start : start + piece.rows] = True
        param = self.param
        given, values = (self.layout.take(each, rank).to(param.device) for each in (given, values))
        param.copy_(torch.where(given, values.to(param.dtype), param))


@dataclass(frozen=True)
class TrainedParameter:
    """A base parameter, the names of its trained tensors, and this rank's part before training."""

    base: BaseParameter
    tensors: tuple[str, ...]
    original: Tensor

    @torch.no_grad()
    def exchange(self, values: Tensor | None = None) -> Tensor:
        """Copy values (None: the original values) to this rank's part, and return the previous values."""
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
    """The trained base parameters of this stage; if ``merged``, they keep their trained values."""

    parameters: list[TrainedParameter] = field(default_factory=list)
    merged: bool = False


def trained_of(model: nn.Module) -> Trained:
    """Return the base parameters of a model that are trained next to its adapters."""
    found: Trained | None = getattr(model, "lora_trained", None)
    return found or Trained()


def base_parameters(model: TransformerModel, architecture: Architecture) -> list[BaseParameter]:
    """Return the parameters of this stage of a model without adapters."""
    owners = {
        id(param): (module, name)
        for module in model.modules()
        for name, param in module.named_parameters(recurse=False)
    }
    table = architecture.table
    return [
        BaseParameter(
            *owners[id(shard.data)], shard.layout, compose(table, key, shard.layout.global_shape, model.config)
        )
        for key, shard in model.sharded_state_dict().items()
        if id(shard.data) in owners
    ]


def check_trainable(
    parameters: list[BaseParameter], tensors: Set[str], modules: Collection[str], architecture: Architecture
) -> None:
    """Raise ConfigError if only a part of a parameter is trained, or one that ``peft``'s files cannot hold."""
    for base in parameters:
        within = list(base.composition.stored_shapes)
        if isinstance(base.param, QuantizedTensor) and not tensors.isdisjoint(within):
            raise ConfigError(
                f"{within[0]} is in {base.param.kind}, which cannot be trained; leave it out, or load the model "
                "with it as it is"
            )
        if isinstance(base.owner, Router | ExpertWeights):
            known = architecture.parameters.values()
            other = next((name for name in within if name in tensors and _of_any_layer(name) not in known), None)
            if other is not None:
                raise ConfigError(
                    f"modules_to_save names {other.rpartition('.')[0]}, which peft's files cannot hold; leave it out, "
                    "or give experts and routers adapters (target_parameters)"
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


def _of_any_layer(name: str) -> str:
    return re.sub(r"(?<=\.layers\.)\d+(?=\.)", "{layer}", name)


def train_(model: TransformerModel, parameters: list[BaseParameter], tensors: Collection[str]) -> None:
    """Make ``tensors`` trainable in place, after adapters were added."""
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
    """Within the context, restore the original values of trained base parameters that are not merged."""
    trained = trained_of(model)
    taken = [] if trained.merged else [(each, each.exchange()) for each in trained.parameters]
    try:
        yield
    finally:
        for each, values in taken:
            each.exchange(values)
