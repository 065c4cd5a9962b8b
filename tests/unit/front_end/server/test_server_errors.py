"""Refusals and failures: OpenAI's shape everywhere, the right status, no internals in the text."""

from __future__ import annotations

import json

import pytest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from hardpoint.errors import AdmissionError, EngineDeadError, EngineGenerateError, VLLMValidationError
from hardpoint.front_end.server.errors import ApiError, failure_of, sanitise

PATH = "/v1/completions"
BODY = {"prompt": "hi"}


def error_of(answer) -> dict:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == answer.status_code
    assert answer.headers["content-type"] == "application/json"
    return body["error"]


@pytest.mark.parametrize(
    ("error", "status", "kind", "param"),
    [
        (VLLMValidationError("no", parameter="n"), 400, "BadRequestError", "n"),
        (ValueError("no"), 400, "BadRequestError", None),
        (OverflowError("no"), 400, "BadRequestError", None),
        (TypeError("no"), 400, "BadRequestError", None),
        (AdmissionError("full", reason="max_num_queued_reqs"), 503, "Service Unavailable", None),
        (EngineDeadError(), 500, "InternalServerError", None),
        (EngineGenerateError("bad"), 500, "InternalServerError", None),
        (NotImplementedError("no"), 501, "NotImplementedError", None),
        (HTTPException(404), 404, "Not Found", None),
        (HTTPException(405), 405, "Method Not Allowed", None),
        (ApiError("gone", status=404, kind="NotFoundError", param="model"), 404, "NotFoundError", "model"),
        (RecursionError(), 400, "BadRequestError", None),
        (KeyError("x"), 500, "InternalServerError", None),
    ],
)
def test_each_exception_has_its_answer(error, status, kind, param):
    failure = failure_of(error)
    assert (failure.status, failure.kind, failure.param) == (status, kind, param)
    assert failure.message


def test_admission_says_when_to_come_back():
    assert failure_of(AdmissionError("full", reason="x", retry_after_s=7)).headers == {"Retry-After": "7"}


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("no object <Foo at 0x7f00aa55> here", "no object <Foo> here"),
        ("cannot read /home/me/models/x.gguf now", "cannot read <path> now"),
        ("at C:\\models\\x", "at <path>"),
        ("'not' at #/properties/a cannot be kept", "'not' at #/properties/a cannot be kept"),
        ("see https://example.org/a/b/c", "see https://example.org/a/b/c"),
        ("and/or 1/2", "and/or 1/2"),
        ("use /v1/chat/completions", "use /v1/chat/completions"),
        ('oops\nTraceback (most recent call last):\n  File "/a/b.py", line 1', "oops"),
    ],
    ids=lambda text: text[:12],
)
def test_internals_are_taken_out_of_messages(text, clean):
    assert sanitise(text) == clean


def test_messages_are_bounded():
    assert len(sanitise("x" * 100_000)) < 5000


def test_validation_lists_ten_problems_and_the_first_field():
    problems = [{"type": "x", "loc": ("body", "a", i), "msg": "wrong"} for i in range(30)]
    failure = failure_of(RequestValidationError(problems))
    assert failure.param == "a.0"
    assert failure.message.count("wrong") == 10
    assert "20 more" in failure.message


def test_a_validators_own_words_are_the_message():
    failed = {
        "type": "value_error",
        "loc": ("body", "n"),
        "msg": "Value error, too many",
        "ctx": {"error": ValueError("too many")},
    }
    assert failure_of(RequestValidationError([failed])).message == "n: too many"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"{", "Bad Request"),
        (b"", "Bad Request"),
        (b"[1]", "Bad Request"),
        (b'"text"', "Bad Request"),
        (b"null", "Bad Request"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "Bad Request"),
        (b'{"prompt": "\xff"}', "Bad Request"),
        (b'{"prompt": "hi", "n": "many"}', "Bad Request"),
    ],
)
def test_bodies_that_cannot_be_read_are_400(make_server, run, content, kind):
    async def check():
        server = await make_server()
        answer = await server.http.post(PATH, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert error_of(answer)["type"] == kind

    run(check())


def test_deep_values_in_free_fields_are_no_trouble(make_server, run):
    async def check():
        server = await make_server()
        deep: dict = {}
        for _ in range(500):
            deep = {"a": deep}
        for field in ("metadata", "response_format", "vllm_xargs", "messages"):
            answer = await server.post(
                "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], field: deep}
            )
            assert answer.status_code in (200, 400), answer.text
        lone = b'{"prompt": "\\ud800"}'
        answer = await server.http.post(PATH, content=lone, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        lone = b'{"prompt": "x", "bad_words": ["\\ud800"]}'
        answer = await server.http.post(PATH, content=lone, headers={"content-type": "application/json"})
        assert "half of a surrogate pair" in error_of(answer)["message"]
        lone = b'{"prompt": "x", "model": "\\ud800"}'
        answer = await server.http.post(PATH, content=lone, headers={"content-type": "application/json"})
        assert (answer.status_code, error_of(answer)["param"]) == (400, "model")

    run(check())


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None, "application/jsonx"])
@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_json_routes_want_the_content_type(make_server, run, kind, path):
    async def check():
        server = await make_server()
        headers = {"content-type": kind} if kind else {}
        answer = await server.http.post(path, content=b'{"prompt": "hi"}', headers=headers)
        assert answer.status_code == 400
        error = error_of(answer)
        assert error["type"] == "Bad Request"
        assert "application/json" in error["message"]
        fine = await server.http.post(
            PATH, content=json.dumps(BODY), headers={"content-type": "Application/JSON; charset=utf-8"}
        )
        assert fine.status_code == 200

    run(check())


