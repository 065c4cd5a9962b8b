"""`--middleware`: order, faults, bodies, and streams that are never held back (B20)."""

from __future__ import annotations

import asyncio
import json
import sys
import types

import pytest
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import JSONResponse, Response

from hardpoint.errors import ConfigError
from process_tools import PATIENCE_S, happens

BODY = {"prompt": "hi", "max_tokens": 8}
seen: list = []


@pytest.fixture
def mw():  # noqa: C901 - a list of small middlewares
    """A module of middlewares to be named on the command line."""
    module = types.ModuleType("mw_under_test")
    sys.modules["mw_under_test"] = module
    seen.clear()

    async def func(request, call_next):
        response = await call_next(request)
        response.headers.append("x-order", "func")
        return response

    async def func2(request, call_next):
        seen.append("func2")
        response = await call_next(request)
        response.headers.append("x-order", "func2")
        return response

    async def reads_body(request, call_next):
        seen.append(await request.json())
        return await call_next(request)

    async def reads_a_piece(request, call_next):
        async for piece in request.stream():
            seen.append(piece)
            break
        return await call_next(request)

    async def reads_answer(request, call_next):
        response = await call_next(request)
        body = b"".join([chunk async for chunk in response.body_iterator])
        seen.append(len(body))
        return Response(body, response.status_code, {"x-read": "yes"}, media_type="application/json")

    async def raises(request, call_next):
        if request.headers.get("x-bad"):
            raise KeyError("/secret/place is broken")
        return await call_next(request)

    async def raises_after(request, call_next):
        await call_next(request)
        raise ValueError("after")

    async def answers_itself(request, call_next):
        return JSONResponse({"mine": True}, 418)

    async def replaces(request, call_next):
        await call_next(request)
        return JSONResponse({"mine": True})

    async def catches(request, call_next):
        try:
            return await call_next(request)
        except Exception as error:
            return JSONResponse({"caught": type(error).__name__}, 502)

    class Asgi:
        def __init__(self, app):
            self.app = app

        async def __call__(self, scope, receive, send):
            async def with_header(message):
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-order", b"asgi")]
                await send(message)

            seen.append("asgi")
            await self.app(scope, receive, with_header)

    class AsgiRaises:
        def __init__(self, app):
            self.app = app

        async def __call__(self, scope, receive, send):
            raise RuntimeError("asgi broke")

    class Base(BaseHTTPMiddleware):
        async def dispatch(self, request, call_next):
            response = await call_next(request)
            response.headers.append("x-order", "base")
            return response

    for thing in list(locals().values()):
        if callable(thing):
            setattr(module, thing.__name__, thing)
    module.number = 5
    module.plain = lambda request, call_next: None
    yield "mw_under_test"
    del sys.modules["mw_under_test"]


STACKS = [[], ["func"], ["Asgi"], ["Base"], ["func", "func2", "Asgi"], ["reads_body", "func"], ["reads_a_piece"]]


@pytest.mark.parametrize("stack", STACKS)
def test_chunks_come_one_by_one(make_server, run, asgi_call, mw, ids, stack):
    """The engine makes a token only once the chunk of the one before has been sent."""

    async def check():
        server = await make_server(
            script=lambda prompt, index: ids("abcdefgh"), middleware=[f"{mw}.{name}" for name in stack]
        )
        gate = asyncio.Semaphore(0)
        server.engine.next_step = gate.acquire
        call = asgi_call(server.app, "POST", "/v1/completions", json.dumps({**BODY, "stream": True}).encode())
        task = asyncio.create_task(call.run())
        for number in range(1, 9):
            gate.release()
            async with asyncio.timeout(PATIENCE_S):
                while sum(b'"text"' in chunk for chunk in call.chunks) < number:
                    await asyncio.sleep(0.001)
        await task
        assert call.chunks[-1] == b"data: [DONE]\n\n"

    run(check())


@pytest.mark.parametrize("name", ["reads_body", "reads_a_piece"])
def test_handler_still_gets_the_body(make_server, run, mw, name):
    async def check():
        server = await make_server(middleware=[f"{mw}.{name}"])
        assert (await server.complete(**BODY))["choices"][0]["text"] == "hello world"
        assert seen in ([BODY], [json.dumps(BODY, separators=(",", ":")).encode()])

    run(check())


def test_order_is_that_of_the_command_line(make_server, run, mw):
    async def check():
        server = await make_server(middleware=[f"{mw}.func2", f"{mw}.Asgi", f"{mw}.func"])
        answer = await server.post("/v1/completions", BODY)
        assert seen == ["func2", "asgi"]
        # On the way back each adds its header after those further in.
        assert answer.headers.get_list("x-order") == ["func", "asgi", "func2"]

    run(check())


def test_raising_middleware_is_a_500_for_that_request_only(make_server, run, mw):
    async def check():
        server = await make_server(middleware=[f"{mw}.raises"])
        bad = await server.post("/v1/completions", BODY, headers={"x-bad": "1"})
        assert bad.status_code == 500
        assert bad.json()["error"]["type"] == "InternalServerError"
        assert "secret" not in bad.text
        assert (await server.post("/v1/completions", BODY)).status_code == 200
        for name in ("raises_after", "AsgiRaises"):
            other = await make_server(middleware=[f"{mw}.{name}"])
            answer = await other.post("/v1/completions", BODY)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, 500)

    run(check())


