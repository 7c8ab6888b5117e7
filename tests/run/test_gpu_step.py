"""A step of training of Llama-3-8B's shape on GPUs that PyTorch is made to believe in, through the run itself."""

import math
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from harness.on_pretended_gpu import StepRecorder, fake_tensors, join
from harness.pretended_kernels import as_on_a_gpu, kind_of
from models.transformer.accounting_page import evaluate, table
from run.pretended_run import LLAMA_3_8B, run_two_steps

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.models.gpt import GPT
from shardwise.training.gradients import gradients

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


def a_step(folder, num_layers, parallel, training, adapters, world_size, *, optimizer="adamw", **model):
    """The second step of a run."""
    # Each weight of a layer has its own bucket then, so that a layer's part of the collectives can be told.
    gradients.default_bucket_size = lambda device_type, num_ranks: gradients.DEFAULT_BUCKET_SIZE
    parts = {name: Part() for name in ("forward", "backward", "step")}
    own = GPT.forward, torch.Tensor.backward

    def around(number, make_step):
        if number == 0:
            return make_step()
        GPT.forward = parts["forward"].around(own[0])
        torch.Tensor.backward = parts["backward"].around(own[1])
        return parts["step"].around(make_step)()

    batch = {"global_batch_size": MICRO_BATCHES * B, "micro_batch_size": B, "dtype": "bfloat16"}
    try:
        said = run_two_steps(
            folder,
            around,
            world_size=world_size,
            parallel=parallel,
            training=batch | training,
            model={"num_layers": num_layers, "sequence_length": S} | (model or LLAMA_3_8B),
            optimizer=optimizer,
            adapters=adapters,
        )
    finally:
        GPT.forward, torch.Tensor.backward = own
    step = parts["step"].recorder
    elsewhere = [made for made in step.made if made[0] == "cpu" and math.prod(made[2]) > 1]
    return {name: (part.kernels(), part.collectives) for name, part in parts.items()}, {
        "waits": dict(step.waits),
        "copies": dict(step.copies),
        "pageable copies": dict(step.pageable),
        "made on the CPU": elsewhere,
        "banner": said,
    }


def steps(folder, *case):
    """Steps of models of one layer and of two."""
    join("cuda:fake", world_size=case[-1], rank=0)
    as_on_a_gpu()
    with fake_tensors(), StepRecorder():
        return [a_step(f"{folder}/{num_layers}", num_layers, *case) for num_layers in (1, 2)]


SEQUENCE_PARALLEL = {"sequence_parallel": True}
MICRO_BATCHES = 2
CASES = {
    "tp 8": ({"tp": 8} | SEQUENCE_PARALLEL, {}, False, 8),
    "tp 4 x dp 2, zero 1": (
        {"tp": 4, "zero": 1} | SEQUENCE_PARALLEL,
        {"global_batch_size": 2 * MICRO_BATCHES * B},
        False,
        8,
    ),
    "tp 8, adapters": ({"tp": 8} | SEQUENCE_PARALLEL, {}, True, 8),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_layer_launches_what_the_page_says_and_a_step_waits_once(pretended_gpu, tmp_path, case):
    parallel, *_ = CASES[case]
    (one, step), (two, _) = pretended_gpu(steps, str(tmp_path), *CASES[case])
    assert list(step["waits"].values()) == [1], step["waits"]
    # The next step's ids and labels.
    assert [(way, count) for (way, _), count in step["copies"].items()] == [("cpu to cuda", 2 * MICRO_BATCHES)]
    assert step["pageable copies"] == {}
    assert {made[-1].partition(":")[0] for made in step["made on the CPU"]} <= {"data/batch.py"}
    page = table("layer", "gpu")
    group = SimpleNamespace(size=lambda: parallel["tp"])
    sizes = {"s": S, "b": B, "h": H, "f": F, "a": A, "g": 8, "d": H // A}
    found, expected = {}, {}
    for part in ("forward", "backward"):
        row = page[f"{case}, {part}"]
        collectives = Counter()
        for column, times in (("collectives", MICRO_BATCHES), ("once a step", 1)):
            for count, name, formula in re.findall(r"`(\d+) \S (\w+) ([^`]*)`", row.pop(column)):
                collectives[name, evaluate(formula, group, torch.bfloat16, **sizes)] += times * int(count)
        expected[part] = {kind: MICRO_BATCHES * int(count) for kind, count in row.items()}, collectives
        kernels, collectives = (of_two - of_one for of_two, of_one in zip(two[part], one[part], strict=True))
        # One all-reduce has the gradients of all layers' norms, and one gather the norms of two layers and the last.
        of_all = collectives.keys() & {("all_gather", 5 * H)} | {
            each for each in collectives if each[0] == "all_reduce"
        }
        of_layer = {launch: count for launch, count in collectives.items() if launch not in of_all}
        found[part] = {kind: kernels[kind] for kind in row}, Counter(of_layer)
    assert found == expected


SMALL = {"hidden_size": 64, "num_heads": 4, "vocab_size": 301}
OTHERS = {
    "stages": ({"pp": 2}, {"dtype": "bfloat16"}, {"tie_embeddings": True}),
    "fp16 and Muon": ({"tp": 2} | SEQUENCE_PARALLEL, {"dtype": "float16"}, {"optimizer": "muon"}),
    "overlap": (
        {"tp": 2, "tp_comm_overlap": True} | SEQUENCE_PARALLEL,
        {"dtype": "bfloat16", "loss": "plain"},
        {"tie_embeddings": False},
    ),
    "GPT with dropout": ({"tp": 2}, {"dtype": "tf32", "loss": "plain"}, {"architecture": "gpt", "dropout": 0.1}),
}


SAID = {
    "stages": "overlap none: stages' messages",
    "fp16 and Muon": "not the tensor-parallel collectives of the forward",
    "overlap": "layers in parts: column forward",
    "GPT with dropout": f"all 2 heads of {S} x {S} tokens: about {12 * 2 * S * S * B / 2**20:.0f} MiB a layer",
}


def other_steps(folder, case):
    # As NCCL's groups have gloo beside it, for what the hosts know.
    join("cpu:fake,cuda:fake", world_size=2, rank=0)
    as_on_a_gpu()
    parallel, training, model = OTHERS[case]
    with fake_tensors(), StepRecorder():
        return a_step(folder, 2, parallel, training, False, 2, **SMALL | model)[1]


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_whatever_is_trained_a_step_waits_once(pretended_gpu, tmp_path, case):
    step = pretended_gpu(other_steps, str(tmp_path), case)
    assert list(step["waits"].values()) == [1], step["waits"]
    assert step["pageable copies"] == {}
    assert SAID[case] in step["banner"]
