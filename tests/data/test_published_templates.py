"""Chat templates of published models: what is learned of thirteen kinds of chats, and what is left out and why."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data.chat_kinds import CHATS, TOKENS, assistant, chat, encoder_of, learned_parts, published, tokenizer, user

from shardwise.core.errors import DataError
from shardwise.data import Example, UnusableExampleError, encoding
from shardwise.data.examples import Flag
from shardwise.data.tokenizer.chat_template import TemplateError
from shardwise.data.turns import UNFOUND, UNSHOWN, UNSHOWN_ANSWER, UNSHOWN_CALL

PAGE = Path(__file__).parents[2] / "docs" / "chat_templates.md"


DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"


def learned(source, *messages, **more):
    return learned_parts(encoder_of(source), Example("here", None, messages, **more))


@pytest.mark.parametrize(
    ("name", "kind", "parts"),
    [
        # The end of a text is not in front of the next turn.
        ("phi3", "two turns", ["Greetings.<|end|>\n", "  Certainly!\n<|end|>\n</s>"]),
        ("phi3_5", "same", ["no<|end|>\n", "no<|end|>\n", "no<|end|>\n</s>"]),
        # The last turn ends with another token.
        ("gptoss", "plain", ["<|channel|>final<|message|>Jane Austen.<|return|>"]),
        ("gptoss", "question last", ["<|channel|>final<|message|>second<|end|>"]),
        # Reasoning is in the last turn only.
        ("qwen3", "think", ["Six!<|im_end|>\n", "<think>\nby two\n</think>\n\nSeven!<|im_end|>\n"]),
        ("qwen3_5_think", "think", ["Six!<|im_end|>\n", "by two\n</think>\n\nSeven!<|im_end|>\n"]),
        ("deepseek_r1_distill", "think", ["\n\nSix!" + DEEPSEEK_END, "\n\nSeven!" + DEEPSEEK_END]),
        # The next turn's token ends a turn, also where no turn follows.
        ("glm4moe", "think", ["\n<think></think>\nSix!<|user|>", "\n<think>by two</think>\nSeven!<|user|>"]),
        ("glm4moe", "question last", ["\n<think></think>\nsecond<|user|>"]),
        # The results of a call are within the text of the turn that calls.
        (
            *("gemma4", "call"),
            ['<|tool_call>call:find_book{title:<|"|>Moby-Dick<|"|>}<tool_call|>', "On shelf seven.<turn|>\n"],
        ),
        # The question is not written by the loop.
        (
            *("llama3_1", "call"),
            ['{"name": "find_book", "parameters": {"title": "Moby-Dick"}}<|eot_id|>', "On shelf seven.<|eot_id|>"],
        ),
        # The template refuses a chat of which no user's message is shown yet.
        ("qwen3_6", "answer first", ["Hello, reader.<|im_end|>\n", "\n</think>\n\nGo on.<|im_end|>\n"]),
    ],
)  # fmt: skip
def test_what_is_learned(name, kind, parts):
    assert learned_parts(encoder_of(published()[name]), chat(kind)) == parts


def test_the_end_that_no_turn_follows():
    """Of GLM's calls too; and of a template that ends turns with plain text, the end of a text."""
    call = chat("call").completion[:2]
    parts = learned(published()["glm4moe"], *call)
    assert parts[0].endswith("</tool_call><|observation|>")
    plain = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"
    plain += "{{ 'assistant: ' if add_generation_prompt }}"
    assert learned(plain, user("a"), assistant("b"), user("c"), assistant("d")) == ["b\n", "d\n</s>"]
    flags = (None, None, None, Flag("weight", 0, False))
    assert learned(plain, user("a"), assistant("b"), user("c"), assistant("d"), flags=flags) == ["b\n"]
    # Also if the template refuses a next turn.
    short = "{{ raise_exception('no third') if messages | length > 2 }}" + plain
    assert learned(short, user("a"), assistant("b")) == ["b\n</s>"]
    assert encoder_of(plain).turn_end_ids() == (tokenizer().eos_id,)
    assert encoder_of(published()["glm4moe"]).turn_end_ids() == (tokenizer().id_of("<|user|>"),)


