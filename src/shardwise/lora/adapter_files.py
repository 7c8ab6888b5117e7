"""Adapters in the files of the ``peft`` library: ``adapter_config.json`` and ``adapter_model.safetensors``.

Factors are stored whole, under the names of Hugging Face's linear layers, so that they can be written and read at any
number of ranks, by ``peft`` and by us.
"""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from operator import methodcaller
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from shardwise.communication.agreement import agree
from shardwise.errors import CheckpointError, ConfigError, ShardwiseError
from shardwise.files import write_atomically
from shardwise.huggingface.architectures import Architecture
from shardwise.huggingface.fields import Fields
from shardwise.huggingface.folder import ADAPTER_CONFIG_NAME, no_folder
from shardwise.huggingface.ranks import gather_from_stages, model_groups
from shardwise.huggingface.reading import read_json, weight_dtype
from shardwise.lora.config import ALL_LINEAR, LoraConfig
from shardwise.lora.layers import LoraLinear
from shardwise.lora.model import Site, add_adapters_, all_paths, layers_without_adapters, sites_of
from shardwise.models.gpt import GPT
from shardwise.models.transformer_model import TransformerModel
from shardwise.sharded_state import gather_parameter
from shardwise.tensor_files import StoredTensor, read_box, read_header

CONFIG_NAME = ADAPTER_CONFIG_NAME
WEIGHTS_NAME = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_ANY_KEY = re.compile(rf"{re.escape(_PREFIX)}(.+)\.(?:lora_\w+|modules_to_save)\b.*")
_MERGE_FIRST = "merge them into the model with peft (merge_and_unload, then save_pretrained) and use that folder"
_KEY = re.compile(rf"{re.escape(_PREFIX)}(.+)\.(?:(lora_[AB])\.weight|(lora_magnitude_vector)(?:\.weight)?)")
# Initialisations that leave the base weights unchanged.
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
# Fields that would make an adapter compute something other than B A.
_VARIANTS = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "modules_to_save",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)


def read_adapter_config(folder: str | os.PathLike[str]) -> LoraConfig:
    """What an adapter folder says about its adapters.

    Raises:
        CheckpointError: there is no such folder or file, or it is damaged.
        ConfigError: a variant of LoRA that is not offered; the message names the field.
    """
    path = Path(folder) / CONFIG_NAME
    if not os.path.isdir(folder):
        raise CheckpointError(no_folder(Path(folder)))
    if not os.path.lexists(path):
        raise CheckpointError(f"no adapter at {str(folder)!r}: it has no {CONFIG_NAME}")
    try:
        values = read_json(path)
        kind, fields = values.get("peft_type"), Fields(values, CONFIG_NAME)
        arguments = _lora_arguments(fields) if kind == "LORA" else {}
    except ShardwiseError as error:
        raise CheckpointError(f"{str(path)!r} is not an adapter's configuration: {error}") from error
    if kind != "LORA":
        raise ConfigError(f"{str(path)!r}: peft_type is {kind!r:.80}; only 'LORA' is supported")
    config = LoraConfig(**arguments)
    for name in _VARIANTS:
        if values.get(name):
            raise ConfigError(
                f"{str(path)!r}: {name} is {values[name]!r:.80}, which is not supported, only plain LoRA is; "
                f"{_MERGE_FIRST}"
            )
    if values.get("bias", "none") != "none":
        raise ConfigError(f"{str(path)!r}: bias is {values['bias']!r:.80}; only 'none' is supported")
    start = values.get("init_lora_weights", True)
    if not isinstance(start, str | bool) or start not in _PLAIN_STARTS:
        raise ConfigError(
            f"{str(path)!r}: init_lora_weights is {start!r:.80}, which changes the base weights; "
            "convert the adapter with peft's path_initial_model_for_weight_conversion first"
        )
    return config


def _lora_arguments(fields: Fields) -> dict[str, Any]:
    targets = fields.values.get("target_modules")
    if not isinstance(targets, str):
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise fields.error("target_modules", targets, "a list of names, or a regular expression")
        targets = tuple(targets)
    return {
        "r": fields.get(int, "r"),
        "lora_alpha": fields.get(float, "lora_alpha"),
        "lora_dropout": fields.get(float, "lora_dropout", default=0.0),
        "target_modules": targets,
        "use_rslora": fields.get(bool, "use_rslora", default=False),
        "use_dora": fields.get(bool, "use_dora", default=False),
        "rank_pattern": _pattern(fields, "rank_pattern", int),
        "alpha_pattern": _pattern(fields, "alpha_pattern", float),
    }


