"""/v1/completions against a scripted engine: shapes, limits, echo, log-probabilities."""

from __future__ import annotations

import asyncio

import pytest

from hardpoint.front_end.server.protocol.completions import (
    CompletionLogProbs,
    CompletionResponse,
    CompletionResponseChoice,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)

EOS = "<|end|>"
PATH = "/v1/completions"


def fields(model):
    return set(model.model_fields)


def offsets_fit(text: str, logprobs: dict) -> None:
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(logprobs["token_logprobs"])
    assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"])
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert text[offset:].startswith(token), (offset, token)
    assert "".join(logprobs["tokens"]) == text


def joined(chunks: list) -> tuple[str, dict]:
    """Text and log-probability lists of a one-choice stream."""
    lists: dict[str, list] = {name: [] for name in CompletionLogProbs.model_fields}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                lists[name] += values
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]), lists


async def refused(server, **body) -> dict:
    answer = await server.post(PATH, body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_answer_has_the_documented_shape(make_server, run):
    async def check():
        server = await make_server()
        answer = await server.complete(prompt="hi", max_tokens=8)
        assert set(answer) == fields(CompletionResponse)
        assert set(answer["choices"][0]) == fields(CompletionResponseChoice)
        assert answer["id"].startswith("cmpl-")
        assert answer["object"] == "text_completion"
        assert answer["model"] == "tiny"
        assert answer["service_tier"] is None
        assert answer["usage"] == {
            "prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5,
            "prompt_tokens_details": None, "completion_tokens_details": None,
        }  # fmt: skip
        (choice,) = answer["choices"]
        assert choice["text"] == "hello world"
        assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "stop", None)
        assert choice["logprobs"] is None

    run(check())


def test_stream_has_the_documented_chunks(make_server, run):
    async def check():
        server = await make_server()
        chunks = await server.events(PATH, prompt="hi", max_tokens=8, stream_options={"include_usage": True})
        *body, last = chunks
        for chunk in body:
            assert set(chunk) <= fields(CompletionStreamResponse)
            assert set(chunk["choices"][0]) == fields(CompletionResponseStreamChoice)
            assert chunk["usage"] is None
        assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
        assert joined(body)[0] == "hello world"
        assert [chunk["choices"][0]["finish_reason"] for chunk in body] == [*[None] * (len(body) - 1), "stop"]
        assert "system_fingerprint" in body[-1]
        assert "system_fingerprint" not in body[0]
        assert last["choices"] == []
        assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}

    run(check())


def test_usage_can_come_with_every_chunk(make_server, run):
    async def check():
        server = await make_server()
        server.engine.pace_s = 0.002
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await server.events(PATH, prompt="hi", max_tokens=8, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[0] < counts[-1] == 3
        forced = await make_server(enable_force_include_usage=True)
        assert all(chunk["usage"] for chunk in await forced.events(PATH, prompt="hi", max_tokens=2))

    run(check())


def test_several_prompts_and_outputs_are_numbered(make_server, ids, run):
    async def check():
        server = await make_server(script=lambda prompt, index: ids(f"{len(prompt)}{'ab'[index]}" + EOS))
        answer = await server.complete(prompt=["x", "yyy"], n=2, max_tokens=8)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in answer["choices"]] == ["1a", "1b", "3a", "3b"]
        # A prompt counts once, however many outputs it has.
        assert answer["usage"]["prompt_tokens"] == 4
        assert answer["usage"]["completion_tokens"] == 12
        assert ("check_admission", 4) in [call[:2] for call in server.engine.calls]
        chunks = await server.events(PATH, prompt=["x", "yyy"], n=2, max_tokens=8)
        texts = [""] * 4
        for chunk in chunks:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == ["1a", "1b", "3a", "3b"]

    run(check())


@pytest.mark.parametrize(
    ("prompt", "lengths"), [("ab", [2]), (["ab", "c"], [2, 1]), ([1, 2, 3], [3]), ([[1, 2], [3]], [2, 1])]
)
def test_every_form_of_prompt_is_read(make_server, run, prompt, lengths):
    async def check():
        server = await make_server()
        await server.complete(prompt=prompt)
        assert [len(request.prompt_token_ids) for request in server.engine.requests] == lengths

    run(check())


