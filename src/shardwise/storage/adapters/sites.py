"""The layers of a model that can have adapters, by the names that Hugging Face gives them."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import ConfigError
from shardwise.core.topology.view import gather_from_stages
from shardwise.models.adapters.adapter import Adapter
from shardwise.models.adapters.lora_layers import LoraLayer
from shardwise.models.gpt import GPT
from shardwise.models.transformer_model import TransformerModel
from shardwise.nn import ColumnLinear, RowLinear, VocabEmbedding
from shardwise.storage.huggingface.architectures import Architecture
from shardwise.storage.huggingface.mapping import Heads, compose


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
