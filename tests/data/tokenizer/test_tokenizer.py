import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import tokenizers
from harness.program import run
from hypothesis import given, strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from shardwise.core.errors import ConfigError, DataError, VocabularyError
from shardwise.data.tokenizer import END_OF_TEXT, PaddedTokenizer, Tokenizer, library

TEXTS = (
    "def encode(self, text):\n    if self.is_local:\n        return self.encode_batch([text])[0]\n    return None\n",
    "class Encoder:\n    def __init__(self, text):\n        self.text = text\n        self.is_local = text == 'x'\n",
    "Überraschend große Wörter, 123456 Zahlen und 中文字符.\r\n\tEin zweiter Absatz.\n\n\nEin dritter.",
)


@dataclass(frozen=True)
class Source:
    """What the tokenizer needs of a corpus."""

    documents: tuple[str, ...] = TEXTS
    sha256: str = "of the texts"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 350)


@given(text=st.text())
def test_any_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text(alphabet=" \t\r\n_.,()ab1é\u0301\u00a0\u2028\0", max_size=300))
def test_any_mix_of_blanks_and_signs_survives_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(texts=st.lists(st.text(max_size=20), max_size=5))
def test_a_batch_is_its_texts(tokenizer, texts):
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_training_needs_no_luck(tokenizer):
    # Another process, another number of threads and another hash seed.
    program = (
        "import sys; from shardwise.data.tokenizer import Tokenizer; "
        "print(Tokenizer.train(eval(sys.argv[1]), 350).sha256)"
    )
    found = run("-c", program, repr(TEXTS), TOKENIZERS_PARALLELISM="true", PYTHONHASHSEED="7")
    assert found.stdout.strip() == tokenizer.sha256


def test_vocabulary_has_the_size_asked_for_while_there_are_merges(tokenizer):
    assert tokenizer.vocab_size == 350
    assert Tokenizer.train(["aaaa"], 400).vocab_size < 400
    assert Tokenizer.train([], 257).vocab_size == 257


def test_special_tokens_come_first_and_the_first_ends_a_text():
    tokenizer = Tokenizer.train(TEXTS, 300, ["<end>", "<pad>"])
    assert (tokenizer.eos_token, tokenizer.eos_id) == ("<end>", 0)
    assert tokenizer.decode([1]) == "<pad>"


def test_text_cannot_forge_a_special_token(tokenizer):
    text = f"a{END_OF_TEXT}b"
    assert tokenizer.eos_id not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    parsed = tokenizer.encode(text, parse_special=True)
    assert parsed.count(tokenizer.eos_id) == 1
    assert tokenizer.decode(parsed) == text
    assert tokenizer.eos_id not in tokenizer.encode(text)


def test_the_end_of_a_line_is_one_token_with_the_next_indentation():
    tokenizer = Tokenizer.train(["    if x:\n        f(x)\n" * 20, "    if y:\n        g(y)\n" * 20], 400)
    tokens = [tokenizer.decode([token]) for token in tokenizer.encode("if x:\n        f(x)\n")]
    assert ":\n        " in tokens
    assert ")\n" in "".join(tokens[-1:])


def test_no_token_spans_an_endless_word():
    # Merges within one piece of unbounded length take time with its square.
    tokenizer = Tokenizer.train(["ab" * 20_000, "(" * 20_000, " " * 20_000, "\n" * 20_000], 600)
    longest = max(len(tokenizer.decode([token])) for token in range(tokenizer.vocab_size))
    assert 64 <= longest <= 3 * 64


@pytest.mark.parametrize("separator", ["\n", ""])
def test_long_texts_are_encoded_in_parts(tokenizer, monkeypatch, separator):
    monkeypatch.setattr(library, "MAX_PART_CHARS", 60)
    text = separator.join(["x = self.text" for _ in range(40)])
    largest = 0

    class Backend:
        def encode_batch_fast(self, texts, **options):
            nonlocal largest
            largest = max(largest, *map(len, texts))
            return tokenizer._backend.encode_batch_fast(texts, **options)

    spy = Tokenizer(tokenizers.Tokenizer.from_str(tokenizer._backend.to_str()))
    assert spy._encodes_locally
    assert spy._longest_name == len(END_OF_TEXT)
    spy._backend = Backend()
    done: list[int] = []
    ids = spy.encode_batch(["a", text, "", "b"], on_encoded=done.append)
    assert largest <= 60
    assert sum(done) == len(text) + 2
    assert len(done) > 2, "it is said within a text too"
    assert [tokenizer.decode(of_text) for of_text in ids] == ["a", text, "", "b"]
    assert ids[1] == tokenizer._backend.encode(text, add_special_tokens=False).ids


def test_texts_stay_whole_where_each_part_would_get_a_blank_in_front(monkeypatch):
    monkeypatch.setattr(library, "MAX_PART_CHARS", 5)
    backend = tokenizers.Tokenizer(models.BPE({"▁": 0, "x": 1, "</s>": 2}, []))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = Tokenizer(backend, "</s>")
    assert tokenizer.encode("x" * 12) == [0] + [1] * 12


