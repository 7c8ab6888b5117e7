"""Megatron's optimizers: losses, norms and weights of PyTorch's AdamW on one rank, at layouts and precisions."""

import pytest
import torch
from harness.model_options import NO_DROPOUT
from harness.parity import assert_bit_equal, assert_close_to

from shardwise import parallel_state
from shardwise.core.errors import ConfigError
from shardwise.megatron import dist_checkpointing
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from shardwise.megatron.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from shardwise.megatron.layer_specs import get_gpt_layer_local_spec
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.module import Float16Module
from shardwise.megatron.optimizer import (
    ChainedOptimizer,
    DistributedOptimizer,
    DynamicGradScaler,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from shardwise.megatron.schedules import get_forward_backward_func

VOCABULARY, LENGTH, STEPS = 23, 8, 5


def gpt(*, dtype=torch.float64, **settings):
    """A model of this rank's stage."""
    torch.manual_seed(3)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=12,
        num_attention_heads=4,
        **NO_DROPOUT,
        add_bias_linear=False,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        **settings,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=settings.get("num_moe_experts")),
        VOCABULARY,
        # Two positions are not used, and have gradients of zeros.
        LENGTH + 2,
        share_embeddings_and_output_weights=True,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def made(model, *, zero=False, config_overrides=None, wide_sums=True, **options):
    """The wrapped model, and its optimizer."""
    config = model.config
    half = {"bf16": config.bf16, "fp16": config.fp16}
    if any(half.values()):
        model = Float16Module(config, model)
    sums = {"grad_reduce_in_fp32": wide_sums and any(half.values()), "overlap_grad_reduce": True, "bucket_size": 300}
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=zero, **sums), model
    )
    settings = {"lr": 0.05, "min_lr": 0.0, "weight_decay": 0.3, "clip_grad": 0.2, "log_num_zeros_in_grad": True}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(use_distributed_optimizer=zero, **half, **settings | options), [wrapped], config_overrides
    )
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    return wrapped, optimizer


def scheduler_of(optimizer):
    return OptimizerParamScheduler(optimizer, 0.0, 0.05, 0.01, 2, 9, "cosine", 0.3, 0.3, 9, "constant")


def batch_of(step):
    return torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(step))


def forward_step(data_iterator, model):
    ids = next(data_iterator)
    losses = model(ids, torch.arange(LENGTH), None, labels=ids.flip(1))
    return losses, lambda output: (output.float().mean(), {"loss": output.detach().mean()})


def train(wrapped, optimizer, scheduler, steps):
    """Steps of Megatron's loop on this data-parallel rank's samples; loss, norm and zeros of each."""
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    results = []
    for step in steps:
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        data = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([batch_of(step).chunk(ranks)[rank]]),
            model=[wrapped],
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=4 // ranks,
        )
        successful, norm, zeros = optimizer.step()
        assert successful
        scheduler.step(1)
        results.append((torch.stack([each["loss"] for each in data]) if data else None, norm, zeros))
    return results


def dense():
    """Losses, norms, zeros and the model of the same steps on one rank, with PyTorch's AdamW."""
    parallel_state.initialize_model_parallel()
    model = gpt()
    params = dict(model.named_parameters())
    matrices = [param for param in params.values() if param.dim() > 1]
    vectors = [param for param in params.values() if param.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "max_lr": 0.05, "min_lr": 0.0}, {"params": vectors, "wd_mult": 0.0, "min_lr": 0.0}],
        lr=0.05,
        weight_decay=0.3,
    )
    scheduler = scheduler_of(optimizer)
    results = []
    for step in range(STEPS):
        optimizer.zero_grad()
        ids = batch_of(step)
        loss = model(ids, torch.arange(LENGTH), None, labels=ids.flip(1)).mean()
        loss.backward()
        zeros = sum(int((param.grad == 0).sum()) for param in params.values())
        norm = torch.nn.utils.clip_grad_norm_(params.values(), 0.2)
        optimizer.step()
        scheduler.step(1)
        results.append((loss.detach(), float(norm), zeros))
    parallel_state.destroy_model_parallel()
    return results, model