def _pattern(fields: Fields, name: str, kind: type[Any]) -> dict[str, Any]:
    values = fields.values.get(name) or {}
    if not isinstance(values, Mapping):
        raise fields.error(name, values, "an object of numbers by name")
    numbers = Fields(values, f"{fields.where}: {name}")
    return {key: numbers.get(kind, key) for key in values}


def load_adapter_(model: TransformerModel, folder: str | os.PathLike[str], architecture: Architecture) -> LoraConfig:
    """Give a model the adapters of a folder and freeze all else, in place. Collective over the model's ranks.

    Args:
        model: a built model, without adapters.
        folder: written by ``save_adapter``, or by ``peft``'s ``save_pretrained``.
        architecture: the architecture whose names the files use.

    Returns:
        The folder's configuration.

    Raises:
        CheckpointError: files that are missing, damaged, or of another model; nothing is changed, on any rank.
        ConfigError: a variant of LoRA, or adapters on a layer, that are not offered; a model that has adapters already.
    """
    known, sites = all_paths(model, architecture), sites_of(model, architecture)
    others = layers_without_adapters(model, architecture)
    config, tensors = agree(lambda: _read(Path(folder), known, sites, others), group=model_groups(model.groups))
    chosen = [site for site in sites if (site.path, "lora_A") in tensors]
    add_adapters_(model, config, chosen)
    with torch.no_grad():
        for site in chosen:
            adapter = site.adapter
            assert adapter is not None
            for name, layout in adapter.param_layouts.items():
                adapter.get_parameter(name).copy_(layout.take(tensors[site.path, name], adapter.group.rank()))
    return config


def save_adapter(
    model: TransformerModel,
    folder: str | os.PathLike[str],
    architecture: Architecture,
    *,
    base_model: str | None = None,
) -> None:
    """Write the adapters of a model for ``peft`` and ``load_adapter_``. Collective over the model's ranks.

    Args:
        model: a model with adapters.
        folder: made if missing; an adapter that is there is replaced.
        architecture: the architecture whose names the files use.
        base_model: name or folder of the base model, as ``base_model_name_or_path``.

    Raises:
        ConfigError: the model has no adapters, or the folder cannot be written to; on every rank.
    """
    pairs = [(site, adapter) for site in sites_of(model, architecture) if (adapter := site.adapter) is not None]
    tensors = {
        _key_of(site.path, name): gather_parameter(adapter.get_parameter(name), layout, group=model.tp_group).cpu()
        for site, adapter in pairs
        for name, layout in adapter.param_layouts.items()
    }
    facts = [(site.layer.lora_config, site.transposed) for site, _ in pairs[:1] if isinstance(site.layer, LoraLinear)]
    of_stages = gather_from_stages((tensors, facts), "the adapters of each pipeline stage", model.groups)
    tensors = {key: tensor for of_stage, _ in of_stages for key, tensor in of_stage.items()}
    facts = [fact for _, of_stage in of_stages for fact in of_stage]
    if not facts:
        raise ConfigError("the model has no adapters to save")
    paths = sorted({match[1] for key in tensors if (match := _KEY.fullmatch(key))})
    named = set(filter(facts[0][0].chooses, all_paths(model, architecture)))
    # BERT's heads have layers of the same names; then full paths are written.
    exact = isinstance(model, GPT) and named == set(paths)
    config = _config_json(*facts[0], paths, names_will_do=exact, base_model=base_model)
    config["task_type"] = "CAUSAL_LM" if isinstance(model, GPT) else None
    agree(lambda: _write(Path(folder), config, tensors) if _writes(model) else None, group=model_groups(model.groups))


def _writes(model: TransformerModel) -> bool:
    """Whether this rank writes what all ranks of the model, and of its data-parallel copies, write once."""
    copies = model.groups.dp
    return all(group.rank() == 0 for group in (*model_groups(model.groups), *([copies] if copies else [])))


