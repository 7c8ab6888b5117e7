"""Micro-batches of different sizes and lengths: the shape of each hidden state travels ahead of it."""

from __future__ import annotations

import itertools
import os
import re

import pytest
import torch
import torch.distributed as dist
from harness.forked import run_forked
from harness.nccl_rules import nccl_rules
from harness.parity import assert_close_to, assert_unmodified
from training.pipeline.pipelines import batch_of_sizes, random_batch, run_whole, staged_gpt
from training.pipeline.test_pipeline_gradients import CASES, assert_gradients_of, finalize

from shardwise.core.errors import ConfigError, ShardingError, ShardwiseError
from shardwise.training.pipeline import forward_only, make_schedule, stage as stage_module
from shardwise.training.pipeline.shapes import check_shape, make_header, read_header

SIZES = [(2, 11), (1, 3), (3, 7), (1, 1), (2, 10), (1, 11), (4, 2), (1, 5)]
"""``(b, s)`` of micro-batches; 1, 3, 5, 7 and 11 positions do not divide by 2 ranks."""


def staged_for(name, tp=1, pp=1, **options):
    return staged_gpt(
        tp=tp,
        pp=pp,
        num_chunks=CASES[name] if pp > 1 else 1,
        delay_wgrad_compute=name == "zero-bubble" and pp > 1,
        **options,
    )


def assert_losses_of(whole, losses, staged, results):
    if staged.topology.rank("pp") < staged.topology.size("pp") - 1:
        assert results == []
        return
    assert len(results) == len(losses)
    for result, loss in zip(results, losses, strict=True):
        assert_close_to(result, loss, rtol_of_norm=1e-12)


@pytest.mark.ranks(2, 4, slow=(4,))
@pytest.mark.parametrize("name", [pytest.param("gpipe", marks=pytest.mark.slow), *list(CASES)[1:]])
def test_losses_and_gradients_equal_the_whole_models(group, name):
    pp = group.size()
    batch = batch_of_sizes(SIZES[: 2 * pp])
    whole = staged_for(name, num_layers=2 * pp + 1)
    losses = run_whole(whole.chunks[0], batch)
    staged = staged_for(name, pp=pp, num_layers=2 * pp + 1)
    with assert_unmodified(*batch[0], *batch[1]):
        results = staged.run(make_schedule(name, pp, 2 * pp, CASES[name]), batch)
    finalize(staged)
    assert_losses_of(whole, losses, staged, results)
    assert_gradients_of(whole, staged)
    # Without gradients, and a number of micro-batches that no stage divides.
    table = forward_only(pp, 2 * pp - 1, CASES[name])
    results = staged.run(table, tuple(part[:-1] for part in batch), forward_only=True)
    if group.rank() > 0:
        with pytest.raises(ShardingError, match="call set_input_tensor before forward"):
            staged.chunks[0](batch[0][0])
    assert_losses_of(whole, losses[:-1], staged, results)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["1f1b", pytest.param("interleaved", marks=pytest.mark.slow)])
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_with_tensor_and_sequence_parallelism(group, name, sequence_parallel):
    """One position on two ranks: one of them sends hidden states without elements."""
    batch = batch_of_sizes(SIZES)
    whole = staged_for(name, num_layers=5)
    losses = run_whole(whole.chunks[0], batch)
    staged = staged_for(name, tp=2, pp=2, num_layers=5, sequence_parallel=sequence_parallel)
    results = staged.run(make_schedule(name, 2, len(SIZES), CASES[name]), batch)
    finalize(staged)
    assert_losses_of(whole, losses, staged, results)
    assert_gradients_of(whole, staged)


@pytest.mark.ranks(2, 4, slow=(4,))
@pytest.mark.parametrize("name", [pytest.param("gpipe", marks=pytest.mark.slow), *list(CASES)[1:]])
def test_where_messages_have_an_order_and_no_tags(group, name):
    pp = group.size()
    batch = batch_of_sizes(SIZES[: 2 * pp])
    with nccl_rules() as num_calls:
        staged = staged_for(name, pp=pp, num_layers=2 * pp, tied=False)
        results = staged.run(make_schedule(name, pp, 2 * pp, CASES[name]), batch)
    assert num_calls["send"] + num_calls["recv"] >= 6 * pp
    whole = staged_for(name, num_layers=2 * pp, tied=False)
    losses = run_whole(whole.chunks[0], batch)
    assert_losses_of(whole, losses, staged, results)
    assert_gradients_of(whole, staged)


