"""What plans say of each rank's parameters, state and collectives is what there is, at every layout."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from run.plan.planned_models import KINDS, UNEVEN, described
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.communication.agreement import gather_objects
from shardwise.core.communication.collectives import all_reduce
from shardwise.core.sharding.balanced import local_rows
from shardwise.core.topology import Groups, Topology
from shardwise.data import Batch
from shardwise.models.description import chunks_of
from shardwise.nn import named_param_layouts
from shardwise.run.build import build_model as build_new_model, describe
from shardwise.run.plan.parameters import parameters_of, stage_chunks
from shardwise.run.plan.plan import make_plan, plan_rank
from shardwise.run.plan.workload import mesh_of, workload_of
from shardwise.run.settings import (
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    RecomputeSettings,
    Settings,
    TrainingSettings,
)
from shardwise.storage.huggingface import build_model, model_config
from shardwise.training.gradients.fully_sharded import FullyShardedModel
from shardwise.training.optimizer.optimizer import LocalShards, ZeroOptimizer
from shardwise.training.trainer import Trainer

# Scalars: norms, losses, signals.
_SMALL = 100


def shapes_on(rank, world_size, model, *, tp, pp, chunks):
    """What a rank of a group that does nothing builds: for each chunk the names and shapes of its parameters."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        groups = Groups.of(Topology.create(tp=tp, pp=pp))
        config = model_config(
            model, pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None
        )
        built = [
            build_model(model, config, groups=groups, device=torch.device("meta"), vp_stage=chunk)
            for chunk in chunks_of(config)
        ]
        shapes = [[(name, tuple(param.shape)) for name, param in part.named_parameters()] for part in built]
        return groups.tp.rank(), groups.stage, shapes
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("kind", "sizes", "world_size", "layout", "ranks"),
    [
        ("llama", {"num_attention_heads": 64, "hidden_size": 8192, "ffn_hidden_size": 28672, "vocab_size": 128256,
                   "kv_channels": 128, "num_query_groups": 8, "num_layers": 80},
         1024, {"tp": 8, "pp": 4, "chunks": 5}, (0, 7, 1023)),
        ("llama", {"num_attention_heads": 40, "hidden_size": 5120, "ffn_hidden_size": 13824, "vocab_size": 50257,
                   "kv_channels": 128, "num_query_groups": 10, "num_layers": 41},
         1024, {"tp": 16, "pp": 2, "chunks": 1}, (0, 5, 9, 15, 1019)),
        *((kind, UNEVEN, 6, {"tp": 3, "pp": 2, "chunks": 1}, (0, 2, 4)) for kind in KINDS),
    ],
)  # fmt: skip
def test_parameters_are_those_that_a_rank_builds(kind, sizes, world_size, layout, ranks):
    model = described(kind, sizes=sizes)
    for rank in ranks:
        tp_rank, stage, shapes = shapes_on(rank, world_size, model, **layout)
        parts = stage_chunks(model, layout["pp"], layout["chunks"])[stage]
        planned = [parameters_of(model, part, tp=layout["tp"], rank=tp_rank) for part in parts]
        assert [[(param.name, param.shape) for param in params] for params in planned] == shapes


