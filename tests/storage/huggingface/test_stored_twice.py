"""A tensor that a folder stores twice: under two names as a tied weight, or under one name in two files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal, assert_close_to
from hf_references import GPT_LIKE, Reference, groups_of, layouts, transformers_model
from safetensors.torch import load_file, save_file
from test_bad_folders import copy, raised_everywhere
from torch import Tensor

from shardwise.cli.main import main
from shardwise.core.errors import CheckpointError
from shardwise.storage.huggingface import load_pretrained, pretrained, read_config, save_pretrained
from shardwise.storage.huggingface.pretrained import PretrainedFolder

IDS = torch.arange(20).view(2, 10) % 49 + 1
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
DOWN = "model.layers.1.mlp.down_proj.weight"


def with_head(folder: Path, change: Callable[[Tensor], object]) -> tuple[str, str]:
    """Store the output layer of a tied model too, changed; return its name and the embedding's."""
    path, architecture = folder / "model.safetensors", read_config(folder).architecture
    ((head, embedding),) = architecture.tied.items()
    tensors = load_file(path)
    tensors[head] = tensors[embedding].clone()
    change(tensors[head])
    save_file(tensors, path, {"format": "pt"})
    return head, embedding


def theirs(folder: Path) -> Tensor:
    import transformers

    options = {"attn_implementation": "eager"}
    if read_config(folder).description.experts is not None:
        options["experts_implementation"] = "eager"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    with torch.no_grad():
        logits: Tensor = model.eval()(IDS).logits
    return logits


