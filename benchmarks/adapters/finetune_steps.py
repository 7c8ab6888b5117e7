"""One fine-tuning step of each library: forward, loss, backward, clipping by the global norm, AdamW of the adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch
from steps.baselines import by_mesh, clip_together_, whole
from steps.problem import ADAM_EPSILON, BETAS, LEARNING_RATE, MAX_GRAD_NORM, Step
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from adapters.problem import IGNORED, Files
from shardwise.core.topology import Groups, Topology
from shardwise.models.gpt import GPT
from shardwise.storage.adapters import load_adapter_
from shardwise.storage.huggingface import load_pretrained
from shardwise.storage.huggingface.pretrained import PretrainedFolder
from shardwise.training.gradients.finalize import finalize_gradients_
from shardwise.training.optimizer.adamw import AdamW
from shardwise.training.optimizer.clipping import clip_grad_norm_

Batch = tuple[Tensor, Tensor]
Maker = Callable[[Files, Batch], Step]


def make_ours(files: Files, batch: Batch, topology: Topology) -> Step:
    """Create a step of Shardwise's model with adapters, split over the topology's ranks."""
    groups, tp_group = Groups.of(topology), topology.group("tp")
    model = load_pretrained(files.model, groups=groups, device="cpu")
    assert isinstance(model, GPT)
    load_adapter_(model, files.adapter, PretrainedFolder(files.model).architecture)
    optimizer = AdamW(model, learning_rate=LEARNING_RATE, weight_decay=0.0, betas=BETAS, epsilon=ADAM_EPSILON)
    (ids, labels), num_labels = batch, _num_labels(batch)

    def step() -> tuple[Tensor, Tensor]:
        loss = model(ids, labels=labels).sum() / num_labels
        loss.backward()
        finalize_gradients_(model, tp_group=tp_group, dp_group=None)
        norm = clip_grad_norm_(model, MAX_GRAD_NORM, tp_group=tp_group)
        assert norm is not None
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return step


def make_peft(files: Files, batch: Batch, **options: Any) -> Step:
    """Create a step of ``peft`` on ``transformers``; with ``tp_plan="auto"``, transformers splits it over its ranks."""
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(files.model, dtype=torch.float32, **options)
    config = peft.LoraConfig.from_pretrained(files.adapter)
    config.inference_mode = False
    model = peft.get_peft_model(base, config).train()
    _load_(model, safetensors.torch.load_file(files.adapter / "adapter_model.safetensors"))
    trained = [param for param in model.parameters() if param.requires_grad]
    several = by_mesh(trained)
    optimizer = torch.optim.AdamW(
        [{"params": params} for params in several],
        lr=LEARNING_RATE,
        weight_decay=0.0,
        betas=BETAS,
        eps=ADAM_EPSILON,
        fused=True,
    )
    (ids, labels), num_labels = batch, _num_labels(batch)

    def step() -> tuple[Tensor, Tensor]:
        # The model shifts labels unless shifted labels are given.
        loss = model(input_ids=ids, shift_labels=labels, labels=labels, num_items_in_batch=num_labels).loss
        loss.backward()
        norm = clip_together_(several)
        optimizer.step()
        optimizer.zero_grad()
        return whole(loss.detach()), norm

    return step


@torch.no_grad()
def _load_(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy the adapters' whole tensors into the model; of split tensors, only this rank's part."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and isinstance(module.weight, DTensor):
            # transformers reads the whole size here, but peft 0.21 writes the local size for adapters.
            module.out_features, module.in_features = module.weight.shape
    for name, param in model.named_parameters():
        if param.requires_grad:
            values = tensors.pop(name.replace(".default.", "."))
            if isinstance(param, DTensor):
                values = distribute_tensor(values, param.device_mesh, param.placements)
            param.copy_(values)
    assert not tensors


def _num_labels(batch: Batch) -> int:
    return int((batch[1] != IGNORED).sum())
