"""The loss curve does not depend on tensor parallelism, at any length and with dropout."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal, assert_close_to
from run.tiny import tiny_settings

from shardwise.core.errors import ConfigError, DesyncError
from shardwise.core.topology import Groups, Topology
from shardwise.data import Batch, DataLoader
from shardwise.data.sample_rows import SampleRows, TokenSamples
from shardwise.models.transformer.layer import ResidualDropout
from shardwise.run.build import build_model
from shardwise.tensor_parallel.layers import named_param_layouts
from shardwise.training.trainer import Trainer

VOCAB = 301
STEPS = 30


def make_trainer(folder, topology, dp_group, *, sequence_parallel, dtype, architecture, model=None, **training):
    settings = tiny_settings(
        folder,
        tp=topology.size("tp"),
        sequence_parallel=sequence_parallel,
        model={"architecture": architecture} | (model or {}),
        **{"dtype": dtype, "steps": STEPS, "optimizer": {"learning_rate": 3e-3}} | training,
    )
    torch.manual_seed(11)
    groups = Groups.of(topology)
    model = build_model(settings, VOCAB, groups=groups, device=torch.device("cpu"))
    return Trainer(settings, model, Groups(tp=topology.group("tp"), dp=dp_group))


def batches(settings):
    """The global batch of each step: [4, s + 1] ids that follow a pattern, so that there is something to learn."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(settings.training.steps):
        start = torch.randint(VOCAB, (4, 1), generator=generator)
        ids = (start + torch.arange(settings.model.sequence_length + 1) * 7) % VOCAB
        yield ids[:, :-1], ids[:, 1:]


def curve(trainer, *, micro_batch_size=4):
    results = []
    for step, (tokens, labels) in enumerate(batches(trainer.settings)):
        per_rank = 4 // trainer.dp_group.size()
        mine = slice(trainer.dp_group.rank() * per_rank, (trainer.dp_group.rank() + 1) * per_rank)
        micro = map(Batch, tokens[mine].split(micro_batch_size), labels[mine].split(micro_batch_size))
        result = trainer.step(step, micro)
        results.append((result.loss, result.grad_norm))
    return torch.tensor(results, dtype=torch.float64)


@pytest.mark.ranks(4)
def test_ranks_that_start_with_other_weights_hear_of_it(group, tmp_path):
    settings = tiny_settings(tmp_path, tp=2)
    groups = Groups.of(Topology.create(tp=2))
    torch.manual_seed(11)
    model = build_model(settings, VOCAB, groups=groups, device=torch.device("cpu"))
    Trainer(settings, model, groups)
    if group.rank() == 3:
        next(model.decoder.layers[0].mlp.parameters()).data[0] += 1e-6
    message = r"parameter 'decoder.layers.0.mlp.[\w.]*': rank 3 holds other values than rank 1, and data-parallel ranks"
    with pytest.raises(DesyncError, match=message):
        Trainer(settings, model, groups)


@pytest.mark.ranks(1)
def test_a_trainer_needs_a_data_parallel_group(group, tmp_path):
    settings = tiny_settings(tmp_path)
    groups = Groups(tp=group)
    model = build_model(settings, VOCAB, groups=groups, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"Groups.dp is None.*a group of this rank alone"):
        Trainer(settings, model, groups)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("packing", [False, True])
def test_experts_leave_the_padding_of_rows_out(group, tmp_path, packing):
    """Losses, gradients, loads and entropy of samples do not depend on the length of their rows."""
    groups = Groups.of(Topology.create())
    experts = {"num_experts": 4, "router_aux_loss": 0.5, "router_z_loss": 0.1}
    settings = tiny_settings(tmp_path, model=experts, dtype="float64", steps=1)
    ids = torch.randint(VOCAB, (46,), generator=torch.Generator().manual_seed(3)).numpy()
    starts = np.array([0, 10, 21, 33, 46])
    samples = TokenSamples("samples", ids, np.ones(46, bool), starts, np.ones(46, np.uint32), eos_id=0)
    results = []
    # Each row has one sample.
    for length in (13, 16):
        torch.manual_seed(11)
        trainer = Trainer(settings, build_model(settings, VOCAB, groups=groups, device=torch.device("cpu")), groups)
        rows = SampleRows(samples, length, packing=packing, shortest=length)
        results.append(trainer.train_step(0, DataLoader(rows, 4, seed=0)))
    short, long = ({"loss": each.loss, "norm": each.grad_norm} | each.routing for each in results)
    assert long == pytest.approx(short, rel=1e-12)
    assert short["auxiliary_loss"] > 0.5


