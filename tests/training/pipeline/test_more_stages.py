"""Three stages, uneven numbers of micro-batches, dropout, frozen stages and losses that are no numbers."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from harness.parity import assert_bit_equal, assert_close_to
from training.pipeline.pipelines import LENGTH, MICRO_BATCH_SIZE, random_batch, run_whole, staged_gpt
from training.pipeline.test_pipeline_gradients import CASES, assert_gradients_of, finalize

from shardwise import parallel_state
from shardwise.core.errors import ConfigError
from shardwise.core.random import seed_streams, streams
from shardwise.megatron.schedules import get_forward_backward_func
from shardwise.tensor_parallel import checkpoint
from shardwise.training.optimizer.grad_norm import global_grad_norm
from shardwise.training.pipeline import Pipeline, make_schedule

PP = 3
LAYERS = 7
ONE_CHUNK = [name for name, num_chunks in CASES.items() if num_chunks == 1]
TELLING = [
    pytest.param(name, marks=[] if name in ("interleaved", "zero-bubble") else pytest.mark.slow) for name in CASES
]
TIED_KEY = "embedding.word_embeddings.weight"


def staged_for(name, pp, **options):
    return staged_gpt(
        pp=pp,
        num_chunks=CASES[name],
        **{"num_layers": 2 * pp + 1, "delay_wgrad_compute": name == "zero-bubble"} | options,
    )


def is_last(staged):
    return staged.topology.rank("pp") == staged.topology.size("pp") - 1


def assert_step_is(whole, losses, staged, schedule, batch):
    """One step of the stages gives the losses and the gradients of the whole model."""
    results = staged.run(schedule, batch)
    finalize(staged)
    assert_gradients_of(whole, staged)
    if is_last(staged):
        assert_close_to(torch.stack(results), torch.stack(losses), rtol_of_norm=1e-13)


def norm_of(staged):
    return global_grad_norm(staged.chunks, tp_group=staged.topology.group("tp"), pp_group=staged.topology.group("pp"))


def gradients_of(staged):
    return {key: shard.data.grad for key, shard in staged.parameters_by_key().items()}


def run_with_loss(staged, name, batch, loss):
    """As ``Staged.run``, with a loss function of one's own: micro-batch and losses to a scalar or None."""
    tokens, labels = batch
    return Pipeline(list(staged.chunks), group=staged.topology.group("pp")).run(
        make_schedule(name, staged.topology.size("pp"), len(tokens), CASES[name]),
        lambda micro_batch, chunk: staged.chunks[chunk](tokens[micro_batch], labels=labels[micro_batch]),
        lambda micro_batch, losses: (loss(micro_batch, losses), losses.detach()),
        shape=(LENGTH, MICRO_BATCH_SIZE, 24),
        dtype=torch.float64,
        device=torch.device("cpu"),
    )


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.ranks(3)
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5])
def test_any_number_of_micro_batches(group, num_micro_batches):
    """Fewer than stages, and not a multiple of them; with weight gradients in the backward and beside it."""
    whole = staged_gpt(num_layers=LAYERS)
    batch = random_batch(num_micro_batches)
    losses = run_whole(whole.chunks[0], batch)
    for name in ONE_CHUNK:
        for delayed in {name == "zero-bubble", True}:
            staged = staged_for(name, PP, delay_wgrad_compute=delayed)
            results = staged.run(make_schedule(name, PP, num_micro_batches), batch)
            finalize(staged)
            assert_gradients_of(whole, staged)
            if is_last(staged):
                assert_close_to(torch.stack(results), torch.stack(losses), rtol_of_norm=1e-13, name=name)


def recompute_chunks(staged):
    for chunk in staged.chunks:
        forward = chunk.forward
        chunk.forward = lambda tokens, labels, forward=forward: checkpoint(forward, False, tokens, labels=labels)


def recompute_layers(staged):
    for chunk in staged.chunks:
        for layer in chunk.decoder.layers:
            forward = layer.forward
            layer.forward = lambda hidden, forward=forward, **given: checkpoint(forward, False, hidden, **given)


