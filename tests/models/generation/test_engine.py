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

from shardwise.core.communication.agreement import check_same
from shardwise.core.errors import ConfigError, DesyncError, DivergenceError, VocabularyError
from shardwise.core.topology import Groups, Topology
from shardwise.models.config import ModelConfig
from shardwise.models.generation import (
    GREEDY,
    BatchEngine,
    Request,
    Sampling,
    engine as engine_module,
    generate,
    generate_all,
    inference_view,
    sequence_log_probs,
)
from shardwise.models.generation.engine import engine_for
from shardwise.models.generation.generation import evaluation_mode
from shardwise.models.gpt import GPT
from shardwise.models.transformer.rotary import RotaryScaling

LENGTHS = (3, 1, 13, 7, 1, 16, 5)


def requests_of(vocab: int, count: int = 12) -> list[Request]:
    """Prompts of several lengths; greedy and sampled; short texts, and some that outgrow the model's window."""
    numbers = random.Random(4)
    made = []
    for index, length in enumerate(LENGTHS):
        sampling = (GREEDY, Sampling(), Sampling(1.2, top_p=0.9), Sampling(0.0, repetition_penalty=1.7))[index % 4]
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
    engine = BatchEngine(model, capacity=400, page_size=4, chunk_size=6, max_sequences=5)
    engine.add([replace(each, eos_ids=()) for each in requests_of(Shape().vocab, count=8)])
    most = 0
    with evaluation_mode(model):
        while not engine.is_idle:
            works = engine.schedule()
            most = max(most, len(engine._running))
            single = [work.stop for work in works if work.stop - work.start == 1]
            assert single == sorted(single), "sequences of about one length are computed together"
            used = engine.cache.num_pages - engine.cache.num_free
            sequences = engine._running
            assert used == sum(-(-len(each.context) // 4) for each in sequences)
            assert used * 4 - sum(len(each.context) for each in sequences) < 4 * len(sequences)
            engine.accept(works, engine.answer(works, engine._store.read(works)))
    assert most == 5


def rows_and_pages(engine: BatchEngine, requests: list[Request]) -> tuple[dict, int, int, bool]:
    """Results by number, tokens that all passes read, the most pages taken at once, and whether any were taken back."""
    found, rows, pages, took_back = {}, 0, 0, False
    engine.add(requests)
    with evaluation_mode(engine.model):
        while not engine.is_idle:
            works = engine.schedule()
            has_text = [bool(each.result.token_ids) for each in engine._waiting]
            assert has_text == sorted(has_text, reverse=True), "texts that gave pages back go on before new ones"
            took_back |= any(has_text)
            rows += sum(work.stop - work.start for work in works)
            pages = max(pages, engine.cache.num_pages - engine.cache.num_free)
            found |= dict(engine.accept(works, engine.answer(works, engine._store.read(works))))
    assert engine.cache.num_free == engine.cache.num_pages
    assert not engine.cache._full
    assert not engine.cache._keys
    return found, rows, pages, took_back


def assert_as_alone(found: dict, expected: list, rel: float = 1e-11) -> None:
    for (_, result), single in zip(sorted(found.items()), expected, strict=True):
        assert result.token_ids == single.token_ids
        for name in ("log_probs", "prompt_log_probs"):
            values, wanted = ([each.value for each in getattr(every, name)] for every in (result, single))
            assert values == pytest.approx(wanted, rel=rel), name


@pytest.mark.ranks(1, 2)
@both_shapes
def test_samples_of_a_prompt_share_its_full_pages(group, shape):
    """The prompt is read once, in one pass or several, and each sample has only pages of its own for the rest."""
    model = make_model(shape, group)
    prompt, count, new = [number * 7 % 60 for number in range(11)], 5, 4
    requests = [Request(prompt, new, Sampling(), seed=seed, log_probs=0) for seed in range(count)]
    expected = [generate_all(model, [request])[0] for request in requests]
    for chunk_size, page_size in ((512, 4), (3, 4), (5, 1), (1, 2), (512, 11), (512, 16)):
        engine = BatchEngine(model, capacity=200, page_size=page_size, chunk_size=chunk_size)
        found, rows, pages, _ = rows_and_pages(engine, requests)
        assert_as_alone(found, expected)
        shared = (len(prompt) - 1) // page_size * page_size
        # The last token that is chosen is not read.
        assert rows == shared + count * (len(prompt) - shared + new - 1)
        if chunk_size == 512:
            total = engine.cache.num_pages_for(len(prompt) + new - 1)
            assert pages == shared // page_size + count * (total - shared // page_size)


@pytest.mark.ranks(2)
def test_common_beginnings_of_different_prompts(group):
    """Of a system prompt, of a prompt that begins another, and with log-probabilities that need all rows."""
    model = make_model(Shape(), group)
    system = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    # A beginning of a page that others have filled further, another page that follows, and the second page first.
    prompts = [system, [*system, 1, 2, 3], [*system, 1, 2, 4], system[:6], [*system[:4], 1, 1, 1, 1, 2], system[4:]]
    requests = [Request(prompt, 3, GREEDY, log_probs=1) for prompt in prompts]
    _, rows, pages, _ = rows_and_pages(BatchEngine(model, capacity=200, page_size=4), requests)
    unread = [0, 8, 8, 4, 4, 0]
    assert rows == sum(len(prompt) + 2 for prompt in prompts) - sum(unread)
    assert pages == sum(-(-(len(prompt) + 2) // 4) for prompt in prompts) - sum(unread) // 4
    for index in (0, 2):
        requests[index] = replace(requests[index], prompt_log_probs=0)
    expected = [generate_all(model, [request])[0] for request in requests]
    found, rows, _, _ = rows_and_pages(BatchEngine(model, capacity=200, page_size=4), requests)
    assert_as_alone(found, expected)
    assert rows == sum(len(prompt) + 2 for prompt in prompts) - sum(unread) + unread[2]


@pytest.mark.ranks(2)
def test_sequences_that_share_take_back_only_their_own_pages(group):
    """In caches that hold little more than one text, also of texts that outgrow the window, after the first ended."""
    model = make_model(Shape(), group)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    requests = [Request(prompt, 1 + 3 * seed, Sampling(), seed=seed, log_probs=0) for seed in range(6)]
    requests[2] = replace(requests[2], prompt_log_probs=2)
    expected = [generate_all(model, [request])[0] for request in requests]
    for capacity, page_size, chunk_size, most in (
        (16, 2, 512, 32), (18, 3, 4, 32), (22, 2, 7, 32), (24, 4, 512, 3), (20, 1, 2, 32),
    ):  # fmt: skip
        engine = BatchEngine(model, capacity=capacity, page_size=page_size, chunk_size=chunk_size, max_sequences=most)
        found, _, _, took_back = rows_and_pages(engine, requests)
        assert_as_alone(found, expected)
        assert took_back


@pytest.mark.ranks(1)
def test_a_prompt_waits_for_pages_that_texts_need_next(group):
    """Otherwise it would give its two pages back at once, and would be read twice."""
    requests = [Request([1, 2, 3, 4], 5, GREEDY), Request([5, 6, 7, 8, 9, 10, 11, 12], 2, GREEDY)]
    engine = BatchEngine(make_model(Shape(), group), capacity=12, page_size=4)
    _, rows, _, took_back = rows_and_pages(engine, requests)
    assert (rows, took_back) == (4 + 4 + 8 + 1, False)
    # It does not wait for those that have all the pages that they may need.
    requests = [Request([1, 2, 3, 4, 5], 3, GREEDY), Request([6, 7, 8, 9], 1, GREEDY)]
    _, _, pages, _ = rows_and_pages(engine, requests)
    assert pages == engine.cache.num_pages


@pytest.mark.ranks(2)
def test_ranks_with_other_numbers_of_heads_have_as_many_pages(group, monkeypatch):
    """Those of the rank with the most heads: with other numbers, ranks would read other sequences in a pass."""
    monkeypatch.setattr(engine_module, "_BYTES", 100_000)
    model = make_model(Shape(), group)
    engines = [BatchEngine(model, page_size=1), engine_for(model, [Request([1], 16)] * 32, page_size=1)]
    for engine in engines:
        check_same(engine.cache.num_pages, "the number of pages", group=group)
        assert WINDOW < engine.cache.num_pages < 32 * WINDOW
        assert engine.cache.num_bytes <= 101_000
    # Keys and values may have other widths.
    monkeypatch.setattr(engine_module, "layer_sizes", lambda *args: {1: (2, 3, 5)})
    itemsize = next(model.parameters()).element_size()
    assert BatchEngine._usual_capacity(model, 10**6) == 100_000 // (2 * (3 + 5) * itemsize)


@pytest.mark.ranks(1)
def test_nothing_is_shared_between_runs(group):
    """The weights may have changed, also if the first run ends early."""
    model = make_model(Shape(), group)
    requests = [Request([1, 2, 3, 4, 5, 6, 7, 8, 9], 4, GREEDY) for _ in range(3)]
    engine = BatchEngine(model, page_size=4)
    next(engine.run([replace(requests[0], max_new_tokens=1), *requests]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    results = [result.token_ids for _, result in engine.run(requests)]
    assert results == [alone(model, request) for request in requests]


@pytest.mark.ranks(2)
def test_nothing_is_shared_if_frequencies_depend_on_the_length(group):
    topology, scaling = Topology.create(tp=2), RotaryScaling("dynamic", 4.0, original_max_position_embeddings=4)
    config = ModelConfig(num_layers=2, hidden_size=20, num_attention_heads=4, init_method_std=0.3)
    rotated = {"position_embedding_type": "rope", "rope_scaling": scaling}
    model = GPT(config, 60, 40, groups=Groups.of(topology), **rotated)
    requests = [Request(list(range(10, 10 + length)), 3, GREEDY, log_probs=0) for length in (9, 9, 14)]
    expected = [generate_all(model, [request])[0] for request in requests]
    found, rows, _, _ = rows_and_pages(BatchEngine(model, capacity=200, page_size=4), requests)
    assert_as_alone(found, expected, rel=1e-4)
    assert rows == 11 + 11 + 16
    # Chunks have the frequencies of the whole prompt, and no text loses keys that it could not compute again.
    for capacity, page_size, chunk_size in ((20, 4, 4), (22, 2, 512)):
        engine = BatchEngine(model, capacity=capacity, page_size=page_size, chunk_size=chunk_size)
        found, rows, _, took_back = rows_and_pages(engine, requests)
        assert_as_alone(found, expected, rel=1e-4)
        assert (rows, took_back) == (11 + 11 + 16, False)
    # Nor does a text at the end of the window give others the pages that it needs again.
    engine = BatchEngine(model, capacity=44, page_size=4)
    texts = [Request(list(range(38)), 24, GREEDY), Request(list(range(9)), 12, GREEDY)]
    *_, took_back = rows_and_pages(engine, texts)
    assert not took_back
    topology.destroy()


@pytest.mark.ranks(1)
def test_a_window_of_one_token(group):
    topology = Topology.create()
    config = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, init_method_std=0.3)
    model = GPT(config, 11, 1, groups=Groups.of(topology))
    requests = [Request([token], 4, GREEDY) for token in (3, 8)]
    assert [each.token_ids for each in generate_all(model, requests)] == [alone(model, each) for each in requests]
    topology.destroy()


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
    (last,) = generate_all(model, [replace(requests[0], max_new_tokens=first + 1, on_token=None)])
    assert (last.reason, last.text_ids) == ("end", text.token_ids[:first])
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
        (Request([1], 1, log_probs=0, temperature=0.0), ConfigError, "temperature of log-probabilities is 0.0"),
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
    # The cache of few sequences has room for the longest.
    mixed = [Request([1], length) for length in (2, 16, 3)]
    found = dict(engine_for(model, mixed, max_sequences=1, page_size=4).run(mixed))
    assert [len(found[index].token_ids) for index in range(3)] == [2, 16, 3]


@pytest.mark.ranks(2)
def test_errors_on_every_rank(group):
    model = make_model(Shape(), group)
    request = Request([1, 2], 2, log_probs=0, prompt_log_probs=0)
    for other in (
        {"prompt_ids": [1, 3]}, {"max_new_tokens": 3}, {"sampling": GREEDY}, {"seed": 1}, {"eos_ids": [3]},
        {"log_probs": 1}, {"prompt_log_probs": None}, {"temperature": 2.0},
    ):  # fmt: skip
        own = replace(request, **other) if group.rank() else request
        with pytest.raises(DesyncError, match=r"disagree on what to generate: rank 0 has '1 requests"):
            generate_all(model, [own])
    with torch.no_grad():
        model.decoder.layers[0].mlp.linear_fc1.weight[0] = torch.nan
    engine = BatchEngine(model)
    for diverged in (Request([1, 2], 2), Request([1, 2], 0, prompt_log_probs=0)):
        with pytest.raises(DivergenceError, match="have diverged"):
            list(engine.run([diverged]))
        assert engine.is_idle
    assert model.training
