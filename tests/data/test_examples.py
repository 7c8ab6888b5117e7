"""What records are for fine-tuning, and what is learned of them."""

from __future__ import annotations

import json

import pytest

from shardwise.core.errors import DataError
from shardwise.data import ExampleEncoder, UnusableExampleError, example_of, examples, preference_of
from shardwise.data.examples import messages_of
from shardwise.data.json_records import Record, digest_of
from shardwise.data.tokenizer import ChatTemplate, Tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_CONTENT = "message.content + '<|end|>'"
MARKED = TEMPLATE.replace(f"'<|' + message.role + '|>' + {_CONTENT}", "'<|' + message.role + '|>'").replace(
    "{% endfor %}",
    "{% if message.role == 'assistant' %}{% generation %}{{ " + _CONTENT + " }}{% endgeneration %}"
    "{% else %}{{ " + _CONTENT + " }}{% endif %}{% endfor %}",
    1,
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
    said_twice = {"messages": [{"role": "system", "content": "Be.\n"}, ASKED, SAID], "system": "Be."}
    assert [each["content"] for each in example(said_twice).completion] == ["Be.\n", "Who?", "I."]
    # Tables have each key in each row.
    assert example({"messages": [ASKED, SAID], "chat_template_kwargs": {"a": None, "b": 0}}).variables == {"b": 0}
    divided = example({"prompt": [ASKED], "completion": [SAID], "tools": '[{"name": "f"}]'})
    assert (divided.prompt, divided.completion, divided.tools) == ((ASKED,), (SAID,), [{"name": "f"}])
    assert example({"text": "x"}).completion == "x"
    for role in ("Assistant", "model", "GPT"):
        assert example({"messages": [ASKED | {"role": "User"}, SAID | {"role": role}]}) == openai


def test_instructions():
    """Alpaca's form; a record that also has the text of its prompt and answer is that text."""
    alpaca = {"instruction": "Who?", "input": "", "output": "I."}
    assert example(alpaca) == example({"instruction": "Who?", "output": "I."}) == example({"messages": [ASKED, SAID]})
    with_input = example(alpaca | {"input": "You or I.", "system": "Be."})
    assert [each["content"] for each in with_input.completion] == ["Be.", "Who?\n\nYou or I.", "I."]
    assert example(alpaca | {"text": "whole"}).completion == "whole"
    earlier = example(alpaca | {"history": [["You?", "No."]]})
    assert [each["content"] for each in earlier.completion] == ["You?", "No.", "Who?", "I."]


def test_calls_of_sharegpt():
    call = '{"name": "rain", "arguments": {"place": "Ulm"}}'
    rain = {"type": "function", "function": {"name": "rain", "arguments": {"place": "Ulm"}}}
    for value, calls in ((call, [rain]), (f"[{call}, {call}]", [rain, rain])):
        turns = [("human", "Rain?"), ("function_call", value), ("observation", "dry"), ("gpt", "No.")]
        made = example({"conversations": [{"from": role, "value": text} for role, text in turns]})
        assert made.completion[1] == {"role": "assistant", "content": None, "tool_calls": calls}
        assert made.completion[2] == {"role": "tool", "content": "dry"}


def test_functions_of_openai():
    """Calls and tools had these names first."""
    call = {"name": "rain", "arguments": '{"place": "Ulm"}'}
    made = example({"messages": [ASKED, SAID | {"function_call": call}], "functions": [{"name": "rain"}]})
    assert made.completion[1] == SAID | {"tool_calls": [{"type": "function", "function": call}]}
    assert made.tools == [{"type": "function", "function": {"name": "rain"}}]


def test_tools_and_calls_as_texts_of_json():
    """Of tables whose rows have other keys."""
    tool, call = (
        {"type": "function", "function": {"name": "rain"} | more} for more in ({}, {"arguments": {"n": None}})
    )
    plain = example({"messages": [ASKED, SAID | {"tool_calls": [call]}], "tools": [tool]})
    for calls in (json.dumps([call]), [json.dumps(call)]):
        for tools in (json.dumps([tool]), [json.dumps(tool)]):
            assert example({"messages": [ASKED, SAID | {"tool_calls": calls}], "tools": tools}) == plain
    functions = json.dumps([tool["function"]])
    assert example({"messages": [ASKED, SAID | {"tool_calls": [call]}], "functions": functions}) == plain


def test_keys_that_are_not_read():
    both = {"conversations": [ASKED, SAID], "messages": [ASKED, SAID], "system": "Be.", "score": 3, "empty": ""}
    assert example(both | {"system_prompt": "Be.", "thinking": False}).unread == (
        *("conversations", "system_prompt", "thinking"),
    )
    assert example({"instruction": "x", "output": "y", "context": "z"}).unread == ("context",)
    assert example({"prompt": "x", "completion": "y", "tools": [{}]}).unread == ("tools",)
    assert example({"text": "x", "source": "y"}).unread == ()
    pair = {"prompt": "x", "chosen": "y", "rejected": "z", "system_prompt": "v"}
    assert preference_of(Record("here", pair)).unread == ("system_prompt",)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"chat": []}, r"nor 'prompt' and 'completion' nor 'instruction' and 'output' nor 'text' \(its keys: 'chat'\)"),
        ({"instruction": "x", "output": ["y"]}, "'output' is not a string but a list"),
        ({"instruction": "x", "input": "\ud800", "output": "y"}, r"a lone surrogate \\ud800 in 'input'"),
        ({"messages": [ASKED, {"from": "function_call", "value": "rain()"}]}, r'function_call holds "rain\(\)", which'),
        ({"messages": [ASKED, {"from": "function_call", "value": "[]"}]}, r'message 2: function_call holds "\[\]"'),
        ({"instruction": "x", "output": "y", "history": "z"}, "'history' is no list of pairs"),
        (
            {"instruction": "x", "output": "y", "history": [["a", 3]]},
            "'history': its content is not a string but a num",
        ),
        (
            {"prompt": "x", "completion": "y", "label": False},
            "'label' is false, so the answer is one that people do not want",
        ),
        ({"messages": [ASKED, SAID], "label": False}, "'label' is false, so the answer is one"),
        ({"prompt": "x", "completion": "y", "system": "z"}, "'system' is a text of chats, and 'prompt' is plain text"),
        ({"messages": [ASKED], "system": ["z"]}, "'system' is not a string but a list"),
        (
            {"messages": [{"role": "system", "content": "a"}, ASKED, SAID], "system": "b"},
            "'system' is another text than that of the first message",
        ),
        (
            {"messages": [ASKED, SAID | {"train_detail": [{"train": False}]}]},
            "message 2: 'train_detail' says which parts",
        ),
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
        ({"messages": [ASKED, SAID], "tools": [None]}, "'tools' has null, where a tool is an object"),
        ({"messages": [ASKED, SAID], "functions": {"name": "f"}}, "'functions' is not a list but an object"),
        ({"messages": [ASKED, SAID | {"tool_calls": {"name": "f"}}]}, "message 2: 'tool_calls' is not a list but an o"),
        ({"messages": [ASKED, SAID | {"tool_calls": ["[]"]}]}, "'tool_calls' has a list, where a call is an object"),
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
    # A token with bytes of two characters: each byte is counted once.
    crossing = ExampleEncoder(Tokenizer.train(["\u00e9\u00e0\u0169\u00e1\u01e9\u00e2"] * 3, 258, ("<|end|>",)), None)
    assert crossing.encode(example({"text": "\u00e9\u00e0\u0169\u00e1"})).num_bytes.tolist() == [2, 2, 0, 2, 2, 0, 0]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"messages": [ASKED]}, "no turn of the assistant"),
        ({"messages": [ASKED, SAID, ASKED, SAID | {"content": " "}]}, "an empty turn of the assistant"),
        ({"prompt": "x", "completion": " "}, "an empty completion"),
        ({"text": ""}, "an empty text"),
        ({"text": "<|end|>"}, "nothing in it is learned"),
        ({"messages": [{"role": "system", "content": "x"}, SAID]}, "refuses the messages: no system here"),
    ],
)
def test_examples_of_no_use(tokenizer, value, reason):
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + TEMPLATE
    with pytest.raises(UnusableExampleError, match=reason):
        ExampleEncoder(tokenizer, ChatTemplate(source)).encode(example(value))


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}, {"trainable": 0.0}, {"loss_mask": 0}, {"masked": 1}])
def test_turns_that_are_not_learned(tokenizer, flag, marks):
    said, template = SAID | {"content": "You."}, MARKED if marks else TEMPLATE
    encoder = ExampleEncoder(tokenizer, ChatTemplate(template))
    whole = "<|user|>Who?<|end|><|assistant|>I.<|end|><|user|>Who?<|end|><|assistant|>You.<|end|>"
    no = dict.fromkeys(flag, not next(iter(flag.values())))
    # A flag that says what holds anyway, or null, changes nothing.
    for given in ([ASKED | flag, SAID | flag, ASKED, said], [ASKED, SAID | flag, ASKED | {"loss": None}, said | no]):
        assert learned(encoder, {"messages": given}) == (whole, "You.<|end|>")
        assert learned(encoder, {"system": "", "messages": [*given, ASKED, SAID]})[1] == "You.<|end|>I.<|end|>"
        shorter = {"prompt": given[:1], "completion": given[1:2] + given[3:]}
        assert learned(encoder, shorter)[1].replace("<|assistant|>", "") == "You.<|end|>"
    sharegpt = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I."} | flag]
    assert learned(encoder, {"conversations": sharegpt * 2 + [sharegpt[0], SAID], "system": "I."})[1] == "I.<|end|>"
    with pytest.raises(UnusableExampleError, match="nothing in it is learned"):
        encoder.encode(example({"messages": [ASKED, SAID | flag]}))
    plain = example({"messages": [ASKED, SAID]})
    assert example({"messages": [ASKED, SAID | flag]}).sha256 != example({"messages": [ASKED, SAID | no]}).sha256
    assert plain.sha256 == digest_of([None, plain.completion, None, {}])


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_only_the_last_answer_is_learned(tokenizer, template):
    said, no = SAID | {"content": "You."}, {"weight": 0}
    every, last = (ExampleEncoder(tokenizer, ChatTemplate(template), learn=learn) for learn in ("all", "last"))
    called = SAID | {"tool_calls": [{"function": {"name": "I", "arguments": {}}}]}
    two = [ASKED, SAID, ASKED, said]
    for value, both, only in (
        ({"messages": two}, "I.<|end|>You.<|end|>", "You.<|end|>"),
        ({"messages": [*two, ASKED]}, "I.<|end|>You.<|end|>", "You.<|end|>"),
        (
            {"messages": [ASKED, called, {"role": "tool", "content": "Who?"}, said]},
            "I.<|end|>You.<|end|>",
            "You.<|end|>",
        ),
        ({"messages": [ASKED, said]}, "You.<|end|>", "You.<|end|>"),
        ({"prompt": two[:2], "completion": two[2:]}, "<|user|>Who?<|end|><|assistant|>You.<|end|>", "You.<|end|>"),
        ({"prompt": two[:3], "completion": two[3:]}, "You.<|end|>", "You.<|end|>"),
        ({"messages": [ASKED, SAID | no, ASKED, said | {"weight": 1}]}, "You.<|end|>", "You.<|end|>"),
        ({"prompt": "Who?", "completion": " I."}, " I.<|end|>", " I.<|end|>"),
        ({"text": "Who? I."}, "Who? I.<|end|>", "Who? I.<|end|>"),
    ):
        whole = learned(every, value)
        assert whole[1] == both, value
        assert learned(last, value) == (whole[0], only), value
    for value, reason in (
        ({"messages": [ASKED, SAID, ASKED, said | no]}, "nothing in it is learned"),
        ({"prompt": [ASKED, SAID], "completion": [ASKED]}, "no turn of the assistant in the completion"),
    ):
        with pytest.raises(UnusableExampleError, match=reason):
            last.encode(example(value))
    with pytest.raises(DataError, match=r"user message 'Who.*'weight' is 1, so it is to be learned"):
        last.encode(example({"prompt": [ASKED], "completion": [SAID, ASKED | {"weight": 1}, said]}))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([ASKED, SAID | {"weight": 0.5}], "message 2: 'weight' is 0.5; a flag .* must be 0, 1, false or true"),
        ([ASKED | {"train": "false"}, SAID], "message 1: 'train' is \"false\"; a flag"),
        ([ASKED, SAID | {"loss_mask": [0, 1]}], r"'loss_mask' is \[0, 1\]; a flag"),
        ([ASKED, SAID | {"train": True, "weight": 0}], "'weight' is 0 and 'train' is true: one says"),
        ([ASKED, SAID | {"loss": 1, "masked": True}], "'loss' is 1 and 'masked' is true: one says"),
    ],
)
def test_flags_that_are_none(messages, message):
    for record in ({"messages": messages}, {"prompt": messages, "completion": [SAID]}):
        with pytest.raises(DataError, match=message):
            example(record)
    with pytest.raises(DataError, match=message):
        preference_of(Record("here", {"chosen": messages, "rejected": [ASKED, ASKED]}))