@pytest.mark.ranks(2)
def test_only_micro_batches_of_several_shapes_cost_messages(group, monkeypatch):
    calls = []
    exchange = stage_module.exchange

    def counted(sends, receives, *, group):
        calls.append([tuple(each.tensor.shape) for each in (*sends, *receives)])
        return exchange(sends, receives, group=group)

    monkeypatch.setattr(stage_module, "exchange", counted)
    staged = staged_for("1f1b", pp=2, num_layers=2)
    staged.run(make_schedule("1f1b", 2, 4), random_batch(4))
    # Hidden states and gradients of 4 micro-batches, and nothing else.
    assert list(itertools.chain(*calls)) == [(11, 2, 24)] * 8
    calls.clear()
    staged.run(make_schedule("1f1b", 2, 4), batch_of_sizes(SIZES[:4]))
    shapes = [(s, b, 24) for b, s in SIZES[:4]]
    assert sorted(itertools.chain(*calls)) == sorted([(4,)] * 4 + shapes + shapes)


@pytest.mark.ranks(2)
def test_a_backward_does_not_wait_for_the_next_shape(group):
    """The last stage runs its first backward before the stage before it has made the second micro-batch."""
    staged = staged_for("1f1b", pp=2, num_layers=2)
    model, forwards, store = staged.chunks[0], [], torch.distributed.distributed_c10d._get_default_store()

    def before(*_):
        forwards.append(len(forwards))
        if group.rank() == 0 and len(forwards) == 2:
            store.wait(["the first backward"])

    model.register_forward_pre_hook(before)
    if group.rank() == 1:
        weight = model.decoder.layers[0].mlp.linear_fc1.weight
        weight.register_post_accumulate_grad_hook(lambda _: store.set("the first backward", "1"))
    batch = batch_of_sizes(SIZES[:4])
    staged.run(make_schedule("1f1b", 2, 4), batch)
    store.delete_key("the first backward")
    assert len(forwards) == 4


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", [pytest.param("1f1b", marks=pytest.mark.slow), "interleaved"])
def test_an_error_of_any_stage_ends_all_and_the_next_step_is_right(group, name):
    pp = group.size()
    staged = staged_for(name, pp=pp, num_layers=2 * pp)
    batch = batch_of_sizes(SIZES)
    schedule = make_schedule(name, pp, len(SIZES), CASES[name])
    for failing in range(pp):
        calls = []

        def fail_at_the_third(*_, calls=calls, failing=failing):
            calls.append(True)
            if len(calls) == 3:
                raise ConfigError(f"stage {failing} has had enough")

        hook = staged.chunks[0].register_forward_hook(
            fail_at_the_third if group.rank() == failing else lambda *_, calls=calls: calls.append(True)
        )
        with pytest.raises(ConfigError, match=f"stage {failing} has had enough"):
            staged.run(schedule, batch)
        hook.remove()
        # Each later stage is told, and computes nothing of what comes then.
        assert group.rank() < failing or len(calls) == 2 + (group.rank() == failing)
    staged.chunks.zero_grad()
    staged.run(schedule, batch)
    finalize(staged)
    whole = staged_for(name, num_layers=2 * pp)
    run_whole(whole.chunks[0], batch)
    assert_gradients_of(whole, staged)


