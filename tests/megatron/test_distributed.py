"""DistributedDataParallel and finalize_model_grads: gradients of one rank, and Megatron's names for getting there."""

import warnings

import pytest
import torch
from harness.model_options import NO_DROPOUT
from harness.parity import assert_bit_equal, assert_close_to
from torch import nn

from shardwise import parallel_state
from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError, DesyncError, DivergenceError
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from shardwise.megatron.layer_specs import get_gpt_layer_local_spec
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.module import Float16Module


def make_gpt(**settings):
    torch.manual_seed(3)
    config = TransformerConfig(
        num_layers=2, hidden_size=12, num_attention_heads=4, **NO_DROPOUT, params_dtype=torch.float64, **settings
    )
    return GPTModel(config, get_gpt_layer_local_spec(), 23, 9)


def ids_of(rank):
    return torch.randint(23, (2, 9), generator=torch.Generator().manual_seed(rank))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_chunk_without_parameters_has_nothing_to_finish(group, tp):
    parallel_state.initialize_model_parallel(tp)
    chunk = torch.nn.Module()
    chunk.register_buffer("table", torch.ones(2))
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(check_for_nan_in_grad=True), chunk)
    tokens = torch.tensor(3.0)
    finalize_model_grads([wrapped], tokens)
    assert tokens == 3.0 * parallel_state.get_data_parallel_world_size()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_gradients_are_the_mean_over_ranks(group, overlap, fused):
    parallel_state.initialize_model_parallel()
    plain = make_gpt()
    for rank in range(2):
        for _ in range(2):
            (plain(ids_of(rank), labels=ids_of(rank)).mean() / 2).backward()
    model = make_gpt(gradient_accumulation_fusion=fused)
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=overlap, bucket_size=500)
    wrapped = DistributedDataParallel(model.config, ddp_config, model)
    ids = ids_of(group.rank())
    for _ in range(2):
        wrapped.zero_grad_buffer()
        with CollectiveCounter() as counter:
            with wrapped.no_sync():
                wrapped(ids, labels=ids).mean().backward()
            assert counter.launches == []
            wrapped(ids, labels=ids).mean().backward()
            assert len(counter.launches) == (len(wrapped.gradients.buckets) if overlap else 0)
            finalize_model_grads([wrapped])
        assert len(counter.launches) == (len(wrapped.gradients.buckets) if overlap else 1)
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert param.grad is param.main_grad
            assert_close_to(param.main_grad, expected.grad, rtol_of_norm=1e-12, name=name)
    wrapped.scale_gradients(0.5)
    assert_close_to(
        model.decoder.final_layernorm.weight.grad, plain.decoder.final_layernorm.weight.grad / 2, rtol_of_norm=1e-12
    )
    assert wrapped.state_dict().keys() == model.state_dict().keys()


@pytest.mark.ranks(2)
def test_half_precision_reduced_in_fp32(group):
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1, hidden_size=4, num_attention_heads=1, bf16=True, params_dtype=torch.bfloat16
    )
    torch.manual_seed(0)
    model = Float16Module(config, nn.Linear(4, 3))
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    batch = torch.randn(5, 4)
    output = wrapped(batch)
    assert output.dtype == torch.float32
    wrapped.start_grad_sync()
    wrapped.finish_grad_sync()
    (output.sum() * (1 + group.rank())).backward()
    wrapped.finish_grad_sync()
    weight = model.module.weight
    assert weight.grad is None
    assert weight.main_grad.dtype == torch.float32
    expected = torch.autograd.grad(model(batch).sum(), weight)[0].float() * 1.5
    assert_close_to(weight.main_grad, expected, rtol_of_norm=1e-2)


