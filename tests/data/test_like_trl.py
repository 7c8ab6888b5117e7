"""Chats, prompts and texts become, token for token, what trl's SFTTrainer makes of them, and the same is learned."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from harness.program import run

from shardwise.core.errors import DataError
from shardwise.data import ExampleEncoder, example_of, read_records
from shardwise.data.json_records import Record
from shardwise.data.tokenizer import ChatTemplate, Tokenizer

HERE = Path(__file__).parent
NAMES = ("chatml", "llama3", "mistral", "gemma", "qwen")
SPECIAL = (
    *("<|end|>", "<s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "<think>", "</think>"),
)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text} | more


CHATS = [
    [user("What is 2 + 2?"), assistant("4.")],
    [user("  What is\n\nthis? "), assistant("\n\n an émigré \N{GRINNING FACE}  "), user("Sure?"), assistant("Yes")],
    # The same words more than once, and a text that looks like a turn's end.
    [user("Yes"), assistant("Yes"), user("Yes"), assistant("Yes"), user("No."), assistant("Yes\n")],
    [user("Again"), assistant("Again")] * 4,
    [user("It ends with a question"), assistant("so?"), user("so it does")],
]
SYSTEM = [{"role": "system", "content": "Be brief."}, *CHATS[1]]
CALL = [
    user("Weather?"),
    assistant(None, tool_calls=[{"type": "function", "function": {"name": "look", "arguments": {"at": "<sky>"}}}]),
    {"role": "tool", "content": '{"sky": "blue"}'},
    assistant("Blue."),
    user("Sure?"),
    assistant("Yes."),
    user("Sure?"),
    assistant("Yes."),
    user("And now?"),
    assistant("Dark.", reasoning_content="It is late."),
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"at": {"type": "string"}}}}]


def template_of(name: str) -> str:
    return (HERE / "chat_templates" / f"{name}.jinja").read_text()


def without_marks(template: str) -> str:
    """The same template without generation marks, its blanks treated as before."""
    return template.replace(" generation %}", " if true %}").replace(" endgeneration %}", " endif %}")


def records_of(name: str) -> list[dict]:
    chats = [*CHATS, *([] if name == "gemma" else [SYSTEM])]
    # datasets takes the names of columns from the first record.
    records = [{"messages": chat, "tools": None} for chat in chats]
    return [*records, {"messages": CALL, "tools": json.dumps(TOOLS)}] if name == "qwen" else records


def divided(chats: list) -> list[dict]:
    return [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in chats if chat[-1]["role"] == "assistant"]


TEXTS = [
    {"prompt": "2 + 2 =", "completion": " 4"},
    {"prompt": "", "completion": "all\n"},
    {"prompt": "un", "completion": "done<|end|>"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    for name, beginning in (("plain", None), ("beginning", "<s>")):
        tokenizer = Tokenizer.train([(HERE.parent / "data" / "test_like_trl.py").read_text()], 500, SPECIAL)
        tokenizer.save(folder / name)
        path = folder / name / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": "<s>"}))
        if beginning is not None:
            # As Llama's: what is put in front of every text, but not of what a template wrote.
            path = folder / name / "tokenizer.json"
            values = json.loads(path.read_text())
            token = {"SpecialToken": {"id": beginning, "type_id": 0}}
            values["post_processor"] = {
                "type": "TemplateProcessing",
                "single": [token, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [token, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {beginning: {"id": beginning, "ids": [1], "tokens": [beginning]}},
            }
            path.write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def cases(folder):
    """Cases for trl, written as its program reads them."""
    cases = [{"name": name, "records": records_of(name), "assistant_only": True} for name in NAMES] + [
        {"name": name, "records": divided(CHATS), "assistant_only": False} for name in NAMES
    ]
    cases += [{"name": None, "records": TEXTS, "assistant_only": False}]
    cases += [{"name": None, "records": [{"text": "one text"}, {"text": "two<|end|>"}], "assistant_only": False}]
    cases = [case | {"tokenizer": str(folder / kind)} for kind in ("plain", "beginning") for case in cases]
    given = [case | {"template": None if case["name"] is None else template_of(case["name"])} for case in cases]
    (folder / "cases.json").write_text(json.dumps(given))
    return cases


@pytest.fixture(scope="module")
def oracle(folder, cases):
    """Cases, and trl's samples of each."""
    run(sys.executable, HERE / "trl_samples.py", folder)
    return list(zip(cases, json.loads((folder / "samples.json").read_text()), strict=True))


@pytest.mark.matrix
@pytest.mark.slow
def test_samples_are_those_of_trl(oracle):
    compared = 0
    for case, samples in oracle:
        tokenizer = Tokenizer.load(case["tokenizer"])
        sources = (
            [None] if case["name"] is None else [template_of(case["name"]), without_marks(template_of(case["name"]))]
        )
        for source in sources:
            template = None if source is None else ChatTemplate(source, {"bos_token": "<s>", "eos_token": "<|end|>"})
            encoder = ExampleEncoder(tokenizer, template)
            for record, sample in zip(case["records"], samples, strict=True):
                encoded = encoder.encode(example_of(Record("here", record), "text"))
                assert encoded.ids.tolist() == sample["input_ids"], record
                expected = np.where(encoded.learned, encoded.ids, -100).tolist()
                assert expected == sample["labels"], (record, tokenizer.decode(encoded.ids[encoded.learned]))
                compared += 1
    assert compared > 100


@pytest.mark.slow
def test_folders_of_datasets_are_read(folder, cases):
    run(sys.executable, HERE / "trl_samples.py", folder, "--dataset-only")
    _, records = read_records(folder / "saved" / "train")
    given = [example_of(Record("here", record), "text").completion for record in cases[0]["records"]]
    assert [example_of(record, "text").completion for record in records] == given
    with pytest.raises(DataError, match=r"holds the splits of a dataset; name one of them, such as '.*saved/train'"):
        read_records(folder / "saved")
