"""``shardwise import-hf`` and ``export-hf``, and what they leave for ``generate`` and for transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal, assert_close_to
from hf_references import Reference
from run.run_processes import run_command
from safetensors.torch import load_file

from shardwise.cli.main import main
from shardwise.core.sharded_state import sharded_state_dict
from shardwise.core.topology import Groups
from shardwise.data.tokenizer import Tokenizer
from shardwise.run.build import build_model
from shardwise.run.processes.ranks import open_ranks
from shardwise.run.settings import ModelSettings, Settings, TrainingSettings
from shardwise.storage import checkpoint


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_import_then_export_changes_no_tensor(
    make: Callable[[str], Reference], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    reference = make(name)
    capsys.readouterr()
    assert main(["import-hf", str(reference.folder), "--out", str(tmp_path / "run")]) == 0
    out, note = capsys.readouterr()
    assert out == f"wrote {tmp_path / 'run/checkpoints/step-00000000'}\n"
    means = (
        "shardwise generate cannot use it, and exports have no tokenizer" if name == "llama" else "exports have none"
    )
    assert note.startswith(f"shardwise import-hf: the checkpoint has no tokenizer, so that {means} (no tokenizer at '")
    assert "put the model's tokenizer.json and tokenizer_config.json there" in note
    assert note.count("\n") == 1
    if name == "llama":
        assert main(["generate", str(tmp_path / "run")]) == 2
        assert "was imported from a folder without a tokenizer.json" in capsys.readouterr().err
    assert (tmp_path / "run/checkpoints/step-00000000/config.json").is_file()
    assert main(["export-hf", str(tmp_path / "run"), "--out", str(tmp_path / "back")]) == 0
    tensors, expected = load_file(tmp_path / "back/model.safetensors"), reference.weights()
    assert tensors.keys() == expected.keys()
    for key, tensor in tensors.items():
        assert_bit_equal(tensor, expected[key], name=key)


@pytest.mark.slow
def test_import_then_export_on_two_ranks_changes_no_tensor(make: Callable[[str], Reference], tmp_path: Path) -> None:
    reference, run = make("llama"), tmp_path / "run"
    said, _ = run_command(tmp_path, 2, "import-hf", reference.folder, "--out", run, "--nproc", 2)
    assert said.startswith(f"wrote {run / 'checkpoints/step-00000000'}")
    assert said.count("\n") == 1
    # Of two ranks, each of which wrote its part.
    assert len(list((run / "checkpoints/step-00000000").glob("*.safetensors"))) == 2
    out = ["--out", tmp_path / "back", "--max-file-gb", "3e-5"]
    said, _ = run_command(tmp_path, 2, "export-hf", run, "--nproc", 2, *out)
    assert said.count("\n") == 1
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 2
    tensors = {key: tensor for path in files for key, tensor in load_file(path).items()}
    expected = reference.weights()
    assert tensors.keys() == expected.keys()
    for key, tensor in tensors.items():
        assert_bit_equal(tensor, expected[key], name=key)


def test_generate_continues_a_text_with_an_imported_model(
    make: Callable[[str], Reference], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    folder = tmp_path / "model"
    transformers.AutoModelForCausalLM.from_pretrained(make("qwen3").folder).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    tokenizer = Tokenizer.train(["größer"], 270)
    # Every id of the tokenizer has a row.
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**(config | {"vocab_size": tokenizer.vocab_size})))
    model.save_pretrained(folder)
    tokenizer.save(folder)
    capsys.readouterr()
    assert main(["import-hf", str(folder), "--out", str(tmp_path / "run")]) == 0
    hint = f"; continue a text with: shardwise generate {tmp_path / 'run'}"
    assert capsys.readouterr() == (f"wrote {tmp_path / 'run/checkpoints/step-00000000'}{hint}\n", "")
    flags = ["--prompt", "gr", "--temperature", "0", "--max-new-tokens", "8"]
    assert main(["generate", str(tmp_path / "run"), *flags]) == 0
    ids = torch.tensor([tokenizer.encode("gr")])
    new = model.eval().generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=tokenizer.eos_id, pad_token_id=0)
    assert capsys.readouterr().out == tokenizer.decode(new[0].tolist()) + "\n"
    assert main(["export-hf", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("architecture", ["llama", "gpt"])
def test_transformers_computes_what_a_trained_model_does(architecture: Any, tmp_path: Path) -> None:
    import transformers

    tokenizer = Tokenizer.train(["def eins(zwei):\n    return zwei  # größer 中文\n"], 290)
    model_settings = ModelSettings(
        architecture=architecture,
        num_layers=2,
        hidden_size=16,
        num_heads=4,
        num_query_groups=2 if architecture == "llama" else None,
        vocab_size=290,
        sequence_length=32,
        tie_embeddings=architecture == "gpt",
    )
    settings = Settings(data=("x",), model=model_settings, training=TrainingSettings(dtype="float32"))
    ids = torch.arange(24).view(2, 12) * 11
    with open_ranks("cpu") as ranks:
        torch.manual_seed(0)
        groups = Groups(tp=dist.group.WORLD)
        model = build_model(settings, tokenizer.vocab_size, groups=groups, device=ranks.device)
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.randn_like(param) * 0.3)
        checkpoint.save(
            tmp_path / "checkpoints",
            1,
            sharded_state_dict(model, "model.", group=dist.group.WORLD),
            {"settings": settings.to_json(), "tokenizer_sha256": tokenizer.sha256},
            group=dist.group.WORLD,
            extra_files=tokenizer.save,
        )
        expected = model(ids).transpose(0, 1)
    assert main(["export-hf", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(loaded).__name__ == {"llama": "LlamaForCausalLM", "gpt": "GPT2LMHeadModel"}[architecture]
    assert not any(report.values()), report
    with torch.no_grad():
        assert_close_to(loaded.eval()(ids).logits, expected, rtol_of_norm=1e-5)
    assert loaded.config.eos_token_id == tokenizer.eos_id
    text = "return zwei"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"] == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import-hf", "nowhere", "--out", "x"], "there is no folder nowhere; to use a model of the Hugging Face hub"),
        (["import-hf", "nowhere"], "--out"),
        (["import-hf", "MODEL", "--out", "x", "--nproc", "7"], "6 attention heads cannot be split over 7 ranks"),
        (["export-hf", "nowhere", "--out", "x"], "there is no folder nowhere"),
        (["export-hf", "RUN", "--out", "MODEL"], "exists; choose another folder"),
        (["export-hf", "MODEL", "--out", "x"], "is a Hugging Face folder already; give the --out of a training run"),
        (["export-hf", "RUN", "--out", "x", "--architecture", "gpt2"], "gpt2: "),
        (["export-hf", "RUN", "--out", "x", "--architecture", "gpt3"], "architecture 'gpt3' is unknown"),
        (["import-hf", "MODEL", "--out", "RUN"], "has a checkpoint already"),
    ],
)
def test_mistakes_are_one_line(
    imported: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"MODEL": str(imported[0]), "RUN": str(imported[1])}
    assert main([places.get(argument, argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "x").exists()


@pytest.fixture(scope="module")
def imported(make: Callable[[str], Reference], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and a checkpoint of it."""
    run = tmp_path_factory.mktemp("run")
    reference = make("llama")
    assert main(["import-hf", str(reference.folder), "--out", str(run)]) == 0
    return reference.folder, run