@pytest.mark.ranks(2)
def test_micro_batches_of_different_lengths_in_stages(group, tmp_path):
    results = []
    for pp in (1, 2):
        settings = tiny_settings(tmp_path, dtype="float64", steps=1)
        settings = dataclasses.replace(settings, parallel=dataclasses.replace(settings.parallel, pp=pp))
        topology = Topology.create(tp=1, pp=pp)
        # Alone, both ranks have the same batches.
        groups = Groups.of(topology) if pp == 2 else Groups(tp=topology.group("tp"), dp=topology.group("tp"))
        torch.manual_seed(11)
        trainer = Trainer(settings, build_model(settings, VOCAB, groups=groups, device=torch.device("cpu")), groups)
        ids = torch.randint(VOCAB, (4, 25), generator=torch.Generator().manual_seed(3))
        micro = [Batch(ids[:1, :-1], ids[:1, 1:]), Batch(ids[1:, :7], ids[1:, 1:8]), Batch(ids[:2, :1], ids[:2, 1:2])]
        result = trainer.step(0, micro, num_labels=24 + 21 + 2)
        results.append((result.loss, result.grad_norm))
    assert results[1] == pytest.approx(results[0], rel=1e-12)


@pytest.mark.ranks(2, 3, slow=(2,))
@pytest.mark.parametrize("architecture", ["llama", pytest.param("gpt", marks=pytest.mark.slow)])
def test_loss_curve_with_a_sequence_that_the_ranks_do_not_divide(group, tmp_path, architecture):
    alone, split = Topology.create(tp=1), Topology.create(tp=group.size())
    one = alone.group("tp")
    options = {"dtype": "float64", "architecture": architecture, "model": {"sequence_length": 13}, "steps": 5}
    expected = curve(make_trainer(tmp_path, alone, one, sequence_parallel=False, **options))
    actual = curve(make_trainer(tmp_path, split, one, sequence_parallel=True, **options))
    assert_close_to(actual, expected, rtol_of_norm=1e-11)


@pytest.mark.ranks(2, 3, slow=(3,))
@pytest.mark.parametrize("architecture", ["llama", pytest.param("gpt", marks=pytest.mark.slow)])
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_loss_curve_with_dropout_is_the_same_where_its_numbers_are_global(
    group, tmp_path, architecture, sequence_parallel
):
    alone, several = Topology.create(tp=1), Topology.create(tp=group.size())
    one = alone.group("tp")

    def both(rng):
        options = {"dtype": "float32", "architecture": architecture, "model": {"dropout": 0.1}, "steps": 6, "rng": rng}
        whole = curve(make_trainer(tmp_path, alone, one, sequence_parallel=False, **options))
        split = curve(make_trainer(tmp_path, several, one, sequence_parallel=sequence_parallel, **options))
        return whole, ((split - whole) / whole).abs().max().item()

    dropped, error = both("global")
    assert error < 1e-5
    # Where each rank draws its own, the curves part at once.
    assert both("per_rank")[1] > 1e-3
    plain = {"dtype": "float32", "architecture": architecture, "steps": 6}
    assert (curve(make_trainer(tmp_path, alone, one, sequence_parallel=False, **plain)) != dropped).all()


@pytest.mark.ranks(2)
def test_ranks_that_share_samples_draw_slices_of_one_mask(group, tmp_path):
    def losses(groups):
        settings = tiny_settings(tmp_path, dtype="float64", steps=4, model={"sequence_length": 13})
        torch.manual_seed(11)
        model = build_model(settings, VOCAB, groups=groups, device=torch.device("cpu"))
        for part in model.modules():
            if isinstance(part, ResidualDropout):
                part.p = 0.2
        trainer = Trainer(settings, model, groups)
        return torch.tensor([trainer.step(step, [Batch(*each)]).loss for step, each in enumerate(batches(settings))])

    topology = Topology.create(cp=2)
    expected = losses(Groups.alone(topology.group("tp")))
    assert_close_to(losses(Groups.of(topology)), expected, rtol_of_norm=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_replicated_parameters_stay_equal_and_dropout_is_reproducible(group, tmp_path, sequence_parallel):
    topology = Topology.create(tp=2)
    alone = Topology.create(tp=1)
    curves = []
    for _ in range(2):
        settings = tiny_settings(
            tmp_path, tp=2, sequence_parallel=sequence_parallel, model={"dropout": 0.2}, steps=STEPS
        )
        torch.manual_seed(11)
        model = build_model(settings, VOCAB, groups=Groups.of(topology), device=torch.device("cpu"))
        trainer = Trainer(settings, model, Groups(tp=topology.group("tp"), dp=alone.group("tp")))
        curves.append(curve(trainer))
        for name, param, layout in named_param_layouts(model, 2):
            if layout.dim is None:
                copies = [torch.empty_like(param) for _ in range(2)]
                dist.all_gather(copies, param.detach(), group=group)
                assert_bit_equal(copies[0], copies[1], name=name)
    assert_bit_equal(curves[0], curves[1], name="the curve of the same seed")
