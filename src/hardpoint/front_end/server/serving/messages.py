"""/v1/messages: Anthropic's API on the machinery of chats."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request

from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.server.errors import failure_of, report
from hardpoint.front_end.server.field_names import FieldNames
from hardpoint.front_end.server.protocol.chat import ChatCompletionRequest
from hardpoint.front_end.server.protocol.messages import (
    CountTokensRequest,
    CountTokensResponse,
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
)
from hardpoint.front_end.server.refusals import refuse_unsupported
from hardpoint.front_end.server.serving.blocks import (
    CALL,
    MORE,
    OPEN,
    TEXT,
    Block,
    Change,
    Progress,
    changes,
    run_to_end,
)
from hardpoint.front_end.server.serving.chat import ChatService
from hardpoint.front_end.server.serving.context import ServerContext
from hardpoint.front_end.server.serving.jobs import Job

_encode = msgspec.json.Encoder().encode
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}


class MessagesService:
    """Answers Messages requests of one server."""

    def __init__(self, context: ServerContext, chat: ChatService) -> None:
        self._context = context
        self._chat = chat

    async def prepare(self, request: MessagesRequest, http: Request) -> Job:
        """Check a request and make its prompt. Raises what a chat request raises."""
        chat, names = self._as_chat(request)
        job = await self._chat.prepare(chat, http, names)
        job.request_id = f"msg_{job.request_id.partition('-')[2]}"
        return job

    async def count(self, request: CountTokensRequest) -> CountTokensResponse:
        """How many tokens a conversation has."""
        await self._context.find_model(request.model)
        chat, names = self._as_chat(request)
        with names.told():
            prompt = await self._chat.render_chat_request(chat)
        return CountTokensResponse(input_tokens=len(prompt.token_ids))

    def _as_chat(self, request: CountTokensRequest) -> tuple[ChatCompletionRequest, FieldNames]:
        """The chat that a request is. Thinking is told apart from the answer by a parser."""
        refuse_unsupported(request)
        thinks = request.thinking is not None and request.thinking.type != "disabled"
        if thinks and self._context.parsers.reasoning_class is None:
            raise VLLMValidationError("thinking needs a server started with --reasoning-parser", parameter="thinking")
        return request.to_chat()

    async def whole(self, request: MessagesRequest, job: Job) -> MessagesResponse:
        """Run a job to its end and build the answer."""
        progress = await run_to_end(self._context, job)
        reason, sequence = _stopped(progress)
        return MessagesResponse(
            id=job.request_id,
            model=job.model_name,
            content=[_whole_block(block) for block in progress.blocks.blocks],
            stop_reason=reason,
            stop_sequence=sequence,
            usage=_usage(progress),
        )

    async def stream(self, request: MessagesRequest, job: Job) -> AsyncGenerator[bytes, None]:
        """Run a job and yield encoded events."""
        progress, begun = Progress(), False
        made = changes(self._context, job, progress)
        try:
            async for some in made:
                if not begun:
                    begun = True
                    yield self._start(job, progress)
                for change in some:
                    yield _block_event(change)
            reason, sequence = _stopped(progress)
            ended = {"stop_reason": reason, "stop_sequence": sequence}
            yield _event("message_delta", delta=ended, usage=_usage(progress).model_dump())
            yield _event("message_stop")
        except Exception as error:
            if not begun:
                raise
            # Clients of this API do not know OpenAI's error event.
            failure = failure_of(error)
            report(error, failure, self._context.settings.log_error_stack)
            yield _event("error", error=failure.messages_body()["error"])
        finally:
            await made.aclose()

    @staticmethod
    def _start(job: Job, progress: Progress) -> bytes:
        usage = MessagesUsage(input_tokens=progress.prompt_tokens, cache_read_input_tokens=progress.cached_tokens)
        message = MessagesResponse(id=job.request_id, model=job.model_name, content=[], usage=usage)
        return _event("message_start", message=message.model_dump())


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind, **fields}) + b"\n\n"


def _block_event(change: Change) -> bytes:
    index = change.block.index
    if change.what == OPEN:
        return _event("content_block_start", index=index, content_block=_empty_block(change.block))
    if change.what == MORE:
        return _event("content_block_delta", index=index, delta=_delta(change.block, change.text))
    return _event("content_block_stop", index=index)


def _empty_block(block: Block) -> dict[str, Any]:
    if block.kind == TEXT:
        return {"type": "text", "text": ""}
    if block.kind == CALL:
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    return {"type": "thinking", "thinking": "", "signature": ""}


def _delta(block: Block, text: str) -> dict[str, Any]:
    if block.kind == TEXT:
        return {"type": "text_delta", "text": text}
    if block.kind == CALL:
        return {"type": "input_json_delta", "partial_json": text}
    return {"type": "thinking_delta", "thinking": text}


def _whole_block(block: Block) -> dict[str, Any]:
    if block.kind == TEXT:
        return {"type": "text", "text": block.text}
    if block.kind == CALL:
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(block.text)}
    return {"type": "thinking", "thinking": block.text, "signature": ""}


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments; empty where an answer was cut before they were whole."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _stopped(progress: Progress) -> tuple[str, str | None]:
    if progress.finish_reason == "stop" and isinstance(progress.stop_reason, str):
        return "stop_sequence", progress.stop_reason
    if progress.finish_reason == "stop" and any(block.kind == CALL for block in progress.blocks.blocks):
        # OpenAI says "stop" behind a call that the client named; here each call waits for its result.
        return "tool_use", None
    return _STOP_REASONS.get(progress.finish_reason or "stop", "end_turn"), None


def _usage(progress: Progress) -> MessagesUsage:
    return MessagesUsage(
        input_tokens=progress.prompt_tokens,
        output_tokens=progress.output_tokens,
        cache_read_input_tokens=progress.cached_tokens,
    )
