"""What lm-evaluation-harness finds of a model is what its own ``hf`` model finds of the same folder, at any tp."""

from __future__ import annotations

import json
import types
import warnings

import pytest
import torch
from run.run_processes import run_command
from storage.adapters.tiny_models import save_model

from shardwise.core.errors import ConfigError, DataError, DesyncError
from shardwise.core.topology import Groups
from shardwise.data.tokenizer import ChatTemplate, Tokenizer
from shardwise.models.transformer.rotary import RotaryEmbedding, RotaryScaling
from shardwise.run.commands import harness_tasks
from shardwise.run.lm_harness import ShardwiseLM
from shardwise.storage.huggingface import load_pretrained

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WINDOW = 24
TEXT = "What is 1 + 1? 2. And 2 + 2? 4. Snow is white, grass is green; the sky? "
PAIRS = [
    ("What is 1 + 1?", " 2."),
    ("What is 1 + 1? ", "4."),
    ("What is 1 + 1?", " 4"),
    ("", "Snow is white"),
    (TEXT, " blue"),
    ("And 2 + 2?", " the sky, grass, snow"),
]
PROMPTS = [
    ("What is", {"until": ["\n\n"], "max_gen_toks": 7}),
    (TEXT, {"until": ["1", "?"], "max_gen_toks": 9}),
    ("What is 1", {"until": [], "max_gen_toks": 5}),
]
CHAT = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "It is "}]

LOCAL = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
"""
CHOICES = """output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
"""
WRITTEN = """output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 4
metric_list:
  - metric: exact_match
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness")
    save_model("llama", folder / "model", vocab_size=301, seed=5, dtype=torch.float32, max_position_embeddings=WINDOW)
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    Tokenizer.train([TEXT * 9], 290, names).save(folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    questions = [{"question": f"{n} + {n}?", "choices": [f" {2 * n}", f" {3 * n}"], "answer": 0} for n in range(1, 8)]
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions))
    (folder / "tasks").mkdir()
    for name, rest in (("sums", CHOICES), ("sums_written", WRITTEN)):
        (folder / "tasks" / f"{name}.yaml").write_text(LOCAL.format(name=name, data=data) + rest)
    return folder


