"""Run as a program under TRITON_INTERPRET=1: AdamW's kernel against its definition in fp64 and PyTorch's fused AdamW.

A process of its own, since Triton reads the variable when it is imported. The CPU stands for a GPU.
"""

import json
import sys

import torch
import triton.language as tl
from torch import nn
from torch.nn import Parameter
from triton.runtime import interpreter

from shardwise.kernels import dispatch
from shardwise.training.optimizer.adamw import AdamW
from shardwise.training.optimizer.exact_adamw import ExactAdamW
from shardwise.training.optimizer.optimizer import MasterWeights

_own = interpreter._convert_float


def rounded(data, source, target, mode):
    """To bf16 as a GPU rounds; the interpreter cuts the other bits off."""
    if (source, target) != (tl.float32, tl.bfloat16):
        return _own(data, source, target, mode)
    return torch.from_numpy(data).to(torch.bfloat16).view(torch.uint16).numpy()


interpreter._convert_float = rounded

# More than two blocks, an odd number, a number that fills no vector, and one.
SHAPES = ((67, 76), (2049,), (5, 3), (1,))
OPTIONS = {"learning_rate": 3e-4, "weight_decay": 0.1, "betas": (0.9, 0.95), "epsilon": 1e-8}


class Model(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator(torch.get_default_device()).manual_seed(1)
        values = (torch.randn(shape, generator=generator) / 40 for shape in SHAPES)
        self.weights = nn.ParameterList(Parameter(each.to(dtype)) for each in values)


def gradients(step):
    generator = torch.Generator(torch.get_default_device()).manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) / 100 for shape in SHAPES]


def run(steps, dtype, scale, kernel):
    """The fp32 weights after some steps, those of the definition in fp64, and the model's."""
    dispatch.ADAMW_TRITON.device_type = torch.get_default_device().type if kernel else "nowhere"
    dispatch.ADAMW_TRITON.missing = lambda call: None
    model = Model(dtype)
    inner = AdamW(model, **OPTIONS)
    inner.clears_gradients = kernel
    optimizer = MasterWeights(inner, model)
    exact = [optimizer.weight_of(each).double() for each in model.weights]
    means = [[torch.zeros_like(each) for each in exact] for _ in range(2)]
    for param in model.weights:
        param.main_grad = torch.empty(param.shape)
    lr, (beta1, beta2) = OPTIONS["learning_rate"], OPTIONS["betas"]
    for step in range(1, steps + 1):
        for place, (param, gradient) in enumerate(zip(model.weights, gradients(step), strict=True)):
            if dtype == torch.float32:
                param.grad = gradient.clone()
            param.main_grad.copy_(gradient)
            wide = gradient.double() / scale
            means[0][place] = beta1 * means[0][place] + (1 - beta1) * wide
            means[1][place] = beta2 * means[1][place] + (1 - beta2) * wide**2
            mean, square = means[0][place] / (1 - beta1**step), means[1][place] / (1 - beta2**step)
            decay = OPTIONS["weight_decay"] if param.dim() > 1 else 0.0
            exact[place] = exact[place] * (1 - lr * decay) - lr * mean / (square.sqrt() + OPTIONS["epsilon"])
        inner.grad_scale = torch.tensor(scale)
        optimizer.step()
        assert inner.grad_scale is None
        assert inner.has_cleared == kernel
        assert inner.has_rounded == (kernel and dtype != torch.float32)
        if kernel:
            held = [param.grad if dtype == torch.float32 else param.main_grad for param in model.weights]
            assert all(each.eq(0).all() for each in held)
    masters = [optimizer.weight_of(each) for each in model.weights]
    assert all(torch.equal(param, master.to(dtype)) for param, master in zip(model.weights, masters, strict=True))
    return torch.cat([(own - definition).abs().flatten() for own, definition in zip(masters, exact, strict=True)])


def check_distances(steps, dtype, scale):
    own, pytorch = (run(steps, dtype, scale, kernel) for kernel in (True, False))
    assert own.max() <= 1.5 * pytorch.max(), (own.max(), pytorch.max())
    assert own.mean() <= 1.5 * pytorch.mean(), (own.mean(), pytorch.mean())
    return float(own.max() / pytorch.max()), float(own.mean() / pytorch.mean())


def check_state():
    """Steps of the kernel go on as PyTorch's, and the other way round."""
    found = []
    for kernels in ((True, False), (False, True)):
        model = Model(torch.float32)
        optimizer = AdamW(model, **OPTIONS)
        for step, kernel in enumerate(kernels, 1):
            dispatch.ADAMW_TRITON.device_type = torch.get_default_device().type if kernel else "nowhere"
            for param, gradient in zip(model.weights, gradients(step), strict=True):
                param.grad = gradient
            optimizer.step()
            steps = {float(optimizer.state[param]["step"]) for param in model.weights}
            assert steps == {float(step)}, steps
        found.append([each.detach() for each in model.weights])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-8)


def check_refusals():
    """What the kernel does not update, PyTorch's operations do."""
    dispatch.ADAMW_TRITON.device_type = "cpu"
    for change in ("fp64", "strided", "exact", "unaligned"):
        model = Model(torch.float64 if change == "fp64" else torch.float32)
        optimizer = ExactAdamW(model, **OPTIONS, parts=4) if change == "exact" else AdamW(model, **OPTIONS)
        optimizer.clears_gradients = True
        for param, gradient in zip(model.weights, gradients(1), strict=True):
            param.grad = gradient.to(param.dtype)
        if change == "strided":
            model.weights[0].grad = model.weights[0].grad.t().contiguous().t()
        if change == "unaligned":
            memory = torch.zeros(2050)
            memory[1:].copy_(model.weights[1].grad)
            model.weights[1].grad = memory[1:]
        before = [each.detach().clone() for each in model.weights]
        optimizer.step()
        assert not optimizer.has_cleared, change
        assert all(not torch.equal(one, other) for one, other in zip(before, model.weights, strict=True))


def main():
    found = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for steps in (1, 30):
            found[f"{dtype}, {steps}"] = check_distances(steps, dtype, 2.7)
    check_state()
    check_refusals()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