@pytest.mark.parametrize("prompt", [None, [], [[]], ["a", 1], {"a": 1}, 5, [["a"]], [True], [1.5], ""])
def test_other_prompts_are_refused_by_name(make_server, run, prompt):
    async def check():
        error = await refused(await make_server(), prompt=prompt)
        assert error["param"] == "prompt"
        assert error["code"] == 400

    run(check())


# -- limits (B34) -------------------------------------------------------------------------------------


def long_text(ids):
    return lambda prompt, index: ids("hello world" * 40)


def test_limit_defaults_to_sixteen(make_server, ids, run):
    async def check():
        server = await make_server(script=long_text(ids))
        for body in ({}, {"max_tokens": None}):
            answer = await server.complete(prompt="hi", **body)
            assert answer["usage"]["completion_tokens"] == 16
            assert answer["choices"][0]["finish_reason"] == "length"

    run(check())


@pytest.mark.parametrize("body", [{"max_tokens": 0}, {"max_tokens": -1, "echo": True}, {"max_tokens": -1}])
def test_impossible_limits_are_refused(make_server, run, body):
    async def check():
        assert (await refused(await make_server(), prompt="hi", **body))["param"] == "max_tokens"

    run(check())


def test_limit_is_held_against_the_context(make_server, ids, run):
    async def check():
        server = await make_server(script=long_text(ids))
        fits = await server.complete(prompt="x" * 60, max_tokens=4)
        assert fits["usage"]["total_tokens"] == 64
        # The default is cut to what fits; what the client asks for is not.
        assert (await server.complete(prompt="x" * 60))["usage"]["total_tokens"] == 64
        error = await refused(server, prompt="x" * 60, max_tokens=5)
        assert error["param"] == "max_tokens"
        for length in (64, 65, 5000):
            error = await refused(server, prompt="x" * length)
            assert error["param"] == "prompt"
        assert (await refused(server, prompt="x" * 64, max_tokens=0, echo=True))["param"] == "prompt"

    run(check())


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_gives_the_prompt_back(make_server, run, stream):
    async def check():
        server = await make_server()
        body = {"prompt": "Your answer: Yes", "max_tokens": 0, "echo": True, "logprobs": 1}
        if stream:
            chunks = await server.events(PATH, **body, stream_options={"include_usage": True})
            text, logprobs = joined(chunks)
            reason, usage = chunks[-2]["choices"][0]["finish_reason"], chunks[-1]["usage"]
        else:
            answer = await server.complete(**body)
            (choice,) = answer["choices"]
            text, logprobs, reason, usage = choice["text"], choice["logprobs"], choice["finish_reason"], answer["usage"]
        assert text == "Your answer: Yes"
        assert usage["completion_tokens"] == 0
        assert reason == "length"
        offsets_fit(text, logprobs)
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert all(value == -1.0 for value in logprobs["token_logprobs"][1:])

    run(check())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hello there", "", "naïve — 日本", "hello <|end|> there"])
def test_offsets_fit_echo_and_output(make_server, ids, run, stream, prompt):
    async def check():
        server = await make_server(script=lambda p, i: ids("é日 world, the end" + EOS))
        body = {"prompt": prompt or [7], "max_tokens": 40, "echo": True, "logprobs": 2}
        if stream:
            text, logprobs = joined(await server.events(PATH, **body))
        else:
            (choice,) = (await server.complete(**body))["choices"]
            text, logprobs = choice["text"], choice["logprobs"]
        assert text.startswith(prompt)
        assert text.endswith("é日 world, the end")
        offsets_fit(text, logprobs)
        assert len(logprobs["tokens"]) == len(server.engine.requests[0].prompt_token_ids) + len(
            ids("é日 world, the end" + EOS)
        )

    run(check())


