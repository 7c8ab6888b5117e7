"""Chat templates: found in a folder, rendered in a sandbox, with what the assistant wrote marked."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardwise.core.errors import DataError
from shardwise.data.tokenizer import ChatTemplate, template_meter
from shardwise.data.tokenizer.chat_template import TemplateError

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


VALUE = "makes a value of more than 16,777,216 characters"
STEPS = "takes more than 200,000 steps|" + VALUE
TEXT = "reads a value that has more than 16,777,216 characters as text|" + STEPS
# Both names hold a list of two, each of which is a list of two, and so on: 2^60 in all.
LISTS = (
    "{% set ns = namespace(x=[1], y=[1]) %}"
    "{% for _ in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
BEYOND_A_LIMIT = {
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}": STEPS,
    "{% for a in range(9) if range(100000) | sum < 0 %}{% endfor %}": STEPS,
    "{% for a in range(100000) %}{{ 'ab'.upper().strip() }}{% endfor %}": STEPS,
    "{% for a in range(100000) %}" + "x" * 1000 + "{% endfor %}": "makes a text of more than 16 MiB|" + STEPS,
    "{% set all %}{% for a in range(9999) %}" + "\u4e00" * 999 + "{% endfor %}{% endset %}": "text of more than 16 MiB",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}": STEPS,
    "{% block a %}{{ self.b() }}{{ self.b() }}{% endblock %}{% block b %}{% for n in range(100000) %}"
    "{% endfor %}{% endblock %}": STEPS,
    "{{ 'a' * 10 ** 9 }}": VALUE,
    "{{ [1] * 10 ** 6 * 9 }}": STEPS,
    "{{ 9 ** 99999 }}": "makes a number of more than 4096 bits",
    "{% set ns = namespace(x=7) %}{% for a in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}": "4096 bits",
    "{{ 5 | round(-1000000000) }}": "4096 bits",
    "{{ ('f' * 100000) | int(0, 16) // 3 }}": "4096 bits",
    "{{ 'x' | center(10 ** 10) }}": STEPS,
    "{{ 'x' | center(99999999) }}": STEPS,
    "{{ ['x'] | map('center', 99999999) | list }}": STEPS,
    "{% filter center(99999999) %}x{% endfilter %}": STEPS,
    "{{ 'x'.ljust(99999999) }}": STEPS,
    "{{ (1).to_bytes(10 ** 9) }}": "4096 bits",
    "{{ '%99999999d' % 1 }}": STEPS,
    "{{ '%999999999d' | format(1) }}": "a width of more than 8 digits",
    "{{ '{:999999999}'.format(1) }}": "a width of more than 8 digits",
    "{{ '{:{}}'.format(1, 10 ** 9) }}": "to a width that is itself a value",
    "{{ '%*d' % (10 ** 9, 1) }}": "to a width that is itself a value",
    "{{ ('a' * 10000) | replace('a', 'b' * 100000) }}": STEPS,
    "{{ ('a' * 10000).replace('', 'b' * 100000) }}": STEPS,
    "{{ range(9999) | map('string') | join('a' * 9999) }}": STEPS,
    "{{ ('a' * 9999).join(range(9999) | map('string')) }}": STEPS,
    "{{ ('a\n' * 9999) | indent('b' * 9999) }}": STEPS,
    "{{ [1] | tojson(indent=99999999) }}": STEPS,
    "{{ [1] | batch(99999999, 1) | list }}": STEPS,
    "{{ [1] | slice(99999999) | list }}": STEPS,
    "{{ ([[1]] * 9999) | sum(start=[]) }}": STEPS,
    "{{ ('a' * 99999).rfind('b' + 'a' * 9999) }}": STEPS,
    "{{ ('<!---->' * 99999) | striptags }}": STEPS,
    "{% set ns = namespace(x='a') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}": STEPS,
    "{% set ns = namespace(x=[1]) %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}": STEPS,
    "{% set ns = namespace(x=[]) %}{% set s = 'a' * 999999 %}"
    "{% for a in range(999) %}{% set ns.x = [ns.x, s[1:]] %}{% endfor %}": STEPS,
    LISTS + "{{ ns.x }}": TEXT,
    LISTS + "{{ ns.x | tojson }}": TEXT,
    LISTS + "{{ ns.x == ns.y }}": TEXT,
    LISTS + "{{ [ns.x].count(ns.y) }}": TEXT,
    LISTS + "{{ [ns.x] | select('in', [ns.y]) | list }}": TEXT,
    LISTS + "{{ {(ns.x,): 1} }}": TEXT,
    LISTS + "{% for a in (ns.x, ns.y) %}{{ loop.changed(a) }}{% endfor %}": TEXT,
    "{% set ns = namespace(x=()) %}{% for a in range(999) %}{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1} }}": (
        "nests values more than 200 deep"
    ),
}


@pytest.mark.parametrize(("source", "message"), BEYOND_A_LIMIT.items(), ids=range(len(BEYOND_A_LIMIT)))
def test_no_template_runs_on_or_grows(source, message, monkeypatch):
    """By what is counted, not by the clock, so in any thread too."""
    monkeypatch.setattr(template_meter, "MAX_STEPS", 200_000)
    template = ChatTemplate(source, where="'model/chat_template.jinja'")
    with ThreadPoolExecutor(1) as thread:
        for failed in (lambda: template.render(CHAT), thread.submit(template.render, CHAT).result):
            with pytest.raises(DataError, match=f"^'model/chat_template.jinja' .*({message}).*; repair it") as caught:
                failed()
            # Not of these messages alone, which would be left out.
            assert not isinstance(caught.value, TemplateError)


def test_what_is_within_the_limits():
    """Long texts and deep ones, by the real limits."""
    long, deep = "a b\n" * 250_000, {"x": [{"y": number} for number in range(20_000)]}
    source = (
        "{{ messages[0].content | replace('a', 'cd') | trim }}{{ messages[0].content.split('b')[-1].strip() }}"
        "{{ messages[1].content | tojson(indent=2) | length }}{{ messages | length }}{{ '%5.1f{a: {b}}|' % 2.25 }}"
        "{{ '{:>4}'.format('x') }}{{ messages[0].content[:1] * 3 }}"
        "{{ messages[1].content.x | map(attribute='y') | sum }}"
    )
    text = ChatTemplate(source).render([{"content": long}, {"content": deep}]).text
    dumped = len(json.dumps(deep, indent=2))
    assert text == f"{long.replace('a', 'cd').strip()}{dumped}2  2.2{{a: {{b}}}}|   xaaa{sum(range(20_000))}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x" * (1 << 20) + "y", "has 1,048,577 characters, more than 1,048,576"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "is no Jinja template: too many statically nested blocks"),
        ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "is no Jinja template: maximum recursion depth"),
        ("{{ " + "1" * 9999 + " }}", "is no Jinja template: Exceeds the limit"),
    ],
)
def test_a_template_that_python_cannot_compile(source, message):
    with pytest.raises(DataError, match=message):
        ChatTemplate(source)


def test_where_a_folder_has_it(tmp_path):
    assert ChatTemplate.load(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "{{ eos_token }}"}]
    for value in ("{{ eos_token }}", named):
        config.write_text(json.dumps({"chat_template": value, "eos_token": {"content": "</s>"}}))
        found = ChatTemplate.load(tmp_path)
        assert found is not None
        assert found.render(CHAT).text == "</s>"
    assert found.render(CHAT, tools=[{}]).text == "t"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token * 2 }}")
    found = ChatTemplate.load(tmp_path)
    assert found is not None
    assert found.render(CHAT).text == found.render(CHAT, tools=[{}]).text == "</s></s>"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }}")
    of_tools = ChatTemplate.load(tmp_path)
    assert of_tools is not None
    assert of_tools.render(CHAT).text == "</s></s>"
    assert of_tools.render(CHAT, tools=[{}]).text == "1"
    assert of_tools.sha256 != found.sha256
    # A template that no chat needs keeps none from being rendered.
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{% if %}")
    broken = ChatTemplate.load(tmp_path)
    assert broken is not None
    assert broken.render(CHAT).text == "</s></s>"
    with pytest.raises(DataError, match=r"tool_use.jinja, line 1 is no Jinja template"):
        broken.render(CHAT, tools=[{}])
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text('{"chat_template": [1]}')
    with pytest.raises(DataError, match="neither a template nor a list"):
        ChatTemplate.load(tmp_path)


def test_content_that_is_none_is_there():
    template = ChatTemplate("{% for m in messages %}{{ 'call' if m['content'] is none else m.content }}{% endfor %}")
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "name": None}]
    assert template.render(messages).text == "xcall"
