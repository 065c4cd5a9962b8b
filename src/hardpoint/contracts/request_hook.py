"""Seeing, changing or refusing requests before the engine gets them, and text before the client does.

What middleware cannot do well: it sees bytes, so it must hold a stream back to read it. A hook sees the parsed
body once, and text in the pieces in which it is sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

CONTENT, REASONING, ARGUMENTS = "content", "reasoning", "arguments"


class RequestRefused(Exception):
    """Raised by a hook to refuse a request, also in the middle of its answer.

    message  what the client is told
    status   of the HTTP answer, 400 to 599; a stream that has begun ends with an error event instead
    kind     `type` of the error object
    """

    def __init__(self, message: str, *, status: int = 400, kind: str = "RequestRefused") -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind


@dataclass
class HookedRequest:
    """A request as hooks see it.

    path     the route, such as `/v1/chat/completions`
    body     the JSON body as the client sent it; what a hook writes into it is validated as if the client had
    headers  of the HTTP request, names in lower case
    client   address of the client; empty where there is none, as in batches
    state    for hooks: what one keeps here for the request's life, under its own name
    """

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]
    client: str = ""
    state: dict[str, Any] = field(default_factory=dict)


class TextFilter(ABC):
    """Reads one text of one answer on its way to the client.

    Built   by `RequestHook.text_filter`, one for each text.
    Called  feed for each piece, in order; finish once, when the answer is over. On the event loop.
    Blocks  must not: every stream of this process waits.
    Fault   what it raises ends its request with an error that names the hook; nothing more is sent.
    """

    @abstractmethod
    def feed(self, text: str) -> str:
        """Take the next piece and return what to send now; keep back as little as the filter can do with."""

    @abstractmethod
    def finish(self) -> str:
        """The text is over; return what was kept back."""


class RequestHook:
    """Watches over the requests of one server process.

    Built   in each front end once, after the engine has started; several hooks work in the order of their names.
    Called  before_admission: once per request, before its prompt is made. text_filter: once per text of an answer.
    Blocks  before_admission may await; text_filter must not take long.
    Fault   what the constructor raises stops the start. RequestRefused refuses the request. Anything else ends the
            request with a 500 that names the hook: what a hook could not look at is never let through.
    """

    # Whether texts may come out changed. A request that asks for tokens or log-probabilities, which would show what
    # a filter takes away, is refused while this is true.
    changes_text = True

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config

    async def before_admission(self, request: HookedRequest) -> None:
        """Look at a request; change `request.body`, or raise RequestRefused."""

    def text_filter(self, request: HookedRequest, choice: int, channel: str) -> TextFilter | None:
        """A filter for one text, None to let it pass as it is.

        choice   which answer, from 0
        channel  CONTENT, REASONING, or ARGUMENTS for the arguments of one tool call
        """
        return None
