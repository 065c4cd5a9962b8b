"""/v1/messages against a scripted engine: Anthropic's shapes in, out and streamed."""

from __future__ import annotations

import json

import pytest

EOS = "<|end|>"
PATH = "/v1/messages"
USER = [{"role": "user", "content": "hi"}]
TOOL = {
    "name": "look",
    "description": "d",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}


@pytest.fixture
def make(make_server):
    async def build(script="hello world" + EOS, reasoning="", **flags):
        config = {"model_config__max_model_len": 4096, "structured_outputs_config__reasoning_parser": reasoning}
        return await make_server(script=script, config=config, **flags)

    return build


async def asked(server, **body):
    answer = await server.post(PATH, {"model": "tiny", "max_tokens": 30, "messages": USER, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def events_of(server, **body):
    body = {"model": "tiny", "max_tokens": 30, "messages": USER, "stream": True, **body}
    answer = await server.post(PATH, body)
    assert answer.status_code == 200, answer.text
    made = []
    for part in answer.text.strip().split("\n\n"):
        kind, data = part.split("\n")
        made.append(json.loads(data.removeprefix("data: ")))
        assert made[-1]["type"] == kind.removeprefix("event: ")
    return made


def put_together(events) -> list[dict]:
    """What a client makes of a stream; also checks that blocks are opened, filled and closed one after the other."""
    blocks, opened = [], None
    for event in events:
        if event["type"] == "content_block_start":
            assert opened is None
            opened = event["index"]
            assert opened == len(blocks)
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            assert event["index"] == opened
            delta, block = event["delta"], blocks[-1]
            if delta["type"] == "input_json_delta":
                block["json"] = block.get("json", "") + delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif event["type"] == "content_block_stop":
            assert event["index"] == opened
            opened = None
    assert opened is None
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("json", "{}"))
    return blocks


def test_the_answer_has_anthropics_shape(make, run):
    async def check():
        answer = await asked(await make())
        assert answer["id"].startswith("msg_")
        assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
        assert answer["content"] == [{"type": "text", "text": "hello world"}]
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
        assert answer["usage"]["output_tokens"] == 3
        assert answer["usage"]["input_tokens"] > 0

    run(check())


def test_why_an_answer_ends(make, run):
    async def check():
        server = await make()
        assert (await asked(server, max_tokens=2))["stop_reason"] == "max_tokens"
        stopped = await asked(server, stop_sequences=["wor"])
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "wor")
        assert stopped["content"][0]["text"] == "hello "

    run(check())


def test_a_stream_is_the_answer_in_pieces(make, run):
    async def check():
        server = await make()
        server.engine.pace_s = 0.002
        events = await events_of(server)
        assert put_together(events) == [{"type": "text", "text": "hello world"}]
        kinds = [event["type"] for event in events]
        assert kinds[0] == "message_start"
        assert kinds[-2:] == ["message_delta", "message_stop"]
        assert kinds.count("content_block_delta") > 1
        assert events[0]["message"]["content"] == []
        assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        assert events[-2]["usage"]["output_tokens"] == 3

    run(check())


def test_what_was_said_reaches_the_template(make, run):
    async def check():
        server = await make()
        system = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]
        messages = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        ]
        await asked(server, system=system, messages=messages)
        prompt = server.engine.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)
        assert prompt == "<|system|>be\nbrief\n<|user|>q\n<|assistant|>a\n<|user|>one\ntwo\n<|assistant|>"
        counted = await server.post(PATH + "/count_tokens", {"model": "tiny", "messages": messages, "system": system})
        assert counted.json() == {"input_tokens": len(server.engine.requests[-1].prompt_token_ids)}

    run(check())


CALLS = "see" + "".join(
    f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>' for arguments in ('{"at": "x"}', "{}")
)


def test_calls_are_blocks_whole_and_streamed(make, run):
    async def check():
        server = await make(CALLS + EOS, enable_auto_tool_choice=True, tool_call_parser="hermes")
        answer = await asked(server, tools=[TOOL], max_tokens=200)
        text, first, second = answer["content"]
        assert text == {"type": "text", "text": "see"}
        assert (first["type"], first["name"], first["input"]) == ("tool_use", "look", {"at": "x"})
        assert (second["name"], second["input"]) == ("look", {})
        assert first["id"] != second["id"]
        assert answer["stop_reason"] == "tool_use"
        streamed = put_together(await events_of(server, tools=[TOOL], max_tokens=200))
        assert [{**block, "id": ""} for block in streamed] == [{**block, "id": ""} for block in answer["content"]]

    run(
        check(),
    )


