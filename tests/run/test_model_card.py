"""What stands beside the weights that are left: the card of what was trained, and the base model's companion files."""

from __future__ import annotations

import json
import os
import shutil
import sys

import pytest
from storage.adapters.tiny_models import save_model

from shardwise.cli.main import main
from shardwise.data.tokenizer import ChatTemplate, Tokenizer
from shardwise.run.tasks.model_card import _licence_of, base_name
from shardwise.storage.huggingface.tensor_folder import companion_files, write_chat_template

TEXT = "Snow is white, grass is green, and the sky is blue above all of them. " * 20
README = "---\nlicense: other\nlicense_name: snow-1.0\nlanguage: en\n---\n# The base | model\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    base = folder / "models--snow--Base-1B" / "snapshots" / "abc"
    save_model("llama", base, vocab_size=301)
    Tokenizer.train([TEXT], 280).save(base)
    (folder / "text.txt").write_text(TEXT)
    # As the hub's cache has its files.
    blob = base.parents[1] / "blobs" / "0123abcd"
    blob.parent.mkdir()
    blob.write_text("You may.")
    (base / "LICENSE.txt").symlink_to("../../blobs/0123abcd")
    (base / "README.md").write_text(README)
    (base / "preprocessor_config.json").write_text("{}")
    (base / "LICENSE.safetensors").write_text("weights")
    (base / "broken.md").symlink_to(folder / "nowhere")
    return folder


def base_of(folder):
    return folder / "models--snow--Base-1B" / "snapshots" / "abc"


def finetune(folder, out, *more):
    sizes = ("--model.sequence-length", "16", "--training.steps", "2", "--training.eval-every", "1")
    arguments = ["finetune", str(base_of(folder)), "--data", str(folder / "text.txt"), "--out", str(out), *sizes, *more]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["shardwise", *arguments])
        assert main(arguments) == 0


def card_of(out):
    from huggingface_hub import ModelCard

    return ModelCard.load(out / "README.md", ignore_metadata_errors=False)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--lora-rank", "2"), ("--lora-rank", "2", "--lora-merge")], ids=str)
def test_a_run_leaves_a_card_that_the_hub_reads(folder, tmp_path, options, capsys):
    out, is_adapter = tmp_path / "tuned", options == ("--lora-rank", "2")
    finetune(folder, out, *options)
    card = card_of(out)
    assert card.data.base_model == "snow/Base-1B"
    assert card.data.library_name == ("peft" if is_adapter else "transformers")
    assert (card.data.license, card.data.license_name) == ("other", "snow-1.0")
    assert {"shardwise", f"base_model:{'adapter' if is_adapter else 'finetune'}:snow/Base-1B"} <= set(card.data.tags)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert f"{rows[0]['loss']:.4f} in the first step, {rows[-1]['loss']:.4f} in the last" in card.text
    assert f"{rows[-1]['held_out_bits_per_byte']:.4f} at the end" in card.text
    assert "| `training.steps` | 2 |" in card.text
    assert "shardwise finetune " in card.text
    assert "| ranks | tp 1, pp 1, dp 1 |" in card.text
    assert (out / "BASE_README.md").read_text() == README
    assert (out / "LICENSE.txt").read_text() == "You may."
    assert (out / "preprocessor_config.json").exists()
    assert not list(out.glob("LICENSE.safetensors"))
    if is_adapter:
        merged = tmp_path / "merged"
        (out / "chat_template.jinja").write_text("{{ messages }}")
        assert main(["export-hf", str(out), "--merge", "--out", str(merged)]) == 0
        data = card_of(merged).data
        assert data.library_name == "transformers"
        assert "base_model:finetune:snow/Base-1B" in data.tags
        assert (merged / "BASE_README.md").read_text() == README
        assert (merged / "chat_template.jinja").read_text() == "{{ messages }}"


@pytest.mark.slow
def test_what_is_imported_keeps_its_readme_and_licence(folder, tmp_path, capsys):
    base = base_of(folder)
    assert main(["import-hf", str(base), "--out", str(tmp_path / "imported")]) == 0
    assert main(["export-hf", str(tmp_path / "imported"), "--out", str(tmp_path / "exported")]) == 0
    for name in ("README.md", "LICENSE.txt", "preprocessor_config.json"):
        copy = tmp_path / "exported" / name
        assert copy.read_bytes() == (base / name).read_bytes()
        assert not copy.is_symlink()
    assert not (tmp_path / "exported" / "LICENSE.safetensors").exists()