def ours(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model.eval()(IDS).transpose(0, 1)
    return logits


def add_one(row: int, column: int = 0) -> Callable[[Tensor], object]:
    return lambda head: head[row, column].add_(1)


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "llama_tied",
        *(
            pytest.param(name, marks=[pytest.mark.slow, *([pytest.mark.matrix] if place % 3 else [])])
            for place, name in enumerate(GPT_LIKE)
            if name not in ("gpt2", "llama_tied")
        ),
    ],
)
def test_a_head_that_differs_from_the_embedding_is_another_weight(
    tmp_path: Path, one_rank: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers, of each architecture; and it is written so."""
    folder, out = tmp_path / "model", tmp_path / "out"
    transformers_model(name, tie_word_embeddings=True).save_pretrained(folder)
    caplog.clear()
    assert load_pretrained(folder, groups=one_rank).share_embeddings_and_output_weights
    assert [each for each in caplog.messages if "tie" in each] == []
    head, embedding = with_head(folder, add_one(50))
    expected = theirs(folder)
    model = load_pretrained(folder, groups=one_rank)
    assert_close_to(ours(model), expected, rtol_of_norm=2e-5)
    (line,) = [each for each in caplog.messages if each.startswith(str(folder))]
    assert f"tensors '{embedding}' and '{head}', which differ" in line
    assert "(tie_word_embeddings)" in line
    save_pretrained(model, out, source=folder)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    assert_close_to(theirs(out), expected, rtol_of_norm=1e-6)


@pytest.mark.slow
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("reference", ["llama_tied"], indirect=True)
def test_the_verdict_is_that_of_one_rank(group: dist.ProcessGroup, reference: Reference, tmp_path: Path) -> None:
    """One element of any row, in the middle and at both ends of the ranks' uneven parts of 1003 rows."""
    for number, row in enumerate((0, 17, 250, 334, 335, 501, 502, 751, 1002, None)):
        folder = copy(
            reference.folder,
            tmp_path / f"{number}",
            group,
            lambda folder, row=row: with_head(folder, (lambda head: None) if row is None else add_one(row, 23)),
        )
        head = load_file(folder / "model.safetensors")["lm_head.weight"]
        for tp, pp in layouts(group.size()):
            groups = groups_of(tp, pp)
            model = load_pretrained(folder, groups=groups)
            assert model.share_embeddings_and_output_weights is (row is None)
            if row is not None and model.post_process:
                shard = model.sharded_state_dict()["output_layer.weight"]
                assert_bit_equal(shard.data, shard.layout.take(head, groups.tp.rank()))
            dist.barrier(group)


def test_a_tied_folder_with_another_head_trains_and_imports_untied(
    make: Callable[[str], Reference], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "base"
    shutil.copytree(make("llama_tied").folder, folder)
    with_head(folder, add_one(500))
    assert main(["import-hf", str(folder), "--out", str(tmp_path / "run")]) == 0
    assert f"shardwise import-hf: {folder} has tensors 'model.embed_tokens.weight' and" in capsys.readouterr().err
    assert main(["export-hf", str(tmp_path / "run"), "--out", str(tmp_path / "back")]) == 0
    for written in (tmp_path / "back", *(tmp_path / "run/checkpoints").iterdir()):
        assert json.loads((written / "config.json").read_text())["tie_word_embeddings"] is False
    expected = load_file(folder / "model.safetensors")
    found = load_file(tmp_path / "back/model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert_bit_equal(tensor, expected[name], name=name)


def test_a_folder_that_is_open_is_not_compared_again(
    make: Callable[[str], Reference], tmp_path: Path, one_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, compared = tmp_path / "model", []
    shutil.copytree(make("llama_tied").folder, folder)
    with_head(folder, add_one(500))
    same_values = pretrained.same_values
    monkeypatch.setattr(pretrained, "same_values", lambda *args: compared.append(args) or same_values(*args))
    source = PretrainedFolder(folder)
    size = source.description.vocab_size
    for vocab_size in (size + 3, None):
        model = load_pretrained(source, groups=one_rank, vocab_size=vocab_size)
        assert not model.share_embeddings_and_output_weights
        assert model.vocab_size == (vocab_size or size)
    assert len(compared) == 1


def test_bert_has_no_other_head(make: Callable[[str], Reference], tmp_path: Path) -> None:
    for name, changed in (("weight", "cls.predictions.decoder.weight"), ("bias", "cls.predictions.decoder.bias")):
        folder = tmp_path / name
        shutil.copytree(make("bert").folder, folder)
        tensors = load_file(folder / "model.safetensors")
        originals = {"weight": "bert.embeddings.word_embeddings.weight", "bias": "cls.predictions.bias"}
        tensors[changed] = tensors[originals[name]].clone()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        assert PretrainedFolder(folder).description.share_embeddings_and_output_weights
        tensors[changed][33] += 1
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(
            CheckpointError, match=f"'{originals[name]}' and '{changed}', which differ.* every bert model"
        ):
            PretrainedFolder(folder)


def lay_twice(folder: Path, kind: str, other: Callable[[Tensor], Tensor]) -> Path:
    """Store a tensor of a model in two files, the second time with ``other`` values; return the file with the copy."""
    stored = load_file(folder / "model.safetensors")
    names = sorted(stored)
    halves = {SHARDS[0]: names[: len(names) // 2], SHARDS[1]: names[len(names) // 2 :]}
    index = {name: file for file, part in halves.items() for name in part}
    copied = {DOWN: other(stored[DOWN])}
    if kind.startswith("shards"):
        (folder / "model.safetensors").unlink()
        other_shard = next(file for file in SHARDS if file != index[DOWN])
        for file, part in halves.items():
            held = {name: stored[name] for name in part} | (copied if kind == "shards" and file == other_shard else {})
            save_file(held, folder / file, {"format": "pt"})
        if kind == "shards":
            (folder / INDEX).write_text(json.dumps({"weight_map": index}))
            return folder / other_shard
        (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    elif kind == "whole and shards":
        for file, part in halves.items():
            save_file({name: stored[name] for name in part} | {DOWN: copied[DOWN]}, folder / file, {"format": "pt"})
        (folder / INDEX).write_text(json.dumps({"weight_map": index}))
        return folder / SHARDS[0]
    save_file(copied, folder / "more.safetensors", {"format": "pt"})
    return folder / "more.safetensors"


KINDS = ["shards", "shards and more", "whole and shards", "whole and more"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_in_another_file(
    make: Callable[[str], Reference], tmp_path: Path, one_rank: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = make("llama").folder
    expected = load_pretrained(source, groups=one_rank).state_dict()
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "equal": torch.clone,
        "rounded": lambda tensor: tensor.bfloat16(),
        "differs": lambda tensor: tensor + (torch.arange(37) == 36),
        "another shape": lambda tensor: tensor[:5].clone(),
        "another dtype": lambda tensor: tensor.int(),
    }
    for name, change in changes.items():
        folder = tmp_path / name
        shutil.copytree(source, folder)
        other = lay_twice(folder, kind, change)
        caplog.clear()
        is_other = name not in ("equal", "rounded")
        if is_other and kind == "whole and more":
            with pytest.raises(CheckpointError, match=f"model.safetensors and .*more.safetensors have .*'{DOWN}'"):
                load_pretrained(folder, groups=one_rank)
            continue
        for key, param in load_pretrained(folder, groups=one_rank).state_dict().items():
            assert_bit_equal(param, expected[key], name=key)
        lines = [line for line in caplog.messages if "other values" in line]
        assert bool(lines) is is_other, caplog.messages
        assert all(DOWN in line and "which is read" in line for line in lines)
        assert not is_other or str(other) in lines[0]


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "damaged.safetensors", "folder.safetensors"])
def test_files_that_are_no_copies(make: Callable[[str], Reference], tmp_path: Path, one_rank: Any, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(make("llama").folder, folder)
    if name.startswith("adapter"):
        save_file({DOWN: torch.zeros(2)}, folder / name)
    elif name.startswith("damaged"):
        (folder / name).write_bytes(b"no tensors")
    else:
        (folder / name).mkdir()
    assert load_pretrained(folder, groups=one_rank).config.num_layers == 5


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("reference", ["llama"], indirect=True)
def test_two_copies_without_an_index_are_one_error_on_every_rank(
    group: dist.ProcessGroup, reference: Reference, tmp_path: Path
) -> None:
    """Each rank compares some of the copies; the last one differs."""

    def lay(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        stored["model.norm.weight"] += 1
        save_file(stored, folder / "more.safetensors")

    folder = copy(reference.folder, tmp_path / "model", group, lay)
    for tp, pp in layouts(2):
        error = raised_everywhere(group, lambda tp=tp, pp=pp: load_pretrained(folder, groups=groups_of(tp, pp)))
        assert "have different values of tensor 'model.norm.weight', and no model.safetensors.index.json" in str(error)
