"""Trials before exact generation: how many rows a product needs, and a text that is read in pieces."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from models.generation.test_stages import stage_of
from run.exact.test_exact_check import model_of

from shardwise.core.errors import ConfigError
from shardwise.core.topology import Topology
from shardwise.exact.products import ExactProducts
from shardwise.models.transformer.attention_kernels import _FromStart
from shardwise.nn import arithmetic_of
from shardwise.run.exact.generation import try_generation_


@pytest.mark.ranks(1)
def test_the_smallest_number_of_rows_is_found(group, monkeypatch):
    model, ranks = model_of("llama"), SimpleNamespace(device=torch.device("cpu"), control=group)
    try_generation_(model, ranks)
    few = arithmetic_of(model.tp_group).few
    assert few.least <= 32
    right = ExactProducts._linear

    def other_between(first, stop):
        def multiply(self, rows, *arguments):
            return right(self, rows, *arguments) * (2 if first <= len(rows) < stop else 1)

        monkeypatch.setattr(ExactProducts, "_linear", multiply)

    for first in (1, 9):
        other_between(first, 12)
        try_generation_(model, ranks)
        assert few.least == 16
    other_between(1, 100)
    with pytest.raises(ConfigError, match=r"a product of 64 rows with a weight .* has other bits among 160"):
        try_generation_(model, ranks)


@pytest.mark.ranks(1)
def test_a_text_in_pieces_is_compared_with_the_whole(group, monkeypatch):
    model, ranks = model_of("llama"), SimpleNamespace(device=torch.device("cpu"), control=group)
    right = _FromStart.attend

    def attend(self, call):
        return right(self, call) * (1 + 2**-20 * (call.query.size(2) == 1))

    monkeypatch.setattr(_FromStart, "attend", attend)
    with pytest.raises(ConfigError, match=r"log-probabilities of a text that is read in pieces have other bits"):
        try_generation_(model, ranks)


@pytest.mark.ranks(2)
def test_what_one_stage_finds_is_raised_on_all(group, monkeypatch):
    model, ranks = (
        stage_of("llama", Topology.create(pp=2, etp=1), exact_parts=2, params_dtype=torch.float32),
        SimpleNamespace(device=torch.device("cpu"), control=group),
    )
    try_generation_(model, ranks)
    right = _FromStart.attend
    if group.rank() == 0:
        monkeypatch.setattr(
            _FromStart, "attend", lambda self, call: right(self, call) * (1 + 2**-20 * (call.query.size(2) == 1))
        )
    with pytest.raises(ConfigError, match=r"hidden states of a text that is read in pieces have other bits"):
        try_generation_(model, ranks)
