"""What the output layer puts off, and stages without linear layers or without parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from training.pipeline.pipelines import LENGTH, MICRO_BATCH_SIZE, VOCAB, random_batch, run_whole, staged_gpt
from training.pipeline.test_more_stages import staged_for
from training.pipeline.test_pipeline_gradients import CASES, assert_gradients_of, finalize

from shardwise import parallel_state
from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups
from shardwise.megatron.schedules import get_forward_backward_func
from shardwise.models.config import ModelConfig
from shardwise.models.gpt import GPT
from shardwise.training.pipeline import make_schedule
from shardwise.training.pipeline.stage import deferred_buffers


def step(staged, name, batch, model=None, forward_step=None):
    tokens, labels = batch
    chunks = list(staged.chunks) if model is None else model

    def own_step(data_iterator, model):
        ids, targets = next(data_iterator)
        return model(ids, labels=targets), lambda losses: (losses.sum() * len(tokens) / tokens.numel(), None)

    return get_forward_backward_func(schedule=name)(
        forward_step_func=forward_step or own_step,
        data_iterator=[zip(tokens, labels, strict=True) for _ in chunks],
        model=chunks,
        num_microbatches=len(tokens),
        seq_length=LENGTH,
        micro_batch_size=MICRO_BATCH_SIZE,
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", CASES)
def test_deferred_gradients_of_the_output_layer_are_there_when_gradients_are_finalized(group, name, tied):
    parallel_state.initialize_model_parallel(1, 2, CASES[name] if CASES[name] > 1 else None)
    whole = staged_gpt(num_layers=4, tied=tied)
    batch = random_batch(4)
    run_whole(whole.chunks[0], batch)
    staged = staged_for(
        name,
        2,
        num_layers=4,
        tied=tied,
        defer_embedding_wgrad_compute=True,
        finalize_model_grads_func=lambda *_, **__: finalize(staged),
    )
    step(staged, name, batch)
    assert_gradients_of(whole, staged)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
def test_an_error_leaves_no_deferred_gradient_for_the_next_step(group, failing):
    parallel_state.initialize_model_parallel(1, 2)
    whole = staged_gpt(num_layers=4, tied=False)
    batch = random_batch(4)
    run_whole(whole.chunks[0], batch)
    staged = staged_for("1f1b", 2, num_layers=4, tied=False, defer_embedding_wgrad_compute=True)
    calls = []

    def fail_at_the_third(*_):
        calls.append(1)
        if len(calls) == 3 and group.rank() in failing:
            raise ConfigError("the third")

    hook = staged.chunks[0].register_forward_hook(fail_at_the_third)
    with pytest.raises(ConfigError, match="the third"):
        staged.run(make_schedule("1f1b", 2, 4), batch)
    hook.remove()
    staged.chunks.zero_grad()
    step(staged, "1f1b", batch)
    finalize(staged)
    assert_gradients_of(whole, staged)


class Part(nn.Module):
    """A stage that is no model of ours."""

    def __init__(self, inner, config):
        super().__init__()
        self.inner, self.config, self._input = inner, config, None

    def set_input_tensor(self, input_):
        self._input = input_

    def forward(self, tokens):
        return self.inner(tokens.t() if self._input is None else self._input)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_a_stage_of_an_embedding_alone_and_one_without_parameters(group, name):
    parallel_state.initialize_model_parallel(1, 2)
    staged = staged_for(name, 2, num_layers=2)
    embedding = nn.Embedding(VOCAB, 24, dtype=torch.float64)
    block = staged.chunks[0].decoder if name == "zero-bubble" else nn.Tanh()
    part = Part(embedding if group.rank() == 0 else block, staged.chunks[0].config)
    step(
        staged,
        name,
        random_batch(2),
        [part],
        lambda data, model: (model(next(data)[0]), lambda hidden: (hidden.square().sum(), None)),
    )
    assert all(param.grad is not None for param in part.parameters())


@pytest.mark.ranks(1)
def test_what_an_engine_model_puts_off_is_found(group):
    """So that a step that failed, on whichever stage, leaves nothing of it to the next."""
    sizes = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    config = ModelConfig(**sizes, defer_embedding_wgrad_compute=True)
    model = GPT(config, VOCAB, LENGTH, groups=Groups(tp=group), share_embeddings_and_output_weights=False)
    ids = torch.randint(VOCAB, (1, LENGTH))
    model(ids, labels=ids).sum().backward()
    inputs, grad_outputs = deferred_buffers(model)
    assert (len(inputs), len(grad_outputs)) == (1, 1)
    inputs.clear()
    grad_outputs.clear()
    model.finish_weight_gradients()
    assert model.output_layer.weight.grad is None