HEADER = "{{ '<|im_start|>' ~ m.role ~ '\n' }}"
PROMPT = "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
TURN = HEADER + "{{ m.content ~ '<|im_end|>\n' }}"
LOOP = "{% for m in messages %}" + TURN + "{% endfor %}"
ALL = "messages | map(attribute='content') | join"
END_BEFORE = "with the end before the next turn"
FORMS = {
    "plain": LOOP + PROMPT,
    "by number": "{% for i in range(messages | length) %}{% set m = messages[i] %}" + TURN + "{% endfor %}" + PROMPT,
    "by a macro": "{% macro all() %}" + LOOP + "{% endmacro %}{{ all() }}" + PROMPT,
    "kept in a variable": (
        "{% set ns = namespace(text='') %}{% for m in messages %}{% set turn %}" + TURN + "{% endset %}"
        "{% set ns.text = ns.text ~ turn %}{% endfor %}{{ ns.text }}" + PROMPT
    ),
    END_BEFORE: (
        "{% for m in messages %}{{ '<|im_end|>\n' if not loop.first }}" + HEADER + "{{ m.content }}{% endfor %}"
        "{{ '<|im_end|>\n' }}" + PROMPT
    ),
    "with a system message in the loop": (
        "{% for m in messages %}{% if loop.first %}{{ '<|im_start|>system\nb<|im_end|>\n' }}{% endif %}"
        + TURN + "{% endfor %}" + PROMPT
    ),
    "with a header that is always there": LOOP + "{{ '<|im_start|>assistant\n' }}",
    "that begins reasoning": LOOP + "{{ '<|im_start|>assistant\n<think>\n' if add_generation_prompt }}",
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_templates(form):
    """Answers that are equal, begin with blanks or as the prompt's end does, or spell tokens, headers and marks."""
    for answers in (
        ["b", "b"],
        ["  b\n", "<b>"],
        ["<|im_start|>assistant\nb", "b<|im_end|><|im_start|>assistant\n<think>\nb"],
        ["<", "user\U000f0001"],
    ):
        messages = [message for answer in answers for message in (user("b"), assistant(answer))]
        for given in (messages, messages[1:], [*messages[:2], assistant("more"), *messages[2:], user("b")]):
            said = [message["content"] + "<|im_end|>\n" for message in given if message["role"] == "assistant"]
            if form == END_BEFORE:
                if given[0]["role"] == "assistant":
                    # Its header is not the generation prompt, which first ends the turn before.
                    continue
                said = [each.removesuffix("\n") for each in said]
                said[-1] += "\n" * (given[-1]["role"] == "assistant")
            assert learned(FORMS[form], *given) == said, given


def test_a_template_that_refuses_a_chat_without_a_question():
    source = "{{ raise_exception('no question') if 'user' not in messages | map(attribute='role') }}" + FORMS["plain"]
    system = {"role": "system", "content": "b"}
    parts = learned(source, system, assistant("b"), user("b"), assistant("c"))
    assert parts == ["b<|im_end|>\n", "c<|im_end|>\n"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("Hello.", UNSHOWN),
        ("{{ bos_token }}{% for m in messages %}{{ m.role }}{% endfor %}", UNSHOWN),
        ("{% for m in messages if m.role == 'user' %}" + TURN + "{% endfor %}" + PROMPT, UNSHOWN_ANSWER),
        # An answer within another's text.
        (LOOP.replace("m.content", ALL) + PROMPT, UNFOUND),
        # A mark at the beginning of a question would change the text.
        (LOOP.replace("m.content", f"('!' if m.content[0] == 'w') ~ ({ALL})") + PROMPT, UNFOUND),
        ("{% for m in messages %}{{ m.role }} {% endfor %}" + LOOP + PROMPT, UNFOUND),
        ("{% for m in messages %}{{ m.role }} {% endfor %}" + LOOP, UNFOUND),
        (LOOP.replace("m.content", "m.content | length") + PROMPT, UNFOUND),
        # A prompt with which no answer begins.
        (LOOP + "{{ 'answer: ' if add_generation_prompt }}", UNFOUND),
        ("{% for i in range(messages | length) %}{{ messages[i].content ~ messages | length }}{% endfor %}", UNFOUND),
        ("{% for m in messages[::-1] %}" + TURN + "{% endfor %}" + PROMPT, None),
    ],
)  # fmt: skip
def test_what_is_left_out(source, reason):
    messages = (user("who"), assistant("me"), user("what"), assistant("that"))
    if reason is None:
        assert learned(source, *messages) == ["that<|im_end|>\n", "me<|im_end|>\n"]
        return
    with pytest.raises(UnusableExampleError) as caught:
        learned(source, *messages)
    assert caught.value.reason == reason


