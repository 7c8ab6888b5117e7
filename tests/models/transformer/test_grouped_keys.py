"""Keys and values are repeated for their queries only where PyTorch's kernels need it, and the result is the same."""

import pytest
import torch
import torch.nn.functional as F
from harness.on_pretended_gpu import fake_tensors, join
from harness.parity import assert_close_to
from layer_cases import CASES, B, H, S, config_of, layer_of

from shardwise.cli.env_report import _grouped_heads, fast_paths
from shardwise.kernels.dispatch import why_repeat_keys
from shardwise.models.transformer import attention_kernels
from shardwise.models.transformer.attention import SelfAttention

HALF = (torch.float16, torch.bfloat16)
GROUPED = CASES["two key-value heads across ranks"]


@pytest.mark.parametrize(
    ("device", "dtype", "options", "why"),
    [
        # Flash attention takes groups, and with it nothing is copied.
        *(("cuda", dtype, {}, None) for dtype in HALF),
        *(("cuda", dtype, {"head_dim": 256}, None) for dtype in HALF),
        # The memory-efficient kernel takes what flash attention refuses, but no groups.
        ("cuda", torch.float32, {}, "flash attention takes no float32"),
        *(("cuda", dtype, {"head_dim": 257}, "flash attention takes no heads wider than 256") for dtype in HALF),
        *(("cuda", dtype, {"masked": True}, "flash attention takes no mask") for dtype in (*HALF, torch.float32)),
        # No kernel but explicit products takes fp64, or was allowed: copies would help nobody.
        ("cuda", torch.float64, {}, None),
        ("cuda", torch.float64, {"head_dim": 512}, None),
        ("cuda", torch.float32, {"backend": "unfused", "masked": True}, None),
        # It was asked for.
        ("cuda", torch.bfloat16, {"backend": "fused"}, "one kernel of the backend 'fused' takes no grouped heads"),
        # A CPU has a flash attention of its own, which takes all of it.
        *(("cpu", dtype, {"masked": True, "head_dim": 512}, None) for dtype in (*HALF, torch.float32, torch.float64)),
    ],
)
def test_keys_are_repeated_where_the_kernels_need_it(device, dtype, options, why):
    options = {"backend": "auto", "head_dim": 64, "masked": False} | options
    found = why_repeat_keys(options.pop("backend"), device, dtype, **options)
    assert found == why or (why is not None and found.startswith(why))


def what_a_kernel_is_given():
    group, seen = join(), []
    attend = F.scaled_dot_product_attention

    def noted(query, key, value, **options):
        assert key.shape == value.shape
        seen.append((str(query.dtype)[6:], query.size(1), key.size(1), options["enable_gqa"]))
        return attend(query, key, value, **options)

    F.scaled_dot_product_attention = noted
    with fake_tensors():
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            core = SelfAttention(config_of(GROUPED, group, params_dtype=dtype), 1, group)
            core(torch.ones(S, B, H, dtype=dtype, device="cuda")).sum().backward()
    return seen


def test_a_gpu_is_given_repeated_keys_in_fp32(pretended_gpu):
    assert pretended_gpu(what_a_kernel_is_given) == [
        ("float32", 6, 6, False),
        ("bfloat16", 6, 2, True),
        ("float64", 6, 2, True),
    ]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 4e-15)])
def test_attention_on_repeated_keys_is_the_same(group, monkeypatch, dtype, tolerance):
    _, layer = layer_of(GROUPED, group)
    layer.to(dtype)
    results = []
    for why in (None, "asked for"):
        monkeypatch.setattr(attention_kernels, "why_repeat_keys", lambda *arguments, why=why, **options: why)
        x = torch.randn(S, B, H, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
        output = layer.self_attention(x)
        weights = torch.linspace(0.5, 1.5, output.numel(), dtype=dtype).view(output.shape)
        gradients = torch.autograd.grad((output * weights).sum(), [x, *layer.self_attention.parameters()])
        results.append([output.detach(), *gradients])
    for actual, expected in zip(*results, strict=True):
        assert_close_to(actual, expected, rtol_of_norm=tolerance)


def test_what_is_chosen_is_said():
    (on_cpu,) = (path for path in fast_paths([torch.device("cpu")]) if "grouped" in path.name)
    assert (on_cpu.name, on_cpu.on) == ("attention on grouped heads on cpu", True)
    assert on_cpu.why == "without copies (float32, bfloat16)"
    on_cuda = _grouped_heads(torch.device("cuda"))
    assert on_cuda.on
    assert on_cuda.why == (
        "without copies (bfloat16); copied for each query in float32: flash attention takes no float32"
    )
