"""Adapters on a whole model, by the names that Hugging Face gives its linear layers."""

import contextlib
import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.huggingface.architectures import Architecture
from shardwise.huggingface.mapping import Heads, compose
from shardwise.initialization import draw_seed, part_seeded
from shardwise.layers import ColumnLinear, RowLinear
from shardwise.lora.config import ALL_LINEAR, LoraConfig
from shardwise.lora.layers import LoraAdapter, LoraLinear
from shardwise.models.transformer_model import TransformerModel


@dataclass(frozen=True)
class Site:
    """A linear layer of Hugging Face's, and where ours has it.

    Attributes:
        path: its module's path in Hugging Face's model, such as ``model.layers.0.self_attn.q_proj``.
        layer: the layer of ours that holds it.
        section: for each of its output rows the row of ``layer``'s output; None if they are the same.
        transposed: Hugging Face stores the weight as ``[in, out]``.
    """

    path: str
    layer: ColumnLinear | RowLinear
    section: Tensor | None
    transposed: bool

    @property
    def name(self) -> str:
        """The last part of the path, by which ``layer`` knows its adapter."""
        return self.path.rpartition(".")[2]

    @property
    def adapter(self) -> LoraAdapter | None:
        """The adapter that is there."""
        if not isinstance(self.layer, LoraLinear) or self.name not in self.layer.lora:
            return None
        adapter = self.layer.lora[self.name]
        assert isinstance(adapter, LoraAdapter)
        return adapter


def sites_of(model: TransformerModel, architecture: Architecture) -> list[Site]:
    """Every linear layer of the model's transformer layers, those of this pipeline stage, in order.

    Args:
        model: any GPT or BERT.
        architecture: the architecture whose names its layers have.

    Raises:
        ConfigError: the architecture has no such layers.
    """
    layers: Iterable[Any] = model.block.layers
    return [site for layer in layers for site in _sites_of_layer(model, layer, layer.layer_number - 1, architecture)]


def all_paths(model: TransformerModel, architecture: Architecture) -> set[str]:
    """The paths of the linear layers of all pipeline stages."""
    first, numbers = model.block.layers[0], range(model.config.num_layers)
    return {site.path for number in numbers for site in _sites_of_layer(model, first, number, architecture)}


def layers_without_adapters(model: TransformerModel, architecture: Architecture) -> dict[str, str]:
    """The paths of the embeddings and the output layer, which cannot have adapters, and what each is."""
    parts = {
        "embedding.word_embeddings.weight": "the embedding",
        "embedding.position_embeddings.weight": "the embedding of positions",
        "output_layer.weight": "the output layer",
    }
    heads = Heads(*model.config.heads)
    found = {}
    for key, what in parts.items():
        with contextlib.suppress(ConfigError):
            for tensor in compose(architecture.table, key, (1, 1), heads).stored_shapes:
                found[tensor.removesuffix(".weight")] = what
    return found


def add_lora_(model: TransformerModel, config: LoraConfig, architecture: Architecture) -> None:
    """Give a model adapters and freeze all else, in place.

    Initial values depend on the state of PyTorch's default generator and on the layer's name, so they are the same on
    any number of ranks and stages. ``B`` is 0, so the model computes what it did.

    Args:
        model: a built model, without adapters.
        config: rank, strength and targets.
        architecture: the architecture whose names the targets are.

    Raises:
        ConfigError: a target that the model lacks, or a model that has adapters already.
    """
    check_targets(all_paths(model, architecture), config, layers_without_adapters(model, architecture))
    add_adapters_(model, config, [site for site in sites_of(model, architecture) if config.chooses(site.path)])


def check_targets(paths: Iterable[str], config: LoraConfig, others: Mapping[str, str]) -> None:
    """Check what the targets and patterns name.

    Args:
        paths: the linear layers of all stages that can have adapters.
        config: whose targets they are.
        others: layers that cannot have adapters, and what each is.

    Raises:
        ConfigError: a target that names none of ``paths``, or one of the ``others``; a pattern of no chosen layer.
    """
    paths = list(paths)
    names = sorted({path.rpartition(".")[2] for path in paths})
    known = ", ".join(names)
    targets = config.target_modules
    for target in [targets] if isinstance(targets, str) else targets:
        if target == ALL_LINEAR:
            continue
        alone = dataclasses.replace(config, target_modules=targets if isinstance(targets, str) else (target,))
        other = next((f"{what} ({path})" for path, what in others.items() if alone.chooses(path)), None)
        if other is not None:
            raise ConfigError(f"adapters on {other} are not supported, and {target!r} names it; choose among {known}")
        if not any(map(alone.chooses, paths)):
            near = difflib.get_close_matches(target, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            if isinstance(targets, str):
                hint = f"; a string is a regular expression of whole paths; ({target!r},) is a name" if near else ""
            raise ConfigError(f"the model has no linear layer {target!r} to adapt{hint}; it has {known}")
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, name):
            one = dataclasses.replace(config, r=1, lora_alpha=0.0, rank_pattern={pattern: 2}, alpha_pattern={})
            if not any(one.chooses(path) and one.at(path).r == 2 for path in paths):
                raise ConfigError(f"{name} has {pattern!r}, which names no layer with an adapter; it has {known}")


def add_adapters_(model: TransformerModel, config: LoraConfig, chosen: Iterable[Site]) -> None:
    """``add_lora_`` at given sites.

    Raises:
        ConfigError: the model has adapters already.
    """
    if any(True for _ in lora_layers(model)):
        raise ConfigError("the model has adapters already; merge them or remove them first")
    together: dict[int, list[Site]] = {}
    for site in chosen:
        together.setdefault(id(site.layer), []).append(site)
    model.requires_grad_(False)
    seed = draw_seed()
    for sites in together.values():
        sections, paths = {site.name: site.section for site in sites}, {site.name: site.path for site in sites}
        with part_seeded(seed, sites[0].path):
            LoraLinear.add(sites[0].layer, config, sections, paths)


def lora_layers(model: nn.Module) -> Iterator[LoraLinear]:
    """The layers that have adapters."""
    return (module for module in model.modules() if isinstance(module, LoraLinear))


def merge_lora_(model: nn.Module) -> None:
    """Add every adapter's product to its weight, in place, so that the model costs what it did without them."""
    for layer in lora_layers(model):
        layer.merge_()


def unmerge_lora_(model: nn.Module) -> None:
    """Take the products out of the weights again, in place; a weight comes back up to one rounding."""
    for layer in lora_layers(model):
        layer.unmerge_()


def remove_lora_(model: nn.Module) -> None:
    """Take all adapters away, in place; what is merged stays in the weights, and what is frozen stays frozen."""
    for layer in list(lora_layers(model)):
        layer.remove()


@contextlib.contextmanager
def lora_disabled(model: nn.Module) -> Iterator[None]:
    """Within, adapters that are not merged take no part: the model computes what it did without them."""
    before = [(layer, layer.lora_enabled) for layer in lora_layers(model)]
    for layer, _ in before:
        layer.lora_enabled = False
    try:
        yield
    finally:
        for layer, enabled in before:
            layer.lora_enabled = enabled


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
