"""The program of reinforcement learning: ratios on policy are exactly 1 in exact mode, and the reward rises."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest
import torch.distributed as dist

SCRIPT = Path(__file__).parents[2] / "examples" / "grpo.py"


def run_grpo(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[list[float], list[float]]:
    """Run the script on the ranks of a test; return the rewards and the furthest ratios that rank 0 prints."""
    spec = importlib.util.spec_from_file_location("grpo", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    # The ranks have joined already, and leave later.
    monkeypatch.setattr(dist, "init_process_group", lambda *_: None)
    destroy = dist.destroy_process_group
    monkeypatch.setattr(dist, "destroy_process_group", lambda group=None: None if group is None else destroy(group))
    monkeypatch.setattr("sys.argv", ["grpo.py", *arguments])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        script.main()
    lines = re.findall(r"^step +\d+  reward (\S+)  furthest ratio from 1: (\S+)$", printed.getvalue(), re.MULTILINE)
    return [float(reward) for reward, _ in lines], [float(ratio) for _, ratio in lines]


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_ratios_are_one_and_the_reward_rises(group, monkeypatch):
    rewards, ratios = run_grpo(monkeypatch, "--exact", "--steps", "14")
    if group.rank() == 0:
        assert ratios == [0.0] * 14
        assert sum(rewards[-4:]) > 2 * sum(rewards[:4])


@pytest.mark.ranks(2)
def test_without_exact_mode_ratios_are_about_one(group, monkeypatch):
    _, ratios = run_grpo(monkeypatch, "--steps", "2", "--prompts", "4", "--samples", "2")
    if group.rank() == 0:
        assert 0 < max(ratios) < 1e-4


def test_the_script_is_short():
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 200
