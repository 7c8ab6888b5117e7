"""What generation asks of a GPU, on a pretended one: it waits once for each token, and moves nothing but the prompt."""

import pytest
import torch
from harness.model_options import NO_DROPOUT
from harness.on_pretended_gpu import StepRecorder, fake_tensors, join

from shardwise.core.topology import Groups
from shardwise.models.config import ModelConfig
from shardwise.models.generation import GREEDY, PreallocatedCache, Sampling, generate, on_layers
from shardwise.models.generation.decoding import DecodeStep
from shardwise.models.gpt import GPT

NUM_TOKENS = 5
SAMPLINGS = [GREEDY, Sampling(), Sampling(top_k=7, top_p=0.9), Sampling(top_p=0.5)]


class GpuGenerator(torch.Generator):
    """There is no other on a GPU that is pretended."""

    def __new__(cls, device):
        assert device.type == "cuda"
        return super().__new__(cls)

    device = torch.device("cuda", 0)


def made(group, **options):
    config = ModelConfig(
        num_layers=2,
        hidden_size=48,
        num_attention_heads=6,
        num_query_groups=3,
        ffn_hidden_size=30,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        params_dtype=torch.bfloat16,
        **NO_DROPOUT,
    )
    return GPT(config, 101, 64, groups=Groups(tp=group), position_embedding_type="rope", **options)


def what_it_waits_for():
    """For each way to sample and kind of layers: waits and copies so far at each token."""
    group = join(world_size=1)
    torch.Generator = GpuGenerator
    found = []
    with fake_tensors():
        models = [on_layers(made(group), layers)[0] for layers in ("training", "inference")]
        for model, sampling in zip(models * 2, SAMPLINGS, strict=True):
            seen = []
            with StepRecorder() as recorder:
                generate(
                    model,
                    [1, 2, 3],
                    max_new_tokens=NUM_TOKENS,
                    sampling=sampling,
                    on_token=lambda token, seen=seen, recorder=recorder: seen.append(
                        (sum(recorder.waits.values()), sum(recorder.copies.values()))
                    ),
                )
            found.append((seen, dict(recorder.waits), dict(recorder.copies)))
    return found


@pytest.mark.slow
def test_it_waits_once_for_each_token(pretended_gpu):
    for sampling, (seen, waits, copies) in zip(SAMPLINGS, pretended_gpu(what_it_waits_for), strict=True):
        # Top-p alone also reads whether its candidates suffice.
        times = 2 if sampling.top_p < 1 and sampling.top_k == 0 else 1
        # The prompt is moved there.
        assert seen == [(times * (n + 1), 1) for n in range(NUM_TOKENS)], (waits, copies)


def what_a_step_does():
    """Of three tokens: waits and copies, operators, and what was made of which shape."""
    group = join(world_size=1)
    found = []
    with fake_tensors(), torch.no_grad():
        model = made(group).eval()
        cache = PreallocatedCache.for_model(model, batch_size=1, capacity=32)
        cache.extend(3)
        step = DecodeStep(model, cache)
        token = torch.zeros(1, dtype=torch.int64, device="cuda")
        for _ in range(3):
            with StepRecorder() as recorder:
                step(token)
            found.append([dict(x) for x in (recorder.waits, recorder.copies, recorder.operators, recorder.made)])
    return found


@pytest.mark.slow
def test_a_step_is_the_same_for_every_token_and_waits_for_nothing(pretended_gpu):
    """As a CUDA graph needs it."""
    first, *others = pretended_gpu(what_a_step_does)
    assert first[:2] == [{}, {}]
    assert len(first[2]) > 10
    for other in others:
        assert other == first
