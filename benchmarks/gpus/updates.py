"""AdamW's step of a 16-bit model with fp32 copies on one GPU, by Triton's kernel and by PyTorch's fused one."""

from __future__ import annotations

import torch
from torch import nn

from gpus.measuring import Row, milliseconds
from shardwise.kernels import dispatch
from shardwise.training.optimizer.adamw import AdamW
from shardwise.training.optimizer.optimizer import MasterWeights

# Bytes that a step moves for each parameter: reads of gradient, weight and means, and writes; PyTorch also writes the
# scaled gradient, and reads the weight again to round it. Both clear the gradient.
NUM_BYTES = {"Triton's kernel": 34, "PyTorch's fused AdamW": 42}


def measure_update(device: torch.device, num_parameters: int, repeats: int) -> list[Row]:
    """Measure steps of ``num_parameters`` in matrices of 4,096 columns."""
    rows, scale = [], torch.full((), 1.5, device=device)
    missing = dispatch.ADAMW_TRITON.missing
    for name, num_bytes in NUM_BYTES.items():
        model = nn.Linear(4096, max(1, num_parameters // 4096), bias=False, device=device, dtype=torch.bfloat16)
        inner = AdamW(model, learning_rate=1e-4, weight_decay=0.1, betas=(0.9, 0.95), epsilon=1e-8)
        inner.clears_gradients = True
        optimizer = MasterWeights(inner, model)
        gradient = torch.zeros(model.weight.shape, device=device)
        setattr(model.weight, "main_grad", gradient)  # noqa: B010
        dispatch.ADAMW_TRITON.missing = missing if "Triton" in name else lambda call: "it is not measured"

        def step(inner: AdamW = inner, optimizer: MasterWeights = optimizer, gradient: torch.Tensor = gradient) -> None:
            inner.grad_scale = scale
            optimizer.step()
            if not inner.has_cleared:
                gradient.zero_()

        try:
            took = milliseconds(step, device, repeats=repeats)
            ran = "Triton's kernel" if inner.has_cleared else "PyTorch's fused AdamW"
            rate = num_bytes * model.weight.numel() / took / 1e6
            note = f"{num_bytes} bytes a parameter, {rate:.0f} GB/s" + ("" if ran == name else f"; {ran} ran instead")
            rows.append(Row("update of AdamW", name, f"{took:.3g} ms", note=note))
        finally:
            dispatch.ADAMW_TRITON.missing = missing
    return rows
