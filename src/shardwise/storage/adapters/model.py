"""Adapters on a whole model, by the names that Hugging Face gives its layers."""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.communication.agreement import agree
from shardwise.core.errors import ConfigError
from shardwise.core.initialization import draw_seed, part_seeded
from shardwise.core.topology import gather_from_stages, model_groups
from shardwise.models.adapters.adapter import Adapter
from shardwise.models.adapters.config import LoraConfig
from shardwise.models.adapters.lora_embedding import LoraEmbedding
from shardwise.models.adapters.lora_layers import LoraLayer, LoraLinear
from shardwise.models.gpt import GPT
from shardwise.models.transformer.heads import Heads
from shardwise.models.transformer_model import TransformerModel
from shardwise.nn import ColumnLinear, RowLinear, VocabEmbedding
from shardwise.storage.adapters.config_file import check_targets, chosen_paths, trained_tensors
from shardwise.storage.adapters.trained import base_parameters, check_trainable, originals, train_, trained_of
from shardwise.storage.huggingface.architectures import Architecture
from shardwise.storage.huggingface.mapping import compose


@dataclass(frozen=True)
class Site:
    """A linear layer or embedding of Hugging Face's, and where ours has it.

    Attributes:
        path: its module's path in Hugging Face's model, such as ``model.layers.0.self_attn.q_proj``.
        layer: the layer of ours that holds it.
        section: for each of its output rows the row of ``layer``'s output; None if they are the same.
        transposed: Hugging Face stores the weight as ``[in, out]``.
        in_layers: it is of a transformer layer; else the embedding or the output layer.
    """

    path: str
    layer: ColumnLinear | RowLinear | VocabEmbedding
    section: Tensor | None
    transposed: bool
    in_layers: bool = True

    @property
    def name(self) -> str:
        """The last part of the path, by which ``layer`` knows its adapter."""
        return self.path.rpartition(".")[2]

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that is there."""
        if not isinstance(self.layer, LoraLayer) or self.name not in self.layer.lora:
            return None
        adapter = self.layer.lora[self.name]
        assert isinstance(adapter, Adapter)
        return adapter


def sites_of(model: TransformerModel, architecture: Architecture) -> list[Site]:
    """Every layer that can have an adapter, of this pipeline stage, in order.

    These are the linear layers of transformer layers and, of a GPT, the embedding and the output layer.

    Args:
        model: any GPT or BERT.
        architecture: the architecture whose names its layers have.

    Raises:
        ConfigError: the architecture has no such layers.
    """
    layers: Iterable[Any] = model.block.layers
    sites = [site for layer in layers for site in _sites_of_layer(model, layer, layer.layer_number - 1, architecture)]
    for path, (name, _) in outer_paths(model, architecture).items():
        with contextlib.suppress(AttributeError):
            found: Any = model.get_submodule(name)
            sites.append(Site(path, found, None, transposed=False, in_layers=False))
    return sites


def all_paths(model: TransformerModel, architecture: Architecture) -> set[str]:
    """The paths of the linear layers of all pipeline stages."""
    first, numbers = model.block.layers[0], range(model.config.num_layers)
    return {site.path for number in numbers for site in _sites_of_layer(model, first, number, architecture)}


def outer_paths(model: TransformerModel, architecture: Architecture) -> dict[str, tuple[str, str]]:
    """The paths of embedding and output layer of all stages: for each its name in our model, and what it is."""
    if not isinstance(model, GPT):
        return {}
    parts = {"embedding.word_embeddings": "the embedding"}
    if model.classification is None:
        parts["output_layer"] = "the output layer"
    found = {}
    for name, what in parts.items():
        with contextlib.suppress(ConfigError):
            (path,) = compose(architecture.table, f"{name}.weight", (1, 1), Heads(*model.config.heads)).stored_shapes
            found[path.removesuffix(".weight")] = name, what
    return found


def all_tensors(model: TransformerModel, architecture: Architecture) -> set[str]:
    """Hugging Face's names of all weights and biases, of all stages; those that are tied have a name each.

    Collective over the stages. The model has no adapters.
    """
    own: set[str] = set()
    for key, shard in model.sharded_state_dict().items():
        own |= compose(
            architecture.table_of(model.classification), key, shard.layout.global_shape, Heads(*model.config.heads)
        ).stored_shapes.keys()
    own |= {f"{path}.weight" for path in outer_paths(model, architecture)}
    return {name for names in gather_from_stages(own, "the names of tensors", model.groups) for name in names}


def _sites_of_layer(
    model: TransformerModel, layer: nn.Module, number: int, architecture: Architecture
) -> Iterator[Site]:
    """The sites of a layer, as those of the layer of that number, from 0."""
    heads = Heads(*model.config.heads)
    for name, linear in layer.named_modules():
        if not isinstance(linear, ColumnLinear | RowLinear):
            continue
        shape = linear.param_layouts["weight"].global_shape
        composition = compose(architecture.table, f"{model.block_name}.layers.{number}.{name}.weight", shape, heads)
        sections = {
            tensor: torch.empty(sum(piece.rows for piece in composition.pieces if piece.tensor == tensor)).long()
            for tensor in composition.stored_shapes
        }
        for start, piece in zip(composition.starts, composition.pieces, strict=True):
            sections[piece.tensor][piece.start : piece.start + piece.rows] = torch.arange(start, start + piece.rows)
        for tensor, section in sections.items():
            whole = torch.equal(section, torch.arange(shape[0]))
            path = tensor.removesuffix(".weight")
            yield Site(path, linear, None if whole else section, composition.transposed)


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
