"""/v1/responses against a scripted engine: items in, items out, streamed, kept, continued, cancelled."""

from __future__ import annotations

import asyncio
import json

import pytest

from hardpoint.errors import ConfigError

EOS = "<|end|>"
PATH = "/v1/responses"
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}


@pytest.fixture
def make(make_server):
    async def build(script="hello world" + EOS, reasoning="", **flags):
        config = {"model_config__max_model_len": 4096, "structured_outputs_config__reasoning_parser": reasoning}
        return await make_server(script=script, config=config, **flags)

    return build


@pytest.fixture
def stored(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")


async def asked(server, **body):
    answer = await server.post(PATH, {"model": "tiny", "input": "hi", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def read(text: str) -> list[dict]:
    events = []
    for part in text.strip().split("\n\n"):
        kind, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert events[-1]["type"] == kind.removeprefix("event: ")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def events_of(server, **body):
    answer = await server.post(PATH, {"model": "tiny", "input": "hi", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    return read(answer.text)


def items_of(events) -> list[dict]:
    """The items a client puts together from deltas, which must be those that the stream says are done."""
    texts: dict[str, str] = {}
    done = []
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        elif event["type"] == "response.output_item.done":
            item = event["item"]
            said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            assert texts.get(item["id"], "") == said
            done.append(item)
    return done


def without_ids(items):
    return [{**item, "id": "", **({"call_id": ""} if "call_id" in item else {})} for item in items]


def prompt_of(server, which: int = -1) -> str:
    return server.engine.tokenizer.decode(server.engine.requests[which].prompt_token_ids)


def test_the_answer_is_a_response_with_a_message(make, run):
    async def check():
        answer = await asked(await make(), instructions="be brief", metadata={"a": "b"})
        assert answer["id"].startswith("resp_")
        assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "tiny")
        (message,) = answer["output"]
        assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
        assert message["content"] == [{"type": "output_text", "text": "hello world", "annotations": [], "logprobs": []}]
        assert (answer["usage"]["output_tokens"], answer["metadata"]) == (3, {"a": "b"})
        assert (answer["instructions"], answer["store"], answer["error"]) == ("be brief", False, None)

    run(check())


def test_an_answer_that_is_cut_is_incomplete(make, run):
    async def check():
        server = await make()
        answer = await asked(server, max_output_tokens=2)
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert (await events_of(server, max_output_tokens=2))[-1]["type"] == "response.incomplete"

    run(check())


def test_a_stream_is_the_answer_in_pieces(make, run):
    async def check():
        server = await make()
        server.engine.pace_s = 0.002
        events = await events_of(server)
        kinds = [event["type"] for event in events]
        assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                             "response.content_part.added"]  # fmt: skip
        assert kinds[-4:] == ["response.output_text.done", "response.content_part.done",
                              "response.output_item.done", "response.completed"]  # fmt: skip
        assert kinds.count("response.output_text.delta") > 1
        assert items_of(events) == events[-1]["response"]["output"]
        assert events[-1]["response"]["usage"]["output_tokens"] == 3

    run(check())


CALLS = '<think>hm</think>see<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'


def test_thoughts_and_calls_are_items_and_go_back(make, run):
    async def check():
        server = await make(CALLS + EOS, "qwen3", enable_auto_tool_choice=True, tool_call_parser="hermes")
        answer = await asked(server, tools=[TOOL])
        thought, message, call = answer["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
        assert message["content"][0]["text"] == "see"
        assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "look", {"at": "x"})
        streamed = items_of(await events_of(server, tools=[TOOL]))
        assert without_ids(streamed) == without_ids(answer["output"])
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "seen"}
        history = [{"role": "user", "content": "hi"}, *answer["output"], result]
        await asked(server, tools=[TOOL], input=history)
        assert prompt_of(server) == "<|user|>hi\n<|assistant|>see\n<|tool|>seen\n<|assistant|>"

    run(check())


def test_a_stored_response_is_fetched_and_continued(make, run, stored):
    async def check():
        server = await make()
        first = await asked(server, instructions="old", input="q")
        assert first["store"] is True
        fetched = await server.http.get(f"{PATH}/{first['id']}")
        assert fetched.json() == first
        second = await asked(server, previous_response_id=first["id"], instructions="new", input="and")
        assert second["previous_response_id"] == first["id"]
        # Instructions are of one response only.
        assert prompt_of(server) == "<|system|>new\n<|user|>q\n<|assistant|>hello world\n<|user|>and\n<|assistant|>"
        unkept = await asked(server, store=False)
        for response_id in (unkept["id"], "resp_unknown"):
            missing = await server.http.get(f"{PATH}/{response_id}")
            assert (missing.status_code, missing.json()["error"]["type"]) == (404, "NotFoundError")

    run(check())


async def ends(server, response_id) -> dict:
    for _ in range(6000):
        answer = (await server.http.get(f"{PATH}/{response_id}")).json()
        if answer["status"] not in ("queued", "in_progress"):
            return answer
        await asyncio.sleep(0.01)
    raise AssertionError("it does not end")


def test_a_response_in_the_background_is_followed_from_anywhere(make, run, stored):
    async def check():
        server = await make()
        server.engine.pace_s = 0.01
        begun = await asked(server, background=True)
        assert (begun["status"], begun["output"]) == ("queued", [])
        events = read((await server.http.get(f"{PATH}/{begun['id']}", params={"stream": True})).text)
        assert events[-1]["type"] == "response.completed"
        answer = await ends(server, begun["id"])
        assert (answer["status"], answer["output"]) == ("completed", items_of(events))
        rest = await server.http.get(f"{PATH}/{begun['id']}", params={"stream": True, "starting_after": 4})
        assert [json.loads(part.split("\ndata: ")[1]) for part in rest.text.strip().split("\n\n")] == events[5:]

    run(check())


def test_a_response_in_the_background_is_cancelled(make, run, stored):
    async def check():
        server = await make("a" * 500 + EOS)
        server.engine.pace_s = 0.01
        begun = await asked(server, background=True)
        while not server.engine.requests:
            await asyncio.sleep(0.005)
        cancelled = (await server.post(f"{PATH}/{begun['id']}/cancel", None)).json()
        assert cancelled["status"] == "cancelled"
        assert (await server.post(f"{PATH}/{begun['id']}/cancel", None)).json() == cancelled
        assert (await ends(server, begun["id"]))["status"] == "cancelled"
        assert server.engine.aborted == [begun["id"]]
        done = await asked(server, input="x", max_output_tokens=1)
        refused = await server.post(f"{PATH}/{done['id']}/cancel", None)
        assert refused.status_code == 400

    run(check())


@pytest.mark.parametrize("steps", [0, 1, 3, 30])
def test_whoever_follows_sees_how_a_cancelled_response_began_and_ended(make, run, stored, steps):
    async def check():
        server = await make("a" * 500 + EOS)
        server.engine.pace_s = 0.001
        service, held = server.app.state.openai_serving_responses, asyncio.Event()
        if steps == 0:
            server.engine.next_step = held.wait
        begun = await asked(server, background=True)
        followed = asyncio.create_task(server.http.get(f"{PATH}/{begun['id']}", params={"stream": True}))
        while len(service._store.get(begun["id"]).events) < steps:
            await asyncio.sleep(0.001)
        assert (await server.post(f"{PATH}/{begun['id']}/cancel", None)).json()["status"] == "cancelled"
        events = read((await followed).text)
        assert [event["type"] for event in events[:2]] == ["response.created", "response.queued"]
        assert events[0]["response"]["status"] == "queued"
        assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.cancelled", "cancelled")
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        again = await server.http.get(f"{PATH}/{begun['id']}", params={"stream": True})
        assert read(again.text) == events

    run(check())


def test_a_failure_in_the_background_is_the_response(make, ids, run, stored):
    async def check():
        server = await make(lambda prompt, index: [*ids("ab"), RuntimeError("broken")])
        begun = await asked(server, background=True)
        answer = await ends(server, begun["id"])
        assert (answer["status"], answer["error"]["code"]) == ("failed", "server_error")
        refused = await server.post(PATH, {"model": "tiny", "input": "hi"})
        assert refused.status_code == 500

    run(check())


def test_the_store_is_bounded(make, run, stored, monkeypatch):
    monkeypatch.setattr("hardpoint.front_end.server.serving.responses._MOST_KEPT", 3)

    async def check():
        server = await make()
        made = [(await asked(server))["id"] for _ in range(5)]
        found = [(await server.http.get(f"{PATH}/{one}")).status_code for one in made]
        assert found == [404, 404, 200, 200, 200]

    run(check())


def test_several_processes_have_no_common_store(make, run, stored):
    async def check():
        with pytest.raises(ConfigError, match="api-server-count"):
            await make(api_server_count=2)

    run(check())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [3]}, "input.0"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0.type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [TOOL]}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
            "input.0.encrypted_content",
        ),
        ({"include": ["message.output_text.logprobs"]}, "include.0"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(make, run, body, param):
    async def check():
        server = await make()
        answer = await server.post(PATH, {"model": "tiny", "input": "hi", **body})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param

    run(check())
