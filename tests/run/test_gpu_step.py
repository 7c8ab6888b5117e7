"""A step of training of Llama-3-8B's shape on GPUs that PyTorch is made to believe in, through the run itself."""

import math
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from harness.launches import with_streams
from harness.on_pretended_gpu import StepRecorder, fake_tensors, join
from harness.pretended_kernels import as_on_a_gpu, kind_of
from models.transformer.accounting_page import evaluate, table
from run.pretended_run import LLAMA_3_8B, V, run_two_steps

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.models.gpt import GPT
from shardwise.training.gradients import base

# A sequence of any length shows the same.
S, B, H, A, F = 64, 2, 4096, 32, 14336


class Part:
    """What a part of a step launches, waits for and copies."""

    def __init__(self):
        self.recorder, self.collectives = StepRecorder(), Counter()

    def around(self, function):
        def call(*args, **options):
            with self.recorder, CollectiveCounter() as counter:
                result = function(*args, **options)
            self.collectives += Counter((launch.name, launch.num_bytes) for launch in counter.launches)
            return result

        return call

    def kernels(self):
        """How many kernels there are of each kind."""
        found = Counter()
        for name, count in self.recorder.operators.items():
            if (kind := kind_of(name)) is not None:
                found[kind] += count
        return found


def a_step(folder, case, num_layers):
    """The second step of a run."""
    # Each weight of a layer has its own bucket then, so that a layer's part of the collectives can be told.
    base.default_bucket_size = lambda device_type, num_ranks: base.DEFAULT_BUCKET_SIZE
    parts = {name: Part() for name in ("forward", "backward", "step")}
    own = GPT.forward, torch.autograd.backward, torch.distributed.batch_isend_irecv
    depth, messages = 0, Counter()

    def send_and_receive(operations):
        messages.update((each.op.__name__.removeprefix("i"), each.tensor.nbytes) for each in operations)
        return own[2](operations)

    def outermost(function, counted):
        # Recomputation calls both within a backward.
        def call(*args, **options):
            nonlocal depth
            depth += 1
            try:
                return (counted if depth == 1 else function)(*args, **options)
            finally:
                depth -= 1

        return call

    def around(number, make_step):
        if number == 0:
            return make_step()
        GPT.forward = outermost(own[0], parts["forward"].around(own[0]))
        torch.autograd.backward = outermost(own[1], parts["backward"].around(own[1]))
        torch.distributed.batch_isend_irecv = send_and_receive
        return parts["step"].around(make_step)()

    batch = {"global_batch_size": MICRO_BATCHES * B, "micro_batch_size": B, "dtype": "bfloat16"}
    try:
        said = run_two_steps(
            folder,
            around,
            world_size=case.get("ranks", 8),
            parallel=case["parallel"],
            training=batch | case.get("training", {}),
            model={"num_layers": num_layers, "sequence_length": S} | case.get("model", LLAMA_3_8B),
            recompute=case.get("recompute", {}),
            optimizer=case.get("optimizer", "adamw"),
            adapters=case.get("adapters", False),
        )
    finally:
        GPT.forward, torch.autograd.backward, torch.distributed.batch_isend_irecv = own
    step = parts["step"].recorder
    elsewhere = [made for made in step.made if made[0] == "cpu" and math.prod(made[2]) > 1]
    return {name: (part.kernels(), part.collectives) for name, part in parts.items()}, {
        "waits": dict(step.waits),
        "copies": dict(step.copies),
        "pageable copies": dict(step.pageable),
        "made on the CPU": elsewhere,
        "messages": messages,
        "banner": said,
    }


def steps(folder, case):
    """Steps of models of fewer and of more layers."""
    # As NCCL's groups have gloo beside it, for what the hosts know.
    join("cpu:fake,cuda:fake", world_size=8, rank=0)
    with_streams()
    as_on_a_gpu()
    with fake_tensors(), StepRecorder():
        return [a_step(f"{folder}/{num_layers}", case, num_layers) for num_layers in case.get("layers", (1, 2))]


SEQUENCE_PARALLEL = {"sequence_parallel": True}
MICRO_BATCHES = 2
CASES = {
    "tp 8": {"parallel": {"tp": 8} | SEQUENCE_PARALLEL},
    "tp 8, recomputed": {"parallel": {"tp": 8} | SEQUENCE_PARALLEL, "recompute": {"granularity": "full"}},
    "tp 8, adapters": {"parallel": {"tp": 8} | SEQUENCE_PARALLEL, "adapters": True},
    "tp 4 x dp 2, zero 1": {
        "parallel": {"tp": 4, "zero": 1} | SEQUENCE_PARALLEL,
        "training": {"global_batch_size": 2 * MICRO_BATCHES * B},
    },
    "fsdp 8": {"parallel": {"fsdp": True}, "training": {"global_batch_size": 8 * MICRO_BATCHES * B}},
    "tp 4 x pp 2, interleaved": {
        "parallel": {"tp": 4, "pp": 2, "virtual_stages": 2, "pipeline_schedule": "interleaved"} | SEQUENCE_PARALLEL,
        # One more layer for each of four chunks, of which this rank has two.
        "layers": (4, 8),
    },
}


