"""An exact run has the same bits at every layout: losses, norms, weights and the optimizer's state."""

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist
from harness.groups import from_first_rank
from harness.parity import assert_bit_equal

from shardwise.core.communication.collectives import all_gather
from shardwise.core.errors import ConfigError
from shardwise.core.sharded_state import gather_parameter, sharded_state_dict
from shardwise.core.topology import Groups, Topology
from shardwise.data import Batch
from shardwise.run.build import build_model
from shardwise.run.settings import (
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    RecomputeSettings,
    Settings,
    TrainingSettings,
)
from shardwise.training.trainer import Trainer

VOCAB, LENGTH, BATCH, STEPS = 264, 16, 8, 3
ZERO_BUBBLE = {"pp": 2, "pipeline_schedule": "zero-bubble"}
SELECTIVE = {"granularity": "selective", "modules": ("core_attn", "layernorm", "mlp_act")}


def settings_of(
    kind, *, exact=True, recompute=None, parallel=None, optimizer=None, model=None, length=LENGTH, **training
):
    return Settings(
        data=("text",),
        device="cpu",
        model=ModelSettings(
            architecture=kind,
            num_layers=2,
            hidden_size=64,
            num_heads=8,
            num_query_groups=8,
            ffn_hidden_size=136,
            vocab_size=VOCAB,
            sequence_length=length,
            tie_embeddings=kind == "gpt",
            dropout=0.1,
            **(model or {}),
        ),
        parallel=ParallelSettings(exact=exact, **(parallel or {})),
        recompute=RecomputeSettings(**(recompute or {})),
        optimizer=OptimizerSettings(learning_rate=1e-2, warmup_steps=2, **(optimizer or {})),
        training=TrainingSettings(steps=STEPS, global_batch_size=BATCH, micro_batch_size=1, **training),
    )


def train(settings, groups, steps=range(STEPS), begin=lambda trainer: None, prepare=lambda model: None):
    """The trainer, of a model that is prepared, after a few steps, and each step's loss and gradient norm."""
    torch.default_generator.manual_seed(1)
    model = build_model(settings, VOCAB, groups=groups, device=torch.device("cpu"))
    prepare(model)
    trainer = Trainer(settings, model, groups)
    begin(trainer)
    rank, num_ranks = groups.data.samples
    per_rank = BATCH // num_ranks
    first, numbers = rank * per_rank, []
    for step in steps:
        shape = BATCH, settings.model.sequence_length + 1
        ids = torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(step))
        rows = [ids[place : place + 1] for place in range(first, first + per_rank)]
        result = trainer.step(step, [Batch(row[:, :-1], row[:, 1:]) for row in rows])
        numbers.append((result.loss.hex(), result.grad_norm.hex(), *map(float.hex, result.routing.values())))
    return trainer, numbers


def state_of(trainer):
    """What this rank's stage has of the whole run: weights, their fp32 copies, and what is kept of each."""
    trainer.wait_for_weights()
    state, weight_of = {}, getattr(trainer.optimizer, "weight_of", lambda param: param.detach())
    for key, shard in sharded_state_dict(trainer.model, group=trainer.tp_group).items():
        param, layout = shard.data, shard.layout
        if not param.requires_grad:
            continue
        group = trainer._model_groups.experts if shard.replicas.is_of_expert else trainer.tp_group
        state[key] = gather_parameter(param.detach(), layout, group=group)
        held = {kind: tensor for kind, (tensor, _) in trainer.optimizer.state_of(param, layout).items()}
        for kind, tensor in (held | {"copy": weight_of(param)}).items():
            if trainer.zero is not None:
                share = trainer.zero.parameters.shares[param]
                sizes = [stop - start for start, stop in share.intervals]
                tensor = all_gather(tensor, group=share.group, sizes=sizes).view(param.shape)
            state[f"{kind} of {key}"] = gather_parameter(tensor, layout, group=group)
    return state


def alone_of(topology):
    return Groups.alone(topology.group("tp"))


