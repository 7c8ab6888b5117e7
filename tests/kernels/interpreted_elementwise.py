"""Run as a program under TRITON_INTERPRET=1: SwiGLU, rotary embedding and the norm of a sum against their definitions.

A process of its own, since Triton reads the variable when it is imported. The CPU stands for a GPU: values and
gradients come through the functions that models call, once by their kernels and, in fp64, once by PyTorch's operations.
"""

import contextlib

import numpy
import torch
import torch.distributed as dist
from failing_cases import print_failures

from shardwise.kernels import dispatch, norms_triton
from shardwise.kernels.elementwise import rotate, split_and_rotate, swiglu
from shardwise.kernels.norms import add_rms_norm
from shardwise.models.config import ModelConfig
from shardwise.models.recomputation import Recomputation
from shardwise.models.transformer.layer import TransformerLayer, TransformerLayerSpec
from shardwise.models.transformer.rotary import RotaryEmbedding

# A few roundings of each number, and of bf16 the interpreter cuts off where the GPU rounds.
RTOL = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
PATHS = (dispatch.ELEMENTWISE_TRITON, dispatch.ADD_NORM_TRITON)


@contextlib.contextmanager
def kernels(on=True):
    """Within, the kernels run where tensors are made by default, or nowhere."""
    for path in PATHS:
        path.device_type = torch.get_default_device().type if on else "nowhere"
    try:
        yield
    finally:
        for path in PATHS:
            path.device_type = "cuda"


def check(function, kernel, *inputs, node):
    """Values and gradients of ``function``, in the inputs' dtype by the kernel and in fp64 without it."""
    dtype = inputs[0].dtype
    copies = [x.clone() for x in inputs]
    results = []
    for wide in (False, True):
        # The strides of the inputs stay.
        given = [x.detach().requires_grad_() if not wide else x.detach().double().requires_grad_() for x in inputs]
        with kernels(not wide):
            outputs = function(*given)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            assert wide or any(node in type(x.grad_fn).__name__ for x in outputs), [x.grad_fn for x in outputs]
            generator = torch.Generator(torch.get_default_device()).manual_seed(7)
            grads = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(dtype) for x in outputs]
            # Of no particular layout.
            grads = [torch.stack((x, x), dim=1).select(1, 0).to(outputs[0].dtype) for x in grads]
            results.append([*outputs, *torch.autograd.grad(outputs, given, grads)])
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == dtype
        assert actual.shape == expected.shape
        error = (actual.double() - expected).abs()
        bound = RTOL[dtype] * (expected.abs() + expected.abs().mean())
        assert bool((error <= bound).all()), (kernel, float((error / bound).max()))
    assert all(torch.equal(x, copy) for x, copy in zip(inputs, copies, strict=True))


def random(*shape, dtype, scale=1.0):
    return (scale * torch.randn(*shape, dtype=torch.float64)).to(dtype)


def check_swiglu(dtype):
    for shape in ((5, 3, 14), (2,), (2, 2050)):
        check(swiglu, "swiglu", random(*shape, dtype=dtype, scale=4.0), node="SwiGLU")
    # Rows of a wider matrix, columns that do not lie together, rows that do not lie evenly.
    wide = random(6, 3, 20, dtype=dtype)
    for inner in (wide[..., 3:17], wide.transpose(0, 2), wide[::2, :2, 1:11]):
        check(swiglu, "swiglu", inner, node="SwiGLU")


def check_swiglu_of_extreme_gates():
    gates = torch.tensor([0.0, -0.0, 88.0, -88.0, 1e4, -1e4, torch.inf, torch.nan])
    inner = torch.cat((gates, torch.full_like(gates, 2.0))).requires_grad_()
    with kernels(on=False):
        expected = swiglu(inner)
        (expected_grad,) = torch.autograd.grad(expected[:6].sum(), inner)
    # The interpreter is NumPy, which warns of exp(1e4).
    with kernels(), numpy.errstate(all="ignore"):
        output = swiglu(inner)
        (grad,) = torch.autograd.grad(output[:6].sum(), inner)
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-35, equal_nan=True)
    torch.testing.assert_close(grad[:6], expected_grad[:6], rtol=1e-6, atol=1e-35)