@pytest.mark.ranks(2)
def test_parameters_of_the_first_rank_and_tokens_of_all(group):
    parallel_state.initialize_model_parallel()
    torch.manual_seed(group.rank())
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    model = nn.Linear(4, 3)
    torch.manual_seed(0)
    expected = nn.Linear(4, 3)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    wrapped.broadcast_params()
    assert_bit_equal(model.weight, expected.weight)
    wrapped(torch.ones(1, 4)).sum().backward()
    num_tokens = torch.tensor(3.0 + group.rank())
    finalize_model_grads([wrapped], num_tokens)
    assert num_tokens == 7
    assert_close_to(model.weight.grad, torch.ones(3, 4) / 7, rtol_of_norm=1e-6)


def wrapped_gpt(**settings):
    model = make_gpt(**settings)
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


@pytest.mark.ranks(2)
def test_data_parallel_ranks_that_hold_other_parameters_are_an_error_before_the_first_step(group):
    parallel_state.initialize_model_parallel()
    wrapped = wrapped_gpt()
    if group.rank():
        wrapped.module.decoder.layers[1].mlp.linear_fc1.weight.data[0, 0] += 1
    ids = ids_of(0)
    with torch.no_grad():
        # One rank alone may look at something.
        wrapped(ids, labels=ids)
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    with pytest.raises(DesyncError, match=f"parameter '{name}': rank 1 holds other values than rank 0, and data-"):
        wrapped(ids, labels=ids)
    # Once, so that it costs nothing later.
    wrapped(ids, labels=ids)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2)
    wrapped = wrapped_gpt()
    if group.rank():
        wrapped.module.decoder.final_layernorm.bias.data[3] = 1e-30
    message = "parameter 'decoder.final_layernorm.bias': rank 1 holds other values than rank 0, and tensor-parallel"
    with pytest.raises(DesyncError, match=message):
        wrapped(ids, labels=ids)


@pytest.mark.ranks(4)
def test_the_same_targets_on_all_data_parallel_ranks_are_told_once(group):
    parallel_state.initialize_model_parallel(2)
    rank = parallel_state.get_data_parallel_rank()
    for of_rank, number in ((lambda _: 0, 1), (lambda rank: rank, 0)):
        wrapped = wrapped_gpt()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # What is only measured may be the same.
            with torch.no_grad():
                wrapped(ids_of(5), labels=ids_of(5))
            for _ in range(2):
                # In all micro-batches of the step.
                with wrapped.no_sync():
                    wrapped(ids_of(3), labels=ids_of(3)).sum().backward()
                ids = ids_of(of_rank(rank))
                wrapped(ids, labels=ids).sum().backward()
                finalize_model_grads([wrapped])
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == (number if group.rank() == 0 else 0)
        for text in texts:
            assert text.startswith("all 2 data-parallel ranks learned the same targets in the first step")
            assert "torch.utils.data.DistributedSampler" in text


@pytest.mark.ranks(2)
def test_a_gradient_that_is_nan_on_one_rank_is_an_error_on_all(group):
    # Tensor-parallel ranks: each sees its own gradients alone.
    parallel_state.initialize_model_parallel(2)
    model = make_gpt()
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(check_for_nan_in_grad=True), model)
    ids = ids_of(0)
    wrapped(ids, labels=ids).mean().backward()
    if group.rank() == 1:
        model.output_layer.weight.grad[0, 0] = torch.nan
    with pytest.raises(DivergenceError, match="a gradient is NaN or infinite"):
        finalize_model_grads([wrapped])


def test_settings_that_are_not_offered():
    with pytest.raises(ConfigError, match="num_distributed_optimizer_instances is 2, which is not offered here"):
        DistributedDataParallelConfig(num_distributed_optimizer_instances=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DistributedDataParallelConfig(average_in_collective=True)
    assert "average_in_collective changes nothing here" in str(caught[0].message)
    with pytest.raises(ConfigError, match="was given a Linear, which has no finish_grad_sync; wrap each"):
        finalize_model_grads([nn.Linear(2, 2)])
    with pytest.raises(ConfigError, match="fp8 is 'hybrid', which is not offered here: matrices are multiplied in"):
        get_gpt_layer_local_spec(fp8="hybrid")
