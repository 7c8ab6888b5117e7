"""Exact runs of models with experts have the same bits whichever ranks hold the experts."""

import pytest
import torch
from run.run_processes import hashes, run_in_processes
from run.test_exact_processes import LLAMA, settings_of
from run.test_exact_runs import LENGTH, SELECTIVE, VOCAB, alone_of, check, settings_of as settings_of_run

from shardwise.core.errors import ConfigError
from shardwise.core.topology import Topology
from shardwise.exact import expert_products
from shardwise.run.build import build_model
from shardwise.run.exact.trials import check_device

# A width that is no multiple of 16 elements, a bias that steps change, and losses of both kinds.
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "expert_ffn_hidden_size": 21,
    "router_aux_loss": 0.5,
    "router_z_loss": 0.01,
    "router_bias_rate": 0.01,
}
ONE = LLAMA | EXPERTS | {"num_layers": 2}
FULL = {"granularity": "full"}


def check_experts(*layouts, **options):
    check("llama", layouts, model=EXPERTS, **options)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_two_ranks(group):
    check_experts({"ep": 2}, {"tp": 2, "ep": 2, "sequence_parallel": True, "recompute": FULL}, {"tp": 2}, {"pp": 2})


@pytest.mark.ranks(4)
def test_fewer_ranks_hold_experts_than_share_samples(group):
    check_experts({"tp": 4, "ep": 2}, {"tp": 4, "ep": 2, "sequence_parallel": True})


@pytest.mark.sample(1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.matrix)])
def test_four_ranks(group, dtype):
    layouts = [
        {"ep": 4, "zero": 1},
        {"ep": 2, "zero": 1, "recompute": SELECTIVE},
        {"tp": 2, "ep": 4, "sequence_parallel": True},
        {"ep": 2, "pp": 2, "pipeline_schedule": "gpipe"},
        {"tp": 2, "zero": 1},
    ]
    check_experts(*layouts, dtype=dtype)


def hashes_of(folder, name, world_size, **parallel):
    run_in_processes(settings_of(folder, name, ONE, batch=8, parallel=parallel), world_size, folder / f"{name}-ranks")
    return hashes(folder / name)


@pytest.mark.matrix
def test_eight_processes(tmp_path):
    expected = hashes_of(tmp_path, "one", 1)
    assert "router_entropy of step 1" in expected
    assert "model.decoder.layers.0.mlp.experts.up" in expected
    parallel = {"ep": 4, "tp": 2, "pp": 2, "pipeline_schedule": "gpipe"}
    assert hashes_of(tmp_path, "split", 8, **parallel) == expected


@pytest.mark.matrix
@pytest.mark.parametrize(
    "parallel",
    [
        {"ep": 4, "zero": 1},
        {"ep": 8, "tp": 2, "sequence_parallel": True},
        {"ep": 1, "tp": 4, "zero": 1},
        {"ep": 2, "tp": 2, "pp": 2, "zero": 1},
        {"ep": 4, "tp": 4, "sequence_parallel": True, "pp": 2},
        {"ep": 4, "tp": 2, "zero": 1},
        {"ep": 8},
        {"ep": 8, "tp": 8},
    ],
)
def test_all_layouts_of_eight_processes(tmp_path, parallel):
    assert hashes_of(tmp_path, "split", 8, **parallel) == hashes_of(tmp_path, "one", 1)


@pytest.mark.slow
def test_a_checkpoint_of_four_times_two_ranks_goes_on_at_two_times_two(tmp_path):
    options = {"model": ONE, "batch": 8, "steps": 4, "save_every": 2, "asynchronous_saves": False}
    run_in_processes(settings_of(tmp_path, "one", **options), 1, tmp_path / "alone")

    def go_on(number, world_size, killed_at=None, **parallel):
        settings = settings_of(tmp_path, "often", **options, resume="auto", parallel=parallel)
        return run_in_processes(settings, world_size, tmp_path / number, killed_at=killed_at)

    go_on("first", 8, killed_at=3, ep=4, tp=2)
    assert "resumed at step 2\n" in go_on("second", 4, ep=2, pp=2)
    assert hashes(tmp_path / "often") == hashes(tmp_path / "one")


def test_what_is_refused(tmp_path):
    for parallel, world_size, message in (
        ({"tp": 2, "etp": 2}, 2, "experts cannot be used with parallel.exact and etp 2"),
        ({"ep": 2, "exact_parts": 1}, 2, "up to parallel.exact-parts 1, and there are 2 for data-parallel ranks"),
        (
            {"ep": 4, "tp": 2, "exact_parts": 2},
            4,
            "experts cannot be used with parallel.exact and ep 4 over exact-parts",
        ),
        ({"cp": 2}, 2, "experts cannot be used with parallel.exact and parallel.cp 2"),
        ({"fsdp": True}, 2, "no exact form of parallel.fsdp"),
    ):
        with pytest.raises(ConfigError, match=message):
            settings_of(tmp_path, "refused", ONE, parallel=parallel).check_world(world_size)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_that_differ_are_named(group, dtype, monkeypatch):
    settings = settings_of_run("llama", model=EXPERTS, dtype=dtype)
    model = build_model(settings, VOCAB, groups=alone_of(Topology.create()), device=torch.device("cpu"))
    sizes = {"micro_batch_size": 1, "sequence_length": LENGTH}
    check_device(model, **sizes)
    right = expert_products.whole_product
    for wrong, message in (
        (
            lambda left, right_factor: right(left, right_factor) * torch.get_num_threads(),
            r"the output of an expert's down product, \[1, 21\] by \[64, 21\], on one thread, has other bits",
        ),
        (
            lambda left, right_factor: right(left, right_factor) * (right_factor.storage_offset() + 1),
            r"the output of an expert's up product, \[1, 64\] by \[42, 64\], on one thread, has other bits",
        ),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(expert_products, "whole_product", wrong)
            with pytest.raises(ConfigError, match=message):
                check_device(model, **sizes)
