"""/v1/chat/completions: a conversation in, the assistant's message out, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from hardpoint.front_end.parsers.answers import Answer, merged
from hardpoint.front_end.prompts import TokenPrompt
from hardpoint.front_end.server.field_names import FieldNames
from hardpoint.front_end.server.hooks import Reader
from hardpoint.front_end.server.logprobs import ChatLogprobs, prompt_logprobs_body
from hardpoint.front_end.server.protocol.chat import (
    ChatCompletionLogProbs,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
)
from hardpoint.front_end.server.protocol.structured import constraint_name
from hardpoint.front_end.server.refusals import refuse_unsupported
from hardpoint.front_end.server.serving.context import ServerContext
from hardpoint.front_end.server.serving.jobs import Job, UsageCount, metrics_of, stream_usage
from hardpoint.front_end.server.serving.prompts import PromptMaker, output_limit
from hardpoint.front_end.server.streams import DONE, event
from hardpoint.log import init_logger
from hardpoint.types.answers import DeltaMessage
from hardpoint.types.outputs import CompletionOutput, RequestOutput

logger = init_logger(__name__)

# What the engine calls the conversation.
_LOW_NAMES = {"prompt": "messages", "multi_modal_data": "messages"}


class ChatService:
    """Answers chat requests of one server."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._prompts = PromptMaker(context)

    async def prepare(self, request: ChatCompletionRequest, http: Request, names: FieldNames | None = None) -> Job:
        """Check a request, render and tokenise its conversation.

        names  what the client calls the fields, where it asked another API

        Raises VLLMValidationError for what cannot be done, ApiError for an unknown model.
        """
        names = names or FieldNames()
        with names.told():
            return await self._prepare(request, http, names)

    async def _prepare(self, request: ChatCompletionRequest, http: Request, names: FieldNames) -> Job:
        context = self._context
        await context.find_model(request.model)
        refuse_unsupported(request)
        self._warn_of_unseen_tools(request)
        low = {
            **_LOW_NAMES,
            **constraint_name(request),
            **({"logprobs": "top_logprobs"} if request.top_logprobs else {}),
        }
        plan = context.parsers.plan(request, self._prompts.template_arguments(request))
        if plan.binds_calls:
            low["structured_outputs"] = "tools"
        # A parser may have changed it: what runs from here on is the plan's.
        request = plan.request
        with FieldNames(low).told():
            prompt = await self.render_chat_request(request)
        plan.saw_prompt(prompt.token_ids)
        name = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
        asked = request.output_limit
        default = context.default_sampling_params.get("max_tokens") if asked is None else None
        limit = output_limit(
            asked or default, prompt, context.max_model_len, name=name, prompt_name="messages", exact=asked is not None
        )
        with FieldNames(low).told():
            params = request.to_sampling_params(limit, context.default_sampling_params)
        return Job.make(context, request, http, "chatcmpl", [prompt], [params], plan, names.also(low))

    async def render_chat_request(self, request: ChatCompletionRequest) -> TokenPrompt:
        """The prompt a request makes. Plugins wrap this to change a request before its conversation is rendered."""
        return await self._prompts.of_chat(request)

    def _warn_of_unseen_tools(self, request: ChatCompletionRequest) -> None:
        """A model whose template knows no tools is not told of them."""
        tokenizer = self._context.tokenizer
        if not request.tools or tokenizer is None:
            return
        given = request.chat_template or self._context.chat_template
        if "tools" not in (tokenizer.get_chat_template(given, request.tools) or ""):
            logger.warning_once("the chat template does not use tools: the model is not told of those in requests")

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
        usage.saw_media(job.prompts)
        usage.saw_prompt(0, result)
        scores, choices = self._scores(request), []
        for one in sorted(result.outputs, key=lambda one: one.index):
            usage.saw_tokens(one.index, len(one.token_ids))
            reader = job.reader(one.index)
            choices.append(self._choice(request, one, scores, reader))
            usage.saw_reasoning(one.index, reader.reasoning_tokens() if reader is not None else None)
            self._context.request_log.answered(job.request_id, one.text, one.token_ids, one.finish_reason)
        return ChatCompletionResponse(
            id=job.request_id,
            created=job.created,
            model=job.model_name,
            choices=choices,
            system_fingerprint=self._context.fingerprint,
            usage=usage.body(),  # type: ignore[arg-type]
            prompt_logprobs=(
                prompt_logprobs_body(result.prompt_logprobs) if request.prompt_logprobs is not None else None
            ),
            prompt_token_ids=result.prompt_token_ids if request.return_token_ids else None,
            prompt_text=job.prompts[0].text if request.return_prompt_text else None,
            metrics=metrics_of(result, self._context.settings, len(choices)),
        )

    def _choice(
        self,
        request: ChatCompletionRequest,
        output: CompletionOutput,
        scores: ChatLogprobs | None,
        reader: Reader | None,
    ) -> ChatCompletionResponseChoice:
        answer = Answer(output.text) if reader is None else reader.whole(output.text, output.token_ids)
        reason = output.finish_reason or "stop"
        echo = self._echo(request)
        logprobs = None
        if scores is not None and output.logprobs is not None:
            logprobs = ChatCompletionLogProbs(**scores.build(output.token_ids, output.logprobs))
        return ChatCompletionResponseChoice(
            index=output.index,
            message=ChatMessage(
                role=self._role(request),
                content=echo + (answer.content or "") if echo else answer.content,
                tool_calls=answer.tool_calls,
                reasoning=answer.reasoning,
            ),
            logprobs=logprobs,
            finish_reason=reason if reader is None else reader.finish_reason(reason),
            stop_reason=output.stop_reason,
            token_ids=list(output.token_ids) if request.return_token_ids else None,
        )

    async def stream(self, request: ChatCompletionRequest, job: Job) -> AsyncGenerator[bytes, None]:
        """Run a job and yield encoded events, the final `[DONE]` included."""
        context = self._context
        include_usage, continuous = stream_usage(request, context.settings)
        usage, scores = UsageCount(context.settings), self._scores(request)
        usage.saw_media(job.prompts)
        readers = [job.reader(choice) for choice in range(job.params[0].n)]
        waiting = [_Delta() for _ in readers]
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
                    reader = readers[output.index]
                    delta.add(output, scores, reader)
                    if reader is not None:
                        usage.saw_reasoning(output.index, delta.reasoning_tokens)
                    context.request_log.streamed(job.request_id, output.text, output.finish_reason)
                    if delta.worth_sending:
                        waiting[output.index] = _Delta()
                        for choice in delta.choices(output, request):
                            chunk = self._chunk(job, [choice], choice["finish_reason"])
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
        fingerprint = None if finish_reason is None else self._context.fingerprint
        return job.chunk("chat.completion.chunk", choices, fingerprint)


