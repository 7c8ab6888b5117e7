"""The plan of generation states the weights, the cache and the peaks of ranks that generate."""

from __future__ import annotations

import gc
import json
import re

import pytest
import torch
from harness.peaks import LivePeak

from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.core.topology import Groups
from shardwise.models.generation import Request, Sampling, generate, generate_all
from shardwise.plan.generation import GenerationPlan
from shardwise.run import fit_generation, plan_generation

LLAMA = {
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 1501,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}
GEMMA = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 900,
    "max_position_embeddings": 256,
    "sliding_window": 32,
    "torch_dtype": "float32",
}

GEMMA4 = GEMMA | {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "layer_types": None}
GEMMA4 |= {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_hidden_layers": 6}


def folder_of(path, config):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


# A model, and what is generated: prompts whose reading needs the most, and texts whose last token does.
CASES = {
    "one": (LLAMA, {"prompt_length": 100, "max_new_tokens": 3}),
    "batch": (LLAMA, {"prompt_length": 100, "max_new_tokens": 3, "batch_size": 5}),
    "last token": (LLAMA, {"prompt_length": 2, "max_new_tokens": 120, "batch_size": 4}),
    "fused": (LLAMA, {"prompt_length": 60, "max_new_tokens": 2, "layers": "fused"}),
    "training": (LLAMA, {"prompt_length": 60, "max_new_tokens": 2, "batch_size": 2, "layers": "training"}),
    "two kinds of heads": (GEMMA4, {"prompt_length": 90, "max_new_tokens": 4, "batch_size": 3}),
    "windows": (GEMMA, {"prompt_length": 90, "max_new_tokens": 4, "batch_size": 3}),
}


@pytest.fixture
def plans(request, tmp_path_factory):
    config, given = CASES[request.param]
    folder = folder_of(tmp_path_factory.mktemp("model"), config)
    return [plan_generation(folder, ranks=2, rank=rank, device="cpu", **given) for rank in range(2)]


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("plans", CASES, indirect=True)
def test_ranks_that_generate(group, plans):
    plan: GenerationPlan = plans[group.rank()]
    text = plan.text
    model, _ = text.build(Groups(tp=group))
    torch.manual_seed(0)
    params = list(dict.fromkeys(model.parameters()))
    for param in params:
        param.data.normal_(0, 0.02)
    assert plan.weights == sum(each.nbytes for each in (*params, *dict.fromkeys(model.buffers())))
    cache = text.cache(model)
    assert plan.cache == cache.num_bytes
    assert plan.cache_per_token * text.batch_size * text.capacity == plan.cache
    del cache
    # Each begins with another token: prompts that begin alike would share pages, which the plan does not count on.
    prompts = [[token] * text.prompt_length for token in range(7, 7 + text.batch_size)]
    given = {"max_new_tokens": text.max_new_tokens, "sampling": Sampling(0.8, 50)}
    gc.collect()
    with LivePeak() as measured:
        # Operations return views of these too.
        measured.count((*model.parameters(), *model.buffers()))
        if text.batch_size == 1:
            generate(model, prompts[0], **given)
        else:
            generate_all(model, [Request(prompt, **given) for prompt in prompts], max_sequences=len(prompts))
    assert plan.total - plan.weights == pytest.approx(measured.peak - plan.weights, rel=0.01)


def test_peaks_of_many_layers_are_those_of_few(tmp_path):
    few, many = (
        plan_generation(folder_of(tmp_path / str(n), LLAMA | {"num_hidden_layers": n}), batch_size=3, device="cpu")
        for n in (2, 40)
    )
    assert (few.prompt.peak, few.token.peak) == (many.prompt.peak, many.token.peak)
    assert many.cache == 20 * few.cache
    # All but embedding, output layer and last norm.
    once = 2 * LLAMA["vocab_size"] * LLAMA["hidden_size"] * 4 + LLAMA["hidden_size"] * 4
    assert many.weights - once == 20 * (few.weights - once)


@pytest.mark.slow
def test_the_largest_batch_fits_and_no_larger_one(tmp_path):
    folder, limit = folder_of(tmp_path / "model", LLAMA), 40_000_000
    plans = fit_generation(str(limit), folder, ranks=[1, 3], device="cpu")
    assert [plan.ranks for plan in plans] == [3, 1]
    assert plans[0].text.batch_size > plans[-1].text.batch_size > 1
    for plan in plans:
        batch = plan.text.batch_size
        same, more = (plan_generation(folder, ranks=plan.ranks, batch_size=n, device="cpu") for n in (batch, batch + 1))
        assert (same.total, same.cache) == (plan.total, plan.cache)
        assert plan.total <= limit < more.total
    # CUDA's own memory leaves less room.
    (less,) = fit_generation(str(limit + (1 << 30)), folder, device="cuda")
    (all_,) = fit_generation(str(limit + (1 << 30)), folder, device="cpu")
    assert less.text.batch_size < all_.text.batch_size


def test_the_rank_that_needs_the_most(tmp_path):
    """Three key-value heads on two ranks."""
    folder = folder_of(tmp_path / "model", LLAMA)
    both = [plan_generation(folder, ranks=2, rank=rank, batch_size=2, device="cpu") for rank in range(2)]
    assert both[0].cache == 2 * both[1].cache
    worst = plan_generation(folder, ranks=2, batch_size=2, device="cpu")
    assert (worst.rank, worst.total) == (0, both[0].total)


def test_adapters_are_planned_on_layers_of_training(tmp_path):
    adapter = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    folder = folder_of(tmp_path / "model", LLAMA)
    plain, adapted = (plan_generation(folder, adapter=each, device="cpu") for each in (None, tmp_path / "adapter"))
    assert plain.layers.startswith("those for inference")
    assert "those of training, since layers for inference have no" in adapted.layers
    # Two factors in fp32, and the places of the 96 rows of queries among those of keys and values.
    assert adapted.weights - plain.weights == 5 * (4 * (96 + 96) * 4 + 96 * 8)


def test_numbers_that_are_not_given(tmp_path):
    for longest, prompt, new in ((4096, 512, 200), (256, 128, 128), (16, 8, 8)):
        text = plan_generation(
            folder_of(tmp_path / "m", LLAMA | {"max_position_embeddings": longest}), device="cpu"
        ).text
        assert (text.prompt_length, text.max_new_tokens) == (prompt, new)
    assert text.dtype == torch.float32
    text = plan_generation(folder_of(tmp_path / "m", LLAMA | {"torch_dtype": "bfloat16"}), device="cpu").text
    assert text.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({}, {"prompt_length": 200, "max_new_tokens": 57}, "a prompt of 200 tokens and 57 new ones are more than 256"),
        ({}, {"ranks": 7}, "the model's 6 attention heads cannot be split over 7 ranks"),
        ({}, {"ranks": 2, "rank": 2}, "rank 2 is not one of the 2 ranks, 0 to 1"),
        ({}, {"batch_size": 0}, "batch_size is 0"),
        ({}, {"layers": "fast"}, "layers is 'fast'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, {}, "a model that labels texts"),
    ],
)
def test_what_cannot_be_generated(tmp_path, changes, given, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan_generation(folder_of(tmp_path / "model", LLAMA | changes), device="cpu", **given)


def test_what_does_not_fit(tmp_path):
    folder = folder_of(tmp_path / "model", LLAMA)
    with pytest.raises(ConfigError, match=r"no text of 256 tokens fits into 1.00 MiB of each of 1, 2 ranks"):
        fit_generation("1MiB", folder, ranks=[1, 2])
    with pytest.raises(ConfigError, match="'much' is not a number of bytes"):
        fit_generation("much", folder)
    with pytest.raises(CheckpointError, match="nowhere"):
        fit_generation("1GiB", tmp_path / "nowhere")
