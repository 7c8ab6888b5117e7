"""Adapter files of the ``peft`` library: ``adapter_config.json`` and ``adapter_model.safetensors``.

Factors are stored whole, under Hugging Face's names of linear layers, so that ``peft`` and Shardwise can both read and
write them, at any number of ranks.
"""

import json
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from shardwise.core.atomic_files import write_atomically
from shardwise.core.communication.agreement import agree
from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.core.json_text import first_of
from shardwise.core.sharded_state import gather_parameter
from shardwise.core.sharding import ParamLayout
from shardwise.core.tensor_files import StoredTensor, check_finite, read_box, read_header
from shardwise.core.topology import gather_from_stages, model_groups
from shardwise.models.adapters.config import LoraConfig
from shardwise.models.adapters.lora_layers import LoraLayer
from shardwise.models.adapters.trained_rows import ROWS
from shardwise.models.gpt import GPT
from shardwise.models.transformer_model import TransformerModel
from shardwise.nn import VocabEmbedding
from shardwise.storage.adapters.config_file import (
    CONFIG_NAME,
    Paths,
    check_saved_modules,
    config_json,
    modules_of,
    read_adapter_config,
    rows_to_train,
    trained_tensors,
    with_parameters,
)
from shardwise.storage.adapters.model import (
    add_adapters_,
    all_tensors,
    base_parameters,
    check_without_adapters,
    lora_layers,
    trained_of,
)
from shardwise.storage.adapters.targets import (
    AdapterTarget,
    adapter_targets,
    all_paths,
    named_outer_paths,
    outer_paths,
    paths_in_files,
    trained_rows,
)
from shardwise.storage.huggingface.architectures import Architecture
from shardwise.storage.huggingface.tensor_folder import weight_dtype

WEIGHTS_NAME = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_FACTORS = r"(lora_[AB])\.weight|(lora_embedding_[AB]|lora_magnitude_vector)(?:\.weight)?"
_KEY = re.compile(rf"{re.escape(_PREFIX)}(.+)\.(?:{_FACTORS})")
_ROWS_KEY = re.compile(rf"{re.escape(_PREFIX)}(.+)\.token_adapter\.({ROWS})")
# peft's wrappers add a name between a module's path and the names of its parameters.
_WRAPPED = re.compile(
    rf"{re.escape(_PREFIX)}(.+?)(?:\.((?:token_adapter\.)?base_layer|modules_to_save|original_module))?\.(weight|bias)"
)

# The name of a tensor of the base model, or the path and name of a factor.
_Place = str | tuple[str, str]


def load_adapter_(model: TransformerModel, folder: str | os.PathLike[str], architecture: Architecture) -> LoraConfig:
    """Load the adapters of a folder into a model in place, and freeze all else. Collective over the model's ranks.

    Args:
        model: a model without adapters. See ``add_lora_`` for tied weights.
        folder: folder written by ``save_adapter`` or by ``peft``'s ``save_pretrained``.
        architecture: the architecture that defines the names in the files.

    Returns:
        The configuration in the folder.

    Raises:
        CheckpointError: files are missing, damaged, or of another model; nothing has changed on any rank.
        ConfigError: the variant of LoRA or an adapted layer is not supported, or the model already has adapters.
    """
    check_without_adapters(model)
    known, paths = all_tensors(model, architecture), all_paths(model, architecture)
    found = agree(lambda: _read(Path(folder), model, architecture, known, paths), group=model_groups(model.groups))
    for name in found.replaced:
        _replace_(model, outer_paths(model, architecture)[name.rpartition(".")[0]][0], found.values[name])
    add_adapters_(model, found.config, architecture, found.paths, found.trained)
    with torch.no_grad():
        for target in adapter_targets(model, architecture):
            if (adapter := target.adapter) is not None:
                for name, layout in adapter.param_layouts.items():
                    whole = adapter.from_file(name, found.values[target.path, name])
                    adapter.get_parameter(name).copy_(layout.take(whole, adapter.group.rank()))
        for path, copies in trained_rows(model, architecture).items():
            for rows in copies:
                own = rows.param_layouts[ROWS].take(found.values[path, ROWS], rows.group.rank())
                rows.trainable_tokens_delta.copy_(own)
    for each in trained_of(model).parameters:
        each.base.fill_({name: found.values[name] for name in each.tensors}, model.tp_group.rank())
    return found.config


