"""Causal models of transformers from the fields of a ``config.json``; no code of the file's folder is run."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.core.errors import ConfigError
from shardwise.core.json_text import shown
from shardwise.models.config import ModelConfig

EXTRA = "pip install 'shardwise[transformers]'"

# Fields of a config that name code: of the folder, or of the hub's kernels.
_CODE = ("auto_map", "custom_pipelines", "attn_implementation", "experts_implementation", "use_kernels")
# Names of sizes; the first that a config has counts.
_SIZES = {
    "num_layers": ("num_hidden_layers", "num_layers", "n_layer"),
    "hidden_size": ("hidden_size", "d_model", "n_embd"),
    "vocab_size": ("vocab_size",),
    "num_attention_heads": ("num_attention_heads", "num_heads", "n_head"),
    "num_query_groups": ("num_key_value_heads",),
    "kv_channels": ("head_dim",),
    "ffn_hidden_size": ("intermediate_size", "ffn_hidden_size", "ffn_dim"),
    "max_sequence_length": ("max_position_embeddings", "max_seq_len", "n_positions"),
}
_REQUIRED = ("num_layers", "hidden_size", "vocab_size")
# Largest numbers of fields with these words in their names.
_MOST = {"size|dim|position|length|embd": 1 << 30, "expert": 1 << 15, "layer|head": 1 << 16}
# The longest sequence of a model without a maximum, such as one without attention.
_UNBOUNDED = 1 << 20


def describe(values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Return the sizes of the causal model that transformers has for the fields of a ``config.json``.

    Raises:
        ConfigError: transformers is missing, or has no causal model for the fields.
    """
    text = json.dumps(values, sort_keys=True)
    config = _explained(text, where)
    inner = config.get_text_config()
    if getattr(inner, "is_heterogeneous", False):
        # Numbers that layers have otherwise are those of the first.
        inner = inner.per_layer_config[0]
    sizes: dict[str, Any] = {name: size for name, names in _SIZES.items() if (size := _size(inner, names)) is not None}
    if missing := [name for name in _REQUIRED if name not in sizes]:
        raise ConfigError(f"{where}: {type(config).__name__} has no {' or '.join(_SIZES[missing[0]])}")
    heads = sizes.setdefault("num_attention_heads", 1)
    if heads % sizes.setdefault("num_query_groups", heads):
        sizes["num_query_groups"] = heads
    sizes.setdefault("kv_channels", max(1, sizes["hidden_size"] // heads))
    sizes.setdefault("max_sequence_length", _UNBOUNDED)
    dropout = max((value for _, _, value in _dropouts(config)), default=0.0)
    is_tied = bool(getattr(config, "tie_word_embeddings", False))
    return ModelConfig(
        **sizes,
        transformers_config=text,
        position_embedding_type="none",
        share_embeddings_and_output_weights=is_tied,
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )


def class_of(config: ModelConfig) -> Any:
    """Return the class of transformers of a model that ``describe`` described."""
    assert config.transformers_config is not None
    return _class_of(_explained(config.transformers_config, "config.json"))


def name_of(config: ModelConfig) -> str:
    """Return the name of the class and of the library, for messages."""
    return f"{class_of(config).__name__} of transformers {_library('config.json').__version__}"


def other_use_of_logits(kind: type[nn.Module]) -> str:
    """Return the expression for which a forward needs whole logits; empty if only the loss and scaling use them."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward))))
    for node in ast.walk(tree):
        for part in ast.iter_child_nodes(node):
            if not (isinstance(part, ast.Name) and part.id == "logits" and isinstance(part.ctx, ast.Load)):
                continue
            source = ast.unparse(node)
            is_scaled = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div)
            if not is_scaled and not re.match(
                r"logits=|logits\.(float|shape)$|(torch\.tanh|self\.loss_function)\(", source
            ):
                return source
    return ""


def build(config: ModelConfig) -> Any:
    """Build the model on the meta device, in ``config.params_dtype``, without dropout if ``config`` has none."""
    assert config.transformers_config is not None
    own = _read(config.transformers_config)
    if config.hidden_dropout == config.attention_dropout == 0:
        for owner, name, _ in _dropouts(own):
            setattr(owner, name, 0.0)
    kind = _class_of(own)
    own._attn_implementation = "sdpa" if kind._supports_sdpa else "eager"
    # Grouped products need widths that are multiples of 16 bytes, which parts of experts may not have.
    own._experts_implementation = "eager"
    try:
        with torch.device("meta"):
            model = kind._from_config(own, dtype=config.params_dtype)
    except Exception as error:
        raise ConfigError(f"transformers cannot build {kind.__name__} from config.json: {first_line(error)}") from error
    for param in model.parameters():
        param.data = param.data.to(config.params_dtype)
    return model


@torch.no_grad()
def allocate_(model: Any, device: torch.device) -> None:
    """Allocate a model on the meta device, and compute the buffers that no file has; other tensors have no values.

    Raises:
        ConfigError: transformers does not compute one of these buffers.
    """
    # Not ``to_empty``, which makes two of a tied parameter.
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in made:
                    empty = torch.empty_like(tensor, device=device)
                    is_param = isinstance(tensor, nn.Parameter)
                    made[tensor] = nn.Parameter(empty, tensor.requires_grad) if is_param else empty
                tensors[name] = None if tensor is None else made[tensor]
    stored = model.state_dict(keep_vars=True).keys()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in stored:
            tensor._is_hf_initialized = True
        # A buffer that no file fills then gives NaN everywhere, instead of numbers that happened to be in memory.
        if tensor.is_floating_point() and not isinstance(tensor, nn.Parameter):
            tensor.fill_(torch.nan)
    with device:
        model.initialize_weights()
    for name, tensor in model.named_buffers():
        if name in stored or not tensor.is_floating_point() or isinstance(tensor, FakeTensor):
            continue
        if tensor.isnan().any():
            raise ConfigError(f"transformers does not compute the buffer {name} of {type(model).__name__} again")


@lru_cache(maxsize=8)
def _outline(text: str) -> Any:
    own = _read(text)
    with torch.device("meta"):
        return _class_of(own)._from_config(own)


class StoredAs(NamedTuple):
    """The tensors of files that hold a parameter, or a buffer.

    Attributes:
        names: names in files; ``*`` stands for the number of an expert.
        how: ``whole``, the tensor itself; ``rows``, tensors with its rows one after another; ``experts``, the same for
            each expert of ``[e, rows, ...]``; or empty, another way, which is not read here.
    """

    names: tuple[str, ...]
    how: str


# Steps from a parameter to its tensors; the dimension of each.
_WAYS: dict[tuple[tuple[str, int | None], ...], str] = {
    (("Chunk", 0),): "rows",
    (("SplitModulelist", 0),): "experts",
    (("Chunk", 1), ("SplitModulelist", 0)): "experts",
}


@lru_cache(maxsize=8)
def _conversions_to_files(text: str) -> tuple[list[Any], list[Any]]:
    """Return the conversions of tensors (the first that fits is applied) and those of names (all are, afterwards)."""
    mapping = importlib.import_module("transformers.conversion_mapping")
    found = mapping.get_model_conversion_mapping(_outline(text), add_legacy=False)
    # As in ``save_pretrained`` of a model that comes from no file, which may have a prefix or not.
    found = [each.reverse_transform() for each in reversed(found) if type(each).__name__ != "PrefixChange"]
    of_tensors = [each for each in found if hasattr(each, "operations")]
    return of_tensors, [each for each in found if each not in of_tensors]


def longer_starts(config: ModelConfig) -> tuple[tuple[str, str], ...]:
    """Return longer starts of names in files, as of a text model that was part of another, each with the start here."""
    mapping = importlib.import_module("transformers.conversion_mapping")
    assert config.transformers_config is not None
    names = class_of(config).__name__, json.loads(config.transformers_config)["model_type"]
    pairs = []
    for each in next(filter(None, map(mapping.get_checkpoint_conversion_mapping, names)), ()):
        if (removed := getattr(each, "prefix_to_remove", None)) is not None:
            start = f"{each.model_prefix}." if each.model_prefix else ""
            pairs.append((f"{start}{removed}.", start))
    return tuple(pairs)


def stored_as(config: ModelConfig, name: str) -> StoredAs:
    """Return how files hold the parameter or buffer of a name in modules, as ``save_pretrained`` writes it."""
    assert config.transformers_config is not None
    of_tensors, of_names = _conversions_to_files(config.transformers_config)
    names, how = [name], "whole"
    for each in of_tensors:
        first, pattern = each.rename_source_key(name)
        if pattern is not None:
            names = [first.replace(each.target_patterns[0], target, 1) for target in each.target_patterns]
            steps = tuple((type(step).__name__, getattr(step, "dim", None)) for step in each.operations)
            is_counted = any(getattr(step, "num_shards_attribute", None) for step in each.operations)
            how = "" if is_counted or len(each.source_patterns) > 1 else _WAYS.get(steps, "")
            break
    for each in of_names:
        names = [each.rename_source_key(stored)[0] for stored in names]
    return StoredAs(tuple(names), how)


def rows_of_parts(config: ModelConfig, name: str, rows: int) -> tuple[int, ...]:
    """Return the numbers of rows of the tensors that hold the ``rows`` of a parameter which is stored as ``rows``.

    A convolution of queries, keys and values has as many as their projections. All others have equal parts.
    """
    assert config.transformers_config is not None
    number, parent = len(stored_as(config, name).names), name.removesuffix("conv1d.weight")
    shapes = {each: param.shape for each, param in _outline(config.transformers_config).named_parameters()}
    sizes = [shapes.get(f"{parent}{each}_proj.weight", (0,))[0] for each in "qkv"]
    return tuple(sizes) if number == 3 and sum(sizes) == rows else (rows // number,) * number


def unread_sources(config: ModelConfig, name: str) -> tuple[str, ...]:
    """Return the names in files of what transformers makes a tensor of, in a way that is not read here; or nothing."""
    found = None if config.transformers_config is None else stored_as(config, name)
    return () if found is None or found.how else found.names


def vocabulary_parameters(config: ModelConfig) -> set[str]:
    """Return the names of the parameters of the embedding and the head that have a row for each id."""
    assert config.transformers_config is not None
    model = _outline(config.transformers_config)
    outer = [each for each in (model.get_input_embeddings(), model.get_output_embeddings()) if each is not None]
    own = {param for module in outer for param in module.parameters() if len(param) == config.vocab_size}
    return {name for name, param in model.named_parameters(remove_duplicate=False) if param in own}


def with_vocabulary(config: ModelConfig, size: int) -> ModelConfig:
    """Return a model that ``describe`` described with another number of ids, also in the fields that it keeps.

    Raises:
        ConfigError: parameters other than those of embedding and head depend on the number.
    """
    assert config.transformers_config is not None
    if size == config.vocab_size:
        return config
    values, own = json.loads(config.transformers_config), _read(config.transformers_config)
    inner = own.get_text_config()
    names = [name for name in own.sub_configs if getattr(own, name, None) is inner]
    field = inner.attribute_map.get("vocab_size", "vocab_size")
    for table in (values, *(values.setdefault(name, {}) for name in names)):
        if field in table or table is not values or not names:
            table[field] = size
    resized = describe(values)
    outlines = [build(each) for each in (config, resized)]
    before, after = (dict(model.named_parameters()) for model in outlines)
    # Another embedding of all ids would lack the new ones.
    others = [
        f"{name}.weight"
        for name, module in outlines[0].named_modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings == config.vocab_size
    ]
    others += [name for name, param in before.items() if param.shape != after[name].shape]
    if others := sorted(set(others) - vocabulary_parameters(config)):
        raise ConfigError(
            f"{name_of(config)} cannot get another number of ids ({size} instead of {config.vocab_size}): "
            f"{', '.join(others[:3])} would need rows for them, too; leave new tokens out of the tokenizer"
        )
    return replace(config, vocab_size=size, transformers_config=resized.transformers_config)


def new_cache(model: Any) -> Any:
    """Make an empty cache of transformers for generation with a model; of the class in its module, if there is one."""
    library = importlib.import_module("transformers")
    module = inspect.unwrap(type(model).forward).__module__
    for each in vars(importlib.import_module(module)).values():
        if inspect.isclass(each) and each.__module__ == module and issubclass(each, library.Cache):
            return each()
    return library.DynamicCache(config=model.config)


def _library(where: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"{where}: Shardwise has no table for this model_type, and the library transformers, which may have the "
            f"model, is not installed: {EXTRA}"
        ) from error


def _explained(text: str, where: str) -> Any:
    """Return the config of transformers; errors are ConfigErrors that name the file."""
    _library(where)
    try:
        config = _read(text)
        _class_of(config)
        config.get_text_config()
        return config
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{where}: transformers does not accept it: {first_line(error)}") from error


def _read(text: str) -> Any:
    values = _without_code(json.loads(text))
    _check_numbers(values)
    known = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    model_type = values.get("model_type")
    if model_type not in known:
        has_code = "auto_map" in json.loads(text)
        raise ConfigError(
            f"model_type is {shown(model_type)}, which neither Shardwise nor transformers "
            f"{_library('config.json').__version__} knows"
            + (
                "; the folder has code for it (auto_map), which is never run"
                if has_code
                else "; a newer version of transformers may"
            )
        )
    return known[model_type].from_dict(values)


def _check_numbers(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for a number that would take transformers time or memory, such as for a list of layers."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            _check_numbers(value)
        most = next((most for words, most in _MOST.items() if re.search(words, name)), math.inf)
        for each in value if isinstance(value, list) else (value,):
            if isinstance(each, int | float) and not -most <= each <= most:
                raise ConfigError(f"{name} is {shown(each)}; it must be from {-most:,} to {most:,}")


def _without_code(value: Any) -> Any:
    """Leave out fields that name code, and read infinite numbers, which transformers writes by their names."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _without_code(each) for name, each in value.items() if name.lstrip("_") not in _CODE}
    return [_without_code(each) for each in value] if isinstance(value, list) else value


def _class_of(config: Any) -> Any:
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    names = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, ())
    names = (names,) if isinstance(names, str) else tuple(names)
    asked = list(config.architectures or names[:1])
    if len(asked) != 1 or asked[0] not in names:
        wanted = f"it must be {' or '.join(names)}" if names else "transformers has no causal model for it"
        if names and str(asked[0] if asked else "").endswith("ForConditionalGeneration"):
            wanted += (
                "; make a folder of the text model: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
            )
        raise ConfigError(f"architectures is {shown(asked)}, and model_type {config.model_type!r}; {wanted}")
    return getattr(importlib.import_module("transformers"), asked[0])


@lru_cache(maxsize=8)
def has_plan(name: str) -> bool:
    """True if the class of transformers of this name, or its base model, brings a tensor-parallel plan."""
    kind = getattr(importlib.import_module("transformers"), name)
    return bool(getattr(kind.config_class, "base_model_tp_plan", None))


def _size(config: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, list | tuple) and value and all(type(each) is int for each in value):
            # Sizes of each layer.
            value = max(value)
        if type(value) is int and value > 0:
            return value
    return None


def _dropouts(config: Any) -> Iterator[tuple[Any, str, float]]:
    """Yield each positive probability of dropout, with its owner and its name."""
    owners = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", None) or {})]
    for owner in owners:
        for name, value in vars(owner).items() if owner is not None else ():
            is_one = "dropout" in name or name.endswith("pdrop")
            if is_one and type(value) in (int, float) and 0 < value < 1 and name != "classifier_dropout":
                yield owner, name, float(value)


def first_line(error: Exception) -> str:
    """Return the first line of an error of transformers, or its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
