"""Chat templates: what they render, what they may not do, how OpenAI messages reach them."""

from __future__ import annotations

import time

import pytest

from hardpoint.errors import ConfigError, VLLMValidationError
from hardpoint.front_end.tokenizers.chat_template import (
    conversation,
    detect_content_format,
    load_chat_template,
    render_chat,
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMING = "{% for m in messages %}[{{ m.role }}]{{ m['content'] | trim }}</{{ m.role }}>\n{% endfor %}"
MANY_FEATURES = """
{%- if tools %}
    {{- '# Tools\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{%- continue %}{%- endif %}
    {%- if message.role == 'stop' %}{%- break %}{%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if message.role == 'assistant' %}
        {% generation %}
        {{- message.content }}
        {% endgeneration %}
    {%- else %}
        {{- loop.index ~ ':' ~ message.content ~ bos_token }}
    {%- endif %}
{%- endfor %}
{{ ns.count }}{% if thinking is defined and thinking %}<think>{% endif %}
{%- for document in documents or [] %}
{{ document.title }}: {{ document.text }}
{%- endfor %}
"""
USER = [{"role": "user", "content": "hi"}]
MESSAGES = [
    {"role": "user", "content": "<a> & 'b' \u00e9"},
    {"role": "skip", "content": "no"},
    {"role": "assistant", "content": "yes\n"},
    {"role": "stop", "content": "no"},
    {"role": "user", "content": "never"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d\u00e9j\u00e0 <vu>", "parameters": {}}}]


@pytest.fixture(scope="module")
def reference():
    """transformers' own rendering."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(template, messages, **options):
        rendered, _ = render_jinja_template([messages], chat_template=template, **options)
        return rendered[0]

    return render


@pytest.mark.parametrize(
    ("template", "messages", "options"),
    [
        (CHATML, USER, {"add_generation_prompt": True}),
        (CHATML, USER, {"add_generation_prompt": False}),
        (TRIMMING, [{"role": "user", "content": "  padded  "}], {}),
        (MANY_FEATURES, MESSAGES, {"tools": TOOLS, "bos_token": "<s>", "thinking": True}),
        (MANY_FEATURES, MESSAGES, {"documents": [{"title": "t", "text": "x"}], "bos_token": ""}),
        (CHATML, [*USER, {"role": "assistant", "content": "Once "}], {"continue_final_message": True}),
        (TRIMMING, [*USER, {"role": "assistant", "content": " Once  "}], {"continue_final_message": True}),
        (TRIMMING, [*USER, {"role": "assistant", "content": "hi hi"}], {"continue_final_message": True}),
    ],
    ids=range(8),
)
def test_renders_as_transformers_does(reference, template, messages, options):
    named = {key: options[key] for key in ("tools", "documents") if key in options}
    flags = {"add_generation_prompt": False} | {
        key: options[key] for key in ("add_generation_prompt", "continue_final_message") if key in options
    }
    variables = {key: value for key, value in options.items() if key not in named and key not in flags}
    ours = render_chat(template, messages, variables=variables, **named, **flags)
    assert ours == reference(template, messages, **named, **flags, **variables)
    assert ours


def test_a_continued_message_ends_where_it_ends():
    messages = [*USER, {"role": "assistant", "content": "Once upon"}]
    text = render_chat(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOnce upon")
    assert messages[-1]["content"] == "Once upon"


def test_a_continued_message_may_be_a_list_of_parts():
    template = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}|{% endfor %}"
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    text = render_chat(template, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "ab"


def refused(match: str | None, template: str | None, messages=None, **options) -> None:
    with pytest.raises(VLLMValidationError, match=match):
        render_chat(template, USER if messages is None else messages, **options)


def test_the_templates_own_refusal_reaches_the_client():
    refused("roles must alternate", "{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].pop('role') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{% include '/etc/passwd' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 10000000000 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ range(1000000000) }}",
    ],
)
def test_what_a_template_may_not_do_is_refused(template):
    refused(None, template)


def test_messages_are_not_changed_by_a_template():
    messages = [dict(USER[0])]
    refused(None, "{{ messages.append(1) }}", messages)
    assert messages == USER


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% set c = a %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% for a in range(99999) %}{{ f(n - 1) if n else '' }}{% endfor %}{% endmacro %}{{ f(3) }}",
    ],
)
def test_endless_rendering_is_stopped(monkeypatch, template):
    monkeypatch.setenv("VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT", "0.2")
    refused("longer than 0.2 seconds", template)  # without the limit: hours


def test_no_limit_with_zero(monkeypatch):
    monkeypatch.setenv("VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT", "0")
    assert render_chat(CHATML, USER).startswith("<|im_start|>user\nhi")


def test_an_endless_text_is_stopped(monkeypatch):
    monkeypatch.setattr("hardpoint.front_end.tokenizers.chat_template.MAX_RENDERED_CHARS", 1000)
    refused("unreasonable size", "{% for a in range(99999) %}0123456789{% endfor %}")


def test_wrong_jinja_names_the_line():
    refused("line 2", "fine\n{% if %}")


def test_no_template_says_what_to_do():
    refused("--chat-template", None)


def test_both_continuing_and_beginning_is_refused():
    refused("continue_final_message", CHATML, add_generation_prompt=True, continue_final_message=True)


def test_continuing_a_message_the_template_drops_is_refused():
    refused("does not show", "fixed", add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("messages", [[], [{"role": "assistant", "content": None}]])
def test_continuing_nothing_is_refused(messages):
    refused("needs a last message", CHATML, messages, add_generation_prompt=False, continue_final_message=True)


def test_template_kwargs_may_not_replace_the_conversation():
    refused("messages", CHATML, variables={"messages": []})


def test_strftime_now_is_today():
    assert render_chat("{{ strftime_now('%Y') }}", USER) == time.strftime("%Y")


# -- templates of the command line -------------------------------------------------------------------


def test_a_template_file_is_read(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages }}\\n", encoding="utf-8")
    assert load_chat_template(path) == "{{ messages }}\\n"
    assert load_chat_template(str(path)) == "{{ messages }}\\n"


def test_a_template_on_one_line_has_its_line_breaks():
    assert load_chat_template("{% for m in messages %}\\n{{ m.content }}{% endfor %}") == (
        "{% for m in messages %}\n{{ m.content }}{% endfor %}"
    )


def test_a_missing_template_file_is_said():
    with pytest.raises(ConfigError, match="no-such-file"):
        load_chat_template("no-such-file.jinja")


def test_a_template_that_is_not_valid_is_said(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}\n{{ m.content }")
    for given in ("{{ broken", path, str(path)):
        with pytest.raises(ConfigError, match=r"not valid jinja.*line"):
            load_chat_template(given)


def test_no_template_is_none():
    assert load_chat_template(None) is None


# -- content formats ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (CHATML, "string"),
        (TRIMMING, "string"),
        ("{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}", "openai"),
        (
            "{% for m in messages[1:] %}{% set content = m.content %}{% if content is string %}{{ content }}"
            "{% else %}{% for p in content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}",
            "openai",
        ),
        (
            "{% set loop_messages = messages %}{% for message in loop_messages %}"
            "{% for c in message['content'] | selectattr('type', 'equalto', 'text') %}{{ c }}{% endfor %}{% endfor %}",
            "openai",
        ),
        ("{% for c in messages[0]['content'] %}{{ c.text }}{% endfor %}", "openai"),
        (
            "{% for m in messages %}{% for call in m.tool_calls %}{{ call }}{% endfor %}{{ m.content }}{% endfor %}",
            "string",
        ),
        ("{% for tool in tools %}{% for x in tool.content %}{{ x }}{% endfor %}{% endfor %}", "string"),
        ("{% if %}", "string"),
    ],
    ids=range(10),
)
def test_the_content_format_is_found_in_the_template(template, form):
    assert detect_content_format(template) == form


PARTS = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}, "three"]


def test_parts_become_text_or_stay_parts():
    assert conversation([{"role": "user", "content": PARTS}], "string")[0]["content"] == "one\ntwo\nthree"
    kept = conversation([{"role": "user", "content": PARTS}], "openai")[0]["content"]
    assert kept == [{"type": "text", "text": text} for text in ("one", "two", "three")]
    assert conversation(USER, "openai")[0]["content"] == [{"type": "text", "text": "hi"}]


def test_tool_calls_reach_the_template_as_objects():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = conversation([{"role": "assistant", "content": None, "tool_calls": [call]}], "string")[0]
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert message["content"] == ""
    assert call["function"]["arguments"] == '{"x": 1}'


def test_reasoning_is_known_by_both_names():
    message = conversation([{"role": "assistant", "content": "x", "reasoning": "why"}], "string")[0]
    assert (message["reasoning"], message["reasoning_content"]) == ("why", "why")


@pytest.mark.parametrize(
    ("message", "parameter"),
    [
        ({"content": "no role"}, "messages.0.role"),
        ("text", "messages.0.role"),
        ({"role": "user", "content": 5}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages.0.content.0"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0"),
        ({"role": "user", "content": [7]}, "messages.0.content.0"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages.0.tool_calls",
        ),
    ],
)
def test_messages_that_cannot_be_read_are_refused_by_place(message, parameter):
    with pytest.raises(VLLMValidationError) as caught:
        conversation([message], "string")
    assert caught.value.parameter == parameter
