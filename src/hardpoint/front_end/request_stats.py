"""What the front end learns about time and tokens from the engine core's outputs."""

from __future__ import annotations

from hardpoint.types.finish import FinishReason
from hardpoint.types.messages import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput
from hardpoint.types.stats import FinishedRequestStats, IterationStats, PrefillStats, RequestStateStats


def count_output(
    stats: IterationStats,
    output: EngineCoreOutput,
    timestamp: float,
    request: RequestStateStats,
    prefill: PrefillStats | None,
) -> None:
    """Count one output of one request.

    timestamp  monotonic time of the engine core when the step ended
    prefill    where the prompt came from, for the output with the first token; else None
    """
    tokens = len(output.new_token_ids)
    stats.num_generation_tokens += tokens
    request.num_generation_tokens += tokens
    for event in output.events or ():
        _count_event(stats, event, request)
    if output.num_nans_in_logits:
        request.is_corrupted = True
    if prefill is not None:
        stats.prompt_token_stats.add(prefill)
        request.first_token_ts = timestamp
        # Wall clock: the request arrived in this process, perhaps before the engine core was asked.
        request.first_token_latency = stats.iteration_timestamp - request.arrival_time
        stats.time_to_first_tokens_iter.append(request.first_token_latency)
    elif tokens:
        stats.inter_token_latencies_iter.append(timestamp - request.last_token_ts)
    if tokens:
        request.last_token_ts = timestamp


def _count_event(stats: IterationStats, event: EngineCoreEvent, request: RequestStateStats) -> None:
    if event.type == EngineCoreEventType.QUEUED:
        request.queued_ts = event.timestamp
    elif event.type == EngineCoreEventType.SCHEDULED:
        # A preempted request is scheduled again; its waiting time is that of the first time.
        if request.scheduled_ts == 0.0:
            request.scheduled_ts = event.timestamp
    elif event.type == EngineCoreEventType.PREEMPTED:
        stats.num_preempted_reqs += 1
        request.num_preemptions += 1


def finished_stats(
    finish_reason: FinishReason,
    request_id: str,
    request: RequestStateStats,
    *,
    now: float,
    num_prompt_tokens: int,
    max_tokens: int | None,
    num_cached_tokens: int,
) -> FinishedRequestStats:
    """Sum a request up at its end; `now` is wall clock. Stages it never reached took no time."""
    queued = _span(request.queued_ts, request.scheduled_ts)
    prefill = _span(request.scheduled_ts, request.first_token_ts)
    decode = _span(request.first_token_ts, request.last_token_ts)
    later_tokens = request.num_generation_tokens - 1
    return FinishedRequestStats(
        finish_reason=finish_reason,
        request_id=request_id,
        e2e_latency=now - request.arrival_time,
        num_prompt_tokens=num_prompt_tokens,
        num_preemptions=request.num_preemptions,
        num_generation_tokens=request.num_generation_tokens,
        max_tokens_param=max_tokens,
        queued_time=queued,
        prefill_time=prefill,
        inference_time=_span(request.scheduled_ts, request.last_token_ts),
        decode_time=decode,
        mean_time_per_output_token=decode / later_tokens if later_tokens > 0 else 0.0,
        is_corrupted=request.is_corrupted,
        num_cached_tokens=num_cached_tokens,
    )


def _span(start: float, end: float) -> float:
    return end - start if start and end else 0.0
