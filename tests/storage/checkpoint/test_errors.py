"""Bad checkpoints and bad disks: one message on every rank, and what was there before still is."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_states import assert_states_equal, empty_state, full_state
from torch.distributed import ProcessGroup

from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.core.sharding import ParamLayout
from shardwise.storage.checkpoint import ParamShard, folder, latest, load, read_meta, save, saving, verify
from shardwise.storage.checkpoint.manifest import Manifest


def raised_everywhere(group: ProcessGroup, call: Callable[[], object]) -> str:
    """The message of the CheckpointError that ``call`` raises on every rank alike."""
    with pytest.raises(CheckpointError) as info:
        call()
    messages: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, str(info.value), group=group)
    assert len(set(messages)) == 1, messages
    assert "\n" not in str(info.value)
    return str(info.value)


def saved(root: Path, group: ProcessGroup, step: int = 1, seed: int = 0) -> Path:
    rank, tp = dist.get_rank(group), dist.get_world_size(group)
    return save(root, step, full_state(tp, rank, seed), {"seed": seed}, group=group)


def loading(path: Path, group: ProcessGroup) -> Callable[[], object]:
    rank, tp = dist.get_rank(group), dist.get_world_size(group)
    return lambda: load(path, empty_state(tp, rank), group=group)


def on_one_rank(group: ProcessGroup, change: Callable[[], object]) -> None:
    if dist.get_rank(group) == 0:
        change()
    dist.barrier(group)


def rewrite(path: Path, change: Callable[[dict], object]) -> None:
    """Change the JSON of a ``meta.json``."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def tensors_part(file: bytes) -> bytes:
    """A safetensors file without its header."""
    return file[8 + int.from_bytes(file[:8], "little") :]


@pytest.mark.ranks(1, 2)
def test_there_is_no_checkpoint(group: ProcessGroup, tmp_path: Path) -> None:
    path = tmp_path / "step-00000001"
    assert f"no checkpoint at {path}: no such folder" in raised_everywhere(group, loading(path, group))
    on_one_rank(group, path.mkdir)
    assert f"{path} is not a checkpoint: it has no meta.json" in raised_everywhere(group, loading(path, group))
    hint = f"it holds checkpoints: give one of them, such as {path}"
    assert hint in raised_everywhere(group, loading(tmp_path, group))
    on_one_rank(group, lambda: (path.rmdir(), path.write_text("x")))
    assert f"{path} is a file; a checkpoint is a folder" in raised_everywhere(group, loading(path, group))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors"])
def test_a_file_is_damaged(group: ProcessGroup, tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, group)
    whole = (path / name).read_bytes()
    dist.barrier(group)
    # In the header's length, in its text, and in the first, a middle and the last tensor.
    for position in (3, 20, *(len(whole) - back for back in (1, 800, len(tensors_part(whole))))):
        on_one_rank(group, lambda position=position: flip(path / name, position))
        message = raised_everywhere(group, loading(path, group))
        assert message.startswith(f"checkpoint {path} is damaged: ")
        assert name in message
        assert message.endswith("; use another copy of it, or remove the checkpoint to use an older one")
        with pytest.raises(CheckpointError, match=f"{name} has CRC-32"):
            verify(path)
        dist.barrier(group)
        on_one_rank(group, lambda: (path / name).write_bytes(whole))
    load(path, empty_state(2, dist.get_rank(group)), group=group)

    on_one_rank(group, lambda: truncate(path / name))
    size = len(whole)
    expected = f"checkpoint {path} is damaged: {name} has {size - 1} bytes, expected {size}"
    assert expected in raised_everywhere(group, loading(path, group))
    on_one_rank(group, (path / name).unlink)
    expected = f"checkpoint {path} is incomplete: {name} cannot be found"
    assert expected in raised_everywhere(group, loading(path, group))


