"""Ten steps by PyTorch's own AdamW, clipping and schedule, that runs are compared with."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

STEPS, WARMUP, RATE, CLIP, DECAY = 10, 3, 1e-2, 0.7, 0.1


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch.tokens).logits.flatten(0, 1), batch.labels.flatten())


def reference_losses(model, batches, loss_of=cross_entropy, highest=RATE):
    """The losses of a model of transformers or peft, as it learns from ``batches``."""
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": DECAY},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for step, batch in enumerate(batches):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, CLIP)
        rate = highest * (step + 1) / WARMUP
        if step >= WARMUP:
            done = (step + 1 - WARMUP) / (STEPS - WARMUP)
            rate = highest * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        losses.append(loss.item())
    return losses
