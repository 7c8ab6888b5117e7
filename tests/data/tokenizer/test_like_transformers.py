"""Special and added tokens in texts are what ``transformers`` takes them for, token for token."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, normalizers

from shardwise.core.errors import DataError
from shardwise.data.tokenizer import Tokenizer, library

FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
TEXT = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n  I am <think> a model</think>.<|endoftext|>"
NAMES = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "word", "Wo", " <s>", "<|im_", "ß")


def transformers_tokenizer(folder: Path) -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def plain() -> tokenizers.Tokenizer:
    """A byte-level BPE without added tokens but the one that ends a text."""
    return Tokenizer.train([TEXT, "Wort um Wort, word for word\n\n  and\tsome more größe\r\n"], 290)._backend


def write_folder(
    folder: Path, plain: tokenizers.Tokenizer, added: list[AddedToken], normalizer: Any = None, **files: Any
) -> Path:
    """A tokenizer's folder; ``files`` are the JSON values of those beside ``tokenizer.json``."""
    folder.mkdir(exist_ok=True)
    backend = tokenizers.Tokenizer.from_str(plain.to_str())
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens(added)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    files["tokenizer_config"] = config | files.get("tokenizer_config", {})
    for path in folder.iterdir():
        if path.stem not in files and path.name != "tokenizer.json":
            path.unlink()
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def check_like_transformers(folder: Path, texts: list[str]) -> Tokenizer:
    theirs, ours = transformers_tokenizer(folder), Tokenizer.load(folder)
    assert ours.eos_id == theirs.eos_token_id
    for text in texts:
        options = {"add_special_tokens": False}
        assert ours.encode(text, parse_special=True) == theirs(text, **options)["input_ids"], text
        assert ours.encode(text) == theirs(text, split_special_tokens=True, **options)["input_ids"], text
    return ours


