"""A program's own distribution of layers over stages: parts may be uneven, or hold no layer."""

import pytest
from harness.parity import assert_close_to
from training.pipeline.pipelines import random_batch, run_whole, staged_gpt
from training.pipeline.test_pipeline_gradients import assert_gradients_of, finalize

from shardwise.core.errors import ConfigError
from shardwise.megatron import install
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.enums import LayerType
from shardwise.training.pipeline import make_schedule

SIZES = {"num_layers": 7, "hidden_size": 8, "num_attention_heads": 2}


def layouts():
    install()
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    return PipelineParallelLayerLayout


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["Et*4|tL", "E|t*5L", "E|t*2||t*3L", "E|t*5||L"])
def test_losses_and_gradients_are_those_of_one_rank(group, layout):
    num_chunks = layout.count("|") // 2 + 1
    batch = random_batch(4)
    whole = staged_gpt(num_layers=5)
    losses = run_whole(whole.chunks[0], batch)
    staged = staged_gpt(pp=2, num_chunks=num_chunks, num_layers=5, pipeline_model_parallel_layout=layout)
    results = staged.run(make_schedule("interleaved" if num_chunks > 1 else "1f1b", 2, 4, num_chunks), batch)
    finalize(staged)
    assert_gradients_of(whole, staged)
    assert len(results) == (4 if group.rank() else 0)
    for result, loss in zip(results, losses, strict=False):
        assert_close_to(result, loss, rtol_of_norm=1e-13)


def test_a_string_is_a_list_of_parts():
    layout = layouts()("E|t|t*2|t||(t|)*2,t*2,L", 4)
    names = [["embedding"], ["decoder"], ["DECODER"] * 2, ["decoder"], [], ["decoder"], [LayerType.decoder]]
    assert layout.layout == layouts()([*names, ["decoder"] * 2 + [" loss "]], 4).layout
    assert (layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size) == (4, 2)
    assert repr(layout) == "E|t|t*2|t||(t|)*2,t*2,L"
    of_stages = [[layout.get_layer_id_list(vp_stage=chunk, pp_rank=stage) for chunk in range(2)] for stage in range(4)]
    assert of_stages == [[[], []], [[0], [4]], [[1, 2], [5]], [[3], [6, 7]]]
    assert layout.get_layer_offset(vp_stage=1, pp_rank=2) == 5
    assert layout.get_num_layers_to_build(LayerType.loss, vp_stage=1, pp_rank=3) == 1
    assert layouts().get_num_stages_from_str("Et*3|(tt|)*29,m|L") == 32
    assert layouts().from_str("((t*2|)*2t)*2", 5).flatten_layout == [LayerType.decoder] * 10


def test_the_config_has_the_layout_s_chunks():
    config = TransformerConfig(**SIZES, pipeline_model_parallel_size=2, pipeline_model_parallel_layout="E|t*6|t|L")
    assert config.virtual_pipeline_model_parallel_size == 2
    assert config.stage_layers() == ((range(0), range(6, 7)), (range(6), range(7, 7)))
    again = TransformerConfig(
        **SIZES, pipeline_model_parallel_size=2, pipeline_model_parallel_layout=config.pipeline_model_parallel_layout
    )
    assert again.stage_layers() == config.stage_layers()


@pytest.mark.parametrize(
    ("layout", "others", "words"),
    [
        ("Et*6|t", {}, "has 1 embedding, 0 loss, .* 7 decoder.*; here it must have the embedding, 7 decoder layers"),
        ("t*7|EL", {}, "in this order"),
        ("Et*3|t*3L", {}, "has 1 embedding, 1 loss, 0 encoder, 6 decoder"),
        ("Et*7|mL", {}, "1 mtp; here it must have"),
        ("E|t*7|L", {}, "has 3 parts, which 2 pipeline stages do not divide"),
        ("Ex|t*7L", {}, r"has 'x'; it may have E, t, m, L for layers, \| between parts"),
        ("E(t|t)L", {}, r"has '\(', '\)'; it may have"),
        ("Et*99999999|L", {}, "has over 100000 layers"),
        ([["embedding"], ["other"]], {}, "has the layer 'other'; it must be one of embedding, loss"),
        ([[["embedding"]], ["loss"]], {}, r"has the layer \['embedding'\]"),
        (["embedding", "loss"], {}, "has the part 'embedding'; it must be a list"),
        ("E|t*6|t|L", {"virtual_pipeline_model_parallel_size": 3}, "has 2 stages of 2 chunks, and the config 2 of 3"),
        ("Et*7|L", {"num_layers_in_first_pipeline_stage": 3}, "and num_layers_in_first_pipeline_stage are both set"),
    ],
)
def test_layouts_that_are_not_a_model_s(layout, others, words):
    with pytest.raises(ConfigError, match=words):
        TransformerConfig(**SIZES, pipeline_model_parallel_size=2, pipeline_model_parallel_layout=layout, **others)
