"""Layouts train under NCCL's rules, over the calls that GPUs would get, and come to the losses of one rank."""

import pytest
import torch
from harness.groups import from_first_rank
from harness.nccl_rules import nccl_rules
from run.tiny_layouts import assert_relative, losses_of, trainer_of, whole_weights
from training.pipeline.pipelines import staged_gpt

from shardwise.core.topology import Groups, Topology
from shardwise.models import language_model
from shardwise.run.settings import ParallelSettings, RecomputeSettings

P = ParallelSettings
STEPS = 3
FULL = RecomputeSettings("full")
LAYOUTS = {
    2: {
        "tp": {"parallel": P(tp=2)},
        "sequence parallelism": {"parallel": P(tp=2, sequence_parallel=True)},
        "overlap": {"parallel": P(tp=2, sequence_parallel=True, tp_comm_overlap=True)},
        "recomputation": {"parallel": P(tp=2, sequence_parallel=True), "recompute": FULL},
        "plain loss": {"parallel": P(tp=2, sequence_parallel=True), "loss": "plain"},
        "dp": {"parallel": P()},
        "zero 1": {"parallel": P(zero=1)},
        "muon": {"parallel": P(zero=1), "optimizer": {"name": "muon"}},
        "fsdp": {"parallel": P(fsdp=True)},
        "gpipe": {"parallel": P(pp=2, pipeline_schedule="gpipe")},
        "1f1b": {"parallel": P(pp=2)},
        "zero-bubble": {"parallel": P(pp=2, pipeline_schedule="zero-bubble")},
        "interleaved": {"parallel": P(pp=2, virtual_stages=2, pipeline_schedule="interleaved")},
    },
    3: {"uneven": {"parallel": P(tp=3, sequence_parallel=True, tp_comm_overlap=True)}},
    4: {
        "tp, zero 1": {"parallel": P(tp=2, sequence_parallel=True, zero=1)},
        "tp, fsdp": {"parallel": P(tp=2, sequence_parallel=True, fsdp=True)},
        "tp, interleaved": {
            "parallel": P(tp=2, sequence_parallel=True, pp=2, virtual_stages=2, pipeline_schedule="interleaved"),
            "recompute": FULL,
        },
        "dp, zero-bubble": {"parallel": P(pp=2, pipeline_schedule="zero-bubble", zero=1)},
    },
}


@pytest.mark.ranks(2)
def test_a_tied_weight_that_is_drawn_on_the_cpu_travels_on_the_device_of_the_group(group, monkeypatch):
    """The meta device stands for the GPU of the group."""
    devices = []

    def all_reduce(tensor, *, group):
        devices.append(tensor.device.type)
        return torch.zeros(tensor.shape)

    monkeypatch.setattr(language_model, "device_of", lambda group: torch.device("meta"))
    monkeypatch.setattr(language_model, "all_reduce", all_reduce)
    staged_gpt(pp=2)
    assert devices == ["meta"]


@pytest.mark.slow
@pytest.mark.ranks(2, 3, 4)
def test_losses_are_those_of_one_rank(group, tmp_path):
    alone = {}
    for name, options in LAYOUTS[group.size()].items():
        settings = {"dtype": "float64"} | {key: options[key] for key in ("loss", "optimizer") if key in options}
        if str(settings) not in alone:
            trainer = trainer_of(tmp_path, **settings)
            alone[str(settings)] = from_first_rank(losses_of(trainer, STEPS) if group.rank() == 0 else None)
        with nccl_rules() as num_calls:
            parallel = options["parallel"]
            groups = Groups.of(Topology.create(tp=parallel.tp, pp=parallel.pp))
            trainer = trainer_of(tmp_path, groups=groups, dtype="float64", **options)
            losses = losses_of(trainer, STEPS)
            whole_weights(trainer)
        assert_relative(losses, alone[str(settings)], 1e-10, name)
        assert num_calls.total() > 2 * STEPS, name