@pytest.fixture(scope="module")
def theirs(folder):
    """The harness's own model, and its answers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lm_eval.models.huggingface import HFLM

        model = HFLM(str(folder / "model"), device="cpu", dtype="float32", batch_size=2, max_length=WINDOW)
        return {
            "pairs": model.loglikelihood(requests(PAIRS), disable_tqdm=True),
            "rolling": model.loglikelihood_rolling(requests([(TEXT,), ("Snow",)]), disable_tqdm=True),
            "texts": model.generate_until(requests(PROMPTS), disable_tqdm=True),
            "open": model.apply_chat_template(CHAT, add_generation_prompt=False),
            "asked": model.apply_chat_template(CHAT),
        }


def requests(arguments):
    return [types.SimpleNamespace(args=each) for each in arguments]


def load(folder, group, **options):
    model = load_pretrained(folder / "model", groups=Groups(tp=group), device="cpu")
    tokenizer, template = Tokenizer.load(folder / "model"), ChatTemplate.load(folder / "model")
    return ShardwiseLM(model, tokenizer, template=template, **options)


@pytest.mark.ranks(1, 2, 3, slow=(1, 3))
def test_answers_are_those_of_the_hf_model(group, folder, theirs):
    from lm_eval.api.model import LM

    lm = load(folder, group, batch_size=2)
    assert isinstance(lm, LM)
    for (log_prob, greedy), (expected, likeliest) in zip(
        lm.loglikelihood(requests(PAIRS)), theirs["pairs"], strict=True
    ):
        assert log_prob == pytest.approx(expected, abs=1e-5)
        assert greedy == likeliest
    assert lm.loglikelihood_rolling(requests([(TEXT,), ("Snow",)])) == pytest.approx(theirs["rolling"], abs=1e-4)
    assert lm.generate_until(requests(PROMPTS)) == theirs["texts"]
    # What the model writes itself is the likeliest.
    written = lm.generate_until(requests([("What is", {"max_gen_toks": 4})]))[0]
    assert lm.loglikelihood(requests([("What is", written)]))[0][1]
    assert lm.apply_chat_template(CHAT, add_generation_prompt=False) == theirs["open"]
    assert lm.apply_chat_template(CHAT) == theirs["asked"]


@pytest.mark.ranks(1)
def test_likelihoods_do_not_depend_on_the_batch(group, folder):
    """Of a model that rotates tokens otherwise in a text of over 12."""
    lm = load(folder, group, batch_size=8)
    scaling = RotaryScaling("longrope", 2.0, 12, short_factor=(1.0, 1.0, 1.0), long_factor=(2.0, 3.0, 4.0))
    lm.model.rotary = RotaryEmbedding(6, rope_scaling=scaling)
    assert {len(lm.tok_encode("".join(pair))) > 13 for pair in PAIRS} == {False, True}
    together = lm.loglikelihood(requests(PAIRS))
    alone = [lm.loglikelihood(requests([pair]))[0] for pair in PAIRS]
    assert [log_prob for log_prob, _ in together] == pytest.approx([log_prob for log_prob, _ in alone], rel=1e-5)


@pytest.mark.ranks(2)
def test_what_cannot_be_asked(group, folder):
    lm = load(folder, group)
    with pytest.raises(ConfigError, match="num_beams"):
        lm.generate_until(requests([("a", {"num_beams": 3})]))
    with pytest.raises(ConfigError, match=f"256 new tokens; the model reads {WINDOW}"):
        lm.generate_until(requests([("a", {})]))
    with pytest.raises(DataError, match=f"the model reads {WINDOW} at once"):
        lm.loglikelihood(requests([("a", TEXT * 3)]))
    with pytest.raises(DesyncError, match="what to evaluate"):
        lm.loglikelihood(requests(PAIRS[: 1 + group.rank()]))


def test_an_output_that_cannot_be_written_is_refused_before_the_evaluation(folder, monkeypatch):
    monkeypatch.setattr(harness_tasks, "open_causal", None)
    (folder / "a file").write_text("")
    for output, reason in ((folder, "it is a folder"), (folder / "a file" / "report.json", "a file is a file")):
        with pytest.raises(ConfigError, match=f"cannot write to .*: .*{reason}; choose another --output"):
            harness_tasks.evaluate_tasks(folder / "model", "sums", output=output, device="cpu")


def test_a_report_follows_a_link(tmp_path):
    (tmp_path / "link").symlink_to("report.json")
    harness_tasks._write(tmp_path / "link", {"results": {}})
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "report.json").read_text()) == {"results": {}}


def measured(folder, num_ranks):
    output = folder / "report.json"
    run_command(
        *(folder, num_ranks, "eval", folder / "model", "--task-path", folder / "tasks", "--device", "cpu"),
        *("--tasks", "sums", "sums_written", "--output", output, "--tp", num_ranks),
        HF_HOME=folder / "hf",
        HF_HUB_OFFLINE=1,
        HF_DATASETS_OFFLINE=1,
    )
    report = json.loads(output.read_text())
    return report["results"], {
        task: [(sample["doc_id"], sample["filtered_resps"]) for sample in report["samples"][task]]
        for task in report["samples"]
    }


@pytest.mark.slow
def test_tasks_of_ones_own_on_one_rank_and_on_two(folder):
    results, samples = measured(folder, 1)
    assert results["sums"]["sample_len"] == 7
    assert 0 <= results["sums"]["acc,none"] <= 1
    again, others = measured(folder, 2)
    assert again["sums"] == results["sums"]
    assert others["sums_written"] == samples["sums_written"]
