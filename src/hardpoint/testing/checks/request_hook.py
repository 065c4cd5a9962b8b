"""The suite for request hooks."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from hardpoint.contracts.request_hook import (
    ARGUMENTS,
    CONTENT,
    REASONING,
    HookedRequest,
    RequestHook,
    RequestRefused,
    TextFilter,
)
from hardpoint.testing.failures import explained, require, require_call, require_class, require_sync
from hardpoint.testing.tiny_config import tiny_vllm_config

_TEXTS = ("", "x", "A sentence, and another one.\nA line with an address: ann@example.org!", 'größer 😀 {"a": 1}')
_BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "hello"}),
    ("/v1/completions", {"prompt": [[1, 2, 3]], "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}),
    ("/v1/embeddings", {"input": ["one", "two"]}),
)


def check_request_hook(cls: Any, vllm_config: Any = None, texts: Sequence[str] = ()) -> None:
    """Build the hook, show it requests of several routes, and cut texts at every position.

    vllm_config  what the constructor gets; a configuration of a tiny model unless given
    texts        more texts to filter, such as those the hook is made for
    """
    subject = require_class(cls, RequestHook)
    require(
        inspect.iscoroutinefunction(cls.before_admission),
        subject,
        "before_admission is not a coroutine function, and the host awaits it",
        "write `async def before_admission(self, request)`",
    )
    require_sync(cls, subject, "text_filter")
    require_call(cls.text_filter, subject, "text_filter(self, request, choice, channel)", None, None, 0, CONTENT)
    with explained(subject, "the constructor", "it gets the VllmConfig"):
        hook = cls(vllm_config or tiny_vllm_config())
    for path, body in _BODIES:
        request = HookedRequest(path, dict(body), {})
        _admit(hook, subject, request)
        for text in (*_TEXTS, *texts):
            _cut_everywhere(hook, subject, request, text)


def _admit(hook: Any, subject: str, request: HookedRequest) -> None:
    with explained(subject, f"before_admission of a request to {request.path}", "refuse with RequestRefused"):
        try:
            asyncio.run(hook.before_admission(request))
        except RequestRefused:
            return
    require(
        isinstance(request.body, dict), subject, "it leaves a body that is not an object", "change the body in place"
    )


def _filters(hook: Any, subject: str, request: HookedRequest) -> Iterator[tuple[str, Any]]:
    for channel in (CONTENT, REASONING, ARGUMENTS):
        with explained(subject, f"text_filter for {channel}", "return a TextFilter or None"):
            made = hook.text_filter(request, 0, channel)
        if made is not None:
            require(isinstance(made, TextFilter), subject, f"text_filter gives {made!r}", "return a TextFilter or None")
            yield channel, made


def _cut_everywhere(hook: Any, subject: str, request: HookedRequest, text: str) -> None:
    whole: dict[str, str] = {}
    for cut in range(len(text) + 1):
        for channel, one in _filters(hook, subject, request):
            with explained(subject, f"filtering {text!r} cut at {cut}", "a filter takes any text in any pieces"):
                try:
                    sent = one.feed(text[:cut]) + one.feed(text[cut:]) + one.finish()
                except RequestRefused:
                    sent = "refused"
            require(
                sent == whole.setdefault(channel, sent),
                subject,
                f"the {channel} {text!r} comes out as {sent!r} when it is cut at {cut}, else as {whole[channel]!r}",
                "keep back what may still become something the filter looks for",
            )
