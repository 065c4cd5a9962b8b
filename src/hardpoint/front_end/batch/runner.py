"""Asks the application each request of a batch, several at a time, and writes down what it answers."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import msgspec

from hardpoint.front_end.batch.files import BatchRequest, Results

# How long a request waits before it is offered again to an engine whose queue was full.
_RETRY_S = 0.5
# What a batch may ask for: the model's API, also where a plugin added it; nothing that steers the server.
_PREFIXES = ("/v1/", "/v2/")
_PATHS = frozenset(
    ("/score", "/rerank", "/pooling", "/classify", "/tokenize", "/detokenize", "/inference/v1/generate", "/embed")
)
_REFUSED = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"))


@dataclass(slots=True)
class Tally:
    """How the requests of a run ended."""

    answered: int = 0
    failed: int = 0


class BatchRunner:
    """One run over a batch.

    app         the ASGI application
    key         sent as bearer key, where the application wants one
    at_once     most requests open at a time
    engine_dead whether asking on makes sense
    on_result   called after each result, for a progress bar
    """

    def __init__(
        self,
        app: Any,
        results: Results,
        *,
        key: str = "",
        at_once: int = 64,
        engine_dead: Callable[[], bool] = lambda: False,
        on_result: Callable[[], object] = lambda: None,
    ) -> None:
        self._app = app
        self._results = results
        self._headers = [(b"host", b"batch"), (b"content-type", b"application/json")]
        if key:
            self._headers.append((b"authorization", f"Bearer {key}".encode()))
        self._at_once = at_once
        self._engine_dead = engine_dead
        self._on_result = on_result
        self.tally = Tally()

    async def run(self, requests: Iterator[BatchRequest]) -> Tally:
        """Ask every request that has no result yet; ends early when the engine does."""
        waiting = (request for request in requests if request.custom_id not in self._results.answered)
        running: set[asyncio.Task[None]] = set()
        try:
            while not self._engine_dead():
                running |= {
                    asyncio.create_task(self._settle(request))
                    for request in itertools.islice(waiting, self._at_once - len(running))
                }
                if not running:
                    break
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return self.tally

    async def _settle(self, request: BatchRequest) -> None:
        problem = request.problem or _refusal(request.path)
        response = None if problem else await self._answer(request)
        error = {"code": "invalid_request", "message": f"line {request.line}: {problem}"} if problem else None
        self._results.add(request, response, error)
        if response is not None and response["status_code"] == 200:
            self.tally.answered += 1
        else:
            self.tally.failed += 1
        self._on_result()

    async def _answer(self, request: BatchRequest) -> dict[str, Any]:
        while True:
            status, body = await call(self._app, request.path, request.body, self._headers)
            # A full queue is no answer: others of this batch fill it.
            if status != 503 or self._engine_dead():
                return {"status_code": status, "request_id": f"vllm-batch-{uuid.uuid4().hex}", "body": _json(body)}
            await asyncio.sleep(_RETRY_S)


def _refusal(path: str) -> str:
    allowed = path.startswith(_PREFIXES) or path in _PATHS
    if allowed and path not in _REFUSED and "?" not in path and "#" not in path:
        return ""
    return f"url {path[:200]!r} is not possible in a batch: use a route of the model, such as /v1/chat/completions"


def _json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body.decode("utf-8", "replace")


async def call(app: Any, path: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> tuple[int, bytes]:
    """POST `body` to an ASGI application in this process; its status and its body."""
    asked, status, parts = False, 500, []

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if asked:
            # This client never leaves: it ends with the task.
            await asyncio.Event().wait()
        asked = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [*headers, (b"content-length", str(len(body)).encode())],
        "client": ("batch", 0), "server": ("batch", 0), "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    return status, b"".join(parts)
