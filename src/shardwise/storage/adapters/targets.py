"""The parts of a model that can have adapters, by their names in Hugging Face's model."""

import contextlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import ConfigError
from shardwise.core.topology import gather_from_stages
from shardwise.core.validation import on_host
from shardwise.models.adapters.adapter import Adapter
from shardwise.models.adapters.lora_layers import LoraLayer
from shardwise.models.adapters.trained_rows import TrainedRows, TrainedRowsLayer
from shardwise.models.config import ModelConfig
from shardwise.models.experts.moe import ExpertWeights
from shardwise.models.experts.router import Router
from shardwise.models.gpt import GPT
from shardwise.models.transformer_model import TransformerModel
from shardwise.nn import ColumnLinear, RowLinear, VocabEmbedding
from shardwise.storage.adapters.config_file import Paths
from shardwise.storage.huggingface.architectures import Architecture
from shardwise.storage.huggingface.mapping import Composition, compose


@dataclass(frozen=True)
class AdapterTarget:
    """A linear layer or embedding of Hugging Face's model, or a ``parameter``, and the layer of ours that contains it.

    ``section`` has for each output row its row in the output of ``layer`` or of one of its experts; None if all rows
    are the same. ``transposed`` weights are stored as ``[in, out]``. The embedding and the output layer are not
    ``in_layers``.
    """

    path: str
    layer: ColumnLinear | RowLinear | VocabEmbedding | Router | ExpertWeights
    section: Tensor | None
    transposed: bool
    in_layers: bool = True
    parameter: str | None = None

    @property
    def name(self) -> str:
        """Name of the adapter in ``layer``: that of the parameter, or the last part of the path."""
        return self.parameter or self.path.rpartition(".")[2]

    @property
    def adapter(self) -> Adapter | None:
        """The target's adapter, or None."""
        if not isinstance(self.layer, LoraLayer) or self.name not in self.layer.lora:
            return None
        adapter = self.layer.lora[self.name]
        assert isinstance(adapter, Adapter)
        return adapter

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of matrices, and the output and input features of each."""
        layer = self.layer
        if isinstance(layer, VocabEmbedding):
            return 1, layer.embedding_dim, layer.num_embeddings
        if isinstance(layer, ExpertWeights):
            assert self.parameter is not None
            rows, hidden = layer.param_layouts[self.parameter].global_shape
            rows //= layer.num
            return (layer.num, rows, hidden) if self.parameter == "up" else (layer.num, hidden, rows)
        if isinstance(layer, Router):
            return 1, *layer.param_layouts["weight"].global_shape  # type: ignore[return-value]
        return 1, layer.out_features if self.section is None else len(self.section), layer.in_features


def adapter_targets(model: TransformerModel, architecture: Architecture) -> list[AdapterTarget]:
    """Return everything on this pipeline stage that can have an adapter, in order; raise ConfigError if unsupported."""
    layers: Iterable[Any] = model.block.layers
    targets = [
        target for layer in layers for target in _targets_of_layer(model, layer, layer.layer_number - 1, architecture)
    ]
    for path, (name, _) in outer_paths(model, architecture).items():
        with contextlib.suppress(AttributeError):
            found: Any = model.get_submodule(name)
            targets.append(AdapterTarget(path, found, None, transposed=False, in_layers=False))
    return targets


def all_paths(model: TransformerModel, architecture: Architecture) -> Paths:
    """Return the paths of everything that can have an adapter, on all pipeline stages. Collective over the stages."""
    first, numbers = model.block.layers[0], range(model.config.num_layers)
    if model.config.experts is None:
        # All layers have the same parts.
        targets = [target for number in numbers for target in _targets_of_layer(model, first, number, architecture)]
    else:
        targets = [target for target in adapter_targets(model, architecture) if target.in_layers]
    own = [(target.path, target.parameter is not None) for target in targets]
    every = {each for stage in gather_from_stages(own, "the paths of layers", model.groups) for each in stage}
    return Paths(
        in_layers={path for path, is_parameter in every if not is_parameter},
        outer=outer_paths(model, architecture).keys(),
        parameters={path for path, is_parameter in every if is_parameter},
    )


def outer_paths(model: TransformerModel, architecture: Architecture) -> dict[str, tuple[str, str]]:
    """Map the paths of the embedding and the output layer to their names in our model and in messages."""
    return named_outer_paths(architecture) if isinstance(model, GPT) else {}


def named_outer_paths(architecture: Architecture) -> dict[str, tuple[str, str]]:
    """Return ``outer_paths`` of the GPTs of an architecture; the embedding comes first."""
    parts = {"embedding.word_embeddings": "the embedding", "output_layer": "the output layer"}
    found, outer = {}, ModelConfig(num_layers=1, hidden_size=1, num_attention_heads=1)
    for name, what in parts.items():
        with contextlib.suppress(ConfigError):
            (path,) = compose(architecture.table, f"{name}.weight", (1, 1), outer).stored_shapes
            found[path.removesuffix(".weight")] = name, what
    return found


def trained_rows(model: TransformerModel, architecture: Architecture) -> dict[str, list[TrainedRows]]:
    """Return the trained rows on this stage by the paths of their weights; with tied weights both are the embedding's.

    The last stage has copies of the rows of a tied weight.
    """
    outer, found = outer_paths(model, architecture), dict[str, list[TrainedRows]]()
    for path, (name, _) in outer.items():
        layer = dict(model.named_modules()).get(name)
        if isinstance(layer, TrainedRowsLayer) and not layer.lora_shared:
            found.setdefault(next(iter(outer)) if model.share_embeddings_and_output_weights else path, []).append(
                layer.trained_rows
            )
    return found


def paths_in_files(chosen: Collection[str], parameters: Collection[str]) -> dict[str, str]:
    """Map the paths that have adapters to the paths of the adapters in ``peft``'s files.

    That of a parameter is its module's, whose wrapper holds the factors. If both weights of experts are adapted, the
    wrapper of the first is inside that of the second.
    """
    found = {}
    for path in chosen:
        module, _, name = path.rpartition(".")
        inside = ".base_layer" if name == "gate_up_proj" and f"{module}.down_proj" in chosen else ""
        found[path] = f"{module}{inside}" if path in parameters else path
    return found


def _rows_of_expert(composition: Composition) -> Tensor | None:
    """Return, for each row of an expert in the stored tensor, its row here; None if all rows are the same."""
    pieces = [(at, piece) for at, piece in zip(composition.starts, composition.pieces, strict=True) if piece.block == 0]
    section = torch.empty(sum(piece.rows for _, piece in pieces), dtype=torch.int64)
    for start, piece in pieces:
        section[piece.start :: piece.step][: piece.rows] = torch.arange(start, start + piece.rows)
    return None if torch.equal(section, torch.arange(len(section))) else section


@on_host
def _targets_of_layer(
    model: TransformerModel, layer: nn.Module, number: int, architecture: Architecture
) -> list[AdapterTarget]:
    """Return the targets of a layer, with the paths that they have in layer ``number``, from 0."""
    targets = list[AdapterTarget]()
    for name, module in layer.named_modules():
        if isinstance(module, Router | ExpertWeights):
            for parameter in module.param_layouts:
                key = f"{model.block_name}.layers.{{layer}}.{name}.{parameter}"
                path = architecture.parameters.get(key)
                if path is not None:
                    shape = module.param_layouts[parameter].global_shape
                    section = _rows_of_expert(compose(architecture.table, key, shape, model.config))
                    path = path.replace("{layer}", str(number))
                    targets.append(AdapterTarget(path, module, section, transposed=False, parameter=parameter))
        if not isinstance(module, ColumnLinear | RowLinear):
            continue
        shape = module.param_layouts["weight"].global_shape
        composition = compose(
            architecture.table, f"{model.block_name}.layers.{number}.{name}.weight", shape, model.config
        )
        sections = {
            tensor: torch.empty(sum(piece.rows for piece in composition.pieces if piece.tensor == tensor)).long()
            for tensor in composition.stored_shapes
        }
        for start, piece in zip(composition.starts, composition.pieces, strict=True):
            sections[piece.tensor][piece.start : piece.start + piece.rows] = torch.arange(start, start + piece.rows)
        for tensor, section in sections.items():
            whole = torch.equal(section, torch.arange(shape[0]))
            path = tensor.removesuffix(".weight")
            # A name that peft takes for experts.
            if path.rpartition(".")[2] not in architecture.module_targets:
                targets.append(AdapterTarget(path, module, None if whole else section, composition.transposed))
    return targets
