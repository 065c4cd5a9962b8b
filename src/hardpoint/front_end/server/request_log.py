"""Requests and answers in the log (`--enable-log-requests`, `--enable-log-outputs`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hardpoint.front_end.server.settings import ServerSettings
from hardpoint.log import init_logger

logger = init_logger(__name__)


class RequestLog:
    """Writes INFO lines with texts and ids cut at `--max-log-len`; silent unless switched on."""

    def __init__(self, settings: ServerSettings) -> None:
        self._limit = settings.max_log_len
        self._inputs = settings.enable_log_requests
        self._outputs = settings.enable_log_requests and settings.enable_log_outputs
        self._deltas = self._outputs and settings.enable_log_deltas

    def received(
        self, request_id: str, prompt: str | None, prompt_token_ids: Sequence[int] | None, params: Any
    ) -> None:
        """A request is about to reach the engine."""
        if self._inputs:
            logger.info(
                "request %s: prompt %r, ids %s, %s", request_id, self._cut(prompt), self._cut(prompt_token_ids), params
            )

    def answered(self, request_id: str, text: str, token_ids: Sequence[int] | None, finish_reason: str | None) -> None:
        """A whole output was produced."""
        if self._outputs:
            logger.info(
                "answer %s: %r, ids %s, finish_reason %s",
                request_id, self._cut(text), self._cut(token_ids), finish_reason,
            )  # fmt: skip

    def streamed(self, request_id: str, delta: str, finish_reason: str | None) -> None:
        """A piece of a stream was produced."""
        if self._deltas:
            logger.info("stream %s: %r, finish_reason %s", request_id, self._cut(delta), finish_reason)

    def _cut(self, value: Any) -> Any:
        if value is None or self._limit is None:
            return value
        return value[: self._limit]
