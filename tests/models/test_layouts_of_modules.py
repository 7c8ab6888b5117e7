"""The layouts that parallel modules state are those of the values and gradients that flow through them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness.groups import alone
from harness.model_options import NO_DROPOUT
from harness.parity import assert_close_to, gather_all
from torch import Tensor, nn

from shardwise.core.communication.collectives import all_reduce
from shardwise.core.layout import I, Layout, P, R, V
from shardwise.core.sharding import balanced_sizes
from shardwise.core.topology import Groups
from shardwise.models.config import ModelConfig
from shardwise.models.gpt import GPT
from shardwise.nn import ColumnLinear, RowLinear
from shardwise.nn.linear import LinearParallelism

VOCAB, SEQUENCE, BATCH = 37, 13, 2


def model(group, *, sequence_parallel, learned):
    config = ModelConfig(
        num_layers=2,
        hidden_size=24,
        num_attention_heads=6,
        num_query_groups=6,
        ffn_hidden_size=29,
        gated_linear_unit=not learned,
        activation_func=F.silu,
        sequence_parallel=sequence_parallel and group.size() > 1,
        **NO_DROPOUT,
        params_dtype=torch.float64,
        init_method_std=0.3,
    )
    torch.manual_seed(3)
    kind = "learned_absolute" if learned else "rope"
    return GPT(config, VOCAB, SEQUENCE, position_embedding_type=kind, groups=Groups(tp=group))


def record(module: nn.Module) -> dict[str, list[Tensor]]:
    """What goes into and comes out of every module that states layouts, as ``[value, gradient]``, filled by a step."""
    flows: dict[str, list[Tensor]] = {}

    def keep(name: str, tensor: Tensor) -> None:
        flows[name] = [tensor.detach().clone()]
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: flows[name].append(grad.clone()))

    for name, inner in module.named_modules():
        if hasattr(inner, "output_layout"):
            inner.register_forward_pre_hook(lambda _, args, name=name: keep(f"{name} input", args[0]))
            inner.register_forward_hook(lambda _, args, output, name=name: keep(f"{name} output", output))
    return flows


def assert_is(layout: Layout, found: Tensor, whole: Tensor, group, name: str) -> None:
    """``found`` is this rank's part of ``whole`` in a layout; sections of a split dimension may come in any order."""
    if layout.kind == "P":
        found = all_reduce(found, group=group)
    elif layout.kind == "V":
        sizes = layout.sizes or balanced_sizes(whole.size(layout.dim), group.size())
        assert found.size(layout.dim) == sizes[group.rank()], name
        found = torch.cat(gather_all(found, group), layout.dim).sort(layout.dim).values
        whole = whole.sort(layout.dim).values
    assert_close_to(found, whole, rtol_of_norm=1e-12, name=name)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("learned", [False, True])
def test_what_flows_through_a_model(group, sequence_parallel, learned):
    dense, split = (model(g, sequence_parallel=sequence_parallel, learned=learned) for g in (alone(group), group))
    ids, labels = (torch.randint(VOCAB, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    flows = []
    for one in (dense, split):
        flows.append(record(one))
        one(ids, labels=labels).sum().backward()
    modules = dict(split.named_modules())
    assert len(flows[1]) == len(flows[0]) > 20
    layouts = set()
    for name, (value, *gradient) in flows[1].items():
        module, _, end = name.rpartition(" ")
        layout = getattr(modules[module], f"{end}_layout")
        whole, *whole_gradient = flows[0][name]
        if value.dim() == whole.dim() == 3 and value.size(1) != whole.size(1):
            # An embedding that splits the sequence returns it first, the dense one the batch.
            whole, *whole_gradient = (tensor.transpose(0, 1) for tensor in (whole, *whole_gradient))
        assert_is(layout, value, whole, group, name)
        assert len(gradient) == len(whole_gradient), name
        for found, wanted in zip(gradient, whole_gradient, strict=True):
            assert_is(layout.gradient, found, wanted, group, f"the gradient of {name}")
        layouts.add((layout.kind, layout.dim))
    assert layouts == {("I", None), ("V", -1)} | ({("V", 0)} if sequence_parallel else set())


@pytest.mark.ranks(2, 3)
def test_a_pair_without_communication_leaves_partial_sums(group):
    """The outer layouts of layers whose moves a program makes: R in front, P behind."""
    torch.manual_seed(4)
    options = {"group": group, "parallelism": LinearParallelism.LOCAL, "dtype": torch.float64}
    up, down = ColumnLinear(7, 11, **options), RowLinear(11, 7, bias=False, **options)
    assert (up.input_layout, down.output_layout) == (R, P)
    torch.manual_seed(4)
    options["group"] = alone(group)
    one_up, one_down = ColumnLinear(7, 11, **options), RowLinear(11, 7, bias=False, **options)
    assert (one_up.input_layout, one_down.output_layout) == (I, I)
    flows = record(nn.Sequential(up, down)), record(nn.Sequential(one_up, one_down))
    for one in (nn.Sequential(up, down), nn.Sequential(one_up, one_down)):
        one(torch.ones(3, 2, 7, dtype=torch.float64, requires_grad=True)).sum().backward()
    for name in ("0 input", "1 output"):
        layout = up.input_layout if name == "0 input" else down.output_layout
        for kind, found, whole in zip((layout, layout.gradient), flows[0][name], flows[1][name], strict=True):
            assert_is(kind, found, whole, group, name)


@pytest.mark.ranks(2)
def test_a_module_shows_its_layouts(group):
    column = ColumnLinear(8, 7, group=group, sequence_parallel=True)
    assert repr(column).endswith(f"tp={group.rank()}/2, V(dim=0) -> V(dim=-1, sizes=[4, 3]))")
    assert [repr(layout) for layout in (I, R, P, V())] == ["I", "R", "P", "V"]
