"""Bodies of /v1/responses, as far as parsers see them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from hardpoint.front_end.server.protocol.base import RequestBody, random_id


class ResponsesRequest(RequestBody):
    """What a tool or reasoning parser may read and change of a request for a response."""

    request_id: str = Field(default_factory=lambda: f"resp_{random_id()}")
    model: str | None = None
    input: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = "auto"
    parallel_tool_calls: bool | None = True
    include_reasoning: bool = True
    structured_outputs: Any = None
    response_format: Any = None
    skip_special_tokens: bool = True
