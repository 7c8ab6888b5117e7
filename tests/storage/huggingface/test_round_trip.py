"""Export, then import: bit-equal at every layout, and transformers loads what was written unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal, assert_close_to
from hf_references import GPT_LIKE, MODEL_PARAMS, MODELS, WITH_EXPERTS, Reference, groups_of, layouts
from safetensors.torch import load_file

from shardwise.core.errors import ConfigError
from shardwise.storage.huggingface import describe_model, load_pretrained, save_pretrained


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        more = load_file(path)
        assert not tensors.keys() & more.keys(), "a tensor is written twice"
        tensors |= more
    return tensors


@pytest.mark.sample(12)
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("reference", MODEL_PARAMS, indirect=True)
def test_export_writes_what_was_imported(group: dist.ProcessGroup, reference: Reference, tmp_path: Path) -> None:
    expected = reference.weights()
    for tp, pp in layouts(group.size()):
        groups = groups_of(tp, pp)
        model = load_pretrained(reference.folder, groups=groups)
        for name, options in {
            "one": {"source": reference.folder},
            "many": {
                "max_file_size": 5000,
                "architecture": json.loads((reference.folder / "config.json").read_text())["model_type"],
            },
        }.items():
            folder = tmp_path / f"{tp}x{pp}" / name
            save_pretrained(model, folder, **options)
            tensors = stored(folder)
            assert tensors.keys() == expected.keys()
            for key, tensor in tensors.items():
                assert_bit_equal(tensor, expected[key], name=key)
            again = load_pretrained(folder, groups=groups)
            assert not describe_model(again).differences(describe_model(model))
            for key, param in again.state_dict().items():
                assert_bit_equal(param, model.state_dict()[key], name=key)
        single = tmp_path / f"{tp}x{pp}" / "one"
        assert (single / "model.safetensors").exists() == (pp == 1)
        config = json.loads((single / "config.json").read_text())
        written = json.loads((reference.folder / "config.json").read_text())
        for changed in ("dtype", "torch_dtype"):
            config.pop(changed, None), written.pop(changed, None)
        assert config == written
        assert len(list((tmp_path / f"{tp}x{pp}" / "many").glob("model-*.safetensors"))) > 2 * pp
    dist.barrier()


@pytest.mark.slow
@pytest.mark.sample(15)
@pytest.mark.parametrize("reference", MODEL_PARAMS, indirect=True)
@pytest.mark.parametrize("with_source", [True, False])
def test_transformers_loads_the_export(
    reference: Reference, with_source: bool, tmp_path: Path, one_rank: Any, recwarn: pytest.WarningsRecorder
) -> None:
    import transformers

    model = load_pretrained(reference.folder, groups=one_rank)
    options: dict[str, Any] = {"source": reference.folder} if with_source else {"max_file_size": 20000}
    if reference.name == "mistral":
        options["architecture"] = "mistral"
    save_pretrained(model, tmp_path / "out", **options)
    kind = getattr(transformers, MODELS[reference.name][0])
    automatic = {
        "BertForPreTraining": transformers.AutoModelForPreTraining,
        "BertForMaskedLM": transformers.AutoModelForMaskedLM,
    }.get(kind.__name__, transformers.AutoModelForCausalLM)
    # Other implementations want rows of 16 bytes.
    implementations = {"attn_implementation": "eager"}
    if reference.name in WITH_EXPERTS:
        implementations["experts_implementation"] = "eager"
    loaded, report = automatic.from_pretrained(tmp_path / "out", output_loading_info=True, **implementations)
    assert type(loaded) is kind
    assert not any(report.values()), report
    original = kind.from_pretrained(reference.folder)
    assert loaded.state_dict().keys() == original.state_dict().keys()
    for key, tensor in original.state_dict().items():
        assert_bit_equal(loaded.state_dict()[key], tensor, name=key)
    values = reference.values()
    inputs = {"input_ids": values["input_ids"]}
    if reference.name not in GPT_LIKE:
        inputs |= {"token_type_ids": values["token_types"], "attention_mask": values["mask"]}
    with torch.no_grad():
        output = loaded.eval()(**inputs)
    logits = output.prediction_logits if reference.name == "bert" else output.logits
    if reference.name in WITH_EXPERTS:
        # Products of one or two rows have other last bits where a weight lies elsewhere in memory.
        assert_close_to(logits, values["logits"], rtol_of_norm=1e-6, name="logits")
    else:
        assert_bit_equal(logits, values["logits"], name="logits")


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("reference", ["llama", "qwen3", "gpt2"], indirect=True)
def test_transformers_loads_a_bf16_model_of_two_stages(
    group: dist.ProcessGroup, reference: Reference, tmp_path: Path
) -> None:
    """Rounded when it is read or when it is written; in a file per stage, and in many."""
    import transformers

    groups = groups_of(1, 2)
    for loaded_as in (torch.bfloat16, torch.float32):
        model = load_pretrained(reference.folder, groups=groups, dtype=loaded_as)
        for name, options in {"few": {"source": reference.folder}, "many": {"max_file_size": 8000}}.items():
            save_pretrained(model, tmp_path / str(loaded_as) / name, dtype=torch.bfloat16, **options)
    dist.barrier(group)
    if group.rank() == 0:
        rounded = {key: tensor.bfloat16() for key, tensor in reference.weights().items()}
        # The tied copy of the embedding, where there is one, is in no file.
        expected = transformers.AutoModelForCausalLM.from_pretrained(reference.folder, dtype=torch.bfloat16)
        for folder in sorted(tmp_path.glob("*/*")):
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            files = set(index["weight_map"].values())
            assert files == {path.name for path in folder.glob("*.safetensors")}
            assert len(files) == 2 if folder.name == "few" else len(files) > 4
            assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in rounded.values())
            assert stored(folder).keys() == index["weight_map"].keys() == rounded.keys()
            loaded, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
            assert not any(report.values()), report
            assert loaded.dtype == torch.bfloat16
            assert loaded.state_dict().keys() == expected.state_dict().keys()
            for key, tensor in loaded.state_dict().items():
                assert_bit_equal(tensor, rounded.get(key, expected.state_dict()[key]), name=key)
            for key, tensor in stored(folder).items():
                assert_bit_equal(tensor, rounded[key], name=key)
    dist.barrier(group)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reference", ["llama", "llama_tied", "bert"], indirect=True)
def test_another_number_of_ids(group: dist.ProcessGroup, reference: Reference, tmp_path: Path) -> None:
    """Rows that the folder lacks are its mean, with the same bits everywhere; others are not read. So are biases."""
    given = reference.weights()
    written = json.loads((reference.folder / "config.json").read_text())
    for tp, pp in layouts(group.size()):
        groups = groups_of(tp, pp)
        for size in (written["vocab_size"] - 11, written["vocab_size"] + 5):
            folder = tmp_path / f"{tp}x{pp}-{size}"
            model = load_pretrained(reference.folder, groups=groups, vocab_size=size)
            save_pretrained(model, folder, source=reference.folder)
            assert json.loads((folder / "config.json").read_text())["vocab_size"] == size
            tensors, num_changed = stored(folder), 0
            assert tensors.keys() == given.keys()
            for key, tensor in tensors.items():
                expected = given[key]
                if len(expected) == written["vocab_size"]:
                    num_changed += 1
                    mean = expected.double().mean(0, keepdim=True).to(expected.dtype)
                    expected = torch.cat([expected[:size], *[mean] * max(0, size - len(expected))])
                assert_bit_equal(tensor, expected, name=key)
            assert num_changed == (1 if reference.name == "llama_tied" else 2)
        with pytest.raises(ConfigError, match="vocab_size is 0"):
            load_pretrained(reference.folder, groups=groups, vocab_size=0)


@pytest.mark.parametrize("reference", ["deepseek_v3"], indirect=True)
def test_the_bias_of_the_choice_stays_in_fp32(reference: Reference, tmp_path: Path, one_rank: Any) -> None:
    model = load_pretrained(reference.folder, groups=one_rank, dtype=torch.bfloat16)
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("selection_bias")]
    for bias in biases:
        # No bf16 number.
        bias.fill_(6.01)
    save_pretrained(model, tmp_path / "out", dtype=torch.bfloat16)
    kept = {name: each for name, each in stored(tmp_path / "out").items() if name.endswith("e_score_correction_bias")}
    assert len(kept) == len(biases) > 0
    for tensor in kept.values():
        assert_bit_equal(tensor, biases[0])
    others = {each.dtype for name, each in stored(tmp_path / "out").items() if name not in kept}
    assert others == {torch.bfloat16}
