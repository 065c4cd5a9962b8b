"""An answer as a row of blocks, one open at a time: what APIs that stream items or content blocks need of it.

OpenAI's chat deltas say what is added where; Anthropic's Messages and OpenAI's Responses want each part opened,
filled and closed before the next one begins.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hardpoint.front_end.server.hooks import PlainReader
from hardpoint.front_end.server.serving.context import ServerContext
from hardpoint.front_end.server.serving.jobs import Job
from hardpoint.types.answers import DeltaMessage, new_call_id
from hardpoint.types.outputs import CompletionOutput, RequestOutput

REASONING, TEXT, CALL = "reasoning", "text", "call"
OPEN, MORE, CLOSE = "open", "more", "close"


@dataclass
class Block:
    """A part of an answer.

    index    its place in the answer
    text     all of it so far; the arguments as JSON text for a call
    call_id  of a call
    name     of a call's function
    """

    kind: str
    index: int
    text: str = ""
    call_id: str = ""
    name: str = ""


class Change(NamedTuple):
    """What happens to a block: OPEN, MORE with the text that is added, CLOSE."""

    what: str
    block: Block
    text: str = ""


@dataclass
class Blocks:
    """Puts the fragments of one answer into blocks."""

    blocks: list[Block] = field(default_factory=list)
    _open: Block | None = None
    _call: int | None = None

    def take(self, message: DeltaMessage | None) -> Iterator[Change]:
        """The changes a fragment makes."""
        if message is None:
            return
        if message.thought:
            yield from self._add(REASONING, message.thought)
        if message.content:
            yield from self._add(TEXT, message.content)
        for call in message.tool_calls:
            if self._open is None or self._open.kind != CALL or self._call != call.index:
                name = (call.function.name if call.function is not None else None) or ""
                self._call = call.index
                yield from self._begin(Block(CALL, len(self.blocks), call_id=call.id or new_call_id(), name=name))
            if call.function is not None and call.function.arguments:
                yield from self._add(CALL, call.function.arguments)

    def end(self) -> Iterator[Change]:
        """The answer is over."""
        if self._open is not None:
            closed, self._open = self._open, None
            yield Change(CLOSE, closed)

    def _begin(self, block: Block) -> Iterator[Change]:
        yield from self.end()
        self.blocks.append(block)
        self._open = block
        yield Change(OPEN, block)

    def _add(self, kind: str, text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(Block(kind, len(self.blocks)))
        assert self._open is not None
        self._open.text += text
        yield Change(MORE, self._open, text)


@dataclass
class Progress:
    """How far one answer has come.

    finish_reason  OpenAI's, once it is over
    """

    blocks: Blocks = field(default_factory=Blocks)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def saw(self, result: RequestOutput, output: CompletionOutput) -> None:
        """Count an output's tokens."""
        self.prompt_tokens = len(result.prompt_token_ids or ())
        self.cached_tokens = result.num_cached_tokens or self.cached_tokens
        self.output_tokens += len(output.token_ids)
        self.stop_reason = output.stop_reason


async def changes(context: ServerContext, job: Job, progress: Progress) -> AsyncGenerator[list[Change], None]:
    """Run a job with one prompt and one answer, and yield what each output changes; `progress` follows."""
    reader = job.reader(0) or PlainReader()
    outputs = job.run(context)
    try:
        async for _, result in outputs:
            for output in result.outputs:
                progress.saw(result, output)
                made = list(progress.blocks.take(reader.feed(output.text, output.token_ids)))
                context.request_log.streamed(job.request_id, output.text, output.finish_reason)
                if output.finish_reason is not None:
                    made += progress.blocks.take(reader.finish())
                    made += progress.blocks.end()
                    progress.finish_reason = reader.finish_reason(output.finish_reason)
                    progress.reasoning_tokens = reader.reasoning_tokens() or 0
                yield made
    finally:
        await outputs.aclose()


async def run_to_end(context: ServerContext, job: Job) -> Progress:
    """Run a job with one prompt and one answer to its end."""
    progress = Progress()
    async for _ in changes(context, job, progress):
        pass
    return progress
