"""An export that cannot be: one error on every rank, and nothing is left of the folder."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal
from hf_references import Reference, groups_of, transformers_model
from safetensors.torch import load_file
from test_bad_folders import raised_everywhere

from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.models.adapters import LoraConfig
from shardwise.storage.adapters import add_lora_, load_adapter_, lora_layers, save_adapter
from shardwise.storage.huggingface import load_pretrained, read_config, save_pretrained

INDEX = "model.safetensors.index.json"


@contextlib.contextmanager
def no_file_over(size: int) -> Iterator[None]:
    """Within, the kernel refuses this rank to write more than ``size`` bytes into a file."""
    _, hard_limit = unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard_limit))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


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
        model = load_pretrained(reference.folder, groups=groups_of(tp, pp))
        for target, kind, message, options in (
            ("full", ConfigError, "full exists; choose another folder", {}),
            ("file", ConfigError, "file exists; choose another folder", {}),
            ("file/below", ConfigError, "cannot write to .*: .*file is a file", {}),
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
    for tp, pp in ((2, 1), (1, 2)):
        model = load_pretrained(reference.folder, groups=groups_of(tp, pp))
        for full_rank in (0, 1):
            target = tmp_path / "new" / f"{tp}x{pp}-{full_rank}"
            with no_file_over(9000) if group.rank() == full_rank else contextlib.nullcontext():
                error = raised_everywhere(group, partial(save_pretrained, model, target, max_file_size=30000))
            assert isinstance(error, CheckpointError)
            assert "File too large" in str(error)
            dist.barrier(group)
            # Nor the folders that were made for it.
            assert list(tmp_path.iterdir()) == []
        # And once there is room again:
        save_pretrained(model, tmp_path / "now")
        again = load_pretrained(tmp_path / "now", groups=groups_of(tp, pp))
        for key, param in again.state_dict().items():
            assert_bit_equal(param, model.state_dict()[key], name=key)
        dist.barrier(group)
        if group.rank() == 0:
            for path in (tmp_path / "now").iterdir():
                path.unlink()
            (tmp_path / "now").rmdir()
        dist.barrier(group)


@pytest.fixture(scope="module")
def many_names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model so narrow that, in one file per tensor, its index is larger than any of them."""
    folder = tmp_path_factory.mktemp("many_names")
    transformers_model("gpt2", vocab_size=50, n_embd=14, n_inner=20, n_layer=3).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_disk_full_when_all_weights_are_written(group: dist.ProcessGroup, many_names: Path, tmp_path: Path) -> None:
    """The first rank, which writes the small files, has no room for one of them."""
    source = tmp_path / "source"
    if group.rank() == 0:
        source.mkdir()
        (source / "vocab.txt").write_text("word\n" * 40_000)
    dist.barrier(group)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "max_file_size": 1}
    for tp, pp in ((2, 1), (1, 2)):
        parent = tmp_path / f"{tp}x{pp}"
        model = load_pretrained(many_names, groups=groups_of(tp, pp))
        save_pretrained(model, parent / "whole", **options)
        dist.barrier(group)
        sizes = {path.name: path.stat().st_size for path in (parent / "whole").iterdir()}
        index_size = sizes.pop(INDEX)
        limit = max(sizes.values())
        assert limit < index_size < 100_000
        for name, more, size in (
            ("config.json", {"fields": {"note": "x" * 100_000}}, 100_000),
            (INDEX, {}, limit),
            ("vocab.txt", {"source": source}, 100_000),
        ):
            target = parent / "new" / "model"
            with no_file_over(size) if group.rank() == 0 else contextlib.nullcontext():
                error = raised_everywhere(group, partial(save_pretrained, model, target, **options | more))
            assert isinstance(error, CheckpointError)
            assert str(error).startswith(f"cannot write {target / name}: File too large"), error
            dist.barrier(group)
            assert [path.name for path in parent.iterdir()] == ["whole"]
            # Its size alone was in the way.
            save_pretrained(model, tmp_path / "room" / parent.name / name, **options | more)
            dist.barrier(group)
            assert (tmp_path / "room" / parent.name / name / name).stat().st_size > size


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("reference", ["llama"], indirect=True)
def test_places_where_adapters_cannot_be_written(
    group: dist.ProcessGroup, reference: Reference, tmp_path: Path
) -> None:
    if group.rank() == 0:
        (tmp_path / "file").write_text("")
        (tmp_path / "taken" / "adapter_config.json").mkdir(parents=True)
    dist.barrier(group)
    architecture = read_config(reference.folder).architecture
    model = load_pretrained(reference.folder, groups=groups_of(2, 1))
    add_lora_(model, LoraConfig(r=3, target_modules=("q_proj",)), architecture)
    for name in ("file/below", "taken"):
        error = raised_everywhere(group, partial(save_adapter, model, tmp_path / name, architecture))
        assert isinstance(error, ConfigError)
        assert str(tmp_path / name / "adapter_") in str(error)


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("reference", ["llama"], indirect=True)
def test_disk_full_when_adapters_are_written(group: dist.ProcessGroup, reference: Reference, tmp_path: Path) -> None:
    """The kernel refuses to write one of their two files: the earlier adapter stays, or there is none."""
    architecture = read_config(reference.folder).architecture
    for tp, pp in ((2, 1), (1, 2)):
        model = load_pretrained(reference.folder, groups=groups_of(tp, pp))
        add_lora_(model, LoraConfig(r=3, target_modules=("q_proj", "down_proj")), architecture)
        for replaces in (False, True):
            for name, base_model in (("adapter_model.safetensors", "b"), ("adapter_config.json", "b" * 100_000)):
                folder = tmp_path / f"{tp}x{pp}-{replaces}" / name
                save = partial(save_adapter, model, folder, architecture, base_model=base_model)
                if replaces:
                    save()
                    dist.barrier(group)
                before = {path.name: path.read_bytes() for path in folder.iterdir()} if replaces else {}
                dist.barrier(group)
                limit = 1000 if name == "adapter_model.safetensors" else 50_000
                with no_file_over(limit) if group.rank() == 0 else contextlib.nullcontext():
                    error = raised_everywhere(group, save)
                assert isinstance(error, ConfigError)
                assert str(error).startswith(f"cannot write '{folder / name}.new': File too large"), error
                dist.barrier(group)
                assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
                other = load_pretrained(reference.folder, groups=model.groups)
                if not replaces:
                    with pytest.raises(CheckpointError, match=r"no adapter at .*: it has no adapter_config\.json"):
                        load_adapter_(other, folder, architecture)
                    assert not list(lora_layers(other))
                # And once there is room again:
                save()
                dist.barrier(group)
                assert len(load_file(folder / "adapter_model.safetensors")) == 20
                load_adapter_(other, folder, architecture)