def as_formulas(cells, sizes, parallel):
    """Number of collectives and messages by name and bytes, from cells of the page."""
    group, found = SimpleNamespace(size=lambda: parallel.get("tp", 1)), Counter()
    for cell, times in cells:
        for count, name, formula in re.findall(r"`(\d+) \S (\w+) ([^`]*)`", cell):
            found[name, evaluate(formula, group, torch.bfloat16, **sizes)] += times * int(count)
    return found


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_step_launches_what_the_page_says_and_waits_once(pretended_gpu, tmp_path, case):
    (fewer, step), (more, _) = pretended_gpu(steps, str(tmp_path), CASES[case])
    assert list(step["waits"].values()) == [1], step["waits"]
    # The next step's ids and labels; gradients of FSDP2 are new tensors in each step, and their addresses are copied.
    copies = {place.partition(":")[0]: count for (_, place), count in step["copies"].items()}
    assert copies == {"data/batch.py": 2 * MICRO_BATCHES} | ({"kernels/adamw_triton.py": 4} if "fsdp" in case else {})
    assert step["pageable copies"] == {}
    assert {made[-1].partition(":")[0] for made in step["made on the CPU"]} <= {"data/batch.py"}
    parallel = CASES[case]["parallel"]
    few, many = (number // parallel.get("pp", 1) for number in CASES[case].get("layers", (1, 2)))
    sizes = {"s": S, "b": B, "h": H, "f": F, "a": A, "g": 8, "d": H // A, "v": V, "l": few}
    sizes["n"] = 8 // parallel.get("tp", 1)
    page = table("layer", "gpu")
    found, expected, layers = {}, {}, Counter()
    for part in ("forward", "backward"):
        row = page[f"{case}, {part}"]
        cells = (row.pop("collectives"), MICRO_BATCHES), (row.pop("once a step"), 1)
        times = MICRO_BATCHES * (many - few)
        expected[part] = (
            {kind: times * int(count) for kind, count in row.items()},
            as_formulas([(cell, (many - few) * each) for cell, each in cells], sizes, parallel),
        )
        kernels, collectives = (of_more - of_fewer for of_more, of_fewer in zip(more[part], fewer[part], strict=True))
        # One all-reduce has the gradients of all layers' norms, and one gather the norms of two layers and the last.
        of_all = collectives.keys() & {("all_gather", 5 * H)} | {
            each for each in collectives if each[0] == "all_reduce"
        }
        of_layers = Counter({launch: count for launch, count in collectives.items() if launch not in of_all})
        layers += of_layers
        found[part] = {kind: kernels[kind] for kind in row}, of_layers
    assert found == expected
    row = table("step", "gpu step")[case]
    rest = fewer["step"][1].copy()
    rest.subtract({launch: count * few // (many - few) for launch, count in layers.items()})
    cells = [(row["each micro-batch"], MICRO_BATCHES), (row["once"], 1)]
    assert +rest + step["messages"] == as_formulas(cells, sizes, parallel)
    assert min(rest.values()) >= 0


SMALL = {"hidden_size": 64, "num_heads": 4, "vocab_size": 301}
OTHERS = {
    "stages": {"parallel": {"pp": 2}, "model": {"tie_embeddings": True}},
    "fp16 and Muon": {"parallel": {"tp": 2} | SEQUENCE_PARALLEL, "training": {"dtype": "float16"}, "optimizer": "muon"},
    "overlap": {
        "parallel": {"tp": 2, "tp_comm_overlap": True} | SEQUENCE_PARALLEL,
        "training": {"loss": "plain"},
        "model": {"tie_embeddings": False},
    },
    "GPT with dropout": {
        "parallel": {"tp": 2},
        "training": {"dtype": "tf32", "loss": "plain"},
        "model": {"architecture": "gpt", "dropout": 0.1},
    },
}


SAID = {
    "stages": "overlap none: stages' messages",
    "fp16 and Muon": "not the tensor-parallel collectives of the forward",
    "overlap": "layers in parts: column forward",
    "GPT with dropout": f"all 2 heads of {S} x {S} tokens: about {12 * 2 * S * S * B / 2**20:.0f} MiB a layer",
}


def other_steps(folder, case):
    join("cpu:fake,cuda:fake", world_size=2, rank=0)
    as_on_a_gpu()
    with fake_tensors(), StepRecorder():
        return a_step(folder, {"ranks": 2} | OTHERS[case] | {"model": SMALL | OTHERS[case].get("model", {})}, 2)[1]


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_whatever_is_trained_a_step_waits_once(pretended_gpu, tmp_path, case):
    step = pretended_gpu(other_steps, str(tmp_path), case)
    assert list(step["waits"].values()) == [1], step["waits"]
    assert step["pageable copies"] == {}
    assert SAID[case] in step["banner"]
