"""Gradients are completed, measured and clipped as if they were on one rank."""

import math

import pytest
import torch
import torch.distributed as dist
from harness.groups import alone
from harness.parity import assert_bit_equal, assert_close_to, assert_unmodified, gather_shards
from torch import nn

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError
from shardwise.core.initialization import Normal
from shardwise.core.sharding import ParamLayout, Replicas
from shardwise.core.topology import Topology
from shardwise.megatron.config import ModelParallelConfig
from shardwise.nn.replicated import set_replicas_
from shardwise.tensor_parallel.layers import ColumnParallelLinear, named_param_layouts
from shardwise.training.gradients import finalize
from shardwise.training.gradients.finalize import finalize_gradients_, sum_tied_embedding_gradients_
from shardwise.training.optimizer.clipping import clip_grad_norm_
from shardwise.training.optimizer.grad_norm import global_grad_norm

PARTIAL, TIED = Replicas(summed_over=("tp",)), Replicas(summed_over=("embd",))


def column(group, i, o, dtype=torch.float64, **options):
    config = ModelParallelConfig(params_dtype=dtype)
    return ColumnParallelLinear(i, o, config=config, init_method=Normal(1.0), tp_group=group, **options)


def model_of(group, dtype=torch.float64):
    """Split and whole parameters, matrices, vectors and a scalar."""
    model = nn.Module()
    model.up = column(group, 5, 13, dtype)
    model.norm = nn.LayerNorm(7, dtype=dtype)
    model.scale = nn.Parameter(torch.ones((), dtype=dtype))
    model.unused = nn.Parameter(torch.ones(3, dtype=dtype))
    return model


def give_gradients(model, group, scale=1.0):
    """The same whole gradients on every rank, each keeping its part; returns the whole ones."""
    wholes = []
    for name, param, layout in named_param_layouts(model, group.size()):
        if name == "unused":
            continue
        whole = scale * torch.randn(layout.global_shape, dtype=torch.float64)
        param.grad = layout.take(whole, group.rank()).to(param.dtype).clone()
        wholes.append(whole.to(param.dtype).double())
    return wholes


def norm_of(wholes):
    return torch.stack([whole.square().sum() for whole in wholes]).sum().sqrt()


@pytest.mark.ranks(1, 2, 3, 4)
def test_norm_equals_the_dense_one(group):
    model = model_of(group)
    expected = norm_of(give_gradients(model, group))
    parameters = [param.grad for param in model.parameters() if param.grad is not None]
    with assert_unmodified(*parameters):
        norm = global_grad_norm(model, tp_group=group)
    assert norm.dtype == torch.float64
    assert_close_to(norm, expected, rtol_of_norm=1e-14)
    norms = [None] * group.size()
    dist.all_gather_object(norms, norm.item(), group=group)
    assert len(set(norms)) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.float16, 1.0), (torch.float16, 2e4)],
    ids=str,
)
def test_norm_in_lower_precisions(group, dtype, scale):
    # Norms of rows over 65504 do not fit fp16, as gradients of a scaled loss may have them.
    model = model_of(group, dtype)
    expected = norm_of(give_gradients(model, group, scale))
    assert_close_to(global_grad_norm(model, tp_group=group), expected, rtol_of_norm=1e-6)


@pytest.mark.ranks(2)
def test_norm_of_a_large_fp32_gradient(group):
    """One fp32 sum over 12 million squares is off by some 1e-4."""
    model = column(group, 1000, 12_000, torch.float32, bias=False, skip_weight_param_allocation=False)
    exact = 0.0
    for rank in range(2):
        part = torch.randn(6000, 1000, generator=torch.Generator().manual_seed(rank))
        if rank == group.rank():
            model.weight.grad = part
        exact += sum(float(rows.double().square().sum()) for rows in part.split(500))
    norm = global_grad_norm(model, tp_group=group)
    assert abs(float(norm) / math.sqrt(exact) - 1) < 1e-6


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norm_over_many_blocks(group, dtype):
    model = nn.Linear(300, 500, dtype=dtype)
    # One row counts for most of the norm, and the others are not lost beside it.
    model.weight.grad = torch.randn(500, 300).index_fill_(0, torch.tensor([3]), 40.0).to(dtype)
    model.bias.grad = torch.randn(500).to(dtype)
    exact = norm_of([model.weight.grad.double(), model.bias.grad.double()])
    assert abs(float(global_grad_norm(model, tp_group=group) / exact) - 1) < 1e-6


