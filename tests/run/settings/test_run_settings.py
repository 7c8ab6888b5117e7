"""Settings: what cannot be is refused with the values that broke the rule."""

from __future__ import annotations

import json
import re

import pytest

from shardwise.core.errors import ConfigError
from shardwise.run.settings import (
    ModelSettings,
    ParallelSettings,
    RecomputeSettings,
    Settings,
    TrainingSettings,
)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ModelSettings(hidden_size=100, num_heads=3), "hidden-size 100 is not a multiple of model.num-heads 3"),
        (lambda: ModelSettings(hidden_size=12, num_heads=4), "12 / 4 is odd"),
        (lambda: ModelSettings(num_heads=4, num_query_groups=3), "num-heads 4 is not a multiple"),
        (lambda: ParallelSettings(tp=2, tp_comm_overlap=True), "tp-comm-overlap needs --parallel.sequence-parallel"),
        (
            lambda: ParallelSettings(tp=2, sequence_parallel=True, tp_comm_overlap=True, exact=True),
            "parallel.exact cannot be used with --parallel.tp-comm-overlap",
        ),
        (lambda: RecomputeSettings(num_layers=2), "num-layers 2 needs --recompute.granularity full (it is 'none')"),
        (lambda: RecomputeSettings("full", modules=("mlp",)), "needs --recompute.granularity selective"),
        (lambda: RecomputeSettings("selective", modules=()), "names nothing"),
        (lambda: RecomputeSettings("selective", modules=("mpl",)), "a list of some of 'core_attn'"),
        (lambda: RecomputeSettings("selective", modules=("mlp", "mlp_act")), "choose one of them"),
        (lambda: Settings(), "no text to train on"),
        (lambda: Settings(data=("x",), parallel=ParallelSettings(tp=9)), "tp 9 is more than the 8 attention heads"),
    ],
)
def test_impossible_settings_name_the_value(make, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        make()


def test_the_world_must_fit():
    settings = Settings(
        data=("x",),
        parallel=ParallelSettings(tp=2),
        training=TrainingSettings(global_batch_size=6, micro_batch_size=2),
    )
    settings.check_world(6)
    with pytest.raises(ConfigError, match="tp 2 does not divide the 3 ranks"):
        settings.check_world(3)
    with pytest.raises(ConfigError, match="6 is not a multiple of the 4 data-parallel ranks"):
        settings.check_world(8)
    with pytest.raises(ConfigError, match="3 samples per rank"):
        settings.check_world(4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"parallel": ParallelSettings(exact_parts=4)},
            "parallel.exact-parts 4 is for exact runs, and parallel.exact is off; add --exact, or leave exact-parts "
            "out",
        ),
        (
            {"recompute": RecomputeSettings("full", num_layers=5)},
            "recompute.num-layers 5 is more than the 4 layers of the model; use 4 at most",
        ),
    ],
)
def test_what_would_be_ignored_is_an_error(settings, message):
    """Not before ranks are there: checkpoints of earlier versions hold such settings."""
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        Settings(data=("x",), **settings).check_world(1)


def test_settings_survive_json():
    settings = Settings(data=("a", "b"), model=ModelSettings(num_query_groups=2), training=TrainingSettings(steps=7))
    assert Settings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    with pytest.raises(ConfigError, match="another version"):
        Settings.from_json({"data": ["a"], "surprise": 1})


def test_a_sequence_that_the_ranks_do_not_divide():
    settings = Settings(
        data=("x",),
        model=ModelSettings(sequence_length=255),
        parallel=ParallelSettings(tp=2, sequence_parallel=True),
    )
    settings.check_world(2)