def save_adapter(
    model: TransformerModel,
    folder: str | os.PathLike[str],
    architecture: Architecture,
    *,
    base_model: str | None = None,
    base_vocab_size: int | None = None,
) -> None:
    """Save the adapters of a model for ``peft`` and ``load_adapter_``, with trained biases and fully trained modules.

    Collective over the model's tensor-, pipeline- and data-parallel ranks.

    Args:
        model: a model with adapters.
        folder: destination, created if missing; an adapter in it is replaced.
        architecture: the architecture that defines the names in the files.
        base_model: name or folder of the base model, stored as ``base_model_name_or_path``.
        base_vocab_size: number of ids of the base model. If the model has others, the embedding and the output layer
            are stored whole, as by ``peft``, unless the rows of all new ids are trained and stored.

    Raises:
        ConfigError: the model has no adapters, or the folder cannot be written to; raised on every rank.
        CheckpointError: a tensor is not finite; raised on every rank, and nothing is written.
    """
    pairs = [
        (target, adapter) for target in adapter_targets(model, architecture) if (adapter := target.adapter) is not None
    ]
    adapted = {target.path for target, _ in pairs}
    all_targets = all_paths(model, architecture)
    files = paths_in_files(adapted, all_targets.parameters)
    tensors = {
        _key_of(files[target.path], name): adapter.to_file(
            name, gather_parameter(adapter.get_parameter(name), layout, group=adapter.group)
        ).cpu()
        for target, adapter in pairs
        for name, layout in adapter.param_layouts.items()
    }
    for each in trained_of(model).parameters:
        whole = gather_parameter(each.base.param, each.base.layout, group=model.tp_group).cpu()
        parts = each.base.composition.to_stored(whole)
        # Tensors that share memory cannot be stored.
        tensors |= {_key_of_base(name, adapted): parts[name].clone() for name in each.tensors}
    for path, of_path in trained_rows(model, architecture).items():
        for rows in of_path:
            if not rows.param_replicas[ROWS].is_copy:
                whole = gather_parameter(rows.trainable_tokens_delta, rows.param_layouts[ROWS], group=rows.group)
                tensors[_key_of_rows(path)] = whole.cpu()
    resized = base_vocab_size is not None and model.vocab_size != base_vocab_size
    tensors |= _resized_weights(model, architecture, adapted, base_vocab_size or 0) if resized else {}
    facts = [
        (target.path, target.layer.lora_config, target.transposed)
        for target, _ in pairs
        if isinstance(target.layer, LoraLayer)
    ]
    of_stages = gather_from_stages((tensors, facts), "the adapters of each pipeline stage", model.groups)
    tensors = {key: tensor for of_stage, _ in of_stages for key, tensor in of_stage.items()}
    facts = [fact for _, of_stage in of_stages for fact in of_stage]
    if not facts:
        raise ConfigError("the model has no adapters to save")
    paths = sorted({path for path, _, _ in facts})
    lora, transposed = facts[0][1], any(transposed for _, _, transposed in facts)
    # Write full paths if names are ambiguous: BERT's heads have layers of the same names. For models with experts peft
    # reduces a pattern to the last parts of the paths that it matches.
    exact = isinstance(model, GPT) and all_targets.chosen(lora) == set(paths)
    exact &= not (isinstance(lora.target_modules, str) and architecture.module_targets)
    modules, parameters = ([path for path in paths if (path in all_targets.parameters) == is_one] for is_one in (0, 1))
    config = config_json(lora, transposed, modules, parameters, names_will_do=exact, base_model=base_model)
    config["task_type"] = "CAUSAL_LM" if isinstance(model, GPT) else None
    ranks, copies = model_groups(model.groups), model.groups.dp
    everyone = ranks if copies is None else [*ranks, copies]
    # Only one rank of the model and its data-parallel replicas writes.
    writes = all(group.rank() == 0 for group in everyone)
    agree(lambda: _write(Path(folder), config, tensors) if writes else None, group=everyone)


