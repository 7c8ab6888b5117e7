"""Ids outside the vocabulary are named, where values can be looked at."""

import pytest
import torch
from harness.on_pretended_gpu import StepRecorder, fake_tensors, join
from harness.parity import assert_unmodified

from shardwise.core.errors import VocabularyError
from shardwise.core.validation import DeferredChecks, check_ids, safe_to_look_up, validation_applies
from shardwise.nn.loss.cross_entropy import vocab_parallel_cross_entropy


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_ids_inside_pass(dtype):
    ids = torch.tensor([[0, 9], [3, 5]], dtype=dtype)
    with assert_unmodified(ids):
        check_ids(ids, 10, what="token id")
    check_ids(torch.empty(0, 3, dtype=dtype), 10, what="token id")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 10], [3, 11]], "token id 10 at position [0, 1] is outside the vocabulary of 10 ids"),
        ([[0, 1], [-1, 10]], "token id -1 at position [1, 0] is outside the vocabulary of 10 ids"),
        (999, "token id 999 at position [] is outside the vocabulary of 10 ids"),
    ],
)
def test_the_first_id_outside_is_named(ids, message):
    with pytest.raises(VocabularyError) as info:
        check_ids(torch.tensor(ids), 10, what="token id")
    assert str(info.value) == message
    assert isinstance(info.value, ValueError)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_what_is_no_integer_is_no_id(dtype, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(
        VocabularyError, match=rf"token id of shape \[2, 1\] is of {dtype}; ids are of an integer dtype"
    ):
        check_ids(torch.zeros(2, 1, dtype=dtype), 10, what="token id")


def test_one_more_id_may_be_allowed():
    check_ids(torch.tensor([0, -100, 9]), 10, what="target", ignore_index=-100)
    check_ids(torch.tensor([0, 50]), 10, what="target", ignore_index=50)
    with pytest.raises(VocabularyError, match=r"target -1 at position \[1\].* \(and is not ignore_index -100\)$"):
        check_ids(torch.tensor([0, -1, -100]), 10, what="target", ignore_index=-100)
    with pytest.raises(VocabularyError, match="target -100"):
        check_ids(torch.tensor([0, -100]), 10, what="target")


def test_nothing_is_looked_at_while_compiling(monkeypatch):
    assert validation_applies()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not validation_applies()
    check_ids(torch.tensor([99]), 10, what="token id")


def test_nothing_is_looked_at_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not validation_applies()
    check_ids(torch.tensor([99]), 10, what="token id")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(VocabularyError, match="token id 99"):
        check_ids(torch.tensor([99]), 10, what="token id")


def test_deferred_checks_are_a_tensor_until_they_are_run():
    device = torch.device("cpu")
    with DeferredChecks() as outer:
        assert outer.failed(device) == 0.0
        check_ids(torch.tensor([1, 2]), 10, what="token id")
        with DeferredChecks() as inner:
            check_ids(torch.tensor([[3, 4], [5, 10]]), 10, what="token id")
            check_ids(torch.tensor([-1]), 10, what="target")
            looked_up = safe_to_look_up(torch.tensor([3, 10, -1]), 10)
        check_ids(torch.tensor([9]), 10, what="token id")
    assert looked_up.tolist() == [3, 0, 0]
    assert (inner.failed(device), outer.failed(device)) == (1.0, 0.0)
    outer.run()
    with pytest.raises(
        VocabularyError, match=r"^token id 10 at position \[1, 1\] is outside the vocabulary of 10 ids$"
    ):
        inner.run()
    # Outside of the block a look is a look again.
    with pytest.raises(VocabularyError, match="token id 99"):
        check_ids(torch.tensor([99]), 10, what="token id")


def on_a_gpu():
    group = join("cuda:fake", world_size=2, rank=0)
    with fake_tensors(), StepRecorder() as recorder:
        ids = torch.ones(3, dtype=torch.int64, device="cuda")
        check_ids(ids, 10, what="token id")
        logits = torch.ones(3, 5, device="cuda", requires_grad=True)
        options = {"label_smoothing": 0.1, "reduction": "mean"}
        vocab_parallel_cross_entropy(logits, ids, group=group, vocab_size=9, padded_vocab_size=10, **options).backward()
    return recorder.waits, recorder.copies, recorder.operators["aten._assert_async.msg"]


def test_on_a_gpu_ids_are_asserted_and_nobody_waits(pretended_gpu):
    assert pretended_gpu(on_a_gpu) == ({}, {}, 2)
