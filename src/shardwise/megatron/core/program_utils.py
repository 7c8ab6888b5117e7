"""Functions of Megatron's ``utils`` that programs call and no layer needs."""

from __future__ import annotations

import functools
import hashlib
import logging
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.communication.agreement import gather_objects
from shardwise.core.errors import ContradictionError
from shardwise.megatron.core import parallel_state
from shardwise.megatron.surface import offer

_F = TypeVar("_F", bound=Callable[..., Any])


class WrappedTensor:
    """A tensor that a callee takes over, so that the caller keeps no reference to it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor

    def unwrap(self) -> Tensor:
        """Return the tensor and forget it.

        Raises:
            ContradictionError: it was unwrapped before.
        """
        if self._tensor is None:
            raise ContradictionError("WrappedTensor has already been unwrapped; wrap the tensor again")
        tensor, self._tensor = self._tensor, None
        return tensor


def deprecate_inference_params(inference_context: Any, inference_params: Any) -> Any:
    """Return ``inference_context``, or with a warning ``inference_params`` if only that is given."""
    if inference_context is not None or inference_params is None:
        return inference_context
    warnings.warn("inference_params is called inference_context; rename the argument", stacklevel=2)
    return inference_params


def deprecated(
    version: str, removal_version: str | None = None, alternative: str | None = None, reason: str | None = None
) -> Callable[[_F], _F]:
    """Return a decorator of functions, each call of which gives a DeprecationWarning with these facts."""
    facts = {"Use {} instead.": alternative, "It will be removed in version {}.": removal_version, "Reason: {}": reason}

    def decorate(function: _F) -> _F:
        said = [f"{function.__name__} is deprecated since version {version}."]
        said += [text.format(fact) for text, fact in facts.items() if fact]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(" ".join(said), DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        marks: Any = function
        marks._deprecated, marks._deprecated_version, marks._removal_version = True, version, removal_version
        marks._alternative, marks._deprecation_reason = alternative, reason
        return functools.update_wrapper(call, function)  # type: ignore[return-value]

    return decorate


def internal_api(func: _F) -> _F:
    """Mark a function or class as internal, and return it."""
    marks: Any = func
    marks._internal_api = True
    return func


def null_decorator(*args: Any, **kwargs: Any) -> Any:
    """Return the decorated function unchanged; works with and without arguments."""
    if len(args) == 1 and not kwargs and callable(args[0]):
        return args[0]
    return lambda function: function


def nvtx_decorator(message: str | None = None, color: str | None = None) -> Callable[[_F], _F]:
    """Return a decorator that leaves a function as it is, as Megatron's does until NVTX is enabled."""
    return lambda function: function


def get_te_version() -> None:
    """Return None, because Transformer Engine is not used even if it is installed."""


def get_fa_version() -> None:
    """Return None, because the package flash-attn is not used even if it is installed."""


def is_fa_min_version(version: str, check_equality: bool = True) -> bool:
    """Return False, because the package flash-attn is not used even if it is installed."""
    return False


def get_torch_version() -> str:
    """Return PyTorch's version, which compares with versions in text."""
    return torch.__version__


def get_attr_wrapped_model(model: Any, attr: str, allow_none: bool = True, return_model_obj: bool = False) -> Any:
    """Return the attribute ``attr`` of a model, or of the model that it wraps as its ``module``.

    Args:
        model: a model.
        attr: name of the attribute.
        allow_none: whether the attribute may be None; otherwise the search continues in the wrapped model.
        return_model_obj: whether to return the model with the attribute instead.

    Raises:
        ContradictionError: no model has the attribute, or ``model`` is a list.
    """
    found = model
    while not hasattr(found, attr) or (not allow_none and getattr(found, attr) is None):
        if not hasattr(found, "module"):
            hint = "; give one model of the list" if isinstance(model, list) else ""
            raise ContradictionError(f"a {type(model).__name__} has no attribute {attr!r}, nor what it wraps{hint}")
        found = found.module
    return found if return_model_obj else getattr(found, attr)


def get_model_config(model: Any) -> Any:
    """Return the config of a model, or of the model that it wraps."""
    return get_attr_wrapped_model(model, "config", allow_none=False)


def unwrap_model(model: Any, module_instances: type | tuple[type, ...] | None = None) -> Any:
    """Return the model inside wrappers with a ``module``, or a list of models.

    Args:
        model: a model or a list of models.
        module_instances: classes of wrappers; None means any object with a ``module``.
    """
    if isinstance(model, list):
        return [unwrap_model(each, module_instances) for each in model]
    while hasattr(model, "module") and (module_instances is None or isinstance(model, module_instances)):
        model = model.module
    return model


def get_model_type(model: Any) -> Any:
    """Return ``model_type`` of a model, or of the model that it wraps."""
    return get_attr_wrapped_model(model, "model_type")


def get_model_xattn(model: Any) -> Any:
    """Return ``xattn_needed`` of a model, or of the model that it wraps; False without it."""
    try:
        return get_attr_wrapped_model(model, "xattn_needed")
    except ContradictionError:
        return False


def is_submodule(module: nn.Module, parent_module: nn.Module, strict: bool = True) -> bool:
    """True if ``module`` is in ``parent_module``; the parent itself counts only without ``strict``."""
    return any(module is each for each in parent_module.modules()) and not (strict and module is parent_module)


def is_using_quantization_scales(config: Any) -> Any:
    """Return the ``fp8`` or ``fp4`` of a config, which are None here."""
    return getattr(config, "fp8", False) or getattr(config, "fp4", False)


def round_up_to_nearest_multiple(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def log_on_each_pipeline_stage(
    logger: logging.Logger,
    *args: Any,
    tp_group: ProcessGroup | None = None,
    dp_cp_group: ProcessGroup | None = None,
    **kwargs: Any,
) -> None:
    """Log on the first tensor- and data-parallel rank of each stage, by ``logger.log(*args, **kwargs)``.

    Raises:
        ContradictionError: only one of the groups is given.
    """
    if (tp_group is None) != (dp_cp_group is None):
        raise ContradictionError("one of tp_group and dp_cp_group is given; give both, or neither")
    if tp_group is None:
        tp_group = parallel_state.get_tensor_model_parallel_group()
        dp_cp_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    assert tp_group is not None
    assert dp_cp_group is not None
    if tp_group.rank() == 0 and dp_cp_group.rank() == 0:
        logger.log(*args, **kwargs)


def check_param_hashes_across_dp_replicas(model: Iterable[nn.Module], cross_check: bool = False) -> bool:
    """Compare hashes of the parameters over data-parallel ranks. Collective over them.

    Args:
        model: chunks of the model.
        cross_check: whether all ranks must agree; otherwise this rank with the first one.

    Returns:
        Whether they do, for parameters of experts (``allreduce=False``) over the ranks that hold them.
    """
    own: dict[bool, list[str]] = {True: [], False: []}
    for chunk in model:
        for name, param in chunk.named_parameters():
            value = param.detach().cpu().contiguous().view(torch.uint8)
            own[getattr(param, "allreduce", True)].append(hashlib.sha256(value.numpy().tobytes()).hexdigest() + name)
    matches = True
    for is_dense, group in (
        (True, parallel_state.get_data_parallel_group()),
        (False, parallel_state.get_expert_data_parallel_group()),
    ):
        assert group is not None
        hashes = gather_objects(own[is_dense], "hashes of the parameters", group=group)
        matches &= all(each == own[is_dense] for each in (hashes if cross_check else hashes[:1]))
    return matches


offer(globals())
