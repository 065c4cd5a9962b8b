"""/v1/responses: OpenAI's Responses API on the machinery of chats; with a store, also in the background."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request

from hardpoint.env import envs
from hardpoint.errors import ConfigError, VLLMValidationError
from hardpoint.front_end.server.errors import Failure, failure_of, not_found, report
from hardpoint.front_end.server.protocol.base import random_id
from hardpoint.front_end.server.protocol.responses import (
    ResponsesRequest,
    ResponsesResponse,
    ResponseUsage,
    messages_of,
)
from hardpoint.front_end.server.refusals import refuse_unsupported
from hardpoint.front_end.server.serving.blocks import CALL, CLOSE, MORE, OPEN, TEXT, Block, Change, Progress, changes
from hardpoint.front_end.server.serving.chat import ChatService
from hardpoint.front_end.server.serving.context import ServerContext
from hardpoint.front_end.server.serving.jobs import Job

# Old responses make room for new ones past either bound.
_MOST_KEPT = 1024
_MOST_KEPT_BYTES = 64 << 20
_ENDED = ("completed", "incomplete", "failed", "cancelled")


@dataclass
class Kept:
    """A response that can be asked for again.

    messages  the conversation up to it, for those that continue it
    leave     ends it where it stands, if it has not ended
    events    of its stream so far, in order; their sequence numbers are their places
    """

    response: ResponsesResponse
    messages: list[dict[str, Any]]
    leave: Callable[[], None]
    events: list[bytes] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        """Whether it is over, however it ended."""
        return self.response.status in _ENDED

    def tell(self, event: bytes | None = None) -> None:
        """Add an event, and wake who waits for one."""
        if event is not None:
            self.events.append(event)
        self.news.set()
        self.news = asyncio.Event()

    def size(self) -> int:
        """About how many bytes this takes."""
        return sum(map(len, self.events)) + len(msgspec.json.encode(self.messages)) + 4096


class ResponseStore:
    """Keeps the newest responses of one server process, in memory."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._sizes: dict[str, int] = {}

    def add(self, kept: Kept) -> None:
        """Keep a response. Raises VLLMValidationError for an id that is taken."""
        if kept.response.id in self._kept:
            raise VLLMValidationError("there is a response with this request_id", parameter="request_id")
        self._kept[kept.response.id] = kept
        self.resize(kept)

    def resize(self, kept: Kept) -> None:
        """Note how large a response has become, and let the oldest that ended go where room is short."""
        if kept.response.id in self._kept:
            self._sizes[kept.response.id] = kept.size()
        ended = (name for name, one in list(self._kept.items()) if one.ended and one is not kept)
        while len(self._kept) > _MOST_KEPT or sum(self._sizes.values()) > _MOST_KEPT_BYTES:
            oldest = next(ended, None)
            if oldest is None:
                return
            del self._kept[oldest], self._sizes[oldest]

    def get(self, response_id: str) -> Kept:
        """The response; raises a 404 when it is not kept."""
        kept = self._kept.get(response_id)
        if kept is None:
            raise not_found(f"There is no response `{response_id[:200]}` here", "response_id")
        return kept


