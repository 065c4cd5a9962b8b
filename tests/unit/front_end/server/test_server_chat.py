"""/v1/chat/completions against a scripted engine."""

from __future__ import annotations

import pytest

from hardpoint.front_end.server.protocol.chat import (
    ChatCompletionLogProbsContent,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    ChatMessage,
)

EOS = "<|end|>"
PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def fields(model):
    return set(model.model_fields)


async def refused(server, **body) -> dict:
    answer = await server.post(PATH, {"messages": USER, **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_answer_has_the_documented_shape(make_server, run):
    async def check():
        server = await make_server()
        answer = await server.chat("hi")
        assert set(answer) == fields(ChatCompletionResponse)
        (choice,) = answer["choices"]
        assert set(choice) == fields(ChatCompletionResponseChoice)
        assert set(choice["message"]) == fields(ChatMessage)
        assert answer["id"].startswith("chatcmpl-")
        assert answer["object"] == "chat.completion"
        assert choice["message"]["role"] == "assistant"
        assert choice["message"]["content"] == "hello world"
        assert choice["message"]["tool_calls"] == []
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        assert answer["usage"]["completion_tokens"] == 3

    run(check())


def test_conversation_is_rendered_by_the_template(make_server, run):
    async def check():
        server = await make_server()
        parts = [{"type": "text", "text": "two"}, {"type": "text", "text": "parts"}]
        messages = [{"role": "system", "content": "be"}, {"role": "user", "content": parts}]
        answer = await server.chat(messages=messages, return_prompt_text=True, return_token_ids=True)
        assert answer["prompt_text"] == "<|system|>be\n<|user|>two\nparts\n<|assistant|>"
        assert server.engine.tokenizer.decode(answer["prompt_token_ids"]) == answer["prompt_text"]

    run(check())


def test_stream_begins_with_the_role_and_ends_with_the_reason(make_server, run):
    async def check():
        server = await make_server()
        server.engine.pace_s = 0.001
        chunks = await server.events(PATH, messages=USER, stream_options={"include_usage": True})
        for chunk in chunks:
            assert set(chunk) <= fields(ChatCompletionStreamResponse)
            assert chunk["object"] == "chat.completion.chunk"
        first, *middle, last, usage = chunks
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "usage" not in first
        assert set(last["choices"][0]) <= fields(ChatCompletionResponseStreamChoice)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in [*middle, last])
        assert text == "hello world"
        assert last["choices"][0]["finish_reason"] == "stop"
        assert last["choices"][0]["stop_reason"] is None
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in middle)
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 3

    run(check())


