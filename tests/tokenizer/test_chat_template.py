"""Chat templates: found in a folder, rendered in a sandbox, with what the assistant wrote marked."""

from __future__ import annotations

import json

import pytest

from shardwise.errors import DataError
from shardwise.tokenizer import ChatTemplate
from shardwise.tokenizer.chat_template import TemplateError

MARKED = (
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}.{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}|{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b \N{GRINNING FACE}"},
    {"role": "user", "content": "\ufdd0"},
    {"role": "assistant", "content": "b"},
]


def test_marks_are_places_in_the_text():
    template = ChatTemplate(MARKED)
    rendered = template.render(CHAT)
    assert rendered.text == "user:a|assistant:b \N{GRINNING FACE}.|user:\ufdd0|assistant:b.|"
    assert [rendered.text[begin:end] for begin, end in rendered.spans] == ["b \N{GRINNING FACE}.", "b."]
    assert template.has_marks
    plain = ChatTemplate("{{ messages[0].content }} {# {% generation %} #}")
    assert (plain.has_marks, plain.render(CHAT).spans) == (False, ())


def test_what_templates_use():
    source = (
        "{% for n in range(9) %}{% if n == 2 %}{% continue %}{% elif n == 4 %}{% break %}{% endif %}{{ n }}"
        "{% endfor %}\n"
        "{{ strftime_now('%Y') | length }} {{ {'<é>': 1} | tojson }} {{ bos_token }}{{ absent }}{{ tools }}"
        "{{ '!' if add_generation_prompt }}{{ style }}{{ 'x' if messages[0].name is defined }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    text = template.render([CHAT[0] | {"name": None}], add_generation_prompt=True, style="?").text
    assert text == '0134 {"<é>": 1} <s>None!?'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "refuses the messages: Roles must alternate"),
        ("{{ messages[9].content.x }}", "refuses the messages: .*has no element 9"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 // 0 }}", "fails: ZeroDivisionError"),
    ],
)
def test_a_template_that_refuses_or_fails(source, message):
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source).render(CHAT)


def test_a_template_that_is_none():
    with pytest.raises(DataError, match="line 2 is no Jinja template"):
        ChatTemplate("\n{% for %}")


def test_where_a_folder_has_it(tmp_path):
    assert ChatTemplate.load(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "{{ eos_token }}"}]
    for value in ("{{ eos_token }}", named):
        config.write_text(json.dumps({"chat_template": value, "eos_token": {"content": "</s>"}}))
        found = ChatTemplate.load(tmp_path)
        assert found is not None
        assert found.render(CHAT).text == "</s>"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token * 2 }}")
    found = ChatTemplate.load(tmp_path)
    assert found is not None
    assert found.render(CHAT).text == "</s></s>"
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text('{"chat_template": [1]}')
    with pytest.raises(DataError, match="neither a template nor a list"):
        ChatTemplate.load(tmp_path)