WRONG = {
    "width": (
        lambda hidden: hidden[..., :23],
        r"shape \[7, 3, 23\], and the stages exchange \[any, any, 24\]; micro-batches may differ only in",
    ),
    "dims": (lambda hidden: hidden[0], r"shape \[3, 24\], and the stages exchange \[any, any, 24\]"),
    "bytes": (
        lambda hidden: hidden[:1].expand(2**31, 3, 24),
        r"shape \[2147483648, 3, 24\], 1236950581248 bytes .*; no size .* at most 64 GiB: give shorter",
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", WRONG)
def test_a_shape_that_stages_do_not_exchange_ends_all(group, what):
    change, words = WRONG[what]
    staged = staged_for("1f1b", pp=2, num_layers=2)
    if group.rank() == 0:
        model = staged.chunks[0]
        model.register_forward_hook(lambda _, given, out: change(out) if given[0].size(1) == 7 else None)
    with pytest.raises(ShardingError, match="micro-batch 2: stage 0 made .*" + words):
        staged.run(make_schedule("1f1b", 2, 4), batch_of_sizes(SIZES[:4]))


@pytest.mark.ranks(2)
def test_stages_whose_rows_differ_end_all(group):
    """The last stage reads other rows than the first."""
    staged = staged_for("1f1b", pp=2, num_layers=2)
    tokens, labels = batch_of_sizes(SIZES[:4])
    if group.rank() == 1:
        tokens, labels = [[part[0], part[1][:, :2], *part[2:]] for part in (tokens, labels)]
    with pytest.raises(
        ShardingError, match=r"was sent hidden states of shape \[3, 1, 24\], .* make \[2, 1, 24\]; give all"
    ):
        staged.run(make_schedule("1f1b", 2, 4), (tokens, labels))


def run_as_stage(store, rank, what):
    """The middle one of three stages dies, or sends a wrong header; each prints its error."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    staged = staged_for("1f1b", pp=3, num_layers=3)
    if rank == 1 and what == "dies":
        # After the forward of micro-batch 2, of which the last stage has then no header.
        staged.chunks[0].register_forward_hook(lambda _, given, out: os._exit(9) if given[0].size(1) == 7 else None)
    elif rank == 1:
        make = stage_module.make_header
        stage_module.make_header = lambda shape, *rest, **options: make(
            [2**40, *shape[1:]] if shape[0] == 7 else shape, *rest, **options
        )
    try:
        staged.run(make_schedule("1f1b", 3, 4), batch_of_sizes(SIZES[:4]))
    except ShardwiseError as error:
        print(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("what", ["dies", "sends a wrong header"])
def test_a_stage_that_dies_or_sends_a_wrong_header_ends_all(tmp_path, what):
    done = run_forked(run_as_stage, [(tmp_path / "store", rank, what) for rank in range(3)], tmp_path, all_end=True)
    codes, texts = zip(*done, strict=True)
    dies = what == "dies"
    assert codes == (0, 9 if dies else 0, 0), texts
    for rank, text in enumerate(texts):
        if rank == 2 and not dies:
            announced = "micro-batch 2: hidden states from stage 1 were announced with the shape [1099511627776, 3, 24]"
            assert text.startswith(f"ShardingError: {announced}, ")
        elif rank != 1 or not dies:
            assert re.match(rf"DesyncError: .*rank {rank} of 3", text), text


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([0, -1, 2, 24], r"hidden states from stage 0 were announced .* \[-1, 2, 24\], .* no size may be negative"),
        ([0, 2**40, 2, 24], r"\[1099511627776, 2, 24\], 422212465065984 bytes of torch.float64; .* 64 GiB"),
        ([0, 5, 2, 23], r"\[5, 2, 23\], and the stages exchange \[any, any, 24\]"),
        ([7, 5, 2, 24], r"announced by \[7, 5, 2, 24\], which must begin with 0 or 1"),
    ],
    ids=["negative", "huge", "width", "flag"],
)
def test_a_header_is_not_trusted(numbers, words):
    with pytest.raises(ShardingError, match=words):
        read_header(torch.tensor(numbers), (None, None, 24), torch.float64, whose="hidden states from stage 0")


def test_headers():
    cpu = torch.device("cpu")
    for shape in ((5, 2, 24), (0, 1, 24)):
        for has_failed in (False, True):
            header = make_header(shape, cpu, has_failed=has_failed)
            assert read_header(header, (None, None, 24), torch.bfloat16, whose="") == (shape, has_failed)
    check_shape((), (), torch.float32, "")
    # At most 64 GiB.
    check_shape((1 << 33,), (None,), torch.float64, "")
    with pytest.raises(ShardingError, match=r"\[8589934593\], 68719476744 bytes"):
        check_shape(((1 << 33) + 1,), (None,), torch.float64, "")