def _resized_weights(
    model: TransformerModel, architecture: Architecture, adapted: Collection[str], base_vocab_size: int
) -> dict[str, Tensor]:
    """Return this stage's weights of ids, by their keys, but those that are trained or whose new rows all are.

    Collective over the tensor-parallel group.
    """
    outer, tensors = outer_paths(model, architecture), dict[str, Tensor]()
    rows = rows_to_train(
        next((layer.lora_config for layer in lora_layers(model)), LoraConfig()),
        list(outer),
        model.vocab_size,
        is_tied=model.share_embeddings_and_output_weights,
    )
    new = set(range(base_vocab_size, model.vocab_size))
    trained = {name for each in trained_of(model).parameters for name in each.tensors}
    modules: dict[str, Any] = dict(model.named_modules())
    for path, (name, _) in outer.items():
        layer = modules.get(name)
        if layer is None or layer.weight is None or layer.param_replicas["weight"].is_copy:
            continue
        if f"{path}.weight" in trained or (new and new.issubset(rows.get(path, ()))):
            continue
        key = _key_of_base(f"{path}.weight", adapted)
        if path in rows:
            key = f"{_PREFIX}{path}.token_adapter.base_layer.weight"
        whole = gather_parameter(layer.weight, layer.param_layouts["weight"], group=model.tp_group)
        # Tensors that share memory cannot be stored.
        tensors[key] = whole.cpu().clone()
    return tensors


def adapters_vocab_size(folder: str | os.PathLike[str], architecture: Architecture, num_rows: int) -> int:
    """Return the number of ids of the model that a folder's adapters were trained on.

    It is that of the rows of the embedding or the output layer in the files, or of adapters on them. Without such rows
    it is ``num_rows``, that of the base model, and one more for each further id whose rows were trained alone.

    Raises:
        CheckpointError, ConfigError: as ``load_adapter_``.
    """
    config, path = read_adapter_config(folder), Path(folder) / WEIGHTS_NAME
    stored = read_header(path) if path.exists() else {}
    outer = named_outer_paths(architecture)
    for key, tensor in stored.items():
        factor, base = _KEY.fullmatch(key), _WRAPPED.fullmatch(key)
        if base is not None and base[1] in outer and base[3] == "weight":
            return tensor.shape[0]
        if factor is not None and factor[1] in outer:
            name = factor[2] or factor[3]
            if name in ("lora_B", "lora_embedding_A"):
                return tensor.shape[name == "lora_embedding_A"]
    given = config.trainable_token_indices
    ids = {each for some in (given.values() if isinstance(given, Mapping) else [given]) for each in some}
    while num_rows in ids:
        num_rows += 1
    return num_rows


