"""Texts beyond the context of the first training: generation gives the tokens of transformers, however it is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hf_references import groups_of, transformers_model

from shardwise.models.generation import GREEDY, PrefixCache, Request, generate, generate_all, inference_view
from shardwise.storage.huggingface import load_pretrained

DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 100.0}
# The first trainings ended at 8 tokens, and at 12.
KINDS = {
    "phi3": ({}, (3, 8, 14)),
    "gpt_oss": ({}, (3, 8, 14)),
    "mistral": ({"rope_parameters": DYNAMIC, "max_position_embeddings": 12}, (5, 12)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each of ``KINDS``, and how it goes on after prompts that are alone."""
    root, generator = tmp_path_factory.mktemp("long"), torch.Generator().manual_seed(4)
    for name, (changes, lengths) in KINDS.items():
        prompts, wanted = [], []
        for length in lengths:
            # A new one each, since frequencies that one text has changed may stay for the next.
            model = transformers_model(name, **changes)
            prompt = torch.randint(1, model.config.vocab_size, (1, length), generator=generator)
            options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 40}
            text = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0].tolist()
            prompts.append(text[:length])
            wanted.append(text[length:])
        model.save_pretrained(root / name)
        (root / name / "continued.json").write_text(json.dumps([prompts, wanted]))
    return root


@pytest.mark.sample(2)
@pytest.mark.ranks(1, 2, 3, slow=(1, 3))
@pytest.mark.parametrize("name", KINDS)
def test_texts_that_outgrow_the_first_context(group: dist.ProcessGroup, folders: Path, name: str) -> None:
    """Alone, in a batch, on layers for inference, and in turns."""
    groups = groups_of(group.size(), 1)
    model = load_pretrained(folders / name, groups=groups, max_sequence_length=64, attention_dropout=0.0)
    prompts, wanted = json.loads((folders / name / "continued.json").read_text())
    assert all(len(set(tokens)) > 10 for tokens in wanted)
    # Layers of experts have none for inference.
    views = [inference_view(model, fused=each) for each in (False, True)] if model.config.experts is None else []
    for form in (model, *views):
        requests = [Request(prompt, 40, GREEDY) for prompt in prompts]
        assert [each.token_ids for each in generate_all(form, requests, chunk_size=5)] == wanted
        assert generate(form, prompts[1], max_new_tokens=40, sampling=GREEDY) == wanted[1]
    prefix, text = PrefixCache(model), prompts[0]
    for count in (4, 7, 5):
        answer = generate(model, text, max_new_tokens=count, sampling=GREEDY)
        assert generate(model, text, max_new_tokens=count, sampling=GREEDY, prefix=prefix) == answer
        text = [*text, *answer]
