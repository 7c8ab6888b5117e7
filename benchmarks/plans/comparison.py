"""One tiny model, split by its plan, against the whole model: logits, all gradients, and the norm."""

from __future__ import annotations

import copy
import datetime
import importlib
import inspect
import shutil
import tempfile
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from plans.tiny import VOCAB, Heads, tiny_model
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise import Groups, parallelize
from shardwise.core.errors import ConfigError
from shardwise.core.sharded_state import gather_parameter
from shardwise.nn import named_param_layouts
from shardwise.training.gradients.finalize import finalize_gradients_
from shardwise.training.optimizer.grad_norm import global_grad_norm

TOLERANCE = 1e-5
_WAIT = datetime.timedelta(seconds=60)
# From best to worst: what the ranks report together is the worst.
VERDICTS = ("right", "not run", "refused", "wrong", "error")


@dataclass(frozen=True)
class Result:
    """Result of one model at one number of ranks.

    Attributes:
        verdict: one of ``VERDICTS``; ``not run`` if the whole model does not run at these sizes.
        reason: message of the error.
        largest: for each tensor beyond the tolerance, at most four, its largest difference by its largest element.
        dtype: the dtype that decided.
        splits_loss: whether no rank needed whole logits for the loss.
    """

    verdict: str
    reason: str = ""
    largest: dict[str, float] = field(default_factory=dict)
    dtype: str = "float32"
    splits_loss: bool = False


@dataclass(frozen=True)
class _Run:
    logits: Tensor
    gradients: dict[str, Tensor | None]
    norm: float
    splits_loss: bool


def results(package: str, kind: type[Any], heads: Heads, sizes: list[int], *, theirs: bool) -> dict[str, Any]:
    """Return the result of a class for each number of ranks. Collective over all ranks."""
    found = _results(package, kind, heads, sizes, theirs, torch.float32)
    # Rounding alone may pass the tolerance: fp64 decides.
    unclear = [size for size, each in found.items() if each.largest and max(each.largest.values()) < 1e-2]
    for size, each in (_results(package, kind, heads, unclear, theirs, torch.float64) if unclear else {}).items():
        found[size] = each
    return {str(size): asdict(each) for size, each in found.items()}


def _results(
    package: str, kind: type[Any], heads: Heads, sizes: list[int], theirs: bool, dtype: torch.dtype
) -> dict[int, Result]:
    model: Any = None
    dense: _Run | None = None
    reason = None
    try:
        model = tiny_model(kind, package, heads).to(dtype)
        if dist.get_rank() == 0:
            dense = _run_whole(copy.deepcopy(model))
    except Exception as error:  # A model of any class may fail in any way.
        reason = _shown(error)
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    if reason := next(filter(None, reasons), None):
        return dict.fromkeys(sizes, Result("not run", reason))
    return {size: _compare(copy.deepcopy(model), dense, size, theirs, dtype) for size in sizes}


def _compare(model: Any, dense: _Run | None, size: int, theirs: bool, dtype: torch.dtype) -> Result:
    group = dist.new_group(list(range(size)), timeout=_WAIT)
    own = Result("right")
    if dist.get_rank() < size:
        try:
            split = _run_theirs(model) if theirs else _run_split(model, group)
            if dense is not None:
                own = replace(_judge(split, dense, dtype), splits_loss=split.splits_loss)
        except ConfigError as error:
            own = Result("refused", str(error))
        except Exception as error:  # So may a split one.
            own = Result("error", _shown(error))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return max(every, key=lambda result: VERDICTS.index(result.verdict))


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]


def _judge(split: _Run, dense: _Run, dtype: torch.dtype) -> Result:
    """Compare each tensor by its largest element, or a hundredth of the largest gradient if that is larger."""
    floor = max(float(each.abs().max()) for each in dense.gradients.values() if each is not None) / 100
    differences = {"logits": _difference(split.logits, dense.logits, 0.0)}
    differences["norm"] = abs(split.norm - dense.norm) / dense.norm
    for name, expected in dense.gradients.items():
        found = split.gradients.get(name)
        if expected is not None and found is not None:
            differences[name] = _difference(found, expected, floor)
        elif any(each is not None and bool(each.any()) for each in (found, expected)):
            differences[name] = float("inf")
    beyond = {name: value for name, value in differences.items() if not value <= TOLERANCE}
    largest = dict(sorted(beyond.items(), key=lambda item: -item[1])[:4])
    return Result("wrong" if beyond else "right", largest=largest, dtype=str(dtype).removeprefix("torch."))


