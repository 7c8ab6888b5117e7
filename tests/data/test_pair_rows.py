"""Records to pairs of samples: what is a preference, what is left out, and what a cut leaves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwise.core.errors import ConfigError, DataError
from shardwise.data import PairRows, PreferenceEncoder, TokenSamples, UnusableExampleError, preference_of
from shardwise.data.encoding import Encoded
from shardwise.data.json_records import Record
from shardwise.data.tokenizer import ChatTemplate, Tokenizer
from shardwise.data.tokens import IGNORE_INDEX
from shardwise.run.settings import SampleSettings
from shardwise.run.tasks.preference import prepare_pairs

TEMPLATE = (
    "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content ~ '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def preference(**record):
    return preference_of(Record("here", record))


@pytest.fixture(scope="module")
def encoder():
    tokenizer = Tokenizer.train(["Who are you? I am."], 270, ("</s>",))
    return PreferenceEncoder(tokenizer, ChatTemplate(TEMPLATE))


def test_every_form_is_the_same_preference(encoder):
    explicit = preference(prompt=[user("Who?")], chosen=[assistant("I.")], rejected=[assistant("You, you.")])
    both = {"chosen": [user("Who?"), assistant("I.")], "rejected": [user("Who?"), assistant("You, you.")]}
    assert preference(**both) == preference(**both, prompt="Who?") == explicit
    assert replace(explicit, rejected=(assistant("You."),)).sha256 != explicit.sha256
    share_gpt = {
        name: [{"from": {"user": "human"}.get(each["role"], "gpt"), "value": each["content"]} for each in turns]
        for name, turns in both.items()
    }
    assert preference(**share_gpt) == explicit
    assert preference(**both, system="Brief.").prompt[0] == {"role": "system", "content": "Brief."}
    texts = preference(prompt="Who are", chosen=" you?", rejected=" we all?")
    assert preference(chosen="Who are you?", rejected="Who are we all?") == texts
    assert preference(chosen="Who?", rejected="Who? Me?") == preference(prompt="Who", chosen="?", rejected="? Me?")
    for example, prompt in ((explicit, "<|user|>Who?</s><|assistant|>"), (texts, "Who are")):
        encoded = encoder.encode_all(example)
        assert [encoder.tokenizer.decode(each.ids[~each.learned].tolist()) for each in encoded] == [prompt] * 2
    # One answer goes on where the other ends.
    longer = preference(chosen=both["chosen"], rejected=[*both["chosen"], user("?"), assistant("!")])
    assert (longer.prompt, len(longer.rejected)) == ((user("Who?"),), 3)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, r"here: no preference: it needs .* \(its keys: 'prompt', 'chosen'\)"),
        ({"text": "a"}, "no preference"),
        ("a", "it is no object"),
        ({"chosen": "a", "rejected": ["b"]}, "'chosen' is not a list of messages but a string"),
        ({"prompt": [user("a")], "chosen": "b", "rejected": "c"}, "are strings, and 'prompt' is not"),
        ({"prompt": 3, "chosen": [assistant("b")], "rejected": [assistant("c")]}, "neither a string nor a list"),
        (
            {"prompt": "a", "chosen": [user("b"), assistant("c")], "rejected": [user("b"), assistant("d")]},
            "'prompt' is a text that none of the messages says",
        ),
        ({"chosen": [], "rejected": [assistant("b")]}, "'chosen' has no message"),
        ({"chosen": None, "rejected": None}, "'chosen' is not a list of messages but null"),
        ({"prompt": "a", "chosen": "\ud800", "rejected": "b"}, "lone surrogate"),
    ],
)
def test_what_is_no_preference(record, message):
    with pytest.raises(DataError, match=message):
        preference_of(Record("here", record))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "Who", "chosen": " I", "rejected": " I"}, "chosen and rejected are equal"),
        ({"prompt": "Who", "chosen": " I</s>", "rejected": " I"}, "chosen and rejected are equal"),
        ({"prompt": "Who", "chosen": " I", "rejected": " "}, "an empty answer"),
        ({"prompt": "Who", "chosen": "", "rejected": " I"}, "an empty answer"),
        ({"chosen": "I", "rejected": "You"}, "no prompt that both answers begin with"),
        ({"chosen": [assistant("a")], "rejected": [assistant("b")]}, "no prompt that both answers begin with"),
        (
            {"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("")]},
            "an empty turn of the assistant",
        ),
        (
            {"prompt": [user("a")], "chosen": [user("b"), assistant("c")], "rejected": [assistant("c")]},
            "an answer that does not begin with the assistant",
        ),
    ],
)
def test_what_is_left_out(encoder, record, reason):
    with pytest.raises(UnusableExampleError, match=reason):
        encoder.encode_all(preference_of(Record("here", record)))


def test_a_prompt_that_is_no_prefix(encoder):
    """A template that tells of the answer in front of the prompt leaves nothing to compare the answers with."""
    counting = PreferenceEncoder(encoder.tokenizer, ChatTemplate("{{ messages | length }}" + TEMPLATE))
    longer = [assistant("You."), user("Who?"), assistant("You.")]
    pair = preference(prompt=[user("Who?")], chosen=[assistant("I.")], rejected=longer)
    with pytest.raises(UnusableExampleError, match="renders the prompt of each answer otherwise"):
        counting.encode_all(pair)
    # As Phi-3's, which ends every text without a generation prompt.
    ending = ChatTemplate(TEMPLATE + "{{ '</s>' if not add_generation_prompt }}")
    pair = preference(prompt=[user("Who?")], chosen=[assistant("I.")], rejected=[assistant("You.")])
    chosen, _ = PreferenceEncoder(encoder.tokenizer, ending).encode_all(pair)
    assert encoder.tokenizer.decode(chosen.ids[chosen.learned]).startswith("I.")
    merged = Tokenizer.train(["undone " * 50], 300, ("</s>",))
    assert len(merged.encode("undone")) == 1
    with pytest.raises(UnusableExampleError, match="no token of the prompt stays one"):
        PreferenceEncoder(merged, None).encode_all(preference(prompt="un", chosen="done", rejected="told"))


def dataset_of(prompt, chosen, rejected, length, beginning=(), **options):
    """A pair whose tokens are numbered: the prompt's from 0, the answers' from 100 and 200."""
    ids = [np.r_[np.arange(prompt), np.arange(start, start + size)] for start, size in ((100, chosen), (200, rejected))]
    encoded = [Encoded(each, np.arange(len(each)) >= prompt, np.ones(len(each), np.int64)) for each in ids]
    return PairRows(TokenSamples.of("made", encoded, 9), length, beginning=beginning, **options)


def rows_of(dataset):
    row = dataset.row(0, dataset.width(slice(None)))
    tokens, labels, reference = row["tokens"], row["labels"], row["reference"]
    assert np.isnan(reference).all()
    assert tokens.shape == labels.shape
    return tokens.tolist(), [row[row != IGNORE_INDEX].tolist() for row in labels]


def test_rows_and_cuts():
    # All of it fits.
    dataset = dataset_of(3, 2, 4, 6)
    tokens, answers = rows_of(dataset)
    assert tokens == [[0, 1, 2, 100, 9, 9], [0, 1, 2, 200, 201, 202]]
    assert answers == [[100, 101], [200, 201, 202, 203]]
    assert (dataset.num_too_long, dataset.lengths.tolist(), dataset.labels.tolist()) == (0, [10], [1])
    assert (dataset.computed(np.array([0])).tolist(), dataset.num_learned(np.array([0]))) == ([6, 6], 2 + 4)
    # The prompt loses its left end, alike in both rows.
    tokens, answers = rows_of(dataset_of(5, 2, 3, 6))
    assert tokens == [[1, 2, 3, 4, 100, 9], [1, 2, 3, 4, 200, 201]]
    assert answers == [[100, 101], [200, 201, 202]]
    # Half of the row is left to it, and the answers lose their right ends; its beginning stays.
    dataset = dataset_of(5, 9, 3, 6, beginning=(0,))
    tokens, answers = rows_of(dataset)
    assert tokens == [[0, 3, 4, 100, 101, 102], [0, 3, 4, 200, 201, 9]]
    assert answers == [[100, 101, 102, 103], [200, 201, 202]]
    assert dataset.num_too_long == 1
    # A beginning that would fill what is left to the prompt goes, too.
    assert rows_of(dataset_of(5, 4, 4, 2, beginning=(0,)))[0] == [[4, 100], [4, 200]]
    # Without a prompt, the first token of an answer is no label.
    assert rows_of(dataset_of(0, 3, 2, 4))[1] == [[101, 102], [201]]
    # A prompt that is shorter than that leaves more.
    assert rows_of(dataset_of(1, 9, 9, 6))[1] == [list(range(100, 106)), list(range(200, 206))]
    with pytest.raises(DataError, match=r"1 of 1 pairs are longer than sequence_length 6 \+ 1 tokens, and are dropped"):
        dataset_of(5, 2, 3, 6, too_long="drop")
    with pytest.raises(ConfigError, match="at least 2 for pairs"):
        dataset_of(5, 2, 3, 1)


def test_widths_and_digests_of_pairs():
    def made(*lengths, start=2):
        encoded = [Encoded(np.arange(size), np.arange(size) >= start, np.ones(size, np.int64)) for size in lengths]
        return PairRows(TokenSamples.of("made", encoded, 9), 12, shortest=6)

    pairs = made(3, 10, 6, 6, 4, 4)
    assert [pairs.width(np.array([index])) for index in range(3)] == [9, 6, 6]
    # By the longer sample of each.
    assert [part.tolist() for part in pairs.by_width(3)] == [[2], [1], [0]]
    assert made(5, 5).sha256 == made(5, 5).sha256 != made(5, 5, start=3).sha256


def test_everything_is_counted(encoder, monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    pairs = [preference(prompt="Who are", chosen=f" you {number}?", rejected=" we?") for number in range(6)]
    pairs += [preference(prompt="Who are", chosen=" you" * 30, rejected=" you" * 31)] * 2
    pairs += [preference(prompt="Who are" * 20, chosen=" you", rejected=" we")]
    pairs += [preference(prompt="Who", chosen=" I", rejected=each) for each in (" I", "")]
    options = {"sequence_length": 24, "held_out_fraction": 0.1}
    for _ in range(2):
        # The second time from the cache.
        made = prepare_pairs("a.jsonl", pairs, pairs[:1], encoder, SampleSettings(), **options)
        assert made.notes == (
            "2 of 11 samples to train on left out: 1 since chosen and rejected are equal (first: here); 1 since an "
            "empty answer (first: here)",
            "3 of 9 pairs to train on cut, as they are longer than 25 tokens (--too-long, --model.sequence-length)",
            "2 pairs to train on left out since the cut leaves no difference",
        )
        assert (len(made.train), len(made.held_out), made.name) == (7, 1, "a.jsonl, 11 pairs")
    dropped = prepare_pairs("a.jsonl", pairs, pairs[:1], encoder, SampleSettings(too_long="drop"), **options)
    assert len(dropped.train) == 6
    assert made.identity != dropped.identity
    with pytest.raises(DataError, match=r"any of the 2 samples of a\.jsonl \(to train on\): 1 since chosen"):
        prepare_pairs("a.jsonl", pairs[-2:], pairs[:1], encoder, SampleSettings(), **options)
    merged = PreferenceEncoder(Tokenizer.train(["Who are you? undone " * 9], 290, ("</s>",)), None)
    split = [preference(prompt="Who un", chosen="done", rejected="told"), *pairs[:3]]
    notes = prepare_pairs("a.jsonl", split, pairs[:1], merged, SampleSettings(), **options).notes
    assert any(note.startswith("the last tokens of a prompt are others once an answer follows") for note in notes)