def test_weights_that_are_not_finite_are_not_written(make: Any, one_rank: Any, tmp_path: Path) -> None:
    folder, down = make("llama").folder, "model.layers.1.mlp.down_proj.weight"
    architecture = read_config(folder).architecture
    model: Any = load_pretrained(folder, groups=one_rank)
    weight = model.block.layers[1].mlp.linear_fc2.weight
    for value, dtype, message in (
        (torch.nan, None, "has values that are not finite"),
        (-torch.inf, torch.bfloat16, "has values that are not finite"),
        (1e6, torch.float16, r"has values of up to 1e\+06, which float16 cannot hold"),
    ):
        with torch.no_grad():
            weight[3, 4] = value
        with pytest.raises(CheckpointError, match=f"tensor '{down}' {message}"):
            save_pretrained(model, tmp_path / "new", source=folder, dtype=dtype)
        assert list(tmp_path.iterdir()) == []
    save_pretrained(model, tmp_path / "new", source=folder)
    with pytest.raises(CheckpointError, match=f"tensor '{down}' of .* which float16 cannot hold"):
        load_pretrained(tmp_path / "new", groups=one_rank, dtype=torch.float16)
    add_lora_(model, LoraConfig(r=2), architecture)
    adapter = next(param for name, param in model.named_parameters() if "lora_b" in name.lower())
    with torch.no_grad():
        adapter[0, 1] = torch.nan
    with pytest.raises(CheckpointError, match=r"tensor 'base_model\..*lora_B.weight' has values that are not finite"):
        save_adapter(model, tmp_path / "adapters", architecture)
    assert not (tmp_path / "adapters").exists()
