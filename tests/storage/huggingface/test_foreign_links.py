"""A link of a model's folder to a file of somebody else: its content reaches no result, and a line names the link."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hf_references import Reference

from shardwise.cli.main import main
from shardwise.core.errors import CheckpointError
from shardwise.core.topology import Groups
from shardwise.data.tokenizer import Tokenizer
from shardwise.run.processes.ranks import open_ranks
from shardwise.run.tasks.model_card import model_card
from shardwise.storage.huggingface import load_pretrained, read_config, save_pretrained
from shardwise.storage.huggingface.tensor_folder import TensorFolder, companion_files, own_file, write_chat_template

SECRET = "correct horse battery staple"
COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.json", "chat_template.jinja"),
    *("additional_chat_templates/tool_use.jinja", "generation_config.json", "preprocessor_config.json"),
    *("processor_config.json", "image_processor_config.json", "video_preprocessor_config.json"),
    *("README.md", "BASE_README.md", "LICENSE", "licence.txt", "NOTICE.md", "COPYING", "USE_POLICY.pdf"),
)
SNAPSHOT = Path("models--snow--Base-1B/snapshots/abc")


def linked(path: Path, target: Path | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    return path


def lay_private(root: Path) -> Path:
    """A file outside of every model's folder, of which each reader could use a part."""
    private = root / "private"
    private.mkdir(parents=True)
    (private / "key").write_text(f"---\nlicense: {SECRET}\n---\n{SECRET}")
    return private / "key"


# By name, a function that lays the link LICENSE in a folder, given a private file; then whether it is followed.
LINKS: dict[str, tuple[Callable[[Path, Path], object], bool]] = {
    "a file": (lambda folder, private: (folder / "LICENSE").write_text("x"), True),
    "within": (lambda folder, private: linked(folder / "LICENSE", "texts/licence"), True),
    "within, absolute": (lambda folder, private: linked(folder / "LICENSE", folder.absolute() / "texts/licence"), True),
    "within, by dots": (lambda folder, private: linked(folder / "LICENSE", f"../{folder.name}/texts/licence"), True),
    "within, by two links": (
        lambda folder, private: linked(folder / "LICENSE", linked(folder / "middle", "texts/licence").name),
        True,
    ),
    "outside": (lambda folder, private: linked(folder / "LICENSE", private), False),
    "outside, relative": (
        lambda folder, private: linked(folder / "LICENSE", os.path.relpath(private, folder.resolve())),
        False,
    ),
    "outside, by two links": (
        lambda folder, private: linked(folder / "LICENSE", linked(folder / "middle", private).name),
        False,
    ),
    "outside, by a folder's link": (
        lambda folder, private: linked(folder / "LICENSE", f"{linked(folder / 'sub', private.parent).name}/key"),
        False,
    ),
    "outside, in a folder whose name begins alike": (
        lambda folder, private: linked(folder / "LICENSE", shutil.copytree(private.parent, f"{folder}2") + "/key"),
        False,
    ),
    "of nothing": (lambda folder, private: linked(folder / "LICENSE", "gone"), False),
}