@pytest.mark.parametrize(
    ("record", "masks", "message"),
    [
        (
            {"messages": [ASKED | {"weight": 1}, SAID]},
            True,
            "user message 'Who.*: 'weight' is 1, so it is to be learned",
        ),
        (
            {"prompt": [ASKED, SAID | {"masked": 0}], "completion": [SAID]},
            True,
            "'masked' is 0, so it is to be learned",
        ),
        (
            {"prompt": [ASKED], "completion": [SAID, ASKED | {"loss": 0}]},
            True,
            "so it is not to be learned, but --mask",
        ),
        (
            {"messages": [ASKED, SAID | {"weight": 0}]},
            False,
            "so it is not to be learned, but --no-mask-prompts trains",
        ),
        ({"messages": [ASKED | {"train": False}, SAID]}, False, "so it is not to be learned, but --no-mask-prompts"),
    ],
)
def test_flags_that_contradict_the_mask(tokenizer, record, masks, message):
    with pytest.raises(DataError, match=message) as caught:
        ExampleEncoder(tokenizer, ChatTemplate(TEMPLATE), mask_prompts=masks).encode(example(record))
    assert not isinstance(caught.value, UnusableExampleError), "the run must end"


def test_flags_without_a_mask(tokenizer):
    whole = "<|user|>Who?<|end|><|assistant|>I.<|end|>"
    encoder = ExampleEncoder(tokenizer, ChatTemplate(TEMPLATE), mask_prompts=False)
    assert learned(encoder, {"messages": [ASKED | {"weight": 1}, SAID | {"masked": False}]}) == (whole, whole)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "Who?"}, "no 'prompt' but 'question', which the model would not see; name it 'prompt', or write"),
        ({"conversations": [ASKED]}, "no 'prompt' but 'conversations', which the model would not see"),
        ({"history": ["Who?"]}, "no 'prompt' but 'history'"),
        ({"prompt": "Who?", "system": "Be."}, "'system' is a text of chats, and 'chosen' is plain text"),
    ],
)
def test_preferences_whose_texts_would_be_lost(record, message):
    with pytest.raises(DataError, match=message):
        preference_of(Record("here", {"chosen": "I.", "rejected": "You."} | record))