def angles(positions, rotated, dtype):
    cos, sin = RotaryEmbedding(rotated)(positions, torch.float64)
    # As in YaRN, it is no rotation.
    return (1.3 * cos).to(dtype), (1.3 * sin).to(dtype)


def check_rotary(dtype, interleaved):
    s, b = 3, 2
    for head_dim, rotated in ((10, 10), (10, 6), (8, 0)) if dtype == torch.float64 else ((10, 6),):
        for positions in (torch.arange(s), torch.stack((torch.arange(s), torch.arange(s) + 3))):
            cos, sin = angles(positions, rotated, dtype)

            def turn(x, cos=cos, sin=sin):
                return rotate(x, cos.to(x.dtype), sin.to(x.dtype), interleaved=interleaved)

            transposed = random(b, 3, s, head_dim, dtype=dtype).permute(2, 0, 1, 3)
            part = random(s, b, 3, 3 * head_dim, dtype=dtype)[..., head_dim : 2 * head_dim]
            expanded = random(s, 1, 3, head_dim, dtype=dtype).expand(s, b, 3, head_dim)
            for input_ in (transposed, part, expanded, random(s, b, head_dim, 3, dtype=dtype).transpose(2, 3)):
                check(turn, "rotate", input_, node="Rotate")


def check_split_and_rotate(dtype, interleaved):
    s, b, head_dim = 3, 2, 10
    cos, sin = angles(torch.arange(s), 6, dtype)
    for per_group, num_groups in ((1, 3), (3, 2)):

        def turn(x, per_group=per_group):
            return split_and_rotate(
                x,
                cos.to(x.dtype),
                sin.to(x.dtype),
                queries_per_group=per_group,
                head_dim=head_dim,
                interleaved=interleaved,
            )

        rows = num_groups * (per_group + 2) * head_dim
        check(turn, "split", random(s, b, rows, dtype=dtype), node="SplitAndRotate")
        check(turn, "split", random(s, b, rows + 3, dtype=dtype)[..., :rows], node="SplitAndRotate")


def check_add_norm(dtype):
    for shape in ((1,), (5, 3, 14), (7, 17), (3, 1025)):
        weight = random(shape[-1], dtype=dtype)
        terms = [(random(*shape, dtype=dtype), random(*shape, dtype=dtype))]
        if len(shape) == 2:
            padded = random(*shape[:-1], shape[-1] + 5, dtype=dtype)[..., 2:-3]
            terms.append((padded, random(*shape[::-1], dtype=dtype).t()))
        for residual, added in terms:
            check(lambda x, y, w: add_rms_norm(x, y, w, 1e-5), "norm", residual, added, weight, node="AddRMSNorm")


def check_strides_beyond_32_bits():
    """Rows, and heads, of which one begins more than 2^31 elements after another. Untouched memory is not taken."""
    stride, d = 2**31 + 8, 16
    memory = torch.empty(stride + d, dtype=torch.bfloat16)
    rows = memory.as_strided((2, d), (stride, 1))
    rows.copy_(torch.randn(2, d))
    heads = memory.as_strided((1, 1, 2, d), (1, 1, stride, 1))
    mixed = memory.as_strided((2, 1, d), (stride, 1, 1))
    cos, sin = angles(torch.arange(2), 4, torch.bfloat16)
    weight = torch.ones(d, dtype=torch.bfloat16)
    for function in (
        lambda x, y, z: swiglu(x),
        lambda x, y, z: rotate(y, cos[:1] + 0.5, sin[:1] + 0.5),
        lambda x, y, z: torch.cat(split_and_rotate(z, cos, sin, queries_per_group=2, head_dim=4), dim=2),
        lambda x, y, z: torch.cat(add_rms_norm(x, x, weight)),
    ):
        expected = function(rows.clone(), heads.clone(), mixed.clone())
        with kernels("cpu"):
            actual = function(rows, heads, mixed)
        torch.testing.assert_close(actual, expected, rtol=2**-5, atol=2**-5)


