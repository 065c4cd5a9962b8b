"""Pooling requests in the front end: their parameters, their state while they run, and waiting for their answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hardpoint.errors import EngineGenerateError, VLLMValidationError
from hardpoint.types.finish import FinishReason
from hardpoint.types.messages import EngineCoreOutput, EngineCoreRequest
from hardpoint.types.outputs import PoolingOutput, PoolingRequestOutput, RequestError
from hardpoint.types.pooling_params import PoolingParams
from hardpoint.types.stats import PrefillStats, RequestStateStats

if TYPE_CHECKING:
    from hardpoint.config.sections import ModelConfig
    from hardpoint.front_end.collector import RequestOutputCollector
    from hardpoint.front_end.prompts import Tokenization
    from hardpoint.front_end.tokenizers import Tokenizer

# Where the second of two texts begins, as the worker reads it.
SECOND_TEXT = "compressed_token_type_ids"


def settle_pooling_params(params: PoolingParams, model: ModelConfig) -> PoolingParams:
    """Check parameters against the model and fill in what follows from it, on a copy.

    Raises VLLMValidationError naming the parameter.
    """
    if model.runner_type != "pooling":
        raise VLLMValidationError(
            f"the model generates text and does not pool (task {params.task!r}); "
            "start it with --runner pooling to make it embed",
            parameter="task",
        )
    params = params.clone()
    params.verify(model)
    if params.skip_reading_prefix_cache is None:
        # Only the last token's state is there whether or not a prefix was cached.
        settings = model.pooler_config
        last = settings is not None and settings.seq_pooling_type == "LAST" and model.convert_type != "none"
        params.skip_reading_prefix_cache = not (last and params.task in ("embed", "classify"))
    return params


def with_task(params: PoolingParams, model: ModelConfig, supported: tuple[str, ...]) -> PoolingParams:
    """The parameters with the task they name, else the model's first; VLLMValidationError for one it cannot do."""
    task = params.task or model.get_pooling_task(supported)
    if task not in supported and model.runner_type == "pooling":
        raise VLLMValidationError(
            f"the model does not support the task {task!r}; it supports {', '.join(supported)}", parameter="task"
        )
    if task != params.task:
        params = params.clone()
        params.task = task
    return params


def cut_text(tokenizer: Tokenizer | None, text: str, how: Tokenization, context: int) -> str:
    """A text cut as asked, so that what the model expects around a text still is around it; the end goes first."""
    keep = how.truncate_prompt_tokens
    if tokenizer is None or not isinstance(keep, int) or keep == 0 or not -1 <= keep <= context:
        return text  # Nothing to cut, or what will be refused.
    how.truncation_side = how.truncation_side or "right"
    most = context if keep == -1 else keep
    around = tokenizer.num_special_tokens_to_add() if how.add_special_tokens else 0
    return tokenizer.cut_text(text, max(1, most - around), how.truncation_side)


class PoolingRequestState:
    """One running pooling request: nothing is known of it until its answer comes."""

    parent = None
    index = 0

    def __init__(
        self, request: EngineCoreRequest, prompt_text: str | None, queue: RequestOutputCollector | None, log_stats: bool
    ) -> None:
        params = request.pooling_params
        assert params is not None
        self.request_id = request.request_id
        self.external_id = request.external_req_id or request.request_id
        self.queue = queue
        self.params = params
        self.prompt = prompt_text
        self.prompt_token_ids = request.prompt_token_ids or []
        self.lora_request = request.lora_request
        self.stats = RequestStateStats(arrival_time=request.arrival_time) if log_stats else None
        self.prefill: PrefillStats | None = None
        self.is_prefilling = True
        self._result: Any = None

    max_tokens: int | None = None

    def add(self, output: EngineCoreOutput) -> tuple[FinishReason | None, None]:
        """Take the engine's output in."""
        if output.pooling_output is not None:
            self._result = np.asarray(output.pooling_output)
        if output.prefill_stats is not None:
            self.prefill = output.prefill_stats
        return output.finish_reason, None

    def end(self) -> None:
        """Nothing to end: there is no text."""

    def make_output(
        self, reason: FinishReason | None, stop: object, *_: Mapping[str, Any] | None
    ) -> PoolingRequestOutput[Any] | None:
        """The answer, once it is there; an aborted request has none."""
        if reason is None:
            return None
        if self._result is None:
            return self.failed_output(EngineGenerateError("the request was ended before its result", code="aborted"))
        return self._output(PoolingOutput(self._result))

    def failed_output(self, error: Exception) -> PoolingRequestOutput[Any]:
        """How the offline API is told of a failure."""
        return self._output(None, RequestError(getattr(error, "code", "error"), str(error)))

    def _output(self, outputs: Any, error: RequestError | None = None) -> PoolingRequestOutput[Any]:
        return PoolingRequestOutput(
            self.external_id,
            outputs,
            self.prompt_token_ids,
            num_cached_tokens=self.prefill.num_cached_tokens if self.prefill else 0,
            finished=True,
            error=error,
        )


async def wait_for_result(queue: RequestOutputCollector, limit_s: float | None) -> PoolingRequestOutput[Any]:
    """The answer of one request. Raises EngineGenerateError past `limit_s` seconds, and what ended the request."""
    try:
        async with asyncio.timeout(limit_s):
            output = queue.get_nowait() or await queue.get()
    except TimeoutError:
        raise EngineGenerateError(
            "the request did not end within its time limit", code="request-timeout", fix="raise --request-timeout"
        ) from None
    assert isinstance(output, PoolingRequestOutput)
    if output.error is not None:
        raise EngineGenerateError(output.error.message, code=output.error.code)
    return output