def test_flags_of_preferences():
    def preference(prompt, *answers):
        return preference_of(Record("here", {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}))

    plain = preference([ASKED], [SAID], [ASKED])
    assert preference([ASKED | {"weight": 0}], [SAID | {"weight": 1}], [ASKED | {"masked": 0}]) == plain
    assert preference(None, [ASKED | {"train": 0}, SAID], [ASKED, ASKED | {"train": 1}]) == plain
    for wrong in (
        ([ASKED | {"weight": 1}], [SAID], [ASKED]),
        ([ASKED], [SAID], [ASKED | {"loss": False}]),
        (None, [ASKED, SAID], [ASKED | {"weight": 1}, ASKED]),
        ("Who?", [ASKED, SAID | {"weight": 0}], [ASKED, ASKED]),
    ):
        with pytest.raises(DataError, match="the answers are learned and the prompt is not"):
            preference(*wrong)


def test_special_tokens_spelt_by_strangers(tokenizer):
    record = {"messages": [ASKED, SAID | {"content": "I.<|end|>"}]}
    encoder = ExampleEncoder(tokenizer, ChatTemplate(TEMPLATE), parse_special=False)
    with pytest.raises(UnusableExampleError, match="spells a special token"):
        encoder.encode(example(record))
    ids = encoder.encode(example({"text": "I.<|end|>"})).ids
    assert list(ids).count(tokenizer.eos_id) == 1