def test_calls():
    with pytest.raises(UnusableExampleError, match=UNSHOWN_CALL):
        learned_parts(encoder_of(published()["phi3"]), chat("call"))
    # Two calls, of which the template shows one.
    call = {"type": "function", "function": {"name": "find", "arguments": {}}}
    one = LOOP.replace("m.content", "(m.content or m.tool_calls[0].function.name)") + PROMPT
    assert learned(one, user("who"), {"role": "assistant", "tool_calls": [call]}) == ["find<|im_end|>\n"]
    with pytest.raises(UnusableExampleError, match=UNSHOWN_CALL):
        learned(one, user("who"), {"role": "assistant", "tool_calls": [call, call]})
    # A message without content does not tell what a template shows.
    assert encoder_of("Hello.").shows(Example("here", None, ({"role": "assistant", "tool_calls": [call]},)))
    assert not encoder_of("Hello.").shows(Example("here", None, (user("who"),)))
    # The first character of the prompt's next token is none of the header.
    tagged = FORMS["that begins reasoning"].replace("m.content", "(m.content or '<t>' ~ m.tool_calls[0].function.name)")
    assert learned(tagged, user("who"), {"role": "assistant", "tool_calls": [call]}) == ["<t>find<|im_end|>\n"]


def test_all_renderings_of_a_chat_have_one_limit(monkeypatch):
    assert learned(FORMS["plain"], user("who"), assistant("me"))
    monkeypatch.setattr(encoding, "_MOST_SECONDS", -1.0)
    with pytest.raises(DataError, match=r"^here: rendering this chat takes more than a minute; leave it out") as caught:
        learned(FORMS["plain"], user("who"), assistant("me"))
    # It ends the command, and is not left out.
    assert not isinstance(caught.value, UnusableExampleError)


NAMES = {
    UNSHOWN: "messages not shown",
    UNSHOWN_ANSWER: "answer not shown",
    UNSHOWN_CALL: "call not shown",
    UNFOUND: "not found",
}


def left_out(encoder, kind):
    """Return the reason for which a chat is left out; empty if it is kept."""
    try:
        encoder.encode(chat(kind))
    except UnusableExampleError as error:
        return NAMES.get(error.reason, "refused")
    return ""


def of_transformers(template, kind):
    """Return the text and the marked parts that transformers makes of a chat; None if it fails."""
    from transformers.utils.chat_template_utils import render_jinja_template

    given = CHATS[kind]
    variables = {**TOKENS, **given.get("chat_template_kwargs", {})}
    try:
        (text,), marked = render_jinja_template(
            [given["messages"]],
            tools=given.get("tools"),
            chat_template=template.source,
            return_assistant_tokens_mask=template.has_marks,
            **variables,
        )
    except Exception:  # whatever a template raises
        return None
    return text, marked[0] if marked else []


@pytest.mark.slow
def test_texts_and_marks_are_those_of_transformers():
    compared = Counter()
    for name, source in published().items():
        encoder = encoder_of(source)
        template = encoder.template
        for kind in CHATS:
            expected, example = of_transformers(template, kind), chat(kind)
            try:
                rendered = template.render(example.completion, tools=example.tools, **example.variables)
            except TemplateError:
                assert expected is None, (name, kind)
                compared["refused"] += 1
                continue
            assert expected is not None, (name, kind)
            assert rendered.text == expected[0], (name, kind)
            compared["rendered"] += 1
            if template.has_marks:
                # Neighbouring marks are one part.
                assert [rendered.text[slice(*span)] for span in rendered.spans] == [
                    expected[0][begin:end] for begin, end in expected[1] if end > begin
                ], (name, kind)
                encoded = encoder.encode(example)
                spans = encoder.tokenizer.encode_with_spans(rendered.text, parse_special=True)[1]
                touched = [any(b < end and begin < e for b, e in rendered.spans) for begin, end in spans]
                assert encoded.learned.tolist() == touched, (name, kind)
                compared["marked"] += 1
    assert compared["marked"] == 368
    assert compared["rendered"] >= 750


