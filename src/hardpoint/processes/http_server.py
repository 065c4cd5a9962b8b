"""uvicorn on our socket: our signals, our logging, a stop that can be waited for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import uvicorn

from hardpoint.env import envs
from hardpoint.errors import ConfigError
from hardpoint.front_end.server.http_limits import http_protocol
from hardpoint.front_end.server.settings import ServerSettings
from hardpoint.front_end.server.tls import refresh_certificates
from hardpoint.log import attach, init_logger

logger = init_logger(__name__)
# Responses of which none got on for so many turns belong to clients that do not read.
_FLUSH_TURN_S = 0.1
_IDLE_TURNS = 20


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the process: it ends more than the HTTP server."""
        yield


class _Unlogged(logging.Filter):
    """Leaves some paths out of the access log."""

    def __init__(self, paths: frozenset[str]) -> None:
        super().__init__()
        self._paths = paths

    def filter(self, record: logging.LogRecord) -> bool:
        # uvicorn's arguments: client, method, path with query, HTTP version, status.
        args = record.args
        return not (isinstance(args, tuple) and len(args) > 2 and str(args[2]).partition("?")[0] in self._paths)


class HttpServer:
    """Serves an ASGI application until `stop`."""

    def __init__(self, app: Any, args: Namespace, sock: socket.socket) -> None:
        settings = self._settings = ServerSettings.from_args(args)
        self._socket = sock
        self._config = _config(app, settings)
        self._server = _Uvicorn(self._config)
        _set_up_logging(settings)

    async def serve(self) -> None:
        """Take requests; returns once stopped and every response is written, or cut by `flush`."""
        self._config.load()
        refreshing = None
        if self._settings.enable_ssl_refresh and self._config.ssl is not None:
            refreshing = asyncio.create_task(refresh_certificates(self._config.ssl, self._settings))
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            if refreshing is not None:
                refreshing.cancel()

    def stop(self, limit_s: int) -> None:
        """Take no more connections; responses under way go on until `flush`, or until `limit_s` is over."""
        self._config.timeout_graceful_shutdown = limit_s
        self._server.should_exit = True

    async def flush(self, limit_s: float) -> None:
        """Wait until responses under way are written, for as long as some get on, up to `limit_s`; cut the others."""
        deadline = time.monotonic() + limit_s
        before, idle = self._left(), 0
        # Turns of the event loop are counted and not seconds: one that is busy has given nobody time to write.
        while any(before) and idle < _IDLE_TURNS and time.monotonic() < deadline:
            await asyncio.sleep(_FLUSH_TURN_S)
            left = self._left()
            before, idle = left, idle + 1 if left == before else 0
        state = self._server.server_state
        if state.tasks:
            logger.warning("%d responses are cut: their clients do not read them", len(state.tasks))
        for task in list(state.tasks):
            task.cancel()
        for connection in list(state.connections):
            connection.transport.abort()

    def _left(self) -> tuple[int, int, int]:
        """Responses being made, connections, and bytes not taken by clients."""
        state = self._server.server_state
        transports = [connection.transport for connection in state.connections]
        unread = sum(transport.get_write_buffer_size() for transport in transports)
        return len(state.tasks), len(state.connections), unread

    @property
    def started(self) -> bool:
        """Whether requests are being taken."""
        return self._server.started


def _config(app: Any, settings: ServerSettings) -> uvicorn.Config:
    tls: dict[str, Any] = {}
    if settings.ssl_keyfile or settings.ssl_certfile:
        tls = {
            "ssl_keyfile": settings.ssl_keyfile,
            "ssl_certfile": settings.ssl_certfile,
            "ssl_ca_certs": settings.ssl_ca_certs,
            "ssl_cert_reqs": settings.ssl_cert_reqs,
            "ssl_ciphers": settings.ssl_ciphers or "TLSv1",
        }
    return uvicorn.Config(
        app,
        log_config=None,
        log_level=settings.uvicorn_log_level,
        access_log=not settings.disable_uvicorn_access_log,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        http=http_protocol(settings),
        server_header=False,
        **tls,
    )


def check_tls(args: Namespace) -> None:
    """Raise ConfigError when the TLS flags name files that cannot be used."""
    config = _config(None, ServerSettings.from_args(args))
    if not config.is_ssl:
        return
    try:
        uvicorn.config.create_ssl_context(
            certfile=config.ssl_certfile or "",
            keyfile=config.ssl_keyfile,
            password=None,
            ssl_version=config.ssl_version,
            cert_reqs=config.ssl_cert_reqs,
            ca_certs=config.ssl_ca_certs,
            ciphers=config.ssl_ciphers,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the TLS files cannot be used: {error}",
            code="tls",
            origin="--ssl-certfile, --ssl-keyfile, --ssl-ca-certs, --ssl-ciphers",
            fix="give a certificate and its key as PEM files",
        ) from error


def _set_up_logging(settings: ServerSettings) -> None:
    # "uvicorn" has uvicorn.error and uvicorn.access below it.
    attach("uvicorn", settings.uvicorn_log_level if settings.uvicorn_log_level != "trace" else 5)
    # What a newcomer needs to see on the console is in our own lines.
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.getLogger("uvicorn").level))
    if settings.disable_uvicorn_access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.CRITICAL)
    if settings.unlogged_paths():
        logging.getLogger("uvicorn.access").addFilter(_Unlogged(settings.unlogged_paths()))
