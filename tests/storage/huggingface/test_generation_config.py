"""What ``generation_config.json`` says is what ``generate`` does, unless a flag says otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.models.generation import Sampling
from shardwise.storage.huggingface.generation_config import GenerationDefaults

VOCABULARY, EOS = 50, 7


def choose(tmp_path: Path, values: Any, config: dict[str, Any] | None = None, **asked: Any) -> Any:
    content = values if isinstance(values, str) else json.dumps(values)
    (tmp_path / "generation_config.json").write_text(content)
    return GenerationDefaults(tmp_path, config).choose(vocab_size=VOCABULARY, eos_id=EOS, **asked)


@pytest.mark.parametrize(
    ("values", "asked", "sampling"),
    [
        ({}, {}, Sampling(0.8, 50, 1.0)),
        ({"temperature": None, "top_k": None, "top_p": None, "do_sample": None}, {}, Sampling(0.8, 50, 1.0)),
        ({"temperature": 0.6, "top_p": 0.9}, {}, Sampling(0.6, 50, 0.9)),
        ({"do_sample": True}, {}, Sampling(1.0, 50, 1.0)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, {}, Sampling(0.6, 20, 0.95)),
        ({"do_sample": True, "top_k": 0}, {}, Sampling(1.0, 0, 1.0)),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.3, "top_k": 3}, Sampling(0.3, 3, 1.0)),
        ({"do_sample": False, "top_k": 9}, {}, Sampling(0.0, 9, 1.0)),
        ({"do_sample": False, "top_k": 9, "temperature": 0.6}, {"temperature": 0.7}, Sampling(0.7, 9, 1.0)),
        # What a flag replaces need not be possible.
        ({"temperature": -1, "top_p": 0}, {"temperature": 0.0, "top_p": 0.5}, Sampling(0.0, 50, 0.5)),
    ],
)
def test_sampling(tmp_path, values, asked, sampling):
    assert choose(tmp_path, values, **asked).sampling == sampling


@pytest.mark.parametrize(
    "values", [{}, {"temperature": 0.6}, {"top_k": 12, "top_p": 0.9}, {"temperature": 2, "top_p": 1}]
)
def test_what_is_left_out_of_a_file_that_samples_is_as_in_transformers(tmp_path, values):
    import transformers

    ours = choose(tmp_path, {"do_sample": True, **values}).sampling
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path)
    theirs.update(**theirs._get_default_generation_params(), defaults_only=True)
    assert theirs.do_sample
    assert (ours.temperature, ours.top_k, ours.top_p) == (theirs.temperature, theirs.top_k, theirs.top_p)


def test_the_number_of_tokens(tmp_path):
    for values, prompt, expected in (
        ({}, 5, 200),
        ({"max_new_tokens": 30}, 5, 30),
        ({"max_length": 30}, 5, 25),
        ({"max_length": 30, "max_new_tokens": 12}, 5, 12),
        ({"max_new_tokens": 0}, 5, 0),
    ):
        assert choose(tmp_path, values, num_prompt_tokens=prompt).max_new_tokens == expected
        assert choose(tmp_path, values, num_prompt_tokens=prompt, max_new_tokens=3).max_new_tokens == 3
    with pytest.raises(ConfigError, match=r"30 tokens, and .*generation_config\.json says max_length 30, .*--max-new"):
        choose(tmp_path, {"max_length": 30}, num_prompt_tokens=30)


def test_every_end_of_text_ends_it(tmp_path):
    for values, config, expected in (
        ({}, {}, (EOS,)),
        ({}, {"eos_token_id": 3}, (EOS, 3)),
        ({}, {"eos_token_id": [0, 2]}, (EOS, 0, 2)),
        ({"eos_token_id": [0, 2]}, {"eos_token_id": 4}, (EOS, 0, 2)),
        ({"eos_token_id": [2, EOS, 2]}, {}, (EOS, 2)),
        ({"eos_token_id": []}, {"eos_token_id": None}, (EOS,)),
    ):
        choice = choose(tmp_path, values, config)
        assert (choice.eos_ids, choice.notes) == (expected, ())
    choice = choose(tmp_path, {"eos_token_id": [2, VOCABULARY, -1]})
    assert choice.eos_ids == (EOS, 2)
    assert choice.notes == ("eos_token_id 50, -1 is outside the model's 50 ids and ends no text",)
    assert GenerationDefaults().choose(vocab_size=9, eos_id=8).eos_ids == (8,)


def test_what_is_not_followed_is_said_in_a_line(tmp_path):
    neutral = {"num_beams": 1, "repetition_penalty": 1.0, "min_length": 0, "suppress_tokens": None, "min_p": 0.0}
    silent = {"transformers_version": "5", "_from_model_config": True, "pad_token_id": 3, "use_cache": True}
    assert choose(tmp_path, neutral | silent).notes == ()
    choice = choose(tmp_path, silent | {"typical_p": 0.9, "num_beams": 4, "bad_words_ids": [[1]] * 999, "new": 1})
    (note,) = choice.notes
    assert note.startswith(
        "generation_config.json asks for what is not supported, and is ignored: typical_p 0.9, num_beams 4, "
        "bad_words_ids [["
    )
    assert note.endswith("..., new 1")
    assert len(note) < 280
    (note,) = choose(tmp_path, {"do_sample": False}, top_k=5).notes
    assert note.startswith("--top-k without --temperature: generation_config.json says do_sample false")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("[1]", "must hold a JSON object, not list"),
        ("{", "is not JSON"),
        ("\0", "is not JSON"),
        ("[" * 1_000_000, ""),
        ('{"temperature": NaN}', 'its "temperature" is NaN'),
        ('{"temperature": -0.5}', "temperature is -0.5; it must be from 0 to"),
        ('{"temperature": "hot"}', 'temperature is "hot"; it must be a number'),
        ('{"do_sample": 1}', "do_sample is 1; it must be true or false"),
        ('{"top_k": 2.5}', "top_k is 2.5; it must be an integer"),
        ('{"top_k": -1}', "top_k is -1; it must be from 0"),
        ('{"top_p": 0}', "top_p is 0.0; it must be over 0"),
        ('{"top_p": Infinity}', 'its "top_p" is Infinity'),
        ('{"max_new_tokens": 1e3}', "max_new_tokens is 1000.0; it must be an integer"),
        ('{"max_new_tokens": 10000000000}', "max_new_tokens is 10000000000; it must be from 0"),
        ('{"eos_token_id": [1, true]}', "eos_token_id is [1, true]; it must be an integer or a list of integers"),
        ('{"eos_token_id": "</s>"}', 'eos_token_id is "</s>"; it must be an integer'),
        ('{"eos_token_id": {"a": 1}}', "it must be an integer or a list of integers"),
    ],
)
def test_damaged_files(tmp_path, content, what):
    with pytest.raises((ConfigError, CheckpointError)) as raised:
        choose(tmp_path, content)
    message = str(raised.value)
    assert what in message
    assert "generation_config.json" in message
    assert len(message) < 400
