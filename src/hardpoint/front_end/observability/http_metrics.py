"""The web layer's own figures: requests, durations and sizes by route."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import Counter, Histogram, Summary
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hardpoint.front_end.observability.prometheus import instrument

# Asked for every few seconds by machines; counting them would drown the rest.
UNCOUNTED = frozenset({"/metrics", "/metrics/{rest:path}", "/health", "/load", "/ping", "/version", "/server_info"})
_NO_ROUTE = "none"


class HttpMetrics:
    """ASGI middleware that counts each request under its route's template."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._requests = instrument(
            "http_requests_total",
            lambda: Counter("http_requests_total", "Requests by route and status", ("method", "status", "handler")),
        )
        self._durations = instrument(
            "http_request_duration_seconds",
            lambda: Histogram(
                "http_request_duration_seconds",
                "Time from a request's first to its answer's last byte",
                ("method", "handler"),
                buckets=(0.1, 0.5, 1, 5, 30, 120),
            ),
        )
        self._sizes_in = _sizes("http_request_size_bytes", "Declared size of request bodies")
        self._sizes_out = _sizes("http_response_size_bytes", "Size of response bodies")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Measure one request; the route is known once the router has matched."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, sent = time.perf_counter(), 500, 0

        async def watched(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            self._note(scope, status, sent, time.perf_counter() - started)

    def _note(self, scope: Scope, status: int, sent: int, seconds: float) -> None:
        # An unknown path is counted without its text, which a client could vary without end.
        handler = getattr(scope.get("route"), "path", _NO_ROUTE)
        if handler in UNCOUNTED:
            return
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._requests.labels(method, f"{status // 100}xx", handler).inc()
        self._durations.labels(method, handler).observe(seconds)
        declared = Headers(scope=scope).get("content-length", "")
        self._sizes_in.labels(handler).observe(int(declared) if declared.isdecimal() else 0)
        self._sizes_out.labels(handler).observe(sent)


_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


def _sizes(name: str, help_text: str) -> Any:
    return instrument(name, lambda: Summary(name, help_text, ("handler",)))