def _config_json(
    config: LoraConfig, transposed: bool, paths: list[str], *, names_will_do: bool, base_model: str | None
) -> dict[str, Any]:
    """What ``adapter_config.json`` says about a model with adapters at ``paths``."""
    alpha = int(config.lora_alpha) if config.lora_alpha == int(config.lora_alpha) else config.lora_alpha
    targets: list[str] | str
    if isinstance(config.target_modules, str):
        targets = config.target_modules
    else:
        targets = sorted(config.target_modules)
        if ALL_LINEAR in targets:
            targets = sorted({path.rpartition(".")[2] for path in paths})
    if not names_will_do:
        targets = paths
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": config.r,
        "lora_alpha": alpha,
        "lora_dropout": config.lora_dropout,
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "init_lora_weights": True,
    }


def _write(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    contents = {
        WEIGHTS_NAME: safetensors.torch.save(tensors, metadata={"format": "pt"}),
        CONFIG_NAME: (json.dumps(config, indent=2) + "\n").encode(),
    }
    new = {name: folder / f"{name}.new" for name in contents}
    try:
        # An earlier adapter is only touched once both new files have been written.
        for name, path in new.items():
            write_atomically(path, methodcaller("write", contents[name]))
        # The configuration is removed first and written last, so that its tensors are complete wherever it exists.
        (folder / CONFIG_NAME).unlink(missing_ok=True)
        for name, path in new.items():
            path.replace(folder / name)
    except OSError as error:
        raise ConfigError(f"cannot replace {str(folder / CONFIG_NAME)!r}: {error.strerror or error}") from error
    finally:
        for path in new.values():
            with suppress(OSError):
                path.unlink()


def _read(
    folder: Path, known: set[str], sites: list[Site], others: Mapping[str, str]
) -> tuple[LoraConfig, dict[tuple[str, str], Tensor]]:
    """The configuration, and by path and factor the whole tensors of this stage; checked."""
    config = read_adapter_config(folder)
    path = folder / WEIGHTS_NAME
    shapes = {(site.path, name): shape for site in sites for name, shape in _shapes(site, config.at(site.path)).items()}
    found: set[tuple[str, str]] = set()
    if not path.exists():
        raise CheckpointError(f"{str(folder)!r} has no {WEIGHTS_NAME}")
    chosen: dict[tuple[str, str], StoredTensor] = {}
    for key, stored in read_header(path).items():
        match = _ANY_KEY.fullmatch(key)
        if match is not None and match[1] in others:
            raise ConfigError(
                f"{str(path)!r} has adapters on {others[match[1]]} ({match[1]}), which are not supported, only those "
                f"on the linear layers of the transformer layers; {_MERGE_FIRST}"
            )
        match = _KEY.fullmatch(key)
        if match is None or match[1] not in known:
            raise CheckpointError(
                f"{str(path)!r} is of another model: it has {key!r}, for which this model has no place"
            )
        place = match[1], match[2] or match[3]
        found.add(place)
        if place not in shapes:
            continue  # Of another pipeline stage.
        if stored.shape != shapes[place]:
            raise CheckpointError(
                f"{str(path)!r} is of another model: {key!r} has shape {list(stored.shape)}, this model needs "
                f"{list(shapes[place])}"
            )
        weight_dtype(stored)
        chosen[place] = stored
    names = ("lora_A", "lora_B", *(("lora_magnitude_vector",) if config.use_dora else ()))
    lacking = sorted(_key_of(place, name) for place, _ in found for name in names if (place, name) not in found)
    if lacking or not found:
        raise CheckpointError(f"{str(path)!r} lacks {lacking[0] if lacking else 'every tensor'}")
    whole = {place: read_box(stored, [0] * len(stored.shape), stored.shape) for place, stored in chosen.items()}
    return config, whole


def _shapes(site: Site, config: LoraConfig) -> dict[str, tuple[int, ...]]:
    output_size, input_size = site.layer.param_layouts["weight"].global_shape
    if site.section is not None:
        output_size = len(site.section)
    shapes: dict[str, tuple[int, ...]] = {"lora_A": (config.r, input_size), "lora_B": (output_size, config.r)}
    return shapes | ({"lora_magnitude_vector": (output_size,)} if config.use_dora else {})


def _key_of(path: str, name: str) -> str:
    """A tensor's name in a file; the vector is the one that ``peft`` writes without ``weight``."""
    return f"{_PREFIX}{path}.{name}" + ("" if name == "lora_magnitude_vector" else ".weight")
