"""Send requests to an OpenAI-compatible server at a given rate, and time every token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hardpoint.cli.bench.http_stream import Endpoint, EndpointError


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to send.

    prompt        a text, or token ids where the server takes them
    input_tokens  what the prompt counts; 0 where only the server can tell
    """

    prompt: str | list[int]
    input_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Answer:
    """How a request went. Times in seconds; `started` on the clock of time.perf_counter.

    first   from sending to the first token; None when there was none
    gaps    between one chunk with tokens and the next
    taken   from sending to the end
    """

    started: float
    input_tokens: int
    output_tokens: int = 0
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    taken: float = 0.0
    text: str = ""
    error: str = ""

    @property
    def per_token(self) -> float | None:
        """Seconds a token takes after the first; None with less than two tokens."""
        if self.first is None or self.output_tokens < 2:
            return None
        return sum(self.gaps) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Backend:
    """One kind of API.

    body   the fields that carry a prompt and the length of the answer
    piece  the text that a choice of a chunk brings; None for one that brings no token
    """

    endpoint: str
    body: Callable[[Ask], dict[str, Any]]
    piece: Callable[[dict[str, Any]], str | None]


def _completion_piece(choice: dict[str, Any]) -> str | None:
    text = choice.get("text") or ""
    # The last chunk of some servers brings the reason for the end alone.
    return None if not text and choice.get("finish_reason") else text


def _chat_piece(choice: dict[str, Any]) -> str | None:
    delta = choice.get("delta") or {}
    return delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content") or None


def _chat_body(ask: Ask) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": ask.prompt}],
        "max_completion_tokens": ask.output_tokens,
    }


_COMPLETIONS = Backend(
    "/v1/completions", lambda ask: {"prompt": ask.prompt, "max_tokens": ask.output_tokens}, _completion_piece
)
BACKENDS = {
    "openai": _COMPLETIONS,
    "openai-chat": Backend("/v1/chat/completions", _chat_body, _chat_piece),
    "vllm": _COMPLETIONS,
}


@dataclass(frozen=True, slots=True)
class Target:
    """A server, the API it is asked through, and what every request carries."""

    endpoint: Endpoint
    backend: Backend
    path: str
    fields: dict[str, Any]

    async def ask(self, ask: Ask) -> Answer:
        """Send one request and read its answer to the end; a failure is in the answer."""
        body = {**self.backend.body(ask), "stream": True, "stream_options": {"include_usage": True}, **self.fields}
        answer = Answer(time.perf_counter(), ask.input_tokens)
        last = answer.started
        chunks = 0
        pieces: list[str] = []
        try:
            async for event in self.endpoint.events(self.path, body):
                now = time.perf_counter()
                usage = event.get("usage")
                if usage:
                    answer.input_tokens = usage.get("prompt_tokens") or answer.input_tokens
                    answer.output_tokens = usage.get("completion_tokens") or answer.output_tokens
                choices = event.get("choices")
                piece = self.backend.piece(choices[0]) if choices else None
                if piece is None:
                    continue
                if answer.first is None:
                    answer.first = now - answer.started
                else:
                    answer.gaps.append(now - last)
                last = now
                chunks += 1
                pieces.append(piece)
        except EndpointError as error:
            answer.error = str(error)
        answer.taken = time.perf_counter() - answer.started
        answer.text = "".join(pieces)
        answer.output_tokens = answer.output_tokens or chunks
        if not answer.error and not chunks:
            answer.error = "the server sent no token"
        return answer


@dataclass(frozen=True, slots=True)
class Pace:
    """When requests are sent.

    rate         per second; inf sends them all at once
    burstiness   1 is a Poisson process; less comes in bursts, more comes evenly
    concurrency  most requests under way at a time; None for no limit
    """

    rate: float = float("inf")
    burstiness: float = 1.0
    concurrency: int | None = None
    seed: int = 0

    async def paced(self, asks: Sequence[Ask]) -> AsyncIterator[Ask]:
        """Yield the requests when it is their time."""
        if self.rate == float("inf"):
            for ask in asks:
                yield ask
            return
        gaps = np.random.default_rng(self.seed).gamma(self.burstiness, 1 / (self.rate * self.burstiness), len(asks))
        # So that the whole takes as long as the rate says, whatever was drawn.
        due = np.cumsum(gaps) * (len(asks) / self.rate / gaps.sum())
        started = time.perf_counter()
        for ask, at in zip(asks, due, strict=True):
            await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
            yield ask


@dataclass(frozen=True, slots=True)
class Outcome:
    """Every answer, in the order of the requests, and the seconds from the first sending to the last end."""

    answers: list[Answer]
    seconds: float


async def send(
    target: Target, asks: Sequence[Ask], pace: Pace, done: Callable[[Answer], object] = lambda answer: None
) -> Outcome:
    """Send requests at a pace; `done` is called as each ends."""
    limit = asyncio.Semaphore(pace.concurrency or len(asks) or 1)

    async def one(ask: Ask) -> Answer:
        async with limit:
            answer = await target.ask(ask)
        done(answer)
        return answer

    started = time.perf_counter()
    tasks = [asyncio.create_task(one(ask)) async for ask in pace.paced(asks)]
    answers = await asyncio.gather(*tasks)
    return Outcome(list(answers), time.perf_counter() - started)
