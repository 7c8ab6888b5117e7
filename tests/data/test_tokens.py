import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, strategies as st
from tokenizers import processors

from shardwise.core.errors import ConfigError
from shardwise.data import Corpus, TokenStream, tokens
from shardwise.data.tokenizer import Tokenizer

CORPUS = Corpus("three", ("the first text\n", "the second text\n", "é"))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(CORPUS.documents, 270)


@pytest.fixture
def encodings(monkeypatch):
    """One entry for each time that a corpus was encoded."""
    calls = []
    encode = tokens._encode
    monkeypatch.setattr(tokens, "_encode", lambda *arguments: calls.append(1) or encode(*arguments))
    return calls


def documents_of(stream: TokenStream, tokenizer: Tokenizer) -> list[str]:
    """The texts between the end-of-text ids."""
    ends = np.flatnonzero(stream.tokens == stream.eos_id)
    assert ends[-1] == stream.num_tokens - 1
    starts = [0, *(ends[:-1] + 1)]
    return [tokenizer.decode(stream.tokens[start:end]) for start, end in zip(starts, ends, strict=True)]


@given(documents=st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=6))
def test_every_document_is_there_and_ends(tokenizer, documents):
    corpus = Corpus("any", tuple(documents))
    stream = TokenStream.from_corpus(corpus, tokenizer)
    assert documents_of(stream, tokenizer) == documents
    assert stream.num_bytes == corpus.num_bytes
    assert stream.name == "any"


def test_what_the_tokenizer_puts_in_front_stands_before_every_document():
    backend = tokenizers.Tokenizer.from_str(Tokenizer.train(CORPUS.documents, 270, ["</s>", "<s>"])._backend.to_str())
    plain = TokenStream.from_corpus(CORPUS, Tokenizer(backend, "</s>")).tokens
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    marked = TokenStream.from_corpus(CORPUS, Tokenizer(backend, "</s>")).tokens
    ends = np.flatnonzero(plain == 0)
    np.testing.assert_array_equal(marked, np.insert(plain, [0, *(ends[:-1] + 1)], 1))


def test_documents_are_encoded_in_groups(tokenizer, monkeypatch):
    whole = TokenStream.from_corpus(CORPUS, tokenizer)
    monkeypatch.setattr(tokens, "_GROUP_CHARS", 20)
    sizes = []
    encode_batch = tokenizer.encode_batch
    monkeypatch.setattr(
        tokenizer, "encode_batch", lambda group, **options: sizes.append(len(group)) or encode_batch(group)
    )
    np.testing.assert_array_equal(TokenStream.from_corpus(CORPUS, tokenizer).tokens, whole.tokens)
    assert sizes == [2, 1]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_ids_are_as_small_as_the_vocabulary_allows(vocab_size, dtype, tmp_path):
    class Wide:
        eos_id = vocab_size - 1
        beginning = ()
        sha256 = "wide"

        def encode_batch(self, texts, **options):
            return [[0, vocab_size - 1] for _ in texts]

    wide = Wide()
    wide.vocab_size = vocab_size
    for cache_dir in (None, tmp_path):
        stream = TokenStream.from_corpus(Corpus("one", ("x",)), wide, cache_dir)
        assert stream.tokens.dtype == dtype
        assert stream.tokens.tolist() == [0, vocab_size - 1, vocab_size - 1]


def test_the_array_cannot_be_changed(tokenizer, tmp_path):
    for cache_dir in (None, tmp_path):
        stream = TokenStream.from_corpus(CORPUS, tokenizer, cache_dir)
        with pytest.raises(ValueError, match="read-only"):
            stream.tokens[0] = 1


