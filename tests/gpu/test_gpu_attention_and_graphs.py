"""Which attention PyTorch chooses, whole layers under torch.compile, and a step captured in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness.model_options import LLAMA, NO_DROPOUT
from torch.profiler import ProfilerActivity, profile

from shardwise.core.topology import Groups
from shardwise.models.config import ModelConfig
from shardwise.models.gpt import GPT

V, S = 301, 32
WIDTH = 512


@pytest.fixture
def group():
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def llama(group, device, full, **options):
    """A Llama of two layers, of which a GPU has more to do where ``full``."""
    width = WIDTH if full else 32
    config = ModelConfig(
        num_layers=2,
        hidden_size=width,
        num_attention_heads=4,
        ffn_hidden_size=2 * width,
        **LLAMA,
        **NO_DROPOUT,
        **options,
    )
    with torch.device(device):
        return GPT(config, V, S, groups=Groups(tp=group), position_embedding_type="rope")


def attention_operators(step, device):
    """Names of the operators of fused or written-out attention that ``step`` ran."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        step()
    return {event.key for event in profiler.key_averages() if "_scaled_dot_product_" in event.key}


@pytest.mark.parametrize("num_query_groups", [4, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_is_fused(group, device, full, dtype, num_query_groups):
    """Neither grouped heads nor fp32 take attention written out, which keeps a number for each pair of tokens."""
    model = llama(group, device, full, params_dtype=dtype, num_query_groups=num_query_groups)
    ids = torch.randint(V, (2, S), device=device)
    found = attention_operators(lambda: model(ids, labels=ids).sum().backward(), device)
    assert found, "the profiler has seen no attention"
    assert not [name for name in found if "math" in name], found
    if device.type == "cuda" and dtype == torch.bfloat16:
        assert any("flash" in name or "cudnn" in name for name in found), found


# PyTorch's own, while it traces autograd functions.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_model_is_the_model(group, device, full, dtype):
    torch.manual_seed(0)
    model = llama(group, device, full, params_dtype=dtype, num_query_groups=2)
    ids = torch.randint(V, (2, S), device=device)
    # A rehearsal compiles nothing: that a model has no graph break the suite shows elsewhere.
    compiled = torch.compile(model, fullgraph=True) if full else model
    results = []
    for each in (model, compiled):
        loss = each(ids, labels=ids)
        loss.sum().backward()
        results.append([loss.detach(), *(param.grad for param in model.parameters())])
        model.zero_grad()
    for eager, other in zip(*results, strict=True):
        error = (eager.double() - other.double()).abs().max()
        assert error <= (2**-5 if dtype == torch.bfloat16 else 1e-4) * eager.double().abs().max()


def captured(step, device):
    """What repeats ``step`` on what is in its tensors then: a CUDA graph, or in a rehearsal the function itself."""
    if device.type != "cuda":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def test_forward_and_backward_in_a_graph(group, device, full):
    torch.manual_seed(0)
    model = llama(group, device, full, params_dtype=torch.float32)
    ids = torch.randint(V, (2, S), device=device)
    params = list(model.parameters())
    losses = torch.empty(2, S, device=device)
    grads = [torch.empty_like(param) for param in params]

    def step():
        result = model(ids, labels=ids)
        losses.copy_(result.detach())
        for kept, grad in zip(grads, torch.autograd.grad(result.sum(), params), strict=True):
            kept.copy_(grad)

    replay = captured(step, device)
    for _ in range(2):
        ids.copy_(torch.randint(V, (2, S), device=device))
        replay()
        found = [losses.clone(), *(grad.clone() for grad in grads)]
        step()
        for one, other in zip(found, (losses, *grads), strict=True):
            assert (one - other).abs().max() <= 1e-5 * other.abs().max()