def check_parts_of_the_norm_of_a_sum():
    """One result alone is used, and a weight that is not learned."""
    residual, added, weight = (random(*n, dtype=torch.float64).requires_grad_() for n in ((3, 7), (3, 7), (7,)))
    inputs = (residual, added, weight)
    for used in (lambda total, normed: total, lambda total, normed: normed):
        with kernels(on=False):
            expected = used(*add_rms_norm(*inputs)).square().sum()
        with kernels():
            actual = used(*add_rms_norm(*inputs)).square().sum()
            grads = torch.autograd.grad(actual, inputs, allow_unused=True)
        for grad, exact in zip(grads, torch.autograd.grad(expected, inputs, allow_unused=True), strict=True):
            assert (grad is None) == (exact is None)
            if grad is not None:
                torch.testing.assert_close(grad, exact, rtol=1e-12, atol=1e-13)
    with kernels():
        frozen = add_rms_norm(residual, added, weight.detach())[1]
        (grad,) = torch.autograd.grad(frozen.sum(), residual)
    with kernels(on=False):
        (exact,) = torch.autograd.grad(add_rms_norm(*inputs)[1].sum(), residual)
    torch.testing.assert_close(grad, exact, rtol=1e-12, atol=1e-13)


def check_what_is_kept():
    inner = torch.randn(6, 20, requires_grad=True)
    mixed = torch.randn(5, 2, 2 * 4 * 8, requires_grad=True)
    cos, sin = angles(torch.arange(5), 8, torch.float32)
    terms = [torch.randn(6, 10, requires_grad=True) for _ in range(2)]
    weight = torch.ones(10, requires_grad=True)
    for function, sizes in (
        (lambda: swiglu(inner), [120]),
        (lambda: split_and_rotate(mixed, cos, sin, queries_per_group=2, head_dim=8), [20, 20]),
        (lambda: add_rms_norm(*terms, weight), [6, 10, 60]),
    ):
        saved = []
        with (
            kernels(),
            torch.autograd.graph.saved_tensors_hooks(lambda x, kept=saved: kept.append(x.numel()) or x, lambda x: x),
        ):
            function()
        assert sorted(saved) == sizes, (saved, sizes)


def check_a_layer():
    """Every place where a layer has work for the kernels, in the four kinds of layer and of heads."""
    torch.manual_seed(1)
    for options in (
        {"num_query_groups": 2},
        {"norm_position": "post", "rotary_interleaved": True},
        {"qk_layernorm": True, "apply_residual_connection_post_layernorm": True},
        {"layernorm_zero_centered_gamma": True, "recompute": Recomputation("selective", modules=("mlp_act",))},
        {"recompute": Recomputation("selective", modules=("layernorm",))},
    ):
        config = ModelConfig(
            num_layers=1,
            hidden_size=24,
            num_attention_heads=4,
            ffn_hidden_size=14,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=torch.float64,
            **options,
        )
        layer = TransformerLayer(config, TransformerLayerSpec(), 1, dist.group.WORLD)
        hidden = torch.randn(5, 2, 24, dtype=torch.float64, requires_grad=True)
        rotary = RotaryEmbedding(6)(torch.arange(5), torch.float64)
        results = []
        for on in (False, True):
            with kernels(on):
                output = layer(hidden, rotary=rotary)
                output.square().sum().backward()
            results.append([output, hidden.grad, *(param.grad for param in layer.parameters())])
            hidden.grad = None
            layer.zero_grad()
        for expected, actual in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


def cases():
    for dtype in RTOL:
        yield f"swiglu {dtype}", lambda d=dtype: check_swiglu(d)
        yield f"norm {dtype}", lambda d=dtype: check_add_norm(d)
        for interleaved in (False, True):
            yield f"rotary {dtype} {interleaved}", lambda d=dtype, i=interleaved: check_rotary(d, i)
            yield f"split {dtype} {interleaved}", lambda d=dtype, i=interleaved: check_split_and_rotate(d, i)
    for special in (
        check_swiglu_of_extreme_gates,
        check_strides_beyond_32_bits,
        check_parts_of_the_norm_of_a_sum,
        check_what_is_kept,
        check_a_layer,
    ):
        yield special.__name__, special


def main():
    torch.manual_seed(0)
    dispatch.ELEMENTWISE.min_size = 1 << 40
    # Fewer than rows.
    norms_triton._PROGRAMS = 3
    for path in PATHS:
        path.missing = lambda call: None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print_failures(cases())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
