"""The scheduler that plans a step while the one before it computes."""

from __future__ import annotations

from hardpoint.engine_core.request import Request
from hardpoint.engine_core.scheduler.default import Scheduler
from hardpoint.types.finish import RequestStatus
from hardpoint.types.schedule import SchedulerOutput


class AsyncScheduler(Scheduler):
    """Plans the token after one that is still being sampled: `Request.num_output_placeholders` counts those.

    The worker takes the steps in order and keeps what it samples, so it knows the token when it is needed. A
    request whose token in flight turns out to end it has been planned once too often; that result is dropped.
    Right with one step in flight too.
    """

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Yes."""
        return True

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            if request.is_prefill_chunk:
                continue
            if request.use_structured_output and request.num_output_placeholders:
                # What the grammar allows next depends on a token that nobody knows yet.
                scheduler_output.pending_structured_output_tokens = True
            request.num_output_placeholders += 1

    def _update_request_with_output(self, request: Request, new_token_ids: list[int]) -> tuple[list[int], bool]:
        request.num_output_placeholders -= len(new_token_ids)
        kept, stopped = super()._update_request_with_output(request, new_token_ids)
        if request.status is RequestStatus.RUNNING:
            # When the blocks were allocated, the last of their tokens was unknown.
            self.kv_cache_manager.cache_blocks(request, min(request.num_computed_tokens, request.num_tokens))
        return kept, stopped
