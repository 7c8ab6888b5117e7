"""Each row of the tables of overlaps in ``docs/gpus.md``, in simulated steps of Llama-3-8B's shape."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from harness.launches import Launch, Launches, with_streams
from harness.on_pretended_gpu import fake_tensors, join
from harness.page import DOCS
from harness.pretended_kernels import as_on_a_gpu
from run.pretended_run import LLAMA_3_8B, run_two_steps

LENGTH = 8192
MICRO_BATCHES = 2
# Number of ranks, this rank, and settings. GPUs have one queue with tensor parallelism, and eight otherwise; both are
# simulated for all.
CASES = {
    "tp": (8, 0, {"parallel": {"tp": 8}}),
    "sp": (8, 0, {"parallel": {"tp": 8, "sequence_parallel": True}}),
    "recomputation": (8, 0, {"parallel": {"tp": 8, "sequence_parallel": True}, "recompute": {"granularity": "full"}}),
    "overlap": (8, 0, {"parallel": {"tp": 8, "sequence_parallel": True, "tp_comm_overlap": True}}),
    "dp": (8, 0, {"parallel": {"tp": 4, "sequence_parallel": True}}),
    "zero1": (8, 0, {"parallel": {"tp": 4, "sequence_parallel": True, "zero": 1}}),
    "fsdp": (2, 0, {"parallel": {"fsdp": True}}),
    "gpipe": (4, 1, {"parallel": {"pp": 4, "pipeline_schedule": "gpipe"}}),
    "1f1b": (4, 1, {"parallel": {"pp": 4}}),
    "interleaved": (2, 0, {"parallel": {"pp": 2, "virtual_stages": 2, "pipeline_schedule": "interleaved"}}),
    "zero-bubble": (4, 1, {"parallel": {"pp": 4, "pipeline_schedule": "zero-bubble"}}),
}


def simulated(folder, case):
    """The launches of two steps."""
    world_size, rank, settings = CASES[case]
    join("cpu:fake,cuda:fake", world_size=world_size, rank=rank)
    with_streams()
    as_on_a_gpu()
    replicas = (
        world_size if "fsdp" in settings["parallel"] else world_size // settings["parallel"].get("tp", world_size)
    )
    stages = settings["parallel"].get("pp", 1)
    with fake_tensors(), Launches() as launches:
        run_two_steps(
            folder,
            lambda number, make_step: make_step(),
            world_size=world_size,
            rank=rank,
            training={
                "global_batch_size": MICRO_BATCHES * (4 if stages > 1 else replicas),
                "micro_batch_size": 1,
                "dtype": "bfloat16",
            },
            model=LLAMA_3_8B | {"num_layers": max(2, 4 * (stages > 1)), "sequence_length": LENGTH},
            **settings,
        )
    return launches


@dataclass(frozen=True)
class Row:
    """A row of a table of the page."""

    cases: tuple[str, ...]
    collectives: Callable[[Launch], bool]
    kernels: Callable[[Launch], bool]
    least: dict[int, float]
    most: float = 1.01
    each: bool = False


def collective(name, place, backward=None):
    return lambda launch: (
        re.match(f"nccl.{name}", launch.name) is not None
        and re.search(place, launch.place) is not None
        and backward in (None, launch.in_backward)
    )


def any_kernel(launch):
    return True


def of_backward(launch):
    return launch.in_backward


def product(launch):
    return launch.is_product


def weight_gradient(launch):
    return launch.is_product and LENGTH not in launch.shape


def input_gradient(launch):
    return launch.is_product and launch.in_backward and LENGTH in launch.shape


LINEAR, LOSS = r"^nn/linear\.py:TensorParallelLinear.backward", r"^nn/loss/linear_head\.py:Head."
TENSOR_PARALLEL = ("tp", "sp", "recomputation")
IN_PARTS = r"^nn/overlapped\.py:"
MESSAGES = collective("(send|recv)", "^training/pipeline")
ROWS = {
    "backward of a column-parallel layer: sum of the input's gradient": Row(
        TENSOR_PARALLEL,
        collective("(allreduce|reduce_scatter)", f"{LINEAR}|{LOSS}start_reduction", True),
        weight_gradient,
        {1: 0.3, 8: 0.3},
        each=True,
    ),
    # As many others are gathers of output gradients.
    "with sequence parallelism, also: the second gather of the input": Row(
        ("sp",), collective("all_gather", LINEAR), input_gradient, {1: 0.25, 8: 0.25}
    ),
    "loss fused with the output layer: statistics of the logits": Row(
        TENSOR_PARALLEL, collective("all_gather", f"{LOSS}start_gather"), product, {1: 0.9, 8: 0.9}, each=True
    ),
    "gradients over data-parallel ranks, bucket by bucket": Row(
        ("dp", "zero1"),
        collective("(allreduce|reduce_scatter)", "GradientBuffers._start_next"),
        of_backward,
        {1: 0.3, 8: 0.4},
    ),
    "with `--zero 1`: updated parameters": Row(
        ("zero1",), collective("all_gather", "ParameterBuffers._start"), any_kernel, {1: 0.4, 8: 0.4}
    ),
    "with `--fsdp`: the parameters of the next layer": Row(
        ("fsdp",), collective("all_gather", r"block\.py|^autograd"), any_kernel, {8: 0.7}
    ),
    "with `--fsdp`: the sums of a layer's gradients": Row(
        ("fsdp",), collective("reduce_scatter", "^autograd"), of_backward, {8: 0.25}
    ),
    "messages between stages, zero-bubble": Row(("zero-bubble",), MESSAGES, any_kernel, {1: 0.4, 8: 0.4}),
    "messages between stages, interleaved": Row(("interleaved",), MESSAGES, any_kernel, {1: 0.2, 8: 0.2}),
    "messages between stages, GPipe and 1F1B": Row(("gpipe", "1f1b"), MESSAGES, any_kernel, {1: 0, 8: 0}, most=0.1),
    "forward of tensor parallelism; gathers of output gradients; the embedding's sum": Row(
        ("tp", "sp", "recomputation"),
        collective("", r"_multiply$|reduce_product$|^nn/embedding\.py|gathered$"),
        any_kernel,
        {1: 0, 8: 0},
        most=0,
    ),
    "the input's rows of other ranks": Row(
        ("overlap",), collective("all_to_all", f"{IN_PARTS}gather_matmul", False), product, {1: 0.3, 8: 0.3}, each=True
    ),
    "terms of the output's sum": Row(
        ("overlap",), collective("all_to_all", f"{IN_PARTS}matmul_scatter", False), product, {1: 0.3, 8: 0.3}, each=True
    ),
    "the output gradient's rows of other ranks": Row(
        ("overlap",), collective("all_to_all", f"{IN_PARTS}gather_matmul", True), product, {1: 0.3, 8: 0.3}, each=True
    ),
    "terms of the input gradient's sum": Row(
        ("overlap",), collective("all_to_all", f"{IN_PARTS}matmul_scatter", True), product, {1: 0.3, 8: 0.3}, each=True
    ),
}


def faults_of(folder, case):
    """Return a text for each row of the case that does not hold."""
    recorded, found = simulated(folder, case), []
    for queues in (1, 8):
        launches = recorded.run(queues)
        computed = [launch for launch in launches if launch.stream == 0]
        for name, row in ROWS.items():
            if case not in row.cases or queues not in row.least:
                continue
            kernels = list(filter(row.kernels, computed))
            collectives = [launch for launch in launches if launch.is_collective and row.collectives(launch)]
            shares = [launch.during(kernels) for launch in collectives]
            total = sum(launch.seconds for launch in collectives)
            share = sum(launch.seconds * each for launch, each in zip(collectives, shares, strict=True)) / (total or 1)
            if not collectives or not row.least[queues] <= share <= row.most:
                found.append(f"{queues} queues: {name}: {share:.2f} of {len(shares)} collectives")
            elif row.each and queues == 1 and min(shares) < 0.01:
                found.append(f"{queues} queues: {name}: one of {len(shares)} collectives runs alone")
    return found


# Their rows are those of sp, or say that nothing overlaps.
RARELY = ("tp", "recomputation", "gpipe")


@pytest.mark.parametrize(
    "case",
    [
        case
        if case in ("overlap", "zero1")
        else pytest.param(case, marks=pytest.mark.matrix if case in RARELY else pytest.mark.slow)
        for case in CASES
    ],
)
def test_what_overlaps(pretended_gpu, tmp_path, case):
    assert pretended_gpu(faults_of, str(tmp_path), case) == []


def test_the_page_names_these_overlaps():
    text = (DOCS / "gpus.md").read_text()
    rows = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    assert set(ROWS) <= {cell.strip() for row in rows for cell in row.split("|")}
