"""From the engine core's tokens to what a caller sees: text, log-probabilities, stop strings, timing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hardpoint.errors import EngineGenerateError, VLLMValidationError
from hardpoint.front_end.collector import RequestOutputCollector
from hardpoint.front_end.output_logprobs import LogprobsCollector
from hardpoint.front_end.output_text import OutputText
from hardpoint.front_end.parallel_sampling import ParentRequest
from hardpoint.front_end.pooling import PoolingRequestState
from hardpoint.front_end.request_stats import count_output, finished_stats
from hardpoint.log import init_logger
from hardpoint.types.finish import FinishReason
from hardpoint.types.messages import EngineCoreOutput, EngineCoreRequest
from hardpoint.types.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput
from hardpoint.types.sampling_params import RequestOutputKind
from hardpoint.types.stats import FinishedRequestStats, IterationStats, PrefillStats, RequestStateStats

__all__ = ["OutputProcessor", "OutputProcessorOutput", "ParentRequest", "RequestOutputCollector"]

logger = init_logger(__name__)


@dataclass
class OutputProcessorOutput:
    """What one batch of engine outputs led to.

    request_outputs  outputs of requests without a queue (the offline API)
    reqs_to_abort    internal ids the engine core must stop: a stop string ended them here
    """

    request_outputs: list[RequestOutput | PoolingRequestOutput[Any]] = field(default_factory=list)
    reqs_to_abort: list[str] = field(default_factory=list)


class RequestState:
    """One running sequence: its text so far and what the caller has seen of it."""

    def __init__(
        self,
        request: EngineCoreRequest,
        tokenizer: Any,
        prompt_text: str | None,
        parent: ParentRequest | None,
        index: int,
        queue: RequestOutputCollector | None,
        stream_interval: int,
        log_stats: bool,
    ) -> None:
        params = request.sampling_params
        assert params is not None
        prompt_token_ids = request.prompt_token_ids or []
        self.request_id = request.request_id
        self.external_id = parent.external_req_id if parent else request.external_req_id or request.request_id
        self.parent = parent
        self.index = index
        self.queue = queue
        self.params = params
        self.lora_request = request.lora_request
        self.prompt = prompt_text
        self.prompt_token_ids = prompt_token_ids
        self.output = OutputText(tokenizer, params, prompt_token_ids)
        self.logprobs = LogprobsCollector(tokenizer, params, prompt_token_ids)
        self.stats = RequestStateStats(arrival_time=request.arrival_time) if log_stats else None
        self.prefill: PrefillStats | None = None
        self.is_prefilling = True
        self._stream_interval = params.stream_interval or stream_interval
        self._tokens_sent = 0
        self._chars_sent = 0

    # -- taking in -----------------------------------------------------------------------------

    def add(self, output: EngineCoreOutput) -> tuple[FinishReason | None, int | str | None]:
        """Take one engine output in; return why the sequence ends now, if it does, and at what."""
        reason, stop = output.finish_reason, output.stop_reason
        at_end_token = reason is FinishReason.STOP and not self.params.include_stop_str_in_output
        if at_end_token and self.params.structured_outputs is not None:
            # A complete text ends by itself, with a token that is part of it.
            last = output.new_token_ids[-1] if output.new_token_ids else None
            at_end_token = last in self.params.all_stop_token_ids
        before = len(self.output.token_ids)
        matched = self.output.add(output.new_token_ids, hide_last=at_end_token)
        if matched is None and reason is not None:
            matched = self.output.end()
        if matched is not None:
            reason, stop = FinishReason.STOP, matched
        self.logprobs.add_prompt(output.new_prompt_logprobs_tensors)
        self.logprobs.add(output.new_logprobs, len(self.output.token_ids) - before)
        if output.prefill_stats is not None:
            self.prefill = output.prefill_stats
        return reason, stop

    def end(self) -> None:
        """End the text from this side."""
        self.output.end()

    # -- giving out ----------------------------------------------------------------------------

    def make_output(
        self,
        reason: FinishReason | None,
        stop: int | str | None,
        kv_transfer_params: dict[str, Any] | None = None,
        ec_transfer_params: dict[str, Any] | None = None,
    ) -> RequestOutput | None:
        """What the caller is to see now; None when it is to wait."""
        finished = reason is not None
        if not finished and not self._is_due():
            return None
        completion = self._completion(reason, stop)
        completions, all_finished = [completion], finished
        if self.parent is not None:
            completions, all_finished = self.parent.get_outputs(self.request_id, completion)
            if not completions:
                return None
        return RequestOutput(
            request_id=self.external_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs(),
            outputs=completions,
            finished=all_finished,
            metrics=self.stats,
            lora_request=self.lora_request,
            num_cached_tokens=self.prefill.num_cached_tokens if self.prefill else None,
            num_cache_creation_tokens=self.prefill.num_cache_creation_tokens if self.prefill else None,
            kv_transfer_params=kv_transfer_params,
            ec_transfer_params=ec_transfer_params,
        )

    def _is_due(self) -> bool:
        kind = self.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY:
            return False
        new_tokens = len(self.output.token_ids) - self._tokens_sent
        if new_tokens < (self._stream_interval if self._tokens_sent else 1):
            return False
        # A delta without text would only say that text is held back: its tokens come with the text.
        nothing_to_show = self.output.visible == self._chars_sent
        return not (kind is RequestOutputKind.DELTA and nothing_to_show and self.output.waits)

    def _completion(self, reason: FinishReason | None, stop: int | str | None) -> CompletionOutput:
        first_token, first_char = 0, 0
        if self.params.output_kind is RequestOutputKind.DELTA:
            first_token, first_char = self._tokens_sent, self._chars_sent
        visible = self.output.visible
        token_ids = self.output.token_ids[first_token:]
        positions = self.logprobs.positions
        self._tokens_sent, self._chars_sent = len(self.output.token_ids), visible
        return CompletionOutput(
            index=self.index,
            text=self.output.text[first_char:visible],
            token_ids=token_ids,
            cumulative_logprob=self.logprobs.cumulative,
            logprobs=None if positions is None else positions[first_token:],
            finish_reason=None if reason is None else str(reason),
            stop_reason=stop,
            lora_request=self.lora_request,
        )

    def _prompt_logprobs(self) -> Any:
        if self.params.output_kind is RequestOutputKind.DELTA:
            return self.logprobs.take_prompt()
        return self.logprobs.prompt_positions


class OutputProcessor:
    """Turns engine outputs into request outputs, for every running request.

    tokenizer        None leaves texts empty
    log_stats        keep timing of requests
    stream_interval  new tokens between two outputs of a request, unless it says otherwise
    """

    def __init__(self, tokenizer: Any, log_stats: bool, stream_interval: int = 1) -> None:
        self.tokenizer = tokenizer
        self.log_stats = log_stats
        self.stream_interval = stream_interval
        self.request_states: dict[str, RequestState] = {}
        self.parent_requests: dict[str, ParentRequest] = {}
        # The caller's id -> internal ids, since callers may use an id twice.
        self._internal_ids: dict[str, list[str]] = {}
        # Requests that ended between two batches, to be counted with the next one.
        self._ended_since: list[FinishedRequestStats] = []

    def get_num_unfinished_requests(self) -> int:
        """How many sequences run."""
        return len(self.request_states)

    def has_unfinished_requests(self) -> bool:
        """Whether any sequence runs."""
        return bool(self.request_states)

    def num_queued_tokens(self) -> int:
        """Prompt tokens of sequences that have no token yet."""
        return sum(len(state.prompt_token_ids) for state in self.request_states.values() if state.is_prefilling)

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt_text: str | None,
        parent: ParentRequest | None = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        """Expect outputs of a sequence; ValueError when its id is taken."""
        if request.request_id in self.request_states:
            raise ValueError(f"request id {request.request_id} is already running")
        state: Any
        if request.pooling_params is not None:
            state = PoolingRequestState(request, prompt_text, queue, self.log_stats)
        else:
            state = RequestState(
                request, self.tokenizer, prompt_text, parent, request_index, queue, self.stream_interval, self.log_stats
            )
        self.request_states[state.request_id] = state
        if parent is not None:
            self.parent_requests[parent.request_id] = parent
        self._internal_ids.setdefault(state.external_id, []).append(state.request_id)

    # -- engine outputs ------------------------------------------------------------------------

    def process_outputs(
        self,
        engine_core_outputs: Iterable[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: IterationStats | None = None,
    ) -> OutputProcessorOutput:
        """Take a batch in; outputs go to the requests' queues, or are returned where there is none.

        engine_core_timestamp  monotonic time of the engine core when the step ended
        """
        result = OutputProcessorOutput()
        if iteration_stats is not None:
            iteration_stats.finished_requests += self._ended_since
            self._ended_since = []
        for output in engine_core_outputs:
            state = self.request_states.get(output.request_id)
            if state is None:
                continue  # aborted here while the engine core was still at it
            self._count(state, output, engine_core_timestamp, iteration_stats)
            try:
                self._process(state, output, iteration_stats, result)
            except Exception as problem:  # one request's trouble is not the others'
                logger.exception("Output of request %s cannot be processed", state.external_id)
                error = EngineGenerateError(f"the output cannot be processed: {problem}", code="output")
                self._fail(state, error, output.finished, iteration_stats, result)
        return result

    def _process(
        self,
        state: RequestState,
        output: EngineCoreOutput,
        stats: IterationStats | None,
        result: OutputProcessorOutput,
    ) -> None:
        if output.finish_reason is FinishReason.ERROR:
            self._fail(state, _error_of(output), output.finished, stats, result)
            return
        reason, stop = state.add(output)
        made = state.make_output(reason, stop, output.kv_transfer_params, output.ec_transfer_params)
        if reason is not None:
            self._forget(state)
            self._count_end(state, reason, stats)
            if not output.finished:
                result.reqs_to_abort.append(state.request_id)
        self._deliver(state, made, result)

    @staticmethod
    def _deliver(
        state: RequestState, made: RequestOutput | PoolingRequestOutput[Any] | None, result: OutputProcessorOutput
    ) -> None:
        if made is None:
            return
        if state.queue is not None:
            state.queue.put(made)
        else:
            result.request_outputs.append(made)

    def _fail(
        self,
        state: RequestState,
        error: EngineGenerateError | VLLMValidationError,
        engine_is_done: bool,
        stats: IterationStats | None,
        result: OutputProcessorOutput,
    ) -> None:
        """End a request with an error; with n > 1 the other sequences end too."""
        siblings = (
            [self.request_states.get(child) for child in state.parent.child_requests] if state.parent else [state]
        )
        for other in siblings:
            if other is None:
                continue
            self._forget(other)
            self._count_end(other, FinishReason.ERROR, stats)
            if other is not state or not engine_is_done:
                result.reqs_to_abort.append(other.request_id)
        if state.queue is not None:
            state.queue.put(error)
        else:
            result.request_outputs.append(
                state.failed_output(error) if isinstance(state, PoolingRequestState) else _failed_output(state, error)
            )

    # -- ends from this side -------------------------------------------------------------------

    def abort_requests(self, request_ids: Iterable[str], internal: bool = False) -> list[str]:
        """End requests from this side; returns the internal ids the engine core must stop.

        Each reader gets a last output with `finish_reason` abort. Ids are the callers' unless
        `internal`; unknown ones are passed over.
        """
        stopped: list[str] = []
        for request_id in request_ids:
            for internal_id in self._resolve(request_id, internal):
                state = self.request_states.get(internal_id)
                if state is None:
                    continue
                stopped.append(internal_id)
                state.end()
                made = state.make_output(FinishReason.ABORT, None)
                self._forget(state)
                self._count_end(state, FinishReason.ABORT, None)
                if state.queue is not None and made is not None:
                    state.queue.put(made)
        return stopped

    def _resolve(self, request_id: str, internal: bool) -> list[str]:
        if not internal and request_id in self._internal_ids:
            return list(self._internal_ids[request_id])
        parent = self.parent_requests.get(request_id)
        return list(parent.child_requests) if parent is not None else [request_id]

    def propagate_error(self, error: Exception) -> None:
        """End every request with an error, e.g. because the engine core is gone."""
        for state in list(self.request_states.values()):
            self._forget(state)
            if state.queue is not None:
                state.queue.put(error)

    def _forget(self, state: RequestState) -> None:
        self.request_states.pop(state.request_id, None)
        ids = self._internal_ids.get(state.external_id, [])
        if state.request_id in ids:
            ids.remove(state.request_id)
        if not ids:
            self._internal_ids.pop(state.external_id, None)
        if state.parent is not None:
            state.parent.child_requests.discard(state.request_id)
            if not state.parent.child_requests:
                self.parent_requests.pop(state.parent.request_id, None)

    # -- statistics ----------------------------------------------------------------------------

    def _count(
        self,
        state: RequestState,
        output: EngineCoreOutput,
        timestamp: float | None,
        stats: IterationStats | None,
    ) -> None:
        starts = state.is_prefilling and bool(output.new_token_ids or output.pooling_output is not None)
        if starts:
            state.is_prefilling = False
        if stats is None or state.stats is None or timestamp is None:
            return
        prefill = None
        if starts:
            tokens = len(state.prompt_token_ids)
            prefill = output.prefill_stats or state.prefill
            prefill = prefill or PrefillStats(num_prompt_tokens=tokens, num_computed_tokens=tokens)
        count_output(stats, output, timestamp, state.stats, prefill)

    def _count_end(self, state: RequestState, reason: FinishReason, stats: IterationStats | None) -> None:
        if state.stats is None:
            return
        pending = stats or IterationStats()
        ended = finished_stats(
            reason,
            state.external_id,
            state.stats,
            now=pending.iteration_timestamp,
            num_prompt_tokens=len(state.prompt_token_ids),
            max_tokens=getattr(state.params, "max_tokens", None),
            num_cached_tokens=state.prefill.num_cached_tokens if state.prefill else 0,
        )
        if stats is None:
            self._ended_since.append(ended)
            return
        stats.finished_requests.append(ended)
        ParentRequest.observe_finished_request(state.parent, stats, state.stats.num_generation_tokens)


def _error_of(output: EngineCoreOutput) -> EngineGenerateError | VLLMValidationError:
    """What a request that ended with an error raises: a refusal names the client's parameter."""
    words = output.error or "the engine could not go on with this request"
    if output.refused_parameter is not None:
        return VLLMValidationError(words, parameter=output.refused_parameter)
    return EngineGenerateError(words, code="engine")


def _failed_output(state: RequestState, error: EngineGenerateError | VLLMValidationError) -> RequestOutput:
    """How the offline API, which has no queue to raise in, is told of a failure."""
    output = CompletionOutput(
        index=state.index,
        text=state.output.text,
        token_ids=state.output.token_ids,
        cumulative_logprob=state.logprobs.cumulative,
        logprobs=state.logprobs.positions,
        finish_reason=str(FinishReason.ERROR),
        stop_reason=str(error),
    )
    return RequestOutput(
        request_id=state.external_id,
        prompt=state.prompt,
        prompt_token_ids=state.prompt_token_ids,
        prompt_logprobs=None,
        outputs=[output],
        finished=True,
        metrics=state.stats,
    )