def dropped_out(name, pp, m, *, seed=5, recompute=lambda _: None, **settings):
    """Losses and gradients of a step with dropout, and the state of the random streams at its end."""
    staged = staged_for(name, pp, hidden_dropout=0.2, attention_dropout=0.1, **settings)
    recompute(staged)
    # Of its own on each stage, as programs seed them.
    seed_streams(seed + 100 * staged.topology.rank("pp"), 0)
    torch.manual_seed(seed)
    results = staged.run(make_schedule(name, pp, m, CASES[name]), random_batch(m))
    finalize(staged)
    states = {"default": torch.get_rng_state(), **streams().get_states()}
    return results, gradients_of(staged), states


@pytest.mark.sample(3)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", TELLING)
def test_dropout_in_stages_depends_on_the_seed_alone(group, name):
    """Two runs are the same bits, also where chunks or layers are recomputed between other micro-batches' forwards."""
    pp = m = group.size()
    results, gradients, states = dropped_out(name, pp, m)
    others = {
        "the second run": dropped_out(name, pp, m),
        "recomputed chunks": dropped_out(name, pp, m, recompute=recompute_chunks),
        "recomputed layers": dropped_out(name, pp, m, recompute=recompute_layers),
        "layers that the config lets recompute": dropped_out(
            *(name, pp, m), recompute_granularity="full", recompute_method="block", recompute_num_layers=1
        ),
        "parts that the config lets recompute": dropped_out(
            *(name, pp, m), recompute_granularity="selective", recompute_modules=["core_attn", "layernorm", "mlp_act"]
        ),
    }
    for what, (other_results, other_gradients, other_states) in others.items():
        for expected, actual in zip(results, other_results, strict=True):
            assert_bit_equal(actual, expected, name=f"a loss of {what}")
        assert other_gradients.keys() == gradients.keys()
        for key, gradient in gradients.items():
            assert_bit_equal(other_gradients[key], gradient, name=f"{what}: {key}")
        for key, state in states.items():
            assert_bit_equal(other_states[key], state, name=f"{what}: {key}")
    _, of_another_seed, _ = dropped_out(name, pp, m, seed=6)
    assert all(not torch.equal(of_another_seed[key], gradient) for key, gradient in gradients.items())


@pytest.mark.sample(2)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", CASES)
def test_recomputed_layers_may_share_out_their_inputs(group, name):
    """The first of a stage shares out what the stage received, before its backward asks for it."""
    whole = staged_gpt(num_layers=5)
    batch = random_batch(4)
    run_whole(whole.chunks[0], batch)
    staged = staged_for(name, 2, tp=2)
    tp_group = staged.topology.group("tp")
    for chunk in staged.chunks:
        for layer in chunk.decoder.layers:
            layer.forward = partial(checkpoint, layer.forward, True, tp_group=tp_group)
    staged.run(make_schedule(name, 2, 4, CASES[name]), batch)
    finalize(staged)
    assert_gradients_of(whole, staged)


@pytest.mark.slow
@pytest.mark.ranks(3)
def test_dropout_does_not_depend_on_the_schedule(group):
    """Micro-batches go forward in one order in each, and so get the same masks."""
    results, gradients, _ = dropped_out("gpipe", PP, 5)
    plain = staged_for("gpipe", PP).run(make_schedule("gpipe", PP, 5), random_batch(5))
    assert all(not torch.equal(dropped, whole) for dropped, whole in zip(results, plain, strict=True))
    for name in ONE_CHUNK:
        other_results, other_gradients, _ = dropped_out(name, PP, 5)
        for expected, actual in zip(results, other_results, strict=True):
            assert_bit_equal(actual, expected, name=f"a loss of {name}")
        for key, gradient in gradients.items():
            assert_close_to(other_gradients[key], gradient, rtol_of_norm=1e-14, name=f"{name}: {key}")


@pytest.mark.sample(3)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", CASES)
def test_a_frozen_stage_leaves_the_others_gradients_as_they_are(group, name):
    """The first, which has no backward at all, one in the middle and the last, which only pass gradients on."""
    pp, m = group.size(), 2 * group.size()
    whole = staged_gpt(num_layers=2 * pp + 1, tied=False)
    batch = random_batch(m)
    losses = run_whole(whole.chunks[0], batch)
    of_whole = gradients_of(whole)
    for frozen in range(pp):
        staged = staged_for(name, pp, tied=False)
        if staged.topology.rank("pp") == frozen:
            staged.chunks.requires_grad_(False)
        results = staged.run(make_schedule(name, pp, m, CASES[name]), batch)
        finalize(staged)
        if is_last(staged):
            assert_close_to(torch.stack(results), torch.stack(losses), rtol_of_norm=1e-13)
        for key, gradient in gradients_of(staged).items():
            if staged.topology.rank("pp") == frozen:
                assert gradient is None, key
            else:
                assert_close_to(gradient, of_whole[key], rtol_of_norm=1e-12, name=key)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", CASES)