def saved_and_loaded(folder, wrapped, optimizer, **options):
    """A new model and optimizer with the state of these, through a checkpoint."""

    def state_of(wrapped, optimizer):
        model = wrapped.module.sharded_state_dict()
        return {"model": model, "optimizer": optimizer.sharded_state_dict({"model": model})}

    dist_checkpointing.save(state_of(wrapped, optimizer), folder)
    other = made(gpt(dtype=next(wrapped.parameters()).dtype), **options)
    loaded = dist_checkpointing.load(state_of(*other), folder)
    other[1].load_state_dict(loaded["optimizer"])
    return other


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("zero", "tp", "pp", "sequence_parallel"),
    [
        (False, 1, 1, False),
        (True, 1, 1, False),
        (True, 2, 1, True),
        (False, 1, 2, False),
        pytest.param(False, 2, 1, True, marks=pytest.mark.slow),
        pytest.param(True, 1, 2, False, marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_of_adamw_on_one_rank(group, zero, tp, pp, sequence_parallel):
    expected, model = dense()
    parallel_state.initialize_model_parallel(tp, pp)
    wrapped, optimizer = made(gpt(sequence_parallel=sequence_parallel), zero=zero)
    kind = DistributedOptimizer if zero else FP32Optimizer
    assert [type(each) for each in optimizer.chained_optimizers] == [kind]
    assert isinstance(optimizer, (ChainedOptimizer, MegatronOptimizer))
    assert optimizer.get_loss_scale().tolist() == [1.0]
    scheduler = scheduler_of(optimizer)
    assert sorted({each["weight_decay"] for each in optimizer.param_groups}) == [0.0, 0.3]
    results = train(wrapped, optimizer, scheduler, range(STEPS))
    for (loss, norm, zeros), (dense_loss, dense_norm, dense_zeros) in zip(results, expected, strict=True):
        if loss is not None:
            mean = loss.mean() / parallel_state.get_data_parallel_world_size()
            torch.distributed.all_reduce(mean, group=parallel_state.get_data_parallel_group())
            assert_close_to(mean, dense_loss, rtol_of_norm=1e-12)
        assert norm == pytest.approx(dense_norm, rel=1e-11)
        assert zeros == dense_zeros
    norm = wrapped.module.decoder.layers[0].input_layernorm.weight
    stage = parallel_state.get_pipeline_model_parallel_rank()
    assert_close_to(norm, model.decoder.layers[stage].input_layernorm.weight, rtol_of_norm=1e-11)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["", "bf16"])
@pytest.mark.parametrize(("tp", "zero"), [(1, False), (1, True), (2, False)], ids=["", "zero", "tp 2"])
def test_a_loaded_state_goes_on_with_the_same_bits(group, tp, zero, dtype, tmp_path):
    parallel_state.initialize_model_parallel(tp)
    first = made(gpt(dtype=dtype), zero=zero)
    scheduler = scheduler_of(first[1])
    train(*first, scheduler, range(2))
    second = saved_and_loaded(tmp_path / "ckpt", *first, zero=zero)
    schedule = scheduler_of(second[1])
    schedule.load_state_dict(scheduler.state_dict())
    results = [train(*each, of, range(2, 4)) for each, of in ((first, scheduler), (second, schedule))]
    for (loss, *numbers), (expected, *wanted) in zip(*results, strict=True):
        assert_bit_equal(loss, expected)
        assert numbers == wanted
    for param, expected in zip(second[0].parameters(), first[0].parameters(), strict=True):
        assert_bit_equal(param, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("zero", [False, True], ids=["", "zero"])
def test_steps_of_bf16_are_those_of_fp32_copies(group, zero):
    parallel_state.initialize_model_parallel()
    wrapped, optimizer = made(gpt(dtype=torch.bfloat16), zero=zero)
    kind = DistributedOptimizer if zero else Float16OptimizerWithFloat16Params
    assert type(optimizer.chained_optimizers[0]) is kind
    alike = {param: torch.nn.Parameter(param.detach().float()) for param in wrapped.parameters()}
    plain = torch.optim.AdamW(alike.values(), lr=0.05, weight_decay=0.3)
    for step in range(3):
        wrapped.zero_grad_buffer()
        ids = batch_of(2 * step + group.rank())
        wrapped(ids, torch.arange(LENGTH), None, labels=ids).mean().backward()
        gradients = torch.autograd.grad(wrapped.module(ids, torch.arange(LENGTH), None, labels=ids).mean(), list(alike))
        finalize_model_grads([wrapped])
        for copy, gradient in zip(alike.values(), gradients, strict=True):
            copy.grad = gradient.float() / 2
            torch.distributed.all_reduce(copy.grad)
        norm = torch.nn.utils.clip_grad_norm_(alike.values(), 0.2)
        plain.step()
        assert optimizer.step()[1] == pytest.approx(float(norm), rel=1e-6)
        for param, copy in alike.items():
            assert_close_to(param, copy.bfloat16(), rtol_of_norm=1e-4)
    # Weights that a program sets are those of the next step.
    with torch.no_grad():
        for param in alike:
            param.fill_(0.25)
    optimizer.reload_model_params()
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.0
    optimizer.step()
    assert {float(value) for param in alike for value in param.detach().unique()} == {0.25}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("zero", [False, True], ids=["", "zero"])
def test_a_stage_that_trains_nothing_takes_part_in_the_step(group, zero):
    parallel_state.initialize_model_parallel(1, 2)
    model = gpt()
    for name, param in model.named_parameters():
        param.requires_grad_(group.rank() == 1 and name != "output_layer.weight")
    wrapped, optimizer = made(model, zero=zero)
    assert optimizer.is_stub_optimizer == (group.rank() == 0)
    trained = [param for param in wrapped.parameters() if param.requires_grad]
    before = [param.detach().clone() for param in wrapped.parameters()]
    for param in trained:
        param.main_grad.fill_(1.0)
    count = torch.tensor(float(sum(param.numel() for param in trained)))
    torch.distributed.all_reduce(count)
    assert optimizer.step()[:2] == (True, pytest.approx(float(count) ** 0.5, rel=1e-12))
    for param, old in zip(wrapped.parameters(), before, strict=True):
        assert torch.equal(param, old) != param.requires_grad


@pytest.mark.ranks(2)
def test_an_overflow_skips_the_step_and_shrinks_the_scale(group):
    parallel_state.initialize_model_parallel()
    wrapped, optimizer = made(gpt(dtype=torch.float16), initial_loss_scale=2.0**6, hysteresis=1, loss_scale_window=2)
    before = [param.detach().clone() for param in wrapped.parameters()]
    for param in wrapped.parameters():
        param.main_grad.fill_(1.0)
    if group.rank():
        param.main_grad.view(-1)[0] = torch.inf
    torch.distributed.all_reduce(param.main_grad)
    assert optimizer.step() == (False, None, None)
    for param, expected in zip(wrapped.parameters(), before, strict=True):
        assert_bit_equal(param, expected)
    assert optimizer.get_loss_scale().tolist() == [32.0]
    assert float(optimizer.scale_loss(torch.tensor(2.0))) == 64.0
    norms = []
    for _ in range(2):
        for param in wrapped.parameters():
            param.main_grad.fill_(32.0)
        norms.append(optimizer.step()[1])
    assert norms == [pytest.approx(sum(param.numel() for param in before) ** 0.5, rel=1e-6)] * 2
    assert optimizer.get_loss_scale().tolist() == [64.0]


@pytest.mark.ranks(2)
def test_experts_have_the_norm_of_one_rank(group):
    found = []
    for ep, zero in ((1, False), (2, False), (2, True)):
        parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
        settings = {"num_moe_experts": 4, "moe_router_topk": 2, "expert_model_parallel_size": ep}
        wrapped, optimizer = made(gpt(**settings), zero=zero)
        results = train(wrapped, optimizer, scheduler_of(optimizer), range(3))
        found.append([norm for _, norm, _ in results])
        assert {group["is_expert_parallel"] for group in optimizer.param_groups} == {ep > 1, False}
        parallel_state.destroy_model_parallel()
    assert found[1] == pytest.approx(found[0], rel=1e-11)
    assert found[2] == pytest.approx(found[0], rel=1e-11)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("zero", [False, True], ids=["", "zero"])
def test_gradients_in_16_bits_are_clipped_in_fp32(group, zero):
    """Twice, with gradients that stay as they are, and once without clipping after a clipped step was left out."""
    parallel_state.initialize_model_parallel()
    model = gpt(dtype=torch.bfloat16)
    wrapped, optimizer = made(model, zero=zero, wide_sums=False, weight_decay=0.0)
    params = [*model.parameters()]
    copies = [torch.nn.Parameter(param.detach().float()) for param in params]
    oracle = torch.optim.AdamW(copies, lr=0.05, weight_decay=0.0)
    random = torch.Generator().manual_seed(0)
    for clips, steps in ((True, True), (True, True), (True, False), (False, True)):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        for param, copy in zip(params, copies, strict=True):
            param.main_grad.copy_(torch.randn(param.shape, generator=random) * (1.0 if clips else 1e-3))
            copy.grad = param.main_grad.float()
        before = [param.main_grad.clone() for param in params]
        norm = torch.nn.utils.get_total_norm([copy.grad for copy in copies])
        assert optimizer.clip_grad_norm(0.2 if clips else 0.0) == pytest.approx(norm.item(), rel=1e-5)
        assert optimizer.get_grad_norm() == pytest.approx(0.2 if clips else norm.item(), rel=1e-4)
        for param, gradient in zip(params, before, strict=True):
            assert_bit_equal(param.main_grad, gradient)
        if steps:
            torch.nn.utils.clip_grads_with_norm_(copies, 0.2 if clips else 1e9, norm)
            optimizer.step_with_ready_grads()
            oracle.step()
    for param, copy in zip(params, copies, strict=True):
        assert_close_to(param.detach(), copy.detach().bfloat16(), rtol_of_norm=1e-3)
    # Bits that a clipped gradient had lost would be missing in the running means.
    found, expected = (
        torch.cat([state["exp_avg"].flatten() for state in each.state.values()]).sort().values
        for each in (optimizer, oracle)
    )
    assert_close_to(found, expected, rtol_of_norm=1e-5)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("zero", [False, True], ids=["", "zero"])
def test_a_constant_scale_is_that_of_megatron_s_optimizers(group, zero):
    parallel_state.initialize_model_parallel()
    wrapped, optimizer = made(gpt(), zero=zero, loss_scale=128.0)
    # In fp32, Megatron scales with the distributed optimizer only.
    assert optimizer.get_loss_scale().tolist() == [128.0 if zero else 1.0]
    for param in wrapped.parameters():
        param.main_grad.fill_(128.0 if zero else 1.0)
    norm = sum(param.numel() for param in wrapped.parameters()) ** 0.5
    assert optimizer.step()[1] == pytest.approx(norm, rel=1e-6)


def test_the_dynamic_scale_is_megatron_s():
    scaler = DynamicGradScaler(16.0, 4.0, 2.0, 0.5, 2, 2)
    found = []
    for overflows in (True, True, True, True, False, False, True, False, False):
        scaler.update(overflows)
        found.append(float(scaler.scale))
    # The second overflow halves it, down to the minimum; two good steps double it, and forgive one overflow.
    assert found == [16, 8, 4, 4, 4, 8, 8, 8, 16]
    other = DynamicGradScaler(64.0, 4.0, 2.0, 0.5, 2, 2)
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    with pytest.raises(ConfigError, match=r"growth_factor 0\.5"):
        DynamicGradScaler(16.0, 4.0, 0.5, 0.5, 2, 2)


@pytest.mark.ranks(1)
def test_groups_of_overrides(group):
    parallel_state.initialize_model_parallel()
    model = gpt(qk_layernorm=True)
    config = OptimizerConfig(lr=0.1, apply_wd_to_qk_layernorm=True, decoupled_lr=0.2)
    overrides = get_standard_config_overrides(config) | {ParamKey("*linear_fc1*"): {"max_lr": 0.5}}
    _, optimizer = made(model, lr=0.1, apply_wd_to_qk_layernorm=True, config_overrides=overrides)
    named = {param: name for name, param in model.named_parameters()}
    of_rate = {(each["max_lr"], each["wd_mult"]): [named[p] for p in each["params"]] for each in optimizer.param_groups}
    assert set(of_rate[0.2, 1.0]) == {"embedding.word_embeddings.weight"}
    assert all("linear_fc1" in name for name in of_rate[0.5, 1.0])
    assert any("q_layernorm" in name for name in of_rate[0.1, 1.0])
    assert all(name.endswith(("norm.weight", "norm.bias")) for name in of_rate[0.1, 0.0])
    with pytest.raises(ConfigError, match=r"two overrides of max_lr, 0\.2 and 0\.5"):
        made(gpt(), decoupled_lr=0.2, config_overrides=overrides | {ParamKey("*embed*"): {"max_lr": 0.5}})
    with pytest.raises(ConfigError, match="an override sets optimizer to 'sgd'"):
        made(gpt(), config_overrides={ParamKey("*"): {"optimizer": "sgd"}})


@pytest.mark.ranks(1)
def test_what_is_refused(group):
    parallel_state.initialize_model_parallel()
    for setting, value in (
        ("optimizer", "sgd"),
        ("optimizer_cpu_offload", True),
        ("fp8_recipe", "delayed"),
        ("use_precision_aware_optimizer", True),
        ("exp_avg_dtype", torch.bfloat16),
    ):
        with pytest.raises(ConfigError, match=f"{setting} is {value!r}, which is not offered here"):
            OptimizerConfig(**{setting: value})
    model = gpt()
    with pytest.raises(ConfigError, match="a chunk of the model is a GPTModel; wrap each"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1), [model])
    wrapped, optimizer = made(model)
    for options, message in (
        ({"lr": None}, "lr is None"),
        ({"use_distributed_optimizer": True}, "use_distributed_optimizer is True in OptimizerConfig and False in"),
        ({"fp16": True, "bf16": True}, "set one of them"),
    ):
        with pytest.raises(ConfigError, match=message):
            get_megatron_optimizer(OptimizerConfig(**{"lr": 0.1} | options), [wrapped])
    with pytest.raises(ConfigError, match="one updates all parameters"):
        ChainedOptimizer([optimizer, optimizer])
    with pytest.raises(ConfigError, match="leave offload_to_cpu out"):
        optimizer.offload_to_cpu()
    with pytest.raises(ConfigError, match="give an OptimizerConfig"):
        FP32Optimizer(torch.optim.SGD(model.parameters()), OptimizerConfig(), None)
    _, split = made(gpt(), zero=True)
    with pytest.raises(ConfigError, match=r"state\.pt would hold pickled tensors"):
        split.save_parameter_state("state.pt")
