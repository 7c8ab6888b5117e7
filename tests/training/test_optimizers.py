"""Training and checkpoints know no more of an optimizer than its interface: another one trains, saves and resumes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from run.test_run import interrupted_at, losses, open_tiny
from run.tiny import tiny_settings

from shardwise.core.errors import CheckpointError
from shardwise.run.banner import banner
from shardwise.run.checkpoints import run_state, start_or_resume
from shardwise.run.run import train
from shardwise.run.settings import OptimizerSettings


class Momentum(torch.optim.SGD):
    """One tensor for each parameter, and no count of steps."""

    why_not_fused = "it is a test's"

    def state_of(self, param, layout):
        state = self.state[param]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(param)
        return {"momentum_buffer": (state["momentum_buffer"], layout)}

    def set_step_(self, step):
        self.steps_done = step


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_another_optimizer_trains_saves_and_resumes(group, tmp_path, monkeypatch):
    def make(self, model):
        return Momentum([param for param in model.parameters() if param.requires_grad], lr=0.1, momentum=0.9)

    monkeypatch.setattr(OptimizerSettings, "make", make)
    whole = tiny_settings(tmp_path, tp=2, save_every=3, asynchronous_saves=False)
    session = open_tiny(dataclasses.replace(whole, out=str(tmp_path / "whole")), monkeypatch, tmp_path)
    assert "\n       no fused optimizer step: it is a test's" in banner(session)
    train(session)

    parts = dataclasses.replace(whole, out=str(tmp_path / "parts"))
    broken = open_tiny(parts, monkeypatch, tmp_path)
    interrupted_at(5, broken)
    dist.barrier(group=group)
    resumed = open_tiny(dataclasses.replace(parts, resume="auto"), monkeypatch, tmp_path)
    train(resumed)
    assert resumed.trainer.optimizer.steps_done == 3
    dist.barrier(group=group)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    kept = {key for key in run_state(resumed) if key.startswith("optimizer.")}
    assert kept == {f"optimizer.momentum_buffer.{key}" for key in dict(resumed.trainer.model.named_parameters())}


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_checkpoint_of_another_optimizer_is_refused(group, tmp_path, monkeypatch):
    muon = tiny_settings(tmp_path, tp=2, steps=1, optimizer={"name": "muon"})
    train(open_tiny(muon, monkeypatch, tmp_path))
    dist.barrier(group=group)
    other = dataclasses.replace(muon, resume="auto", optimizer=dataclasses.replace(muon.optimizer, name="adamw"))
    with pytest.raises(CheckpointError, match=r"optimizer\.name was 'muon' and is 'adamw'"):
        start_or_resume(open_tiny(other, monkeypatch, tmp_path))
