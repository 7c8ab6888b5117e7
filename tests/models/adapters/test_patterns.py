"""Regular expressions of adapters mean what they mean in ``re``, in a bounded number of steps."""

from __future__ import annotations

import random
import re
from contextlib import suppress

import pytest

from shardwise.core.errors import ConfigError
from shardwise.models.adapters import LoraConfig
from shardwise.models.adapters.patterns import check_pattern, matches

PATH = "model.layers.10.self_attn.q_proj"
ATOMS = [
    *("a", "b", ".", r"\.", r"\d", "[ab]", "[^a]", r"\b", "^", "$", r"\w", "(?:ab|a)", "(a|b|)", "(?=a)", "(?!b)"),
    *("(?<=a)", "(?<!b)", "(?<=ab)", "(?i:A)", "a|b", "(?:)", "(?!)", "(?=.*b)", r"\Z"),
]
COUNTS = ("", "", "", "*", "+", "?", "{2}", "{1,3}", "*?", "+?")


def drawn(draw, depth):
    parts = (
        f"({drawn(draw, depth - 1)})" if depth and draw.random() < 0.4 else draw.choice(ATOMS)
        for _ in range(draw.randint(1, 4))
    )
    return "".join(part + draw.choice(COUNTS) for part in parts)


def test_answers_are_those_of_re():
    draw, tried, found = random.Random(0), 0, 0
    while tried < 200:
        pattern, text = drawn(draw, 2), "".join(draw.choices("abA1.", k=draw.randint(0, 5)))
        try:
            expected = re.fullmatch(pattern, text) is not None
            at_end = re.match(rf"(.*\.)?({pattern})$", text) is not None
        except re.error:
            continue
        check_pattern(pattern)
        assert matches(pattern, text, "x") is expected, (pattern, text)
        assert matches(pattern, text, "x", at_end=True) is at_end, (pattern, text)
        tried, found = tried + 1, found + expected
    assert 0 < found < tried


@pytest.mark.parametrize(
    "pattern", ["(.*)*(.*)*(.*)*x$", "(a|a|.)*" * 9 + "x", "((((.*)*)*)*)*x", r"(\w+\.?)+!", "((.?){1000}){1000}x"]
)
def test_slow_expressions_end(pattern):
    def uses(**fields):
        config = LoraConfig(**{"target_modules": ("q_proj",), **fields})
        # Each ends: with an answer, or with an error that names the field.
        with suppress(ConfigError):
            config.chooses(PATH)
            config.at(PATH)

    uses(target_modules=pattern)
    uses(exclude_modules=pattern)
    uses(rank_pattern={pattern: 2})
    uses(alpha_pattern={pattern: 2.0})
    uses(layers_pattern=(pattern,), layers_to_transform=(1,))


def test_an_expression_with_too_many_steps_is_named():
    with pytest.raises(ConfigError, match=r"^target_modules: the regular expression .* takes more than 50,000 steps"):
        LoraConfig(target_modules="((.*)(.*))*" * 40 + "x").chooses(PATH)


def test_expressions_of_published_adapters():
    config = LoraConfig(target_modules=r"^(?!.*vision)(?=.*layers).*\.(?:q_proj|v_proj)$", rank_pattern={r"10\..*": 4})
    assert config.chooses(PATH)
    assert not config.chooses(PATH.replace("model", "vision"))
    assert (config.at(PATH).r, config.at("model.layers.1.self_attn.q_proj").r) == (4, 8)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [("(", "missing"), ("x" * 10_001, "10,001 characters"), (r"(a)\1", "refers to a group"), ("a++", "possessive")],
)
def test_expressions_that_are_refused(pattern, reason):
    with pytest.raises(ConfigError, match=reason):
        check_pattern(pattern)