@pytest.mark.ranks(2)
def test_meta_json_is_damaged(group: ProcessGroup, tmp_path: Path) -> None:
    path = saved(tmp_path, group) / "meta.json"
    good = path.read_bytes()
    dist.barrier(group)

    def message_after(change: Callable[[], object]) -> str:
        on_one_rank(group, change)
        message = raised_everywhere(group, loading(path.parent, group))
        on_one_rank(group, lambda: path.write_bytes(good))
        assert message.startswith(f"{path} ")
        return message

    assert "it is not JSON: Unterminated string" in message_after(lambda: path.write_bytes(good[:-20]))
    assert "it is not JSON: Expecting value" in message_after(lambda: path.write_bytes(b""))
    assert "can't decode byte" in message_after(lambda: path.write_bytes(b"\xff" + good))
    assert "must hold a JSON object, not list" in message_after(lambda: path.write_text("[1, 2]"))
    assert "not of the format 'shardwise checkpoint'" in message_after(lambda: path.write_text("{}"))
    assert "it lacks files" in message_after(lambda: rewrite(path, lambda meta: meta.pop("files")))
    newer = message_after(lambda: rewrite(path, lambda meta: meta.update(version=3)))
    assert "another Shardwise (format version 3, this one reads 2); upgrade shardwise" in newer
    older = message_after(lambda: rewrite(path, lambda meta: meta.update(version=1)))
    assert "another Shardwise (format version 1, this one reads 2); use the one that wrote it" in older
    changed = message_after(lambda: rewrite(path, lambda meta: meta.update(step=2)))
    assert "checksum does not match" in changed
    assert changed.endswith("; another copy of it may help")


@pytest.mark.ranks(1)
def test_no_flipped_bit_goes_unnoticed(group: ProcessGroup, tmp_path: Path) -> None:
    """Wherever it is, in whichever file: either ``verify`` sees it, or it changes nothing (white space in the JSON).

    So does ``load``, but for what it has no use for, such as a comment in a file's header.
    """
    path = saved(tmp_path, group)
    before = Manifest.read(path)
    expected = full_state(1, 0)
    choose = random.Random(0)
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for _ in range(40):
            flip(file, choose.randrange(len(good)))
            try:
                verify(path)
            except CheckpointError:
                loaded = empty_state(1, 0)
                with contextlib.suppress(CheckpointError):
                    load(path, loaded, group=group)
                    assert_states_equal(loaded, expected)
            else:
                assert file.name == "meta.json"
                assert Manifest.read(path) == before
            file.write_bytes(good)
    verify(path)


def crafted(change: Callable[[dict], object], path: Path) -> str:
    """The message about a ``meta.json`` that somebody changed, with its checksum made to match."""
    text = path.read_text()
    rewrite(path, change)
    changed = json.loads(path.read_text())
    body = {key: changed[key] for key in ("step", "serial", "meta", "files", "tensors")}
    from shardwise.storage.checkpoint.manifest import _checksum

    rewrite(path, lambda meta: meta.update(crc32=_checksum(body)))
    with pytest.raises(CheckpointError) as info:
        verify(path.parent)
    path.write_text(text)
    return str(info.value)


