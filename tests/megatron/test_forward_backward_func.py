"""``get_forward_backward_func`` does what programs written for Megatron expect of it."""

from __future__ import annotations

import contextlib
import warnings
from functools import partial

import pytest
import torch
from harness.model_options import NO_DROPOUT
from harness.parity import assert_close_to
from torch import nn
from training.pipeline.pipelines import LENGTH, MICRO_BATCH_SIZE, random_batch, staged_gpt

from shardwise import parallel_state
from shardwise.core.errors import ConfigError, DataError
from shardwise.megatron.config import ModelParallelConfig, TransformerConfig
from shardwise.megatron.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from shardwise.megatron.layer_specs import get_gpt_layer_local_spec
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
)
from shardwise.tensor_parallel.random import model_parallel_cuda_manual_seed

NUM_MICRO_BATCHES = 4


def loss_func(output, non_loss_data=False):
    if non_loss_data:
        return {"shape": tuple(output.shape)}
    loss = output.mean()
    return loss, {"lm loss": loss.detach()}


def loss_and_tokens(output):
    return output.sum(), torch.tensor(output.numel()), {"sum": output.detach().sum()}


def forward_step(data_iterator, model, *, loss_func=loss_func):
    tokens, labels = next(data_iterator)
    return model(tokens, labels=labels), loss_func


