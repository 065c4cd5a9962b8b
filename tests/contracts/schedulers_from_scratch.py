"""Schedulers that share no code with ours: one request at a time, in blocks of its own."""

from __future__ import annotations

from typing import Any

from hardpoint.contracts.scheduler import PauseState, SchedulerInterface
from hardpoint.engine_core.scheduler.stopping import check_stop
from hardpoint.types.messages import EngineCoreOutput, EngineCoreOutputs
from hardpoint.types.schedule import NewRequestData, SchedulerOutput


class OneByOne(SchedulerInterface):
    """Serves requests one after the other, each to its end."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, structured_output_manager: Any, block_size: int,
                 hash_block_size: Any = None, mm_registry: Any = None, include_finished_set: bool = False,
                 log_stats: bool = False) -> None:  # fmt: skip
        self.budget = vllm_config.scheduler_config.max_num_batched_tokens
        self.max_len = vllm_config.model_config.max_model_len
        self.blocks = list(range(1, 1 + -(-self.max_len // block_size)))
        self.queue: list[Any] = []
        self.current: Any = None
        self.finished: set[str] = set()
        self.state = PauseState.UNPAUSED

    def left(self, request: Any) -> int:
        return request.num_tokens - request.num_computed_tokens

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        plan = SchedulerOutput.make_empty()
        plan.finished_req_ids, self.finished = self.finished, set()
        if self.state is PauseState.PAUSED_ALL:
            return plan
        is_new = self.current is None and bool(self.queue) and self.state is PauseState.UNPAUSED
        if is_new:
            self.current = self.queue.pop(0)
        request = self.current
        count = 0 if request is None else min(self.left(request), self.budget)
        if count > 0:
            self.describe(plan, request, is_new)
            plan.num_scheduled_tokens = {request.request_id: count}
            plan.total_num_scheduled_tokens = count
            request.num_computed_tokens += count
            self.planned(request)
        return plan

    def planned(self, request: Any) -> None:
        """A request's tokens are planned."""

    def describe(self, plan: SchedulerOutput, request: Any, is_new: bool) -> None:
        if is_new:
            plan.scheduled_new_reqs = [
                NewRequestData(request.request_id, request.prompt_token_ids, [], request.sampling_params, None,
                               (self.blocks,), 0, None)
            ]  # fmt: skip
            return
        cached = plan.scheduled_cached_reqs
        cached.req_ids, cached.new_block_ids = [request.request_id], [None]
        cached.num_computed_tokens = [request.num_computed_tokens]
        cached.num_output_tokens = [request.num_output_tokens + request.num_output_placeholders]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        request = self.current
        if request is None or request.request_id not in scheduler_output.num_scheduled_tokens:
            return {}
        tokens = model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[request.request_id]]
        if not tokens:
            return {}
        request.append_output_token_ids(tokens)
        request.num_output_placeholders = max(0, request.num_output_placeholders - len(tokens))
        if check_stop(request, self.max_len):
            self.end(request)
        output = EngineCoreOutput(request.request_id, tokens, finish_reason=request.get_finished_reason(),
                                  stop_reason=request.stop_reason)  # fmt: skip
        return {request.client_index: EngineCoreOutputs(outputs=[output])}

    def end(self, request: Any) -> None:
        self.finished.add(request.request_id)
        if request is self.current:
            self.current = None

    def add_request(self, request: Any) -> None:
        self.queue.append(request)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]:
        known = [*self.queue, *([self.current] if self.current else [])]
        ended = [request for request in known if request_ids is None or request.request_id in request_ids]
        for request in ended:
            request.status = finished_status
            self.end(request)
        self.queue = [request for request in self.queue if request not in ended]
        return ended

    def get_num_unfinished_requests(self) -> int:
        return 0 if self.state is PauseState.PAUSED_ALL else sum(self.get_request_counts())

    def has_finished_requests(self) -> bool:
        return bool(self.finished)

    def get_request_counts(self) -> tuple[int, int]:
        return int(self.current is not None), len(self.queue)

    @property
    def pause_state(self) -> PauseState:
        return self.state

    def set_pause_state(self, pause_state: PauseState) -> None:
        self.state = pause_state

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return self.current is None

    def make_stats(self) -> None:
        return None

    def shutdown(self) -> None:
        pass


class OneByOneAhead(OneByOne):
    """The same, a token ahead of what is known."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def left(self, request: Any) -> int:
        coming = request.num_output_placeholders
        if coming and request.num_output_tokens + coming >= request.max_tokens:
            return 0
        return min(request.num_tokens + coming, self.max_len - 1) - request.num_computed_tokens

    def planned(self, request: Any) -> None:
        if request.num_computed_tokens == request.num_tokens + request.num_output_placeholders:
            request.num_output_placeholders += 1
