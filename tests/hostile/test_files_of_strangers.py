"""Files that a stranger made: the right tensors, or one line that names the file. Never a hang, never much memory."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from made_files import Folders, Tensors, mutate, rewrite, strange_kinds

from shardwise.cli.arguments import parse_command
from shardwise.cli.training import TrainArguments
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.run.processes.ranks import open_ranks
from shardwise.storage.huggingface import config_from_json
from shardwise.storage.huggingface.architectures import ARCHITECTURES

_MOST_BYTES = 200 << 20


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with open_ranks("cpu"):
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    Folders(root)
    return root


@pytest.fixture
def folders(made: Path, tmp_path: Path) -> Folders:
    shutil.copytree(made, tmp_path / "copy")
    folders = object.__new__(Folders)
    folders.step = tmp_path / "copy" / "run" / "checkpoints" / "step-00000003"
    folders.model, folders.adapter = tmp_path / "copy" / "model", tmp_path / "copy" / "adapter"
    return folders


@contextmanager
def little_memory() -> Iterator[None]:
    """Within, this process gets no more than ``_MOST_BYTES`` more than it has."""
    held = re.search(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert held is not None
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(held[1]) * 1024 + _MOST_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def outcome(read: Callable[[], Tensors]) -> Tensors | str:
    """What is read, or the one line that says why not."""
    try:
        return read()
    except ShardwiseError as error:
        line = str(error)
        assert "\n" not in line
        assert len(line) < 1000, line
        # An error of Python's or PyTorch's own that somebody caught and passed on.
        assert not re.search(r"\b(?!Shardwise)[A-Z]\w+(Error|Exception)\b", line), line
        return line


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


READERS = {"step": "run/checkpoints/step-00000003", "model": "model", "adapter": "adapter"}


def _read(folders: Folders, what: str) -> Callable[[], Tensors]:
    read: Callable[[], Tensors] = getattr(folders, f"read_{what}")
    return read


@pytest.mark.parametrize("what", READERS)
def test_every_file_by_every_strange_kind(folders: Folders, what: str) -> None:
    folder: Path = getattr(folders, what)
    read = _read(folders, what)
    expected = read()
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) > 1
    for name in names:
        path, aside = folder / name, folder.parent / "aside"
        path.rename(aside)
        for kind, put in strange_kinds().items():
            put(path)
            with little_memory():
                found = outcome(read)
            assert isinstance(found, str), (name, kind)
            assert name in found, (name, kind, found)
            path.rmdir() if path.is_dir() else path.unlink()
        aside.rename(path)
    assert_same(read(), expected)


@pytest.mark.sample(2)
@pytest.mark.parametrize("what", READERS)
def test_one_value_changed(folders: Folders, what: str) -> None:
    folder: Path = getattr(folders, what)
    read = _read(folders, what)
    expected = read()
    files = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in (".json", ".safetensors") and not path.name.startswith("tokenizer")
    ]
    draw = random.Random(0)
    refused = 0
    with little_memory():
        for _round_number in range(150):
            path = draw.choice(files)
            before = path.read_bytes()
            rewrite(path, lambda value: mutate(value, draw))
            if path.suffix == ".safetensors" and what == "step":
                # So that the header is judged and not its file's checksum alone.
                _record(folder, path)
            found = outcome(read)
            if isinstance(found, str):
                refused += 1
            elif path.name == "meta.json" or (path.suffix == ".safetensors" and what == "step"):
                assert_same(found, expected)
            path.write_bytes(before)
            if what == "step" and path.suffix == ".safetensors":
                _record(folder, path)
    assert refused > 75
    assert_same(read(), expected)


def _record(folder: Path, path: Path) -> None:
    """Have the manifest say what the file is now."""
    content = path.read_bytes()
    record = {"size": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    rewrite(folder / "meta.json", lambda meta: meta["files"].update({path.name: record}))


NESTED = b"[" * 1_000_000 + b"]" * 1_000_000
STRANGE_TEXTS = {
    "nested": b'{"x": ' + NESTED + b"}",
    "open": b'{"a":' * 1_000_000,
    "twice": b'{"model_type": "llama", "model_type": "gpt2"}',
    "infinite": b'{"version": 1e999}',
    "quotes": b'{"' + b'\\"' * 1_000_000,
    "empty": b"",
}


@pytest.mark.parametrize("text", STRANGE_TEXTS)
def test_json_that_no_program_wrote(folders: Folders, text: str) -> None:
    content = STRANGE_TEXTS[text]
    for what in READERS:
        folder: Path = getattr(folders, what)
        for path in sorted(folder.glob("*.json")):
            before = path.read_bytes()
            path.write_bytes(content)
            with little_memory():
                found = outcome(_read(folders, what))
            assert isinstance(found, str), path.name
            assert path.name in found, found
            path.write_bytes(before)
        path = min(folder.glob("*.safetensors"))
        path.write_bytes(len(content).to_bytes(8, "little") + content)
        if what == "step":
            _record(folder, path)
        with little_memory():
            found = outcome(_read(folders, what))
        assert isinstance(found, str), path.name
        assert path.name in found, found


# Model types that transformers computes.
BY_PLAN = ("arcee", "cohere2", "dots1", "ernie4_5", "glm")


@pytest.mark.parametrize("model_type", sorted({*ARCHITECTURES, *BY_PLAN}))
def test_sizes_that_no_model_has_are_named_before_anything_is_made_of_them(model_type: str) -> None:
    """No list of all layers, and no function of a size."""
    architecture = ARCHITECTURES.get(model_type)
    names = [architecture.settings[each].name for each in ("num_layers", "hidden_size")] if architecture else []
    for name in names or ["num_hidden_layers", "hidden_size"]:
        for value in (10**12, 2**70, *((-1, 0) if architecture else ())):
            with little_memory(), pytest.raises(ConfigError, match=rf"\b{name} is {value}; it must be from"):
                # Without embeddings of each layer, which Gemma 4 has by default, ours is not taken.
                config_from_json({"model_type": model_type, "hidden_size_per_layer_input": 0, name: value})


def test_settings_of_a_stranger(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"

    def refused() -> str:
        with little_memory(), pytest.raises(ConfigError, match=re.escape(str(path))) as info:
            parse_command(TrainArguments, ["--config", str(path)], "shardwise train")
        return str(info.value)

    for kind, put in strange_kinds().items():
        put(path)
        assert len(refused()) < 300, kind
        path.rmdir() if path.is_dir() else path.unlink()
    path.write_text("data = " + "[" * 100_000)
    assert "nested more than" in refused()
    path.write_text("data" + ".a" * 100_000 + " = 1")
    assert "nested more than" in refused()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda meta: meta.update(settings=[1]), "settings is [1]; it must be an object"),
        (lambda meta: meta["settings"].update(model=None), ": model is None; it must be a table of settings"),
        (lambda meta: meta["settings"]["model"].update(num_layers=1e9), "model.num_layers is 1000000000.0"),
        (lambda meta: meta["settings"]["model"].update(hidden_size=2**40), "1099511627776"),
        (lambda meta: meta["settings"]["model"].update(hidden_size=64), "has shape"),
        (lambda meta: meta["settings"]["model"].update(num_layers=9_999), "ask for 9999 layers"),
        (lambda meta: meta["settings"]["model"].update(ffn_hidden_size=2**20), "has shape"),
    ],
)
def test_what_a_checkpoint_says_of_its_model(folders: Folders, change: Callable[[dict], object], said: str) -> None:
    rewrite(folders.step / "meta.json", lambda value: change(value["meta"]))
    with little_memory():
        found = outcome(folders.read_step)
    assert isinstance(found, str)
    assert said in found
    assert str(folders.step) in found


def test_one_chunk_twice_and_a_step_of_another_name(folders: Folders) -> None:
    def twice(manifest: dict) -> None:
        tensor = next(tensor for tensor in manifest["tensors"].values() if len(tensor["shape"]) == 2)
        chunk = tensor["chunks"][0]
        rows, columns = chunk["sizes"]
        assert rows % 2 == 0
        # The first half of the rows, two times: as many elements as there must be.
        tensor["chunks"] = [chunk | {"sizes": [rows // 2, columns]}] * 2

    path = folders.step / "meta.json"
    before = path.read_bytes()
    rewrite(path, twice)
    assert "has indices that chunks[0] has too" in str(outcome(folders.read_step))
    path.write_bytes(before)
    rewrite(path, lambda manifest: manifest.update(step=4))
    assert "is of step 4" in str(outcome(folders.read_step))
    os.rename(folders.step, folders.step.with_name("step-00000004"))
    folders.step = folders.step.with_name("step-00000004")
    assert json.loads(before)["step"] == 3
    assert isinstance(outcome(folders.read_step), dict)
