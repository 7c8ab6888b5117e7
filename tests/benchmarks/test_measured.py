"""Each benchmark whose ranks start together, at sizes that take moments: what its JSON and its table have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import product
from types import ModuleType
from typing import Any

import context
import data_parallel
import decode
import doctor_cost
import exact
import experts
import finetune
import loss
import pytest
from shared_workers import measured
from steps.context_steps import PACKED_VARIANTS, WAYS, ContextSizes
from steps.exact_steps import EXACT_VARIANTS
from steps.expert_steps import EXPERT_VARIANTS, ExpertSizes
from steps.replicas import REPLICA_VARIANTS

from shardwise.cli.arguments import parse_command
from shardwise.cli.training import TrainArguments

Result = dict[str, Any]
TINY = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 320, "sequence_length": 16, "batch_size": 2}
WIDE = TINY | {"hidden_size": 64, "num_heads": 8, "ffn_hidden_size": 64, "batch_size": 8}
SMALL = TINY | {"num_layers": 2, "ffn_hidden_size": 48, "vocab_size": 64}


def check_timed(result: Result, variants: Any, ratios: Any) -> None:
    seconds = result["seconds_per_step"]
    assert list(seconds) == list(variants)
    assert all(len(values) == 2 and min(values) > 0 for values in seconds.values())
    assert {(each["numerator"], each["denominator"]) for each in result["ratios"]} == set(ratios)


def check_context(result: Result, sizes: dict[str, int]) -> None:
    assert result["sizes"] == dataclasses.asdict(ContextSizes(**sizes))
    check_timed(result, [*WAYS, "single", *PACKED_VARIANTS], context.RATIOS)


def check_experts(result: Result, sizes: dict[str, int]) -> None:
    assert result["sizes"] == dataclasses.asdict(ExpertSizes(**sizes))
    check_timed(result, EXPERT_VARIANTS, experts.RATIOS)


def check_decode(result: Result, sizes: dict[str, int]) -> None:
    assert result["sizes"] == dataclasses.asdict(decode.DecodeSizes(**sizes))
    check_timed(result, decode.VARIANTS, decode.RATIOS)


def check_alike(result: Result, sizes: dict[str, int], variants: Any, ratios: Any) -> None:
    assert result["sizes"] == sizes | {"tie_embeddings": False}
    # They train alike, or there would be no result.
    assert 0 <= result["first_loss_relative_difference"] <= 1e-6
    check_timed(result, variants, ratios)


def check_finetune(result: Result, sizes: dict[str, int]) -> None:
    check_alike(result, sizes, finetune.VARIANTS, finetune.RATIOS)


def check_doctor(result: Result, sizes: dict[str, int]) -> None:
    assert result["sizes"] == sizes | {"tie_embeddings": False}
    assert len(result["recording"]["ratio"]["per_round"]) == 2
    assert result["recording"]["bytes_per_step"] > 0
    assert len(result["diagnosis_seconds"]) == 2


def check_exact(results: Result, sizes: dict[str, int]) -> None:
    result = results["llama"]
    assert result["sizes"] == sizes | {"tie_embeddings": False}
    assert exact.GOALS.keys() == exact.STEPS.keys() == exact.MODELS.keys()
    for place in exact.PLACES:
        assert result["check_seconds"][place] > 0
        check_timed(result[place], EXACT_VARIANTS, exact.RATIOS)


def check_data_parallel(report: Result, sizes: dict[str, int]) -> None:
    (result,) = report["sizes"]
    held, n = result["bytes_per_rank"], result["num_parameters"]
    # Beside 4 bytes of a step for each tensor, and what aligns parameters.
    for variant, each in {"ddp": 16, "buffers": 16, "zero": 12, "fsdp2": 8}.items():
        assert each * n <= held[variant] <= (each + 0.2) * n
    check_alike(result, sizes, REPLICA_VARIANTS, data_parallel.RATIOS)


def check_loss(report: Result, sizes: dict[str, int]) -> None:
    assert (report["benchmark"], report["num_rounds"]) == ("loss", 2)
    results = report["contests"]
    assert [(each["contest"], each["dtype"]) for each in results] == list(product(loss.CONTESTS, ("bf16", "fp32")))
    for result in results:
        compared = {name for pair in loss.RATIOS[result["contest"]] for name in pair}
        seconds = result["seconds_per_step"]
        assert set(seconds) == set(result["extra_mib"]) == compared
        assert all(len(values) == 2 and min(values) > 0 for values in seconds.values())
        assert {name for name in compared if not loss.is_limit(name)} <= set(result["largest_relative_error"])
        for ratio in result["ratios"]:
            pair = ratio["numerator"], ratio["denominator"]
            assert ratio["goal"] == loss.GOALS.get((result["contest"], result["dtype"], *pair))


STEP = ["--steps", "1"]
CASES: dict[str, tuple[ModuleType, list[str], dict[str, int], Callable[[Result, dict[str, int]], None], str]] = {
    "context": (
        context,
        [],
        {name: size for name, size in TINY.items() if name != "batch_size"}
        | {"num_groups": 2, "sequence_length": 24, "packed_length": 32, "num_documents": 4},
        check_context,
        "packed / dense mask",
    ),
    "decode": (
        decode,
        [],
        {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_groups": 2, "ffn_hidden_size": 48, "vocab_size": 320}
        | {"prompt_length": 5, "new_tokens": 4, "batch_size": 3, "long_prompt_length": 40},
        check_decode,
        "gain of a batch",
    ),
    "experts": (
        experts,
        [],
        TINY | {"num_experts": 4, "expert_ffn_hidden_size": 16},
        check_experts,
        "balanced / dense",
    ),
    "finetune": (
        finetune,
        STEP,
        SMALL | {"num_groups": 2, "lora_rank": 3, "prompt_length": 9},
        check_finetune,
        "tp_plan / ours",
    ),
    "loss": (
        loss,
        ["--dtype", "both"],
        {"num_tokens": 70, "vocab_size": 302, "hidden_size": 16},
        check_loss,
        "output layer and loss on one rank: fp32, ",
    ),
    "doctor": (doctor_cost, [], WIDE, check_doctor, "recorded / plain step: "),
    "exact": (exact, ["--model", "llama", *STEP], WIDE, check_exact, "tp 2: exact / plain"),
    "data parallel": (
        data_parallel,
        [*STEP, "--variants", *REPLICA_VARIANTS],
        SMALL | {"hidden_size": 16, "num_heads": 2, "ffn_hidden_size": 24},
        check_data_parallel,
        "zero / ddp",
    ),
}


# Those whose steps another test of this folder or of the doctor does not have.
OFTEN = ("loss", "exact", "data parallel")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.matrix) for name in CASES]
)
def test_what_it_measures(tmp_path, monkeypatch, capsys, name):
    script, arguments, sizes, check, shown = CASES[name]
    result, printed = measured(script, arguments, sizes, tmp_path, monkeypatch, capsys)
    check(result, sizes)
    assert shown in printed


@pytest.mark.parametrize("name", exact.RUNS)
def test_what_is_to_be_proved_can_be_run(name):
    layouts = [layout for layout in exact.LAYOUTS if name != "demo" or exact.fits_the_demo(layout)]
    assert len(layouts) == len(set(layouts)) >= 13
    for ranks, flags in layouts:
        argv = f"{exact.COMMON} {exact.RUNS[name]} {flags} --exact --nproc {ranks}".split()
        parse_command(TrainArguments, argv, "train").check_world(ranks)
