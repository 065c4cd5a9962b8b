"""Event streams: keep-alive, endings, merging of several generators."""

from __future__ import annotations

import asyncio
import gc
import json
import traceback

import pytest

from hardpoint.front_end.server.streams import DONE, KEEP_ALIVE, event, merge, unless_disconnected
from process_tools import PATIENCE_S, happens


def test_event_is_one_line_of_json():
    assert event({"a": "x\ny"}) == b'data: {"a":"x\\ny"}\n\n'


def test_keep_alive_comments_fill_the_gaps(make_server, run, asgi_call, monkeypatch):
    async def check():
        server = await make_server(sse_keep_alive_interval=1)
        monkeypatch.setattr(server.app.state.context, "settings", _quick(server.app.state.context.settings))
        gate = asyncio.Semaphore(0)
        server.engine.next_step = gate.acquire
        body = json.dumps({"prompt": "hi", "stream": True}).encode()
        call = asgi_call(server.app, "POST", "/v1/completions", body)
        task = asyncio.create_task(call.run())
        await happens(lambda: call.chunks.count(KEEP_ALIVE) >= 3)
        # The stream has begun although there is no token yet.
        assert call.status == 200
        for _ in range(3):
            gate.release()
        await task
        assert call.chunks[-1] == DONE
        assert b"hello" in b"".join(call.chunks)

    run(check())


def _quick(settings):
    from dataclasses import replace

    return replace(settings, sse_keep_alive_interval=0.02)


def test_failure_after_a_keep_alive_is_an_event(make_server, run, asgi_call, monkeypatch):
    from hardpoint.errors import EngineGenerateError

    async def check():
        server = await make_server(script=lambda p, i: [EngineGenerateError("late")], sse_keep_alive_interval=1)
        monkeypatch.setattr(server.app.state.context, "settings", _quick(server.app.state.context.settings))
        server.engine.pace_s = 0.1
        call = asgi_call(server.app, "POST", "/v1/completions", b'{"prompt": "hi", "stream": true}')
        await call.run()
        assert call.chunks[0] == KEEP_ALIVE
        assert b'"late"' in call.chunks[-2]
        assert call.chunks[-1] == DONE

    run(check())


def test_no_comments_without_the_flag(make_server, run):
    async def check():
        server = await make_server()
        answer = await server.post("/v1/completions", {"prompt": "hi", "stream": True})
        assert ":" not in [line[:1] for line in answer.text.splitlines()]
        assert answer.headers["cache-control"] == "no-cache"

    run(check())


def test_client_that_leaves_between_keep_alives_ends_the_work(make_server, run, asgi_call, monkeypatch):
    async def check():
        server = await make_server(sse_keep_alive_interval=1)
        monkeypatch.setattr(server.app.state.context, "settings", _quick(server.app.state.context.settings))
        server.engine.pace_s = 30
        call = asgi_call(server.app, "POST", "/v1/completions", b'{"prompt": "hi", "stream": true}')
        task = asyncio.create_task(call.run())
        await happens(lambda: KEEP_ALIVE in call.chunks)
        call.leave()
        await asyncio.wait_for(task, PATIENCE_S)
        assert server.engine.aborted

    run(check())


class Source:
    """A generator that tells whether it was closed."""

    def __init__(self, items, pace_s=0.0, error=None):
        self.closed = False
        self._items, self._pace_s, self._error = items, pace_s, error

    async def run(self):
        try:
            for item in self._items:
                await asyncio.sleep(self._pace_s)
                yield item
            if self._error:
                raise self._error
        finally:
            self.closed = True


def test_merge_takes_what_comes_first(run):
    async def check():
        fast, slow = Source("abc"), Source("xy", 0.02)
        got = [item async for item in merge([slow.run(), fast.run()])]
        assert got[:3] == [(1, "a"), (1, "b"), (1, "c")]
        assert got[3:] == [(0, "x"), (0, "y")]

    run(check())


@pytest.mark.parametrize("count", [1, 3])
def test_closing_a_merge_closes_its_sources(run, count):
    async def check():
        sources = [Source("abc", 0.01 * i) for i in range(count)]
        merged = merge([source.run() for source in sources])
        async for _ in merged:
            break
        await merged.aclose()
        assert all(source.closed for source in sources[:1])
        # One that never began has nothing to close.
        assert all(source.closed or i for i, source in enumerate(sources))

    run(check())


def test_error_of_one_ends_all(run):
    async def check():
        bad, slow = Source("a", error=ValueError("no")), Source("xyz", 0.5)
        with pytest.raises(ValueError, match="no"):
            async for _ in merge([slow.run(), bad.run()]):
                pass
        assert slow.closed

    run(check())


def test_errors_of_several_at_once_are_all_taken(run):
    async def check():
        complaints = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
        sources = [Source("", error=ValueError(f"no {i}")) for i in range(3)]
        with pytest.raises(ValueError, match="no"):
            async for _ in merge([source.run() for source in sources]):
                pass
        gc.collect()
        assert not complaints

    run(check())


def test_client_that_leaves_while_a_chunk_is_being_sent_ends_the_work(make_server, run, asgi_call):
    """A full connection holds the stream back: nobody waits for the engine at that moment."""

    async def check():
        server = await make_server()
        call = asgi_call(server.app, "POST", "/v1/completions", b'{"prompt": "hi", "stream": true}')
        full = asyncio.Event()

        async def send(message):
            if message["type"] == "http.response.body":
                full.set()
                await asyncio.Event().wait()

        call.send = send
        server.engine.next_step = asyncio.Semaphore(1).acquire
        task = asyncio.create_task(call.run())
        await asyncio.wait_for(full.wait(), PATIENCE_S)
        call.leave()
        await asyncio.wait_for(task, PATIENCE_S)
        assert server.engine.aborted

    run(check())


def test_an_error_keeps_its_traceback(run):
    class Request:
        async def receive(self):
            await asyncio.Event().wait()

    async def work():
        raise KeyError("inside")

    async def check():
        with pytest.raises(KeyError) as caught:
            await unless_disconnected(Request(), work())
        return [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]

    assert "work" in run(check())
