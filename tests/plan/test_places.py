"""The parts of a planned step, and what people call them."""

from __future__ import annotations

from typing import Any

import pytest
from plan.planned_models import settings_of
from plan.test_state import workload_for

from shardwise.plan.plan import RankPlan
from shardwise.plan.rehearsal import Rehearsals
from shardwise.plan.timeline import PhaseLabel, joined
from shardwise.run import plan_run

SIZES = {"hidden_size": 32, "num_heads": 4, "vocab_size": 300, "sequence_length": 16}


def planned(num_layers: int, samples: int, ranks: int | None = None, **settings: Any) -> list[RankPlan]:
    training = {"global_batch_size": samples, "micro_batch_size": 1}
    sizes = SIZES | {"num_layers": num_layers}
    return list(plan_run(ranks=ranks, device="cpu", model=sizes, training=training, **settings).stages)


def names(rank: RankPlan, *, micro_batch: int) -> list[str]:
    """The names of all parts of the actions of a micro-batch."""
    suffix, found = f", micro-batch {micro_batch}", []
    for segment in rank.step.segments:
        found += [rank.step.name(part.place._replace(micro_batch=segment.place.micro_batch)) for part in segment.parts]
    return [name.removesuffix(suffix) for name in found if name.endswith(suffix)]


@pytest.mark.parametrize(
    ("architecture", "more"), [("llama", {}), ("gpt", {}), ("llama", {"num_experts": 4, "num_experts_per_tok": 2})]
)
def test_layers_that_compute_alike_are_of_one_kind(architecture, more):
    """So that few of them are computed: a plan of many layers is as fast as one of few."""
    settings = settings_of(architecture, model=SIZES | {"num_layers": 9} | more)
    _, kinds = Rehearsals(workload_for(settings)).whole_model
    assert kinds == [0] * 9


@pytest.mark.parametrize("num_layers", [2, 9])
def test_each_layer_of_one_stage(num_layers):
    (rank,) = planned(num_layers, 5)
    layers = [f"layer {layer}" for layer in range(num_layers)]
    for micro_batch in (0, 1, 4):
        assert names(rank, micro_batch=micro_batch) == [
            *(f"forward of {what}" for what in ("the embedding", *layers, "the loss")),
            *(f"backward of {what}" for what in ("the loss", *reversed(layers), "the embedding")),
        ]
    assert [rank.step.name(segment.place) for segment in rank.step.segments] == [
        "start",
        *(f"{way}, micro-batch {number}" for number in (0, 1, 4) for way in ("forward", "backward")),
        "micro-batches",
        "sums of gradients",
        "update",
    ]


def test_stages_name_what_they_have():
    first, last = planned(5, 4, parallel={"pp": 2})
    assert names(first, micro_batch=0) == [
        *(f"forward{what}" for what in (" of the embedding", " of layer 0", " of layer 1", " of layer 2")),
        *("forward, after layer 2", "backward, after layer 2"),
        *(f"backward{what}" for what in (" of layer 2", " of layer 1", " of layer 0", " of the embedding")),
    ]
    assert names(last, micro_batch=3) == [
        *("forward, before layer 3", "forward of layer 3", "forward of layer 4", "forward of the loss"),
        *("backward of the loss", "backward of layer 4", "backward of layer 3", "backward, before layer 3"),
    ]


def test_layers_that_are_recomputed_together():
    (rank,) = planned(7, 1, recompute={"granularity": "full", "method": "uniform", "num_layers": 3})
    spans = ["layers 0 to 2", "layers 3 to 5", "layer 6"]
    assert names(rank, micro_batch=0) == [
        *(f"forward of {what}" for what in ("the embedding", *spans, "the loss")),
        *("backward of the loss", *(f"backward of recomputed {span}" for span in reversed(spans))),
        "backward of the embedding",
    ]


def test_chunks_and_delayed_weight_gradients():
    parallel = {"pp": 2, "virtual_stages": 2, "pipeline_schedule": "interleaved"}
    first, last = planned(4, 2, parallel=parallel)
    actions = [first.step.name(segment.place) for segment in first.step.segments]
    assert actions[1:3] == ["forward of chunk 0, micro-batch 0", "forward of chunk 0, micro-batch 1"]
    assert "forward of layer 2" in names(first, micro_batch=0)
    assert "forward of the loss" in names(last, micro_batch=0)
    assert not {"forward of the loss", "backward of the loss"} & {*names(first, micro_batch=0)}
    (first, _) = planned(2, 2, parallel={"pp": 2, "pipeline_schedule": "zero-bubble"})
    actions = [first.step.name(segment.place) for segment in first.step.segments]
    assert "weight gradients, micro-batch 1" in actions


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{}, {"pp": 2, "pipeline_schedule": "gpipe"}])
def test_the_parts_of_an_action_are_the_action(parallel):
    for rank in planned(9, 6, parallel=parallel):
        for segment in rank.step.segments:
            if segment.parts and segment.place.micro_batch in (0, 5):
                whole = joined(segment.parts, PhaseLabel("all"))
                numbers = whole.peak, whole.net, whole.flops, whole.sent
                assert numbers == (segment.peak, segment.net, segment.flops, segment.sent)


def test_the_peak_is_where_the_most_bytes_are():
    (rank,) = planned(9, 2)
    live, found = rank.held, {}
    for segment in rank.step.segments:
        inner = live
        for part in segment.parts or (segment,):
            name = rank.step.name(part.place._replace(micro_batch=segment.place.micro_batch))
            found[name] = max(inner + part.peak, found.get(name, 0))
            inner += part.net
        live += segment.net
    assert max(found.values()) == rank.total
    assert found[rank.peak_at] == rank.total