def test_echo_of_each_of_several_prompts(make_server, run):
    async def check():
        server = await make_server()
        answer = await server.complete(prompt=["ab", "cd"], echo=True, n=2, max_tokens=8)
        assert [choice["text"] for choice in answer["choices"]] == [
            "abhello world", "abhello world", "cdhello world", "cdhello world",
        ]  # fmt: skip

    run(check())


# -- log-probabilities --------------------------------------------------------------------------------


def test_logprobs_list_the_chosen_and_the_best(make_server, ids, run):
    async def check():
        server = await make_server()
        (choice,) = (await server.complete(prompt="hi", max_tokens=8, logprobs=2))["choices"]
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["hello", " world", ""]
        assert logprobs["text_offset"] == [0, 5, 11]
        assert logprobs["token_logprobs"] == [-1.0, -1.0, -1.0]
        assert all(len(position) in (2, 3) for position in logprobs["top_logprobs"])
        assert "hello" in logprobs["top_logprobs"][0]
        (zero,) = (await server.complete(prompt="hi", max_tokens=8, logprobs=0))["choices"]
        assert [len(position) for position in zero["logprobs"]["top_logprobs"]] == [1, 1, 1]

    run(check())


def test_tokens_can_be_named_by_id(make_server, ids, run):
    async def check():
        server = await make_server()
        (choice,) = (await server.complete(prompt="hi", logprobs=1, return_tokens_as_token_ids=True))["choices"]
        assert choice["logprobs"]["tokens"][:2] == [f"token_id:{i}" for i in ids("hello world")]
        by_flag = await make_server(return_tokens_as_token_ids=True)
        (choice,) = (await by_flag.complete(prompt="hi", logprobs=1))["choices"]
        assert choice["logprobs"]["tokens"][0].startswith("token_id:")

    run(check())


def test_prompt_logprobs_are_by_id_with_rank(make_server, ids, run):
    async def check():
        server = await make_server()
        (choice,) = (await server.complete(prompt="hello", prompt_logprobs=1, max_tokens=1))["choices"]
        assert choice["prompt_logprobs"] == [None]
        (choice,) = (await server.complete(prompt="hi", prompt_logprobs=1, max_tokens=1))["choices"]
        first, second = choice["prompt_logprobs"]
        assert first is None
        assert second[str(ids("i")[0])] == {"logprob": -1.0, "rank": 2, "decoded_token": "i"}
        assert (await refused(server, prompt="hi", prompt_logprobs=1, stream=True))["param"] == "prompt_logprobs"
        assert (await refused(server, prompt="hi", logprob_token_ids=[5]))["param"] == "logprob_token_ids"

    run(check())


def test_too_many_logprobs_are_refused(make_server, run):
    async def check():
        server = await make_server()
        assert (await refused(server, prompt="hi", logprobs=21))["param"] == "logprobs"
        assert (await refused(server, prompt="hi", logprobs=-2))["param"] == "logprobs"

    run(check())


def test_token_ids_are_returned_when_asked(make_server, ids, run):
    async def check():
        server = await make_server()
        (choice,) = (await server.complete(prompt="hi", return_token_ids=True))["choices"]
        assert choice["prompt_token_ids"] == ids("hi")
        assert choice["token_ids"] == ids("hello world" + EOS)
        chunks = await server.events(PATH, prompt="hi", return_token_ids=True)
        assert chunks[0]["choices"][0]["prompt_token_ids"] == ids("hi")
        assert all(chunk["choices"][0]["prompt_token_ids"] is None for chunk in chunks[1:])
        assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == ids("hello world" + EOS)

    run(check())


# -- stop strings (B31) -------------------------------------------------------------------------------

TEXT = "hello the world, naïve 日本 stop"
STOPS = {
    "spans three tokens": "lo the wor",
    "starts inside a token": "orld",
    "one character": ",",
    "never completes": "hello the world!",
    "overlapping": ["the world", "world, n"],
    "not ASCII": "日本",
    "the last characters": "top",
}


