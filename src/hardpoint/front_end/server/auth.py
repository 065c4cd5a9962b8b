"""The bearer key, asked for on every route except those the application names as open."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from hardpoint.front_end.server.errors import Failure, route_path


def is_preflight(scope: Scope) -> bool:
    """Whether this is a browser asking what a cross-origin request may do."""
    if scope["type"] != "http" or scope["method"] != "OPTIONS":
        return False
    headers = Headers(scope=scope)
    return "origin" in headers and "access-control-request-method" in headers


class OpenRoutes:
    """Routes that need no key: exact (method, path) pairs, and GET on whole subtrees."""

    def __init__(self, pairs: Iterable[tuple[str, str]] = (), trees: Iterable[str] = ()) -> None:
        self._pairs = frozenset(pairs)
        self._trees = tuple(trees)

    def has(self, scope: Scope) -> bool:
        """Whether this request goes to one of them."""
        if scope["type"] != "http":
            return False
        path, method = route_path(scope), scope["method"]
        if (method, path) in self._pairs:
            return True
        return method == "GET" and any(path == tree or path.startswith(tree + "/") for tree in self._trees)


class ApiKeyGuard:
    """ASGI middleware that answers 401 unless the request carries one of the keys."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], open_routes: OpenRoutes) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._open = open_routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it before its body is read."""
        if scope["type"] not in ("http", "websocket") or self._may_pass(scope):
            await self._app(scope, receive, send)
            return
        failure = Failure(
            401,
            "AuthenticationError",
            "Unauthorized: a valid API key is needed, as the header 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'",
            headers={"WWW-Authenticate": "Bearer"},
        )
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "Unauthorized"})
            return
        await failure.response(route_path(scope))(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        return self._open.has(scope) or is_preflight(scope) or self._has_key(scope)

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        # Anthropic's clients send theirs bare.
        bare = [value for name, value in scope["headers"] if name == b"x-api-key"]
        if scheme.lower() == b"bearer":
            return self._is_key(token)
        return not given and len(bare) == 1 and self._is_key(bare[0])

    def _is_key(self, token: bytes) -> bool:
        digest = _digest(token.strip())
        # Every key is compared, so that the time taken tells nothing.
        matches = [secrets.compare_digest(digest, known) for known in self._digests]
        return any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