def test_a_template_whose_turns_cannot_be_found(tokenizer):
    """Without marks, and every turn with the number of all messages, from no loop over them."""
    source = "{% for i in range(messages | length) %}{{ messages[i].content ~ messages | length }}{% endfor %}"
    with pytest.raises(UnusableExampleError, match=r"marks it with \{% generation %\}"):
        ExampleEncoder(tokenizer, ChatTemplate(source)).encode(example({"messages": [ASKED, SAID, ASKED, SAID]}))


def test_chats_without_a_template(tokenizer):
    with pytest.raises(DataError, match="the model's folder has no chat template"):
        ExampleEncoder(tokenizer, None).encode(example({"messages": [ASKED, SAID]}))


def test_an_item_is_hashed_once(monkeypatch):
    hashed = []
    monkeypatch.setattr(examples, "digest_of", lambda value: hashed.append(value) or str(len(hashed)))
    items = [example({"text": "Who?"}), example({"text": "What?"})]
    assert [item.sha256 for item in (*items, *items)] == ["1", "2", "1", "2"]


def test_content_of_a_call_may_be_none():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    (message,) = messages_of([call], "record 1", "messages")
    assert message["content"] is None
    (other,) = messages_of([{key: value for key, value in call.items() if key != "content"}], "record 1", "messages")
    assert "content" not in other
    with pytest.raises(DataError, match="no content"):
        messages_of([{"role": "user", "content": None}], "record 1", "messages")
