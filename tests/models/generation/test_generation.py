"""Generation with the cache gives what the dense oracle gives from whole sequences, at every tensor-parallel size."""

from __future__ import annotations

import pytest
import torch
from harness.parity import assert_close_to
from models.generation.dense_sampling import choose
from models.model_checks import randomise_small_parameters, whole_logits, whole_weights
from models.test_gpt import SHAPES, Shape

from shardwise.core.errors import ConfigError, DesyncError, VocabularyError
from shardwise.models.generation import GREEDY, PreallocatedCache, PrefixCache, Sampling, generate, sequence_log_probs

WINDOW = 16
both_shapes = pytest.mark.parametrize(
    "shape", [pytest.param(SHAPES[name], id=name, marks=pytest.mark.slow if "llama" in name else []) for name in SHAPES]
)


def make_model(shape, group, **options):
    torch.manual_seed(3)
    model = shape.model(group, **options)
    assert model.max_sequence_length == WINDOW
    randomise_small_parameters(model, group)
    return model


def dense_generate(shape: Shape, weights, prompt, max_new_tokens, sampling, seed=0):
    """Every token from the whole context, which loses its older half when it is full."""
    generator = torch.Generator().manual_seed(seed)
    context, result = list(prompt)[-WINDOW:], []
    while len(result) < max_new_tokens:
        logits = shape.dense().logits(weights, torch.tensor([context]))[0, -1]
        uniform = torch.ones(shape.vocab, dtype=torch.float64)
        if sampling.temperature > 0:
            uniform = torch.rand(1, shape.vocab, generator=generator, dtype=torch.float64)[0]
        token = choose(logits.tolist(), sampling, uniform.tolist())
        result.append(token)
        context.append(token)
        if len(context) > WINDOW:
            context = context[-(WINDOW // 2) :]
    return result


@pytest.mark.ranks(1, 2, 3, 4)
@both_shapes
@pytest.mark.parametrize("chunks", [(1,) * 13, (5, 3, 1, 4), (13,)], ids=str)
def test_cached_passes_equal_one_pass_over_the_sequence(group, shape, chunks):
    model = make_model(shape, group)
    ids = torch.randint(shape.vocab, (3, 13))
    cache = PreallocatedCache.for_model(model, batch_size=3, capacity=13)
    pieces = []
    with torch.no_grad():
        for count in chunks:
            start = cache.length
            positions = torch.arange(start, start + count)
            pieces.append(model(ids[:, start : start + count], positions, cache=cache))
    actual = whole_logits(torch.cat(pieces, dim=1), group).log_softmax(-1)
    expected = shape.dense().logits(whole_weights(model, group), ids).log_softmax(-1).detach()
    assert cache.length == 13
    assert_close_to(actual, expected, rtol_of_norm=1e-13, name="log-probabilities")


@pytest.mark.ranks(1, 2, 3, 4)
@both_shapes
def test_sequence_log_probs_equal_the_oracles(group, shape):
    model = make_model(shape, group)
    ids = torch.randint(shape.vocab, (3, 13))
    actual = sequence_log_probs(model, ids)
    log_probs = shape.dense().logits(whole_weights(model, group), ids[:, :-1]).log_softmax(-1).detach()
    assert_close_to(actual, log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1), rtol_of_norm=1e-13)
    assert not actual.requires_grad
    assert model.training


@pytest.mark.ranks(1, 2, 3, 4)
@both_shapes
@pytest.mark.parametrize("prompt_length", [3, WINDOW + 7])
def test_greedy_tokens_are_the_oracles_also_when_the_context_slides(group, shape, prompt_length):
    model = make_model(shape, group)
    prompt = torch.randint(shape.vocab, (prompt_length,)).tolist()
    tokens = generate(model, prompt, max_new_tokens=24, sampling=GREEDY)
    assert tokens == dense_generate(shape, whole_weights(model, group), prompt, 24, GREEDY)
    assert len(set(tokens)) > 5


@pytest.mark.ranks(1, 2, 3, 4)
@both_shapes
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.2, top_k=20, top_p=0.8)], ids=str)
def test_sampled_tokens_are_the_oracles(group, shape, sampling):
    model = make_model(shape, group)
    weights = whole_weights(model, group)
    texts = [generate(model, [7, 1, 7], max_new_tokens=12, sampling=sampling, seed=seed) for seed in (0, 1)]
    assert texts == [dense_generate(shape, weights, [7, 1, 7], 12, sampling, seed) for seed in (0, 1)]
    assert texts[0] != texts[1]


