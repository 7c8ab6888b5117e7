"""Where a rank computes and why, what it computes in there, and how ranks of GPUs are joined."""

import os

import pytest
import torch
import torch.distributed as dist
from harness.on_pretended_gpu import fake_tensors
from run.tiny import tiny_settings
from torch._C._distributed_c10d import FakeProcessGroup

from shardwise.core.errors import ConfigError
from shardwise.run.banner import tf32
from shardwise.run.processes import ranks
from shardwise.run.processes.ranks import (
    OVERLAP_VARIABLES,
    choose_device,
    prepare_allocator,
    prepare_overlap,
    process_group_of,
    refuse_shared_gpus,
)
from shardwise.training.optimizer.mixed_precision import PRECISIONS

HIDDEN = "PyTorch finds no GPU here: there is none, no driver, or CUDA_VISIBLE_DEVICES hides them"


@pytest.fixture
def gpus(monkeypatch):
    def there_are(count, *, version="13.0"):
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return there_are


@pytest.mark.parametrize(
    ("count", "version", "num_local", "why"),
    [
        (0, None, 1, "this PyTorch was built without CUDA"),
        (0, "13.0", 1, HIDDEN),
        (1, "13.0", 2, "this machine has 1 GPU for 2 ranks, and each rank needs one"),
        (7, "13.0", 8, "this machine has 7 GPUs for 8 ranks, and each rank needs one"),
        (2, "13.0", 2, None),
    ],
)
def test_auto_takes_a_gpu_if_each_rank_has_one_and_says_why_not(gpus, count, version, num_local, why):
    gpus(count, version=version)
    device, said = choose_device("auto", local_rank=num_local - 1, num_local=num_local)
    if why is None:
        assert (device, said) == (torch.device("cuda", 1), "a GPU for each rank")
    else:
        assert (device, said) == (torch.device("cpu"), why)
    assert choose_device("cpu", local_rank=0, num_local=1)[0] == torch.device("cpu")


def test_cuda_is_refused_with_the_reason_unless_a_rank_sees_its_own(gpus):
    gpus(2)
    with pytest.raises(ConfigError, match=r"'cuda', but this machine has 2 GPUs for 3 ranks, .* or use --device cpu"):
        choose_device("cuda", local_rank=0, num_local=3)
    # A launcher that shows each rank one GPU alone; whether it is its own is found out with the others.
    gpus(1)
    assert choose_device("cuda", local_rank=3, num_local=8)[0] == torch.device("cuda", 0)
    gpus(0)
    with pytest.raises(ConfigError, match=HIDDEN):
        choose_device("cuda", local_rank=0, num_local=1)


def test_ranks_that_would_share_a_gpu_are_told_so():
    store = dist.HashStore()
    for rank, gpu in ((4, "GPU-a"), (5, "GPU-b"), (6, "GPU-a")):
        store.set(f"shardwise/gpu/{rank}", gpu)
    for rank in (4, 5, 6):
        gpu = store.get(f"shardwise/gpu/{rank}").decode()
        with pytest.raises(ConfigError, match="ranks 4 and 6 would share the GPU GPU-a, and NCCL needs one for each"):
            refuse_shared_gpus(store, gpu, rank=rank, on_host=(4, 5, 6))
    refuse_shared_gpus(store, "GPU-b", rank=5, on_host=(5,))


def test_what_the_user_set_stays(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # So that the test ends with the value of its beginning.
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "")
    monkeypatch.delenv("TORCH_NCCL_HIGH_PRIORITY")
    prepare_overlap()
    assert {name: os.environ[name] for name in OVERLAP_VARIABLES} == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "TORCH_NCCL_HIGH_PRIORITY": "1",
    }


def test_the_allocator_extends_segments_unless_the_user_configured_it(monkeypatch):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        # So that the test ends with the values of its beginning.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name in names:
        with monkeypatch.context() as own:
            own.setenv(name, "max_split_size_mb:128")
            prepare_allocator()
            assert {each: os.environ[each] for each in names if each in os.environ} == {name: "max_split_size_mb:128"}
    prepare_allocator()
    assert os.environ[names[0]] == "expandable_segments:True"


def test_groups_of_gpus_have_gloo_for_the_hosts_and_nccl_with_its_device():
    assert process_group_of(torch.device("cpu"), 2) == {"backend": "gloo"}
    device = torch.device("cuda", 3)
    assert process_group_of(device, 2) == {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    # One rank has nobody to talk to: no communicator is made before something asks for it.
    assert process_group_of(device, 1) == {"backend": "cpu:gloo,cuda:nccl"}


def opened():
    """What happens to the process groups of a rank on a GPU that ends well, and of one that fails."""
    ended, init = [], dist.init_process_group

    def as_if_with_nccl(backend, **options):
        assert (backend, "device_id" in options) == ("cpu:gloo,cuda:nccl", False)
        init("cpu:gloo,cuda:fake", **options)

    dist.init_process_group = as_if_with_nccl
    limits = []
    FakeProcessGroup._set_default_timeout = lambda group, limit: limits.append(limit.total_seconds())
    torch.cuda.set_device = lambda device: None
    ranks.choose_device = lambda *_, **__: (torch.device("cuda", 0), "pretended")
    destroy, abort = dist.destroy_process_group, dist.distributed_c10d._abort_process_group
    dist.destroy_process_group = lambda: (ended.append("destroy"), destroy())[1]
    # The fake backend has nothing to abort.
    dist.distributed_c10d._abort_process_group = lambda: (ended.append("abort"), destroy())[1]
    for fails in (False, True):
        try:
            with ranks.open_ranks("auto") as joined, fake_tensors():
                assert joined.device == torch.device("cuda", 0)
                if fails:
                    raise InterruptedError
        except InterruptedError:
            assert fails
        assert not dist.is_initialized()
    return ended, limits, callable(abort)


@pytest.mark.slow
def test_groups_are_aborted_after_a_failure_and_destroyed_otherwise(pretended_gpu):
    # NCCL's collectives of a step may take an hour before it gives up by itself; the watch knows sooner.
    assert pretended_gpu(opened) == (["destroy", "abort"], [3600.0, 3600.0], True)


def test_the_dtype_is_that_of_the_device_unless_one_is_given(tmp_path):
    usual = tiny_settings(tmp_path)
    assert usual.training.dtype == "auto"
    assert usual.on_device("cpu").training.dtype == "float32"
    assert usual.on_device("cuda").training.dtype == "bfloat16"
    given = tiny_settings(tmp_path, dtype="float16")
    assert given.on_device("cuda") is given
    precise = tiny_settings(tmp_path, dtype="tf32")
    assert PRECISIONS[precise.on_device("cuda").training.dtype].uses_tf32
    with pytest.raises(ConfigError, match="'tf32', which CUDA's tensor cores have, and this rank computes on cpu"):
        precise.on_device("cpu")


def test_tf32_is_reported_where_there_are_products_of_fp32():
    assert [(choice.on, choice.why) for choice in tf32("cuda", "float32")] == [
        (False, "--training.dtype tf32 has them")
    ]
    assert [choice.on for choice in tf32("cuda", "tf32")] == [True]
    assert tf32("cuda", "bfloat16") == tf32("cpu", "float32") == []