@pytest.mark.parametrize(
    "path",
    ["no.such.module", "mw_under_test.missing", "noDots", "mw_under_test.number", "mw_under_test.plain", "", ".x"],
)
def test_path_that_cannot_be_used_stops_the_start(make_server, run, mw, path):
    async def check():
        with pytest.raises(ConfigError) as caught:
            await make_server(middleware=[path])
        assert repr(path) in str(caught.value)

    run(check())


def test_function_may_answer_itself(make_server, run, mw):
    async def check():
        server = await make_server(middleware=[f"{mw}.answers_itself"])
        answer = await server.post("/v1/completions", BODY)
        assert (answer.status_code, answer.json()) == (418, {"mine": True})
        assert server.engine.requests == []

    run(check())


def test_function_may_read_or_replace_the_answer(make_server, run, mw):
    async def check():
        server = await make_server(middleware=[f"{mw}.reads_answer"])
        answer = await server.post("/v1/completions", BODY)
        assert answer.json()["choices"][0]["text"] == "hello world"
        assert answer.headers["x-read"] == "yes"
        other = await make_server(middleware=[f"{mw}.replaces"])
        other.engine.pace_s = 0.01
        assert (await other.post("/v1/completions", {**BODY, "stream": True})).json() == {"mine": True}
        # Nobody reads that stream: its work is ended.
        assert other.engine.aborted

    run(check())


def test_function_sees_what_the_application_raises(make_server, run, mw):
    async def check():
        server = await make_server(middleware=[f"{mw}.catches"])
        server.app.router.routes.clear()

        async def broken(scope, receive, send):
            raise LookupError("inside")

        server.app.router.default = broken
        answer = await server.http.get("/x")
        assert (answer.status_code, answer.json()) == (502, {"caught": "LookupError"})

    run(check())


@pytest.mark.parametrize("stack", [[], ["func"], ["Asgi"], ["reads_body", "func2"]])
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_client_ends_the_work(make_server, run, asgi_call, mw, ids, stack, stream):
    async def check():
        server = await make_server(
            script=lambda prompt, index: ids("abcdefgh" * 7), middleware=[f"{mw}.{name}" for name in stack]
        )
        server.engine.pace_s = 0.01
        body = json.dumps({"prompt": "hi", "max_tokens": 50, "stream": stream}).encode()
        call = asgi_call(server.app, "POST", "/v1/completions", body, {"X-Request-Id": "gone"})
        task = asyncio.create_task(call.run())
        await happens(lambda: bool(server.engine.requests))
        assert not task.done()
        call.leave()
        await asyncio.wait_for(task, PATIENCE_S)
        assert server.engine.aborted == ["cmpl-gone"]
        assert not server.engine.outputs.has_unfinished_requests()

    run(check())


def test_client_that_leaves_during_a_long_prefill_ends_it(make_server, run, asgi_call):
    async def check():
        server = await make_server()
        server.engine.pace_s = 30
        for stream in (False, True):
            body = json.dumps({"prompt": ["a", "b"], "n": 2, "stream": stream}).encode()
            call = asgi_call(server.app, "POST", "/v1/completions", body, {"X-Request-Id": f"g{stream}"})
            begun = len(server.engine.requests) + 2
            task = asyncio.create_task(call.run())
            await happens(lambda: len(server.engine.requests) == begun)  # noqa: B023
            call.leave()
            await asyncio.wait_for(task, PATIENCE_S)
            assert set(server.engine.aborted) >= {f"cmpl-g{stream}-0", f"cmpl-g{stream}-1"}

    run(check())


def test_cancelled_server_task_ends_the_work(make_server, run, asgi_call):
    async def check():
        server = await make_server()
        server.engine.pace_s = 0.01
        call = asgi_call(server.app, "POST", "/v1/completions", json.dumps({**BODY, "stream": True}).encode())
        task = asyncio.create_task(call.run())
        await happens(lambda: bool(server.engine.requests))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert server.engine.aborted

    run(check())


def test_request_id_header_is_echoed_or_made(make_server, run):
    async def check():
        server = await make_server(enable_request_id_headers=True)
        assert (await server.http.get("/health", headers={"X-Request-Id": "abc"})).headers["x-request-id"] == "abc"
        made = (await server.http.get("/nothing")).headers["x-request-id"]
        assert len(made) == 32
        assert (await server.http.get("/health", headers={"X-Request-Id": "a" * 500})).headers[
            "x-request-id"
        ] != "a" * 500
        assert "x-request-id" not in (await (await make_server()).http.get("/health")).headers

    run(check())


def test_load_counts_requests_in_flight(make_server, run, asgi_call):
    async def check():
        server = await make_server(enable_server_load_tracking=True)
        gate = asyncio.Event()
        server.engine.next_step = gate.wait
        call = asgi_call(server.app, "POST", "/v1/completions", json.dumps({**BODY, "stream": True}).encode())
        task = asyncio.create_task(call.run())
        await happens(lambda: bool(server.engine.requests))
        assert (await server.http.get("/load")).json() == {"server_load": 1}
        gate.set()
        await task
        assert (await server.http.get("/load")).json() == {"server_load": 0}

    run(check())
