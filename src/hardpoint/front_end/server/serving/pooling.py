"""Embeddings, raw pooling, classes, scores and orders: prompts in, numbers out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.io_processors import BesideTheLoop, get_io_processor
from hardpoint.front_end.pair_scores import CROSS, LATE, Pairing, compare, how_to_score, pair_params, pair_prompt
from hardpoint.front_end.prompts import TokenPrompt
from hardpoint.front_end.server.field_names import FieldNames
from hardpoint.front_end.server.protocol.base import RequestResponseMetadata, UsageInfo
from hardpoint.front_end.server.protocol.pooling import (
    ClassificationData,
    ClassificationRequest,
    ClassificationResponse,
    ComparisonRequest,
    EmbeddingData,
    EmbeddingRequest,
    EmbeddingResponse,
    EncodedRequest,
    InputRequest,
    IOProcessorResponse,
    PoolingData,
    PoolingRequest,
    PoolingRequestBase,
    PoolingResponse,
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    RerankUsage,
    ScoreData,
    ScoreRequest,
    ScoreResponse,
)
from hardpoint.front_end.server.refusals import refuse_unsupported
from hardpoint.front_end.server.serving.context import ServerContext
from hardpoint.front_end.server.serving.jobs import RequestHeaders, UsageCount
from hardpoint.front_end.server.serving.numbers import bytes_response, to_json
from hardpoint.front_end.server.serving.prompts import PromptMaker
from hardpoint.front_end.server.streams import merge
from hardpoint.types.outputs import PoolingRequestOutput
from hardpoint.types.pooling_params import PoolingParams

# Texts this long are tokenised beside the event loop.
_LONG_TEXT_CHARS = 16_384


@dataclass
class _Job:
    """A checked request with what the engine runs for it."""

    request_id: str
    model_name: str
    prompts: list[Any]
    params: list[PoolingParams]
    headers: RequestHeaders
    priority: int

    async def run(self, context: ServerContext) -> list[PoolingRequestOutput[Any]]:
        """The answers of all prompts, in their order."""
        engine = context.engine
        engine.check_admission(len(self.prompts), self.request_id)
        trace = self.headers.trace if self.headers.trace and await engine.is_tracing_enabled() else None
        ids = [self.request_id]
        if len(self.prompts) > 1:
            ids = [f"{self.request_id}-{index}" for index in range(len(self.prompts))]
        merged = merge([self._start(context, index, one, trace) for index, one in enumerate(ids)])
        results: list[Any] = [None] * len(ids)
        with context.running.of(self.request_id, ids):
            try:
                async for index, output in merged:
                    results[index] = output
            finally:
                await merged.aclose()
        return results

    def _start(
        self, context: ServerContext, index: int, request_id: str, trace: dict[str, str] | None
    ) -> AsyncGenerator[PoolingRequestOutput[Any], None]:
        prompt, params = self.prompts[index], self.params[index]
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt if isinstance(prompt, str) else None
        context.request_log.received(request_id, text, ids, params)
        adapter = context.adapters.get(self.model_name)
        return context.engine.encode(prompt, params, request_id, adapter, trace_headers=trace, priority=self.priority)


class PoolingService:
    """Answers the pooling requests of one server.

    tasks  what the model can do
    """

    def __init__(self, context: ServerContext, tasks: Sequence[str]) -> None:
        self._context = context
        self._tasks = tuple(tasks)
        self._prompts = PromptMaker(context)
        found = get_io_processor(context.engine.vllm_config, context.engine.input_processor)
        self._processor = BesideTheLoop(found) if found is not None else None

    # The routes.

    async def embeddings(self, request: EmbeddingRequest, http: Request) -> EmbeddingResponse | Response:
        """/v1/embeddings."""
        job, outputs = await self._run_inputs(request, http, "embd", "embed", dimensions=request.dimensions)
        arrays, usage = [output.outputs.array for output in outputs], self._usage(outputs)
        if request.encoding_format.startswith("bytes"):
            return self._as_bytes(request, job, arrays, usage)
        data = [EmbeddingData(index=i, embedding=_written(request, array)) for i, array in enumerate(arrays)]
        return EmbeddingResponse(id=job.request_id, model=job.model_name, data=data, usage=usage)

    async def pooling(self, request: PoolingRequest, http: Request) -> Any:
        """/pooling."""
        if request.data is not None:
            return await self._through_processor(request, http)
        task = request.task or self._context.engine.model_config.get_pooling_task(self._tasks)
        if task == "plugin" and "plugin" not in self._tasks:
            raise VLLMValidationError("the model has no IO processor for the task plugin", parameter="task")
        job, outputs = await self._run_inputs(request, http, "pool", task, dimensions=request.dimensions)
        arrays, usage = [output.outputs.array for output in outputs], self._usage(outputs)
        if request.encoding_format.startswith("bytes"):
            return self._as_bytes(request, job, arrays, usage)
        data = [PoolingData(index=i, data=_written(request, array)) for i, array in enumerate(arrays)]
        return PoolingResponse(id=job.request_id, model=job.model_name, data=data, usage=usage)

    async def classify(self, request: ClassificationRequest, http: Request) -> ClassificationResponse:
        """/classify."""
        job, outputs = await self._run_inputs(request, http, "classify", "classify")
        data = [self._classes(index, output.outputs.array) for index, output in enumerate(outputs)]
        return ClassificationResponse(id=job.request_id, model=job.model_name, data=data, usage=self._usage(outputs))

    async def score(self, request: ScoreRequest, http: Request) -> ScoreResponse:
        """/score."""
        first, second = request.side_names
        with FieldNames({"data_1": first, "data_2": second}).told():
            pairing = Pairing(*request.sides())
        job, scores, usage = await self._scores(request, http, "embd", pairing)
        data = [ScoreData(index=index, score=score) for index, score in enumerate(scores)]
        return ScoreResponse(id=job.request_id, model=job.model_name, data=data, usage=usage)

    async def rerank(self, request: RerankRequest, http: Request) -> RerankResponse:
        """/rerank."""
        job, scores, usage = await self._scores(request, http, "rerank", Pairing([request.query], request.documents))
        # Equal scores stay in the order of the documents.
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [
            RerankResult(
                index=index, document=RerankDocument(text=request.documents[index]), relevance_score=scores[index]
            )
            for index in order[: request.top_n or len(order)]
        ]
        spent = RerankUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.total_tokens)
        return RerankResponse(id=job.request_id, model=job.model_name, usage=spent, results=results)

    # Inputs.

    async def _run_inputs(
        self, request: InputRequest, http: Request, prefix: str, task: str | None, dimensions: int | None = None
    ) -> tuple[_Job, list[PoolingRequestOutput[Any]]]:
        model_name = await self._context.find_model(request.model)
        names = {"prompt": request.prompt_field, **({} if hasattr(request, "task") else {"task": "model"})}
        with FieldNames(names).told():
            return await self._checked_inputs(request, http, prefix, model_name, task, dimensions)

    async def _checked_inputs(
        self,
        request: InputRequest,
        http: Request,
        prefix: str,
        model_name: str,
        task: str | None,
        dimensions: int | None,
    ) -> tuple[_Job, list[PoolingRequestOutput[Any]]]:
        refuse_unsupported(request)
        self._check_task(task)
        params = PoolingParams(task=task, use_activation=request.use_activation, dimensions=dimensions)
        prompts = [self._for_engine(prompt) for prompt in await self._tokenized(request)]
        job = self._job(request, http, prefix, model_name, prompts, [params] * len(prompts))
        return job, await job.run(self._context)

    def _check_task(self, task: str | None) -> None:
        if task not in self._tasks:
            raise VLLMValidationError(
                f"the model does not support the task {task!r}; it supports {', '.join(self._tasks)}",
                parameter="task",
            )

    async def _tokenized(self, request: InputRequest) -> list[TokenPrompt]:
        conversations = request.conversations()
        if conversations is not None:
            return [await self._prompts.of_conversation(request, messages) for messages in conversations]
        special = True if request.add_special_tokens is None else request.add_special_tokens
        how = {
            "add_special_tokens": special,
            "truncate_prompt_tokens": request.truncate_prompt_tokens,
            "truncation_side": request.truncation_side,
        }
        return [await self._ids_of(item, request.cache_salt, how) for item in request.inputs()]

    async def _ids_of(self, item: str | list[int], salt: str | None, how: dict[str, Any]) -> TokenPrompt:
        given: dict[str, Any] = {"prompt": item} if isinstance(item, str) else {"prompt_token_ids": item}
        if salt is not None:
            given["cache_salt"] = salt
        tokenize = self._context.engine.input_processor.tokenize
        if len(item) < _LONG_TEXT_CHARS:
            return tokenize(given, how, 0)
        return await asyncio.to_thread(tokenize, given, how, 0)

    @staticmethod
    def _for_engine(prompt: TokenPrompt) -> dict[str, Any]:
        given: dict[str, Any] = {"prompt_token_ids": prompt.token_ids}
        if prompt.text is not None:
            given["prompt"] = prompt.text
        if prompt.cache_salt is not None:
            given["cache_salt"] = prompt.cache_salt
        return given

    def _job(
        self,
        request: PoolingRequestBase,
        http: Request,
        prefix: str,
        model_name: str,
        prompts: list[Any],
        params: list[PoolingParams],
    ) -> _Job:
        headers = RequestHeaders.of(http)
        request_id = f"{prefix}-{headers.request_id or request.request_id}"
        http.state.request_metadata = RequestResponseMetadata(request_id=request_id)
        priority = self._context.check_priority(request.priority if headers.priority is None else headers.priority)
        return _Job(request_id, model_name, prompts, params, headers, priority)

    # IO processors.

    async def _through_processor(self, request: PoolingRequest, http: Request) -> IOProcessorResponse:
        model_name = await self._context.find_model(request.model)
        refuse_unsupported(request)
        if self._processor is None:
            raise VLLMValidationError(
                "data needs an IO processor, and this server has none (--io-processor-plugin)", parameter="data"
            )
        headers = RequestHeaders.of(http)
        own_id = f"pool-{headers.request_id or request.request_id}"
        prompts, params = await self._processor.before(request.data, own_id)
        if params.task is None:
            model = self._context.engine.model_config
            params.task = "plugin" if "plugin" in self._tasks else model.get_pooling_task(self._tasks)
        self._check_task(params.task)
        job = self._job(request, http, "pool", model_name, prompts, [params.clone() for _ in prompts])
        outputs = await job.run(self._context)
        http.state.request_metadata.final_usage_info = self._usage(outputs)
        answer = await self._processor.after(outputs, own_id)
        return IOProcessorResponse(request_id=own_id, data=answer)

    # Scores.

    async def _scores(
        self, request: ScoreRequest | RerankRequest, http: Request, prefix: str, pairing: Pairing
    ) -> tuple[_Job, list[float], UsageInfo]:
        first, second = request.side_names
        model_name = await self._context.find_model(request.model)
        with FieldNames({"prompt": second, "data_1": first, "task": "model"}).told():
            return await self._compared(request, http, prefix, model_name, pairing)

    async def _compared(
        self, request: ComparisonRequest, http: Request, prefix: str, model_name: str, pairing: Pairing
    ) -> tuple[_Job, list[float], UsageInfo]:
        refuse_unsupported(request)
        how = how_to_score(self._context.engine.model_config, self._tasks)
        pairing = await asyncio.to_thread(self._cut, pairing, request)
        if how == CROSS:
            prompts, params = await asyncio.to_thread(self._pairs, pairing, request)
            job = self._job(request, http, prefix, model_name, prompts, params)
            outputs = await job.run(self._context)
            return job, [float(output.outputs.array.reshape(())) for output in outputs], self._usage(outputs)
        task = "token_embed" if how == LATE else "embed"
        texts = [*pairing.queries, *pairing.documents]
        cut = {"truncate_prompt_tokens": request.truncate_prompt_tokens, "truncation_side": request.truncation_side}
        tokenized = [await self._ids_of(text, request.cache_salt, cut) for text in texts]
        wanted = PoolingParams(task=task, use_activation=request.use_activation)
        prompts = [self._for_engine(prompt) for prompt in tokenized]
        job = self._job(request, http, prefix, model_name, prompts, [wanted] * len(prompts))
        outputs = await job.run(self._context)
        count = len(pairing.queries)
        answers = Pairing(outputs[:count], outputs[count:])
        return job, [compare(how, query, doc) for query, doc in answers.pairs()], self._usage(outputs)

    def _pairs(self, pairing: Pairing, request: ComparisonRequest) -> tuple[list[Any], list[PoolingParams]]:
        prompts, params = [], []
        wanted = PoolingParams(use_activation=request.use_activation)
        for query, document in pairing.pairs():
            ids, second = pair_prompt(
                self._context.tokenizer, query, document, self._context.max_model_len, request.truncate_prompt_tokens
            )
            prompts.append(self._for_engine(TokenPrompt(ids, cache_salt=request.cache_salt)))
            params.append(pair_params(wanted, second))
        return prompts, params

    def _cut(self, pairing: Pairing, request: ComparisonRequest) -> Pairing:
        tokenizer, limits = self._context.tokenizer, (request.max_tokens_per_query, request.max_tokens_per_doc)
        if tokenizer is None or not any(limits):
            return pairing
        sides = [
            [tokenizer.cut_text(text, most) for text in texts] if most else texts
            for texts, most in zip((pairing.queries, pairing.documents), limits, strict=True)
        ]
        return Pairing(*sides)

    # Answers.

    def _classes(self, index: int, probs: np.ndarray) -> ClassificationData:
        best = int(probs.argmax())
        names = getattr(self._context.engine.model_config.hf_config, "id2label", None) or {}
        label = names.get(str(best), names.get(best)) if isinstance(names, dict) else None
        return ClassificationData(
            index=index, label=label or f"LABEL_{best}", probs=probs.tolist(), num_classes=len(probs)
        )

    def _usage(self, outputs: Sequence[PoolingRequestOutput[Any]]) -> UsageInfo:
        count = UsageCount(self._context.settings)
        for index, output in enumerate(outputs):
            count.saw_prompt(index, output)  # type: ignore[arg-type]
        return UsageInfo.model_validate(count.body())

    @staticmethod
    def _as_bytes(request: EncodedRequest, job: _Job, arrays: list[np.ndarray], usage: UsageInfo) -> Response:
        facts = {"id": job.request_id, "model": job.model_name, "usage": usage.model_dump()}
        told = facts if request.encoding_format == "bytes" else None
        return bytes_response(arrays, request.embed_dtype, request.endianness, told)


def _written(request: EncodedRequest, array: np.ndarray) -> Any:
    return to_json(array, request.encoding_format, request.embed_dtype, request.endianness)
