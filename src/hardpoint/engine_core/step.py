"""The engine core: workers, KV cache and scheduler put together, and one step after another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from hardpoint.contracts.executor import Executor, FailureCallback
from hardpoint.contracts.kv_cache import KVCacheConfig
from hardpoint.contracts.scheduler import PauseState, SchedulerInterface
from hardpoint.engine_core.adapters import AdapterTable
from hardpoint.engine_core.in_flight import StepsInFlight
from hardpoint.engine_core.kv_cache.hashing import block_hasher, hash_function
from hardpoint.engine_core.refusals import why_refused
from hardpoint.engine_core.request import BlockHasher, Request
from hardpoint.engine_core.start import choose_scheduler, make_scheduler, plan_kv_cache
from hardpoint.engine_core.structured.manager import StructuredOutputManager
from hardpoint.extensions.ledger import ledger
from hardpoint.log import init_logger
from hardpoint.types.finish import FinishReason, RequestStatus
from hardpoint.types.lora_request import LoRARequest
from hardpoint.types.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from hardpoint.types.schedule import GrammarOutput, ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

logger = init_logger(__name__)

OutputsByClient = dict[int, EngineCoreOutputs]
Arrived = EngineCoreRequest | Request
_PAUSE_MODES = ("abort", "wait", "keep")
# How long a step waits for a grammar when there is nothing else to do; messages wait as long.
_GRAMMAR_WAIT_S = 0.005
_GRAMMAR_PARAMETER = "structured_outputs"
_LORA_PARAMETER = "lora_request"


class EngineCore:
    """Owns every request between the front end and the workers. One thread uses it.

    The constructor returns with the model loaded and the KV cache allocated. What `step` raises
    means that the engine core cannot go on; an error of one request is an output of that request.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
        executor_fail_callback: FailureCallback | None = None,
        include_finished_set: bool = False,
    ) -> None:
        self.vllm_config = vllm_config
        self.log_stats = log_stats
        # Outputs that did not come from a step: refusals, and what a pause has aborted.
        self._early_outputs: list[tuple[int, EngineCoreOutput]] = []
        # Requests whose id a step in flight still has, from one that was aborted.
        self._held: list[Request] = []
        # What planning raised while steps were in flight.
        self._planning_error: Exception | None = None
        self._drained: Future[None] | None = None
        self._clear_cache_when_drained = False
        # As early as the next: a backend that is not installed should not take that long to be refused.
        self.structured_output_manager = StructuredOutputManager(vllm_config)
        # Before the model is loaded: a class that cannot be used should not take that long to be refused.
        scheduler_class = choose_scheduler(vllm_config, executor_class)
        self.model_executor = executor_class(vllm_config)
        try:
            if executor_fail_callback is not None:
                self.model_executor.register_failure_callback(executor_fail_callback)
            self.kv_cache_config: KVCacheConfig = plan_kv_cache(vllm_config, self.model_executor)
            self.scheduler: SchedulerInterface = make_scheduler(
                scheduler_class, vllm_config, self.kv_cache_config, self.structured_output_manager,
                include_finished_set=include_finished_set, log_stats=log_stats,
            )  # fmt: skip
            self._in_flight = StepsInFlight(
                self.model_executor, self._grammar_of, max(1, self.model_executor.max_concurrent_batches)
            )
            self._block_hasher = self._make_block_hasher()
            self.adapters = AdapterTable(vllm_config, self.model_executor, self._is_unfinished)
        except BaseException:
            self.model_executor.shutdown()
            raise

    def _make_block_hasher(self) -> BlockHasher | None:
        cache = self.vllm_config.cache_config
        groups = self.kv_cache_config.kv_cache_groups
        if not cache.enable_prefix_caching or not groups:
            return None
        return block_hasher(groups[0].kv_cache_spec.block_size, hash_function(cache.prefix_caching_hash_algo))

    # Requests.

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. One that can never run is answered with an error output in the next step.

        Raises ValueError for an id that is in use, since an output could not say whose it is.
        """
        if request.request_id in self.adapters or self._is_unfinished(request.request_id):
            raise ValueError(f"request id {request.request_id!r} is in use")
        refusal = why_refused(request, self.vllm_config, self.get_supported_tasks())
        if refusal is not None:
            self._refuse(request, refusal)
            return
        if request.lora_request is None:
            self._admit(request)
            return
        refusal = self.adapters.why_refused(request.lora_request)
        if refusal is not None:
            self._refuse(request, refusal, _LORA_PARAMETER)
            return
        self.adapters.hold(request)
        self._admit_adapted()

    def _is_unfinished(self, request_id: str) -> bool:
        """Whether the scheduler has a request, or one that waits for its grammar or for its id has this id."""
        held = any(added.request_id == request_id for added in self._held)
        held = held or request_id in self.structured_output_manager
        return held or request_id in getattr(self.scheduler, "requests", ())

    def _admit_adapted(self) -> None:
        """Let the requests go on whose adapters are loaded or find room."""
        for request, refusal in self.adapters.take_ready():
            if refusal is None:
                self._admit(request)
            else:
                self._refuse(request, refusal, _LORA_PARAMETER)

    def _admit(self, request: EngineCoreRequest) -> None:
        """Queue a request whose adapter is loaded."""
        added = Request.from_engine_core_request(
            request, self._block_hasher, self.adapters.key_of(request.lora_request)
        )
        refusal = self.scheduler.why_impossible(added)
        if refusal is not None:
            self._refuse(request, refusal)
            return
        refusal = self._why_unbound(request)
        if refusal is not None:
            self._refuse(request, refusal, _GRAMMAR_PARAMETER)
            return
        self.structured_output_manager.grammar_init(added, request)
        self._queue(added)
        if request.abort_immediately:
            self._abort_visibly([request.request_id])

    def _why_unbound(self, request: EngineCoreRequest) -> str | None:
        """Why a request's constraint could not be kept, before anything is compiled."""
        if request.sampling_params is None or request.sampling_params.structured_outputs is None:
            return None
        if type(self.scheduler).get_grammar_bitmask is SchedulerInterface.get_grammar_bitmask:
            return f"the scheduler {type(self.scheduler).__name__} has no structured outputs"
        return self.structured_output_manager.why_refused(request)

    def _queue(self, request: Request) -> None:
        """Hand a request to the scheduler, as soon as its grammar is compiled and its id is free."""
        if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            self.structured_output_manager.hold(request)
        elif self._in_flight.computes(request.request_id):
            self._held.append(request)
        else:
            self.scheduler.add_request(request)

    def _refuse(self, request: Arrived, reason: str, parameter: str | None = None) -> None:
        """Answer a request with an error; with a parameter it is the client's mistake."""
        output = EngineCoreOutput(
            request.request_id, [], finish_reason=FinishReason.ERROR, error=reason, refused_parameter=parameter
        )
        self._early_outputs.append((request.client_index, output))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests that nobody waits for any more; unknown ids are ignored and no output is made."""
        self._end_requests(list(request_ids))

    def _end_requests(self, request_ids: list[str] | None) -> list[Arrived]:
        ended: list[Arrived] = [held for held in self._held if request_ids is None or held.request_id in request_ids]
        self._held = [held for held in self._held if held not in ended]
        ended += self.adapters.drop(request_ids)
        ended += self.structured_output_manager.drop(request_ids)
        return [*ended, *(self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED) or ())]

    def _abort_visibly(self, request_ids: list[str] | None) -> None:
        """End requests (None: all) and tell their front ends."""
        for request in self._end_requests(request_ids):
            output = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT)
            self._early_outputs.append((request.client_index, output))

    def has_unfinished_requests(self) -> bool:
        """Whether a request has yet to end, or its end to be told."""
        held = self._held or len(self.structured_output_manager) or len(self.adapters) or self._early_outputs
        return bool(held) or self.scheduler.has_unfinished_requests()

    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        held = len(self.structured_output_manager) or len(self.adapters)
        return self._has_steps() or bool(self._drained or held)

    def _has_steps(self) -> bool:
        planned = bool(self._early_outputs or self._in_flight or self.scheduler.has_requests())
        return planned or self._planning_error is not None

    # Stepping.

    def step(self) -> tuple[OutputsByClient, bool]:
        """Plan a step, run it, take in its result; with several in flight, plan some and take in the oldest.

        Returns the outputs by front end, and whether the model computed something. The outputs of a step
        are returned before another is planned, so that nothing that goes wrong later can lose them.
        """
        if len(self.adapters):
            self._admit_adapted()
        self._admit_compiled()
        outputs, executed = self._step_alone() if self._in_flight.limit == 1 else self._step_ahead()
        self._add_early_outputs(outputs)
        self._count_held(outputs)
        self._end_drain()
        return outputs, executed

    def _admit_compiled(self) -> None:
        """Let the requests go on whose grammars are compiled; waits a moment when there is nothing else to do."""
        manager = self.structured_output_manager
        if len(manager) and not self._has_steps():
            manager.wait(_GRAMMAR_WAIT_S)
        for request, reason, is_clients_fault in manager.take_settled():
            if reason is None:
                request.status = RequestStatus.WAITING
                self._queue(request)
            else:
                self._refuse(request, reason, _GRAMMAR_PARAMETER if is_clients_fault else None)

    def _count_held(self, outputs: OutputsByClient) -> None:
        for batch in outputs.values():
            if batch.scheduler_stats is not None:
                batch.scheduler_stats.num_waiting_reqs += len(self.structured_output_manager)
                self.adapters.count_waiting(batch.scheduler_stats)

    def _step_alone(self) -> tuple[OutputsByClient, bool]:
        if not self.scheduler.has_requests():
            return {}, False
        plan = self.scheduler.schedule()
        with _reported(plan):
            result = self.model_executor.execute_model(plan)
            if result is None:
                result = self.model_executor.sample_tokens(self._grammar_of(plan))
        assert isinstance(result, ModelRunnerOutput), f"the executor returned {type(result).__name__}"
        return self.scheduler.update_from_output(plan, result), plan.total_num_scheduled_tokens > 0

    def _step_ahead(self) -> tuple[OutputsByClient, bool]:
        steps = self._in_flight
        self._fill()
        if not steps:
            return {}, False
        step = steps.oldest()
        with _reported(step.plan):
            result = step.result(self.model_executor.step_timeout_s)
        outputs = self.scheduler.update_from_output(step.plan, result)
        steps.drop_oldest()
        self._add_held()
        return outputs, step.plan.total_num_scheduled_tokens > 0 or steps.has_tokens

    def _fill(self) -> None:
        """Plan steps until enough are in flight; an error waits until the results of those in flight are in."""
        steps = self._in_flight
        if self._planning_error is not None and not steps:
            raise self._planning_error
        while self._planning_error is None and steps.has_room and self.scheduler.has_requests():
            try:
                plan = self.scheduler.schedule()
            except Exception as error:
                if not steps:
                    raise
                self._planning_error = error
                return
            with _reported(plan):
                steps.launch(plan)
            if not plan.total_num_scheduled_tokens:
                return  # Everything that could be planned is in flight.

    def _add_held(self) -> None:
        held, self._held = self._held, []
        for request in held:
            self._queue(request)

    def _grammar_of(self, plan: SchedulerOutput) -> GrammarOutput | None:
        return self.scheduler.get_grammar_bitmask(plan)

    def _add_early_outputs(self, outputs: OutputsByClient) -> None:
        early, self._early_outputs = self._early_outputs, []
        for client_index, output in early:
            batch = outputs.setdefault(client_index, EngineCoreOutputs(outputs=[]))
            batch.outputs.append(output)

    # Calls by name, from a front end.

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the loaded model can do, e.g. ("generate",)."""
        return self.model_executor.supported_tasks

    def check_health(self) -> None:
        """Raise when a worker is gone."""
        self.model_executor.check_health()

    def get_ledger(self) -> list[dict[str, Any]]:
        """The ledger of this process and of its workers, as plain dicts."""
        # An out-of-tree executor may have workers without our wrapper.
        with contextlib.suppress(NotImplementedError, AttributeError):
            for entries in self.model_executor.collective_rpc("export_ledger"):
                ledger.merge(entries)
        return [entry.to_dict() for entry in ledger.entries()]

    def add_ledger(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Keep the ledger of a front end for the others."""
        ledger.merge(entries)

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        running, waiting = self.scheduler.get_request_counts()
        return running, waiting + len(self.structured_output_manager) + len(self.adapters)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker and return the results in rank order.

        No step runs meanwhile, so a `timeout` (seconds) also bounds how long others wait.
        """
        return self.model_executor.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[..., Any]) -> list[Any]:
        """Call a function with every worker's model."""
        return self.model_executor.collective_rpc("apply_model", args=(func,))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached blocks; False when some are in use and may not be taken, or there is no connector to reset."""
        return self.scheduler.reset_prefix_cache(reset_running_requests, reset_connector)

    def reset_mm_cache(self) -> None:
        """Drop media caches."""
        self.model_executor.reset_mm_cache()

    def reset_encoder_cache(self) -> None:
        """Drop encoder outputs, here and in the workers."""
        self.scheduler.reset_encoder_cache()
        self.model_executor.reset_encoder_cache()

    def pause_scheduler(self, mode: str = "abort", clear_cache: bool = True) -> Future[None] | None:
        """Stop running requests; new ones wait until `resume_scheduler`.

        mode         abort: end all requests; wait: let running ones end; keep: freeze them
        clear_cache  forget cached blocks too; frozen requests are then computed again
        Returns a future for `wait` while requests run: it is done once they have ended.
        """
        if mode not in _PAUSE_MODES:
            raise ValueError(f"pause mode must be one of {', '.join(_PAUSE_MODES)}, got {mode!r}")
        if mode == "wait" and self.scheduler.get_request_counts()[0]:
            self.scheduler.set_pause_state(PauseState.PAUSED_NEW)
            self._clear_cache_when_drained = clear_cache
            self._drained = self._drained or Future()
            return self._drained
        if mode == "abort":
            self._abort_visibly(None)
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        if clear_cache:
            self.scheduler.reset_prefix_cache(reset_running_requests=mode == "keep")
        return None

    def _end_drain(self) -> None:
        if self._drained is None or self.scheduler.get_request_counts()[0]:
            return
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        if self._clear_cache_when_drained:
            self.scheduler.reset_prefix_cache()
        self._settle_drain()

    def _settle_drain(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None:
            drained.set_result(None)

    def resume_scheduler(self) -> None:
        """Undo a pause; a `wait` that has not ended ends now."""
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        self._settle_drain()

    def is_scheduler_paused(self) -> bool:
        """Whether a pause is on."""
        return self.scheduler.pause_state is not PauseState.UNPAUSED

    def is_sleeping(self) -> bool:
        """Never: there is no sleep mode yet."""
        return False

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Refused: there is no sleep mode yet."""
        raise NotImplementedError("sleep mode is not supported by this version")

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Refused: there is no sleep mode yet."""
        raise NotImplementedError("sleep mode is not supported by this version")

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter on every worker; whether it was not there. Raises ConfigError or ModelFileError."""
        return self.adapters.add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Drop an adapter; whether it was there. ConfigError while requests need it."""
        return self.adapters.remove(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter until it is removed; whether it is there."""
        return self.adapters.pin(lora_id)

    def list_loras(self) -> set[int]:
        """Ids of loaded adapters."""
        return self.adapters.ids()

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Start or stop the workers' profilers; ValueError unless --profiler-config names one."""
        if not self.vllm_config.profiler_config.profiler:
            raise ValueError("profiling is not configured; start with --profiler-config.profiler torch")
        self.model_executor.profile(is_start, profile_prefix)

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Have every worker write its part of the weights."""
        self.model_executor.save_sharded_state(path, pattern, max_size)

    def shutdown(self) -> None:
        """End scheduler and workers."""
        self.scheduler.shutdown()
        self.structured_output_manager.shutdown()
        self.model_executor.shutdown()


@contextlib.contextmanager
def _reported(plan: SchedulerOutput) -> Iterator[None]:
    """Log what a step fails with, and pass it on."""
    try:
        yield
    except Exception as error:
        logger.error(
            "a step with %d tokens of %d requests failed: %s: %s",
            plan.total_num_scheduled_tokens,
            len(plan.num_scheduled_tokens),
            type(error).__name__,
            error,
        )
        raise