def test_a_foreign_tokenizers_truncation_padding_and_added_tokens_are_off():
    backend = tokenizers.Tokenizer.from_str(Tokenizer.train(TEXTS, 300)._backend.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)]
    )
    assert len(Tokenizer(backend).encode("=+*")) == 3
    assert len(Tokenizer(backend).encode("=+*#")) == 4


def test_a_regular_expression_that_gives_up_is_an_error(tmp_path, capfd):
    """The library panics then, by an exception that is no ``Exception``, and prints lines, which are not shown."""
    many, pattern = "x" * 50, Regex("(x+x+)+y")
    backend = tokenizers.Tokenizer(models.BPE({"x": 0, "y": 1, "</s>": 2, many: 3}, []))
    backend.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    backend.decoder = decoders.Replace(pattern, "")
    tokenizer = Tokenizer(backend, "</s>")
    said = (
        r"cannot encode the text 'x{40}'\.\.\. of 50 characters: .*retry-limit-in-match over.*use the tokenizer\.json"
    )
    for encode in (
        tokenizer.encode,
        lambda text: tokenizer.encode(text, parse_special=True),
        lambda text: tokenizer.encode_batch(["xy", text, "y"]),
        tokenizer.encode_with_spans,
    ):
        with ThreadPoolExecutor(1) as thread, pytest.raises(DataError, match=said):
            thread.submit(encode, many).result()
        with pytest.raises(DataError, match=said):
            encode(many)
        with pytest.raises(DataError, match=r"cannot decode 1 token ids: .*retry-limit"):
            tokenizer.decode([3])
    assert tokenizer.encode("xxy") == [0, 0, 1]
    # The names of added tokens are normalized as they are read.
    backend.normalizer = normalizers.Replace(pattern, "")
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"added_tokens_decoder": {"4": {"content": many}}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"cannot be read from '.*tokenizer\.json': .*retry-limit"):
        Tokenizer.load(tmp_path)
    assert capfd.readouterr().err == ""


def test_what_others_print_while_the_tokenizer_works_is_shown(capfd):
    with library.panics_as_errors("encode"):
        os.write(2, b"a line\n")
    assert capfd.readouterr().err == "a line\n"


@pytest.mark.parametrize(
    ("single", "ids"), [("<s> $A", (0,)), ("<s> <s> $A </s>", (0, 0)), ("$A </s>", ()), ("$A", ())]
)
def test_what_a_file_puts_in_front_of_a_text(tmp_path, single, ids):
    backend = tokenizers.Tokenizer.from_str(Tokenizer.train(TEXTS, 300, ["<s>", "</s>"])._backend.to_str())
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path, "</s>")
    assert tokenizer.beginning == ids
    assert tokenizer.encode("some text")[0] not in (0, 1)
    assert Tokenizer.train(TEXTS, 300).beginning == ()


def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    for path in (folder, folder / "tokenizer.json", str(folder)):
        loaded = Tokenizer.load(path)
        assert loaded.sha256 == tokenizer.sha256
        assert loaded.encode(TEXTS[0] + END_OF_TEXT) == tokenizer.encode(TEXTS[0] + END_OF_TEXT)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    assert sorted(path.name for path in folder.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_sent_to_another_process_special_tokens_stay_text(tokenizer):
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode(END_OF_TEXT) == tokenizer.encode(END_OF_TEXT) != [copy.eos_id]


@pytest.mark.parametrize("eos_token", ["<two>", {"content": "<two>", "lstrip": False}])
def test_load_takes_the_end_token_from_the_config_beside_it(tmp_path, eos_token):
    Tokenizer.train(TEXTS, 300, ["</s>", "<two>"]).save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": eos_token}))
    assert Tokenizer.load(tmp_path).eos_token == "<two>"
    config.write_text("{}")
    assert Tokenizer.load(tmp_path).eos_token == "</s>"
    config.unlink()
    assert Tokenizer.load(tmp_path).eos_token == "</s>"
    assert Tokenizer.load(tmp_path, eos_token="<two>").eos_id == 1


def test_load_reports_what_is_wrong(tmp_path):
    with pytest.raises(DataError, match=r"no tokenizer at .*tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(
        DataError, match=r"tokenizer\.json' is not a tokenizer\.json of the Hugging Face format: .*; use another copy$"
    ):
        Tokenizer.load(tmp_path)
    Tokenizer.train(TEXTS, 300, ["<stop>"]).save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match="does not say which token ends a text"):
        Tokenizer.load(tmp_path)
    with pytest.raises(DataError, match="no end-of-text token '<no>'"):
        Tokenizer.load(tmp_path, eos_token="<no>")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"cannot read .*tokenizer_config\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("vocab_size", "special_tokens", "message"),
    [
        (256, [END_OF_TEXT], "vocab_size 256 is too small.* at least 257"),
        (257, ["a", "b"], "vocab_size 257 is too small.* at least 258"),
        (300, [], "must be non-empty strings"),
        (300, ["a", ""], "must be non-empty strings"),
        (300, "ab", "must be non-empty strings"),
        (300, ["a", "a"], "must differ"),
    ],
)
def test_impossible_vocabularies(tmp_path, vocab_size, special_tokens, message):
    with pytest.raises(ConfigError, match=message):
        Tokenizer.train(TEXTS, vocab_size, special_tokens)
    with pytest.raises(ConfigError, match=message):
        Tokenizer.train_cached(Source(), vocab_size, tmp_path, special_tokens)


