"""From records to samples: what is left out is named and counted, and what belongs to another model is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness.parity import assert_close_to
from run.tiny_layouts import trainer_of, whole_weights

from shardwise.core.errors import CheckpointError, ConfigError, DataError, DesyncError
from shardwise.core.topology import Groups, Topology
from shardwise.data import Batch, DataLoader, Encoded, Example, ExampleEncoder, SampleRows, TokenSamples, example_of
from shardwise.data.json_records import Record
from shardwise.data.tokenizer import ChatTemplate, Tokenizer
from shardwise.run.processes.ranks import Ranks
from shardwise.run.settings import SampleSettings
from shardwise.run.tasks.samples import check_template, prepare_samples
from shardwise.run.tasks.task import end_of_epochs
from shardwise.run.tasks.task_data import share

TEMPLATE = (
    "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content ~ END }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def chat(number, answer="I am."):
    turns = ({"role": "user", "content": f"Who are you, {number}?"}, {"role": "assistant", "content": answer})
    return Example(f"'a.jsonl', line {number}", None, turns)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["Who are you? I am."], 270, ("</s>",))


def encoder_of(tokenizer, end, **options):
    return ExampleEncoder(tokenizer, ChatTemplate(TEMPLATE.replace("END", end), {"eos_token": "</s>"}), **options)


def prepared(examples, encoder, monkeypatch, cache, held_out=None, length=40, **settings):
    monkeypatch.setenv("SHARDWISE_CACHE", str(cache))
    settings = SampleSettings(**settings)
    return prepare_samples(
        "a.jsonl", examples, held_out, encoder, settings, sequence_length=length, held_out_fraction=0.1
    )


def test_what_is_left_out_is_named_and_counted(tokenizer, monkeypatch, tmp_path):
    encoder = encoder_of(tokenizer, "eos_token")
    examples = [chat(1), chat(2, " "), *(chat(number) for number in range(3, 9)), chat(9, "I am " * 30)]
    examples += [Example("'a.jsonl', line 10", None, ({"role": "user", "content": "Who?"},))] * 2
    for _ in range(2):
        # The second time from the cache.
        samples = prepared(examples, encoder, monkeypatch, tmp_path, held_out=[chat(1)])
        assert samples.notes == (
            "3 of 11 samples to train on left out: 2 since no turn of the assistant (first: 'a.jsonl', line 10); 1 "
            "since an empty turn of the assistant (first: 'a.jsonl', line 2)",
            "1 of 8 samples to train on cut, as they are longer than 41 tokens (--too-long, --model.sequence-length)",
        )
        (cached,) = [path for path in tmp_path.iterdir() if path.stat().st_size > 1000]
        content = cached.read_bytes()
    cached.write_bytes(content[:-1])
    assert len(prepared(examples, encoder, monkeypatch, tmp_path, held_out=[chat(1)]).train) == 8
    # Written again, with its tensors in whatever order.
    assert cached.stat().st_size == len(content)
    with pytest.raises(
        DataError, match=r"any of the 2 samples of a\.jsonl \(to train on\): 2 since no turn of the assis"
    ):
        prepared(examples[-2:], encoder, monkeypatch, tmp_path, held_out=[chat(1)])


def test_what_nobody_reads_is_named(tokenizer, monkeypatch, tmp_path):
    """A note names keys of records, and what the template does not show of messages."""
    records = [
        {
            "messages": [
                {"role": "developer", "content": f"Be brief, {number}."},
                *chat(number).completion[:1],
                {"role": "assistant", "content": "I am.", "thinking": "Am I?", "reasoning": "Am I?"},
            ],
            "tools": [{"name": "look"}],
            "system_prompt": "Be.",
        }
        for number in range(4)
    ]
    examples = [example_of(Record(f"line {number}", each), "text") for number, each in enumerate(records)]
    hiding = TEMPLATE.replace("{{ '<|'", "{{ '' if m.role == 'developer' else '<|'")
    encoder = ExampleEncoder(tokenizer, ChatTemplate(hiding.replace("END", "eos_token"), {"eos_token": "</s>"}))
    notes = prepared(examples, encoder, monkeypatch, tmp_path, length=80).notes
    assert notes == (
        "keys of the records that are not read: system_prompt (first: line 0)",
        "the chat template does not show 'tools' (first: line 0)",
        "the chat template does not show 'content' of developer messages (first: line 0)",
        "the chat template does not show 'reasoning' of assistant messages (first: line 0)",
        "the chat template does not show 'thinking' of assistant messages (first: line 0)",
    )
    showing = TEMPLATE.replace("m.content", "m.content ~ m.reasoning_content ~ (tools or '')")
    encoder = ExampleEncoder(tokenizer, ChatTemplate(showing.replace("END", "eos_token"), {"eos_token": "</s>"}))
    examples += [chat(9), Example("README.md", None, "# Chats")]
    assert prepared(examples, encoder, monkeypatch, tmp_path, length=200).notes == (
        "keys of the records that are not read: system_prompt (first: line 0)",
        "1 of 6 records are texts, all of which is learned (first: README.md)",
    )


def test_labels_that_may_say_what_people_do_not_want_are_named(tokenizer, monkeypatch, tmp_path):
    encoder = encoder_of(tokenizer, "eos_token")
    for labels, expected in (((1, 0, 0.0), ["'label' is 0 in 2 of 3 records,"]), ((1, 1, 1), []), ((0, 1, 2), [])):
        values = [{"prompt": f"{place} is", "completion": " so", "label": label} for place, label in enumerate(labels)]
        examples = [example_of(Record(f"line {place}", each), "text") for place, each in enumerate(values)]
        notes = prepared(examples, encoder, monkeypatch, tmp_path).notes
        assert [note[: len("'label' is 0 in 2 of 3 records,")] for note in notes if "label" in note] == expected


def test_rows_of_a_multiple_of_places(tokenizer):
    encoder = encoder_of(tokenizer, "eos_token")
    encoded = [encoder.encode(chat(number, "I am" + " I" * number + ".")) for number in range(9)]
    samples = TokenSamples.of("a.jsonl", encoded, tokenizer.eos_id)
    rows, padded = (SampleRows(samples, 40, packing=False, multiple_of=number) for number in (1, 8))
    assert {rows.width(slice(number, number + 1)) % 8 for number in range(9)} != {0}
    for number in range(9):
        width = padded.width(slice(number, number + 1))
        assert 0 <= width - rows.width(slice(number, number + 1)) < 8
        assert width % 8 == 0
        row = padded.row(number, width)
        tokens, labels = row["tokens"], row["labels"]
        assert (labels != -100).sum() == padded.labels[number]
        assert len(tokens) == width
    with pytest.raises(ConfigError, match="sequence_length 40 must be a multiple of 16"):
        SampleRows(samples, 40, multiple_of=16)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("micro_batch_size", [2, 1])
def test_the_loss_is_a_mean_over_the_labels_of_all_ranks(group, tmp_path, micro_batch_size):
    """Ranks have different numbers of labels, and what each learns counts alike."""
    rows = [(list(range(3, 9)), 5), ([7, 2, 4, 9], 1), (list(range(20, 29)), 8), ([1, 5, 3], 1)]
    encoded = [
        Encoded(np.array(ids), np.arange(len(ids)) >= len(ids) - count, np.ones(len(ids), np.int64))
        for ids, count in rows
    ]
    samples = TokenSamples.of("a.jsonl", encoded, 0)
    loader = DataLoader(SampleRows(samples, 11, packing=False), 4, seed=3)
    own = [int((batch.labels != -100).sum()) for batch in loader.batch(0, group.rank(), 2, 2)]
    counts = [None, None]
    torch.distributed.all_gather_object(counts, own, group=group)
    assert counts[0] != counts[1]
    options = {"dtype": "float64", "global_batch_size": 4, "micro_batch_size": micro_batch_size}
    groups = Groups.of(Topology.create(tp=1))
    apart, whole = trainer_of(tmp_path, groups=groups, **options), trainer_of(tmp_path, **options)
    for step in range(3):
        found, expected = (trainer.train_step(step, loader) for trainer in (apart, whole))
        assert found.loss == pytest.approx(expected.loss, rel=1e-12)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-12)
    # Places after the last sample weigh nothing, also if a rank has no others.
    loader.end = 13
    (batch,) = loader.batch(3)
    alone, num_labels = Batch(batch.tokens[:1], batch.labels[:1]), loader.num_labels(3)
    found, expected = apart.train_step(3, loader), whole.step(3, [alone], num_labels)
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-12)
    weights = whole_weights(whole)
    for name, weight in whole_weights(apart).items():
        assert_close_to(weight, weights[name], rtol_of_norm=1e-10, name=name)


def test_a_resumed_run_keeps_the_rule_of_its_last_step():
    """An exact number of samples, or, if the run began without one, samples of the next epoch to fill the step."""
    filled = "as the run began, its last step is filled with {} samples of the next epoch"
    for exact, begun, expected in (
        (5.0, None, (5, 2, "")),
        (8.4, None, (8, 2, "")),
        (0.2, None, (1, 1, "")),
        (5.0, (1, {"num_samples": 5}), (5, 2, "")),
        (5.0, (0, {"num_samples": 3}), (5, 2, "")),
        (5.0, (1, {"num_samples": 3}), (5, 2, "1 sample left out where the run ended before")),
        (5.0, (1, {}), (None, 2, filled.format(3))),
        (8.4, (1, {"num_samples": None}), (None, 3, filled.format(4))),
        (8.0, (1, {}), (None, 2, "")),
    ):
        assert end_of_epochs(exact, 4, begun) == expected, (exact, begun)
    with pytest.raises(CheckpointError, match='num_samples of the checkpoint is "x"; it must be a count, or null'):
        end_of_epochs(5.0, 4, (1, {"num_samples": "x"}))


def test_a_share_is_held_out_whole_and_equal_ones_together(tokenizer, monkeypatch, tmp_path):
    encoder = encoder_of(tokenizer, "eos_token")
    examples = [chat(number % 7) for number in range(70)]
    for order in (examples, examples[::-1]):
        samples = prepared(order, encoder, monkeypatch, tmp_path)
        texts = [
            {tokenizer.decode(dataset.row(index)["tokens"]) for index in range(len(dataset))}
            for dataset in (samples.train, samples.held_out.rows)
        ]
        assert [len(each) for each in texts] == [6, 1]
        assert not texts[0] & texts[1]
    with pytest.raises(DataError, match=r"2 samples, all equal, cannot be divided .* \(--held-out\)"):
        prepared([chat(1)] * 2, encoder, monkeypatch, tmp_path)
    with pytest.raises(DataError, match=r"^1 sample cannot be divided"):
        prepared([chat(1)], encoder, monkeypatch, tmp_path)


def test_held_out_samples_that_are_learned_are_counted(tokenizer, monkeypatch, tmp_path):
    encoder, examples = encoder_of(tokenizer, "eos_token"), [chat(number) for number in range(8)]
    assert prepared(examples, encoder, monkeypatch, tmp_path).overlap == ()
    data = prepared(examples, encoder, monkeypatch, tmp_path, held_out=[chat(1), chat(9), chat(1)])
    assert data.overlap[0].startswith("2 of 3 held-out samples are also among those to train on")


def test_a_template_or_tokenizer_of_another_model(tokenizer):
    with pytest.raises(
        DataError, match=r"ends what the assistant says with '<\|im_end\|>', which the tokenizer has no token for"
    ):
        check_template(encoder_of(tokenizer, "'<|im_end|>'"), [chat(1)])
    # Some models read the names of roles as letters, and a token all the same where a turn ends.
    assert check_template(encoder_of(tokenizer, "eos_token"), [chat(1)]) == []
    # The last answer ends with the end of a text, and one that a question follows with nothing.
    assert check_template(encoder_of(tokenizer, "'.'"), [chat(1)]) == []
    asked = replace(chat(1), completion=(*chat(1).completion, chat(2).completion[0]))
    (note,) = check_template(encoder_of(tokenizer, "'.'"), [asked])
    assert "no special token ends the assistant's turns" in note
    with pytest.raises(DataError, match="does not show the messages: its text does not depend on them"):
        check_template(ExampleEncoder(tokenizer, ChatTemplate("Hello.</s>"), mask_prompts=False), [chat(1), chat(2)])
    assert check_template(encoder_of(tokenizer, "'.'"), [Example("x", None, "a text")]) == []


def test_identity_is_of_the_examples_not_of_their_places(tokenizer, monkeypatch, tmp_path):
    encoder = encoder_of(tokenizer, "eos_token")
    examples = [chat(number) for number in range(9)]
    moved = [Example("elsewhere", each.prompt, each.completion) for each in examples]
    digests = {
        prepared(each, encoder, monkeypatch, tmp_path).sha256
        for each in (examples, moved, examples[:-1], examples[::-1])
    }
    assert len(digests) == 3
    assert json.dumps(prepared(examples, encoder, monkeypatch, tmp_path).identity)


@pytest.mark.ranks(2)
def test_hosts_with_other_data_to_measure_on_are_refused(group):
    """The first rank of each host reads; here each rank is a host."""
    tokenizer = SimpleNamespace(sha256="same")
    measured = f"of host {group.rank()}"
    data = SimpleNamespace(sha256="same", held_out_sha256=measured, tokenizer=tokenizer, notes=(), overlap=())
    with pytest.raises(DesyncError, match="the held-out text"):
        share(lambda: data, Ranks(group.rank(), 0, 2, torch.device("cpu")))