@pytest.mark.slow
def test_the_export_of_a_new_model_has_a_card(folder, tmp_path, capsys):
    sizes = (
        "--model.hidden-size",
        "16",
        "--model.num-heads",
        "2",
        "--model.num-layers",
        "1",
        "--model.vocab-size",
        "270",
    )
    short = ("--training.steps", "2", "--model.sequence-length", "16", "--training.global-batch-size", "2")
    # The name of a run may begin as that of a checkpoint.
    run, saves = tmp_path / "step-7", ("--training.save-every", "1", "--training.no-asynchronous-saves")
    assert main(["train", "--data", str(folder / "text.txt"), "--out", str(run), *sizes, *short, *saves]) == 0
    for source, steps in ((run, 2), (run / "checkpoints" / "step-00000001", 1)):
        assert main(["export-hf", str(source), "--out", str(tmp_path / f"exported-{steps}")]) == 0
        card = card_of(tmp_path / f"exported-{steps}")
        assert card.data.library_name == "transformers"
        assert "text.txt" in card.text
        assert f"| steps | {steps} |" in card.text
    (tmp_path / "linked").symlink_to(run / "checkpoints" / "step-00000001")
    for source in (tmp_path / "linked", run / "checkpoints" / "step-00000001"):
        if source.name != "linked":
            # The checkpoints may be on another disk, behind a link.
            (run / "checkpoints").rename(tmp_path / "elsewhere")
            (run / "checkpoints").symlink_to(tmp_path / "elsewhere")
        shutil.rmtree(tmp_path / "exported-1")
        assert main(["export-hf", str(source), "--out", str(tmp_path / "exported-1")]) == 0
        assert "| steps | 1 |" in card_of(tmp_path / "exported-1").text


def test_files_of_adapters_replace_those_of_the_model(tmp_path):
    base, adapters = tmp_path / "base", tmp_path / "adapters"
    tokenizer = {"tokenizer.json": "{}", "tokenizer_config.json": "{}"}
    template = {"chat_template.jinja": "x"}
    own = {**tokenizer, **template, "generation_config.json": "{}", "processor_config.json": "{}", "vocab.json": "{}"}
    inline = {**tokenizer, "tokenizer_config.json": '{"chat_template": "y"}'}
    for files, replaced in (
        ({}, set()),
        (template, set(template)),
        ({"generation_config.json": "{}"}, {"generation_config.json"}),
        (tokenizer, set(tokenizer)),
        (inline, set(tokenizer)),
    ):
        for folder, content in ((base, own), (adapters, files)):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for name, text in content.items():
                (folder / name).write_text(text)
        found = {name: path.parent for path, name in companion_files(base, adapters=adapters)}
        gone = {"vocab.json"} if "tokenizer.json" in files else set()
        assert found == {name: adapters if name in replaced else base for name in own if name not in gone}


@pytest.mark.parametrize("of_base", ["file", "inline"])
@pytest.mark.parametrize("of_adapters", [None, "null", "inline", "without tokenizer.json", "file", "file for tools"])
def test_a_merged_model_has_the_template_of_its_adapters_or_of_its_model(tmp_path, of_base, of_adapters):
    def lay(folder, source, kind):
        folder.mkdir()
        config = {} if kind in (None, "file", "file for tools") else {"chat_template": source}
        if kind != "without tokenizer.json":
            (folder / "tokenizer.json").write_text("{}")
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        if kind in ("file", "file for tools"):
            (folder / "chat_template.jinja").write_text(source)
        if kind == "file for tools":
            (folder / "additional_chat_templates").mkdir()
            (folder / "additional_chat_templates" / "tool_use.jinja").write_text(source + " with tools")

    base, adapters, merged = tmp_path / "base", tmp_path / "adapters", tmp_path / "merged"
    lay(base, "of the base", of_base)
    lay(adapters, None if of_adapters == "null" else "of the adapters", of_adapters)
    merged.mkdir()
    for path, name in companion_files(base, adapters=adapters):
        (merged / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, merged / name)
    write_chat_template(merged, base, adapters)
    expected = "of the base" if of_adapters in (None, "null") else "of the adapters"
    found = ChatTemplate.load(merged)
    assert found is not None
    assert found.source == expected
    assert found.source_for(True) == expected + " with tools" * (of_adapters == "file for tools")


def test_which_files_are_companions_and_whose_name_a_folder_tells(folder, tmp_path):
    base = base_of(folder)
    found = {name for _, name in companion_files(base, beside_card=True)}
    assert {"tokenizer.json", "LICENSE.txt", "BASE_README.md", "preprocessor_config.json"} <= found
    assert not {"README.md", "LICENSE.safetensors", "config.json", "model.safetensors", "broken.md"} & found
    assert base_name(base) == "snow/Base-1B"
    assert base_name(tmp_path / "mine") == "mine"


@pytest.mark.parametrize(
    ("readme", "expected"),
    [
        ("---\nlicense: mit\n---\n", {"license": "mit"}),
        ("---  \r\n\nlicense: mit\r\nlicense_link: x\r\n---\r\ntext", {"license": "mit", "license_link": "x"}),
        ("---\nlicense: mit\n---", {"license": "mit"}),
        ("---\nlicense: mit\n", {}),
        ("license: mit\n---\n", {}),
        ("---" + "\n" * 2_000_000, {}),
        ("---\n" + "license:" + " " * 2_000_000 + "\n---\n", {}),
        ("---\n" + "license: \n" * 200_000, {}),
        (None, {}),
    ],
    ids=range(9),
)  # fmt: skip
def test_licences_of_strange_readmes(tmp_path, readme, expected):
    """Each line is read once: a readme of blank lines took minutes. A named pipe is not opened."""
    if readme is None:
        os.mkfifo(tmp_path / "README.md")
    else:
        (tmp_path / "README.md").write_text(readme, newline="")
    assert _licence_of(tmp_path) == expected