def test_what_is_no_text_and_no_token(tokenizer):
    with pytest.raises(DataError, match="text 1 cannot be encoded: it has a lone surrogate"):
        tokenizer.encode_batch(["a", "\ud800"])
    for token in (350, -1):
        with pytest.raises(VocabularyError, match=f"token id {token} at position 1 is outside the vocabulary of 350"):
            tokenizer.decode([5, token])


def test_ids_within_a_character_decode_to_the_replacement(tokenizer):
    ids = Tokenizer.train([], 257).encode("é")
    assert len(ids) == 2
    assert Tokenizer.train([], 257).decode(ids[:1]) == "\ufffd"


@pytest.fixture
def trainings(monkeypatch):
    """The vocabulary sizes that were trained for."""
    sizes = []
    train = Tokenizer.train.__func__

    def spy(cls, texts, vocab_size, *rest):
        sizes.append(vocab_size)
        return train(cls, texts, vocab_size, *rest)

    monkeypatch.setattr(Tokenizer, "train", classmethod(spy))
    return sizes


def test_cache_trains_once_for_the_same_contents_and_settings(tmp_path, trainings):
    cache = tmp_path / "cache"
    first = Tokenizer.train_cached(Source(), 300, cache)
    again = Tokenizer.train_cached(Source(), 300, cache)
    assert trainings == [300]
    assert again.sha256 == first.sha256
    Tokenizer.train_cached(Source(), 301, cache)
    Tokenizer.train_cached(Source(sha256="of other texts"), 300, cache)
    ended = Tokenizer.train_cached(Source(), 300, cache, ["<end>"])
    assert trainings == [300, 301, 300, 300]
    assert ended.eos_token == "<end>"
    assert len(list(cache.iterdir())) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: b"\x80" + content,
        lambda content: b"[]",
        lambda content: content.replace(b"alphabet", b"alphabeta") if b"alphabet" in content else b"{}",
        # Still a tokenizer, but another one.
        lambda content: content.replace(b'\\"ignore_merges\\":false', b'\\"ignore_merges\\":true'),
    ],
)
def test_a_damaged_cache_entry_is_built_anew(tmp_path, trainings, damage):
    whole = Tokenizer.train_cached(Source(), 300, tmp_path)
    (entry,) = tmp_path.iterdir()
    content = entry.read_bytes()
    assert damage(content) != content
    entry.write_bytes(damage(content))
    assert Tokenizer.train_cached(Source(), 300, tmp_path).sha256 == whole.sha256
    assert trainings == [300, 300]
    assert entry.read_bytes() == content


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match=r"cannot write .*file/tokenizer-\w+\.json': .*; choose a folder"):
        Tokenizer.train_cached(Source(), 300, tmp_path / "file")


FORK = """
import os
from shardwise.data.tokenizer import Tokenizer
tokenizer = Tokenizer.train(["some text " * 20] * 50, 300)
expected = tokenizer.encode_batch(["some text"] * 50)
child = os.fork()
if child == 0:
    os._exit(0 if tokenizer.encode_batch(["some text"] * 50) == expected else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.environ["TOKENIZERS_PARALLELISM"])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_encodes_without_noise_or_hang():
    ended = run("-W", "ignore::DeprecationWarning", "-c", FORK, TOKENIZERS_PARALLELISM=None)
    assert (ended.stdout.strip(), ended.stderr) == ("0 false", "")


def test_threads_that_were_asked_for_are_used(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    Tokenizer.train([], 257)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


def test_the_pre_tokenizer_is_spelled_out_in_the_file(tokenizer, tmp_path):
    # Other programs must cut the text as training did.
    tokenizer.save(tmp_path)
    plain = tokenizers.Tokenizer.from_file(str(Path(tmp_path) / "tokenizer.json"))
    assert isinstance(plain.pre_tokenizer, pre_tokenizers.Sequence)
    for text in TEXTS:
        assert plain.encode(text).ids == tokenizer.encode(text)


def test_ids_that_only_a_padded_vocabulary_has_are_no_text(tmp_path):
    tokenizer = Tokenizer.train(TEXTS, 300)
    tokenizer.save(tmp_path)
    padded = PaddedTokenizer.load(tmp_path)
    ids = [int(token) for token in padded.encode("some text")]
    assert padded.decode([ids[0], 300, *ids[1:], 10**6]) == tokenizer.decode(ids) == "some text"
    # A negative id is in no vocabulary.
    with pytest.raises(VocabularyError, match="token id -1"):
        padded.decode([-1])
