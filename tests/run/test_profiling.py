"""A trace of some steps changes no number, and is there on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging

import pytest
import torch
from run.test_run import losses, open_tiny
from run.tiny import tiny_settings

from shardwise.core.errors import ConfigError
from shardwise.run.processes.ranks import Ranks
from shardwise.run.run import train
from shardwise.run.settings import ProfileSettings
from shardwise.run.utilisation import profiled

THREE = ProfileSettings(enabled=True, wait=1, warmup=1, active=2)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_every_rank_traces_the_steps_that_were_asked_for(group, tmp_path, monkeypatch):
    settings = tiny_settings(tmp_path, tp=2, steps=5)
    traced = dataclasses.replace(settings, out=str(tmp_path / "traced"), profile=THREE)
    for each in (settings, traced):
        train(open_tiny(each, monkeypatch, tmp_path))
    assert losses(tmp_path / "run") == losses(tmp_path / "traced")
    assert not (tmp_path / "run" / "profile").exists()
    trace = json.loads((tmp_path / "traced" / "profile" / f"rank-{group.rank()}.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert {name for name in names if name.startswith("ProfilerStep#")} == {"ProfilerStep#2", "ProfilerStep#3"}
    assert sum("AdamW" in name and name.startswith("Optimizer.step") for name in names) == 2


@pytest.mark.parametrize(("steps", "files"), [(1, []), (2, ["rank-0.json"])])
def test_a_run_that_ends_early_leaves_what_it_has(tmp_path, steps, files):
    ranks = Ranks(0, 0, 1, torch.device("cpu"))
    with contextlib.suppress(ZeroDivisionError), profiled(THREE, tmp_path, ranks) as end_of_step:
        for _ in range(steps):
            end_of_step()
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.rglob("*.json")] == files


def test_a_trace_that_cannot_be_written_ends_nothing(tmp_path, caplog):
    (tmp_path / "profile").write_text("a file in the folder's place")
    ranks = Ranks(0, 0, 1, torch.device("cpu"))
    with (
        caplog.at_level(logging.WARNING, logger="shardwise"),
        profiled(ProfileSettings(enabled=True, wait=0, warmup=1, active=1), tmp_path, ranks) as end_of_step,
    ):
        for _ in range(2):
            torch.ones(3).sum()
            end_of_step()
    assert "rank-0.json could not be written" in caplog.text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"active": 0}, "profile.active is 0; it must be from 1 to 1,000"),
        ({"warmup": 0}, "profile.warmup is 0; it must be from 1"),
        ({"wait": -1}, "profile.wait is -1"),
        ({"warmup": 1.5}, "profile.warmup is 1.5; it must be an integer"),
        ({"enabled": False, "wait": 2}, "profile.wait 2 is for --profile, which is not given"),
    ],
)
def test_values_that_cannot_be(values, message):
    with pytest.raises(ConfigError, match=message):
        ProfileSettings(**({"enabled": True} | values))


def test_more_steps_than_there_are(tmp_path):
    with pytest.raises(ConfigError, match="are 4 steps, and there are 3 to do; lower them"):
        dataclasses.replace(tiny_settings(tmp_path, steps=3), profile=THREE)
    dataclasses.replace(tiny_settings(tmp_path, steps=4), profile=THREE)
    with pytest.raises(ConfigError, match="there are 2 to do"):
        THREE.check_steps(2, 4)
