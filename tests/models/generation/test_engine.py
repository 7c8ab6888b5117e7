"""The engine for batches gives each prompt what it gets alone, whatever shares the cache, and keeps no memory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from harness.parity import assert_close_to
from models.generation.test_generation import WINDOW, both_shapes, make_model
from models.model_checks import whole_weights
from models.test_gpt import Shape

from shardwise.core.errors import ConfigError, DesyncError, DivergenceError, VocabularyError
from shardwise.models.generation import (
    GREEDY,
    BatchEngine,
    Request,
    Sampling,
    generate,
    generate_all,
    inference_view,
    sequence_log_probs,
)
from shardwise.models.generation.generation import evaluation_mode

LENGTHS = (3, 1, 13, 7, 1, 16, 5)


def requests_of(vocab: int, count: int = 12) -> list[Request]:
    """Prompts of several lengths; greedy and sampled; short texts, and some that outgrow the model's window."""
    numbers = random.Random(4)
    made = []
    for index, length in enumerate(LENGTHS):
        sampling = (GREEDY, Sampling(), Sampling(1.2, top_p=0.9))[index % 3]
        prompt = [numbers.randrange(vocab) for _ in range(length)]
        made.append(Request(prompt, count + index, sampling, seed=index, eos_ids=[5]))
    return made


def alone(model, request: Request) -> list[int]:
    return generate(
        model,
        request.prompt_ids,
        max_new_tokens=request.max_new_tokens,
        sampling=request.sampling,
        seed=request.seed,
        eos_id=request.eos_ids,
    )


@pytest.mark.ranks(1, 2, 3, 4, slow=(1, 3, 4))
@both_shapes
def test_a_batch_gives_each_prompt_what_it_gets_alone(group, shape):
    """In ten orders, with chunks, pages and caches of several sizes: some hold one text only, some all of them."""
    model = make_model(shape, group)
    requests = requests_of(shape.vocab)
    expected = [alone(model, request) for request in requests]
    assert len(set(map(tuple, expected))) == len(expected)
    numbers = random.Random(1)
    for chunk_size, page_size, capacity, most in (
        (512, 16, 1000, 32), (1, 1, WINDOW, 32), (2, 3, 18, 2), (3, 16, 48, 32), (5, 2, 40, 4),
        (7, 4, 100, 5), (16, 5, 60, 3), (64, 8, 64, 32), (4, 1, 50, 7), (512, 32, 64, 1),
    ):  # fmt: skip
        order = numbers.sample(range(len(requests)), len(requests))
        engine = BatchEngine(model, chunk_size=chunk_size, page_size=page_size, capacity=capacity, max_sequences=most)
        found = dict(engine.run([requests[index] for index in order]))
        assert [found[place].text_ids for place in range(len(order))] == [expected[index] for index in order]
        assert engine.cache.num_free == engine.cache.num_pages


@pytest.mark.ranks(2)
def test_requests_join_and_leave_while_others_go_on(group):
    model = make_model(Shape(), group)
    requests = [replace(each, eos_ids=()) for each in requests_of(Shape().vocab)]
    expected = [alone(model, request) for request in requests]
    engine, found, order = BatchEngine(model, capacity=80, page_size=4, chunk_size=4), {}, []
    with evaluation_mode(model):
        for request in requests:
            (number,) = engine.add([request])
            order.append(number)
            for _ in range(3):
                found |= dict(engine.step())
        joined = len(found)
        while not engine.is_idle:
            found |= dict(engine.step())
    assert 0 < joined < len(requests)
    assert [found[number].text_ids for number in order] == expected


@pytest.mark.ranks(1, 3)
def test_sequence_parallel_and_inference_layers(group):
    shape = Shape()
    plain, split = (make_model(shape, group, sequence_parallel=each) for each in (False, True))
    requests = requests_of(shape.vocab, count=5)
    expected = [each.token_ids for each in generate_all(plain, requests)]
    views = [inference_view(plain, fused=False), inference_view(split, fused=True)]
    for model in (split, *views):
        assert [each.token_ids for each in generate_all(model, requests, chunk_size=4)] == expected
    plain.parallel_output = False
    assert [each.token_ids for each in generate_all(plain, requests)] == expected


