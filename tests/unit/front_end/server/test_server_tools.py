"""Tools and reasoning on /v1/chat/completions, against a scripted engine."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from hardpoint.contracts.reasoning_parser import ReasoningParser
from hardpoint.contracts.tool_parser import ToolParser
from hardpoint.errors import ConfigError
from hardpoint.extensions.registry import registry
from hardpoint.front_end.server.parser_flags import check_parsers

EOS = "<|end|>"
PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
ARGUMENTS = '{"city": "Zürich ☃", "days": {"from": 1, "to": [2, null]}}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOOP = '<tool_call>\n{"name": "noop", "arguments": {}}\n</tool_call>'
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
        "city": {"$ref": "#/$defs/place"}}, "$defs": {"place": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "noop"}},
]  # fmt: skip
AUTO = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
LONG = {"model_config__max_model_len": 4096}


def joined(chunks):
    """A stream's message, put together as clients do, and its finish reason."""
    message = {"content": None, "reasoning": None, "tool_calls": []}
    reason = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning"):
                if delta.get(name):
                    message[name] = (message[name] or "") + delta[name]
            for part in delta.get("tool_calls", ()):
                if part["index"] == len(message["tool_calls"]):
                    assert part["id"]
                    assert part["type"] == "function"
                    assert part["function"]["arguments"] == "", "arguments come behind the name"
                    message["tool_calls"].append({"name": part["function"]["name"], "arguments": ""})
                else:
                    assert set(part) == {"index", "function"}
                    message["tool_calls"][part["index"]]["arguments"] += part["function"]["arguments"]
            reason = choice["finish_reason"] or reason
    return message, reason


def plain(choice):
    message = choice["message"]
    calls = [call["function"] for call in message["tool_calls"]]
    return {"content": message["content"], "reasoning": message["reasoning"], "tool_calls": calls}, choice[
        "finish_reason"
    ]


async def both(server, **body):
    """The answer, which must be the same whole and as a stream."""
    body.setdefault("messages", USER)
    answer = await server.chat(**body)
    chunks = await server.events(PATH, **body)
    assert joined(chunks) == plain(answer["choices"][0])
    return answer, chunks


def test_calls_are_read_whole_and_streamed(make_server, run):
    async def check():
        server = await make_server(f"Let me see.\n{CALL}\n{NOOP}{EOS}", LONG, **AUTO)
        answer, chunks = await both(server, tools=TOOLS)
        (choice,) = answer["choices"]
        weather, noop = choice["message"]["tool_calls"]
        assert choice["message"]["content"] == "Let me see."
        assert choice["finish_reason"] == "tool_calls"
        assert (weather["type"], weather["function"]) == ("function", {"name": "weather", "arguments": ARGUMENTS})
        assert noop["function"] == {"name": "noop", "arguments": "{}"}
        assert weather["id"] != noop["id"]
        fragments = [p for c in chunks for p in c["choices"][0]["delta"].get("tool_calls", ()) if p["index"] == 0]
        assert len(fragments) > 10, "arguments come as they are written"

    run(check())


def test_token_ids_and_scores_of_a_stream_are_complete(make_server, run):
    async def check():
        server = await make_server(f"Hm.\n{CALL}{EOS}", LONG, **AUTO)
        body = {"tools": TOOLS, "return_token_ids": True, "logprobs": True}
        answer, chunks = await both(server, **body)
        ids = [i for c in chunks for i in c["choices"][0].get("token_ids", ())]
        assert ids == answer["choices"][0]["token_ids"]
        scores = [s for c in chunks for s in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert len(scores) == len(ids)

    run(check())


def test_only_one_call_where_the_client_takes_no_more(make_server, run):
    async def check():
        server = await make_server(f"{NOOP}\n{CALL}{EOS}", LONG, **AUTO)
        answer, _ = await both(server, tools=TOOLS, parallel_tool_calls=False)
        assert [c["function"]["name"] for c in answer["choices"][0]["message"]["tool_calls"]] == ["noop"]

    run(check())


@pytest.mark.parametrize("text", ["<tool_call>nothing</tool_call>", '<tool_call>{"name": 1}', "plain words", "<tool_"])
def test_what_is_no_call_is_content(make_server, run, text):
    async def check():
        answer, _ = await both(await make_server(text + EOS, LONG, **AUTO), tools=TOOLS)
        assert plain(answer["choices"][0]) == ({"content": text, "reasoning": None, "tool_calls": []}, "stop")

    run(check())


def test_a_call_that_is_cut_off_says_so(make_server, run):
    async def check():
        server = await make_server(CALL + EOS, LONG, **AUTO)
        answer, _ = await both(server, tools=TOOLS, max_tokens=70)
        message, reason = plain(answer["choices"][0])
        assert reason == "length"
        assert ARGUMENTS.startswith(message["tool_calls"][0]["arguments"])

    run(check())


def test_several_answers_have_calls_of_their_own(make_server, run, ids):
    async def check():
        server = await make_server(
            lambda prompt, index: ids(f"{index} " + (CALL if index else NOOP) + EOS), LONG, **AUTO
        )
        answer = await server.chat(tools=TOOLS, n=2)
        assert [plain(choice)[0]["content"] for choice in answer["choices"]] == ["0", "1"]
        names = [choice["message"]["tool_calls"][0]["function"]["name"] for choice in answer["choices"]]
        assert names == ["noop", "weather"]

    run(check())


def test_without_the_choice_text_is_text_and_tools_may_be_hidden(make_server, run):
    template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}>"

    async def check():
        for hides, prompt in ((False, "weather noop >"), (True, ">")):
            flags = {"chat_template": template, "exclude_tools_when_tool_choice_none": hides, **AUTO}
            server = await make_server(NOOP + EOS, LONG, **flags)
            answer, _ = await both(server, tools=TOOLS, tool_choice="none", return_prompt_text=True)
            assert answer["prompt_text"] == prompt
            assert plain(answer["choices"][0])[0] == {"content": NOOP, "reasoning": None, "tool_calls": []}

    run(check())