def test_one_stage_alone_that_is_trained(group, name):
    """With all the others frozen, and recomputed chunks; where all are frozen there is nothing to do, and no hang."""
    whole = staged_gpt(num_layers=LAYERS, tied=False)
    batch = random_batch(PP)
    run_whole(whole.chunks[0], batch)
    of_whole = gradients_of(whole)
    for trained in (*range(PP), None):
        for recompute in (lambda _: None, recompute_chunks, recompute_layers):
            staged = staged_for(name, PP, tied=False)
            recompute(staged)
            if staged.topology.rank("pp") != trained:
                staged.chunks.requires_grad_(False)
            staged.run(make_schedule(name, PP, PP, CASES[name]), batch)
            finalize(staged)
            for key, gradient in gradients_of(staged).items():
                if staged.topology.rank("pp") == trained:
                    assert_close_to(gradient, of_whole[key], rtol_of_norm=1e-12, name=key)
                else:
                    assert gradient is None, key


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", CASES)
def test_a_loss_that_is_no_number_reaches_every_stage_and_the_next_step_is_right(group, name):
    whole, staged = staged_gpt(num_layers=LAYERS), staged_for(name, PP)
    batch = random_batch(PP)
    losses = run_whole(whole.chunks[0], batch)

    def loss(micro_batch, of_tokens):
        return of_tokens.sum() / batch[0].numel() * (math.nan if micro_batch == 1 else 1.0)

    run_with_loss(staged, name, batch, loss)
    finalize(staged)
    for key, gradient in gradients_of(staged).items():
        assert gradient.isnan().any(), key
    # Known on every stage, so that all can leave the step out.
    assert norm_of(staged).isnan()
    staged.chunks.zero_grad()
    assert_step_is(whole, losses, staged, make_schedule(name, PP, PP, CASES[name]), batch)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", CASES)
def test_micro_batches_without_a_loss_have_no_gradient(group, name):
    """One with no scalar, one whose scalar depends on nothing, and one whose is the only one to count."""
    whole, staged = staged_gpt(num_layers=LAYERS), staged_for(name, PP)
    tokens, labels = random_batch(PP)
    whole.chunks[0](tokens[2], labels=labels[2]).sum().backward()
    results = run_with_loss(
        staged, name, (tokens, labels), lambda micro_batch, losses: (None, torch.ones(()), losses.sum())[micro_batch]
    )
    assert len(results) == (PP if is_last(staged) else 0)
    finalize(staged)
    assert_gradients_of(whole, staged)


def reference_step(data_iterator, model):
    tokens, labels = next(data_iterator)
    return model(tokens, labels=labels), lambda losses: (losses.mean(), losses.detach().clone())


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", CASES)
def test_measuring_between_two_training_steps_changes_neither(group, name):
    """The measured batch has another number of micro-batches, of another size and length."""
    num_chunks = CASES[name]
    parallel_state.initialize_model_parallel(1, PP, num_chunks if num_chunks > 1 else None)
    whole, staged = staged_gpt(num_layers=LAYERS), staged_for(name, PP)
    model, reference = list(staged.chunks), whole.chunks[0]

    def step(batch, **options):
        tokens, labels = batch
        return get_forward_backward_func(schedule=name)(
            forward_step_func=reference_step,
            data_iterator=[zip(tokens, labels, strict=True) for _ in model],
            model=model,
            num_microbatches=tokens.size(0),
            seq_length=tokens.size(2),
            micro_batch_size=tokens.size(1),
            **options,
        )

    first, second = random_batch(PP, seed=1), random_batch(2 * PP, seed=2)
    measured = [part[:, :1, :7] for part in random_batch(5, seed=4)]
    for batch in (first, second):
        tokens, labels = batch
        for ids, targets in zip(tokens, labels, strict=True):
            (reference(ids, labels=targets).mean() / len(tokens)).backward()
        step(batch)
        before = {key: gradient.clone() for key, gradient in gradients_of(staged).items()}
        results = step(measured, forward_only=True)
        with torch.no_grad():
            expected = [reference(ids, labels=targets) for ids, targets in zip(*measured, strict=True)]
        assert len(results) == (5 if is_last(staged) else 0)
        if results:
            assert_close_to(torch.stack(results), torch.stack(expected), rtol_of_norm=1e-12)
        for key, gradient in gradients_of(staged).items():
            assert_bit_equal(gradient, before[key], name=key)
    # The two training steps' gradients are added up.
    finalize(staged)
    assert_gradients_of(whole, staged)