@pytest.mark.ranks(1, 4)
def test_window_of_one_token(group):
    model = make_model(Shape(), group)
    weights = whole_weights(model, group)
    model.max_sequence_length = 1
    tokens = generate(model, [5, 6], max_new_tokens=4, sampling=GREEDY)
    context = [6]
    for token in tokens:
        logits = Shape().dense().logits(weights, torch.tensor([context]))[0, -1]
        assert token == int(logits.argmax())
        context = [token]


@pytest.mark.ranks(1, 3)
def test_models_that_return_whole_logits(group):
    model = make_model(Shape(), group)
    expected = generate(model, [1, 2], max_new_tokens=8, sampling=Sampling())
    model.parallel_output = False
    assert generate(model, [1, 2], max_new_tokens=8, sampling=Sampling()) == expected


@pytest.mark.ranks(2)
def test_end_of_text_ends_it_and_is_no_part_of_it(group):
    model = make_model(Shape(), group)
    tokens = generate(model, [1, 2], max_new_tokens=8, sampling=Sampling())
    stop = tokens[4]
    seen = []
    shorter = generate(model, [1, 2], max_new_tokens=8, sampling=Sampling(), eos_id=stop, on_token=seen.append)
    assert shorter == tokens[: tokens.index(stop)]
    assert seen == shorter
    # Of several, whichever comes first.
    for several in ([stop, tokens[1]], (tokens[1], 100, stop)):
        shorter = generate(model, [1, 2], max_new_tokens=8, sampling=Sampling(), eos_id=several)
        assert shorter == tokens[: min(tokens.index(stop), tokens.index(tokens[1]))]


@pytest.mark.ranks(2)
def test_no_prompt_starts_from_the_end_of_text(group):
    model = make_model(Shape(), group)
    tokens = generate(model, [100], max_new_tokens=8, sampling=GREEDY)
    assert 100 not in tokens
    assert generate(model, [], max_new_tokens=8, sampling=GREEDY, eos_id=100) == tokens
    other = next(token for token in range(100) if token not in tokens)
    assert generate(model, [], max_new_tokens=8, sampling=GREEDY, eos_id=[100, other]) == tokens
    with pytest.raises(ConfigError, match="prompt is empty"):
        generate(model, [], max_new_tokens=8, sampling=GREEDY)


@pytest.mark.ranks(1, 2)
def test_callback_sees_each_token_at_once(group):
    model = make_model(Shape(), group)
    seen = []

    def stop_at_third(token):
        seen.append(token)
        if len(seen) == 3:
            raise KeyboardInterrupt

    tokens = generate(model, [4], max_new_tokens=5, sampling=GREEDY, on_token=seen.append)
    assert seen == tokens
    seen.clear()
    with pytest.raises(KeyboardInterrupt):
        generate(model, [4], max_new_tokens=5, sampling=GREEDY, on_token=stop_at_third)
    assert seen == tokens[:3]
    assert model.training


@pytest.mark.ranks(1, 3)
@both_shapes
def test_a_conversation_is_read_once(group, shape):
    """Turns that go on, part early, repeat, and outgrow the window: what is kept changes no token."""
    model = make_model(shape, group)
    prefix, read, text = PrefixCache(model), [], []
    model.register_forward_hook(lambda module, args, output: read.append(args[0].size(1)))
    turns = (
        (lambda said: [1, 2, 3], 3),
        # The last token of the answer was not read either.
        (lambda said: [*said, 41, 9], 3),
        (lambda said: text, 1),
        (lambda said: [*text[:4], 50, 51, 52], 3),
        (lambda said: [*said, *range(20, 20 + WINDOW)], WINDOW),
    )
    said = []
    for number, (turn, expected) in enumerate(turns):
        text = turn(said)
        answer = generate(model, text, max_new_tokens=2, sampling=Sampling(), seed=number)
        read.clear()
        assert generate(model, text, max_new_tokens=2, sampling=Sampling(), seed=number, prefix=prefix) == answer
        assert read[0] == expected, (number, read)
        said = [*text, *answer]