@pytest.mark.ranks(1)
def test_a_crafted_meta_json_is_refused(group: ProcessGroup, tmp_path: Path) -> None:
    path = saved(tmp_path, group) / "meta.json"
    name = "embedding.weight"

    def chunk(meta: dict) -> dict:
        return meta["tensors"][name]["chunks"][0]

    assert "impossible" in crafted(lambda meta: chunk(meta).update(offsets=[1, 0]), path)
    negative = crafted(lambda meta: chunk(meta).update(sizes=[-1, -606]), path)
    assert "tensors.embedding.weight.chunks[0].sizes is [-1, -606]; it must be a list of sizes" in negative
    for change, said in (
        ({"checksum": "0" * 15}, 'chunks[0].checksum is "000000000000000"; it must be sixteen hexadecimal digits'),
        ({"offsets": [0, True]}, "chunks[0].offsets is [0, true]; it must be a list of sizes"),
        ({"key": None}, "chunks[0].key is null; it must be a string"),
    ):
        assert f"its tensors.embedding.weight.{said}" in crafted(lambda meta, change=change: chunk(meta).update(change), path)  # fmt: skip # noqa: E501
    assert "its step is true; it must be an integer from 0" in crafted(lambda meta: meta.update(step=True), path)
    assert "its tensors.embedding.weight.layout is missing" in crafted(lambda meta: meta["tensors"][name].pop("layout"), path)  # fmt: skip # noqa: E501
    assert "none of its files" in crafted(lambda meta: chunk(meta).update(file="other.safetensors"), path)
    assert "600 elements are recorded" in crafted(lambda meta: chunk(meta).update(sizes=[100, 6]), path)
    assert "0 elements are recorded" in crafted(lambda meta: meta["tensors"][name].update(chunks=[]), path)
    assert "'load' is no dtype" in crafted(lambda meta: meta["tensors"][name].update(dtype="load"), path)
    for outside in ("../x", "/etc/hostname"):
        file = {"size": 1, "crc32": "00000000"}
        assert "cannot be" in crafted(
            lambda meta, outside=outside, file=file: meta["files"].update({outside: file}), path
        )


@pytest.mark.ranks(2)
def test_a_checkpoint_of_another_model(group: ProcessGroup, tmp_path: Path) -> None:
    rank = dist.get_rank(group)
    path = saved(tmp_path, group)

    def message_of(change: Callable[[dict[str, ParamShard]], object]) -> str:
        state = empty_state(2, rank)
        change(state)
        return raised_everywhere(group, lambda: load(path, state, group=group))

    wider = ParamShard("embedding.weight", torch.zeros(51, 8), ParamLayout.split((102, 8), 0, 2), rank)
    message = message_of(lambda state: state.update({"embedding.weight": wider}))
    assert "of another model: tensor 'embedding.weight' has shape [101, 6] in it, [102, 8] here" in message

    def double(key: str) -> ParamShard:
        return ParamShard(key, torch.zeros(6, dtype=torch.float64), ParamLayout.replicated((6,), 2), rank)

    message = message_of(lambda state: state.update({"norm.weight": double("norm.weight")}))
    assert "has tensor 'norm.weight' as torch.float32, here it is torch.float64" in message

    message = message_of(lambda state: state.update({"new.1": double("new.1"), "new.2": double("new.2")}))
    assert "of another model or incomplete: it lacks tensor 'new.1' and 1 more" in message

    message = message_of(lambda state: (state.pop("norm.weight"), state.pop("kv.weight")))
    assert "holds tensor 'kv.weight' and 1 more for which there is no place here: it is of another model" in message


@pytest.mark.ranks(2)
def test_ranks_that_disagree(group: ProcessGroup, tmp_path: Path) -> None:
    rank = dist.get_rank(group)
    layout = [ParamLayout.split((5,), 0, 2), ParamLayout.split((5,), 0, 2, sizes=[2, 3])][rank]
    state = {"weight": ParamShard("weight", torch.zeros(3), layout, rank)}
    message = raised_everywhere(group, lambda: save(tmp_path, 1, state, {}, group=group))
    assert "disagreement about tensor 'weight': rank 1 has torch.float32 of shape [5]" in message

    message = raised_everywhere(group, lambda: save(tmp_path, rank, full_state(2, rank), {}, group=group))
    assert "ranks save different steps: [0, 1]" in message
    assert list(tmp_path.iterdir()) == []

    first, second = saved(tmp_path, group, 1), saved(tmp_path, group, 2)
    message = raised_everywhere(group, loading([first, second][rank], group))
    assert "ranks load different steps: [1, 2]" in message