class ResponsesService:
    """Answers Responses requests of one server.

    servers  how many processes share the port: a store in one of them would not answer for the others
    """

    def __init__(self, context: ServerContext, chat: ChatService, servers: int = 1) -> None:
        self._context = context
        self._chat = chat
        self._store = ResponseStore() if envs.VLLM_ENABLE_RESPONSES_API_STORE else None
        if self._store is not None and servers > 1:
            raise ConfigError(
                "VLLM_ENABLE_RESPONSES_API_STORE keeps responses in one process; --api-server-count asks for several",
                code="flag",
                origin="VLLM_ENABLE_RESPONSES_API_STORE",
                fix="serve with one API server, or without the store",
            )

    # Creating.

    async def prepare(self, request: ResponsesRequest, http: Request) -> Run:
        """Check a request and make its prompt. Raises what a chat request raises."""
        refuse_unsupported(request)
        store = self._wants_store(request)
        before: list[dict[str, Any]] = []
        if request.previous_response_id is not None:
            kept = self._needed_store("previous_response_id").get(request.previous_response_id)
            if not kept.ended:
                raise VLLMValidationError("the previous response has not ended", parameter="previous_response_id")
            before = kept.messages
        chat, names = request.to_chat(before)
        job = await self._chat.prepare(chat, http, names)
        job.request_id = request.request_id
        response = _begun(request, job, chat.temperature, store)
        run = Run(self._context, job, response, [*before, *request.conversation()])
        if store:
            run.keep_in(self._needed_store("store"))
        return run

    def _wants_store(self, request: ResponsesRequest) -> bool:
        if request.background:
            if request.store is False:
                raise VLLMValidationError("background needs store", parameter="background")
            self._needed_store("background")
            return True
        if request.store:
            self._needed_store("store")
        # OpenAI's default is to store; where that is not possible, a request that does not ask for it goes on without.
        return self._store is not None and request.store is not False

    def _needed_store(self, parameter: str) -> ResponseStore:
        if self._store is None:
            raise VLLMValidationError(
                f"{parameter} needs a server started with VLLM_ENABLE_RESPONSES_API_STORE=1", parameter=parameter
            )
        return self._store

    async def whole(self, request: ResponsesRequest, run: Run) -> ResponsesResponse:
        """Run to the end and give the response."""
        async for _ in run.events():
            pass
        if run.error is not None:
            raise run.error
        return run.response

    async def stream(self, request: ResponsesRequest, run: Run) -> AsyncGenerator[bytes, None]:
        """Run and yield encoded events."""
        events = run.events()
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    def begin(self, run: Run) -> ResponsesResponse:
        """Run in the background; the response as it is now."""
        kept = run.kept
        assert kept is not None
        run.queue()
        kept.task = asyncio.create_task(run.to_the_end())
        return run.response

    # Asking again.

    def get(self, response_id: str) -> ResponsesResponse:
        """A response that is kept; raises a 404 for another."""
        return self._needed_store("response_id").get(response_id).response

    async def follow(self, response_id: str, starting_after: int | None) -> AsyncGenerator[bytes, None]:
        """The events of a response that is kept, from the one behind `starting_after`, as they come."""
        kept = self._needed_store("response_id").get(response_id)
        return _events_of(kept, 0 if starting_after is None else starting_after + 1)

    async def cancel(self, response_id: str) -> ResponsesResponse:
        """End a response that runs in the background. Raises VLLMValidationError for any other."""
        kept = self._needed_store("response_id").get(response_id)
        if kept.task is None:
            raise VLLMValidationError("only a response in the background can be cancelled", parameter="response_id")
        if not kept.ended:
            kept.task.cancel()
            await asyncio.wait([kept.task])
            # One that was cancelled before its first step could not do it itself.
            kept.leave()
        return kept.response


async def _events_of(kept: Kept, first: int) -> AsyncGenerator[bytes, None]:
    place = max(first, 0)
    while True:
        # Taken before looking, so that nothing that comes in between is missed.
        news, ended = kept.news, kept.ended
        while place < len(kept.events):
            yield kept.events[place]
            place += 1
        if ended:
            return
        await news.wait()


def _begun(request: ResponsesRequest, job: Job, temperature: float | None, store: bool) -> ResponsesResponse:
    form = request.text.model_dump(exclude_none=True, by_alias=True) if request.text is not None else {}
    params = job.params[0]
    return ResponsesResponse(
        id=job.request_id,
        created_at=job.created,
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata,
        model=job.model_name,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        reasoning=request.reasoning.model_dump() if request.reasoning is not None else None,
        store=store,
        temperature=temperature if temperature is not None else params.temperature,
        text={"format": {"type": "text"}, **form},
        tool_choice=request.tool_choice,
        tools=request.tools or [],
        top_p=params.top_p,
        user=request.user,
    )


