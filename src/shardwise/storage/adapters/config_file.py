"""``adapter_config.json`` of the ``peft`` library, and the layers of a model that match its targets and patterns."""

import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from shardwise.core.atomic_files import no_folder
from shardwise.core.errors import CheckpointError, ConfigError, ShardwiseError
from shardwise.core.typed_json import problem
from shardwise.models.adapters.config import ALL_LINEAR, LoraConfig
from shardwise.storage.huggingface.pretrained import ADAPTER_CONFIG_NAME
from shardwise.storage.huggingface.tensor_folder import read_json

CONFIG_NAME = ADAPTER_CONFIG_NAME

_MERGE_FIRST = "merge them into the model with peft (merge_and_unload, then save_pretrained) and use that folder"
# Initialisations that do not change the base weights.
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
# Fields that make an adapter compute something other than B A.
_VARIANTS = (
    "alora_invocation_tokens",
    "arrow_config",
    "ensure_weight_tying",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)

_Integer = Annotated[Any, "an integer", lambda value: type(value) is int]
_Number = Annotated[
    Any, "a finite number", lambda value: type(value) in (int, float) and abs(value) <= sys.float_info.max
]
_Ids = Annotated[
    Any,
    "a list of ids, or an object of such lists",
    lambda value: all(
        isinstance(ids, list) and all(type(each) is int for each in ids)
        for ids in (value.values() if isinstance(value, dict) else [value])
    ),
]
_Names = Annotated[list[str], "a list of names"]
_Pattern = Annotated[list[str] | str, "a list of names, or a regular expression"]


class _RequiredFields(TypedDict):
    r: _Integer
    lora_alpha: _Number
    target_modules: _Pattern


class _Fields(_RequiredFields, total=False):
    lora_dropout: _Number
    use_rslora: bool
    use_dora: bool
    rank_pattern: dict[str, _Integer]
    alpha_pattern: dict[str, _Number]
    bias: str
    modules_to_save: _Names
    layers_to_transform: Annotated[list[_Integer] | _Integer, "a list of layers' numbers"]
    layers_pattern: _Pattern
    exclude_modules: _Pattern
    target_parameters: _Names
    trainable_token_indices: _Ids


_NONE_IF_EMPTY = ("rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters", "trainable_token_indices")


