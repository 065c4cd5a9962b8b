"""One request on its way through the engine: ids, parameters, outputs of all its prompts, usage."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from hardpoint.errors import EngineGenerateError, VLLMValidationError
from hardpoint.front_end.parsers.answers import AnswerPlan
from hardpoint.front_end.prompts import TokenPrompt
from hardpoint.front_end.server.asgi import REQUEST_ID_MAX_CHARS, valid_request_id
from hardpoint.front_end.server.field_names import FieldNames
from hardpoint.front_end.server.hooks import AnswerTexts, Reader
from hardpoint.front_end.server.protocol.base import (
    INT64_MAX,
    INT64_MIN,
    PerRequestMetrics,
    RequestResponseMetadata,
    now,
)
from hardpoint.front_end.server.protocol.sampling import SharedRequest
from hardpoint.front_end.server.serving.context import ServerContext
from hardpoint.front_end.server.settings import ServerSettings
from hardpoint.front_end.server.streams import merge
from hardpoint.types.lora_request import LoRARequest
from hardpoint.types.outputs import RequestOutput
from hardpoint.types.sampling_params import SamplingParams


@dataclass(frozen=True)
class RequestHeaders:
    """What a client may say beside the body.

    Raises VLLMValidationError for a header that cannot be read.
    """

    request_id: str | None
    priority: int | None
    data_parallel_rank: int | None
    session_id: str | None
    trace: dict[str, str] | None

    @classmethod
    def of(cls, http: Request) -> RequestHeaders:
        """Read them from a request."""
        headers = http.headers
        request_id = headers.get("x-request-id") or None
        if request_id is not None and not valid_request_id(request_id):
            raise VLLMValidationError(
                f"X-Request-Id must have 1 to {REQUEST_ID_MAX_CHARS} printable ASCII characters without spaces",
                parameter="X-Request-Id",
            )
        trace = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        return cls(
            request_id,
            _whole_number(headers.get("x-vllm-priority"), "X-Vllm-Priority"),
            _whole_number(headers.get("x-data-parallel-rank"), "X-data-parallel-rank"),
            headers.get("x-session-id") or None,
            trace or None,
        )


def _whole_number(text: str | None, name: str) -> int | None:
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError:
        number = INT64_MAX + 1
    if not INT64_MIN <= number <= INT64_MAX:
        raise VLLMValidationError(f"the header {name} must be a 64-bit integer, got {text[:32]!r}", parameter=name)
    return number


@dataclass
class Job:
    """A checked request with everything the engine needs; one sequence group per prompt.

    plan   how answers are read, for messages
    texts  what request hooks do with the answers' texts
    lora_request  the adapter that the request names as its model
    names  what the client calls the fields that the engine may refuse
    """

    request_id: str
    model_name: str
    prompts: list[TokenPrompt]
    params: list[SamplingParams]
    headers: RequestHeaders
    priority: int
    session_id: str | None
    created: int
    plan: AnswerPlan | None = None
    texts: AnswerTexts | None = None
    lora_request: LoRARequest | None = None
    names: FieldNames = field(default_factory=FieldNames)

    def chunk(self, kind: str, choices: list[dict[str, Any]], fingerprint: str | None) -> dict[str, Any]:
        """An event of a stream. kind  its `object`    fingerprint  the server's, where it is to be told"""
        chunk: dict[str, Any] = {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model_name,
            "choices": choices,
        }
        if fingerprint is not None:
            chunk["system_fingerprint"] = fingerprint
        return chunk

    @classmethod
    def make(
        cls,
        context: ServerContext,
        request: SharedRequest,
        http: Request,
        prefix: str,
        prompts: list[TokenPrompt],
        params: list[SamplingParams],
        plan: AnswerPlan | None = None,
        names: FieldNames | None = None,
    ) -> Job:
        """Combine the body with the headers, which win.

        plan   how the answers are read, for messages
        names  what the client calls the fields
        """
        headers = RequestHeaders.of(http)
        request_id = f"{prefix}-{headers.request_id or request.request_id}"
        http.state.request_metadata = RequestResponseMetadata(request_id=request_id)
        priority = request.priority if headers.priority is None else headers.priority
        return cls(
            request_id=request_id,
            model_name=context.check_model(request.model),
            prompts=prompts,
            params=params,
            headers=headers,
            priority=context.check_priority(priority),
            session_id=headers.session_id or request.session_id,
            created=now(),
            plan=plan,
            texts=context.hooks.texts_of(request, http),
            lora_request=context.adapters.get(request.model),
            names=(names or FieldNames()).also({"data_parallel_rank": "X-data-parallel-rank"}),
        )

    def reader(self, choice: int) -> Reader | None:
        """A reader for one answer; None where its text is its content."""
        own = None if self.plan is None or self.plan.reads_nothing else self.plan.reader()
        return own if self.texts is None else self.texts.reader(choice, own)

    async def run(self, context: ServerContext) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs of all prompts as they come, each with its prompt's index.

        Raises AdmissionError past a queue limit, and EngineGenerateError when a sequence failed.
        """
        engine = context.engine
        engine.check_admission(len(self.prompts) * self.params[0].n, self.request_id)
        trace = self.headers.trace if self.headers.trace and await engine.is_tracing_enabled() else None
        ids = [self.request_id]
        if len(self.prompts) > 1:
            ids = [f"{self.request_id}-{index}" for index in range(len(self.prompts))]
        merged = merge([self._start(context, index, request_id, trace) for index, request_id in enumerate(ids)])
        with context.running.of(self.request_id, ids):
            try:
                with self.names.told():
                    async for index, output in merged:
                        if any(one.finish_reason == "error" for one in output.outputs):
                            raise EngineGenerateError("the engine could not finish this request", code="engine-request")
                        yield index, output
            finally:
                await merged.aclose()

    def _start(
        self, context: ServerContext, index: int, request_id: str, trace: dict[str, str] | None
    ) -> AsyncGenerator[RequestOutput, None]:
        prompt, params = self.prompts[index], self.params[index]
        context.request_log.received(request_id, prompt.text, prompt.token_ids, params)
        return context.engine.generate(
            prompt.for_engine(),
            params,
            request_id,
            prompt_text=prompt.text,
            trace_headers=trace,
            priority=self.priority,
            data_parallel_rank=self.headers.data_parallel_rank,
            session_id=self.session_id,
            lora_request=self.lora_request,
            **self._about_reasoning(params),
        )

    def _about_reasoning(self, params: SamplingParams) -> dict[str, Any]:
        """Structured output begins where the reasoning ends, which the engine core has to find."""
        return self.plan.engine_arguments if self.plan is not None and params.structured_outputs is not None else {}


class UsageCount:
    """Token counts of one request while it runs."""

    def __init__(self, settings: ServerSettings) -> None:
        self._details = settings.enable_prompt_tokens_details
        self._prompts: dict[int, tuple[int, int | None]] = {}
        self._outputs: dict[int, int] = {}
        self._reasoning: dict[int, int] = {}
        self._media: dict[str, int] = {}

    def saw_media(self, prompts: list[TokenPrompt]) -> None:
        """Note how many prompt tokens stand for media."""
        for feature in (feature for prompt in prompts for feature in prompt.features or ()):
            self._media[feature.modality] = self._media.get(feature.modality, 0) + feature.mm_position.length

    def saw_prompt(self, index: int, output: RequestOutput) -> None:
        """Note the prompt of an output; the first to know about cached tokens counts."""
        _, cached = self._prompts.get(index, (0, None))
        if output.num_cached_tokens is not None:
            cached = output.num_cached_tokens
        self._prompts[index] = (len(output.prompt_token_ids or ()), cached)

    def saw_tokens(self, choice: int, count: int) -> None:
        """Note `count` more output tokens of a choice."""
        self._outputs[choice] = self._outputs.get(choice, 0) + count

    def saw_reasoning(self, choice: int, tokens: int | None) -> None:
        """Note how many of an output's tokens are reasoning; None where nobody knows."""
        if tokens is not None:
            self._reasoning[choice] = tokens

    def body(self, prompt: int | None = None, choice: int | None = None) -> dict[str, Any]:
        """The usage object of the whole request, or of one prompt's one choice so far."""
        prompts = self._prompts.values() if prompt is None else [self._prompts[prompt]]
        outputs = self._outputs.values() if choice is None else [self._outputs.get(choice, 0)]
        given, generated = sum(count for count, _ in prompts), sum(outputs)
        usage: dict[str, Any] = {
            "prompt_tokens": given,
            "total_tokens": given + generated,
            "completion_tokens": generated,
        }
        if self._reasoning:
            counts = self._reasoning.values() if choice is None else [self._reasoning.get(choice, 0)]
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(counts)}
        cached = [count for _, count in prompts if count is not None]
        if self._details and (cached or self._media):
            details: dict[str, Any] = {"cached_tokens": sum(cached)} if cached else {}
            usage["prompt_tokens_details"] = details | ({"multimodal_tokens": self._media} if self._media else {})
        return usage


def metrics_of(output: RequestOutput | None, settings: ServerSettings, n: int) -> PerRequestMetrics | None:
    """Timing of a request with one output, where the server reports it."""
    stats = output.metrics if output is not None else None
    if not settings.enable_per_request_metrics or n != 1 or stats is None:
        return None
    tokens = stats.num_generation_tokens
    generation_s = max(stats.last_token_ts - stats.first_token_ts, 0.0)
    return PerRequestMetrics(
        time_to_first_token_ms=stats.first_token_latency * 1000,
        generation_time_ms=generation_s * 1000,
        queue_time_ms=max(stats.scheduled_ts - stats.queued_ts, 0.0) * 1000,
        mean_itl_ms=generation_s * 1000 / (tokens - 1) if tokens > 1 else None,
        tokens_per_second=(tokens - 1) / generation_s if tokens > 1 and generation_s > 0 else None,
    )


def stream_usage(request: SharedRequest, settings: ServerSettings) -> tuple[bool, bool]:
    """Whether a stream ends with a usage chunk, and whether every chunk carries usage."""
    if settings.enable_force_include_usage:
        return True, True
    options = request.stream_options
    if options is None:
        return False, False
    include = bool(options.include_usage)
    return include, include and bool(options.continuous_usage_stats)