def test_n_streams_are_told_apart(make_server, ids, run):
    async def check():
        server = await make_server(script=lambda prompt, index: ids("abc"[index] * 3 + EOS))
        chunks = await server.events(PATH, messages=USER, n=3)
        roles = [chunk["choices"][0]["index"] for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
        assert roles == [0, 1, 2]
        texts = [""] * 3
        for chunk in chunks:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
        assert texts == ["aaa", "bbb", "ccc"]
        answer = await server.chat("hi", n=3)
        assert [choice["message"]["content"] for choice in answer["choices"]] == texts

    run(check())


def test_logprobs_have_bytes_and_the_best_candidates(make_server, ids, run):
    async def check():
        server = await make_server(script=lambda prompt, index: ids("é!" + EOS))
        answer = await server.chat("hi", logprobs=True, top_logprobs=2)
        content = answer["choices"][0]["logprobs"]["content"]
        assert all(set(entry) == fields(ChatCompletionLogProbsContent) for entry in content)
        # The two tokens of é are one byte each.
        assert [entry["bytes"] for entry in content[:3]] == [[0xC3], [0xA9], [0x21]]
        for entry in content:
            assert entry["logprob"] == -1.0
            assert [candidate["logprob"] for candidate in entry["top_logprobs"]] == [-0.5, -1.0]
        bare = await server.chat("hi", logprobs=True)
        assert bare["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
        assert (await server.chat("hi"))["choices"][0]["logprobs"] is None

    run(check())


def test_streamed_logprobs_are_those_of_the_answer(make_server, ids, run):
    async def check():
        server = await make_server(script=lambda prompt, index: ids("日本 world" + EOS))
        server.engine.pace_s = 0.001
        body = {"messages": USER, "logprobs": True, "top_logprobs": 1}
        whole = (await server.chat(**body))["choices"][0]["logprobs"]["content"]
        chunks = await server.events(PATH, **body)
        streamed = [
            entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert streamed == whole

    run(check())


def test_echo_and_continuation(make_server, run):
    async def check():
        server = await make_server()
        messages = [*USER, {"role": "assistant", "content": "I say "}]
        body = {"messages": messages, "continue_final_message": True, "echo": True, "return_prompt_text": True}
        answer = await server.chat(**body)
        assert answer["prompt_text"].endswith("<|assistant|>I say ")
        assert answer["choices"][0]["message"]["content"] == "I say hello world"
        chunks = await server.events(PATH, **body)
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "I say hello world"
        error = await refused(server, messages=messages, continue_final_message=True, add_generation_prompt=True)
        assert error["param"] == "continue_final_message"

    run(check())


def test_limit_goes_up_to_the_context(make_server, ids, run):
    async def check():
        server = await make_server(script=lambda prompt, index: ids("hello world" * 60))
        assert (await server.chat("hi"))["usage"]["total_tokens"] == 64
        assert (await server.chat("hi", max_tokens=3))["usage"]["completion_tokens"] == 3
        assert (await server.chat("hi", max_completion_tokens=4, max_tokens=3))["usage"]["completion_tokens"] == 4
        for name in ("max_tokens", "max_completion_tokens"):
            for value in (0, -1, 1000):
                assert (await refused(server, **{name: value}))["param"] == name
        by_config = await make_server(
            script=lambda prompt, index: ids("hello world" * 60),
            config={"model_config__get_diff_sampling_param": lambda: {"max_tokens": 5}},
        )
        assert (await by_config.chat("hi"))["usage"]["completion_tokens"] == 5

    run(check())


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages.0"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": "robot", "content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        (
            [*USER, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages.1.content.0",
        ),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "messages.0.content.0"),
    ],
)
def test_messages_that_cannot_be_read_are_refused_by_place(make_server, run, messages, param):
    async def check():
        assert (await refused(await make_server(), messages=messages))["param"] == param

    run(check())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
        ({"structured_outputs": {"expression": "a"}}, "structured_outputs"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex"),
        ({"guided_regex": "a", "guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ({"media_io_kwargs": {"image": {}}}, "media_io_kwargs"),
        ({"return_token_offsets": True}, "return_token_offsets"),
        ({"watermarking": True}, "watermarking"),
        ({"routed_experts_prompt_start": 2}, "routed_experts_prompt_start"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 50}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "a/b"}, "cache_salt"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "NaN"}}, "logit_bias"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "a\nERROR forged"}, "request_id"),
        ({"request_id": "a" * 257}, "request_id"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(make_server, run, body, param):
    async def check():
        server = await make_server()
        assert (await refused(server, **body))["param"] == param
        assert server.engine.requests == []

    run(check())


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"n": None},
        {"top_logprobs": None},
        {"reasoning_effort": None},
        {"thinking_token_budget": -1},
        {"user": "someone", "metadata": {"a": 1}, "store": False, "service_tier": "auto"},
        {"parallel_tool_calls": False, "include_reasoning": False},
        {"cache_salt": "pepper"},
    ],
)
def test_harmless_values_pass(make_server, run, body):
    async def check():
        assert (await (await make_server()).chat("hi", **body))["choices"][0]["message"]["content"] == "hello world"

    run(check())


def test_template_of_a_request_needs_trust(make_server, run):
    async def check():
        server = await make_server(trust_request_chat_template=True)
        template = "{{ shout }}{{ messages[0].content | upper }}"
        answer = await server.chat(
            "hi", chat_template=template, chat_template_kwargs={"shout": "!"}, return_prompt_text=True
        )
        assert answer["prompt_text"] == "!HI"
        broken = await server.post(PATH, {"messages": USER, "chat_template": "{% for %}"})
        assert (broken.status_code, broken.json()["error"]["param"]) == (400, "chat_template")

    run(check())


def test_flags_give_template_and_its_defaults(make_server, run):
    async def check():
        template = "{{ a }}{{ b }}{{ reasoning_effort }}{{ messages[0].content }}"
        server = await make_server(chat_template=template, default_chat_template_kwargs={"a": "1", "b": "1"})
        body = {"chat_template_kwargs": {"b": "2"}, "reasoning_effort": "low", "return_prompt_text": True}
        assert (await server.chat("x", **body))["prompt_text"] == "12lowx"

    run(check())


def test_response_role_follows_the_flag(make_server, run):
    async def check():
        server = await make_server(response_role="bot")
        assert (await server.chat("hi"))["choices"][0]["message"]["role"] == "bot"
        answer = await server.chat("hi", add_generation_prompt=False)
        assert answer["choices"][0]["message"]["role"] == "user"

    run(check())


def test_cache_salt_reaches_the_engine(make_server, run):
    async def check():
        server = await make_server()
        await server.chat("hi", cache_salt="pepper")
        await server.complete(prompt="hi", cache_salt="salt")
        assert [request.cache_salt for request in server.engine.requests] == ["pepper", "salt"]

    run(check())


def test_long_conversations_are_rendered_beside_the_loop(make_server, run):
    async def check():
        server = await make_server()
        error = await refused(server, messages=[{"role": "user", "content": "x" * 40_000}])
        assert error["param"] == "messages"

    run(check())