@pytest.mark.slow
def test_what_is_found_without_marks_is_what_is_marked():
    """Marks may begin at the header, and end before the last line break."""
    compared = 0
    for name, source in published().items():
        without = re.sub(
            r"\bendgeneration(\s*-?%})", r"endif\1", re.sub(r"({%-?\s*)generation(\s*-?%})", r"\1if true\2", source)
        )
        if without == source:
            continue
        # Compiled once, as that takes longer than a chat.
        encoder, encoder_of_marks = encoder_of(without), encoder_of(source)
        for kind in CHATS:
            if left_out(encoder, kind):
                continue
            found, marked = encoder.encode(chat(kind)), encoder_of_marks.encode(chat(kind))
            assert found.ids.tolist() == marked.ids.tolist()
            if not (name == "diffusion_gemma_training" and kind.startswith("call")):
                # Of its generation prompt after a call, this template leaves out the header.
                assert not (found.learned & ~marked.learned).any(), (name, kind)
            more = tokenizer().decode(marked.ids[marked.learned & ~found.learned])
            said = "".join(
                message.get("content") or "" for message in chat(kind).completion if message["role"] == "assistant"
            )
            assert not any(word in more for word in re.findall(r"\w{4,}", said.rpartition("</think>")[2])), (
                name,
                kind,
                more,
            )
            compared += 1
    assert compared > 290


def table() -> str:
    """Return the table of the page: templates with equal results share a row."""
    rows: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, source in published().items():
        encoder = encoder_of(source)
        outcome = tuple((kind, reason) for kind in CHATS if (reason := left_out(encoder, kind)))
        rows.setdefault(outcome, []).append(name)
    lines = ["| templates | kept | left out |", "|---|---|---|"]
    for outcome, names in sorted(rows.items(), key=lambda row: (len(row[0]), row[1])):
        reasons: dict[str, list[str]] = {}
        for kind, reason in outcome:
            reasons.setdefault(reason, []).append(kind)
        cell = "; ".join(f"{reason}: {', '.join(kinds)}" for reason, kinds in reasons.items())
        lines.append(f"| {', '.join(names)} | {len(CHATS) - len(outcome)} of {len(CHATS)} | {cell} |")
    return "\n".join(lines)


@pytest.mark.slow
def test_the_page_has_the_table():
    """``python tests/data/test_published_templates.py`` prints it."""
    assert table() in PAGE.read_text("utf-8")


def test_a_turn_that_is_not_learned_leaves_nothing_of_it():
    """A template's marks may cover a header, too."""
    for name, source in published().items():
        encoder, messages = encoder_of(source), chat("two turns").completion
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if left_out(encoder, "two turns"):
            continue
        whole = encoder.encode(chat("two turns"))
        flags = tuple(Flag("weight", 0, False) if number == answers[0] else None for number in range(len(messages)))
        if "idefics3" in name or "smolvlm" in name:
            with pytest.raises(UnusableExampleError, match=UNSHOWN):
                encoder.encode(replace(chat("two turns"), flags=flags))
            continue
        rest = encoder.encode(replace(chat("two turns"), flags=flags))
        assert rest.ids.tolist() == whole.ids.tolist()
        assert not (rest.learned & ~whole.learned).any(), name
        told = tokenizer().decode(rest.ids[rest.learned])
        first, second = (messages[number]["content"] for number in (answers[0], answers[1]))
        assert second.strip() in told, (name, told)
        assert first.strip() not in told, (name, told)
        # One of two runs of tokens is left.
        before, after = ((np.diff(each.learned.astype(int)) == 1).sum() for each in (whole, rest))
        assert 2 * after == before, (name, told)


if __name__ == "__main__":
    print(table())
