import hashlib

import pytest
from hypothesis import given, strategies as st

from shardwise.core.errors import ConfigError, DataError
from shardwise.data import Corpus

# Distinct ones, since equal documents may have to be held out together.
DOCUMENTS = st.lists(st.text(alphabet="ab é\n", min_size=1, max_size=40), min_size=3, max_size=8, unique=True)


def corpus_of(*documents: str) -> Corpus:
    return Corpus("numbers", documents)


def test_size_hash_and_bytes():
    corpus = corpus_of("é", "", "ab")
    assert corpus.documents == ("é", "ab")
    assert corpus.num_bytes == 4
    assert corpus.to_bytes() == "éab".encode()
    lengths = [(2).to_bytes(8, "little"), (2).to_bytes(8, "little")]
    assert corpus.sha256 == hashlib.sha256(lengths[0] + "é".encode() + lengths[1] + b"ab").hexdigest()


def test_hash_knows_order_and_borders_but_not_the_name():
    assert corpus_of("ab", "c").sha256 != corpus_of("a", "bc").sha256
    assert corpus_of("ab", "c").sha256 != corpus_of("c", "ab").sha256
    assert corpus_of("ab", "c").sha256 == Corpus("other", ("ab", "c")).sha256


def test_repr_does_not_hold_the_text():
    assert "secret" not in repr(corpus_of("secret"))


@pytest.mark.parametrize("documents", [(), ("",)])
def test_a_corpus_without_text(documents):
    with pytest.raises(DataError, match="'numbers' has no text"):
        corpus_of(*documents)


def test_a_lone_surrogate_is_no_text():
    with pytest.raises(DataError, match=r"document 1 .* lone surrogate at character 2"):
        corpus_of("a", "bc\udc80")


def is_split_of(documents: tuple[str, ...], heads: tuple[str, ...], tails: tuple[str, ...]) -> bool:
    """Whether each document is whole on one side, or its head is on one and its tail on the other, in order."""
    if not documents:
        return not heads and not tails
    first, rest = documents[0], documents[1:]
    return (
        (heads[:1] == (first,) and is_split_of(rest, heads[1:], tails))
        or (tails[:1] == (first,) and is_split_of(rest, heads, tails[1:]))
        or ("".join(heads[:1] + tails[:1]) == first and is_split_of(rest, heads[1:], tails[1:]))
    )


@given(documents=DOCUMENTS, fraction=st.floats(0.01, 0.5), seed=st.integers(0, 3))
def test_a_split_loses_and_invents_nothing(documents, fraction, seed):
    corpus = corpus_of(*documents)
    train, held_out = corpus.split(held_out_fraction=fraction, seed=seed)
    assert held_out.num_bytes >= max(1, round(fraction * corpus.num_bytes))
    assert train.num_bytes + held_out.num_bytes == corpus.num_bytes
    assert is_split_of(corpus.documents, train.documents, held_out.documents)


def test_at_most_one_document_is_cut():
    documents = [f"{number}\n" * 50 for number in range(100, 200)]
    train, held_out = corpus_of(*documents).split(held_out_fraction=0.1)
    assert len(train.documents) + len(held_out.documents) <= 101
    assert sum(document in documents for document in held_out.documents) >= len(held_out.documents) - 1
    assert 2000 <= held_out.num_bytes < 2000 + 4


def test_a_split_knows_documents_by_their_text():
    documents = [f"document {number}\n" * 5 for number in range(40)]
    _, held_out = corpus_of(*documents).split(held_out_fraction=0.2)
    _, of_reversed = corpus_of(*reversed(documents)).split(held_out_fraction=0.2)
    assert set(held_out.documents) == set(of_reversed.documents)
    _, other = corpus_of(*documents).split(held_out_fraction=0.2, seed=1)
    assert set(other.documents) != set(held_out.documents)


@given(copies=st.integers(2, 5), num_bytes=st.integers(1, 60), seed=st.integers(0, 5))
def test_no_held_out_line_is_in_an_equal_document_of_the_training_part(copies, num_bytes, seed):
    # Ten documents of five lines, no line twice but in copies.
    documents = [f"{number}a\n{number}b\n{number}c\n" for number in range(10, 20)]
    train, held_out = corpus_of(*documents * copies).split(held_out_bytes=num_bytes, seed=seed)
    lines = {line for text in train.documents for line in text.splitlines()}
    assert lines.isdisjoint(line for text in held_out.documents for line in text.splitlines())


def test_one_document_is_cut_before_a_line():
    text = "".join(f"line {number}\n" for number in range(100))
    train, held_out = corpus_of(text).split(held_out_bytes=20)
    assert train.documents + held_out.documents == (text[:-24], text[-24:])
    assert held_out.documents[0].startswith("line 97\n")


def test_a_few_bytes_take_a_whole_line():
    _, held_out = corpus_of("first line of text\nlast line of text\n").split(held_out_bytes=2)
    assert held_out.documents == ("last line of text\n",)


def test_a_document_of_one_line_is_cut_before_a_word_and_without_words_before_a_character():
    train, held_out = corpus_of("one two three four").split(held_out_bytes=8)
    assert (train.documents, held_out.documents) == (("one two ",), ("three four",))
    train, held_out = corpus_of("é" * 10).split(held_out_bytes=3)
    assert (train.documents, held_out.documents) == (("é" * 8,), ("é" * 2,))


def test_a_cut_does_not_go_back_to_a_far_line():
    text = "short line\n" + "x" * 5000 + " " + "y" * 2000
    _, held_out = corpus_of(text).split(held_out_bytes=1500)
    assert held_out.documents == ("y" * 2000,)


@pytest.mark.parametrize("num_bytes", [1, 6, 100])
def test_too_small_to_split(num_bytes):
    text = "é" if num_bytes == 1 else "é" * 3
    with pytest.raises(DataError, match=rf"of {len(text) * 2} bytes is too small to hold out {num_bytes} bytes"):
        corpus_of(text).split(held_out_bytes=num_bytes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "either held_out_fraction or held_out_bytes"),
        ({"held_out_fraction": 0.1, "held_out_bytes": 3}, "either held_out_fraction or held_out_bytes"),
        ({"held_out_fraction": 0.0}, "held_out_fraction 0.0 must be"),
        ({"held_out_fraction": 1.0}, "held_out_fraction 1.0 must be"),
        ({"held_out_fraction": float("nan")}, "held_out_fraction nan must be"),
        ({"held_out_bytes": 0}, "held_out_bytes 0 must be"),
    ],
)
def test_impossible_sizes(sizes, message):
    with pytest.raises(ConfigError, match=message):
        corpus_of("a\nb\n").split(**sizes)


def test_parts_are_named():
    train, held_out = corpus_of("a\n" * 1000).split(held_out_bytes=500)
    assert train.name == "numbers (training: 1.5 kB)"
    assert held_out.name == "numbers (held out: 500 B)"


def test_equal_documents_cannot_be_divided():
    with pytest.raises(DataError, match="all 300 documents of the corpus 'text' are equal"):
        Corpus("text", ("a",) * 300).split(held_out_fraction=0.03)