@pytest.mark.ranks(2)
def test_an_interrupted_answer_keeps_what_was_read(group):
    model = make_model(Shape(), group)
    prefix, expected = PrefixCache(model), generate(model, [4, 5], max_new_tokens=6, sampling=GREEDY)

    def interrupt(token):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, [4, 5], max_new_tokens=3, sampling=GREEDY, prefix=prefix, on_token=interrupt)
    assert prefix.num_tokens == 2
    assert generate(model, [4, 5], max_new_tokens=6, sampling=GREEDY, prefix=prefix) == expected
    other = make_model(Shape(), group)
    with pytest.raises(ConfigError, match="prefix cache is of another model"):
        generate(other, [4], max_new_tokens=1, sampling=GREEDY, prefix=prefix)
    with pytest.raises(DesyncError, match=r"tokens kept: 1.*tokens kept: 0"):
        generate(model, [4, 5], max_new_tokens=1, sampling=GREEDY, prefix=[prefix, PrefixCache(model)][group.rank()])


@pytest.mark.ranks(2)
def test_leaves_no_trace(group):
    model = make_model(Shape(), group)
    frozen = model.decoder.layers[0]
    frozen.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    assert set(modes.values()) == {False, True}
    prompt = [1, 2]
    state = torch.get_rng_state()
    modes_meanwhile = set()
    generate(
        model,
        prompt,
        max_new_tokens=2,
        sampling=Sampling(),
        on_token=lambda _: modes_meanwhile.update(module.training for module in model.modules()),
    )
    assert modes_meanwhile == {False}
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert prompt == [1, 2]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


@pytest.mark.ranks(1)
def test_arguments_that_cannot_be(group):
    model = make_model(Shape(), group)
    assert generate(model, [1], max_new_tokens=0, sampling=GREEDY) == []
    with pytest.raises(ConfigError, match="max_new_tokens is -1"):
        generate(model, [1], max_new_tokens=-1, sampling=GREEDY)
    with pytest.raises(ConfigError, match="seed is -3"):
        generate(model, [1], max_new_tokens=1, sampling=GREEDY, seed=-3)
    with pytest.raises(VocabularyError, match=r"prompt_ids\[1\] is 101, outside the vocabulary of 101"):
        generate(model, [1, 101], max_new_tokens=1, sampling=GREEDY)
    with pytest.raises(VocabularyError, match="eos_id is -1"):
        generate(model, [1], max_new_tokens=1, sampling=GREEDY, eos_id=-1)


@pytest.mark.ranks(1, 2, 3)
@both_shapes
def test_sequence_parallelism_changes_nothing(group, shape):
    """Prompts of 13 tokens and of 2, then one at a time: fewer than ranks."""
    plain, split = (
        make_model(shape, group, sequence_parallel=sequence_parallel) for sequence_parallel in (False, True)
    )
    for prompt in ([*range(13)], [5, 6]):
        texts = [generate(model, prompt, max_new_tokens=12, sampling=Sampling(), seed=4) for model in (plain, split)]
        assert texts[0] == texts[1]
    ids = torch.randint(shape.vocab, (3, 12))
    assert_close_to(sequence_log_probs(split, ids), sequence_log_probs(plain, ids), rtol_of_norm=1e-13)


@pytest.mark.ranks(3)
def test_ranks_that_were_asked_for_different_texts(group):
    model = make_model(Shape(), group)
    odd_one = group.rank() == 1
    for mine, theirs in (([1, 2], [1, 3]), ([1, 2], [999])):
        with pytest.raises(DesyncError, match=r"disagree on what to generate: rank 0 .* rank 1 "):
            generate(model, mine if odd_one else theirs, max_new_tokens=2, sampling=GREEDY)
    with pytest.raises(DesyncError, match=r"rank 0 has .*seed=0.* rank 1 has .*seed=1"):
        generate(model, [1], max_new_tokens=2, sampling=Sampling(), seed=int(odd_one))
