"""Every field with every kind of odd value: answered or refused, never a server fault."""

from __future__ import annotations

import json
import re

import pytest

from hardpoint.front_end.server.protocol.chat import ChatCompletionRequest
from hardpoint.front_end.server.protocol.completions import CompletionRequest
from hardpoint.front_end.server.protocol.messages import CountTokensRequest, MessagesRequest
from hardpoint.front_end.server.protocol.responses import ResponsesRequest
from hardpoint.front_end.server.protocol.tokenize import DetokenizeRequest, TokenizeChatRequest

ODD = [
    "null", "true", "false", "0", "-1", "1", "2", "-2", "0.5", "1e400", "-1e400", "NaN", str(2**63), str(-(2**70)),
    '""', '"text"', '"\\ud800"', '"\\u0000"', "[]", "[null]", "[1, -1]", '["a", ""]', "[[1]]", "[[]]", "{}",
    '{"a": 1}', '{"type": "text"}', '{"a": {"b": [1]}}',
]  # fmt: skip
BASE = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
CHAT = {"messages": BASE["messages"], "max_tokens": 2}
PATHS = {
    "/v1/completions": (CompletionRequest, BASE),
    "/v1/chat/completions": (ChatCompletionRequest, BASE),
    "/v1/responses": (ResponsesRequest, {"input": "hi", "max_output_tokens": 2}),
    "/v1/messages": (MessagesRequest, CHAT),
    "/v1/messages/count_tokens": (CountTokensRequest, CHAT),
    "/tokenize": (TokenizeChatRequest, {"messages": BASE["messages"]}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}
# Words that only fields have: in a message about another API's request they would puzzle its client.
NAMES = {name for model, _ in PATHS.values() for name in model.model_fields if "_" in name} | {"response_format"}


@pytest.mark.parametrize("path", PATHS)
def test_no_value_is_a_server_fault(make_server, run, path):
    model, base = PATHS[path]
    fields = {*model.model_fields, *(["prompt"] if path == "/tokenize" else [])}
    foreign = re.compile(rf"\b({'|'.join(sorted(NAMES - fields))})\b")

    async def check():
        server = await make_server()
        faults, answered = [], 0
        for field in model.model_fields:
            for odd in ODD:
                rest = json.dumps({name: value for name, value in base.items() if name != field})
                body = f'{rest[:-1]}{", " if len(rest) > 2 else ""}"{field}": {odd}}}'.encode()
                answer = await server.http.post(path, content=body, headers={"content-type": "application/json"})
                answered += answer.status_code == 200
                if answer.status_code not in (200, 400, 404):
                    faults.append((field, odd, answer.status_code, answer.text[:200]))
                elif answer.status_code == 400:
                    error = answer.json()["error"]
                    named = error.get("param") or field
                    if "param" not in error and not names_one(error["message"], fields):
                        faults.append((field, odd, error))
                    if not error["message"] or named.split(".")[0] not in fields or foreign.search(error["message"]):
                        faults.append((field, odd, error))
        assert not faults
        assert answered > len(model.model_fields), "nearly all is refused: is the base request fine?"
        assert not server.engine.outputs.has_unfinished_requests()

    run(check())


def names_one(message: str, fields: set[str]) -> bool:
    return bool(re.search(rf"\b({'|'.join(fields)})\b", message))


@pytest.mark.parametrize(
    ("path", "rest", "param"),
    [
        ("chat/completions", '"tools": [{"type": "function", "function": {"name": "%s"}}]', "tools.0.function"),
        ("chat/completions", '"structured_outputs": {"json": {"enum": ["x", "%s"]}}', "structured_outputs.json.enum"),
        ("chat/completions", '"metadata": {"%s": 1}', "metadata"),
        ("responses", '"input": "hi", "metadata": {"a": "%s"}', "metadata.a"),
        ("messages", '"tools": [{"name": "f", "input_schema": {"%s": {}}}]', "tools.0.input_schema"),
    ],
)
def test_half_a_surrogate_pair_is_refused_wherever_it_stands(make_server, run, path, rest, param):
    async def check():
        server = await make_server(config={"model_config__max_model_len": 4096})
        base = json.dumps({"model": "tiny", "messages": BASE["messages"], "max_tokens": 2})[:-1]
        for text in ("\\ud800", "\\uDE00 b"):
            answer = await posted(server, f"{base}, {rest % text}}}")
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert "surrogate" in error["message"]
            assert path == "messages" or error["param"].startswith(param)
        pair = "a \\ud83d\\ude00"
        assert "surrogate" not in (await posted(server, f"{base}, {rest % pair}}}")).text

    async def posted(server, body):
        return await server.http.post(
            f"/v1/{path}", content=body.encode(), headers={"content-type": "application/json"}
        )

    run(check())


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"type": "function", "name": "f"}
ODD_PARTS = [
    ("chat", {"messages": [{"role": "user", "content": [{"type": ["a"], "text": "x"}]}]}, "messages.0.content.0"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": {"a": 1}}]}]}, "messages.0.content.0"),
    ("chat", {"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages.0.tool_calls"),
    ("chat", {"messages": [{"role": "assistant", "tool_calls": [CALL, 5]}]}, "messages.0.tool_calls.1"),
    ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages.0.tool_calls.0"),
    ("chat", {"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name"),
    ("responses", {"input": [{"type": "reasoning", "content": "x"}]}, "input.0.content"),
    ("responses", {"input": [{"type": "reasoning", "content": [5]}]}, "input.0.content"),
    ("responses", {"input": [{"type": "reasoning", "content": [{"text": 5}]}]}, "input.0.content.0.text"),
    ("responses", {"tool_choice": "required"}, "tool_choice"),
    ("responses", {"tool_choice": 5, "tools": [FUNCTION]}, "tool_choice"),
    ("responses", {"tool_choice": "any", "tools": [FUNCTION]}, "tool_choice"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), ODD_PARTS, ids=range(len(ODD_PARTS)))
def test_odd_parts_are_refused_by_their_place(make_server, run, path, body, param):
    base = {"input": "hi"} if path == "responses" else {"messages": BASE["messages"]}
    path = {"chat": "chat/completions"}.get(path, path)

    async def check():
        server = await make_server(enable_auto_tool_choice=True, tool_call_parser="hermes")
        answer = await server.post(f"/v1/{path}", {**base, **body})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param
        assert not re.search(r"unhashable|Param\b|ChatCompletion", error["message"])

    run(check())
