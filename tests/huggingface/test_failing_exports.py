"""An export that cannot be: one error on every rank, and nothing is left of the folder."""

from __future__ import annotations

import contextlib
import resource
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from harness.parity import assert_bit_equal
from hf_references import Reference, groups_of
from test_bad_folders import raised_everywhere

from shardwise.errors import CheckpointError, ConfigError
from shardwise.huggingface import load_pretrained, save_pretrained


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reference", ["gpt2"], indirect=True)
def test_places_that_cannot_be_written(group: dist.ProcessGroup, reference: Reference, tmp_path: Path) -> None:
    if group.rank() == 0:
        (tmp_path / "file").write_text("")
        (tmp_path / "full").mkdir()
        (tmp_path / "full/note.txt").write_text("mine")
        (tmp_path / "empty").mkdir()
    dist.barrier(group)
    before = sorted(tmp_path.rglob("*"))
    for tp, pp in ((2, 1), (1, 2)):
        model = load_pretrained(reference.folder, pg_collection=groups_of(tp, pp))
        for target, kind, message, options in (
            ("full", ConfigError, "full exists; choose another folder", {}),
            ("file", ConfigError, "file exists; choose another folder", {}),
            ("file/below", CheckpointError, "cannot write .*below: ", {}),
            ("x", ConfigError, "there is no folder", {"source": tmp_path / "nowhere"}),
            ("x", ConfigError, "llama: ", {"architecture": "llama"}),
            ("x", ConfigError, "'t5' is unknown", {"architecture": "t5"}),
        ):
            error = raised_everywhere(group, partial(save_pretrained, model, tmp_path / target, **options))
            assert isinstance(error, kind), error
            with pytest.raises(kind, match=message):
                raise error
        dist.barrier(group)
        assert sorted(tmp_path.rglob("*")) == before
    save_pretrained(model, tmp_path / "empty")
    assert (tmp_path / "empty/config.json").is_file()
    if group.rank() == 0:
        (tmp_path / "here").mkdir()
    dist.barrier(group)
    with contextlib.chdir(tmp_path / "here"):
        save_pretrained(model, ".")
    assert (tmp_path / "here/config.json").is_file()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reference", ["llama"], indirect=True)
def test_disk_full(group: dist.ProcessGroup, reference: Reference, tmp_path: Path) -> None:
    """The kernel refuses to write more than some bytes on one rank."""
    _, hard_limit = unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for tp, pp in ((2, 1), (1, 2)):
        model = load_pretrained(reference.folder, pg_collection=groups_of(tp, pp))
        for full_rank in (0, 1):
            target = tmp_path / "new" / f"{tp}x{pp}-{full_rank}"
            if group.rank() == full_rank:
                resource.setrlimit(resource.RLIMIT_FSIZE, (9000, hard_limit))
            try:
                error = raised_everywhere(group, partial(save_pretrained, model, target, max_file_size=30000))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
            assert isinstance(error, CheckpointError)
            assert "File too large" in str(error)
            dist.barrier(group)
            # Nor the folders that were made for it.
            assert list(tmp_path.iterdir()) == []
        # And once there is room again:
        save_pretrained(model, tmp_path / "now")
        again = load_pretrained(tmp_path / "now", pg_collection=groups_of(tp, pp))
        for key, param in again.state_dict().items():
            assert_bit_equal(param, model.state_dict()[key], name=key)
        dist.barrier(group)
        if group.rank() == 0:
            for path in (tmp_path / "now").iterdir():
                path.unlink()
            (tmp_path / "now").rmdir()
        dist.barrier(group)
