"""An exact run leaves the same bits from processes started at each layout, also where it changes in the middle."""

import random

import numpy as np
import pytest
from run.run_processes import hashes, run_in_processes

from shardwise.run.settings import (
    CorpusSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    RecomputeSettings,
    Settings,
    TrainingSettings,
)
from shardwise.run.tasks.texts import NewTexts

pytestmark = pytest.mark.slow

STEPS = 2
# All ids beside the bounds between 2 and between 4 ranks occur: of "a" and "b", of the bytes C6 and C7, with one of
# which each of the letters begins, and of the bytes 08 and 09.
LETTERS = "\b\t\nab" * 24 + "".join(map(chr, range(0x180, 0x200)))
SIZES = {"hidden_size": 64, "num_query_groups": 8, "vocab_size": 264, "sequence_length": 16}
LLAMA = {"num_layers": 4, "num_heads": 16, "ffn_hidden_size": 136, "tie_embeddings": False}
GPT = {"num_layers": 4, "architecture": "gpt", "num_heads": 8}


def settings_of(
    folder, name, model, *, parallel=None, recompute=None, resume="never", steps=STEPS, batch=4, **training
):
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("".join(random.Random(0).choices(LETTERS, k=10_000)), encoding="utf-8")
    return Settings(
        data=(str(text),),
        out=str(folder / name),
        resume=resume,
        device="cpu",
        model=ModelSettings(**(SIZES | model), dropout=0.1),
        parallel=ParallelSettings(**({"exact": True} | (parallel or {}))),
        recompute=RecomputeSettings(**(recompute or {})),
        # So high that gradients are clipped.
        optimizer=OptimizerSettings(learning_rate=1e-2, warmup_steps=2, clip_grad_norm=0.5),
        training=TrainingSettings(steps=steps, global_batch_size=batch, micro_batch_size=1, eval_every=1, **training),
        # 17 windows, so that two ranks' evaluation batches have room for one more.
        corpus=CorpusSettings(held_out_fraction=0.02),
    )


def test_the_text_reaches_what_faults_hide_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    settings = settings_of(tmp_path, "one", LLAMA)
    texts = NewTexts(settings).prepare()
    windows = texts.held_out
    assert len(windows) % 2 == 1
    ids = set(np.concatenate([windows.rows.row(index)["tokens"] for index in range(len(windows))]).tolist())
    for num_ranks in (2, 4):
        for rank in range(1, num_ranks):
            bound = texts.tokenizer.vocab_size * rank // num_ranks
            assert {bound - 1, bound} <= ids