class Wrapped(nn.Module):
    """As a data-parallel or a mixed-precision wrapper: the model is its ``module``."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *arguments, **options):
        return self.module(*arguments, **options)


def arguments(staged, **others):
    chunks = [Wrapped(chunk) for chunk in staged.chunks]
    batch = random_batch(NUM_MICRO_BATCHES)
    iterators = [zip(*batch, strict=True) for _ in chunks]
    return {
        "forward_step_func": forward_step,
        "data_iterator": iterators if len(chunks) > 1 else iterators[0],
        "model": chunks if len(chunks) > 1 else chunks[0],
        "num_microbatches": NUM_MICRO_BATCHES,
        "seq_length": LENGTH,
        "micro_batch_size": MICRO_BATCH_SIZE,
    } | others


def whole_model(num_layers):
    """Losses and gradients of the mean over micro-batches."""
    staged = staged_gpt(num_layers=num_layers, tied=False)
    losses = [staged.chunks[0](tokens, labels=labels).mean() for tokens, labels in zip(*random_batch(4), strict=True)]
    (sum(losses) / NUM_MICRO_BATCHES).backward()
    return [loss.item() for loss in losses], {k: s.data.grad for k, s in staged.parameters_by_key().items()}


def assert_gradients(staged, expected, factor=1.0):
    for key, shard in staged.parameters_by_key().items():
        assert_close_to(shard.data.grad, factor * expected[key], rtol_of_norm=1e-12, name=key)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("chunks", [1, 2])
def test_with_the_references_arguments(group, chunks):
    losses, expected = whole_model(4)
    vp_size = chunks if chunks > 1 else None
    parallel_state.initialize_model_parallel(1, 2, vp_size)
    staged = staged_gpt(pp=2, num_chunks=chunks, num_layers=4, tied=False)
    forward_backward_func = get_forward_backward_func()
    named = forward_backward_pipelining_without_interleaving, forward_backward_pipelining_with_interleaving
    assert forward_backward_func is named[chunks - 1]
    data = forward_backward_func(**arguments(staged), decoder_seq_length=LENGTH, forward_only=False)
    last = parallel_state.is_pipeline_last_stage()
    assert [round(item["lm loss"].item(), 12) for item in data] == ([round(x, 12) for x in losses] if last else [])
    assert_gradients(staged, expected)

    staged.chunks.zero_grad()
    for options in (
        {"forward_only": True, "first_val_step": True},
        {"collect_non_loss_data": True, "forward_only": True},
    ):
        data = forward_backward_func(**arguments(staged), **options)
        assert len(data) == (NUM_MICRO_BATCHES if last else 0)
        assert all(param.grad is None for param in staged.chunks.parameters())
    assert data == ([{"shape": (MICRO_BATCH_SIZE, LENGTH)}] * NUM_MICRO_BATCHES if last else [])


@pytest.mark.ranks(2)
def test_losses_with_their_number_of_tokens_and_the_configs_hooks(group):
    _, expected = whole_model(4)
    entered, finalized = [], []

    @contextlib.contextmanager
    def no_sync():
        entered.append(True)
        yield

    staged = staged_gpt(
        pp=2,
        num_layers=4,
        tied=False,
        grad_scale_func=lambda loss: 8 * loss,
        no_sync_func=no_sync if group.rank() else [no_sync],
        finalize_model_grads_func=lambda *given, **named: finalized.append((given, named)),
    )
    parallel_state.initialize_model_parallel(1, 2)
    given = arguments(staged, forward_step_func=partial(forward_step, loss_func=loss_and_tokens))
    for schedule in ("gpipe", "1f1b"):
        staged.chunks.zero_grad()
        entered.clear()
        get_forward_backward_func(schedule=schedule)(**given)
        assert_gradients(staged, expected, factor=8.0)
        # All backward steps but the last.
        assert len(entered) == NUM_MICRO_BATCHES - 1
        given["data_iterator"] = zip(*random_batch(NUM_MICRO_BATCHES), strict=True)
    (chunks, num_tokens), named = finalized[-1]
    assert (chunks, num_tokens, len(finalized)) == ([given["model"]], None, 2)
    assert named["pg_collection"].pp.size() == 2


@pytest.mark.ranks(1)
def test_one_stage_needs_no_pipeline(group):
    losses, expected = whole_model(4)
    assert get_forward_backward_func() is forward_backward_no_pipelining
    assert forward_backward_no_pipelining.__name__ == "forward_backward_no_pipelining"
    parallel_state.initialize_model_parallel()
    staged = staged_gpt(num_layers=4, tied=False)
    data = get_forward_backward_func()(**arguments(staged))
    assert [item["lm loss"].item() for item in data] == losses
    assert_gradients(staged, expected)


@pytest.mark.ranks(2)
def test_too_little_data_is_an_error_on_every_stage(group):
    parallel_state.initialize_model_parallel(1, 2)
    staged = staged_gpt(pp=2, num_layers=2)
    with pytest.raises(DataError, match="the data ended at micro-batch 4 of 5"):
        get_forward_backward_func()(**arguments(staged, num_microbatches=5))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_shorter_micro_batch_ends_ranks_that_share_the_sequence(group, schedule):
    """Of 11 tokens they hold 6 and 5, of 10 they hold 5 and 5: one rank's part alone has another length."""
    parallel_state.initialize_model_parallel(2, 2)
    staged = staged_gpt(tp=2, pp=2, sequence_parallel=True, delay_wgrad_compute=schedule == "zero-bubble")
    run = get_forward_backward_func(schedule=schedule)
    batches = list(zip(*random_batch(NUM_MICRO_BATCHES), strict=True))
    shorter = [*batches[:2], tuple(part[:, :10] for part in batches[2]), batches[3]]
    with pytest.raises(DataError, match=r"input_ids have the shape \[2, 10\]; .* \[2, 11\]"):
        run(**arguments(staged, data_iterator=iter(shorter)))
    run(**arguments(staged))


