"""``parallelize``: split a model of transformers over tensor-parallel ranks by the plan that it brings."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.communication.agreement import agree, check_same
from shardwise.core.errors import ConfigError
from shardwise.core.layout import I, Layout
from shardwise.core.sharding import ParamLayout, Replicas
from shardwise.core.topology import Groups
from shardwise.kernels.products import OwnProducts
from shardwise.models.by_plan.attention import READERS, AttentionHeads, heads_of
from shardwise.models.by_plan.hooks import Hooks, SharedCopies
from shardwise.models.by_plan.styles import ENTERING, SPLIT, STYLES, Style
from shardwise.nn.column import ColumnLinear
from shardwise.nn.linear import LinearParallelism
from shardwise.nn.replicated import set_replicas_
from shardwise.nn.row import RowLinear

_WRAPPERS = {
    "_orig_mod": "it is compiled; compile it afterwards",
    "hf_quantizer": "it is quantized; load it without quantization",
    "hf_device_map": "it was placed by a device map; load it without one",
    "peft_config": "it has adapters; add them afterwards",
}


class _Place(NamedTuple):
    """One entry of the plan, for one module or parameter."""

    name: str
    style_name: str
    style: Style
    owner: nn.Module
    parameter: str | None


@dataclass
class _Work:
    """Results so far, so that a tied parameter or a reused module is split once."""

    group: ProcessGroup
    config: Any
    modules: dict[str, nn.Module]
    copies: SharedCopies
    head: nn.Module | None
    splits_logits: Callable[[], bool]
    layouts: dict[Parameter, tuple[str, ParamLayout]] = field(default_factory=dict)
    parameters: dict[Parameter, Parameter] = field(default_factory=dict)
    replaced: dict[nn.Module, nn.Module] = field(default_factory=dict)
    heads: dict[nn.Module, AttentionHeads | None] = field(default_factory=dict)


def parallelize(model: nn.Module, groups: Groups) -> nn.Module:
    """Split a model of transformers over the ranks of ``groups.tp`` by its own tensor-parallel plan, in place.

    Linear layers become ``ColumnLinear`` and ``RowLinear``; other modules keep their class, and hooks move their
    inputs and outputs between layouts (``models.by_plan.styles``). Parameters have a ``ParamLayout`` and ``Replicas``,
    so that ``finalize_gradients_``, gradient norms, optimizers and checkpoints work as for other models. Heads are
    split at key-value heads; with fewer of them than ranks, ranks hold copies.

    Logits are whole without gradients or under ``torch.compile``. With gradients they are ``SplitLogits``: split as
    long as they are only scaled, capped and given to ``F.cross_entropy``, as by ``loss_function`` of most models; read
    otherwise, they are gathered, so all ranks must read them.

    Args:
        model: a model of transformers with a plan, whole and with the same values on every rank, or on the meta device.
        groups: process groups; only ``tp`` is read.

    Returns:
        The model; unchanged on one rank, which needs no plan.

    Raises:
        ConfigError: the model has no plan, is quantized, compiled or wrapped; a style is unknown, or cannot be carried
            out for its module; heads cannot be split. The model is unchanged.
        DesyncError: ranks have different plans or parameters. The model is unchanged.
    """
    return split_(model, groups, torch.is_grad_enabled)


def split_(model: nn.Module, groups: Groups, splits_logits: Callable[[], bool]) -> nn.Module:
    """Do what ``parallelize`` does; ``splits_logits`` says at each forward whether logits may be ``SplitLogits``."""
    places, work = agree(partial(_prepared, model, groups, splits_logits), group=groups.tp)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    check_same([[place[:2] for place in places], shapes], "the plan and the shapes of the model", group=groups.tp)
    check_same(_digest(model), "the weights of the whole model (a digest of some)", group=groups.tp)
    for place in places:
        _carry_out_(place, work)
    for module, heads in work.heads.items():
        if heads is not None:
            heads.rewrite_(module, groups.tp.rank())
    model.register_forward_hook(work.copies.forget, always_call=True)
    return model


def _prepared(model: nn.Module, groups: Groups, splits_logits: Callable[[], bool]) -> tuple[list[_Place], _Work]:
    """Find the places of the plan and all layouts, so that errors leave the model unchanged."""
    config: Any = getattr(model, "config", None)
    plan: Any = getattr(model, "_tp_plan", None)
    if config is None or not isinstance(plan, dict):
        raise ConfigError(
            f"{type(model).__name__} is not a model of transformers; pass one, such as AutoModelForCausalLM's"
        )
    _check_model(model)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    modules = dict(model.named_modules(remove_duplicate=False))
    find_head: Any = getattr(model, "get_output_embeddings", None)
    head = None if find_head is None else find_head()
    work = _Work(groups.tp, text, modules, SharedCopies(groups.tp), head, splits_logits)
    if groups.tp.size() == 1:
        # One rank holds the whole model, whatever its plan.
        return [], work
    places = list(_places(model, _with_tied_embedding(model, plan), modules))
    if not places:
        raise ConfigError(
            f"{type(model).__name__} has no tensor-parallel plan (base_model_tp_plan of {type(config).__name__} is "
            "empty, or names no module of this model); use one tensor-parallel rank"
        )
    for place in places:
        _lay_out(place, work)
    _check_owners(places, work)
    return places, work


def _check_model(model: nn.Module) -> None:
    for name, reason in _WRAPPERS.items():
        if getattr(model, name, None) is not None:
            raise ConfigError(f"{type(model).__name__} cannot be split: {reason}")
    if any(hasattr(module, "param_layouts") for module in model.modules()):
        raise ConfigError(f"{type(model).__name__} is split already; load a new model, or use this one")
    for name, param in model.named_parameters():
        if type(param) is not Parameter or not param.is_floating_point():
            raise ConfigError(
                f"{type(model).__name__} cannot be split: {name} is a {type(param).__name__} of {param.dtype}, and "
                "parameters must be plain, of a floating-point dtype; load the model without quantization or a device "
                "mesh"
            )


def _digest(model: nn.Module) -> str:
    """Return a digest of four elements of each parameter, where ranks that drew different weights differ."""
    digest = hashlib.sha256()
    for param in model.parameters():
        if not param.is_meta:
            digest.update(repr(param.detach().flatten()[:: max(1, param.numel() // 4)][:4].tolist()).encode())
    return digest.hexdigest()


def _with_tied_embedding(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Split an embedding that the plan leaves out if a head of the plan has the same weight."""
    params = dict(model.named_parameters(remove_duplicate=False))
    heads = {
        id(param)
        for name, param in params.items()
        if plan.get(name.rpartition(".")[0]) in ("colwise", "colwise_gather_output", "colwise_rep")
    }
    added = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and id(module.weight) in heads and _wildcard(name) not in plan:
            added[name] = "embedding_rowwise"
    return plan | added