def test_routes_and_methods_that_are_not_there(make_server, run):
    async def check():
        server = await make_server()
        missing = await server.http.get("/v1/nothing")
        assert (missing.status_code, error_of(missing)["type"]) == (404, "Not Found")
        wrong = await server.http.get(PATH)
        assert (wrong.status_code, error_of(wrong)["type"]) == (405, "Method Not Allowed")
        assert wrong.headers["allow"] == "POST"

    run(check())


def test_unknown_model_is_404(make_server, run, monkeypatch):
    async def check():
        server = await make_server()
        for path, body in (
            (PATH, BODY),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/tokenize", BODY),
        ):
            answer = await server.post(path, {**body, "model": "other"})
            assert answer.status_code == 404
            error = error_of(answer)
            assert (error["type"], error["param"]) == ("NotFoundError", "model")
            assert "other" in error["message"]
            assert (await server.post(path, {**body, "model": "alias"})).status_code == 200
        monkeypatch.setenv("VLLM_SKIP_MODEL_NAME_VALIDATION", "1")
        assert (await server.complete(prompt="hi", model="other"))["model"] == "other"

    run(check())


def test_body_past_the_limit_is_413(make_server, run, monkeypatch):
    monkeypatch.setenv("HARDPOINT_MAX_BODY_MB", "1")

    async def chunks(count):
        for _ in range(count):
            yield b"x" * (1 << 18)

    async def check():
        server = await make_server()
        declared = await server.http.post(PATH, content=b"x" * (1 << 21), headers={"content-type": "application/json"})
        assert declared.status_code == 413
        error_of(declared)
        streamed = await server.http.post(PATH, content=chunks(8), headers={"content-type": "application/json"})
        assert streamed.status_code == 413
        error_of(streamed)
        fits = await server.http.post(PATH, content=chunks(3), headers={"content-type": "application/json"})
        assert fits.status_code == 400

    run(check())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"), [(EngineGenerateError("NaN in the logits"), 500), (EngineDeadError(), 500)]
)
def test_failure_before_the_first_token_has_its_own_status(make_server, run, stream, error, status):
    async def check():
        server = await make_server(script=lambda prompt, index: [error])
        answer = await server.post(PATH, {**BODY, "stream": stream})
        assert answer.status_code == status
        assert error_of(answer)["type"] == "InternalServerError"

    run(check())


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_failure_in_a_stream_is_an_event_then_done(make_server, ids, run, path):
    async def check():
        server = await make_server(script=lambda prompt, index: [*ids("hello"), EngineGenerateError("broke")])
        server.engine.pace_s = 0.005
        *chunks, last = await server.events(path, prompt="hi", messages=[{"role": "user", "content": "x"}])
        assert len(chunks) >= 1
        assert last == {"error": {"message": "broke", "type": "InternalServerError", "param": None, "code": 500}}

    run(check())


def test_full_queue_is_503_with_retry_after(make_server, run):
    async def check():
        server = await make_server()
        server.engine.refusal = AdmissionError("full", reason="max_num_queued_reqs", retry_after_s=3)
        for stream in (False, True):
            answer = await server.post(PATH, {**BODY, "stream": stream})
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "3"
            assert error_of(answer)["type"] == "Service Unavailable"

    run(check())


def test_unforeseen_exception_is_a_500_without_internals(make_server, run):
    async def check():
        server = await make_server(script=lambda prompt, index: [KeyError("/secret/place/file <x at 0x7fff1234>")])
        answer = await server.post(PATH, BODY)
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert "0x" not in answer.text
        # Only that request: the next one is fine.
        server.engine.script = lambda prompt, index: [1]
        assert (await server.post(PATH, {**BODY, "max_tokens": 1})).status_code == 200

    run(check())


def test_failed_sequence_fails_the_request(make_server, run):
    from hardpoint.types.outputs import CompletionOutput, RequestOutput

    async def generate(*_, **__):
        output = CompletionOutput(0, "", [], None, None, finish_reason="error")
        yield RequestOutput("r", "hi", [1], None, [output], True)

    async def check():
        server = await make_server()
        server.engine.generate = generate
        answer = await server.post(PATH, BODY)
        assert (answer.status_code, error_of(answer)["type"]) == (500, "InternalServerError")

    run(check())


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"", "the request has no body"),
        (b"null", "the body must be a JSON object"),
        (b"[1]", "the body must be a JSON object"),
        (b'"x"', "the body must be a JSON object"),
        (b"{", "the body is not valid JSON: "),
        (b"\xff\xfe{", "the body is not valid JSON: it is no UTF-8 text"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize"])
def test_a_body_that_is_none_is_refused_in_words(make_server, run, path, body, what):
    async def check():
        server = await make_server()
        answer = await server.http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert what in answer.json()["error"]["message"]

    run(check())
