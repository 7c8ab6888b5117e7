"""What records are for fine-tuning, and what is learned of them."""

from __future__ import annotations

import pytest

from shardwise.core.errors import DataError
from shardwise.data import ExampleEncoder, UnusableExampleError, example_of, examples, labelled
from shardwise.data.examples import messages_of
from shardwise.data.json_records import Record
from shardwise.data.tokenizer import ChatTemplate, Tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ASKED = {"role": "user", "content": "Who?"}
SAID = {"role": "assistant", "content": "I."}


def example(value):
    return example_of(Record("'a.jsonl', line 3", value), "text")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["Who? I. You. Who? I."], 275, ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>"))


def test_forms_of_messages():
    openai = example({"messages": [ASKED, SAID]})
    assert openai.completion == (ASKED, SAID)
    assert openai.prompt is None
    sharegpt = {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I."}]}
    assert example(sharegpt) == openai
    parts = [{"role": "user", "content": [{"type": "text", "text": "W"}, {"type": "text", "text": "ho?"}]}, SAID]
    assert example({"messages": parts}) == openai
    with_system = example({"conversations": sharegpt["conversations"], "system": "Be."})
    assert with_system.completion[0] == {"role": "system", "content": "Be."}
    divided = example({"prompt": [ASKED], "completion": [SAID], "tools": '[{"name": "f"}]'})
    assert (divided.prompt, divided.completion, divided.tools) == ((ASKED,), (SAID,), [{"name": "f"}])
    assert example({"text": "x"}).completion == "x"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"chat": []}, r"neither 'messages' nor 'prompt' and 'completion' nor 'text' \(its keys: 'chat'\)"),
        ({"messages": "hello"}, "'messages' is not a list of messages but a string"),
        ({"messages": []}, "'messages' has no message"),
        ({"messages": ["hello"]}, "message 1: not an object but a string"),
        ({"messages": [{"content": "x"}]}, r"message 1: no role \(its keys: 'content'\)"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "message 1: the role 'boss' is unknown"),
        ({"messages": [ASKED, {"role": "assistant"}]}, "message 2: no content"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 1: its content is not a string but a number"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part of type 'image'; only text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, r"a lone surrogate \\ud800 in the content"),
        ({"prompt": "x", "completion": [SAID]}, "'prompt' is not a list of messages but a string where the other one"),
        ({"messages": [ASKED, SAID], "tools": "{"}, "'tools' is a string that is no JSON"),
        ({"messages": [ASKED], "chat_template_kwargs": {"messages": 1}}, "'chat_template_kwargs' has 'messages'"),
    ],
)
def test_records_that_are_none(value, message):
    with pytest.raises(DataError, match=rf"^'a\.jsonl', line 3.*{message}"):
        example(value)


def learned(encoder, value):
    encoded = encoder.encode(example(value))
    return encoder.tokenizer.decode(encoded.ids), encoder.tokenizer.decode(encoded.ids[encoded.learned])


def test_what_is_learned(tokenizer):
    chat = {"messages": [ASKED, SAID, ASKED, SAID | {"content": "You."}]}
    masking = ExampleEncoder(tokenizer, ChatTemplate(TEMPLATE))
    whole = "<|user|>Who?<|end|><|assistant|>I.<|end|><|user|>Who?<|end|><|assistant|>You.<|end|>"
    assert learned(masking, chat) == (whole, "I.<|end|>You.<|end|>")
    assert learned(ExampleEncoder(tokenizer, ChatTemplate(TEMPLATE), mask_prompts=False), chat) == (whole, whole)
    assert learned(masking, {"messages": [ASKED, SAID] * 40})[1] == "I.<|end|>" * 40
    # The assistant may speak first.
    assert learned(masking, {"messages": [SAID, ASKED, SAID]})[1] == "I.<|end|>I.<|end|>"
    assert learned(masking, {"prompt": [ASKED], "completion": [SAID]})[1] == "I.<|end|>"
    assert learned(masking, {"prompt": "Who?", "completion": " I."}) == ("Who? I.<|end|>", " I.<|end|>")
    # A token that the two share is learned.
    assert learned(masking, {"prompt": "Who? ", "completion": "I."}) == ("Who? I.<|end|>", " I.<|end|>")
    assert learned(masking, {"text": "I."}) == ("I.<|end|>", "I.<|end|>")
    encoded = masking.encode(example({"prompt": "Who? ", "completion": "\N{GRINNING FACE}<|user|>"}))
    # The bytes of one character are counted once, and those of a special token's name not at all.
    assert encoded.num_bytes[encoded.learned].sum() == 4


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"messages": [ASKED]}, "no turn of the assistant"),
        ({"messages": [ASKED, SAID, ASKED, SAID | {"content": " "}]}, "an empty turn of the assistant"),
        ({"prompt": "x", "completion": " "}, "an empty completion"),
        ({"text": ""}, "an empty text"),
        ({"messages": [{"role": "system", "content": "x"}, SAID]}, "refuses the messages: no system here"),
    ],
)
def test_examples_of_no_use(tokenizer, value, reason):
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + TEMPLATE
    with pytest.raises(UnusableExampleError, match=reason):
        ExampleEncoder(tokenizer, ChatTemplate(source)).encode(example(value))


def test_special_tokens_spelt_by_strangers(tokenizer):
    record = {"messages": [ASKED, SAID | {"content": "I.<|end|>"}]}
    encoder = ExampleEncoder(tokenizer, ChatTemplate(TEMPLATE), parse_special=False)
    with pytest.raises(UnusableExampleError, match="spells a special token"):
        encoder.encode(example(record))
    ids = encoder.encode(example({"text": "I.<|end|>"})).ids
    assert list(ids).count(tokenizer.eos_id) == 1


def test_a_template_whose_turns_cannot_be_found(tokenizer):
    """Without marks, and every turn numbered by how many follow."""
    source = "{% for m in messages %}{{ loop.revindex ~ m.content ~ loop.revindex ~ '<|end|>' }}{% endfor %}"
    with pytest.raises(UnusableExampleError, match=r"mark them with \{% generation %\}"):
        ExampleEncoder(tokenizer, ChatTemplate(source)).encode(example({"messages": [ASKED, SAID, ASKED, SAID]}))


def test_chats_without_a_template(tokenizer):
    with pytest.raises(DataError, match="the model's folder has no chat template"):
        ExampleEncoder(tokenizer, None).encode(example({"messages": [ASKED, SAID]}))


def test_an_item_is_hashed_once(monkeypatch):
    hashed = []
    for module in (examples, labelled):
        monkeypatch.setattr(module, "digest_of", lambda value: hashed.append(value) or str(len(hashed)))
    items = [example({"text": "Who?"}), labelled.LabelledText("line 1", "Who?", None, "a")]
    assert [item.sha256 for item in (*items, *items)] == ["1", "2", "1", "2"]


def test_content_of_a_call_may_be_none():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    (message,) = messages_of([call], "record 1", "messages")
    assert message["content"] is None
    (other,) = messages_of([{key: value for key, value in call.items() if key != "content"}], "record 1", "messages")
    assert "content" not in other
    with pytest.raises(DataError, match="no content"):
        messages_of([{"role": "user", "content": None}], "record 1", "messages")