@pytest.mark.ranks(2)
def test_what_cannot_be_saved(group: ProcessGroup, tmp_path: Path) -> None:
    rank = dist.get_rank(group)
    for meta in ({"f": print}, {"nan": float("nan")}):
        message = raised_everywhere(group, lambda meta=meta: save(tmp_path, 1, {}, meta, group=group))
        assert "meta must be plain JSON values" in message
    # safetensors has no such dtype.
    state = {
        "weight": ParamShard("weight", torch.zeros(2, dtype=torch.complex128), ParamLayout.replicated((2,), 2), rank)
    }
    message = raised_everywhere(group, lambda: save(tmp_path, 1, state, {}, group=group))
    assert "complex128" in message
    # Index 2 is nobody's.
    gap = ParamLayout((6,), 0, (((0, 2),), ((3, 6),)), 2)
    state = {"weight": ParamShard("weight", torch.zeros(gap.local_shape(rank)), gap, rank)}
    message = raised_everywhere(group, lambda: save(tmp_path, 1, state, {}, group=group))
    assert "key:weight invalid fill" in message
    assert list(tmp_path.iterdir()) == []
    for arguments in ({"step": -1}, {"step": 1, "keep": 0}):
        with pytest.raises(ConfigError, match="step must be at least 0 and keep at least 1"):
            save(tmp_path, state={}, meta={}, group=group, **arguments)


@pytest.mark.ranks(2)
def test_extra_files_that_fail(group: ProcessGroup, tmp_path: Path) -> None:
    path = saved(tmp_path, group, 1)

    def fail(_: Path) -> None:
        raise ValueError("no tokenizer")

    for write, expected in (
        (fail, "ValueError: no tokenizer"),
        (lambda place: (place / "meta.json").write_text(""), "extra_files wrote meta.json"),
    ):
        message = raised_everywhere(
            group, lambda write=write: save(tmp_path, 2, {}, {}, group=group, extra_files=write)
        )
        assert expected in message
        assert message.endswith("; earlier ones are untouched")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.ranks(2)
def test_what_is_left_of_earlier_ones(group: ProcessGroup, tmp_path: Path) -> None:
    def remove_all(place: Path) -> None:
        shutil.rmtree(place.parent)
        raise ValueError("somebody tidied up")

    saved(tmp_path, group, 1)
    message = raised_everywhere(group, lambda: save(tmp_path, 2, {}, {}, group=group, extra_files=remove_all))
    assert message.endswith(
        "; the folder is gone, and what was in it: something removed it while the program was at work"
    )
    message = raised_everywhere(group, lambda: save(tmp_path, 2, {}, {"no": object()}, group=group))
    assert message.endswith("; there is no earlier one")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("full_rank", [0, 1])
