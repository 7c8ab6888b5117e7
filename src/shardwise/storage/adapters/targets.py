"""What targets, patterns and modules_to_save name in a model, and what is wrong with them."""

import dataclasses
import difflib
import re
from collections.abc import Collection, Iterable

from shardwise.core.errors import ConfigError
from shardwise.models.adapters.config import ALL_LINEAR, LoraConfig


def chosen_paths(config: LoraConfig, in_layers: Iterable[str], outer: Iterable[str]) -> set[str]:
    """The paths that get an adapter, of those of transformer layers and the outer ones."""
    return set(filter(config.chooses, in_layers)) | {path for path in outer if config.chooses(path, in_layers=False)}


def trained_tensors(config: LoraConfig, tensors: Iterable[str], chosen: Collection[str]) -> set[str]:
    """The tensors of the base model that are trained beside adapters at the paths ``chosen``."""
    trained = set()
    for tensor in tensors:
        path, _, leaf = tensor.rpartition(".")
        is_bias = leaf == "bias" and (config.bias == "all" or (config.bias == "lora_only" and path in chosen))
        if is_bias or config.saves(path):
            trained.add(tensor)
    return trained


def check_targets(
    in_layers: Collection[str], outer: Collection[str], tensors: Iterable[str], config: LoraConfig
) -> None:
    """Check what the targets, patterns and ``modules_to_save`` name.

    Args:
        in_layers: the paths of linear layers of transformer layers, of all stages.
        outer: those of the embedding and the output layer, where these can have adapters.
        tensors: the names of all weights and biases.
        config: whose targets they are.

    Raises:
        ConfigError: one that names nothing, or what cannot have an adapter; with the nearest names.
    """
    modules = _modules(tensors)
    paths = sorted({*in_layers, *outer})
    names = sorted({path.rpartition(".")[2] for path in paths})
    known = ", ".join(names)
    targets = config.target_modules
    every = dataclasses.replace(config, layers_to_transform=None, layers_pattern=(), exclude_modules=())
    for target in [targets] if isinstance(targets, str) else targets:
        if target == ALL_LINEAR:
            continue
        alone = dataclasses.replace(every, target_modules=targets if isinstance(targets, str) else (target,))
        if not chosen_paths(alone, in_layers, outer):
            near = difflib.get_close_matches(target, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            if isinstance(targets, str):
                hint = f"; a string is a regular expression of whole paths; ({target!r},) is a name" if near else ""
            elif (other := next((path for path in modules if alone.chooses(path)), None)) is not None:
                hint = f" ({other} is none)"
            raise ConfigError(f"the model has no linear layer {target!r} to adapt{hint}; it has {known}")
        other = next((path for path in modules if path not in paths and config.chooses(path)), None)
        if other is not None and isinstance(targets, str):
            raise ConfigError(
                f"the pattern {target!r} names {other} too, which cannot have an adapter; write one that names only "
                f"layers that can ({known}), such as '.*{names[0]}'"
            )
    for number in config.layers_to_transform or ():
        if all(config.layer_of(path) != number for path in in_layers):
            layers = sorted({place for path in in_layers if (place := config.layer_of(path)) is not None})
            has = f"layers {layers[0]} to {layers[-1]}" if layers else f"none by {config.layers_pattern}"
            raise ConfigError(f"layers_to_transform has {number}, and the model has no such layer; it has {has}")
    if not chosen_paths(config, in_layers, outer):
        raise ConfigError(f"the model has no layer to adapt by {config.choice}; leave out what excludes them all")
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, name):
            one = dataclasses.replace(config, r=1, lora_alpha=0.0, rank_pattern={pattern: 2}, alpha_pattern={})
            if not any(one.at(path).r == 2 for path in chosen_paths(one, in_layers, outer)):
                raise ConfigError(f"{name} has {pattern!r}, which names no layer with an adapter; it has {known}")
    chosen = chosen_paths(config, in_layers, outer)
    for name in config.modules_to_save:
        alone = dataclasses.replace(config, modules_to_save=(name,))
        if not any(map(alone.saves, modules)):
            last = sorted({each for path in modules if not (each := path.rpartition(".")[2]).isdecimal()})
            near = difflib.get_close_matches(name.rpartition(".")[2], last, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(last)}"
            raise ConfigError(f"modules_to_save has {name!r}, which no module's path ends with; {hint}")
        both = next(filter(alone.saves, sorted(chosen)), None)
        if both is not None:
            raise ConfigError(
                f"modules_to_save has {name!r}, and {both} gets an adapter too; leave it out of one of them"
            )


def _modules(tensors: Iterable[str]) -> list[str]:
    """The paths of all modules that have parameters, and of those that these are in; the innermost first."""
    paths = {tensor.rpartition(".")[0] for tensor in tensors}
    within = {path[: dot.start()] for path in paths for dot in re.finditer(r"\.", path)}
    return [*sorted(paths), *sorted(within - paths)]