@pytest.mark.parametrize("place", [Path("base"), SNAPSHOT, Path("link to base")], ids=str)
@pytest.mark.parametrize("kind", LINKS)
def test_a_link_is_followed_within_the_folder(
    tmp_path: Path, kind: str, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    private, folder = lay_private(tmp_path), tmp_path / place
    if place.name == "link to base":
        linked(folder, tmp_path / "base")
        folder = tmp_path / "base"
    (folder / "texts").mkdir(parents=True)
    (folder / "texts/licence").write_text("x")
    lay, is_followed = LINKS[kind]
    lay(folder, private)
    found = {name: path.read_text() for path, name in companion_files(tmp_path / place)}
    assert found == ({"LICENSE": "x"} if is_followed else {})
    assert len(caplog.messages) == (not is_followed and kind != "of nothing")
    assert all(f"{tmp_path / place / 'LICENSE'} is a link to " in line for line in caplog.messages)


def test_a_snapshot_of_the_hub_has_its_files_in_blobs_of_the_same_model(tmp_path: Path) -> None:
    private, snapshot = lay_private(tmp_path), tmp_path / SNAPSHOT
    blobs = {}
    for model in ("models--snow--Base-1B", "models--snow--Other"):
        blobs[model] = tmp_path / model / "blobs" / "0123abcd"
        blobs[model].parent.mkdir(parents=True)
        blobs[model].write_text("x")
    linked(snapshot / "LICENSE", "../../blobs/0123abcd")
    linked(snapshot / "NOTICE", blobs["models--snow--Other"])
    linked(snapshot / "deeper/LICENSE", "../../../blobs/0123abcd")
    linked(tmp_path / "base/LICENSE", blobs["models--snow--Base-1B"])
    linked(tmp_path / "cache", tmp_path / "models--snow--Base-1B")
    for folder in (snapshot, snapshot / "deeper", tmp_path / "cache/snapshots/abc"):
        assert own_file(folder, "LICENSE") == blobs["models--snow--Base-1B"]
    assert own_file(snapshot, "NOTICE") is None
    assert own_file(tmp_path / "base", "LICENSE") is None
    # The stranger may have made the cache too.
    linked(tmp_path / "models--snow--False/blobs", private.parent)
    linked(tmp_path / "models--snow--False/snapshots/abc/LICENSE", "../../blobs/key")
    assert own_file(tmp_path / "models--snow--False/snapshots/abc", "LICENSE") is None


def strangers(source: Path, folder: Path, private: Path) -> Path:
    """A copy of a model in which all but the weights are links to files of the user, which readers can read."""
    folder.mkdir()
    shutil.copyfile(source / "model.safetensors", folder / "model.safetensors")
    for name in COMPANIONS:
        linked(folder / name, private)
    contents: dict[str, dict[str, Any]] = {
        "config.json": json.loads((source / "config.json").read_text()) | {"bos_token_id": 7},
        "generation_config.json": {"max_length": 999},
        "special_tokens_map.json": {},
        "added_tokens.json": {},
        "tokenizer_config.json": {"eos_token": "<|endoftext|>", "chat_template": SECRET},
    }
    Tokenizer.train(["größer"], 270).save(private.parent)
    for name, values in contents.items():
        # Each name in the last is a token, with its id.
        (private.parent / name).write_text(
            json.dumps(values | ({"note": SECRET} if name != "added_tokens.json" else {}))
        )
    for name in (*contents, "tokenizer.json"):
        (folder / name).unlink(missing_ok=True)
        linked(folder / name, private.parent / name)
    return folder


def with_the_secret(result: Path) -> list[str]:
    return [path.name for path in result.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_nothing_that_is_written_has_the_content_of_a_foreign_link(
    make: Callable[[str], Reference], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private = lay_private(tmp_path)
    folder = strangers(make("llama").folder, tmp_path / "base", private)
    assert main(["import-hf", str(folder), "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().err
    assert all(f"shardwise import-hf: {folder / name} is a link" in said for name in ("config.json", *COMPANIONS))
    assert "the checkpoint has no tokenizer" in said
    assert main(["export-hf", str(tmp_path / "run"), "--out", str(tmp_path / "back")]) == 0
    clean = tmp_path / "clean"
    shutil.copytree(make("llama").folder, clean)
    with open_ranks("cpu"):
        model = load_pretrained(folder, groups=Groups(tp=dist.group.WORLD))
        for number, options in enumerate(({}, {"card": "mine"}, {"adapters": folder})):
            save_pretrained(model, tmp_path / f"saved{number}", source=folder, **options)
        save_pretrained(model, tmp_path / "merged", source=clean, adapters=folder)
    for name in ("run", "back", "saved0", "saved1", "saved2", "merged"):
        assert with_the_secret(tmp_path / name) == [], name
    assert read_config(tmp_path / "back").description == read_config(folder).description
    assert json.loads((tmp_path / "back/config.json").read_text()).get("bos_token_id") != 7
    (tmp_path / "written").mkdir()
    write_chat_template(tmp_path / "written", clean, folder)
    assert list((tmp_path / "written").iterdir()) == []


def test_a_card_quotes_no_foreign_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.run.settings import FinetuneSettings

    folder = tmp_path / "base"
    linked(folder / "README.md", lay_private(tmp_path))
    settings = FinetuneSettings(base=str(folder), data=("x",))
    card = model_card(settings, tmp_path / "out", model_name="m", layout={}, data="x", base=folder)
    assert SECRET not in card
    assert "BASE_README.md" not in card


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--lora-rank", "2")], ids=str)
def test_a_tuned_folder_has_no_content_of_a_foreign_link(
    make: Callable[[str], Reference], tmp_path: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = strangers(make("llama").folder, tmp_path / "base", lay_private(tmp_path))
    (tmp_path / "text.txt").write_text("Snow is white. " * 50)
    out = tmp_path / "tuned"
    run = ["finetune", str(folder), "--data", str(tmp_path / "text.txt"), "--out", str(out), "--training.steps", "1"]
    assert main([*run, "--model.sequence-length", "16", "--training.global-batch-size", "2", *options]) == 0
    assert with_the_secret(out) == []
    said = capsys.readouterr().err
    # Copied into the run's folder, its checkpoint and the result, and named once.
    assert all(said.count(f"shardwise finetune: {folder / name} is a link") == 1 for name in COMPANIONS)
    if options:
        shutil.copyfile(make("llama").folder / "config.json", tmp_path / "config.json")
        (folder / "config.json").unlink()
        (tmp_path / "config.json").rename(folder / "config.json")
        (out / "README.md").unlink()
        linked(out / "README.md", tmp_path / "private/key")
        assert main(["export-hf", str(out), "--merge", "--out", str(tmp_path / "merged")]) == 0
        assert with_the_secret(tmp_path / "merged") == []


def test_weights_that_are_a_link_to_nothing_are_named(tmp_path):
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a link that leads nowhere"):
        TensorFolder(tmp_path)