def check(kind, layouts, prepare=lambda model: None, *, steps=2, **options):
    """Each layout's run against the first rank's run alone. Return the number of steps that the latter skipped."""
    topology, held = Topology.create(tp=1), None
    if dist.get_rank() == 0:
        alone, numbers = train(settings_of(kind, **options), alone_of(topology), range(steps), prepare=prepare)
        held = numbers, state_of(alone), alone.num_skipped
    expected, expected_state, num_skipped = from_first_rank(held)
    for parallel in layouts:
        extra = {"recompute": parallel.pop("recompute")} if "recompute" in parallel else {}
        settings = settings_of(kind, parallel=parallel, **options | extra)
        axes = {axis: parallel.get(axis, 1) for axis in ("tp", "pp", "cp", "ep")}
        split = Topology.create(**axes, etp=settings.parallel.expert_tp)
        trainer, numbers = train(settings, Groups.of(split), range(steps), prepare=prepare)
        assert numbers == expected, parallel
        state = state_of(trainer)
        assert state
        for name, tensor in state.items():
            assert_bit_equal(tensor, expected_state[name], name=f"{name} with {parallel}")
        split.destroy()
    topology.destroy()
    return num_skipped


@pytest.mark.sample(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_two_ranks_of_a_kind(group, kind):
    check(kind, [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}, ZERO_BUBBLE])


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_context_parallelism_on_two_ranks(group, kind):
    check(kind, [{"cp": 2}, {"cp": 2, "zero": 1, "recompute": SELECTIVE}], length=64)


@pytest.mark.sample(1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("dtype", "kind", "layouts"),
    [
        ("float32", "llama", [{"cp": 2, "zero": 1}, {"cp": 2, "tp": 2, "sequence_parallel": True}]),
        ("bfloat16", "gpt", [{"cp": 4, "recompute": {"granularity": "full"}}, {"cp": 2} | ZERO_BUBBLE]),
    ],
)
def test_context_parallelism_on_four_ranks(group, dtype, kind, layouts):
    # 32 tokens on each of four ranks; with fewer, 16 bits would differ.
    check(kind, layouts, dtype=dtype, length=128)


@pytest.mark.sample(1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("float32", "llama"),
        ("bfloat16", "gpt"),
        pytest.param("float32", "gpt", marks=pytest.mark.matrix),
        pytest.param("bfloat16", "llama", marks=pytest.mark.matrix),
    ],
)
def test_four_ranks(group, kind, dtype):
    layouts = [
        {},
        {"tp": 4, "sequence_parallel": True, "recompute": SELECTIVE},
        {"tp": 2, "pp": 2, "pipeline_schedule": "gpipe", "recompute": {"granularity": "full"}},
    ]
    check(kind, layouts, dtype=dtype)


def test_the_same_micro_batches_at_every_layout():
    settings = dataclasses.replace(settings_of("gpt"), training=TrainingSettings(global_batch_size=24))
    assert {settings.micro_batch_size(dp) for dp in (1, 2, 4, 8)} == {3}
    uneven = dataclasses.replace(settings, training=TrainingSettings(global_batch_size=12))
    assert {uneven.micro_batch_size(dp) for dp in (1, 2, 4)} == {1}


@pytest.mark.parametrize(
    ("change", "world", "message"),
    [
        (
            {"parallel": {"tp": 3}},
            3,
            "is for powers of two up to parallel.exact-parts 8, and there are 3 for parallel.tp",
        ),
        ({"parallel": {"tp": 2, "exact_parts": 1}}, 2, "up to parallel.exact-parts 1, and there are 2 for parallel.tp"),
        (
            {"parallel": {"cp": 8}},
            8,
            "there are 16 for parallel.cp times the largest of 2, parallel.tp and the number of data-parallel ranks",
        ),
        ({"parallel": {"exact_parts": 32}}, 1, "it has 16 tokens; the largest exact-parts that works is 16"),
        ({"parallel": {"fsdp": True}}, 2, "no exact form of parallel.fsdp"),
        ({"rng": "per_rank"}, 1, "no exact form of training.rng per_rank"),
        ({"dtype": "float64"}, 1, "no exact form of training.dtype float64"),
    ],
)
def test_what_is_refused(change, world, message):
    with pytest.raises(ConfigError, match=message):
        settings_of("gpt", **change).check_world(world)


@pytest.mark.parametrize("parts", [0, 3, 12])
def test_parts_are_a_power_of_two(parts):
    with pytest.raises(ConfigError, match=r"parallel\.exact-parts"):
        ParallelSettings(exact_parts=parts)


def test_settings_keep_it():
    settings = settings_of("gpt", parallel={"exact_parts": 4})
    assert Settings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