def test_cache_is_mapped_and_keyed_by_contents(tokenizer, tmp_path, encodings):
    cache = tmp_path / "cache"
    first = TokenStream.from_corpus(CORPUS, tokenizer, cache)
    assert isinstance(first.tokens, np.memmap)
    again = TokenStream.from_corpus(Corpus("other name", CORPUS.documents), tokenizer, cache)
    assert len(encodings) == 1
    assert isinstance(again.tokens, np.memmap)
    assert again.name == "other name"
    np.testing.assert_array_equal(again.tokens, TokenStream.from_corpus(CORPUS, tokenizer).tokens)
    del encodings[:]
    TokenStream.from_corpus(Corpus("three", CORPUS.documents[:2]), tokenizer, cache)
    TokenStream.from_corpus(CORPUS, Tokenizer.train(CORPUS.documents, 260), cache)
    assert len(encodings) == 2
    assert sorted(path.suffix for path in cache.iterdir()) == [".json"] * 3 + [".npy"] * 3


def test_special_tokens_are_letters_unless_asked_and_the_cache_tells_them_apart(tokenizer, tmp_path, encodings):
    """Also from what a version without the choice has left, whose ids are of letters."""
    corpus = Corpus("joined", (f"one{tokenizer.eos_token}two", "three"))
    for _ in range(2):
        letters, tokens = (
            TokenStream.from_corpus(corpus, tokenizer, tmp_path, parse_special=parse).tokens for parse in (False, True)
        )
        assert [np.count_nonzero(ids == tokenizer.eos_id) for ids in (letters, tokens)] == [2, 3]
    assert len(encodings) == 2
    for header in tmp_path.glob("*.json"):
        values = json.loads(header.read_text())
        assert (values["format"], values.pop("parse_special")) in [(3, False), (3, True)]
        header.write_text(json.dumps(values))
    for parse in (False, True):
        TokenStream.from_corpus(corpus, tokenizer, tmp_path, parse_special=parse)
    assert len(encodings) == 4


def test_nothing_in_the_cache_can_run_code(tokenizer, tmp_path):
    TokenStream.from_corpus(CORPUS, tokenizer, tmp_path)
    (array,) = tmp_path.glob("*.npy")
    (description,) = tmp_path.glob("*.json")
    loaded = np.load(array, allow_pickle=False)
    assert json.loads(description.read_text()) == {
        "format": 3,
        "corpus_sha256": CORPUS.sha256,
        "tokenizer_sha256": tokenizer.sha256,
        "parse_special": False,
        "dtype": "uint16",
        "num_tokens": len(loaded),
    }


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


def save_pickle(path):
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        ("npy", cut),
        ("npy", save_pickle),
        ("npy", lambda path: path.unlink()),
        ("npy", lambda path: path.write_bytes(b"")),
        ("npy", lambda path: path.write_bytes(b"no array at all")),
        ("npy", lambda path: np.save(path, np.load(path)[:-1])),
        ("npy", lambda path: np.save(path, np.load(path).astype(np.int64))),
        ("npy", lambda path: np.save(path, np.load(path)[:, None])),
        ("npy", lambda path: np.save(path, np.uint16(3))),
        ("json", cut),
        ("json", lambda path: path.unlink()),
        ("json", lambda path: path.write_text("[]")),
        ("json", lambda path: path.write_text(path.read_text().replace('"format": 3', '"format": 0'))),
    ],
)
def test_a_damaged_entry_is_written_anew(tokenizer, tmp_path, encodings, suffix, damage):
    expected = TokenStream.from_corpus(CORPUS, tokenizer, tmp_path).tokens.tolist()
    (path,) = tmp_path.glob(f"*.{suffix}")
    content = path.read_bytes()
    damage(path)
    assert TokenStream.from_corpus(CORPUS, tokenizer, tmp_path).tokens.tolist() == expected
    assert len(encodings) == 2
    assert path.read_bytes() == content


def test_a_cache_that_cannot_be_written(tokenizer, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write .*file/tokens-\w+\.npy'"):
        TokenStream.from_corpus(CORPUS, tokenizer, tmp_path / "file")