def _wildcard(name: str) -> str:
    """Replace the numbers of a name's parts, as plans do.

    >>> _wildcard("layers.10.mlp")
    'layers.*.mlp'
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _places(model: nn.Module, plan: dict[str, str], modules: dict[str, nn.Module]) -> Iterator[_Place]:
    for name, module in modules.items():
        names = {name: None} | {f"{name}.{own}".lstrip("."): own for own in module._parameters}
        for each, parameter in names.items():
            style_name = plan.get(each, plan.get(_wildcard(each)))
            if style_name is None or (parameter is not None and module._parameters[parameter] is None):
                continue
            style = STYLES.get(style_name)
            refusal = f"styles are {', '.join(STYLES)}" if style is None else style.refusal
            if style is None or refusal:
                raise ConfigError(
                    f"{each}: the plan of {type(model).__name__} has the style {style_name!r}, which cannot be carried "
                    f"out: {refusal}"
                )
            yield _Place(each, style_name, style, module, parameter)
    # Modules that read split features, which the plan leaves out: their gradients are partial sums.
    for name, module in modules.items():
        parent, _, own = name.rpartition(".")
        source = READERS.get(own)
        if source and _wildcard(name) not in plan and plan.get(_wildcard(f"{parent}.{source}")) == "colwise":
            features = getattr(modules.get(f"{parent}.{source}"), "out_features", None)
            shapes = [tuple(param.shape) for param in module._parameters.values() if param is not None]
            if (features,) in shapes and features != getattr(modules[parent], "head_dim", None):
                raise ConfigError(
                    f"{name}: the plan of {type(model).__name__} splits {source}, and {own} normalizes the features of "
                    "all heads together; use one tensor-parallel rank"
                )
            yield _Place(name, "replicated_with_grad_allreduce", STYLES["replicated_with_grad_allreduce"], module, None)


def _params_of(place: _Place) -> dict[str, Parameter]:
    names = [place.parameter] if place.parameter else list(place.owner._parameters)
    return {name: param for name in names if (param := place.owner._parameters[name]) is not None}


def _lay_out(place: _Place, work: _Work) -> None:
    """Choose the layout of the parameters of a place."""
    style, size = place.style, work.group.size()
    if style.dim is None and not style.is_partial:
        _rotary_width(place, work)
        return
    heads, inner = _attention(place, work)
    for name, param in _params_of(place).items():
        shape = tuple(param.shape)
        if style.vocabulary and name != "weight":
            # A row of its own, which the ranks that do not look it up leave without a gradient.
            layout = ParamLayout.replicated(shape, size)
        elif style.dim is None:
            is_of_heads = heads is not None and style.is_partial and len(shape) > 1
            layout = heads.layout(shape, 0, inner) if heads and is_of_heads else ParamLayout.replicated(shape, size)
        elif style.dim == -1 and len(shape) == 1:
            # A bias is added once, to the sum.
            layout = ParamLayout.replicated(shape, size)
        else:
            dim = len(shape) - 1 if style.dim == -1 else max(0, len(shape) - 2)
            if heads is not None and style.keeps_features and style.sections == 1:
                layout = heads.layout(shape, dim, inner)
                if style.dim == -1 and sum(map(layout.local_size, range(size))) != shape[dim]:
                    raise ConfigError(
                        f"{place.name}: {place.style_name} sums over {heads.groups} key-value heads, of which {size} "
                        f"tensor-parallel ranks hold copies; use at most {heads.groups} ranks"
                    )
            else:
                layout = _balanced(shape, dim, size, style, place)
        earlier = work.layouts.setdefault(param, (f"{place.name}: {place.style_name}", layout))
        if earlier[1] != layout:
            raise ConfigError(
                f"{place.name}: {place.style_name} splits a parameter that {earlier[0]} splits otherwise (a tied "
                "weight, or a reused module); untie them (tie_word_embeddings), or use one tensor-parallel rank"
            )


def _balanced(shape: tuple[int, ...], dim: int, size: int, style: Style, place: _Place) -> ParamLayout:
    # A gate and an up projection in one are halves, which both are split, or alternate row by row.
    is_joint, halves = place.parameter == "gate_up_proj", getattr(place.owner, "is_concatenated", True)
    sections = 2 if is_joint and halves else style.sections
    unit = 1 if not is_joint or halves else 2
    if shape[dim] % (unit * sections) or shape[dim] // (unit * sections) < size:
        raise ConfigError(
            f"{place.name}: {place.style_name} splits dimension {dim} of {list(shape)}, in {sections * unit} "
            f"parts, over {size} tensor-parallel ranks; use fewer ranks"
        )
    if unit == 1:
        return ParamLayout.split(shape, dim, size, stride=sections)
    pairs = ParamLayout.split((shape[dim] // unit,), 0, size).intervals
    return ParamLayout.of_intervals(
        shape, dim, [[(start * unit, stop * unit) for start, stop in runs] for runs in pairs]
    )


def _check_owners(places: list[_Place], work: _Work) -> None:
    """Check that each module with a split parameter has a style that can carry it out."""
    planned = {(place.owner, name) for place in places for name in _params_of(place)}
    for name, module in work.modules.items():
        for own, param in module._parameters.items():
            layout = None if param is None else work.layouts.get(param)
            if layout is not None and layout[1].dim is not None and (module, own) not in planned:
                raise ConfigError(
                    f"{name}.{own} is the parameter that {layout[0]} splits, and the plan has no style for it; untie "
                    "them (tie_word_embeddings), or use one tensor-parallel rank"
                )
    names = {module: name for name, module in work.modules.items()}
    for attention, heads in work.heads.items():
        for own, param in attention.named_parameters():
            numbers = {heads.queries, heads.groups} - {1, getattr(attention, "head_dim", None)} if heads else set()
            # Norms of latents are as wide as these, which may be as many as heads.
            if param.numel() in numbers and param not in work.layouts and "norm" not in own:
                raise ConfigError(
                    f"{names[attention]}.{own} has an element for each of {param.numel()} heads, and the plan splits "
                    "the heads and not it; use one tensor-parallel rank"
                )
    makers = {place.name.rpartition(".")[0] for place in places if (place.style.target or ENTERING)[1] == SPLIT}
    for place in places:
        module, style = place.owner, place.style
        parent = place.name.rpartition(".")[0]
        if (
            place.parameter is None
            and style.source == (SPLIT, SPLIT)
            and not makers & {parent, parent.rpartition(".")[0]}
        ):
            raise ConfigError(
                f"{place.name}: {place.style_name} reads split features, and the plan splits none of {parent}; use "
                "one tensor-parallel rank"
            )
        if place.parameter is None and style.dim is not None and _is_linear(module) and (lost := _lost(module)):
            raise ConfigError(
                f"{place.name}: {place.style_name} replaces a {type(module).__name__}, and its {lost} would be lost; "
                "remove it, or add it afterwards"
            )
        sums = place.parameter is None and style.dim == -1 and style.source is not None
        if sums and not _is_linear(module) and getattr(module, "bias", None) is not None:
            raise ConfigError(
                f"{place.name}: {place.style_name} of a {type(module).__name__} with a bias adds it on every rank; "
                "use one tensor-parallel rank"
            )


def _lost(module: nn.Module) -> str:
    """Return what a linear layer has that a tensor-parallel one would not."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    params = [param for param in module._parameters.values() if param is not None]
    of_params = [each for param in params for each in (param._backward_hooks, param._post_accumulate_grad_hooks)]
    extra = [*module._modules, *module._buffers, *(module._parameters.keys() - {"weight", "bias"})]
    return ", ".join(
        [*extra, *(["forward"] if "forward" in vars(module) else []), *(["hook"] if any([*hooks, *of_params]) else [])]
    )


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward


def _attention(place: _Place, work: _Work) -> tuple[AttentionHeads | None, str]:
    """Return the heads of the attention module that a place is in, and the place's name there."""
    parts = place.name.split(".")
    for length in (1, 2):
        parent = work.modules.get(".".join(parts[:-length])) if length < len(parts) else None
        if parent is None or not (place.style.keeps_features or place.style.is_partial):
            continue
        if parent not in work.heads:
            work.heads[parent] = heads_of(parent, work.config, work.group.size())
        if (heads := work.heads[parent]) is not None:
            return heads, ".".join(parts[-length:])
    return None, ""


def _carry_out_(place: _Place, work: _Work) -> None:
    module, style = place.owner, place.style
    if place.parameter is None and _is_linear(module) and style.dim is not None:
        if module not in work.replaced:
            work.replaced[module] = _linear(module, style, work)
        parent, _, own = place.name.rpartition(".")
        # An enclosing module may have been replaced, too: linear layers have no children.
        work.modules[parent]._modules[own] = work.replaced[module]
        return
    for name, param in _params_of(place).items():
        if param in work.layouts and work.layouts[param][1].dim is not None:
            _set_part_(module, name, param, work)
        elif style.is_partial or style.vocabulary:
            set_replicas_(module, Replicas(summed_over=("tp",)), name)
    if place.parameter is not None or module in work.replaced:
        return
    work.replaced[module] = module
    layout = getattr(module, "param_layouts", {}).get("weight")
    hooks = Hooks(style, work.group, work.copies, layout, _rotary_width(place, work))
    if style.vocabulary:
        hooks.install_vocabulary_(module)
        # A norm in an embedding reads this rank's rows.
        for part in module.modules():
            if part is not module and part._parameters:
                set_replicas_(part, Replicas(summed_over=("tp",)))
    else:
        hooks.install_(module)


