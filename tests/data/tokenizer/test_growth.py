"""A tokenizer.json that makes a text many times longer is refused when it is loaded."""

from __future__ import annotations

import base64

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from shardwise.core.errors import DataError
from shardwise.data.tokenizer.growth import check_growth

LONG = "a" * 1000
TWICE = normalizers.Replace("a", "aa")


def made(**parts):
    vocab = {sign: number for number, sign in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def table_of(longest):
    """A SentencePiece table of characters; the check reads only the texts behind the trie."""
    table = (4).to_bytes(4, "little") + b"\0" * 4 + b"b\0" + b"a" * longest + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("normalizer", normalizers.Sequence([normalizers.Replace("a", LONG)] * 4)),
        ("normalizer", normalizers.Replace("b", LONG)),
        ("normalizer", normalizers.Sequence([TWICE] * 9)),
        ("normalizer", normalizers.Sequence([normalizers.Sequence([TWICE] * 3)] * 3)),
        ("normalizer", normalizers.Sequence([normalizers.Replace("a", "bb"), normalizers.Replace("b", "aa")] * 5)),
        ("normalizer", normalizers.Sequence([normalizers.Replace("ab", "abab")] * 9)),
        ("normalizer", normalizers.Sequence([normalizers.Replace(Regex("[a-z]"), "aaa")] * 6)),
        ("normalizer", normalizers.Sequence([normalizers.Replace(Regex(r"\p{L}*"), "x")] * 9)),
        ("normalizer", normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("a", "a" * 40)])),
        ("decoder", decoders.Sequence([decoders.Replace("a", LONG), decoders.Fuse()])),
    ],
)
def test_growth_is_refused(name, part):
    with pytest.raises(
        DataError, match=rf"^here: its {name} makes up to [\d,]+ characters of one, and 500 are allowed"
    ):
        check_growth(made(**{name: part}), "here")


def test_what_is_added_to_each_text_is_limited():
    many = processors.TemplateProcessing(single=["<s>"] * 1001 + ["$A"], special_tokens=[("<s>", 256)])
    with pytest.raises(DataError, match="tokens that its post_processor adds to each text are 1,00"):
        check_growth(made(post_processor=many), "here")
    with pytest.raises(DataError, match="characters that its normalizer adds to each text are 2,000"):
        check_growth(made(normalizer=normalizers.Prepend(LONG * 2)), "here")


@pytest.mark.parametrize(
    "part",
    [
        None,
        normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
        # ALBERT's, CLIP's and Gemma's.
        normalizers.Sequence(
            [normalizers.Replace("``", '"'), normalizers.Replace("''", '"'), normalizers.NFKD(),
             normalizers.StripAccents(), normalizers.Lowercase(), normalizers.Replace(Regex(" {2,}"), " ")]
        ),
        normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]),
        normalizers.Sequence([normalizers.Replace(sign, f"<|{sign}|>") for sign in "abcdefgh"]),
        normalizers.Sequence([normalizers.Replace(Regex(r"\s+"), " ")] * 30),
    ],
)  # fmt: skip
def test_usual_ones_are_accepted(part):
    check_growth(made(normalizer=part, decoder=decoders.ByteLevel()), "here")


def test_the_texts_of_a_table_are_measured(monkeypatch):
    for longest, is_allowed in ((33, True), (600, False)):
        monkeypatch.setattr("shardwise.data.tokenizer.growth._state", lambda _, longest=longest: table_of(longest))
        if is_allowed:
            check_growth(made(), "here")
        else:
            with pytest.raises(DataError, match="makes up to 600 characters of one"):
                check_growth(made(), "here")