@pytest.mark.ranks(2)
def test_norm_without_any_gradient(group):
    assert global_grad_norm(model_of(group), tp_group=group).item() == 0.0


@pytest.mark.ranks(1, 2, 3)
def test_clipping(group):
    model = model_of(group)
    wholes = give_gradients(model, group)
    expected = float(norm_of(wholes))

    def gradients():
        return [
            gather_shards(param.grad, layout, group)
            for _, param, layout in named_param_layouts(model, group.size())
            if param.grad is not None
        ]

    # Nothing is scaled where nothing is over, nor where one only measures.
    for limit in (expected * 1.01, 0.0, math.inf):
        with assert_unmodified(*[param.grad for param in model.parameters() if param.grad is not None]):
            norm = clip_grad_norm_(model, limit, tp_group=group)
        assert_close_to(norm, torch.tensor(expected, dtype=torch.float64), rtol_of_norm=1e-14)
    norm = clip_grad_norm_(model, 0.5, tp_group=group)
    assert_close_to(norm, torch.tensor(expected, dtype=torch.float64), rtol_of_norm=1e-14)
    # As torch.nn.utils.clip_grad_norm_ on one rank.
    dense = [nn.Parameter(torch.zeros_like(whole)) for whole in wholes]
    for param, whole in zip(dense, wholes, strict=True):
        param.grad = whole.clone()
    nn.utils.clip_grad_norm_(dense, 0.5)
    for gradient, param in zip(gradients(), dense, strict=True):
        assert_close_to(gradient, param.grad, rtol_of_norm=1e-12)
    assert float(norm_of(gradients())) == pytest.approx(0.5, rel=1e-5)
    # Of a loss that was multiplied they are divided by as much, clipped or not.
    for limit, before, after in ((0.25, 0.5, 0.25), (0.0, 0.25, 0.25)):
        torch._foreach_mul_([param.grad for param in model.parameters() if param.grad is not None], 1024.0)
        norm = clip_grad_norm_(model, limit, tp_group=group, loss_scale=1024.0)
        assert float(norm) == pytest.approx(before, rel=1e-5)
        assert float(norm_of(gradients())) == pytest.approx(after, rel=1e-5)


@pytest.mark.ranks(2)
def test_a_norm_that_is_no_number_scales_nothing(group):
    model = model_of(group)
    give_gradients(model, group)
    # On one rank only; all must hear of it.
    if group.rank() == 1:
        model.up.weight.grad[0, 0] = torch.nan
    before = model.norm.weight.grad.clone()
    assert clip_grad_norm_(model, 1.0, tp_group=group).isnan()
    assert_bit_equal(model.norm.weight.grad, before)