@dataclass
class _Delta:
    """What is to be sent next of one choice; kept while its text is held back."""

    text: str = ""
    message: DeltaMessage | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    reasoning_tokens: int | None = None

    @property
    def worth_sending(self) -> bool:
        return bool(self.text) or self.message is not None or self.finish_reason is not None

    def add(self, output: CompletionOutput, scores: ChatLogprobs | None, reader: Reader | None) -> None:
        self.token_ids += output.token_ids
        self.finish_reason = output.finish_reason
        if reader is None:
            self.text += output.text
        else:
            self._read(output, reader)
        if scores is None or output.logprobs is None or not output.token_ids:
            return
        content = scores.build(output.token_ids, output.logprobs)["content"]
        self.logprobs = {"content": [*(self.logprobs or {"content": []})["content"], *content]}

    def _read(self, output: CompletionOutput, reader: Reader) -> None:
        self.message = merged(self.message, reader.feed(output.text, output.token_ids))
        if output.finish_reason is None:
            return
        self.message = merged(self.message, reader.finish())
        self.finish_reason = reader.finish_reason(output.finish_reason)
        self.reasoning_tokens = reader.reasoning_tokens()

    def choices(self, output: CompletionOutput, request: ChatCompletionRequest) -> list[dict[str, Any]]:
        """One choice, or several where a call begins and goes on at once."""
        said = {"content": self.text} if self.text else {}
        fragments = [said] if self.message is None else _fragments(self.message)
        choices: list[dict[str, Any]] = [
            {"index": output.index, "delta": fragment, "logprobs": None, "finish_reason": None}
            for fragment in fragments
        ]
        choices[0]["logprobs"] = self.logprobs
        choices[-1]["finish_reason"] = self.finish_reason
        if self.finish_reason is not None:
            choices[-1]["stop_reason"] = output.stop_reason
        if request.return_token_ids:
            for choice in choices:
                choice["token_ids"] = []
            choices[0]["token_ids"] = self.token_ids
        return choices


def _fragments(message: DeltaMessage) -> list[dict[str, Any]]:
    """A message as deltas of a stream; in each, a call has one fragment."""
    said = message.model_dump(exclude_none=True, exclude={"tool_calls"})
    fragments: list[dict[str, Any]] = [said]
    for call in message.tool_calls:
        fragment = call.model_dump(exclude_none=True)
        calls = fragments[-1].setdefault("tool_calls", [])
        if any(other["index"] == call.index for other in calls):
            fragments.append({"tool_calls": [fragment]})
        else:
            calls.append(fragment)
    return fragments