def test_thoughts_are_blocks_and_results_go_back(make, run):
    async def check():
        server = await make("<think>hm</think>yes" + EOS, reasoning="qwen3")
        answer = await asked(server)
        assert answer["content"] == [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "yes"},
        ]
        assert put_together(await events_of(server)) == answer["content"]
        call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
        history = [
            *USER,
            {"role": "assistant", "content": [*answer["content"], call]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "seen"}]},
        ]  # fmt: skip
        await asked(server, messages=history)
        prompt = server.engine.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)
        assert prompt.endswith("<|assistant|>yes\n<|tool|>seen\n<|assistant|>")

    run(check())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "video"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text must be a text"),
        ({"messages": [{"role": "user", "content": [3]}]}, "a block must be an object"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "needs a name"),
        ({"tools": [TOOL]}, "--enable-auto-tool-choice"),
        ({"model": "other"}, "does not exist"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_cannot_be_done_is_refused_in_anthropics_shape(make, run, body, said):
    async def check():
        server = await make()
        for stream in (False, True):
            sent = {"model": "tiny", "max_tokens": 5, "messages": USER, "stream": stream, **body}
            answer = await server.post(PATH, sent)
            status, kind = (404, "not_found_error") if body.get("model") else (400, "invalid_request_error")
            assert answer.status_code == status
            assert answer.json()["type"] == "error"
            assert answer.json()["error"]["type"] == kind
            assert said in answer.json()["error"]["message"]

    run(check())


def test_a_failure_in_the_middle_is_an_event(make, ids, run):
    async def check():
        server = await make(lambda prompt, index: [*ids("ab"), RuntimeError("broken")])
        server.engine.pace_s = 0.002
        events = await events_of(server)
        assert events[-1]["type"] == "error"
        assert events[-1]["error"]["type"] == "api_error"
        assert "message_stop" not in {event["type"] for event in events}

    run(check())


def test_the_key_may_come_as_anthropics_clients_send_it(make, run):
    async def check():
        server = await make(api_key=["secret"])
        body = {"model": "tiny", "max_tokens": 5, "messages": USER}
        assert (await server.post(PATH, body, headers={"x-api-key": "secret"})).status_code == 200
        for headers in ({"x-api-key": "wrong"}, {}, {"x-api-key": "secret", "authorization": "Bearer wrong"}):
            answer = await server.post(PATH, body, headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")

    run(check())


def test_a_call_that_was_named_waits_for_its_result_too(make, run):
    async def check():
        server = await make('{"at": "x"}' + EOS)
        choice = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "look"}}
        answer = await asked(server, **choice)
        assert [block["type"] for block in answer["content"]] == ["tool_use"]
        assert answer["stop_reason"] == "tool_use"
        assert (await events_of(server, **choice))[-2]["delta"]["stop_reason"] == "tool_use"

    run(check())


def test_an_answer_that_the_client_began_goes_on(make, run):
    async def check():
        server = await make()
        await asked(server, messages=[*USER, {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}])
        prompt = server.engine.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)
        assert prompt == "<|user|>hi\n<|assistant|>It is"

    run(check())


def test_output_config_binds_the_text(make, run):
    async def check():
        server = await make()
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}}
        await asked(server, output_config={"format": {"type": "json_schema", "schema": schema}})
        assert json.loads(server.engine.requests[-1].sampling_params.structured_outputs.json) == schema

    run(check())


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("stop_sequences", list("abcdefgh"), "stop_sequences takes at most 4 texts, got 8"),
        ("stop_sequences", [""], "stop_sequences must not contain an empty text"),
        ("mcp_servers", [{"type": "url"}], "mcp_servers is not supported by this server"),
        ("container", "c", "container is not supported by this server"),
        ("output_config", {"effort": "high"}, "output_config.effort is not supported"),
        ("top_p", 5, "top_p"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_its_name(make, run, field, value, words):
    async def check():
        server = await make()
        answer = await server.post(PATH, {"model": "tiny", "max_tokens": 3, "messages": USER, field: value})
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
        assert "pydantic" not in answer.text
        assert "ChatCompletionRequest" not in answer.text

    run(check())