@pytest.mark.parametrize(
    ("model", "dtype", "world_size", "options"),
    [
        (
            LLAMA,
            "float32",
            4,
            {
                "parallel": {
                    "tp": 2,
                    "sequence_parallel": True,
                    "pp": 2,
                    "pipeline_schedule": "interleaved",
                    "virtual_stages": 2,
                },
                "recompute": {"granularity": "full"},
            },
        ),
        pytest.param(
            LLAMA, "bfloat16", 4, {"parallel": {"pp": 4, "pipeline_schedule": "zero-bubble"}}, marks=pytest.mark.matrix
        ),
        pytest.param(
            GPT,
            "float32",
            4,
            {"parallel": {"tp": 4, "sequence_parallel": True}, "recompute": {"granularity": "full"}},
            marks=pytest.mark.matrix,
        ),
        # The tied weight is on both stages.
        pytest.param(
            GPT,
            "bfloat16",
            8,
            {
                "parallel": {"tp": 2, "pp": 2, "zero": 1},
                "recompute": {"granularity": "selective", "modules": ("core_attn", "layernorm", "mlp_act")},
            },
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_layouts(tmp_path, model, dtype, world_size, options):
    run_in_processes(settings_of(tmp_path, "one", model, dtype=dtype), 1, tmp_path / "alone")
    expected = hashes(tmp_path / "one")
    assert {"loss of step 1", "grad_norm of step 1", "held_out_bits_per_byte of step 1"} <= expected.keys()
    assert {"model.embedding.word_embeddings.weight", "model.decoder.final_layernorm.weight"} <= expected.keys()
    run_in_processes(settings_of(tmp_path, "split", model, dtype=dtype, **options), world_size, tmp_path / "ranks")
    assert hashes(tmp_path / "split") == expected


def test_the_layout_changes_in_the_middle_and_ranks_are_killed(tmp_path):
    # Tied, so that both uses of the weight are on one stage where data-parallel ranks share out the optimizer's state.
    model = LLAMA | {"num_layers": 2, "tie_embeddings": True}
    # Four micro-batches on each of two data-parallel ranks: of two the sum has the same bits in either order.
    options = {"model": model, "batch": 8, "steps": 6, "save_every": 2, "asynchronous_saves": False}
    run_in_processes(settings_of(tmp_path, "one", **options), 1, tmp_path / "alone")

    def go_on(number, world_size, killed_at=None, **parallel):
        settings = settings_of(tmp_path, "often", **options, resume="auto", parallel=parallel)
        return run_in_processes(settings, world_size, tmp_path / number, killed_at=killed_at)

    go_on("first", 4, killed_at=3, tp=4)
    assert "resumed at step 2\n" in go_on("second", 4, killed_at=5, pp=2, pipeline_schedule="gpipe")
    # Half the ranks.
    assert "resumed at step 4\n" in go_on("third", 2, zero=1)
    assert hashes(tmp_path / "often") == hashes(tmp_path / "one")


def test_the_number_of_context_parallel_ranks_changes_in_the_middle(tmp_path):
    # 32 tokens of a micro-batch on each of four ranks.
    options = {"model": LLAMA | {"num_layers": 2, "sequence_length": 128}, "steps": 4, "save_every": 2}
    options |= {"batch": 2, "asynchronous_saves": False}
    run_in_processes(settings_of(tmp_path, "one", **options), 1, tmp_path / "alone")

    def go_on(number, killed_at=None, **parallel):
        settings = settings_of(tmp_path, "often", **options, resume="auto", parallel=parallel)
        return run_in_processes(settings, 4, tmp_path / number, killed_at=killed_at)

    go_on("first", killed_at=3, cp=4)
    assert "resumed at step 2\n" in go_on("second", cp=2, tp=2, sequence_parallel=True)
    assert hashes(tmp_path / "often") == hashes(tmp_path / "one")


@pytest.mark.matrix
@pytest.mark.parametrize("parallel", [{"cp": 8}, {"cp": 4, "pp": 2}, {"cp": 2, "zero": 1}, {"cp": 4, "tp": 2}])
def test_eight_ranks_with_context_parallelism(tmp_path, parallel):
    # Two ranks hold whole parts of 16.
    sizes = {"num_layers": 2, "sequence_length": 256, "ffn_hidden_size": 144, "vocab_size": 272}
    options = {"model": LLAMA | sizes}
    alone = {"exact": True, "exact_parts": 16}
    run_in_processes(settings_of(tmp_path, "one", **options, parallel=alone), 1, tmp_path / "alone")
    run_in_processes(settings_of(tmp_path, "split", **options, parallel=alone | parallel), 8, tmp_path / "ranks")
    assert hashes(tmp_path / "split") == hashes(tmp_path / "one")


@pytest.mark.matrix
def test_without_exact_the_hashes_differ(tmp_path):
    model = LLAMA | {"num_layers": 2}
    run_in_processes(settings_of(tmp_path, "one", model, parallel={"exact": False}), 1, tmp_path / "alone")
    run_in_processes(settings_of(tmp_path, "two", model, parallel={"exact": False, "tp": 2}), 2, tmp_path / "ranks")
    one, two = hashes(tmp_path / "one"), hashes(tmp_path / "two")
    assert one.keys() == two.keys()
    different = {name for name in one if one[name] != two[name]}
    assert {"loss of step 1", "model.embedding.word_embeddings.weight"} <= different
