"""Training with PyTorch's fully_shard is training without; what each rank holds, and what travels."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from harness.groups import alone
from harness.parity import assert_bit_equal, assert_close_to
from run.tiny_layouts import assert_relative, losses_of, state_of, trainer_of, whole_weights
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError
from shardwise.core.sharding.balanced import local_rows
from shardwise.core.topology import Groups
from shardwise.models.bert import Bert
from shardwise.models.config import ModelConfig
from shardwise.models.generation.generation import generate
from shardwise.models.generation.sampling import Sampling
from shardwise.models.gpt import GPT
from shardwise.run.settings import ParallelSettings, RecomputeSettings

UNTIED_GPT = {"architecture": "gpt", "tie_embeddings": False}
ONE_GROUP = {"num_query_groups": 1}
# Of the one key several ranks hold copies, beside two queries or one: data-parallel ranks cut these at other rows.
FIVE_HEADS = {"num_query_groups": 1, "num_heads": 5, "hidden_size": 20, "num_layers": 2}
CASES = {
    2: [(ParallelSettings(fsdp=True), {}, {"micro_batch_size": 1}), (ParallelSettings(fsdp=True), UNTIED_GPT, {})],
    4: [
        (ParallelSettings(fsdp=True, tp=2, sequence_parallel=True), ONE_GROUP, {"micro_batch_size": 1}),
        (ParallelSettings(fsdp=True, pp=2), {}, {}),
        (ParallelSettings(fsdp=True, pp=2, pipeline_schedule="interleaved", virtual_stages=2), UNTIED_GPT, {}),
    ],
    8: [(ParallelSettings(fsdp=True, tp=4, sequence_parallel=True), FIVE_HEADS, {"optimizer": {"name": "muon"}})],
}


@pytest.mark.ranks(2, 4, 8)
def test_training_is_that_of_whole_weights(group, tmp_path):
    for parallel, model, training in CASES[group.size()]:
        name, options = str(parallel), {"model": model, "dtype": "float64"}
        whole = trainer_of(tmp_path, **options, optimizer=training.get("optimizer"))
        expected = losses_of(whole, 6)
        assert expected[-1] < expected[0] - 0.05
        trainer = trainer_of(tmp_path, parallel, **options, **training)
        assert_relative(losses_of(trainer, 6), expected, 1e-12, name)
        weights = whole_weights(whole)
        for key, weight in whole_weights(trainer).items():
            assert_close_to(weight, weights[key], rtol_of_norm=1e-10, name=f"{name}: {key}")
        # Every other row, or one more: nobody holds a parameter whole.
        for key, param in trainer.model.named_parameters():
            assert isinstance(param, DTensor)
            assert local_rows(param).size(0) in (math.ceil(param.size(0) / 2), param.size(0) // 2), key


@pytest.mark.ranks(2)
def test_what_travels_and_what_is_kept(group, tmp_path):
    """Gradients travel once a step, whatever the number of micro-batches; parameters of layers twice for each."""
    trainer = trainer_of(tmp_path, ParallelSettings(fsdp=True), micro_batch_size=1, model=UNTIED_GPT)
    units = [module for module in trainer.model.modules() if isinstance(module, FSDPModule)]
    assert len(units) == 4 + 2  # Layers, embedding and the rest.
    with CollectiveCounter() as counter:
        losses_of(trainer, 1)
    launched = Counter(launch.name for launch in counter.launches)
    assert launched["reduce_scatter"] == len(units)
    # What is no layer's is there from the forward on.
    assert launched["all_gather"] == 2 * (2 * len(units) - 1)
    # The norm of the gradient and the loss travel together.
    assert launched["all_reduce"] == 1
    whole = sum(param.numel() for param in trainer.model.parameters()) * 4
    held = sum(local_rows(param).numel() for param in trainer.model.parameters()) * 4
    # Of 61 ids one rank has one more.
    assert abs(held - whole // 2) <= 2 * 16 * 4
    kept = sum(shard.data.numel() for name, shard in state_of(trainer).items() if name.startswith("optimizer."))
    assert kept == 2 * held // 4


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "pure-bfloat16"])
def test_what_is_kept_in_fp32_and_what_is_computed_in_16_bits(group, tmp_path, dtype):
    options = {"dtype": dtype, "micro_batch_size": 1}
    expected = losses_of(trainer_of(tmp_path, **options), 8)
    trainer = trainer_of(tmp_path, ParallelSettings(fsdp=True), **options)
    seen = set()
    linear = trainer.model.decoder.layers[1].mlp.linear_fc1
    linear.register_forward_hook(lambda layer, _, output: seen.update({output.dtype, layer.weight.dtype}))
    assert_relative(losses_of(trainer, 8), expected, 5e-3, dtype)
    half = torch.float16 if dtype == "float16" else torch.bfloat16
    assert seen == {half}
    kept = half if dtype == "pure-bfloat16" else torch.float32
    assert {param.dtype for param in trainer.model.parameters()} == {kept}
    assert {shard.data.dtype for shard in state_of(trainer).values()} == {kept}
    assert len(generate(trainer.model.eval(), [3, 5], max_new_tokens=3, sampling=Sampling(temperature=0.0))) == 3


@pytest.mark.ranks(2)
def test_an_overflow_on_one_rank_is_skipped_by_all(group, tmp_path):
    trainer = trainer_of(tmp_path, ParallelSettings(fsdp=True), dtype="float16")
    losses_of(trainer, 1)
    before = whole_weights(trainer)
    if dist.get_rank() == 1:
        output = trainer.model.decoder.layers[0].mlp.linear_fc2
        output.register_full_backward_hook(lambda *_: (torch.full_like(_[1][0], torch.inf),))
    losses_of(trainer, 1, first=1)
    assert (trainer.num_skipped, trainer.loss_scale.scale) == (1, 32768.0)
    for key, weight in whole_weights(trainer).items():
        assert_bit_equal(weight, before[key], name=key)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "recompute",
    [
        RecomputeSettings("full", num_layers=2),
        RecomputeSettings("full", method="block", num_layers=3),
        RecomputeSettings("selective", modules=("core_attn", "layernorm", "mlp")),
    ],
    ids=["pairs", "three layers", "parts"],
)
def test_recomputation_changes_no_bit(group, tmp_path, recompute):
    parallel = ParallelSettings(fsdp=True)
    plain, again = trainer_of(tmp_path, parallel), trainer_of(tmp_path, parallel, recompute)
    calls = Counter()
    again.model.decoder.layers[1].mlp.linear_fc1.register_forward_pre_hook(lambda *_: calls.update(["fc1"]))
    assert_bit_equal(losses_of(again, 3), losses_of(plain, 3))
    assert calls["fc1"] == 6
    expected = whole_weights(plain)
    for key, weight in whole_weights(again).items():
        assert_bit_equal(weight, expected[key], name=key)


@pytest.mark.ranks(2)
def test_weights_stay_shared_out_after_a_forward_without_a_backward(group, tmp_path):
    trainer = trainer_of(tmp_path, ParallelSettings(fsdp=True), model={"sequence_length": 16})
    whole = trainer_of(tmp_path, model={"sequence_length": 16})
    sampling = Sampling(temperature=0.0)
    texts = [
        list(generate(each.model.eval(), [3, 5], max_new_tokens=6, sampling=sampling, seed=1))
        for each in (trainer, whole)
    ]
    assert texts[0] == texts[1]
    assert all(isinstance(param, DTensor) for param in trainer.model.parameters())
    assert_relative(losses_of(trainer, 2), losses_of(whole, 2), 1e-5, "after generating")


def model_of(kind, group, **options):
    config = ModelConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=torch.float64,
    )
    torch.manual_seed(3)
    return kind(config, 11, 8, groups=Groups(tp=group), **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [1, 2])
def test_what_models_return_under_pytorch_s_own_fully_shard_may_be_written_to(group, rows):
    """PyTorch warns of views there: what it hangs on them, to gather parameters, is lost when they are written to."""
    ids, one = torch.arange(4 * rows).view(rows, 4) % 11, alone(group)
    for kind, call in (
        (GPT, lambda model: model(ids)),
        (GPT, lambda model: model(ids, labels=ids)),
        (GPT, lambda model: model(ids, labels=torch.where(ids == 1, ids, -100))),
        (Bert, lambda model: model(ids, None)[0]),
        (Bert, lambda model: model(ids, None, lm_labels=ids)[0]),
    ):
        expected, model = (model_of(kind, one) for _ in range(2))
        for unit in (model.embedding, *model.block.layers, model):
            fully_shard(unit, mesh=DeviceMesh.from_group(group, "cpu"))
        (call(expected) * 2).square().sum().backward()
        output = call(model)
        output *= 2
        output.square().sum().backward()
        for name, param in expected.named_parameters():
            own = model.get_parameter(name).grad
            assert (own is None) == (param.grad is None), name
            if own is not None:
                assert_close_to(own.full_tensor(), param.grad, rtol_of_norm=1e-13, name=name)


def test_what_excludes_each_other():
    with pytest.raises(ConfigError, match=r"fsdp cannot be used with --parallel.zero 1: fsdp splits optimizer state"):
        ParallelSettings(fsdp=True, zero=1)
    with pytest.raises(ConfigError, match=r"fsdp cannot be used with --parallel.pipeline-schedule 'zero-bubble'"):
        ParallelSettings(fsdp=True, pp=2, pipeline_schedule="zero-bubble")
