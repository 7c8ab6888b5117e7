"""Everything that ``shardwise generate`` may be given computes what it does in transformers and peft."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_close_to
from safetensors.torch import load_file, save_file
from storage.adapters.tiny_models import read_adapters, save_model, with_adapters

from shardwise.cli.main import main
from shardwise.core.errors import CheckpointError, ConfigError, DataError
from shardwise.data.tokenizer import Tokenizer
from shardwise.run.commands.opened_model import open_model
from shardwise.run.processes.ranks import Ranks
from shardwise.storage.checkpoint import latest
from shardwise.storage.huggingface.pretrained import PretrainedFolder, no_folder

TEXT = "def eins(zwei):\n    return zwei  # größer 中文\n"
VOCABULARY = 301
# Both sides compute in fp32, in other orders.
CLOSE = 2e-6
ADAPTER = {"r": 3, "lora_alpha": 5, "targets": ["q_proj", "v_proj", "down_proj"]}


def ids() -> torch.Tensor:
    return torch.randint(VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in ``base``, adapters by peft in ``adapter``, and logits of both."""
    import transformers

    root = tmp_path_factory.mktemp("models")
    save_model("llama", root / "base", vocab_size=VOCABULARY)
    Tokenizer.train([TEXT], 290).save(root / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "base").eval()
    with torch.no_grad():
        expected = {"base": model(ids()).logits[0].clone()}
        adapted = with_adapters(model, **ADAPTER)
        adapted.save_pretrained(root / "adapter")
        expected["adapter"] = adapted(ids()).logits[0].clone()
    config = json.loads((root / "adapter/adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(root / "base")
    (root / "adapter/adapter_config.json").write_text(json.dumps(config))
    save_file(expected, root / "expected")
    return root


@pytest.fixture(scope="module")
def everything(base: Path) -> Path:
    """Beside those: an import, and what finetune and train leave."""
    import transformers

    (base / "text.txt").write_text(TEXT * 20)
    text = ["--data", str(base / "text.txt"), "--device", "cpu", "--training.steps", "2"]
    finetune = [
        "finetune",
        str(base / "base"),
        *text,
        "--model.sequence-length",
        "8",
        "--optimizer.learning-rate",
        "0.1",
    ]
    train = ["--model.num-layers", "1", "--model.hidden-size", "24", "--model.vocab-size", "270"]
    sizes = ["--model.num-heads", "2", "--model.ffn-hidden-size", "20", "--model.sequence-length", "16"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_CACHE", str(base / "cache"))
        assert main(["import-hf", str(base / "base"), "--out", str(base / "run")]) == 0
        assert main([*finetune, "--out", str(base / "tuned")]) == 0
        assert main([*finetune, "--out", str(base / "lora"), "--lora-rank", "2"]) == 0
        assert main(["train", *text, *train, *sizes, "--out", str(base / "trained")]) == 0
        assert main(["export-hf", str(base / "trained"), "--out", str(base / "exported")]) == 0
    expected = load_file(base / "expected")
    with torch.no_grad():
        tuned = transformers.AutoModelForCausalLM.from_pretrained(base / "tuned").eval()
        expected["tuned"] = tuned(ids()).logits[0].clone()
        plain = transformers.AutoModelForCausalLM.from_pretrained(base / "base").eval()
        expected["lora"] = read_adapters(plain, base / "lora")(ids()).logits[0].clone()
        exported = transformers.AutoModelForCausalLM.from_pretrained(base / "exported").eval()
        expected["trained"] = exported(ids() % 257).logits[0].clone()
        adapted = with_adapters(exported, **ADAPTER)
        adapted.save_pretrained(base / "adapter of the trained")
        expected["trained with adapter"] = adapted(ids() % 257).logits[0].clone()
    save_file(expected, base / "expected")
    return base


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.ranks(1, 2)
def test_logits_are_those_of_transformers_and_peft(group, everything):
    newest = latest(everything / "run" / "checkpoints")
    expected = load_file(everything / "expected")
    ranks = Ranks(group.rank(), group.rank(), group.size(), torch.device("cpu"))
    for name, path, adapter in (
        ("base", "base", None),
        ("base", "run", None),
        ("base", newest, None),
        ("adapter", "adapter", None),
        ("adapter", "base", "adapter"),
        ("adapter", "run", "adapter"),
        ("tuned", "tuned", None),
        ("lora", "lora", None),
        ("lora", "base", "lora"),
        ("lora", "run", "lora"),
        ("trained", "trained", None),
        ("trained", "exported", None),
        ("trained with adapter", "trained", "adapter of the trained"),
        ("trained with adapter", "exported", "adapter of the trained"),
    ):
        opened = open_model(everything / path, None if adapter is None else everything / adapter)
        assert opened.tokenizer is not None
        model = opened.load_model(ranks).eval()
        model.parallel_output = False
        with torch.no_grad():
            logits = model(ids() % 257 if name.startswith("trained") else ids())[:, 0]
        assert_close_to(logits, expected[name], rtol_of_norm=CLOSE, name=f"{path} {adapter}")
    different = [expected[name] for name in ("base", "adapter", "tuned", "lora")]
    assert all((a - b).norm() > 1e-2 * a.norm() for i, a in enumerate(different) for b in different[:i])
    dist.barrier(group=group)


def greedy(model, prompt: str, folder: Path) -> str:
    """What transformers writes after a prompt."""
    tokenizer = Tokenizer.load(folder)
    start = torch.tensor([tokenizer.encode(prompt)])
    new = model.generate(start, max_new_tokens=8, do_sample=False, eos_token_id=tokenizer.eos_id, pad_token_id=0)
    return prompt + tokenizer.decode([token for token in new[0, start.size(1) :] if token != tokenizer.eos_id]) + "\n"


def test_folders_are_continued_as_they_are(base, capsys, monkeypatch):
    import transformers

    flags = ["--prompt", "def ", "--temperature", "0", "--max-new-tokens", "8", "--device", "cpu"]
    model = transformers.AutoModelForCausalLM.from_pretrained(base / "base").eval()
    plain = greedy(model, "def ", base / "base")
    adapted = greedy(read_adapters(model, base / "adapter"), "def ", base / "base")
    assert plain != adapted
    for text, given in ((plain, ["base"]), (adapted, ["adapter"]), (adapted, ["base", "--adapter", "adapter"])):
        monkeypatch.chdir(base)
        capsys.readouterr()
        assert main(["generate", *given, *flags]) == 0
        assert capsys.readouterr().out == text


def test_what_cannot_be_continued(base, tmp_path, monkeypatch):
    def refused(error: type[Exception], message: str, path: Path, adapter: Path | None = None) -> None:
        with pytest.raises(error, match=message):
            open_model(path, adapter)

    bare = Path(shutil.copytree(base / "base", tmp_path / "bare"))
    (bare / "tokenizer.json").unlink()
    refused(DataError, r"no tokenizer at '.*bare/tokenizer\.json'.*transformers makes them from other files", bare)
    (bare / "model.safetensors").unlink()
    refused(CheckpointError, r"bare has neither model\.safetensors nor", bare)
    both = Path(shutil.copytree(base / "base", tmp_path / "both"))
    shutil.copytree(base / "adapter", both, dirs_exist_ok=True)
    refused(ConfigError, r"both holds a model and adapters; use both with --adapter .*both, or move", both)
    assert open_model(both, both).adapter == both
    # A copy of the model's configuration beside adapters is no model.
    (both / "model.safetensors").unlink()
    assert open_model(both).folder == base / "base"
    with pytest.raises(CheckpointError, match="both holds adapters and no model; give the folder of the model"):
        PretrainedFolder(both)
    refused(CheckpointError, "no adapter at '.*base': it has no adapter_config", base / "base", base / "base")
    refused(ConfigError, "adapter holds adapters, not a model for those of", base / "adapter", base / "adapter")
    homeless = Path(shutil.copytree(base / "adapter", tmp_path / "homeless"))
    config = json.loads((homeless / "adapter_config.json").read_text())
    give = "give the model's folder yourself: shardwise generate MODEL_DIR --adapter .*homeless"
    for name, message in (
        (None, f"does not name the adapters' model; {give}"),
        (["x"], f"does not name the adapters' model; {give}"),
        ("", f"does not name the adapters' model; {give}"),
        ("org/model", f"adapters of the model org/model: there is no folder org/model; {give}; to use a model of"),
        (str(homeless), f"which is no Hugging Face folder; {give}"),
    ):
        (homeless / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": name}))
        refused((ConfigError, CheckpointError), message, homeless)  # type: ignore[arg-type]
    (homeless / "adapter_config.json").write_text("[")
    refused(CheckpointError, "is not an adapter's configuration", homeless)
    refused(CheckpointError, "is not an adapter's configuration", base / "base", homeless)


def test_a_name_of_the_hub_says_how_to_download_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = "meta-llama/Llama-3.1-8B"
    command = f"name its folder, Llama-3.1-8B: hf download {name} --exclude 'original/*' --local-dir Llama-3.1-8B"
    for argv in (
        ["generate", name],
        ["generate", f"https://huggingface.co/{name}"],
        ["generate", ".", "--adapter", name],
        ["import-hf", name, "--out", "x"],
        ["finetune", name, "--data", "stdlib", "--out", "x"],
    ):
        capsys.readouterr()
        assert main(argv) in (1, 2)
        error = capsys.readouterr().err
        assert command in error
        assert error.count("\n") == 1
        assert not (tmp_path / "x").exists()
    assert "hf download gpt2 --exclude" in no_folder(Path("gpt2"))
    (tmp_path / "runs").mkdir()
    (tmp_path / "file").touch()
    for path in ("runs/x", "/nowhere/x", "a/b/c", "../x", "./runs", "x y", "-x", "file", "x" * 5000 + "/" * 3):
        assert "hf download" not in no_folder(Path(path)), path[:80]
    assert no_folder(Path("file")) == "file is not a folder"