def _rotary_width(place: _Place, work: _Work) -> int:
    """Return the width of the rotary part at the end of a latent; 0 if the style has none."""
    if place.style_name != "mla_kv_a_proj":
        return 0
    parent = work.modules[place.name.rpartition(".")[0]]
    for owner in (parent, getattr(parent, "config", None), work.config):
        if type(width := getattr(owner, "qk_rope_head_dim", None)) is int:
            return width
    raise ConfigError(f"{place.name}: mla_kv_a_proj needs qk_rope_head_dim, and neither module nor config has it")


def _set_part_(module: Any, name: str, param: Parameter, work: _Work) -> None:
    layout = work.layouts[param][1]
    module._parameters[name] = _part(param, layout, work)
    module.param_layouts = getattr(module, "param_layouts", {}) | {name: layout}
    module.param_replicas = getattr(module, "param_replicas", {}) | {name: Replicas()}


@torch.no_grad()
def _part(param: Parameter, layout: ParamLayout, work: _Work) -> Parameter:
    """Return this rank's part of a parameter in its own memory; the same object for a tied one."""
    if param not in work.parameters:
        own = layout.take(param.detach(), work.group.rank()).clone()
        work.parameters[param] = Parameter(own, requires_grad=param.requires_grad)
    return work.parameters[param]


