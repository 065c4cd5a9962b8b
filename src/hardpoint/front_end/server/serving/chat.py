"""/v1/chat/completions: a conversation in, the assistant's message out, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from hardpoint.front_end.server.logprobs import ChatLogprobs, prompt_logprobs_body
from hardpoint.front_end.server.protocol.chat import (
    ChatCompletionLogProbs,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
)
from hardpoint.front_end.server.refusals import CHAT, refuse_unsupported
from hardpoint.front_end.server.serving.context import ServerContext
from hardpoint.front_end.server.serving.jobs import Job, UsageCount, metrics_of, stream_usage
from hardpoint.front_end.server.serving.prompts import PromptMaker, output_limit
from hardpoint.front_end.server.streams import DONE, event
from hardpoint.types.outputs import CompletionOutput, RequestOutput


class ChatService:
    """Answers chat requests of one server."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._prompts = PromptMaker(context)

    async def prepare(self, request: ChatCompletionRequest, http: Request) -> Job:
        """Check a request, render and tokenise its conversation.

        Raises VLLMValidationError for what cannot be done, ApiError for an unknown model.
        """
        context = self._context
        context.check_model(request.model)
        refuse_unsupported(request, CHAT)
        prompt = await self._prompts.of_chat(request)
        name = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
        asked = request.output_limit
        default = context.default_sampling_params.get("max_tokens") if asked is None else None
        limit = output_limit(
            asked or default, prompt, context.max_model_len, name=name, prompt_name="messages", exact=asked is not None
        )
        params = request.to_sampling_params(limit, context.default_sampling_params)
        return Job.make(context, request, http, "chatcmpl", [prompt], [params])

    def _role(self, request: ChatCompletionRequest) -> str:
        if request.add_generation_prompt:
            return self._context.settings.response_role
        return request.messages[-1]["role"]

    def _echo(self, request: ChatCompletionRequest) -> str:
        """The last message's text when it is to be repeated: its role is the answer's."""
        last = request.messages[-1]
        if not request.echo or last["role"] != self._role(request):
            return ""
        content = last.get("content")
        if isinstance(content, list):
            return "".join(part.get("text", "") for part in content if isinstance(part, dict))
        return content or ""

    def _scores(self, request: ChatCompletionRequest) -> ChatLogprobs | None:
        if not request.logprobs:
            return None
        as_ids = request.return_tokens_as_token_ids
        if as_ids is None:
            as_ids = self._context.settings.return_tokens_as_token_ids
        return ChatLogprobs(self._context.tokenizer, request.top_logprobs or 0, bool(as_ids))

    async def whole(self, request: ChatCompletionRequest, job: Job) -> ChatCompletionResponse:
        """Run a job to its end and build the answer."""
        result: RequestOutput | None = None
        async for _, output in job.run(self._context):
            result = output
        assert result is not None, "the engine ended a request without an output"
        usage = UsageCount(self._context.settings)
        usage.saw_prompt(0, result)
        scores, choices = self._scores(request), []
        for one in sorted(result.outputs, key=lambda one: one.index):
            usage.saw_tokens(one.index, len(one.token_ids))
            choices.append(self._choice(request, one, scores))
            self._context.request_log.answered(job.request_id, one.text, one.token_ids, one.finish_reason)
        return ChatCompletionResponse(
            id=job.request_id,
            created=job.created,
            model=job.model_name,
            choices=choices,
            system_fingerprint=self._context.fingerprint,
            usage=usage.body(),  # type: ignore[arg-type]
            prompt_logprobs=(
                prompt_logprobs_body(result.prompt_logprobs) if request.prompt_logprobs is not None else None  # type: ignore[arg-type]
            ),
            prompt_token_ids=result.prompt_token_ids if request.return_token_ids else None,
            prompt_text=job.prompts[0].text if request.return_prompt_text else None,
            metrics=metrics_of(result, self._context.settings, len(choices)),
        )

    def _choice(
        self, request: ChatCompletionRequest, output: CompletionOutput, scores: ChatLogprobs | None
    ) -> ChatCompletionResponseChoice:
        logprobs = None
        if scores is not None and output.logprobs is not None:
            logprobs = ChatCompletionLogProbs(**scores.build(output.token_ids, output.logprobs))
        return ChatCompletionResponseChoice(
            index=output.index,
            message=ChatMessage(role=self._role(request), content=self._echo(request) + output.text),
            logprobs=logprobs,
            finish_reason=output.finish_reason or "stop",
            stop_reason=output.stop_reason,
            token_ids=list(output.token_ids) if request.return_token_ids else None,
        )

    async def stream(self, request: ChatCompletionRequest, job: Job) -> AsyncGenerator[bytes, None]:
        """Run a job and yield encoded events, the final `[DONE]` included."""
        context = self._context
        include_usage, continuous = stream_usage(request, context.settings)
        usage, scores = UsageCount(context.settings), self._scores(request)
        waiting = [_Delta() for _ in range(job.params[0].n)]
        last: RequestOutput | None = None
        outputs = job.run(context)
        try:
            async for _, result in outputs:
                usage.saw_prompt(0, result)
                if last is None:
                    for chunk in self._openings(request, job, result):
                        yield event(self._counted(chunk, usage, continuous))
                last = result
                for output in result.outputs:
                    usage.saw_tokens(output.index, len(output.token_ids))
                    delta = waiting[output.index]
                    delta.add(output, scores)
                    context.request_log.streamed(job.request_id, output.text, output.finish_reason)
                    if delta.worth_sending:
                        waiting[output.index] = _Delta()
                        chunk = self._chunk(job, [delta.choice(output, request)], delta.finish_reason)
                        yield event(self._counted(chunk, usage, continuous))
        finally:
            await outputs.aclose()
        if include_usage:
            yield event(self._final(request, job, usage, last))
        yield DONE

    def _openings(self, request: ChatCompletionRequest, job: Job, result: RequestOutput) -> list[dict[str, Any]]:
        """Per choice its role, then what is echoed."""
        chunks, echo = [], self._echo(request)
        for index in range(job.params[0].n):
            delta = {"role": self._role(request), "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunk = self._chunk(job, [choice], None)
            if request.return_token_ids:
                chunk["prompt_token_ids"] = result.prompt_token_ids
            if request.return_prompt_text:
                chunk["prompt_text"] = job.prompts[0].text
            chunks.append(chunk)
            if echo:
                chunks.append(self._chunk(job, [{**choice, "delta": {"content": echo}}], None))
        return chunks

    @staticmethod
    def _counted(chunk: dict[str, Any], usage: UsageCount, continuous: bool) -> dict[str, Any]:
        if continuous:
            chunk["usage"] = usage.body(0, chunk["choices"][0]["index"])
        return chunk

    def _final(
        self, request: ChatCompletionRequest, job: Job, usage: UsageCount, last: RequestOutput | None
    ) -> dict[str, Any]:
        chunk = {**self._chunk(job, [], "stop"), "usage": usage.body()}
        metrics = metrics_of(last, self._context.settings, job.params[0].n)
        if metrics is not None:
            chunk["metrics"] = metrics.model_dump(exclude_none=True)
        return chunk

    def _chunk(self, job: Job, choices: list[dict[str, Any]], finish_reason: str | None) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "id": job.request_id,
            "object": "chat.completion.chunk",
            "created": job.created,
            "model": job.model_name,
            "choices": choices,
        }
        if finish_reason is not None and self._context.fingerprint is not None:
            chunk["system_fingerprint"] = self._context.fingerprint
        return chunk


@dataclass
class _Delta:
    """What is to be sent next of one choice; kept while its text is held back."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None

    @property
    def worth_sending(self) -> bool:
        return bool(self.text) or self.finish_reason is not None

    def add(self, output: CompletionOutput, scores: ChatLogprobs | None) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.finish_reason = output.finish_reason
        if scores is None or output.logprobs is None or not output.token_ids:
            return
        content = scores.build(output.token_ids, output.logprobs)["content"]
        self.logprobs = {"content": [*(self.logprobs or {"content": []})["content"], *content]}

    def choice(self, output: CompletionOutput, request: ChatCompletionRequest) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": output.index,
            "delta": {"content": self.text} if self.text else {},
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
        }
        if self.finish_reason is not None:
            choice["stop_reason"] = output.stop_reason
        if request.return_token_ids:
            choice["token_ids"] = self.token_ids
        return choice
