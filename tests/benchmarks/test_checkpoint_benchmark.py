"""The benchmark of checkpoints, at a size that takes moments, and what it refuses to time."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist
from checkpoint import KINDS, Saver, main

from shardwise.core.errors import ParityError


def test_both_kinds_are_timed_and_the_json_is_whole(tmp_path, capsys):
    file = tmp_path / "result.json"
    code = main(["--mebibytes", "1", "--rounds", "2", "--folder", str(tmp_path), "--json", str(file)])
    assert code == 0
    assert "asynchronous / synchronous: " in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["benchmark"] == "checkpoint"
    assert set(report["seconds"]) == {*KINDS, "of it copy", "of it publish"}
    assert len(report["ratio"]["per_round"]) == 2
    assert report["num_bytes"] == pytest.approx(1 << 20, rel=0.05)
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert not dist.is_initialized()


def test_other_bytes_are_not_timed(tmp_path, monkeypatch):
    def seconds(saver, kind):
        (tmp_path / kind / "step-00000001").mkdir(parents=True)
        (tmp_path / kind / "step-00000001" / "rank-00000.safetensors").write_text(kind)
        return 0.0

    monkeypatch.setattr(Saver, "seconds", seconds)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ParityError, match="wrote other bytes"):
            Saver(tmp_path, 1000, "cpu").check()
    finally:
        dist.destroy_process_group()