class _Column(ColumnLinear):
    """A layer whose hooks copy the input, and may gather the output; its layouts are those outside of the hooks."""

    gathers = False

    @property
    def input_layout(self) -> Layout:
        return I

    @property
    def output_layout(self) -> Layout:
        return I if self.gathers else super().output_layout


class _Row(RowLinear):
    """A layer whose hooks may scatter the input; its layouts are those outside of the hooks."""

    scatters = False

    @property
    def input_layout(self) -> Layout:
        return I if self.scatters else super().input_layout


def _linear(module: Any, style: Style, work: _Work) -> nn.Module:
    """Make the tensor-parallel layer of a linear layer, with its values, between hooks that move."""
    weight, bias = module.weight, module.bias
    layout = work.layouts[weight][1]
    options: dict[str, Any] = {"group": work.group, "device": "meta", "dtype": weight.dtype, "initialize": False}
    sizes = (module.in_features, module.out_features, bias is not None)
    layer: Any
    if style.dim == -2:
        apart = {"sections": layout.stride} if layout.stride > 1 else {"intervals": layout.intervals}
        gathers = style.target is not None and style.target[0] != style.target[1]
        options |= {} if gathers else apart
        layer = _Column(*sizes, parallelism=LinearParallelism.LOCAL, **options)
        # Autograd's own linear would not choose between libraries.
        layer.plan = layer.plan.with_products(OwnProducts())
        layer.gathers = gathers
    else:
        own = [layout.local_size(rank) // layout.stride for rank in range(work.group.size())]
        layer = _Row(*sizes, sizes=own, sections=layout.stride, **options)
        layer.scatters = style.source is not None and style.source[0] != style.source[1]
    layer.weight = _part(weight, layout, work)
    if bias is not None:
        layer.bias = _part(bias, layer.param_layouts["bias"], work)
    layer.train(module.training)
    splits_logits = work.splits_logits if module is work.head else None
    Hooks(style, work.group, work.copies, layout, splits_logits=splits_logits).install_(layer, sums=style.dim == -1)
    made: nn.Module = layer
    return made