class Counting(torch.utils.data.Dataset):
    """Rows of ids that count up, each from another start."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        row = (7 * index + torch.arange(LENGTH + 1)) % 83
        return {"tokens": row[:-1], "labels": row[1:]}


def seeded_by_one_call(tp, pp, **stage):
    """Three steps of a program for GPUs, which seeds nothing but what it calls CUDA's; the losses on the last stage.

    Dropout is on, as by default, and batches are drawn by the CPU's generator.
    """
    parallel_state.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(123, rng="global")
    config = TransformerConfig(
        num_layers=2, hidden_size=12, num_attention_heads=4, use_cpu_initialization=True, pipeline_dtype=torch.float32
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=83, max_sequence_length=LENGTH, **stage)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = iter(torch.utils.data.DataLoader(Counting(), batch_size=8, shuffle=True))

    def step(data_iterator, model):
        batch = next(data_iterator)
        return model(batch["tokens"], torch.arange(LENGTH), None, labels=batch["labels"]), loss_func

    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=batches,
            model=model,
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=8,
        )
        finalize_model_grads([model])
        optimizer.step()
        losses += [data["lm loss"].item() for data in reduced]
    parallel_state.destroy_model_parallel()
    return losses


@pytest.mark.ranks(2, 4)
def test_a_program_that_makes_one_call_to_seed_has_one_rank_s_losses(group):
    torch.manual_seed(100 + group.rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        expected = seeded_by_one_call(1, 1)
    # All ranks had the same batches, of which the first one tells.
    assert [warning.category for warning in caught] == [UserWarning] * (group.rank() == 0)
    assert len(expected) == 3
    assert expected[-1] < expected[0] < 5
    pp = group.size() // 2
    if pp == 2:
        with pytest.raises(ConfigError, match=r"stage 0 of 2 was made with pre_process=True, post_process=True, and"):
            seeded_by_one_call(2, pp)
        parallel_state.destroy_model_parallel()
    first, last = group.rank() < 2, group.rank() >= group.size() - 2
    losses = seeded_by_one_call(2, pp, pre_process=first, post_process=last)
    assert losses == (pytest.approx(expected, rel=2e-6) if last else [])


@pytest.mark.ranks(1)
def test_without_stages_any_length_will_do(group):
    parallel_state.initialize_model_parallel()
    shorter = [tuple(part[:, :n] for part in batch) for n, batch in enumerate(zip(*random_batch(4), strict=True), 8)]
    assert len(get_forward_backward_func()(**arguments(staged_gpt(), data_iterator=iter(shorter)))) == 4


@pytest.mark.ranks(2)
def test_arguments_that_do_not_fit(group):
    with pytest.raises(ConfigError, match="schedule is '2f2b'"):
        get_forward_backward_func(2, schedule="2f2b")
    with pytest.raises(ConfigError, match="'1f1b' takes one chunk per stage, and there are 3"):
        get_forward_backward_func(2, 3, schedule="1f1b")
    parallel_state.initialize_model_parallel(1, 2, 2)
    staged = staged_gpt(pp=2, num_chunks=2, num_layers=4)
    given = arguments(staged)
    for wrong, words in (
        ({"data_iterator": given["data_iterator"][:1]}, "1 data iterators for 2 chunks"),
        ({"data_iterator": given["data_iterator"][0]}, "one data iterator for 2 chunks"),
        ({"decoder_seq_length": 5}, "decoder_seq_length is 5 and seq_length 11"),
        ({"num_microbatches": 3}, "groups of 2, .* and 3 micro-batches do not fit"),
        ({"model": [nn.Linear(2, 2), nn.Linear(2, 2)]}, "type Linear has no config"),
    ):
        with pytest.raises(ConfigError, match=words):
            get_forward_backward_func()(**given | wrong)


def gradients_of_two_losses(kept, *, per_token, **settings):
    """Gradients, in DistributedDataParallel, of losses that count the positions that ``kept(micro_batch)`` gives."""
    torch.manual_seed(3)
    tp = parallel_state.get_tensor_model_parallel_world_size()
    config = TransformerConfig(
        num_layers=2,
        hidden_size=12,
        num_attention_heads=4,
        **NO_DROPOUT,
        add_bias_linear=False,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        calculate_per_token_loss=per_token,
        grad_scale_func=lambda loss: 8 * loss,
        finalize_model_grads_func=finalize_model_grads,
        **settings,
    )
    stage = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    spec = get_gpt_layer_local_spec(num_experts=settings.get("num_moe_experts"))
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(), GPTModel(config, spec, 23, LENGTH, **stage)
    )
    rank = parallel_state.get_data_parallel_rank()

    def step(data_iterator, model):
        number = next(data_iterator)
        ids = torch.randint(23, (2, LENGTH), generator=torch.Generator().manual_seed(number))
        mask = kept(number)

        def loss(output):
            total = (output * mask).sum()
            return total, mask.sum(), {"sum": total.detach()}

        return model(ids, torch.arange(LENGTH), None, labels=ids.flip(1)), loss

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([2 * rank, 2 * rank + 1]),
        model=[model],
        num_microbatches=2,
        seq_length=LENGTH,
        micro_batch_size=2,
    )
    return model, {name: param.main_grad for name, param in model.module.named_parameters()}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)], ids=["", "tp 2", "pp 2"])
def test_losses_by_token_are_divided_by_the_tokens_of_all_ranks(group, tp, pp):
    parallel_state.initialize_model_parallel(tp, pp)
    # One over the number of tokens, an integer, is in fp32.
    # If all micro-batches have the same number of tokens, the mean is one of means, also of losses of experts.
    experts = {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.1}
    (_, by_token), (_, of_means) = (
        gradients_of_two_losses(lambda _: torch.ones(2, LENGTH), per_token=per_token, **experts)
        for per_token in (True, False)
    )
    for name, expected in of_means.items():
        assert_close_to(by_token[name], expected, rtol_of_norm=1e-7, name=name)
    model, found = gradients_of_two_losses(lambda number: torch.arange(LENGTH) <= number, per_token=True)
    if pp == tp == 1:
        # This rank's two micro-batches, alone: its own sums, which all ranks add and divide by their tokens.
        own = [2 * group.rank(), 2 * group.rank() + 1]
        ids = [torch.randint(23, (2, LENGTH), generator=torch.Generator().manual_seed(number)) for number in own]
        losses = [model.module(each, torch.arange(LENGTH), None, labels=each.flip(1)) for each in ids]
        total = sum(loss[:, : number + 1].sum() for loss, number in zip(losses, own, strict=True))
        for (name, _), grad in zip(
            model.module.named_parameters(), torch.autograd.grad(total, list(model.module.parameters())), strict=True
        ):
            torch.distributed.all_reduce(grad)
            assert_close_to(found[name], 8 * grad / (1 + 2 + 3 + 4), rtol_of_norm=1e-7, name=name)


@pytest.mark.ranks(1)
def test_a_model_of_one_stage_needs_no_sizes(group):
    parallel_state.initialize_model_parallel()
    model = nn.Linear(4, 1)
    # Megatron reads neither these sizes nor a hidden size.
    model.config, model.set_input_tensor = ModelParallelConfig(), lambda tensor: None
    options = {"seq_length": None, "micro_batch_size": None, "decoder_seq_length": 256, "num_microbatches": 3}

    def step(data_iterator, model):
        batch = next(data_iterator)
        return model(batch), lambda output: (output.mean(), {"size": len(batch)})

    for only in (True, False):
        batches = [torch.full((size, 4), 1.0 + size) for size in (1, 2, 3)]
        data = get_forward_backward_func()(
            forward_step_func=step, data_iterator=iter(batches), model=[model], forward_only=only, **options
        )
        assert data == [{"size": size} for size in (1, 2, 3)]
    assert_close_to(model.weight.grad, torch.full((1, 4), 3.0), rtol_of_norm=1e-6)


@pytest.mark.ranks(1)
def test_losses_of_experts_by_token_need_the_number_of_positions(group):
    parallel_state.initialize_model_parallel()
    settings = {"num_moe_experts": 4, "variable_seq_lengths": True}
    gradients_of_two_losses(lambda _: torch.ones(2, LENGTH), per_token=True, **settings)
    with pytest.raises(ConfigError, match="losses that balance experts"):
        gradients_of_two_losses(lambda _: torch.ones(2, LENGTH), per_token=True, **settings, moe_z_loss_coeff=0.1)