@pytest.mark.ranks(2, 3)
def test_partial_sums_of_sequence_parallelism_are_completed(group):
    me, t = group.rank(), group.size()
    model = model_of(group)
    give_gradients(model, group)
    # The norm saw only this rank's tokens; everything else is complete.
    set_replicas_(model.norm, PARTIAL, "weight")
    set_replicas_(model.norm, Replicas(), "bias")
    parts = [torch.randn(7, dtype=torch.float64) for _ in range(t)]
    model.norm.weight.grad = parts[me].clone()
    whole = [param.grad for param in model.parameters() if param is not model.norm.weight and param.grad is not None]
    with assert_unmodified(*whole):
        finalize_gradients_(model, tp_group=group, dp_group=alone(group))
    assert_close_to(model.norm.weight.grad, torch.stack(parts).sum(0), rtol_of_norm=1e-15)
    assert model.unused.grad is None
    gradients = [None] * t
    dist.all_gather_object(gradients, model.norm.weight.grad, group=group)
    for gradient in gradients[1:]:
        assert_bit_equal(gradient, gradients[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket", [1, 40, 1 << 24])
def test_data_parallel_sums_in_buckets(group, monkeypatch, bucket):
    monkeypatch.setattr(finalize, "_BUCKET_ELEMENTS", bucket)
    me, own = group.rank(), alone(group)
    model = nn.Module()
    shapes = [(4, 5), (20,), (), (50,), (3, 1, 2)]
    dtypes = [torch.float64, torch.float64, torch.float64, torch.bfloat16, torch.float64]
    model.all = nn.ParameterList(
        nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    every = [[torch.randint(-9, 10, param.shape).to(param.dtype) for _ in range(2)] for param in model.all]
    for param, parts in zip(model.all, every, strict=True):
        param.grad = parts[me].clone()
    held = [param.grad for param in model.all]
    with CollectiveCounter() as counter:
        finalize_gradients_(model, tp_group=own, dp_group=group)
    for param, parts, gradient in zip(model.all, every, held, strict=True):
        assert_bit_equal(param.grad, parts[0] + parts[1])
        # In place: whoever holds the gradient sees it.
        assert param.grad is gradient
    # Of one dtype in one bucket, up to its size; all elements once.
    assert len(counter.launches) == {1: 5, 40: 4, 1 << 24: 3}[bucket]
    assert counter.num_bytes == 8 * (20 + 20 + 1 + 6) + 2 * 50


@pytest.mark.ranks(4)
def test_both_sums_at_once(group):
    """Two tensor-parallel ranks by two data-parallel ones: partial over the first, samples over the second."""
    topology = Topology.create(tp=2)
    tp_group, dp_group = topology.group("tp"), topology.group("dp")
    norm = nn.LayerNorm(6, dtype=torch.float64)
    set_replicas_(norm, PARTIAL, "weight")
    weights = [torch.randint(-9, 10, (6,)).double() for _ in range(4)]
    biases = [torch.randint(-9, 10, (6,)).double() for _ in range(2)]
    norm.weight.grad = weights[group.rank()].clone()
    norm.bias.grad = biases[dp_group.rank()].clone()
    finalize_gradients_(norm, tp_group=tp_group, dp_group=dp_group)
    assert_bit_equal(norm.weight.grad, torch.stack(weights).sum(0))
    assert_bit_equal(norm.bias.grad, torch.stack(biases).sum(0))


@pytest.mark.ranks(1)
def test_on_one_rank_nothing_is_touched(group):
    model = model_of(group)
    give_gradients(model, group)
    set_replicas_(model.norm, PARTIAL, "weight")
    with assert_unmodified(*[param.grad for param in model.parameters() if param.grad is not None]):
        finalize_gradients_(model, tp_group=group, dp_group=group)


@pytest.mark.ranks(2)
def test_a_tied_weight_counts_once(group):
    model = nn.ModuleList([column(group, 4, 6, bias=False), column(group, 4, 6, bias=False)])
    model[1].weight = model[0].weight
    layout = ParamLayout.split((6, 4), 0, 2)
    whole = torch.randn(6, 4, dtype=torch.float64)
    model[0].weight.grad = layout.take(whole, group.rank()).clone()
    assert_close_to(global_grad_norm(model, tp_group=group), whole.norm(), rtol_of_norm=1e-14)
    clip_grad_norm_(model, float(whole.norm()) / 2, tp_group=group)
    gathered = gather_shards(model[0].weight.grad, layout, group)
    assert_close_to(gathered, whole / 2, rtol_of_norm=1e-6)


@pytest.mark.ranks(1, 2, 4)
def test_gradients_in_main_grad_are_completed_measured_and_clipped_alike(group):
    """Key-value copies, partial sums, and what autograd left in ``grad``; a bystander has no ``main_grad``."""

    def model_with(fused):
        model = model_of(group)
        set_replicas_(model.norm, PARTIAL, "weight")
        # Rows 0 to 5 in two halves, each of which several ranks hold if there are enough of them.
        model.keys = nn.Parameter(torch.zeros(6 if group.size() == 1 else 3, 2, dtype=torch.float64))
        held = [(0, 6)] if group.size() == 1 else [(0, 3), (3, 6)]
        intervals = [[held[rank * len(held) // group.size()]] for rank in range(group.size())]
        model.param_layouts = {"keys": ParamLayout.of_intervals((6, 2), 0, intervals)}
        torch.manual_seed(group.rank())
        for name, param in model.named_parameters():
            gradient = torch.randn_like(param)
            if fused and name != "scale":
                param.main_grad = gradient if name == "unused" else 0.25 * gradient
                param.grad = None if name == "unused" else 0.75 * gradient
            else:
                param.grad = gradient
        return model

    plain, fused = model_with(False), model_with(True)
    norms = []
    for model in (plain, fused):
        finalize_gradients_(model, tp_group=group, dp_group=alone(group))
        norms.append(clip_grad_norm_(model, 0.5, tp_group=group))
    assert_close_to(norms[1], norms[0], rtol_of_norm=1e-14)
    for (name, param), expected in zip(fused.named_parameters(), plain.parameters(), strict=True):
        assert (param.grad is None) == (name != "scale")
        gradient = param.grad if name == "scale" else param.main_grad
        assert_close_to(gradient, expected.grad, rtol_of_norm=1e-14)


@pytest.mark.ranks(2, 4)
def test_copies_of_a_key_value_head_have_the_sum_of_their_gradients(group):
    """Rows 0 to 2 are of every rank; of the others each has three by itself, or shares them with a neighbour."""
    t, me = group.size(), group.rank()
    runs = [[(0, 2), (2 + 3 * (rank // max(1, t // 2)), 5 + 3 * (rank // max(1, t // 2)))] for rank in range(t)]
    model = nn.Module()
    model.keys = nn.Parameter(torch.zeros(5, 2, dtype=torch.float64))
    model.other = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    model.param_layouts = {"keys": ParamLayout.of_intervals((8, 2), 0, runs)}
    parts = [torch.randint(-99, 100, (5, 2)).double() for _ in range(t)]
    model.keys.grad, model.other.grad = parts[me].clone(), torch.full((3,), float(me), dtype=torch.float64)
    held = model.keys.grad
    finalize_gradients_(model, tp_group=group, dp_group=None)
    alike = [part for part, held_by in zip(parts, runs, strict=True) if held_by == runs[me]]
    assert_bit_equal(model.keys.grad, torch.cat([sum(part[:2] for part in parts), sum(part[2:] for part in alike)]))
    assert model.keys.grad is held
    assert_bit_equal(model.other.grad, torch.full((3,), float(me), dtype=torch.float64))


@pytest.mark.ranks(2, 3)
def test_copies_of_a_tied_weight_have_the_sum_of_their_gradients(group):
    me, own = group.rank(), alone(group)
    parts = [torch.randint(-99, 100, (4, 3)).double() for _ in range(group.size())]
    for finish in (
        lambda model: finalize_gradients_(model, tp_group=own, dp_group=None, embd_group=group),
        lambda model: sum_tied_embedding_gradients_(model, embd_group=group),
    ):
        model = nn.Module()
        model.tied, model.other = (nn.Parameter(torch.zeros(4, 3, dtype=torch.float64)) for _ in range(2))
        set_replicas_(model, TIED, "tied")
        model.tied.grad, model.other.grad = parts[me].clone(), parts[me].clone()
        finish(model)
        assert_bit_equal(model.tied.grad, sum(parts))
        assert_bit_equal(model.other.grad, parts[me])


@pytest.mark.ranks(2)
def test_a_tied_weight_frozen_on_one_stage_only_is_refused_on_both(group):
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    set_replicas_(model, TIED, "weight")
    if group.rank() == 0:
        model.weight.grad = torch.ones(3, dtype=torch.float64)
    with pytest.raises(ConfigError, match="has a gradient on 1 of the 2 pipeline stages"):
        sum_tied_embedding_gradients_(model, embd_group=group)
    model.weight.grad = None
    sum_tied_embedding_gradients_(model, embd_group=group)
    assert model.weight.grad is None