def _write(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    for key, tensor in tensors.items():
        check_finite(tensor, f"tensor {key!r}")
    contents = {
        WEIGHTS_NAME: safetensors.torch.save(tensors, metadata={"format": "pt"}),
        CONFIG_NAME: (json.dumps(config, indent=2) + "\n").encode(),
    }
    new = {name: folder / f"{name}.new" for name in contents}
    try:
        # Do not touch an earlier adapter before both new files are complete.
        for name, path in new.items():
            write_atomically(path, methodcaller("write", contents[name]))
        # Remove the configuration first and write it last, so that the tensors are complete if it exists.
        (folder / CONFIG_NAME).unlink(missing_ok=True)
        for name, path in new.items():
            path.replace(folder / name)
    except OSError as error:
        raise ConfigError(f"cannot replace {str(folder / CONFIG_NAME)!r}: {error.strerror or error}") from error
    finally:
        for path in new.values():
            with suppress(OSError):
                path.unlink()


@dataclass(frozen=True)
class _Found:
    """Content of an adapter's files: paths with adapters, factors, and tensors of the base model."""

    config: LoraConfig
    # For all stages: paths with an adapter, trained tensors, and tensors that are replaced but not trained, because
    # peft also writes the weight of an embedding with an adapter.
    paths: set[str]
    trained: set[str]
    replaced: set[str]
    # For this stage: whole factors and tensors.
    values: dict[_Place, Tensor]


def _read(folder: Path, model: TransformerModel, architecture: Architecture, known: set[str], every: Paths) -> _Found:
    """Read and check a folder for a model; ``known`` and ``every`` are its tensors and paths on all stages."""
    config = with_parameters(read_adapter_config(folder), every, architecture.module_targets)
    try:
        check_saved_modules(config, modules_of([*known, *(f"{each}.weight" for each in every.outer)]))
    except ConfigError as error:
        raise ConfigError(f"{str(folder / CONFIG_NAME)!r}: {error}") from error
    path = folder / WEIGHTS_NAME
    if not path.exists():
        raise CheckpointError(f"{str(folder)!r} has no {WEIGHTS_NAME}")
    outer, all_named = outer_paths(model, architecture), every.chosen(config)
    files = paths_in_files(all_named, every.parameters)
    needed: dict[_Place, tuple[int, ...]] = {
        name: shape
        for base in base_parameters(model, architecture)
        for name, shape in base.composition.stored_shapes.items()
    }
    # A tied weight has a name for each use.
    needed |= {f"{each}.weight": (model.vocab_size or 0, model.config.hidden_size) for each in outer}
    for target in adapter_targets(model, architecture):
        needed |= {(target.path, name): shape for name, shape in _shapes(target, config).items()}
    rows = rows_to_train(config, list(outer), model.vocab_size, is_tied=model.share_embeddings_and_output_weights)
    needed |= {(name, ROWS): (len(ids), model.config.hidden_size) for name, ids in rows.items()}
    # A path in a file, and what has its adapter: all but parameters can have one in the file without being named.
    by_file = {path: path for path in every.in_layers | every.outer} | {files[path]: path for path in files}
    chosen = _by_place(
        path,
        by_file,
        known,
        needed,
        has_experts=bool(every.parameters),
        outer=outer,
        is_tied=model.share_embeddings_and_output_weights,
    )
    paths = {place[0] for place in chosen if isinstance(place, tuple) and place[1] != ROWS}
    tensors = {place for place in chosen if isinstance(place, str)}
    named = {each for each in all_named if not config.saves(each)}
    if unnamed := sorted(paths - named):
        raise CheckpointError(
            f"{str(path)!r} has adapters of {first_of(unnamed)}; by {config.choice} in {CONFIG_NAME} there are none; "
            "correct the configuration, or take these tensors out of the file"
        )
    trained = trained_tensors(config, known, paths)
    lacking = [_key_of_base(name, paths) for name in trained - tensors] + [
        _key_of(files[each], name)
        for each in named
        for name in _factors(outer.get(each, ("", ""))[0] not in ("", "output_layer"), config)
        if (each, name) not in chosen
    ]
    lacking += [_key_of_rows(name) for name in rows if (name, ROWS) not in chosen]
    if lacking or not paths:
        raise CheckpointError(f"{str(path)!r} lacks {min(lacking) if paths else 'every tensor'}")
    for name in tensors - trained:
        if name.removesuffix(".weight") not in outer:
            raise CheckpointError(
                f"{str(path)!r} has {_key_of_base(name, paths)!r}, and {CONFIG_NAME} does not say that it is trained"
            )
    values = {}
    for place, stored in chosen.items():
        if place in needed:
            values[place] = read_box(stored, [0] * len(stored.shape), stored.shape)
            check_finite(values[place], f"tensor {stored.name!r} of {path}")
    return _Found(config, paths, trained, tensors - trained, values)


def _by_place(
    path: Path,
    by_file: Mapping[str, str],
    known: Collection[str],
    needed: Mapping[_Place, tuple[int, ...]],
    *,
    has_experts: bool,
    outer: Collection[str],
    is_tied: bool,
) -> dict[_Place, StoredTensor]:
    """Return the tensors of a file by their places in the model; check the shapes of those that this stage needs."""
    chosen: dict[_Place, StoredTensor] = {}
    own = {place[0] for place in needed if isinstance(place, tuple)}
    for key, stored in read_header(path).items():
        place: _Place
        if (match := _KEY.fullmatch(key)) is not None and match[1] in by_file:
            path_here = by_file[match[1]]
            place, is_here = (path_here, match[2] or match[3]), path_here in own
        elif (match := _ROWS_KEY.fullmatch(key)) is not None and f"{match[1]}.weight" in known:
            place = match[1], match[2]
            if place not in needed:
                if is_tied:
                    # The output layer's copy of the embedding's rows.
                    continue
                raise CheckpointError(
                    f"{str(path)!r} has {key!r}, and trainable_token_indices in {CONFIG_NAME} does not name "
                    f"{match[1]}; correct the configuration, or take the tensor out of the file"
                )
            is_here = True
        elif (match := _WRAPPED.fullmatch(key)) is not None and f"{match[1]}.{match[3]}" in known:
            place = f"{match[1]}.{match[3]}"
            is_here = place in needed
            # A fully trained module may have its original weights too, and the same values under two names.
            if match[2] == "original_module" or place in chosen:
                continue
        elif has_experts and re.search(r"\.experts\.\d+\.", key):
            raise CheckpointError(
                f"{str(path)!r} has {key!r}, an adapter of one expert as peft stored it with transformers 4; open it "
                "in peft with transformers 5 and save it again"
            )
        else:
            raise CheckpointError(
                f"{str(path)!r} is of another model: it has {key!r}, for which this model has no place"
            )
        if is_here and stored.shape != (shape := needed.get(place, ())):
            of_ids = isinstance(place, str) and place.removesuffix(".weight") in outer
            if of_ids and stored.shape[1:] == shape[1:]:
                raise CheckpointError(
                    f"{str(path)!r} has {key!r} for {stored.shape[0]} ids, and this model has {shape[0]}: tokens were "
                    f"added to the adapters' model; load this one with as many (load_pretrained(..., vocab_size="
                    f"{stored.shape[0]}), which commands do for a Hugging Face folder)"
                )
            raise CheckpointError(
                f"{str(path)!r} is of another model: {key!r} has shape {list(stored.shape)}, this model needs "
                f"{list(shape)}"
            )
        weight_dtype(stored)
        chosen[place] = stored
    return chosen


@torch.no_grad()
def _replace_(model: TransformerModel, name: str, whole: Tensor) -> None:
    module: Any = dict(model.named_modules()).get(name)
    if module is None:
        return
    weight: Any = module.weight if module.weight is not None else model.shared_embedding_or_output_weight()
    layout = ParamLayout.split(whole.shape, 0, model.tp_group.size())
    weight.copy_(layout.take(whole, model.tp_group.rank()))


def _factors(is_embedding: bool, config: LoraConfig) -> tuple[str, ...]:
    names = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
    return (*names, "lora_magnitude_vector") if config.use_dora else names


def _shapes(target: AdapterTarget, config: LoraConfig) -> dict[str, tuple[int, ...]]:
    is_embedding, (number, output_size, input_size) = isinstance(target.layer, VocabEmbedding), target.sizes
    ranks = number * config.at(target.path).r
    shapes: list[tuple[int, ...]] = [(ranks, input_size), (output_size, ranks), (output_size,)]
    return dict(zip(_factors(is_embedding, config), shapes, strict=False))


def _key_of(path: str, name: str) -> str:
    """Return a factor's name in a file, to which ``peft`` does not always add ``weight``."""
    plain = name == "lora_magnitude_vector" or name.startswith("lora_embedding")
    return f"{_PREFIX}{path}.{name}" + ("" if plain else ".weight")


def _key_of_rows(path: str) -> str:
    return f"{_PREFIX}{path}.token_adapter.{ROWS}"


def _key_of_base(tensor: str, adapted: Collection[str]) -> str:
    """Return a base tensor's name in a file; ``adapted`` are the paths with an adapter."""
    path, _, leaf = tensor.rpartition(".")
    return f"{_PREFIX}{path}.{'base_layer.' if path in adapted else ''}{leaf}"