def bytes_of(tensors):
    """Of each storage once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def state_tensors(optimizer):
    """What an optimizer keeps, and whether each is a copy of a parameter."""
    if isinstance(optimizer, LocalShards | ZeroOptimizer):
        optimizer = optimizer.optimizer
    if hasattr(optimizer, "_masters"):
        yield from ((tensor, True) for tensor in optimizer._masters.values())
        yield from state_tensors(optimizer.optimizer)
    elif hasattr(optimizer, "_momenta"):
        yield from ((tensor, False) for tensor in optimizer._momenta.values())
        yield from state_tensors(optimizer._adamw)
    else:
        yield from ((tensor, False) for state in optimizer.state.values() for tensor in state.values())


def measured(trainer):
    """Bytes of weights, gradients, fp32 copies and state."""
    params = [param for chunk in trainer._chunks for param in chunk.parameters()]
    gradients = getattr(trainer.gradients, "buffers", [param.grad for param in params])
    if isinstance(trainer.gradients, FullyShardedModel):
        params, gradients = map(local_rows, params), map(local_rows, gradients)
    kept = list(state_tensors(trainer.optimizer))
    return {
        "weights": bytes_of(params),
        "gradients": bytes_of(gradients),
        "masters": bytes_of(tensor for tensor, is_copy in kept if is_copy),
        "optimizer": bytes_of(tensor for tensor, is_copy in kept if not is_copy),
    }


SMALL = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 43,
    "vocab_size": 301,
    "sequence_length": 16,
}


def settings_of(
    architecture="llama", *, dtype="float32", optimizer="adamw", recompute=None, training=None, model=None, **parallel
):
    return Settings(
        data=("text",),
        model=ModelSettings(architecture=architecture, **(SMALL | (model or {}))),
        parallel=ParallelSettings(**parallel),
        recompute=RecomputeSettings(**(recompute or {})),
        optimizer=OptimizerSettings(name=optimizer),
        training=TrainingSettings(
            **({"dtype": dtype, "global_batch_size": 8, "micro_batch_size": 1} | (training or {}))
        ),
    )


def a_step(settings):
    """A rank's trainer after a step, and what it launched."""
    torch.default_generator.manual_seed(1)
    parallel = settings.parallel
    groups = Groups.of(Topology.create(tp=parallel.tp, pp=parallel.pp))
    model = build_new_model(settings, settings.model.vocab_size, groups=groups, device=torch.device("cpu"))
    trainer = Trainer(settings, model, groups)
    micro, size = settings.micro_batch_size(groups.dp.size()), settings.training.global_batch_size // groups.dp.size()
    tokens = torch.randint(settings.model.vocab_size, (micro, settings.sequence_length))
    with CollectiveCounter() as counter:
        trainer.step(0, [Batch(tokens, tokens)] * (size // micro))
        if trainer.zero is not None:
            # Gathers of updated parameters that the next forward would start.
            trainer.zero.parameters.wait()
    return trainer, groups, counter


LARGE = settings_of(
    dtype="bfloat16",
    tp=8,
    pp=4,
    zero=1,
    sequence_parallel=True,
    training={"global_batch_size": 64},
    model={"num_layers": 80, "hidden_size": 8192, "num_heads": 64, "num_query_groups": 8, "ffn_hidden_size": 28672,
           "vocab_size": 128256},
)  # fmt: skip


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("rank", [0, 7, 1000])
def test_state_at_1024_ranks(monkeypatch, zero, rank):
    """On meta tensors, with collectives that do nothing, so that no rank hears of another's buffers."""
    settings = dataclasses.replace(LARGE, parallel=dataclasses.replace(LARGE.parallel, zero=zero))
    monkeypatch.setattr("shardwise.training.gradients.gradient_buffers.check_same", lambda *args, **options: None)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=1024)
    try:
        groups = Groups.of(Topology.create(tp=8, pp=4))
        with torch.device("meta"):
            model = build_new_model(settings, 128256, groups=groups, device=torch.device("meta"))
            trainer = Trainer(settings, model, groups)
            # As its first step would.
            for param, layout in ((param, layout) for _, param, layout in named_param_layouts(model, 8)):
                trainer.optimizer.state_of(param, layout)
        found = measured(trainer)
        stage, tp_rank, dp_rank = groups.stage, groups.tp.rank(), groups.dp.rank()
    finally:
        dist.destroy_process_group()
    workload = workload_of(settings, describe(settings.model, 128256))
    layout = mesh_of(settings, 1024)
    planned = plan_rank(workload, layout, stage, stage_chunks(workload.model, 4)[stage], tp_rank)
    stated = {name: getattr(planned, name) for name in found}
    if zero and dp_rank:
        assert all(found[name] <= stated[name] for name in found)
        assert sum(found.values()) > 0.99 * sum(stated.values())
    else:
        assert found == stated


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "settings",
    [
        settings_of(tp=4),
        settings_of("gpt", tp=2, pp=2, sequence_parallel=True),
        settings_of(tp=2, sequence_parallel=True, dtype="bfloat16"),
        settings_of(tp=2, optimizer="muon", recompute={"granularity": "full", "num_layers": 3}),
        settings_of("gpt", pp=2, dtype="bfloat16", optimizer="muon", training={"loss": "plain"}),
        settings_of(tp=2, fsdp=True, dtype="bfloat16", sequence_parallel=True),
        settings_of("gpt", fsdp=True, model={"tie_embeddings": False}, recompute={"granularity": "full"}),
        settings_of(tp=2, fsdp=True, optimizer="muon"),
        settings_of(pp=2, pipeline_schedule="interleaved", virtual_stages=2, recompute={"granularity": "full"}),
        settings_of(zero=1),
        settings_of(tp=2, zero=1, dtype="bfloat16", sequence_parallel=True),
        settings_of("gpt", pp=2, zero=1, dtype="bfloat16", optimizer="muon"),
    ],
    ids=[
        "tp4",
        "gpt-tp2-pp2-sp",
        "tp2-dp2-sp-bf16",
        "tp2-dp2-muon-full",
        "pp2-dp2-bf16-muon",
        "fsdp2-tp2-bf16",
        "fsdp4-full",
        "fsdp2-tp2-muon",
        "interleaved",
        "zero4",
        "zero2-tp2-sp-bf16",
        "zero2-pp2-bf16-muon",
    ],
)
def test_state_and_collectives_of_a_step(group, settings):
    workload = workload_of(settings, describe(settings.model, settings.model.vocab_size))
    layout = mesh_of(settings, group.size())
    trainer, groups, counter = a_step(settings)
    parts = stage_chunks(workload.model, layout.pp, layout.virtual_stages)[groups.stage]
    planned = plan_rank(workload, layout, groups.stage, parts, groups.tp.rank())
    found = measured(trainer)
    stated = {name: getattr(planned, name) for name in found}
    if layout.zero and settings.optimizer.name == "muon":
        # Which rank has the most depends on where the matrices lie.
        shared = torch.tensor([found.pop("masters") + found.pop("optimizer")])
        most = int(all_reduce(shared, group=groups.dp, op=dist.ReduceOp.MAX))
        assert most == stated.pop("masters") + stated.pop("optimizer")
    if (layout.fsdp or layout.zero) and groups.dp.rank() > 0:
        # The first rank has the most rows, or elements.
        assert all(found[name] <= stated[name] for name in found)
    else:
        assert found == stated
    launched = Counter((each.name, each.num_bytes) for each in counter.launches if each.num_bytes > _SMALL)
    stated = Counter()
    for (_, name, num_bytes), times in planned.traffic.calls.items():
        if name != "send":
            stated[name, num_bytes] += times
    # What comes back of Muon's whole matrices depends on which of them a rank has.
    found_back, planned_back = (
        sum(num_bytes * counts.pop((name, num_bytes)) for name, num_bytes in list(counts) if name == "all_to_all")
        for counts in (launched, stated)
    )
    if layout.zero or layout.shards_fully:
        # Data-parallel ranks deal whole weights out, of which there are few here.
        of_ranks = gather_objects((found_back, planned_back), "the bytes that Muon sends", group=groups.dp)
        found_back, planned_back = map(sum, zip(*of_ranks, strict=True))
    assert found_back == pytest.approx(planned_back, rel=0.05)
    assert launched == stated
    # The plan of the run names the worst rank.
    assert make_plan(workload, layout).worst.total >= planned.total