def test_a_prompt_in_a_chat_format(tmp_path: Path, plain: tokenizers.Tokenizer) -> None:
    added = [AddedToken(name, special=True, normalized=False) for name in ("<|im_start|>", "<|im_end|>")]
    added += [AddedToken(name, normalized=False) for name in ("<think>", "</think>")]
    ours = check_like_transformers(write_folder(tmp_path, plain, added), [TEXT])
    ids = ours.encode(TEXT, parse_special=True)
    special = {ours._backend.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")}
    assert sum(token in special for token in ids) == 4
    assert not special & set(ours.encode(TEXT))
    assert ours.decode(ids) == ours.decode(ours.encode(TEXT)) == TEXT


flags = st.fixed_dictionaries(dict.fromkeys(FLAGS, st.booleans()))
added_tokens = st.dictionaries(st.sampled_from(NAMES), flags, max_size=5)
pieces = st.sampled_from((*NAMES, "<|endoftext|>", " ", "  \n", "a", "Wort", "WORD", "_", "é", "<", "|>", "end"))


@settings(max_examples=60, deadline=None)
@given(
    in_file=added_tokens,
    in_config=st.none() | added_tokens,
    roles=st.dictionaries(st.sampled_from(["pad_token", "unk_token", "image_token"]), st.sampled_from(NAMES)),
    extra=st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
    lowercase=st.booleans(),
    texts=st.lists(st.lists(pieces, max_size=12).map("".join), min_size=1, max_size=6),
)
def test_any_added_tokens(tmp_path_factory, plain, in_file, in_config, roles, extra, lowercase, texts):
    config: dict[str, Any] = dict(roles)
    if extra:
        config["additional_special_tokens"] = extra
    if in_config is not None:
        named = enumerate(in_config.items(), start=300)
        config["added_tokens_decoder"] = {str(token_id): {"content": name} | own for token_id, (name, own) in named}
    folder = write_folder(
        tmp_path_factory.getbasetemp() / "any",
        plain,
        [AddedToken(name, **own) for name, own in in_file.items()],
        normalizers.Lowercase() if lowercase else None,
        tokenizer_config=config,
    )
    check_like_transformers(folder, texts)


def test_files_of_older_libraries(tmp_path: Path, plain: tokenizers.Tokenizer) -> None:
    """Which tokens there are stands beside the file, and in no ``added_tokens_decoder``."""
    folder = write_folder(
        tmp_path,
        plain,
        [AddedToken("<think>", lstrip=True), AddedToken("word", special=True)],
        special_tokens_map={
            "eos_token": {"content": "<|endoftext|>", "lstrip": False},
            "pad_token": "<think>",
            "sep_token": {"content": "<|im_end|>", "lstrip": True, "rstrip": True, "single_word": False},
        },
        added_tokens={"</think>": 295, "<|im_end|>": 294},
    )
    ours = check_like_transformers(folder, [TEXT, " <think> x", "x </think>  y <|im_end|> z word", "worden"])
    (folder / "tokenizer_config.json").unlink()
    assert Tokenizer.load(folder).sha256 == ours.sha256


@pytest.mark.parametrize("separator", ["\n", " ", "", "<|im_end|>", "\n \n"])
def test_long_texts_are_those_of_the_whole(tmp_path, plain, monkeypatch, separator):
    """No part begins or ends within a token's name, or among the blanks that it takes."""
    monkeypatch.setattr(library, "MAX_PART_CHARS", 100)
    added = [AddedToken("<|im_start|>", special=True, lstrip=True), AddedToken("<|im_end|>", special=True, rstrip=True)]
    folder = write_folder(tmp_path, plain, [*added, AddedToken("<think>", single_word=True)])
    chance = random.Random(0)
    words = ["Wort", "um", "a", "\n", "  ", "größe", "<|im_start|>", "<|im_end|>\n\n", "<think>", "_<think>"]
    texts = [separator.join(chance.choices(words, k=200)) for _ in range(10)]
    ours = check_like_transformers(folder, texts)
    assert ours._encodes_locally
    pieces = list(
        library.encodable_parts(texts[0], lambda text: ours.encode(text, parse_special=True), longest_name=12)
    )
    assert "".join(pieces) == texts[0]
    assert max(map(len, pieces)) <= 100


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("tokenizer_config", "[" * 1_000_000, "cannot read"),
        ("tokenizer_config", '{"eos_token"', "cannot read"),
        ("tokenizer_config", "[]", "must hold a JSON object, not list"),
        ("tokenizer_config", '{"pad_token": {"content": 3}}', "pad_token is \"{'content': 3}\", which is no token"),
        ("tokenizer_config", '{"pad_token": {"content": "x", "lstrip": NaN}}', 'its "lstrip" is NaN'),
        ("tokenizer_config", '{"pad_token": "\\ud83d"}', "pad_token is"),
        ("tokenizer_config", '{"extra_special_tokens": 3}', "extra_special_tokens is '3', which is no token"),
        ("tokenizer_config", '{"extra_special_tokens": [null]}', "extra_special_tokens is 'None', which is no token"),
        ("tokenizer_config", '{"added_tokens_decoder": []}', "added_tokens_decoder is '[]', which is no token"),
        ("tokenizer_config", '{"added_tokens_decoder": {"-1": {"content": "x"}}}', "added_tokens_decoder '-1' is"),
        ("special_tokens_map", "\0", "cannot read"),
        ("added_tokens", '{"<x>": "3"}', "<x> is '3', which is no token"),
    ],
)
def test_damaged_files_beside_a_tokenizer(tmp_path, plain, name, content, what):
    folder = write_folder(tmp_path, plain, [])
    (folder / f"{name}.json").write_text(content)
    with pytest.raises(DataError) as raised:
        Tokenizer.load(folder)
    message = str(raised.value)
    assert what in message
    assert f"{name}.json" in message
    assert "\n" not in message
    assert len(message) < 400
