"""Text from tokens as they come is the text of all tokens, and no character is ever shown in halves."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, strategies as st
from tokenizers import decoders, models

from shardwise.data.tokenizer import TextStream, Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["Überraschend große Wörter und 中文字符 ... " * 3], 290)


def stream(tokenizer: Tokenizer, ids: list[int], prompt_ids: list[int]) -> list[str]:
    text = TextStream(tokenizer, prompt_ids)
    return [*(text.push(token) for token in ids), text.finish(), text.finish()]


@given(prompt=st.text(max_size=20), ids=st.lists(st.integers(0, 289), max_size=200))
def test_pieces_of_any_tokens_join_to_their_text(tokenizer, prompt, ids):
    assert tokenizer.vocab_size == 290
    prompt_ids = tokenizer.encode(prompt)
    assert prompt + "".join(stream(tokenizer, ids, prompt_ids)) == tokenizer.decode(prompt_ids + ids)


@given(text=st.text(max_size=100))
def test_pieces_of_any_text_hold_only_its_characters(tokenizer, text):
    assert "".join(stream(tokenizer, tokenizer.encode(text), [])) == text


def test_a_character_comes_with_its_last_byte(tokenizer):
    ids = tokenizer.encode("a🎉b")
    assert len(ids) == 6
    assert stream(tokenizer, ids, []) == ["a", "", "", "", "🎉", "b", "", ""]
    assert stream(tokenizer, ids[:3], []) == ["a", "", "", "\ufffd", ""]


def test_a_prompt_that_ends_like_an_unfinished_character(tokenizer):
    prompt_ids, first_byte, letter = tokenizer.encode("\ufffd"), tokenizer.encode("🎉")[0], tokenizer.encode("a")[0]
    assert stream(tokenizer, [first_byte, letter], prompt_ids) == ["", "\ufffda", "", ""]


def test_long_texts_come_without_delay(tokenizer):
    text = "groß 中🎉, " * 200
    pieces = stream(tokenizer, tokenizer.encode(text), [])
    assert "".join(pieces) == text
    assert max(map(len, pieces)) < 10
    assert pieces[-2] == ""


def test_blanks_that_depend_on_the_token_before():
    backend = tokenizers.Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "</s>": 2}, unk_token="</s>"))
    backend.decoder = decoders.Metaspace()
    metaspace = Tokenizer(backend, "</s>")
    assert metaspace.decode([1]) == "two"
    assert stream(metaspace, [1, 0], [0]) == [" two", " one", "", ""]


@pytest.fixture(scope="module")
def of_bytes() -> Tokenizer:
    """Each character but two is its bytes, as for scripts that Llama 2's vocabulary lacks."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] + ["a", "</s>"]
    backend = tokenizers.Tokenizer(models.WordLevel({name: id for id, name in enumerate(names)}, unk_token="</s>"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend, "</s>")


@pytest.mark.parametrize("given", range(9))
def test_runs_of_bytes_are_cut_between_characters(of_bytes, given):
    """A run that begins within a character would be U+FFFD as a whole, its other characters included."""
    ids = [*"ကခဂ ဃ中é".encode() * 9, 256]
    text = of_bytes.decode(ids)
    first = len(text[:given].encode())
    assert "".join(stream(of_bytes, ids[first:], ids[:first])) == text[given:]