def read_adapter_config(folder: str | os.PathLike[str]) -> LoraConfig:
    """Read the settings of a folder's adapters; CheckpointError if damaged, ConfigError for another variant of LoRA."""
    path = Path(folder) / CONFIG_NAME
    if not os.path.isdir(folder):
        raise CheckpointError(no_folder(Path(folder)))
    if not os.path.lexists(path):
        raise CheckpointError(f"no adapter at {str(folder)!r}: it has no {CONFIG_NAME}")
    try:
        values = read_json(path)
        kind = values.get("peft_type")
        arguments = _lora_arguments(values) if kind == "LORA" else {}
    except (ShardwiseError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} is not an adapter's configuration: {error}") from error
    if kind != "LORA":
        raise ConfigError(f"{str(path)!r}: peft_type is {kind!r:.80}; only 'LORA' is supported")
    if (task := values.get("task_type")) in ("SEQ_CLS", "TOKEN_CLS"):
        raise ConfigError(f"{str(path)!r}: task_type is {task}: these adapters label texts; use them with peft")
    try:
        config = LoraConfig(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{str(path)!r}: {error}") from error
    for name in _VARIANTS:
        if values.get(name):
            raise ConfigError(
                f"{str(path)!r}: {name} is {values[name]!r:.80}, which is not supported, only plain LoRA is; "
                f"{_MERGE_FIRST}"
            )
    start = values.get("init_lora_weights", True)
    if not isinstance(start, str | bool) or start not in _PLAIN_STARTS:
        raise ConfigError(
            f"{str(path)!r}: init_lora_weights is {start!r:.80}, which changes the base weights; "
            "convert the adapter with peft's path_initial_model_for_weight_conversion first"
        )
    return config


def _lora_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a ``LoraConfig``; raise ValueError if a field is of another type."""
    names = _Fields.__required_keys__ | _Fields.__optional_keys__
    given = {name: values[name] for name in names if values.get(name) is not None}
    for name in _NONE_IF_EMPTY:
        if not given.get(name):
            given.pop(name, None)
    if "target_parameters" in given:
        given.setdefault("target_modules", [])
    if (wrong := problem(given, _Fields)) is not None:
        raise ValueError(f"its {wrong.removeprefix('.')}")
    layers, pattern = given.get("layers_to_transform"), given.get("layers_pattern")
    if isinstance(layers, int):
        given["layers_to_transform"] = [layers]
    if isinstance(pattern, str):
        given["layers_pattern"] = [pattern] if pattern else []
    given |= {name: float(given[name]) for name in ("lora_alpha", "lora_dropout") if name in given}
    given["alpha_pattern"] = {name: float(alpha) for name, alpha in given.get("alpha_pattern", {}).items()}
    if isinstance(ids := given.get("trainable_token_indices"), dict):
        given["trainable_token_indices"] = {name: tuple(each) for name, each in ids.items()}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def config_json(
    config: LoraConfig,
    transposed: bool,
    modules: list[str],
    parameters: list[str],
    *,
    names_will_do: bool,
    base_model: str | None,
) -> dict[str, Any]:
    """Return the content of ``adapter_config.json`` for adapters of ``modules`` and ``parameters``, by their paths."""
    alpha = int(config.lora_alpha) if config.lora_alpha == int(config.lora_alpha) else config.lora_alpha
    targets: Collection[str] = modules
    if names_will_do:
        is_all = not isinstance(config.target_modules, str) and ALL_LINEAR in config.target_modules
        targets = {path.rpartition(".")[2] for path in modules} if is_all else config.target_modules
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
        "target_modules": _as_json(targets),
        "bias": config.bias,
        "modules_to_save": list(config.modules_to_save) or None,
        "layers_to_transform": None if config.layers_to_transform is None else list(config.layers_to_transform),
        "layers_pattern": list(config.layers_pattern) or None,
        "exclude_modules": _as_json(config.exclude_modules) or None,
        "target_parameters": _as_json(config.target_parameters if names_will_do else parameters) or None,
        "trainable_token_indices": config.trainable_token_indices or None,
        "fan_in_fan_out": transposed,
        "init_lora_weights": True,
    }


def _as_json(modules: Collection[str]) -> list[str] | str:
    return modules if isinstance(modules, str) else sorted(modules)


@dataclass(frozen=True)
class Paths:
    """Paths of everything in a model that can have an adapter, on all pipeline stages.

    Attributes:
        in_layers: linear layers in transformer layers.
        outer: the embedding and the output layer.
        parameters: parameters of routers and experts.
    """

    in_layers: Set[str]
    outer: Set[str]
    parameters: Set[str]

    def chosen(self, config: LoraConfig) -> set[str]:
        """Return the paths that get an adapter."""
        outer = {path for path in self.outer if config.chooses(path, in_layers=False)}
        return {*filter(config.chooses, self.in_layers), *outer, *filter(config.chooses_parameter, self.parameters)}


def with_parameters(config: LoraConfig, paths: Paths, module_targets: Mapping[str, str]) -> LoraConfig:
    """Return the configuration that ``peft`` makes of one for a model with experts; raise ConfigError if it cannot be.

    Targets by the names of linear layers that routers and experts had in ``transformers`` 4 become targets by the names
    of parameters; "all-linear" means these too. A parameter of two such layers gets the ranks of both.
    """
    if not paths.parameters or isinstance(config.target_modules, str):
        return config
    is_all = ALL_LINEAR in config.target_modules
    named = [target for target in config.target_modules if target.rpartition(".")[2] in module_targets]
    for target in named:
        if "." in target:
            raise ConfigError(
                f"target_modules has {target!r}, which peft takes for the experts and routers of all layers; name "
                f"{module_targets[target.rpartition('.')[2]]!r} in target_parameters instead, or leave it out"
            )
    parameters, patterns = dict.fromkeys(config.target_parameters), {}
    for parameter in dict.fromkeys(module_targets.values()):
        together = [old for old, new in module_targets.items() if new == parameter]
        given = together if is_all else [old for old in together if old in named]
        if given and len(given) < len(together):
            missing = next(old for old in together if old not in given)
            raise ConfigError(
                f"target_modules has {given[0]!r} and not {missing!r}, and both are one parameter of experts; name "
                f"both, or {parameter!r} in target_parameters"
            )
        if given:
            parameters[parameter] = None
        if len(given) > 1:
            patterns[rf".*\.{re.escape(parameter)}"] = len(given)
    return dataclasses.replace(
        config,
        target_modules=tuple(target for target in config.target_modules if target not in named),
        target_parameters=tuple(parameters),
        rank_pattern={**config.rank_pattern, **{name: config.r * count for name, count in patterns.items()}},
        alpha_pattern={**config.alpha_pattern, **{name: config.lora_alpha * count for name, count in patterns.items()}},
    )


def trained_tensors(config: LoraConfig, tensors: Iterable[str], chosen: Collection[str]) -> set[str]:
    """Return the tensors of the base model that are trained next to adapters at the paths ``chosen``."""

    def is_trained(path: str, leaf: str) -> bool:
        is_bias = leaf == "bias" and (config.bias == "all" or (config.bias == "lora_only" and path in chosen))
        return is_bias or config.saves(path)

    return {tensor for tensor in tensors if is_trained(*tensor.rpartition(".")[::2])}


def rows_to_train(
    config: LoraConfig, outer: Sequence[str], vocab_size: int, *, is_tied: bool
) -> dict[str, tuple[int, ...]]:
    """Return the ids whose rows are trained, by the paths of their weights.

    Args:
        config: the adapters' configuration.
        outer: paths of the embedding and of the output layer; empty for a model without them.
        vocab_size: number of ids of the model.
        is_tied: whether both are one weight, which is then named by the embedding alone.

    Raises:
        ConfigError: a name or an id is not of the model, or a weight is adapted in another way, too.
    """
    given = config.trainable_token_indices
    if not given:
        return {}
    found: dict[str, tuple[int, ...]] = {}
    for name, ids in given.items() if isinstance(given, Mapping) else (("", given),):
        path = next((each for each in outer if f".{each}".endswith(f".{name}" if name else each)), None)
        if path is None or path in found:
            raise ConfigError(
                f"trainable_token_indices names {name!r}, which is {'there twice' if path else 'no such layer'}; the "
                f"model has rows of ids in {', '.join(outer) or 'no layer that can have adapters'}"
            )
        if (largest := max(ids)) >= vocab_size:
            raise ConfigError(
                f"trainable_token_indices of {path} has {largest}, and the model has rows for {vocab_size} ids; name "
                "ids below, or load the model with more (vocab_size)"
            )
        found[path] = ids
    others = outer if is_tied else list(found)
    both = next((path for path in others if config.saves(path) or config.chooses(path, in_layers=False)), None)
    if both is not None:
        raise ConfigError(
            f"{both} is in modules_to_save or gets an adapter, and trainable_token_indices trains some of its rows; "
            "leave it out of one of them"
        )
    if is_tied and (of_output := found.pop(outer[1], None)) not in (None, found.get(outer[0])):
        raise ConfigError(
            f"trainable_token_indices of {outer[1]} is {list(of_output or ())}, and of {outer[0]}, the same weight, "
            f"{list(found.get(outer[0], ()))}; name the same ids, or {outer[0]} alone"
        )
    return found


def check_targets(paths: Paths, tensors: Iterable[str], config: LoraConfig) -> None:
    """Raise ConfigError, with the nearest names, if a target, pattern or module to save matches nothing."""
    modules = modules_of(tensors)
    adaptable = {*paths.in_layers, *paths.outer}
    names = sorted({path.rpartition(".")[2] for path in adaptable})
    known = ", ".join(names)
    ends = sorted({".".join(path.split(".")[-2:]) for path in paths.parameters})
    for target in config.target_parameters:
        if not any(f".{path}".endswith(f".{target}") for path in paths.parameters):
            has = f"it has {', '.join(ends)}" if ends else "it has no experts; name layers in target_modules"
            raise ConfigError(f"the model has no parameter {target!r} of experts or routers to adapt; {has}")
    targets = config.target_modules
    every = dataclasses.replace(config, layers_to_transform=None, layers_pattern=(), exclude_modules=())
    for target in [targets] if isinstance(targets, str) else targets:
        if target == ALL_LINEAR:
            continue
        one = targets if isinstance(targets, str) else (target,)
        alone = dataclasses.replace(every, target_modules=one, target_parameters=())
        if not paths.chosen(alone):
            near = difflib.get_close_matches(target, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            if isinstance(targets, str):
                hint = f"; a string is a regular expression of whole paths; ({target!r},) is a name" if near else ""
            elif any(f".{path}".endswith(f".{target}") for path in paths.parameters):
                hint = "; it is a parameter, which target_parameters names"
            elif (other := next((path for path in modules if alone.chooses(path)), None)) is not None:
                hint = f" ({other} is none)"
            raise ConfigError(f"the model has no linear layer {target!r} to adapt{hint}; it has {known}")
        other = next((path for path in modules if path not in adaptable and config.chooses(path)), None)
        if other is not None and isinstance(targets, str):
            raise ConfigError(
                f"the pattern {target!r} names {other} too, which cannot have an adapter; write one that names only "
                f"layers that can ({known}), such as '.*{names[0]}'"
            )
    for number in config.layers_to_transform or ():
        if all(config.layer_of(path) != number for path in paths.in_layers):
            layers = sorted({place for path in paths.in_layers if (place := config.layer_of(path)) is not None})
            has = f"layers {layers[0]} to {layers[-1]}" if layers else f"none by {config.layers_pattern}"
            raise ConfigError(f"layers_to_transform has {number}, and the model has no such layer; it has {has}")
    if not paths.chosen(config):
        raise ConfigError(f"the model has no layer to adapt by {config.choice}; leave out what excludes them all")
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, name):
            marked = dataclasses.replace(config, r=1, lora_alpha=0.0, rank_pattern={pattern: 2}, alpha_pattern={})
            if not any(marked.at(path).r == 2 for path in paths.chosen(marked)):
                raise ConfigError(f"{name} has {pattern!r}, which names no layer with an adapter; it has {known}")
    check_saved_modules(config, modules)
    chosen = paths.chosen(config)
    for name in config.modules_to_save:
        alone = dataclasses.replace(config, modules_to_save=(name,))
        both = next(filter(alone.saves, sorted(chosen)), None)
        if both is not None:
            raise ConfigError(
                f"modules_to_save has {name!r}, and {both} gets an adapter too; leave it out of one of them"
            )


def check_saved_modules(config: LoraConfig, modules: Collection[str]) -> None:
    """Raise ConfigError, with the nearest names, if a module to save is none of ``modules``."""
    for name in config.modules_to_save:
        if not any(map(dataclasses.replace(config, modules_to_save=(name,)).saves, modules)):
            last = sorted({each for path in modules if not (each := path.rpartition(".")[2]).isdecimal()})
            near = difflib.get_close_matches(name.rpartition(".")[2], last, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(last)}"
            raise ConfigError(f"modules_to_save has {name!r}, which no module's path ends with; {hint}")


def modules_of(tensors: Iterable[str]) -> list[str]:
    """Return the paths of the modules of tensors, and of the modules around them."""
    paths = {tensor.rpartition(".")[0] for tensor in tensors}
    within = {path[: dot.start()] for path in paths for dot in re.finditer(r"\.", path)}
    return [*sorted(paths), *sorted(within - paths)]
