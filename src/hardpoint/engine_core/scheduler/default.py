"""The built-in scheduler: a token budget per step, shared by prompts and running outputs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hardpoint.contracts.kv_cache import KVCacheConfig
from hardpoint.contracts.scheduler import PauseState, SchedulerInterface
from hardpoint.engine_core.kv_cache.manager import KVCacheBlocks, KVCacheManager
from hardpoint.engine_core.kv_cache.residency import BlockResidency
from hardpoint.engine_core.request import Request
from hardpoint.engine_core.scheduler.adapters import AdapterPlaces, count_adapters
from hardpoint.engine_core.scheduler.admission import why_impossible
from hardpoint.engine_core.scheduler.encoder_cache import EncoderCacheManager, MediaPlanner
from hardpoint.engine_core.scheduler.outputs import StepOutputs
from hardpoint.engine_core.scheduler.plan import StepPlan
from hardpoint.engine_core.scheduler.queues import create_request_queue
from hardpoint.engine_core.scheduler.stopping import check_stop
from hardpoint.types.finish import RequestStatus
from hardpoint.types.messages import EngineCoreEventType, EngineCoreOutputs
from hardpoint.types.schedule import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from hardpoint.types.stats import SchedulerStats

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig


class Scheduler(SchedulerInterface):
    """Continuous batching with chunked prefill, prefix caching and preemption by recomputation.

    Several steps may be in flight: a request's next tokens are planned as soon as they are known, and those it
    computes count as computed from the plan on (`AsyncScheduler` plans tokens too that nobody knows yet).

    Every step first serves running requests in order of admission, each with the tokens it has yet
    to compute, then admits waiting ones while tokens, blocks and places last. A running request
    that finds no block takes those of the one admitted last (fcfs) or of the worst rank (priority).
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: Any,
        block_size: int,
        hash_block_size: int | None = None,
        mm_registry: Any = None,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        self.vllm_config = vllm_config
        self.scheduler_config = vllm_config.scheduler_config
        self.cache_config = vllm_config.cache_config
        self.lora_config = vllm_config.lora_config
        self.parallel_config = vllm_config.parallel_config
        self.observability_config = vllm_config.observability_config
        self.kv_cache_config = kv_cache_config
        self.structured_output_manager = structured_output_manager
        self.block_size = block_size
        self.hash_block_size = hash_block_size or block_size
        self.include_finished_set = include_finished_set
        self.log_stats = log_stats
        self._set_limits()
        self.kv_cache_manager = self._make_kv_cache_manager()
        # A sequence cannot outgrow the whole cache, however long the model could make it.
        self.max_model_len = self.kv_cache_manager.max_request_tokens()
        self.watermark_blocks = int(
            self.scheduler_config.watermark * self.kv_cache_manager.block_pool.num_usable_blocks
        )
        self.policy = self.scheduler_config.policy
        self.requests: dict[str, Request] = {}
        self.waiting = create_request_queue(self.policy)
        self.running: list[Request] = []
        # Ended since the last step: the workers must free their state.
        self.finished_req_ids: set[str] = set()
        self.finished_req_ids_dict: dict[int, set[str]] = {}
        self.prev_step_scheduled_req_ids: set[str] = set()
        # Preempted between steps, by a cache reset.
        self._preempted_outside: set[str] = set()
        self._pause_state = PauseState.UNPAUSED

    def _set_limits(self) -> None:
        config = self.scheduler_config
        assert self.vllm_config.model_config.max_model_len is not None
        self.model_max_len: int = self.vllm_config.model_config.max_model_len
        self.max_num_running_reqs = min(config.max_num_seqs, config.max_num_active_seqs or config.max_num_seqs)
        self.max_num_scheduled_tokens = config.max_num_scheduled_tokens or config.max_num_batched_tokens
        self.num_lookahead_tokens = 0
        self.encoder_cache_manager = EncoderCacheManager(config.encoder_cache_size, self.vllm_config)
        self._media = MediaPlanner(
            self.encoder_cache_manager, config.max_num_encoder_input_tokens, config.disable_chunked_mm_input
        )

    def _make_kv_cache_manager(self) -> KVCacheManager:
        observed = self.observability_config
        residency = BlockResidency(observed.kv_cache_metrics_sample) if observed.kv_cache_metrics else None
        return KVCacheManager(
            self.kv_cache_config,
            max_model_len=self.model_max_len,
            max_step_tokens=self.max_num_scheduled_tokens,
            enable_caching=bool(self.cache_config.enable_prefix_caching),
            log_stats=self.log_stats,
            residency=residency,
        )

    # Planning.

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan the next step."""
        paused = self._pause_state
        plan = StepPlan(0 if paused is PauseState.PAUSED_ALL else self.max_num_scheduled_tokens)
        self._media.begin_step()
        self._schedule_running(plan)
        # After a preemption blocks are short: whoever is admitted now would be the next victim.
        if not plan.preempted and paused is PauseState.UNPAUSED and not throttle_prefills:
            self._schedule_waiting(plan)
        output = self._make_scheduler_output(plan)
        self._update_after_schedule(output)
        return output

    def _schedule_running(self, plan: StepPlan) -> None:
        # A copy: preemption takes requests out of the list, before and behind the one at hand.
        for request in self.running.copy():
            if plan.budget <= 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue
            left = self._tokens_left(request)
            num_tokens = min(self._chunk(left), plan.budget, self.max_model_len - request.num_computed_tokens)
            items: list[int] = []
            if request.mm_features and num_tokens > 0:
                num_tokens, items = self._media.fit(request, request.num_computed_tokens, num_tokens)
            if num_tokens <= 0:
                continue
            blocks = self._allocate_or_preempt(request, num_tokens, plan)
            if blocks is not None:
                plan.add(plan.running, request, num_tokens, blocks)
                if request.mm_features:
                    self._media.keep(request, items)

    def _tokens_left(self, request: Request) -> int:
        """Tokens of a running request that can be planned now: those known and those that steps in flight will add.

        0 once a token in flight is sure to be the last.
        """
        coming = request.num_output_placeholders
        if coming and (
            request.num_output_tokens + coming >= request.max_tokens
            or request.num_tokens + coming >= self.max_model_len
        ):
            return 0
        return request.num_tokens_with_spec + coming - request.num_computed_tokens

    def _chunk(self, num_tokens: int) -> int:
        """Tokens of a long prompt to take at once, leaving the step's budget aside."""
        threshold = self.scheduler_config.long_prefill_token_threshold
        if threshold <= 0:
            return num_tokens
        if self.scheduler_config.long_prefill_token_threshold_adaptive:
            threshold = max(threshold, self.max_num_scheduled_tokens // max(1, len(self.running)))
        return min(num_tokens, threshold)

    def _allocate_or_preempt(self, request: Request, num_tokens: int, plan: StepPlan) -> KVCacheBlocks | None:
        while True:
            blocks = self.kv_cache_manager.allocate_slots(
                request, num_tokens, num_lookahead_tokens=self.num_lookahead_tokens
            )
            if blocks is not None:
                return blocks
            victim = max(self.running) if self.policy == "priority" else self.running[-1]
            self._preempt_request(victim, time.monotonic())
            plan.drop_preempted(victim)
            if victim is request:
                return None

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        """Take a running request's blocks; it waits to be computed again."""
        self.running.remove(request)
        # Blocks of tokens that the step being planned will not compute after all.
        self.kv_cache_manager.uncache(request, request.num_computed_tokens)
        self.kv_cache_manager.free(request)
        if request.mm_features:
            self._media.drop(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.spec_token_ids.clear()
        request.num_preemptions += 1
        if self.log_stats:
            request.record_event(EngineCoreEventType.PREEMPTED, timestamp)
        self.waiting.prepend_request(request)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        places = AdapterPlaces(self.lora_config.max_loras if self.lora_config else None, self.running)
        self._admit_waiting(plan, places)
        for request in reversed(places.skipped):
            self.waiting.prepend_request(request)

    def _admit_waiting(self, plan: StepPlan, places: AdapterPlaces) -> None:
        while self.waiting and plan.budget > 0 and len(self.running) < self.max_num_running_reqs:
            request = self.waiting.peek_request()
            if request.num_in_flight_tokens:
                break  # preempted while a step ran: its token has to come first
            if not places.take(request):
                self.waiting.pop_request()
                continue
            hit, num_hit_tokens = self.kv_cache_manager.get_computed_blocks(request)
            num_tokens = self._first_chunk(request.num_tokens - num_hit_tokens, plan.budget)
            items: list[int] = []
            if request.mm_features and num_tokens:
                num_tokens, items = self._fit_media(request, num_hit_tokens, num_tokens)
            if num_tokens == 0:
                break
            blocks = self.kv_cache_manager.allocate_slots(
                request,
                num_tokens,
                num_new_computed_tokens=num_hit_tokens,
                new_computed_blocks=hit,
                num_lookahead_tokens=self.num_lookahead_tokens,
                full_sequence_must_fit=self.scheduler_config.scheduler_reserve_full_isl,
                # With nothing running nothing will ever free a block.
                reserved_blocks=self.watermark_blocks if self.running else 0,
            )
            if blocks is None:
                if request.mm_features:
                    self._media.drop(request)
                break
            self.waiting.pop_request()
            places.admitted(request)
            self._admit(request, num_tokens, num_hit_tokens, plan)
            if request.mm_features:
                self._media.keep(request, items)

    def _fit_media(self, request: Request, computed: int, num_tokens: int) -> tuple[int, list[int]]:
        """As `MediaPlanner.fit`, for a request that is not admitted yet: it holds nothing unless it can be."""
        fitting, items = self._media.fit(request, computed, num_tokens)
        if fitting == 0 or (fitting < num_tokens and not self.scheduler_config.enable_chunked_prefill):
            self._media.drop(request)
            return 0, []
        return fitting, items

    def _first_chunk(self, num_tokens: int, budget: int) -> int:
        """Tokens of a waiting request to compute now; 0 when it has to wait for a larger budget."""
        if not self.scheduler_config.enable_chunked_prefill:
            return num_tokens if num_tokens <= budget else 0
        return min(self._chunk(num_tokens), budget)

    def _admit(self, request: Request, num_tokens: int, num_hit_tokens: int, plan: StepPlan) -> None:
        kind = plan.new if request.status is RequestStatus.WAITING else plan.resumed
        self.kv_cache_manager.record_lookup(request, num_hit_tokens)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_hit_tokens
        stats = request.prefill_stats
        if stats is not None and request.num_preemptions == 0:
            stats.num_cached_tokens = stats.num_local_cached_tokens = num_hit_tokens
            stats.num_computed_tokens = request.num_prompt_tokens - num_hit_tokens
        if self.log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED)
        self.running.append(request)
        plan.add(kind, request, num_tokens, self.kv_cache_manager.get_blocks(request.request_id))

    def _make_scheduler_output(self, plan: StepPlan) -> SchedulerOutput:
        preempted = {request.request_id for request in plan.preempted} | self._preempted_outside
        self._preempted_outside = set()
        output = SchedulerOutput(
            scheduled_new_reqs=plan.new_request_data(),
            scheduled_cached_reqs=plan.cached_request_data(
                self.prev_step_scheduled_req_ids, with_tokens=self.parallel_config.pipeline_parallel_size > 1
            ),
            num_scheduled_tokens=plan.num_tokens,
            total_num_scheduled_tokens=sum(plan.num_tokens.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs=self._media.take_plan(),
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
            preempted_req_ids=preempted,
            has_structured_output_requests=any(self.requests[i].use_structured_output for i in plan.num_tokens),
        )
        self.prev_step_scheduled_req_ids = set(plan.num_tokens)
        self.finished_req_ids = set()
        return output

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Count planned tokens as computed, so that the next step can be planned at once."""
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            request.num_computed_tokens += num_tokens
            request.num_in_flight_tokens += num_tokens
            if request.mm_features:
                self._media.release_computed(request)
            request.is_prefill_chunk = (
                request.num_computed_tokens < request.num_tokens + request.num_output_placeholders
            )

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Allowed tokens for the requests of a step that a grammar binds."""
        if not scheduler_output.has_structured_output_requests:
            return None
        return self.structured_output_manager.grammar_output(scheduler_output, self.requests)

    # Results.

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Append the new tokens, end requests that are done, and build what the front ends get."""
        outputs = StepOutputs(model_runner_output)
        ended = False
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None:
                continue  # ended while the step ran, from outside or by the step before
            request.num_in_flight_tokens -= num_tokens
            ended |= self._update_request(request, outputs)
        if ended:
            self.running = [request for request in self.running if not request.is_finished()]
        return self._outputs_by_client(outputs)

    def _update_request(self, request: Request, outputs: StepOutputs) -> bool:
        """Take in one request's part of a step; return whether it has ended."""
        request_id, waits = request.request_id, request.status is RequestStatus.PREEMPTED
        error = outputs.error_of(request_id)
        if error is not None:
            self._fail(request, error)
            if waits:
                self.waiting.remove_requests([request])
            outputs.add(request, [])
            return True
        first_row = outputs.first_logprob_row(request_id)
        new_token_ids, stopped = outputs.tokens_of(request_id), False
        before_first_token = request.num_output_tokens == 0
        if new_token_ids:
            new_token_ids, stopped = self._update_request_with_output(request, new_token_ids)
        elif request.pooling_params is not None and outputs.pooled_of(request_id) is not None:
            request.status = RequestStatus.FINISHED_STOPPED
            stopped = True
        outputs.add(request, new_token_ids, first_row, with_prompt_logprobs=before_first_token)
        if stopped:
            self._free_request(request)
            if waits:
                self.waiting.remove_requests([request])
        return stopped

    def _update_request_with_output(self, request: Request, new_token_ids: list[int]) -> tuple[list[int], bool]:
        """Append tokens up to the one that ends the output; return those kept and whether it ended."""
        for count, token_id in enumerate(new_token_ids, start=1):
            request.append_output_token_ids(token_id)
            if check_stop(request, self.max_model_len) or self._grammar_ends(request, token_id):
                return new_token_ids[:count], True
        return new_token_ids, False

    def _grammar_ends(self, request: Request, token_id: int) -> bool:
        """Tell a request's grammar of the newest token; whether the output ends with it."""
        return request.use_structured_output and self.structured_output_manager.advance(request, token_id)

    def _fail(self, request: Request, error: str) -> None:
        request.fail(error)
        # What it wrote may be the reason, e.g. NaN: nobody else must find it.
        self.kv_cache_manager.uncache(request)
        self.encoder_cache_manager.drop(request)
        self._free_request(request)

    def _outputs_by_client(self, outputs: StepOutputs) -> dict[int, EngineCoreOutputs]:
        by_client = outputs.by_client()
        for client_index, finished in self.finished_req_ids_dict.items():
            by_client.setdefault(client_index, EngineCoreOutputs()).finished_requests = finished
        self.finished_req_ids_dict = {}
        stats = self.make_stats()
        if stats is not None:
            if not by_client:
                by_client[0] = EngineCoreOutputs()
            next(iter(by_client.values())).scheduler_stats = stats
        return by_client

    # Requests.

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        self.requests[request.request_id] = request
        self.waiting.add_request(request)
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)

    def why_impossible(self, request: Request) -> str | None:
        """Why a request could never run, in words for the client; None when it could."""
        unchunked = None if self.scheduler_config.enable_chunked_prefill else self.max_num_scheduled_tokens
        reason = why_impossible(request, self.model_max_len, self.max_model_len, unchunked)
        return reason or self._media.why_impossible(request, unchunked is not None)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """End requests from outside."""
        assert RequestStatus.is_finished(finished_status)
        if request_ids is None:
            request_ids = list(self.requests)
        elif isinstance(request_ids, str):
            request_ids = (request_ids,)
        ended = [self.requests[i] for i in dict.fromkeys(request_ids) if i in self.requests]
        if not ended:
            return []
        self.waiting.remove_requests([r for r in ended if r.status is not RequestStatus.RUNNING])
        for request in ended:
            request.status = finished_status
            self._free_request(request)
        self.running = [request for request in self.running if not request.is_finished()]
        return ended

    def _free_request(self, request: Request) -> None:
        self.kv_cache_manager.free(request)
        self.encoder_cache_manager.free(request)
        del self.requests[request.request_id]
        self.finished_req_ids.add(request.request_id)
        if self.include_finished_set:
            self.finished_req_ids_dict.setdefault(request.client_index, set()).add(request.request_id)

    def get_num_unfinished_requests(self) -> int:
        """Requests that a step could serve: while paused, those that are left out do not count."""
        if self._pause_state is PauseState.PAUSED_ALL:
            return 0
        if self._pause_state is PauseState.PAUSED_NEW:
            return len(self.running)
        return len(self.waiting) + len(self.running)

    def has_finished_requests(self) -> bool:
        """Whether the workers have yet to be told of ended requests."""
        return bool(self.finished_req_ids)

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        return len(self.running), len(self.waiting)

    # Control.

    @property
    def pause_state(self) -> PauseState:
        """What is left out at present."""
        return self._pause_state

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or go on."""
        self._pause_state = pause_state

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached blocks; with `reset_running_requests` those in use too, by preemption."""
        if reset_running_requests:
            now = time.monotonic()
            for request in reversed(self.running.copy()):
                self._preempt_request(request, now)
                self._preempted_outside.add(request.request_id)
        done = self.kv_cache_manager.reset_prefix_cache()
        if reset_connector and self.connector is None:
            return False
        return done

    def reset_encoder_cache(self) -> None:
        """Drop encoded media that no running request needs; the workers are told with the next step."""
        self.encoder_cache_manager.drop_unused()

    def get_kv_cache_usage(self) -> float:
        """Share of KV blocks in use, 0..1."""
        return self.kv_cache_manager.usage

    def make_stats(self) -> SchedulerStats | None:
        """A snapshot, or None when statistics are off."""
        if not self.log_stats:
            return None
        return SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            kv_cache_usage=self.kv_cache_manager.usage,
            prefix_cache_stats=self.kv_cache_manager.make_prefix_cache_stats(),
            kv_cache_eviction_events=self.kv_cache_manager.take_eviction_events(),
            waiting_lora_adapters=count_adapters(self.waiting) if self.lora_config else {},
            running_lora_adapters=count_adapters(self.running) if self.lora_config else {},
        )

    def shutdown(self) -> None:
        """Nothing is held outside this process."""
