"""A run on the GPU: NCCL with one rank, the CPU's curve, saved while it trains, resumed, read from."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from run.tiny import tiny_settings

from shardwise.cli.main import run_subcommand
from shardwise.core.sharding import ParamLayout
from shardwise.run.metrics import read_metrics
from shardwise.run.processes.ranks import open_ranks
from shardwise.run.run import run
from shardwise.run.session import open_session
from shardwise.storage import checkpoint
from shardwise.storage.checkpoint import ParamShard, PendingSave, Snapshot

_SYNCHRONIZING = "called a synchronizing CUDA operation"


def settings_of(folder, device, name, **options):
    settings = tiny_settings(folder, **options)
    return dataclasses.replace(settings, out=str(folder / name), device=device.type)


def losses(folder, name):
    return [row["loss"] for row in read_metrics(folder / name / "metrics.jsonl")]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(("dtype", "rel"), [("float64", 1e-9), ("bfloat16", 2e-2)])
def test_the_curve_of_the_cpu(device, tmp_path, dtype, rel):
    """Two steps of warm-up and six at full rate."""
    cpu = torch.device("cpu")
    for name, where in (("here", device), ("cpu", cpu)):
        run(settings_of(tmp_path, where, name, dtype=dtype))
    assert len(losses(tmp_path, "here")) == 8
    assert losses(tmp_path, "here") == pytest.approx(losses(tmp_path, "cpu"), rel=rel)


def test_saved_while_it_trains_resumed_and_read_from(device, tmp_path, capsys):
    options = {"dtype": "float32", "save_every": 2, "keep_checkpoints": 9, "model": {"dropout": 0.1}}
    run(settings_of(tmp_path, device, "whole", **options))
    run(settings_of(tmp_path, device, "parts", **(options | {"steps": 8})))
    # As if it had been killed after its sixth step.
    for folder in (tmp_path / "parts" / "checkpoints").glob("step-0000000[78]"):
        for file in [*folder.iterdir(), folder]:
            file.rmdir() if file.is_dir() else file.unlink()
    run(settings_of(tmp_path, device, "parts", **options, resume="auto"))
    # A GPU may add in another order.
    rel = 0.0 if device.type == "cpu" else 1e-5
    assert losses(tmp_path, "parts") == pytest.approx(losses(tmp_path, "whole"), rel=rel)
    for path in (tmp_path / "whole" / "checkpoints").iterdir():
        checkpoint.verify(path)
    capsys.readouterr()
    texts = []
    for where in (device.type, "cpu"):
        told = [str(tmp_path / "whole"), "--prompt", "def ", "--max-new-tokens", "8", "--temperature", "0"]
        assert run_subcommand("generate", [*told, "--device", where]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert len(texts[0]) > 8


def test_a_snapshot_is_of_its_moment(device, full, tmp_path):
    """The copies are queued behind what was launched before, and before what changes the tensors."""
    size = 1 << 26 if full else 1 << 10
    with open_ranks(device.type) as ranks:
        data = torch.zeros(size, device=device)
        snapshot = Snapshot()
        for step in (1, 2):
            for _ in range(20):
                data += 1.0
            state = {"x": ParamShard("x", data, ParamLayout.replicated(data.shape, 1), 0)}
            pending = PendingSave(tmp_path, step, state, group=ranks.control, snapshot=snapshot)
            data += 1000.0
            path = pending.complete()
            assert snapshot._buffers["x"].is_pinned() == (device.type != "cpu")
            found = torch.empty_like(data)
            empty = {"x": state["x"].with_data(found)}
            checkpoint.load(path, empty, group=ranks.control)
            assert bool((found == 20.0 * step + 1000.0 * (step - 1)).all())


def num_waits(caught):
    """How often the host waited for the GPU, by PyTorch's own warnings."""
    return sum(_SYNCHRONIZING in str(warning.message) for warning in caught)


def test_waits_are_counted():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for text in (f"{_SYNCHRONIZING}. here", "something else"):
            warnings.warn(text, stacklevel=1)
    assert num_waits(caught) == 1


@pytest.mark.parametrize("micro_batch_size", [4, 1])
def test_a_step_waits_once_at_most(device, tmp_path, micro_batch_size):
    settings = settings_of(tmp_path, device, "run", dtype="bfloat16", micro_batch_size=micro_batch_size)
    with open_ranks(device.type) as ranks:
        session = open_session(settings, ranks)
        for step in range(3):
            session.trainer.train_step(step, session.loader)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _debug_synchronization(device, "warn")
            try:
                session.trainer.train_step(3, session.loader)
            finally:
                _debug_synchronization(device, "default")
        assert num_waits(caught) <= 1, [str(warning.message) for warning in caught]
        session.topology.destroy()


def _debug_synchronization(device, mode):
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)
