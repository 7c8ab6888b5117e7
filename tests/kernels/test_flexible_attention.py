"""PyTorch's FlexAttention computes what the definition says that the tests of layers use in place of it."""

import pytest
import torch
from models.model_checks import flexible_attention_defined
from torch.nn.attention.flex_attention import AuxRequest

from shardwise.kernels import flexible_attention
from shardwise.models.transformer.visibility import Rule, Visibility

B, HEADS, GROUPS, KEYS, WIDTH = 2, 4, 2, 300, 16


def forbidden_of(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.3


CASES = {
    "causal": {"causal": True},
    "window": {"causal": True, "before": 20},
    "both sides": {"before": 7, "after": 150},
    "some of the queries": {"causal": True, "queries": 40},
    "soft cap": {"causal": True, "cap": 0.8},
    "documents": {"causal": True, "document_ids": torch.randint(3, (B, KEYS)).sort(dim=1).values},
    "alibi": {"causal": True, "slopes": torch.tensor([0.5, 0.1, 0.02, 0.3], dtype=torch.float64)},
    "alibi by place": {
        "slopes": torch.tensor([0.5, 0.1, 0.02, 0.3], dtype=torch.float64),
        "key_positions": torch.randint(50, (B, KEYS)),
        "cap": 2.0,
    },
    # Some queries of the second mask see nothing.
    "mask of rows": {"forbidden": forbidden_of(KEYS, KEYS), "causal": True},
    "padding": {"forbidden": (torch.arange(KEYS) < torch.tensor([[0], [KEYS - 9]]))[:, None, None], "causal": True},
    "mask of heads": {"forbidden": forbidden_of(1, HEADS, KEYS, 1)},
}


def functions_of_case(case, query):
    forbidden, ids, slopes, positions = (
        case.get(name) for name in ("forbidden", "document_ids", "slopes", "key_positions")
    )
    if forbidden is not None:
        forbidden = forbidden[(None,) * (4 - forbidden.dim())]
    rule = Rule(case.get("causal", False), (case.get("before", -1), case.get("after", -1)))
    sight = Visibility(rule, forbidden, ids, slopes, positions)
    return sight.functions(query, KEYS, cap=case.get("cap"), context=None)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_pytorch_computes_the_definition(case):
    """Only forward, and written out: PyTorch has the kernel and a backward on CUDA."""
    torch.manual_seed(0)
    query = torch.randn(B, HEADS, case.get("queries", KEYS), WIDTH, dtype=torch.float64)
    key, value = torch.randn(2, B, GROUPS, KEYS, WIDTH, dtype=torch.float64)
    value = value[..., :-3]
    functions = functions_of_case(case, query)
    output, sums = flexible_attention.attend(query, key, value, lambda: functions, scale=0.3, has_sums=True)
    expected, expected_sums = flexible_attention_defined(
        query,
        key,
        value,
        score_mod=functions.changed,
        block_mask=functions.blocks,
        scale=0.3,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sums, expected_sums, rtol=1e-12, atol=1e-12)


# PyTorch traces its own functions of gradients like this.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_functions_of_the_next_step_are_compiled_already(monkeypatch):
    """Each step and each layer has other functions of the same kind."""
    kinds, compiled = [], torch.compile
    monkeypatch.setattr(
        flexible_attention, "_made_for", lambda device, function: flexible_attention._compiled(function)
    )

    def backend(graph, inputs):
        kinds.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled(function, backend=backend, **options))
    flexible_attention._compiled.cache_clear()
    found = []
    try:
        for step in range(3):
            for window in (20, 30):
                torch.manual_seed(step)
                tensors = [torch.randn(1, GROUPS, KEYS, WIDTH) for _ in range(3)]
                case = CASES["documents"] | {"document_ids": torch.randint(3, (1, KEYS)).sort(dim=1).values}
                functions = functions_of_case(case | {"before": window}, tensors[0])
                with torch.no_grad():
                    flexible_attention.attend(*tensors, lambda each=functions: each, scale=0.3, has_sums=True)
            found.append(len(kinds))
    finally:
        flexible_attention._compiled.cache_clear()
    assert found == found[:1] * 3
