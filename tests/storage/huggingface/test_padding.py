"""Rows without a token, and masks of another shape."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hf_references import Reference, groups_of

from shardwise.core.errors import ShardingError
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
