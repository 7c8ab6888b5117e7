"""Megatron's modules: base class, wrapper for half precision, and specs that build modules."""

import functools
import importlib
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import ConfigError
from shardwise.core.sharded_state import sharded_state_dict, state_of_parts
from shardwise.core.sharding import ParamShard, ShardedOffset
from shardwise.megatron.absent import absent_names
from shardwise.megatron.core import parallel_state
from shardwise.megatron.core.transformer.transformer_config import TransformerConfig
from shardwise.megatron.surface import offer
from shardwise.nn.module import GroupModule
from shardwise.training.pipeline.stage import wrapped

__getattr__ = absent_names("transformer.module")


def param_is_not_shared(param: Tensor) -> bool:
    """True if ``param`` counts on this stage, because it is not a later stage's copy of a tied weight."""
    return not getattr(param, "shared", False)


class MegatronModule(GroupModule):
    """Base class of a program's own modules, and of the models and layers here.

    Args:
        config: config to store. Classes that also derive from the engine's set it later.
    """

    config: Any

    def __init__(self, config: TransformerConfig | None = None) -> None:
        super().__init__()
        self.config = config

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Return ``state_dict``; a program's own modules may override this for their checkpoints."""
        state: dict[str, Any] = self.state_dict(prefix=prefix, keep_vars=keep_vars)
        return state

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[ShardedOffset] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ParamShard]:
        """Return this rank's part of every parameter and persistent buffer, of the module and its children.

        Raises:
            TopologyError: the module has no ``tp_group``, and there is no ambient one.
        """
        group = parallel_state.resolve_tensor_model_parallel_group(getattr(self, "tp_group", None))
        return state_of_parts(self, prefix, sharded_offsets, metadata, group=group)

    def set_is_first_microbatch(self) -> None:
        """Do nothing, because the flag is for caches of fp8 weights, which the config rejects."""


def conversion_helper(val: Any, conversion: Callable[[Any], Any]) -> Any:
    """Apply ``conversion`` to every item of nested tuples and lists."""
    if isinstance(val, (tuple, list)):
        converted = [conversion_helper(item, conversion) for item in val]
        return tuple(converted) if isinstance(val, tuple) else converted
    return conversion(val)


def fp32_to_float16(val: Any, float16_convertor: Callable[[Tensor], Tensor]) -> Any:
    """Convert every fp32 tensor in nested tuples and lists."""
    return conversion_helper(val, lambda item: float16_convertor(item) if _is_of(item, torch.float32) else item)


def float16_to_fp32(val: Any) -> Any:
    """Convert every fp16 or bf16 tensor in nested tuples and lists to fp32."""
    return conversion_helper(val, lambda item: item.float() if _is_of(item, torch.float16, torch.bfloat16) else item)


def _is_of(item: Any, *dtypes: torch.dtype) -> bool:
    return isinstance(item, Tensor) and item.dtype in dtypes


class _Wrapper(nn.Module):
    """Wrapper of a model, with the model's state under the same names."""

    module: nn.Module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's ``state_dict``."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Call the model's ``load_state_dict``."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)


class Float16Module(_Wrapper, MegatronModule):
    """A model in half precision, which converts fp32 inputs on the first stage and its outputs back on the last.

    Args:
        config: config that sets ``fp16`` or ``bf16``.
        module: the model, whose parameters are converted in-place.

    Raises:
        ConfigError: the config sets neither.
    """

    def __init__(self, config: TransformerConfig, module: nn.Module) -> None:
        super().__init__(config)
        if not (config.fp16 or config.bf16):
            raise ConfigError("Float16Module needs fp16=True or bf16=True in the config; both are False")
        self.fp16, self.bf16 = config.fp16, config.bf16
        self._dtype = torch.float16 if config.fp16 else torch.bfloat16
        self.module = module.to(self._dtype)

    def forward(self, *inputs: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        """Run the model's forward; on the last stage return fp32, unless ``fp32_output`` is False."""
        model = wrapped(self.module, "pre_process")
        if model is None or model.pre_process:
            inputs = fp32_to_float16(inputs, lambda value: value.to(self._dtype))
        outputs = self.module(*inputs, **kwargs)
        return float16_to_fp32(outputs) if fp32_output and (model is None or model.post_process) else outputs

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[ShardedOffset] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ParamShard]:
        """Return the model's ``sharded_state_dict``."""
        group = parallel_state.resolve_tensor_model_parallel_group(None)
        return sharded_state_dict(self.module, prefix, sharded_offsets, metadata, group=group)


@dataclass
class ModuleSpec:
    """Recipe for a module; calling the spec builds the module.

    Attributes:
        module: class or function, or its import path as ``(module, name)``.
        params: keyword arguments of the class.
        submodules: argument ``submodules`` of the class, unless None.
        metainfo: data of the program; no effect.
    """

    module: tuple[str, str] | Callable[..., Any]
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None
    metainfo: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build the module; see ``build_module``."""
        return build_module(self, *args, **kwargs)


def import_module(module_path: tuple[str, str]) -> Any:
    """Import the object ``name`` of a module, given as ``(module, name)``; raise ImportError if there is none."""
    base, name = module_path
    module = importlib.import_module(base)
    if not hasattr(module, name):
        raise ImportError(f"a spec names {name!r} of module {base!r}, which has no such name")
    return getattr(module, name)


def get_module(spec_or_module: Any, **additional_kwargs: Any) -> Any:
    """Return the class or function of a spec; a class or function is returned unchanged."""
    if not isinstance(spec_or_module, ModuleSpec):
        return spec_or_module
    module = spec_or_module.module
    return import_module(module) if isinstance(module, tuple) else module


def build_module(spec_or_module: Any, *args: Any, **kwargs: Any) -> Any:
    """Build the module of a spec; a function is returned uncalled.

    Args:
        spec_or_module: a spec or a class.
        args, kwargs: arguments of the class, in addition to the spec's arguments.

    Raises:
        ConfigError: ``spec_or_module`` is neither.
        Exception: an error of the class, with a note that names the class.
    """
    module = get_module(spec_or_module)
    if isinstance(module, types.FunctionType):
        return module
    if not callable(module):
        raise ConfigError(f"{spec_or_module!r} builds no module; give a class or a ModuleSpec")
    params: dict[str, Any] = {}
    if isinstance(spec_or_module, ModuleSpec):
        params = spec_or_module.params
        if spec_or_module.submodules is not None:
            kwargs["submodules"] = spec_or_module.submodules
    try:
        return module(*args, **params, **kwargs)
    except Exception as error:
        error.add_note(f"when a spec's {getattr(module, '__name__', module)} was built")
        raise


def get_submodules(spec: Any) -> Any:
    """Return the ``submodules`` of a spec or of a ``functools.partial``; raise ConfigError if it has none."""
    if isinstance(spec, functools.partial):
        spec = types.SimpleNamespace(**spec.keywords)
    if not hasattr(spec, "submodules"):
        raise ConfigError(f"{spec!r} has no submodules; give a ModuleSpec with submodules")
    return spec.submodules


class IdentityOp(nn.Module):
    """Placeholder for a part that a layer lacks; returns its first argument."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return ``x``."""
        return x


class IdentityFuncOp(IdentityOp):
    """Placeholder that returns a function, which returns its first argument."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return a function that returns its first argument."""
        return super().forward


offer(globals())