def test_allowed_tools_are_the_only_ones_the_model_sees(make_server, run):
    template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}>"

    async def check():
        server = await make_server(NOOP + EOS, LONG, chat_template=template, **AUTO)
        one = {"type": "function", "function": {"name": "noop"}}
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [one]}}
        answer, _ = await both(server, tools=TOOLS, tool_choice=choice, return_prompt_text=True)
        assert answer["prompt_text"] == "noop >"
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        choice["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "other"}}]
        refused = await server.post(PATH, {"messages": USER, "tools": TOOLS, "tool_choice": choice})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")

    run(check())


def bound_to(server):
    """The schema the newest request's answer is held to."""
    return json.loads(server.engine.requests[-1].sampling_params.structured_outputs.json)


def test_a_required_call_is_bound_to_the_tools_schemas(make_server, run):
    text = f'[{{"name": "weather", "parameters": {ARGUMENTS}}}, {{"name": "noop", "parameters": {{}}}}]'

    async def check():
        server = await make_server(text + EOS, LONG)
        answer, _ = await both(server, tools=TOOLS, tool_choice="required")
        message, reason = plain(answer["choices"][0])
        assert reason == "tool_calls"
        assert message["content"] is None
        assert message["tool_calls"] == [
            {"name": "weather", "arguments": ARGUMENTS}, {"name": "noop", "arguments": "{}"}]  # fmt: skip
        schema = bound_to(server)
        assert schema["minItems"] == 1
        assert schema["$defs"] == {"place": {"type": "string"}}
        names = [option["properties"]["name"]["enum"] for option in schema["items"]["anyOf"]]
        assert names == [["weather"], ["noop"]]
        await both(server, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        assert bound_to(server)["maxItems"] == 1

    run(check())


def test_a_named_call_is_bound_to_its_parameters(make_server, run):
    async def check():
        server = await make_server(ARGUMENTS + EOS, LONG)
        named = {"type": "function", "function": {"name": "weather"}}
        answer, _ = await both(server, tools=TOOLS, tool_choice=named)
        message, reason = plain(answer["choices"][0])
        assert reason == "stop"
        assert message == {"content": None, "reasoning": None,
                           "tool_calls": [{"name": "weather", "arguments": ARGUMENTS}]}  # fmt: skip
        assert bound_to(server) == {**TOOLS[0]["function"]["parameters"], "additionalProperties": False}
        named["function"]["name"] = "other"
        refused = await server.post(PATH, {"messages": USER, "tools": TOOLS, "tool_choice": named})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")

    run(check())


# -- reasoning -------------------------------------------------------------------------------------


def reasons(name, **more):
    return {"config": {**LONG, "structured_outputs_config__reasoning_parser": name, **more}}


def test_reasoning_and_calls_together(make_server, run):
    async def check():
        text = f"<think>\nWhat now? ☃\n</think>\n\nLet me see.\n{CALL}{EOS}"
        server = await make_server(text, **reasons("qwen3"), **AUTO)
        answer, _ = await both(server, tools=TOOLS)
        message, reason = plain(answer["choices"][0])
        assert (message["reasoning"], message["content"], reason) == ("What now? ☃", "Let me see.", "tool_calls")
        assert message["tool_calls"][0]["name"] == "weather"
        details = answer["usage"]["completion_tokens_details"]
        assert 10 < details["reasoning_tokens"] < answer["usage"]["completion_tokens"]
        answer, chunks = await both(server, tools=TOOLS, include_reasoning=False)
        assert answer["choices"][0]["message"]["reasoning"] is None
        assert answer["choices"][0]["message"]["content"] == "Let me see."
        assert not any("reasoning" in chunk["choices"][0]["delta"] for chunk in chunks)

    run(check())


def test_a_stream_counts_reasoning_at_its_end(make_server, run):
    async def check():
        server = await make_server(f"<think>abc</think>d{EOS}", **reasons("qwen3"))
        *_, usage = await server.events(PATH, messages=USER, stream_options={"include_usage": True})
        answer = await server.chat()
        assert {**usage["usage"], "prompt_tokens_details": None} == answer["usage"]
        assert usage["usage"]["completion_tokens_details"]["reasoning_tokens"] >= 3

    run(check())


TEMPLATE = "{{ '<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '<think>\\n' if opens else '>' }}"


@pytest.mark.parametrize(
    ("kwargs", "text", "reasoning", "content"),
    [
        ({"enable_thinking": False}, "a </think> b", None, "a </think> b"),
        ({"opens": True}, "a\n</think>\nb", "a", "b"),
        ({}, "<think>a</think>b", "a", "b"),
        ({}, "no thought", None, "no thought"),
        ({"opens": True}, "cut off", "cut off", None),
    ],
)
def test_what_the_template_began_counts(make_server, run, kwargs, text, reasoning, content):
    async def check():
        server = await make_server(text + EOS, chat_template=TEMPLATE, **reasons("qwen3"))
        answer, _ = await both(server, chat_template_kwargs=kwargs)
        message, _ = plain(answer["choices"][0])
        assert (message["reasoning"], message["content"]) == (reasoning, content)

    run(check())


def test_the_engine_hears_of_reasoning_in_front_of_structured_output(make_server, run):
    async def check():
        server = await make_server(f"<think>a</think>{ARGUMENTS}{EOS}", **reasons("qwen3"))
        seen = []
        generate = server.engine.generate
        server.engine.generate = lambda *args, **given: seen.append(given) or generate(*args, **given)
        named = {"type": "function", "function": {"name": "weather"}}
        kwargs = {"enable_thinking": True}
        answer, _ = await both(server, tools=TOOLS, tool_choice=named, chat_template_kwargs=kwargs)
        assert plain(answer["choices"][0])[0]["tool_calls"][0]["arguments"] == ARGUMENTS
        assert seen[0]["reasoning_parser_kwargs"] == {"chat_template_kwargs": kwargs}

    run(check())


def test_marks_that_are_special_tokens_are_seen(make_server, run, tokenizer):
    async def check():
        server = await make_server("hello" + EOS, LONG, **AUTO)
        await server.chat(tools=TOOLS)
        assert server.engine.requests[-1].sampling_params.skip_special_tokens
        tokenizer.backend.add_special_tokens(["<tool_call>"])
        tokenizer.special_ids = tokenizer.special_ids | {tokenizer.backend.token_to_id("<tool_call>")}
        await server.chat(tools=TOOLS)
        assert not server.engine.requests[-1].sampling_params.skip_special_tokens

    original = tokenizer.backend.to_str(), tokenizer.special_ids
    try:
        run(check())
    finally:
        tokenizer.backend = type(tokenizer.backend).from_str(original[0])
        tokenizer.special_ids = original[1]


# -- parsers that fail -----------------------------------------------------------------------------


class RaisingTools(ToolParser):
    def extract_tool_calls(self, model_output, request):
        raise RuntimeError("not today")

    def extract_tool_calls_streaming(self, *args):
        raise RuntimeError("not today")


class RaisingReasoning(ReasoningParser):
    def is_reasoning_end(self, input_ids):
        return False

    def extract_reasoning(self, model_output, request):
        return 1 / 0

    def extract_reasoning_streaming(self, *args):
        return 1 / 0


@pytest.mark.parametrize(
    ("key", "cls", "flags"),
    [
        ("tool_parsers", RaisingTools, {"enable_auto_tool_choice": True, "tool_call_parser": "bad"}),
        ("reasoning_parsers", RaisingReasoning, reasons("bad")),
    ],
)
def test_a_parser_that_raises_ends_its_request_alone(make_server, run, key, cls, flags):
    async def check():
        server = await make_server("hello" + EOS, **flags)
        answer = await server.post(PATH, {"messages": USER, "tools": TOOLS, "tool_choice": tools})
        assert answer.status_code == 500
        assert f"parser 'bad' failed: {raised}" in answer.json()["error"]["message"]
        last = (await server.events(PATH, messages=USER, tools=TOOLS, tool_choice=tools))[-1]
        assert "'bad'" in last["error"]["message"]
        assert (await server.complete(prompt="a"))["choices"][0]["text"] == "hello"

    tools, raised = ("auto", "RuntimeError: not today") if "tool" in key else ("none", "ZeroDivisionError")
    with registry(key).isolated():
        registry(key).register("bad", cls)
        run(check())


# -- flags -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"enable_auto_tool_choice": True}, "add --tool-call-parser NAME.*hermes"),
        ({"tool_call_parser": "hermess"}, "--tool-call-parser 'hermess' is not registered.*did you mean 'hermes'"),
        ({"reasoning_parser": "qwen33"}, "--reasoning-parser 'qwen33' is not registered.*did you mean 'qwen3'"),
    ],
)
def test_names_that_cannot_be_are_errors_of_the_start(flags, says):
    with pytest.raises(ConfigError, match=says):
        check_parsers(Namespace(**flags))


