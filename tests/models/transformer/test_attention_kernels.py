"""The first kernel of the table that takes a call, on cases that were drawn."""

from __future__ import annotations

import pytest
import torch
from models.model_checks import flexible_on_a_cpu

from shardwise.core.errors import ConfigError
from shardwise.core.random import seed_streams
from shardwise.core.sequence_view import ContextShard
from shardwise.exact.context_terms import Place
from shardwise.exact.strategies import ExactActivation
from shardwise.models.transformer import attention_kernels
from shardwise.models.transformer.attention_kernels import AT_POSITION, KERNELS, Call, Options, choose, described
from shardwise.models.transformer.distance_bias import alibi_slopes
from shardwise.models.transformer.heads import LocalHeads
from shardwise.models.transformer.masks import AttentionMask
from shardwise.models.transformer.visibility import Rule
from shardwise.nn.arithmetic import Activation

B, HEADS, GROUPS, WIDTH, S = 2, 4, 2, 8, 9
# By the classes of the kernels: lines of a device and words on the mask and the layer, in which attention without the
# table took this kernel.
TAKEN = {
    "_OnePart _Function": """
        cuda open sides shard
        cpu causal flash
        cpu causal pieces padding alibi unfused exact
        cpu causal unfused cache
        cpu causal window documents
        cpu open sides documents
        cuda causal documents exact
        cuda flex open window alibi unfused
        cuda open
        cuda open window documents shard
        traced causal documents padding
        traced causal pieces flash exact shard
        traced causal sides documents padding alibi unfused exact shard
        traced causal sides padding cache
        traced open window padding cache
    """,
    "_FromStart": """
        cpu causal exact
        cpu causal sides exact cache
        cpu causal window documents exact
    """,
    "_WrittenOutFromStart": """
        cpu causal sides local exact
        cpu causal window padding local exact
        cpu open sides cap exact
    """,
    "_WrittenOut": """
        cpu causal alibi local
        cpu causal window shared-dropout unfused
        cpu open pieces local
        cuda causal window documents cap local
        cuda open local cache
        cuda open sides pieces alibi local exact
        traced causal sides padding local cache
    """,
    "_WrittenOutInBlocks": """
        cpu causal pieces cap
        cuda causal window alibi cap cache
        cuda flex causal dropout sinks cache
        cuda open pieces alibi sinks shard
        traced causal window alibi sinks
        traced causal window cap
        traced open documents cap
        traced open sides pieces dropout many
        traced open sides sinks
        traced open window pieces sinks shard
    """,
    "_Parts": """
        cpu causal flash shard
        cpu causal pieces padding alibi shard
        cpu causal shard
        cpu causal sides shard
        cpu causal window pieces shard
        cpu open sides padding sinks
        cpu open sinks cache
        cpu open window alibi sinks shard
    """,
    "_Packed": """
        cuda causal documents
        cuda causal sides
        cuda flex causal documents
        cuda flex causal sides
        cuda flex causal sides cache
        cuda flex causal sides documents
        cuda flex causal sides flash shard
        cuda flex open sides documents flash
        cuda flex open window
    """,
    "_Flexible": """
        cuda flex causal padding cache
        cuda flex causal padding cap shard
        cuda flex causal pieces alibi shard
        cuda flex causal sides pieces alibi sinks
        cuda flex causal sinks cache
        cuda flex causal window padding
        cuda flex causal window padding alibi cap
        cuda flex open documents padding shard
        cuda flex open pieces alibi shard
    """,
    "_AtPosition": """
        cpu causal window position
        cuda causal window position
        cuda flex causal window unfused position
    """,
}


def call_of(words: set[str]) -> Call:
    """Return a call as a layer makes it; without a word, a layer is plain and its rows are whole."""
    ids = torch.tensor([[0] * 4 + [1] * 5, [0] * 3 + [1] * 6])
    new, keys = (1, 12) if "position" in words else (S, S + 6 * ("cache" in words))
    context = ContextShard(S, Place(0, 2)) if "shard" in words else None
    query = torch.zeros(B, HEADS, new if context is None else context.size, WIDTH)
    mask = AttentionMask(
        (torch.arange(keys) < 2)[None, None, None] if "padding" in words else None,
        document_ids=ids if "documents" in words else ids % 2 * (torch.arange(S) % 2) if "pieces" in words else None,
        alibi_slopes=alibi_slopes(HEADS) if "alibi" in words else None,
        query_position=torch.tensor([7]) if "position" in words else None,
        context=context,
    )
    activation = ExactActivation() if "exact" in words else Activation()
    options = Options(
        LocalHeads((2, 2)),
        Rule("causal" in words, (3, 0) if "window" in words else (2, 2) if "sides" in words else None),
        0.3,
        cap=3.0 if "cap" in words else None,
        sinks=torch.zeros(HEADS) if "sinks" in words else None,
        dropout=0.2 if words & {"dropout", "shared-dropout"} else 0.0,
        drop=lambda weights: weights,
        backend=next(iter(words & {"local", "flash", "unfused"}), "auto"),
        activation=activation,
        counted_heads=HEADS,
    )
    return Call(query, *torch.zeros(2, B, GROUPS, keys, WIDTH), mask, options)


@pytest.mark.parametrize(
    "row",
    [(name, row.strip()) for name, rows in TAKEN.items() for row in rows.split("\n") if row.strip()],
    ids="-".join,
)
def test_the_kernel_of_a_case(row, monkeypatch):
    names, words = row[0].split(), set(row[1].split())
    if "flex" in words:
        flexible_on_a_cpu(monkeypatch)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: "traced" in words)
    if "cuda" in words:
        monkeypatch.setattr(attention_kernels, "takes_packed", lambda query: True)
        monkeypatch.setattr(attention_kernels, "has_flash_for_parts", lambda query: False)
    if "many" in words:
        monkeypatch.setattr(attention_kernels, "_SCORES_OF_BLOCK", 1 << 9)
    seed_streams(5, 0, rng="global" if "shared-dropout" in words else "per_rank")
    call = call_of(words)
    kernels = call.options.activation.kernels(KERNELS)
    kernel = choose(kernels, call)
    assert type(kernel).__name__ in names
    assert described(kernels, call).startswith(kernel.name)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("causal", "flash attention"),
        ("causal shard", "flash attention in blocks"),
        (
            "causal local",
            "products and a softmax of all scores; not flash attention in blocks: attention_backend is 'local'",
        ),
        (
            "causal shared-dropout",
            "products and a softmax of all scores; not flash attention in blocks: its dropout would depend on the "
            "layout",
        ),
        (
            "causal cap",
            "products and a softmax in blocks of queries, which the backward computes again; not flash attention in "
            "blocks: it has no soft cap of scores",
        ),
    ],
)
def test_the_banner_names_the_kernel_and_why_no_faster_one(words, line):
    seed_streams(5, 0, rng="global" if "shared-dropout" in words else "per_rank")
    assert described(Activation().kernels(KERNELS), call_of(set(words.split()))) == line


def test_no_kernel_is_left():
    """Exact arithmetic has none for a position that the host does not know."""
    kernels = ExactActivation().kernels(KERNELS)
    assert AT_POSITION not in kernels
    with pytest.raises(
        ConfigError,
        match=r"no kernel computes this attention .*PyTorch's scaled_dot_product_attention: only the device",
    ):
        choose(kernels, call_of({"causal", "position", "exact"}))
