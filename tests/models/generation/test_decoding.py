"""A step at a position on the device reads what any pass reads. The CPU stands for a GPU, by the definition."""

import contextlib

import pytest
import torch
from models.generation.test_generation import WINDOW, make_model
from models.test_gpt import SHAPES

from shardwise.core.errors import ShardingError
from shardwise.core.topology import Groups
from shardwise.kernels import dispatch
from shardwise.models.config import ModelConfig
from shardwise.models.generation import GREEDY, PreallocatedCache, Sampling, generate
from shardwise.models.generation.decoding import DecodeStep
from shardwise.models.gpt import GPT
from shardwise.models.transformer.heads import LocalHeads

PROMPT = [3, 1, 4, 1, 5]


def of_both_ways(model, monkeypatch, sampling, **options):
    arguments = {"max_new_tokens": WINDOW + 4, "sampling": sampling, "seed": 5} | options
    expected = generate(model, PROMPT, **arguments)
    calls = []
    call = DecodeStep.__call__
    monkeypatch.setattr(DecodeStep, "__call__", lambda self, token: calls.append(1) or call(self, token))
    monkeypatch.setattr(DecodeStep, "why_not", lambda model: None)
    actual = generate(model, PROMPT, **arguments)
    # All but the prompt, and what is read anew when the context is full.
    assert len(calls) == WINDOW + 4 - 2
    return actual, expected


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", list(SHAPES))
def test_the_text_is_that_of_ordinary_passes(group, monkeypatch, name):
    for sampling in (GREEDY, Sampling(temperature=0.8)):
        with monkeypatch.context() as patch:
            actual, expected = of_both_ways(make_model(SHAPES[name], group), patch, sampling)
        assert actual == expected


@pytest.mark.ranks(1)
def test_logits_with_a_window_a_soft_cap_sinks_and_alibi(group):
    for options, positions in (
        ({"window_size": (3, 0)}, "rope"),
        ({"attention_logit_softcap": 2.0}, "none"),
        ({"attention_sinks": True, "window_size": (3, 0)}, "rope"),
        ({}, "alibi"),
    ):
        config = ModelConfig(
            num_layers=2,
            hidden_size=24,
            num_attention_heads=4,
            num_query_groups=2,
            params_dtype=torch.float64,
            init_method_std=0.5,
            **options,
        )
        model = GPT(config, 31, WINDOW, groups=Groups(tp=group), position_embedding_type=positions).eval()
        ids = torch.randint(31, (1, 9))
        with torch.no_grad():
            caches = [PreallocatedCache.for_model(model, batch_size=1, capacity=12) for _ in range(2)]
            for cache in caches:
                model(ids[:, :5], torch.arange(5), cache=cache)
            step = DecodeStep(model, caches[1])
            for n in range(5, 9):
                expected = model.next_logits(ids[:, n : n + 1], torch.tensor([n]), cache=caches[0])
                torch.testing.assert_close(step(ids[0, n : n + 1]), expected, rtol=1e-12, atol=1e-12)


class Recording:
    """In the place of a CUDA graph: it can do again what was done while it was recorded, and is told nothing."""

    step = None

    def replay(self):
        self.step._logits.copy_(self.step._run())


@pytest.mark.ranks(1)
def test_a_recorded_step_needs_nothing_but_its_buffers(group, monkeypatch):
    model = make_model(SHAPES["llama-grouped"], group)
    monkeypatch.setattr(dispatch.CUDA_GRAPHS, "device_type", "cpu")
    monkeypatch.setenv("SHARDWISE_CUDA_GRAPHS", "1")
    initialise = DecodeStep.__init__

    def remember(self, *args):
        initialise(self, *args)
        Recording.step = self

    class Stream:
        def wait_stream(self, other):
            pass

    monkeypatch.setattr(DecodeStep, "__init__", remember)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    actual, expected = of_both_ways(model, monkeypatch, GREEDY)
    assert actual == expected
    assert Recording.step._graph is not None


@pytest.mark.ranks(1)
def test_what_is_read_as_any_other_input(group, monkeypatch):
    model = make_model(SHAPES["llama-grouped"], group)
    assert DecodeStep.why_not(model) == "there is a kernel for cuda, none for cpu"
    monkeypatch.setattr(dispatch.DECODE_TRITON, "device_type", "cpu")
    monkeypatch.setattr(dispatch.DECODE_TRITON, "missing", lambda call: None)
    assert DecodeStep.why_not(model) == "there is no kernel for torch.float64"
    monkeypatch.setattr(dispatch.DECODE_TRITON, "dtypes", ())
    assert DecodeStep.why_not(model) is None
    model.decoder.layers[0].self_attention.local_heads = LocalHeads((1, 2))
    assert DecodeStep.why_not(model).startswith("its layers attend otherwise")


@pytest.mark.ranks(1)
def test_a_cache_without_room(group):
    cache = PreallocatedCache(1, 1, 2, batch_size=1, capacity=3, dtype=torch.float32)
    cache.extend(3)
    assert cache.length == 3
    with pytest.raises(ShardingError, match="1 more than 3 do not fit; make it with a capacity of at least 4"):
        cache.extend(1)