def test_a_parser_without_methods_is_an_error_of_the_start():
    with registry("tool_parsers").isolated():
        registry("tool_parsers").register("empty", type("Empty", (ToolParser,), {}))
        with pytest.raises(ConfigError, match="implements neither of extract_tool_calls"):
            check_parsers(Namespace(tool_call_parser="empty"))


def test_auto_needs_the_flags(make_server, run):
    async def check():
        for flags in ({}, {"tool_call_parser": "hermes"}):
            server = await make_server(**flags)
            refused = await server.post(PATH, {"messages": USER, "tools": TOOLS})
            assert refused.status_code == 400
            assert "--enable-auto-tool-choice" in refused.json()["error"]["message"]

    run(check())


def test_calls_and_their_results_reach_the_template(make_server, run):
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}"
        "{{ m.tool_call_id }}{{ m.reasoning_content }};{% endfor %}"
    )
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": "Oslo"})}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]

    async def check():
        server = await make_server("hello" + EOS, LONG, chat_template=template, **AUTO)
        answer = await server.chat(messages=messages, tools=TOOLS, return_prompt_text=True)
        assert answer["prompt_text"] == "user:hi;assistant:weather(Oslo)hm;tool:rainc1;"

    run(check())


STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]


def test_strict_tools_bind_the_calls_the_model_makes_by_itself(make_server, run):
    async def check():
        server = await make_server(f"Well. {CALL}{EOS}", LONG, **AUTO)
        answer = await server.chat(tools=STRICT)
        tag = json.loads(server.engine.requests[-1].sampling_params.structured_outputs.structural_tag)
        assert tag["triggers"] == ["<tool_call>"]
        weather, noop = tag["structures"]
        assert weather["begin"] == '<tool_call>\n{"name": "weather", "arguments": '
        assert weather["schema"] == {**STRICT[0]["function"]["parameters"], "additionalProperties": False}
        assert noop["schema"] == {"type": "object"}
        assert plain(answer["choices"][0])[0]["tool_calls"] == [{"name": "weather", "arguments": ARGUMENTS}]
        # Not asked for, or demanded anyway.
        for body in ({"tools": TOOLS}, {"tools": STRICT, "tool_choice": "none"}):
            await server.chat(**body)
            assert server.engine.requests[-1].sampling_params.structured_outputs is None
        await server.chat(tools=STRICT, tool_choice="required")
        assert server.engine.requests[-1].sampling_params.structured_outputs.json

    run(check())


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_strict_is_refused_where_it_cannot_be_kept(make_server, run, path):
    tools = {
        "chat/completions": STRICT,
        "responses": [{"type": "function", **STRICT[0]["function"]}],
        "messages": [{"name": "weather", "input_schema": {"type": "object"}, "strict": True}],
    }[path]
    place = "tools.0.function.strict" if path == "chat/completions" else "tools.0.strict"
    bound = {
        "chat/completions": {"response_format": {"type": "json_object"}},
        "responses": {"text": {"format": {"type": "json_object"}}},
        "messages": {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
    }[path]
    body = {"messages": USER, "max_tokens": 5, "tools": tools}
    if path == "responses":
        body = {"input": "hi", "tools": tools}

    async def check():
        pythonic = await make_server("hi", LONG, enable_auto_tool_choice=True, tool_call_parser="pythonic")
        await refused(pythonic, body, "'pythonic' cannot be held to a schema")
        await refused(await make_server("hi", LONG, **AUTO), {**body, **bound}, "exclude each other")

    async def refused(server, body, what):
        answer = await server.post(f"/v1/{path}", body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert what in error["message"]
        assert error.get("param", place) == place
        assert place in error["message"] or "param" in error

    run(check())