def expected(stops, include: bool) -> tuple[str, str, str | None]:
    found = [(TEXT.find(stop) + len(stop), TEXT.find(stop), stop) for stop in stops if stop in TEXT]
    if not found:
        return TEXT, "stop", None
    end, begin, stop = min(found)
    return TEXT[: end if include else begin], "stop", stop


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("name", STOPS)
def test_stop_strings_cut_streams_and_answers_alike(make_server, ids, run, name, include):
    async def check():
        server = await make_server(script=lambda p, i: ids(TEXT + EOS))
        server.engine.pace_s = 0.0005
        stop = STOPS[name]
        body = {"prompt": "hi", "max_tokens": 60, "stop": stop, "include_stop_str_in_output": include}
        text, reason, matched = expected([stop] if isinstance(stop, str) else stop, include)
        (choice,) = (await server.complete(**body))["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, reason, matched)
        chunks = await server.events(PATH, **body)
        assert joined(chunks)[0] == text
        last = chunks[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == (reason, matched)
        assert all(chunk["choices"][0]["text"] for chunk in chunks[:-1]), "an empty chunk"

    run(check())


def test_odd_stop_values_are_refused(make_server, run):
    async def check():
        server = await make_server()
        for stop in ("", ["a", ""], ["a"] * 5, [1], {"a": 1}):
            assert (await refused(server, prompt="hi", stop=stop))["param"] == "stop"
        await server.complete(prompt="hi", stop=None)

    run(check())


# -- what reaches the engine --------------------------------------------------------------------------


def test_sampling_fields_reach_the_engine(make_server, run):
    async def check():
        server = await make_server()
        asked = {
            "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "frequency_penalty": 0.3,
            "presence_penalty": 0.4, "repetition_penalty": 1.1,
            "seed": 11, "min_tokens": 1, "ignore_eos": True, "skip_special_tokens": False,
            "stop_token_ids": [5], "allowed_token_ids": [1, 2], "bad_words": ["bad"], "logprobs": 3,
        }  # fmt: skip
        await server.complete(prompt="hi", max_tokens=2, logit_bias={"3": 120}, vllm_xargs={"mine": 4}, **asked)
        params = server.engine.requests[0].sampling_params
        assert {name: getattr(params, name) for name in asked} == asked
        assert params.logit_bias == {3: 100.0}
        assert params.extra_args == {"mine": 4}

    run(check())


def test_generation_config_fills_in_what_is_not_said(make_server, run):
    async def check():
        server = await make_server(
            config={"model_config__get_diff_sampling_param": lambda: {"temperature": 0.25, "top_k": 3, "max_tokens": 2}}
        )
        await server.complete(prompt="hi", top_k=9)
        params = server.engine.requests[0].sampling_params
        assert (params.temperature, params.top_k, params.top_p) == (0.25, 9, 1.0)
        assert params.max_tokens == 16

    run(check())


def test_headers_give_id_priority_session_and_rank(make_server, run):
    async def check():
        server = await make_server(config={"scheduler_config__policy": "priority"})
        headers = {"X-Request-Id": "mine", "X-Vllm-Priority": "-3", "X-Session-ID": "s1", "X-data-parallel-rank": "0"}
        answer = await server.post(PATH, {"prompt": "hi", "priority": 9, "session_id": "no"}, headers=headers)
        assert answer.json()["id"] == "cmpl-mine"
        request = server.engine.requests[0]
        assert (request.priority, request.session_id, request.data_parallel_rank) == (-3, "s1", 0)
        for name, value in (("X-Vllm-Priority", "high"), ("X-data-parallel-rank", "9" * 30), ("X-Request-Id", "a b")):
            answer = await server.post(PATH, {"prompt": "hi"}, headers={name: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)

    run(check())


def test_priority_needs_the_policy(make_server, run):
    async def check():
        server = await make_server()
        assert (await refused(server, prompt="hi", priority=1))["param"] == "priority"

    run(check())


def test_two_requests_may_carry_one_id(make_server, run):
    async def check():
        server = await make_server()
        server.engine.pace_s = 0.002
        headers = {"X-Request-Id": "same"}
        both = await asyncio.gather(*(server.post(PATH, {"prompt": "hi"}, headers=headers) for _ in range(2)))
        assert [answer.json()["choices"][0]["text"] for answer in both] == ["hello world"] * 2

    run(check())


@pytest.mark.parametrize(
    ("keep", "side", "left"),
    [(3, None, "def"), (3, "left", "def"), (3, "right", "abc"), (-1, None, "abcdef"), (9, None, "abcdef")],
)
def test_prompts_are_truncated_as_asked(make_server, ids, run, keep, side, left):
    async def check():
        server = await make_server()
        body = {"prompt": "abcdef", "truncate_prompt_tokens": keep, "truncation_side": side, "echo": True}
        answer = await server.complete(**body)
        assert server.engine.requests[0].prompt_token_ids == ids(left)
        assert answer["choices"][0]["text"].startswith(left)

    run(check())


def test_truncation_to_the_context_leaves_room(make_server, run):
    async def check():
        server = await make_server()
        await server.complete(prompt="x" * 200, truncate_prompt_tokens=-1)
        assert len(server.engine.requests[0].prompt_token_ids) == 63
        for keep in (0, 65, -2):
            assert (await refused(server, prompt="x", truncate_prompt_tokens=keep))["param"] == "truncate_prompt_tokens"

    run(check())


def test_details_and_metrics_come_with_their_flags(make_server, run):
    async def check():
        plain = await (await make_server()).complete(prompt="hi")
        assert plain["metrics"] is None
        server = await make_server(enable_per_request_metrics=True)
        metrics = (await server.complete(prompt="hi"))["metrics"]
        assert metrics["time_to_first_token_ms"] >= 0
        assert "queue_time_ms" in metrics
        # One set of times cannot speak for two outputs.
        assert (await server.complete(prompt="hi", n=2))["metrics"] is None

    run(check())


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ({}, r"hardpoint-\S+-tp1-pp1-[0-9a-f]{12}"),
        ({"fingerprint_mode": "hash"}, r"fp_[0-9a-f]{12}"),
        ({"fingerprint_mode": "custom", "fingerprint_value": "blue"}, "blue"),
        ({"fingerprint_mode": "none"}, None),
    ],
)
def test_fingerprint_follows_its_mode(make_server, run, flags, pattern):
    import re

    async def check():
        found = (await (await make_server(**flags)).complete(prompt="hi"))["system_fingerprint"]
        assert found is None if pattern is None else re.fullmatch(pattern, found)

    run(check())


@pytest.mark.parametrize("include", [False, True])
def test_offsets_fit_what_a_stop_string_left(make_server, ids, run, include):
    async def check():
        server = await make_server(script=lambda p, i: ids("the world hello" + EOS))
        body = {"prompt": "hi", "stop": ["orld h"], "logprobs": 0, "include_stop_str_in_output": include}
        (choice,) = (await server.complete(**body))["choices"]
        assert choice["text"] == ("the world h" if include else "the w")
        offsets_fit(choice["text"], choice["logprobs"])

    run(check())


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_hidden_tokens_make_no_empty_chunks(make_server, ids, run, path):
    async def check():
        server = await make_server(script=lambda p, i: ids("a" + EOS + EOS + "b" + EOS + "c"))
        server.engine.pace_s = 0.001
        messages = [{"role": "user", "content": "x"}]
        body = {"prompt": "hi", "messages": messages, "ignore_eos": True, "return_token_ids": True, "logprobs": 1}
        if path != PATH:
            body["logprobs"] = True
        choices = [chunk["choices"][0] for chunk in await server.events(path, **body)]
        texts = [choice["text"] if path == PATH else choice["delta"].get("content", "") for choice in choices]
        assert [text for text in texts if text] == ["a", "b", "c"]
        assert texts.count("") == (0 if path == PATH else 1), "more than the opening chunk"
        # Their ids and log-probabilities come along with the next text.
        assert [i for choice in choices for i in choice.get("token_ids") or []] == ids(
            "a" + EOS + EOS + "b" + EOS + "c"
        )
        key = "tokens" if path == PATH else "content"
        assert sum(len(choice["logprobs"][key]) for choice in choices if choice["logprobs"]) == 6

    run(check())