def test_disk_full(group: ProcessGroup, tmp_path: Path, full_rank: int) -> None:
    """The kernel refuses to write more than a few bytes on one rank; the checkpoint saved before is as it was."""
    rank = dist.get_rank(group)
    path = saved(tmp_path, group, 1)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == full_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, unlimited[1]))
    try:
        with pytest.raises(CheckpointError) as info:
            saved(tmp_path, group, 1, seed=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert f"rank-0000{full_rank}.safetensors: File too large" in str(info.value)
    assert "earlier ones are untouched" in str(info.value)
    assert list(tmp_path.iterdir()) == [path]
    loaded = empty_state(2, rank)
    load(latest(tmp_path), loaded, group=group)
    assert_states_equal(loaded, full_state(2, rank))
    # And once there is room again:
    saved(tmp_path, group, 1, seed=1)
    load(path, loaded, group=group)
    assert_states_equal(loaded, full_state(2, rank, seed=1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("refused", ["fsync", "meta.json", "publish"])
def test_the_last_steps_fail(
    group: ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Whatever fails, the checkpoint of the same step that is there already stays."""
    path = saved(tmp_path, group, 1)
    before = sorted((file.name, file.read_bytes()) for file in path.iterdir())
    dist.barrier(group)
    no_space = OSError(errno.ENOSPC, "No space left on device")

    def fail(*args: object, **kwargs: object) -> None:
        raise no_space

    def fail_to_publish(source: Path, target: Path) -> None:
        if target == path and source.name.endswith(".partial"):
            raise no_space
        os.replace(source, target)

    with monkeypatch.context() as patch:
        if refused == "fsync":
            patch.setattr(os, "fsync", fail)
        elif refused == "meta.json":
            patch.setattr(Path, "write_text", fail)
        else:
            patch.setattr(folder.os, "rename", fail_to_publish)
        message = raised_everywhere(group, lambda: saved(tmp_path, group, 1, seed=1))
    assert message.startswith(f"cannot save a checkpoint in {tmp_path}: ")
    assert "No space left on device" in message
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert sorted((file.name, file.read_bytes()) for file in path.iterdir()) == before


@pytest.mark.ranks(2)
def test_no_permission(group: ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "run"
    on_one_rank(group, root.mkdir)
    on_one_rank(group, lambda: root.chmod(0o555))
    if os.geteuid() == 0:
        # No folder is closed to the superuser: let the call fail as it does for others.
        def refuse(path: Path, *args: object, **kwargs: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        monkeypatch.setattr(os, "mkdir", refuse)
    message = raised_everywhere(group, lambda: saved(root, group))
    assert message.startswith(f"cannot save a checkpoint in {root}: [Errno 13] Permission denied: '{root}")


@pytest.mark.ranks(2)
def test_a_file_is_in_the_way(group: ProcessGroup, tmp_path: Path) -> None:
    root = tmp_path / "run"
    on_one_rank(group, lambda: root.write_text("notes"))
    assert f"File exists: '{root}'" in raised_everywhere(group, lambda: saved(root, group))
    with pytest.raises(CheckpointError, match="cannot look for checkpoints in"):
        latest(root)
    step = tmp_path / "step-00000001"
    on_one_rank(group, lambda: step.write_text("notes"))
    assert f"{step} is a file; move it away" in raised_everywhere(group, lambda: saved(tmp_path, group))
    assert step.read_text() == "notes"


@pytest.mark.ranks(2)
def test_a_folder_that_ranks_do_not_share(group: ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if dist.get_rank(group) == 1:
        write_parts = saving.write_parts
        monkeypatch.setattr(
            saving, "write_parts", lambda folder, *args, **kwargs: write_parts(Path("/nowhere"), *args, **kwargs)
        )
    message = raised_everywhere(group, lambda: saved(tmp_path, group))
    assert "rank-00001.safetensors" in message
    assert "No such file or directory" in message
    assert list(tmp_path.iterdir()) == []


def test_read_meta_of_a_damaged_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        read_meta(tmp_path / "step-00000001")


@pytest.mark.ranks(1)
def test_the_newest_is_damaged(group: ProcessGroup, tmp_path: Path) -> None:
    first, second = saved(tmp_path, group, 1), saved(tmp_path, group, 2)
    file = second / "rank-00000.safetensors"
    truncate(file)
    with pytest.raises(CheckpointError) as info:
        latest(tmp_path)
    assert str(info.value) == (
        f"checkpoint {second} is damaged: {file.name} has {file.stat().st_size} bytes, expected "
        f"{file.stat().st_size + 1}; remove {second} to go on from {first}"
    )
    (second / "meta.json").write_text("{")
    with pytest.raises(CheckpointError, match=f"remove {second} to go on from {first}"):
        latest(tmp_path)
    shutil.rmtree(second)
    assert latest(tmp_path) == first
    (first / "meta.json").unlink()
    with pytest.raises(CheckpointError, match=f"has no meta.json; remove {first} to start anew"):
        latest(tmp_path)


@pytest.mark.ranks(1)
def test_an_older_one_is_damaged(group: ProcessGroup, tmp_path: Path) -> None:
    """It does not stand in the way of the newest, and it is not deleted either: somebody may want to look at it."""
    first = saved(tmp_path, group, 1)
    (first / "meta.json").write_text("{")
    newest = [save(tmp_path, step, full_state(1, 0), {}, group=group, keep=1) for step in (2, 3)][-1]
    assert latest(tmp_path) == newest
    assert sorted(tmp_path.iterdir()) == [first, newest]
