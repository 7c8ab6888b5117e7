"""A GPU that is not there: what PyTorch believes of it, and what a recorder sees of a step on it."""

import os
import signal
import threading

import pytest
import torch
from harness.on_pretended_gpu import StepRecorder, fake_tensors, join


def a_backward_pass():
    threads = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            threads.append(threading.get_ident())
            return gradient

    with fake_tensors():
        x = torch.ones(3, device="cuda", requires_grad=True)
        Noted.apply(x).sum().backward()
        return str(x.grad.device), threads == [threading.get_ident()]


def test_a_backward_runs_in_autograds_thread_of_the_device(pretended_gpu):
    assert pretended_gpu(a_backward_pass) == ("cuda:0", False)


def a_recorded_step():
    group = join(world_size=8, rank=3)
    with fake_tensors():
        table = torch.ones(4, 5)
        with StepRecorder() as recorder:
            weight = torch.ones(5, 6, device="cuda", requires_grad=True)
            product = table.to("cuda") @ weight
            product.sum().backward()
            if product.sum().item() == 0 and not product.isnan().any():
                product.detach()[product > 1] = 0
            torch.distributed.all_reduce(weight.grad, group=group)
    return group.size(), group.rank(), recorder


def test_a_recorder_sees_waits_copies_products_and_collectives(pretended_gpu):
    size, rank, recorder = pretended_gpu(a_recorded_step)
    assert (size, rank) == (8, 3)
    assert recorder.copies == {("cpu to cuda", "autograd"): 1}
    waits = {"aten._local_scalar_dense.default": 2, "aten.index_put_.default": 1}
    assert recorder.waits == {(name, "autograd"): count for name, count in waits.items()}
    assert recorder.operators["aten.mm.default"] == 2
    assert recorder.operators["c10d.allreduce_.default"] == 1
    assert recorder.made["cuda:0", "float32", (5, 6), "autograd"] == 1


def fail(how):
    if how == "raises":
        raise KeyError("what went wrong")
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_failure_there_is_one_here(pretended_gpu):
    with pytest.raises(AssertionError, match=r"in fail\n(.*\n)*KeyError: 'what went wrong'"):
        pretended_gpu(fail, "raises")
    with pytest.raises(AssertionError, match="the process ended with SIGSEGV"):
        pretended_gpu(fail, "dies")
    assert pretended_gpu(a_backward_pass)[0] == "cuda:0"