@pytest.mark.ranks(2)
def test_the_cache_wastes_less_than_a_page_per_sequence(group):
    model = make_model(Shape(), group)
    engine = BatchEngine(model, capacity=400, page_size=4, chunk_size=6)
    engine.add([replace(each, eos_ids=()) for each in requests_of(Shape().vocab, count=8)])
    with evaluation_mode(model):
        while not engine.is_idle:
            works = engine.schedule()
            used = engine.cache.num_pages - engine.cache.num_free
            sequences = engine._running
            assert used == sum(-(-len(each.context) // 4) for each in sequences)
            assert used * 4 - sum(len(each.context) for each in sequences) < 4 * len(sequences)
            engine.accept(works, engine.choose(works, engine.logits(works)).tolist())


@pytest.mark.ranks(1)
def test_memory_is_flat_over_two_thousand_requests(group):
    shape = Shape(vocab=11, heads=1, groups=1, head_dim=2, hidden=2, ffn=2, layers=1)
    model = make_model(shape, group, dtype=torch.float32)
    engine = BatchEngine(model, capacity=512, page_size=4)
    num_bytes, done = engine.cache.num_bytes, 0
    for _ in range(10):
        for _, result in engine.run([Request([number % 11], 2 + number % 3, seed=number) for number in range(200)]):
            done += 1
            assert 2 <= len(result.token_ids) <= 4
        assert (engine.cache.num_bytes, engine.cache.num_free) == (num_bytes, engine.cache.num_pages)
        assert engine.is_idle
        assert not engine._running
        assert not engine._waiting
    assert done == 2000


@pytest.mark.ranks(1, 2)
@both_shapes
def test_log_probs_of_prompt_and_text_are_those_of_a_forward(group, shape):
    """At the temperature of the sampling or at another one, before top-k and penalties, with the likeliest tokens."""
    model = make_model(shape, group)
    weights = whole_weights(model, group)
    sampled = Sampling(0.7, top_k=3, presence_penalty=2.0)
    requests = [
        Request([3, 1, 4, 1, 5], 6, sampled, log_probs=4, prompt_log_probs=2, seed=1),
        Request([7], 8, GREEDY, log_probs=0),
        Request([2, 7, 1, 8, 2, 8], 0, prompt_log_probs=0, temperature=2.0),
        Request([9, 9], 3, Sampling(1.5), log_probs=1, temperature=1.0),
    ]
    for chunk_size in (512, 2):
        found = generate_all(model, requests, chunk_size=chunk_size)
        for request, result, temperature in zip(requests, found, (0.7, 1.0, 2.0, 1.0), strict=True):
            tokens = [*request.prompt_ids, *result.token_ids]
            logits = shape.dense().logits(weights, torch.tensor([tokens]))[0].detach()
            expected = (logits / temperature).log_softmax(-1)
            given = [*result.prompt_log_probs, *result.log_probs]
            start = 1 if request.prompt_log_probs is not None else len(request.prompt_ids)
            stop = len(tokens) if request.log_probs is not None else len(request.prompt_ids)
            assert len(given) == stop - start
            values = torch.tensor([each.value for each in given], dtype=torch.float64)
            wanted = torch.stack([expected[place - 1, tokens[place]] for place in range(start, stop)])
            assert_close_to(values, wanted, rtol_of_norm=1e-12)
            for place, each in zip(range(start, stop), given, strict=True):
                number = request.prompt_log_probs if place < len(request.prompt_ids) else request.log_probs
                top = expected[place - 1].topk(number)
                assert [token for token, _ in each.top] == top.indices.tolist()
                assert [value for _, value in each.top] == pytest.approx(top.values.tolist(), rel=1e-12)
    ids = torch.tensor([requests[2].prompt_ids])
    (again,) = generate_all(model, [replace(requests[2], temperature=None)])
    assert [each.value for each in again.prompt_log_probs] == pytest.approx(
        sequence_log_probs(model, ids)[0].tolist(), rel=1e-12
    )


@pytest.mark.ranks(2)
def test_why_a_text_ends(group):
    model = make_model(Shape(), group)
    (text,) = generate_all(model, [Request([1, 2], 8, Sampling(), seed=3, log_probs=0)])
    assert (text.reason, len(text.token_ids), len(text.log_probs)) == ("length", 8, 8)
    place = next(index for index, token in enumerate(text.token_ids) if index > 1)
    end = text.token_ids[place]
    seen = []
    requests = [
        Request([1, 2], 8, Sampling(), seed=3, eos_ids=[100, end], log_probs=0, on_token=seen.append),
        Request([1, 2], 8, Sampling(), seed=3, on_token=lambda token: token == end),
    ]
    ended, stopped = generate_all(model, requests)
    first = text.token_ids.index(end)
    assert (ended.reason, stopped.reason) == ("end", "stop")
    assert ended.token_ids == stopped.token_ids == text.token_ids[: first + 1]
    assert [each.value for each in ended.log_probs] == pytest.approx(
        [each.value for each in text.log_probs][: first + 1]
    )
    assert ended.text_ids == seen == text.token_ids[:first]
    assert stopped.text_ids == stopped.token_ids
    assert model.training


@pytest.mark.ranks(1)
def test_requests_that_cannot_be_answered(group):
    model = make_model(Shape(), group)
    engine = BatchEngine(model, capacity=8, page_size=4)
    for request, error, message in (
        (Request([], 1), ConfigError, "the prompt is empty"),
        (Request([1] * 17, 1), ConfigError, "the prompt has 17 tokens, and the model reads 16 at once"),
        (Request([1, 101], 1), VocabularyError, r"prompt_ids\[1\] is 101, outside the vocabulary of 101"),
        (Request([1], -1), ConfigError, "max_new_tokens is -1"),
        (Request([1], 1, log_probs=102), ConfigError, "log_probs is 102; it must be from 0 to 101"),
        (Request([1], 1, temperature=0.0), ConfigError, "temperature of log-probabilities is 0.0"),
        (Request([1, 2], 8), ConfigError, r"may have 9 tokens, which take 3 pages of 4, and the cache has 2"),
    ):
        with pytest.raises(error, match=message):
            engine.check(request)
        with pytest.raises(error, match=message):
            engine.add([Request([1], 2), request])
        assert engine.is_idle
    with pytest.raises(ConfigError, match="chunk_size of a BatchEngine is 0"):
        BatchEngine(model, chunk_size=0)
    # What just fits waits for the others.
    assert [len(each.token_ids) for each in generate_all(model, [Request([1], 8)] * 3, capacity=8)] == [8] * 3


@pytest.mark.ranks(2)
def test_errors_on_every_rank(group):
    model = make_model(Shape(), group)
    prompt = [[1, 2], [1, 3]][group.rank()]
    with pytest.raises(DesyncError, match=r"disagree on what to generate: rank 0 has '1 requests"):
        generate_all(model, [Request(prompt, 2)])
    with torch.no_grad():
        model.decoder.layers[0].mlp.linear_fc1.weight[0] = torch.nan
    engine = BatchEngine(model)
    with pytest.raises(DivergenceError, match="have diverged"):
        list(engine.run([Request([1, 2], 2)]))
    assert engine.is_idle
    assert model.training
