"""Rows without a token, masks of another shape, and generation from prompts of different lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hf_references import Reference, groups_of

from shardwise.core.errors import ShardingError
from shardwise.models.generation import GREEDY, Request, Sampling, generate, generate_all
from shardwise.storage.huggingface import load_pretrained


@pytest.mark.ranks(1)
@pytest.mark.parametrize("reference", ["llama", "bert"], indirect=True)
def test_rows_of_padding_alone_are_finite(group: dist.ProcessGroup, reference: Reference) -> None:
    model = load_pretrained(reference.folder, groups=groups_of(1, 1), hidden_dropout=0.0, attention_dropout=0.0)
    ids, mask = torch.tensor([[5, 6, 7], [8, 9, 10]]), torch.tensor([[0, 0, 0], [1, 1, 0]])
    labels = torch.tensor([[-100, -100, -100], [1, 2, -100]])
    outputs = model(ids, mask, lm_labels=labels)[0] if reference.is_bert else model(ids, None, mask, labels)
    outputs.sum().backward()
    assert outputs[0].eq(0).all()
    for name, param in model.named_parameters():
        assert param.grad is None or param.grad.isfinite().all(), name
    with pytest.raises(ShardingError, match=r"has shape \[2, 4\].*must be \[2, 3\]"):
        model(ids, attention_mask=torch.ones(2, 4))


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("reference", ["gpt2", "bloom", "mistral"], indirect=True)
def test_a_batch_of_prompts_continues_each_as_if_it_were_alone(group: dist.ProcessGroup, reference: Reference) -> None:
    model = load_pretrained(reference.folder, groups=groups_of(2, 1), dtype=torch.float64)
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13], list(range(20, 31))]
    for sampling in (GREEDY, Sampling(temperature=1.0, top_k=20)):
        options = {"max_new_tokens": 6, "sampling": sampling, "seed": 3}
        # GPT-2's 13 positions have no room for the last prompt and all that follows.
        alone = [generate(model, prompt, **options) for prompt in prompts]
        requests = [Request(prompt, 6, sampling, seed=3) for prompt in prompts]
        assert [each.text_ids for each in generate_all(model, requests)] == alone
        # Each ends by itself.
        ends = alone[0][2]
        alone = [generate(model, prompt, eos_id=ends, **options) for prompt in prompts]
        requests = [replace(each, eos_ids=[ends]) for each in requests]
        assert [each.text_ids for each in generate_all(model, requests)] == alone