@pytest.mark.slow
@pytest.mark.ranks(3)
def test_a_tied_weight_frozen_on_both_stages_and_on_one(group):
    whole = staged_gpt(num_layers=LAYERS)
    batch = random_batch(PP)
    run_whole(whole.chunks[0], batch)
    of_whole = gradients_of(whole)
    for name in CASES:
        for frozen in ((0, PP - 1), (0,), (PP - 1,)):
            staged = staged_for(name, PP)
            stage = staged.topology.rank("pp")
            if stage in frozen:
                staged.parameters_by_key()[TIED_KEY].data.requires_grad_(False)
            staged.run(make_schedule(name, PP, PP, CASES[name]), batch)
            if len(frozen) == 1 and stage != 1:
                with pytest.raises(ConfigError, match="has a gradient on 1 of the 2 pipeline stages that hold it"):
                    finalize(staged)
                continue
            finalize(staged)
            for key, gradient in gradients_of(staged).items():
                if key == TIED_KEY:
                    assert gradient is None
                else:
                    assert_close_to(gradient, of_whole[key], rtol_of_norm=1e-12, name=key)


@pytest.mark.slow
@pytest.mark.ranks(3)
def test_more_parts_and_larger_groups_of_micro_batches(group):
    """Three chunks per stage, groups of more micro-batches than stages, and stages of given sizes."""
    batch = random_batch(8)
    whole = staged_gpt(num_layers=11)
    losses = run_whole(whole.chunks[0], batch)
    sizes = {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 4}
    for num_chunks, group_size, options in ((3, 4, {}), (2, 8, sizes), (3, 8, sizes), (2, 4, {})):
        staged = staged_gpt(pp=PP, num_chunks=num_chunks, num_layers=11, **options)
        schedule = make_schedule("interleaved", PP, 8, num_chunks, group_size=group_size)
        assert_step_is(whole, losses, staged, schedule, batch)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", CASES)
def test_gradients_in_main_grad_are_the_whole_models(group, name):
    """Of a tied weight too, whose copies come to it in different ways."""
    whole = staged_gpt(num_layers=LAYERS)
    staged = staged_for(name, PP, gradient_accumulation_fusion=True)
    batch = random_batch(PP)
    run_whole(whole.chunks[0], batch)
    for param in staged.chunks.parameters():
        param.main_grad = torch.zeros_like(param, requires_grad=False)
    staged.run(make_schedule(name, PP, PP, CASES[name]), batch)
    finalize(staged)
    of_whole = gradients_of(whole)
    for key, shard in staged.parameters_by_key().items():
        assert shard.data.grad is None
        assert_close_to(shard.data.main_grad, of_whole[key], rtol_of_norm=1e-12, name=key)


@pytest.mark.ranks(3)
def test_a_middle_stage_needs_no_tokens(group):
    """Programs load them on the first stage, and the labels on the last."""
    whole, staged = staged_gpt(num_layers=LAYERS), staged_for("zero-bubble", PP)
    tokens, labels = random_batch(5)
    run_whole(whole.chunks[0], (tokens, labels))
    stage = staged.topology.rank("pp")

    def forward(micro_batch, chunk):
        if stage == PP - 1:
            return staged.chunks[chunk](None, labels=labels[micro_batch])
        return staged.chunks[chunk](tokens[micro_batch] if stage == 0 else None)

    Pipeline(list(staged.chunks), group=staged.topology.group("pp")).run(
        make_schedule("zero-bubble", PP, 5),
        forward,
        lambda _, losses: (losses.sum() / tokens.numel(), None),
        shape=(LENGTH, MICRO_BATCH_SIZE, 24),
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    finalize(staged)
    assert_gradients_of(whole, staged)
