"""When an output ends."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.engine_core.request import Request
from hardpoint.types.finish import RequestStatus
from hardpoint.types.sampling_params import RepetitionDetectionParams


def check_stop(request: Request, max_model_len: int) -> bool:
    """Set the status of a request whose newest token ends it; return whether it does.

    An end token counts only after `min_tokens` others, as in the sampler's mask: with N, the first
    place for an end token is N + 1. Length limits hold regardless.
    """
    params = request.sampling_params
    assert params is not None
    num_output = request.num_output_tokens
    may_end = num_output > params.min_tokens
    if may_end:
        last = request.output_token_ids[-1]
        if last == params.eos_token_id and not params.ignore_eos:
            request.status = RequestStatus.FINISHED_STOPPED
            return True
        if params.stop_token_ids and last in params.stop_token_ids:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = last
            return True
    if num_output >= request.max_tokens or request.num_tokens >= max_model_len:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True
    if may_end and params.repetition_detection is not None:
        return _ends_in_repetition(request, params.repetition_detection)
    return False


def _ends_in_repetition(request: Request, rule: RepetitionDetectionParams) -> bool:
    if rule.max_pattern_size <= 0:
        return False
    tokens = request.output_token_ids
    count = max(2, rule.min_count)
    for size in range(max(1, rule.min_pattern_size), rule.max_pattern_size + 1):
        if size * count > len(tokens):
            return False
        if repeats_at_end(tokens, size, count):
            request.status = RequestStatus.FINISHED_REPETITION
            return True
    return False


def repeats_at_end(tokens: Sequence[int], size: int, count: int) -> bool:
    """Whether the last `size` tokens occur `count` times in a row at the end."""
    end = len(tokens)
    pattern = tokens[end - size : end]
    return all(tokens[end - size * (i + 1) : end - size * i] == pattern for i in range(1, count))