class Run:
    """One response while it is made.

    messages  the conversation it answers
    error     what ended it early
    """

    def __init__(
        self, context: ServerContext, job: Job, response: ResponsesResponse, messages: list[dict[str, Any]]
    ) -> None:
        self.response = response
        self.error: Exception | None = None
        self.kept: Kept | None = None
        self._context = context
        self._job = job
        self._messages = messages
        self._store: ResponseStore | None = None
        self._number = 0
        self._created = False
        self._ids: list[str] = []

    def keep_in(self, store: ResponseStore) -> None:
        """Keep the response and its events, now and as they come."""
        self.kept = Kept(self.response, self._messages, self._leave)
        self._store = store
        store.add(self.kept)

    def queue(self) -> None:
        """Tell of a response that is made in the background before anything of it is."""
        for kind in ("response.created", "response.queued"):
            self._event(kind, response=self.response.model_dump())
        self._created = True

    async def to_the_end(self) -> None:
        """Run for those who ask later."""
        async for _ in self.events():
            pass

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Run and yield encoded events; one that fails before its first output raises, unless it is kept."""
        progress = Progress()
        made = changes(self._context, self._job, progress)
        begun = False
        try:
            async for some in made:
                if not begun:
                    begun = True
                    for event in self._opening():
                        yield event
                for change in some:
                    for kind, fields in self._of_change(change):
                        yield self._event(kind, **fields)
            self._close(progress)
            yield self._event(f"response.{self.response.status}", response=self.response.model_dump())
        except Exception as error:
            self._fail(error)
            if not begun and not self.response.background:
                raise
            if not begun:
                for event in self._opening():
                    yield event
            yield self._event("response.failed", response=self.response.model_dump())
        finally:
            await made.aclose()
            self._leave()

    def _opening(self) -> Iterator[bytes]:
        self.response.status = "in_progress"
        for kind in (*(() if self._created else ("response.created",)), "response.in_progress"):
            yield self._event(kind, response=self.response.model_dump())

    def _close(self, progress: Progress) -> None:
        response = self.response
        cut = progress.finish_reason == "length"
        response.status = "incomplete" if cut else "completed"
        if cut:
            response.incomplete_details = {"reason": "max_output_tokens"}
            if response.output:
                response.output[-1]["status"] = "incomplete"
        response.usage = ResponseUsage(
            input_tokens=progress.prompt_tokens,
            input_tokens_details={"cached_tokens": progress.cached_tokens},
            output_tokens=progress.output_tokens,
            output_tokens_details={"reasoning_tokens": progress.reasoning_tokens},
            total_tokens=progress.prompt_tokens + progress.output_tokens,
        )

    def _fail(self, error: Exception) -> None:
        failure: Failure = failure_of(error)
        report(error, failure, self._context.settings.log_error_stack)
        self.error = error
        self.response.status = "failed"
        code = "server_error" if failure.status >= 500 else "invalid_request"
        self.response.error = {"code": code, "message": failure.body()["error"]["message"]}

    def _leave(self) -> None:
        """Whatever ended the run: nobody waits for more of it."""
        ended = self.response.status in _ENDED
        if not ended:
            self.response.status = "cancelled"
        if self.kept is None or self._store is None:
            return
        if not ended:
            if not self.kept.events:
                self._event("response.created", response=self.response.model_dump())
            self._event("response.cancelled", response=self.response.model_dump())
        if self.response.status in ("completed", "incomplete"):
            self.kept.messages = [*self._messages, *messages_of(self.response.output)]
        self.kept.tell()
        self._store.resize(self.kept)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        event = b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"
        if self.kept is not None:
            self.kept.tell(event)
        return event

    def _of_change(self, change: Change) -> Iterator[tuple[str, dict[str, Any]]]:
        block = change.block
        if change.what == OPEN:
            prefix = {TEXT: "msg", CALL: "fc"}.get(block.kind, "rs")
            self._ids.append(f"{prefix}_{random_id()}")
        item_id, place = self._ids[block.index], {"output_index": block.index}
        if change.what == OPEN:
            yield "response.output_item.added", {**place, "item": _item(block, item_id, "in_progress")}
        inside = {"item_id": item_id, **place, **({} if block.kind == CALL else {"content_index": 0})}
        if change.what == OPEN and block.kind == TEXT:
            yield "response.content_part.added", {**inside, "part": _part("")}
        elif change.what == MORE:
            yield f"response.{_STREAM[block.kind]}.delta", {**inside, "delta": change.text, **_LOGPROBS[block.kind]}
        elif change.what == CLOSE:
            name = "arguments" if block.kind == CALL else "text"
            yield f"response.{_STREAM[block.kind]}.done", {**inside, name: block.text, **_LOGPROBS[block.kind]}
            if block.kind == TEXT:
                yield "response.content_part.done", {**inside, "part": _part(block.text)}
            item = _item(block, item_id, "completed")
            self.response.output.append(item)
            yield "response.output_item.done", {**place, "item": item}


_STREAM = {TEXT: "output_text", CALL: "function_call_arguments", "reasoning": "reasoning_text"}
# Required of text events even where nobody asked for log-probabilities.
_LOGPROBS: dict[str, dict[str, Any]] = {TEXT: {"logprobs": []}, CALL: {}, "reasoning": {}}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(block: Block, item_id: str, status: str) -> dict[str, Any]:
    head = {"id": item_id, "status": status}
    done = status == "completed"
    if block.kind == TEXT:
        return {"type": "message", **head, "role": "assistant", "content": [_part(block.text)] if done else []}
    if block.kind == CALL:
        arguments = block.text if done else ""
        return {"type": "function_call", **head, "call_id": block.call_id, "name": block.name, "arguments": arguments}
    content = [{"type": "reasoning_text", "text": block.text}] if done else []
    return {"type": "reasoning", **head, "summary": [], "content": content}
