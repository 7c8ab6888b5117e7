"""Adapters on a whole model, by the names that Hugging Face gives its layers."""

import contextlib
from collections.abc import Collection, Iterator, Set
from typing import Any

from torch import nn

from shardwise.core.communication.agreement import agree
from shardwise.core.errors import ConfigError
from shardwise.core.initialization import draw_seed, part_seeded
from shardwise.core.topology.view import model_groups
from shardwise.models.adapters.config import LoraConfig
from shardwise.models.adapters.lora_embedding import LoraEmbedding
from shardwise.models.adapters.lora_layers import LoraLayer, LoraLinear
from shardwise.models.transformer_model import TransformerModel
from shardwise.nn import VocabEmbedding
from shardwise.storage.adapters.sites import Site, all_paths, all_tensors, outer_paths, sites_of
from shardwise.storage.adapters.targets import check_targets, chosen_paths, trained_tensors
from shardwise.storage.adapters.trained import base_parameters, check_trainable, originals, train_, trained_of
from shardwise.storage.huggingface.architectures import Architecture


def add_lora_(model: TransformerModel, config: LoraConfig, architecture: Architecture) -> None:
    """Give a model adapters and freeze all else but what the config trains, in place. Collective over its ranks.

    Initial values depend on the state of PyTorch's default generator and on the layer's name, so they are the same on
    any number of ranks and stages. ``B`` is 0 (of an embedding ``A``), so the model computes what it did.

    Args:
        model: a built model, without adapters. If the embedding and the output layer are one weight, and one of them
            gets an adapter or is trained, they are two afterwards.
        config: rank, strength and targets.
        architecture: the architecture whose names the targets are.

    Raises:
        ConfigError: a target that the model lacks, or a model that has adapters already.
    """
    check_without_adapters(model)
    in_layers, outer = all_paths(model, architecture), outer_paths(model, architecture)
    tensors = all_tensors(model, architecture)
    check_targets(in_layers, outer, tensors, config)
    chosen = chosen_paths(config, in_layers, outer)
    add_adapters_(model, config, architecture, chosen, trained_tensors(config, tensors, chosen))


def check_without_adapters(model: TransformerModel) -> None:
    """Raise ConfigError, on every rank, if a stage of a model has adapters."""

    def check() -> None:
        if any(True for _ in lora_layers(model)):
            raise ConfigError("the model has adapters already; merge them or remove them first")

    agree(check, group=model_groups(model.groups))


def add_adapters_(
    model: TransformerModel,
    config: LoraConfig,
    architecture: Architecture,
    chosen: Collection[str],
    trained: Set[str],
) -> None:
    """``add_lora_`` at the paths ``chosen``, with the tensors ``trained`` of the base model; both are of all stages.

    Raises:
        ConfigError: the model has adapters already, or a tensor cannot be trained by itself.
    """
    check_without_adapters(model)
    agree(
        lambda: check_trainable(base_parameters(model, architecture), trained, chosen), group=model_groups(model.groups)
    )
    outer = outer_paths(model, architecture)
    if model.ties_weights and any(path in chosen or f"{path}.weight" in trained for path in outer):
        model.untie_()
    parameters = base_parameters(model, architecture)
    together: dict[int, list[Site]] = {}
    for site in sites_of(model, architecture):
        if site.path in chosen:
            together.setdefault(id(site.layer), []).append(site)
    model.requires_grad_(False)
    seed = draw_seed()
    for sites in together.values():
        with part_seeded(seed, sites[0].path):
            _add(sites, config)
    _number(model)
    train_(model, parameters, trained)


def _number(model: TransformerModel) -> None:
    """Tell every layer with adapters its place in the model, so that stages draw the same random numbers."""
    parts: list[Any] = list(model.block.layers)
    for part in parts:
        for layer in lora_layers(part):
            layer.layer_number = part.layer_number
    if model.post_process and model.classification is None:
        for layer in lora_layers(model.output_layer):
            layer.layer_number = model.config.num_layers + 1


def _add(sites: list[Site], config: LoraConfig) -> None:
    """Give one layer its adapters."""
    layer = sites[0].layer
    if isinstance(layer, VocabEmbedding):
        LoraEmbedding.add(layer, config.at(sites[0].path), sites[0].name)
        return
    sections, paths = {site.name: site.section for site in sites}, {site.name: site.path for site in sites}
    LoraLinear.add(layer, config, sections, paths)


def lora_layers(model: nn.Module) -> Iterator[LoraLayer]:
    """The layers that have adapters."""
    return (module for module in model.modules() if isinstance(module, LoraLayer))


def merge_lora_(model: nn.Module) -> None:
    """Add every adapter's product to its weight, in place, so that the model costs what it did without them.

    What else was trained is the model's own then too.
    """
    for layer in lora_layers(model):
        layer.merge_()
    trained_of(model).merged = True


def unmerge_lora_(model: nn.Module) -> None:
    """Take the products out of the weights again, in place; a weight comes back up to one rounding."""
    for layer in lora_layers(model):
        layer.unmerge_()
    trained_of(model).merged = False


def remove_lora_(model: nn.Module) -> None:
    """Take all adapters away, in place; what is merged stays in the weights, and what is frozen stays frozen.

    What else was trained goes back to what it was, unless it is merged.
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
    """Within, adapters that are not merged take no part: the model computes what it did without them.

    What else is trained has the values that it had, too.
    """
    before = [(layer, layer.lora_enabled) for layer in lora_layers(model)]
    for layer, _ in before:
        layer.lora_enabled = False
    try:
        with originals(model):
            yield
    finally:
        for layer, enabled in before:
            layer.lora_enabled = enabled