def _difference(found: Tensor, expected: Tensor, floor: float) -> float:
    if not expected.numel():
        return 0.0
    return float((found - expected).abs().max() / max(float(expected.abs().max()), floor, 1e-12))


def _run_whole(model: nn.Module) -> _Run:
    logits, splits_loss = _two_micro_batches(model)
    if not logits.isfinite().all():
        raise ArithmeticError("the logits are not finite")
    gradients = {name: param.grad for name, param in model.named_parameters()}
    return _Run(logits, gradients, _norm_of(gradients), splits_loss)


def _run_split(model: nn.Module, group: ProcessGroup) -> _Run:
    parallelize(model, Groups(tp=group))
    logits, splits_loss = _two_micro_batches(model)
    finalize_gradients_(model, tp_group=group, dp_group=None)
    norm = float(global_grad_norm(model, tp_group=group))
    gradients = {
        name: None if param.grad is None else gather_parameter(param.grad, layout, group=group)
        for name, param, layout in named_param_layouts(model, group.size())
    }
    return _Run(logits, gradients, norm, splits_loss)


def _run_theirs(model: Any) -> _Run:
    """Save the model, load it split over all ranks by transformers, and run it."""
    folders: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    if dist.get_rank() == 0:
        model.save_pretrained(folders[0])
    dist.broadcast_object_list(folders)
    distributed = importlib.import_module("transformers.distributed.configuration_utils")
    split = type(model).from_pretrained(
        folders[0],
        dtype=model.dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        distributed_config=distributed.DistributedConfig(tp_size=dist.get_world_size()),
    )
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])
    for module in split.train().modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    logits, splits_loss = _two_micro_batches(split)
    gradients = {name: None if param.grad is None else _whole(param.grad) for name, param in split.named_parameters()}
    return _Run(logits, gradients, _norm_of(gradients), splits_loss)


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _norm_of(gradients: dict[str, Tensor | None]) -> float:
    return float(torch.stack([each.double().norm() for each in gradients.values() if each is not None]).norm())


def _two_micro_batches(model: Any) -> tuple[Tensor, bool]:
    """Accumulate gradients of two micro-batches with 13 and 5 labels; return their outputs, and ``splits_loss``."""
    generator = torch.Generator().manual_seed(3)
    outputs = []
    for num_labels in (13, 5):
        ids = torch.randint(3, VOCAB, (2, 9), generator=generator)
        output = _output(model, ids)
        outputs.append(output.detach())
        # A model without a head has hidden states, at least as many as ids are below.
        labels = ids.flatten() % output.size(-1)
        labels[num_labels:] = -100
        losses = F.cross_entropy(output.flatten(0, 1), labels, reduction="sum")
        (losses / 18).backward()
    splits_loss = all(getattr(each, "is_split", False) for each in outputs)
    return torch.stack(outputs), splits_loss


def _output(model: Any, ids: Tensor) -> Tensor:
    taken = inspect.signature(model.forward).parameters
    if "input_ids" not in taken or model.main_input_name == "pixel_values":
        raise TypeError(f"the model takes {model.main_input_name}, not input_ids alone")
    options: dict[str, Any] = {"use_cache": False} if {"use_cache", "kwargs"} & taken.keys() else {}
    if "decoder_input_ids" in taken:
        options["decoder_input_ids"] = ids
    if "mm_token_type_ids" in taken:
        options["mm_token_type_ids"] = torch.zeros_like(ids)
    result = model(input_ids=ids, **options)
    logits = getattr(result, "logits", None)
    return result.last_hidden_state if logits is None else logits
