"""Folders with a tensor for each expert, and with one for all experts of a layer, are read and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness.parity import assert_bit_equal
from hf_references import MODELS, WITH_EXPERTS, Reference, transformers_model
from run.run_processes import run_command
from safetensors.torch import load_file

from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups, Topology
from shardwise.storage.huggingface import load_pretrained, save_pretrained

TWO_FORMS = [name for name in WITH_EXPERTS if name != "gpt_oss"]


@pytest.fixture
def fused(reference: Reference) -> Reference:
    """The same with fused names, as transformers writes them."""
    path = reference.folder.parent / "fused"
    if not path.exists():
        transformers_model(reference.name).save_pretrained(path, save_original_format=False)
    return Reference(reference.name, path)


@pytest.mark.sample(6)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("reference", TWO_FORMS, indirect=True)
def test_names_both_ways(group: dist.ProcessGroup, reference: Reference, fused: Reference, tmp_path: Path) -> None:
    groups = Groups.of(Topology.create(tp=group.size(), ep=group.size(), etp=1))
    for folder, names, expected in (
        (reference, "fused", fused),
        (fused, "separate", reference),
        (fused, None, reference),
    ):
        model = load_pretrained(folder.folder, groups=groups)
        out = tmp_path / f"{folder.folder.name} {names}"
        save_pretrained(model, out, source=reference.folder, expert_names=names)
        written, wanted = load_file(out / "model.safetensors"), expected.weights()
        assert written.keys() == wanted.keys()
        for name, tensor in written.items():
            assert_bit_equal(tensor, wanted[name], name=name)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("reference", TWO_FORMS, indirect=True)
def test_transformers_loads_fused_names(reference: Reference, tmp_path: Path, one_rank: Any) -> None:
    import transformers

    save_pretrained(load_pretrained(reference.folder, groups=one_rank), tmp_path / "out", expert_names="fused")
    kind = getattr(transformers, MODELS[reference.name][0])
    loaded, info = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = transformers_model(reference.name).state_dict()
    for name, tensor in loaded.state_dict().items():
        assert_bit_equal(tensor, expected[name], name=name)


@pytest.mark.parametrize("reference", ["llama", "gpt_oss"], indirect=True)
def test_a_choice_that_there_is_not(reference: Reference, tmp_path: Path, one_rank: Any) -> None:
    model = load_pretrained(reference.folder, groups=one_rank)
    message = f"expert_names is 'fused', and {reference.name} folders have no choice of names of experts; leave it out"
    with pytest.raises(ConfigError, match=message):
        save_pretrained(model, tmp_path / "out", expert_names="fused")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["mixtral"], indirect=True)
def test_the_flag_of_the_command(reference: Reference, fused: Reference, tmp_path: Path) -> None:
    run_command(tmp_path, 1, "import-hf", reference.folder, "--out", tmp_path / "run")
    run_command(tmp_path, 1, "export-hf", tmp_path / "run", "--out", tmp_path / "out", "--expert-names", "fused")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == fused.weights().keys()
