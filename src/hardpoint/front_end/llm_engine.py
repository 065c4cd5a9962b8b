"""LLMEngine: the engine for plain code that steps it, with vLLM's methods."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from hardpoint.config.engine_args import EngineArgs
from hardpoint.config.sections import VllmConfig
from hardpoint.contracts.executor import Executor
from hardpoint.contracts.stat_logger import StatLoggerFactory
from hardpoint.env import envs
from hardpoint.errors import VLLMValidationError
from hardpoint.extensions.boot import boot
from hardpoint.extensions.groups import load_stat_logger_plugin_factories
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.rows import Role
from hardpoint.front_end.client import InProcessClient, SyncClient, SyncEngineCoreClient
from hardpoint.front_end.engine_handle import no_remote_engine, no_replicas
from hardpoint.front_end.engine_process import EngineProcess, preload_for
from hardpoint.front_end.observability.loggers import StatLoggerManager
from hardpoint.front_end.observability.reader import get_metrics_snapshot
from hardpoint.front_end.remote_engine import is_remote
from hardpoint.front_end.request_processing import RequestProcessing
from hardpoint.front_end.sequences import note_ready, sequences, start_stat_loggers
from hardpoint.types.lora_request import LoRARequest
from hardpoint.types.messages import EngineCoreRequest
from hardpoint.types.outputs import PoolingRequestOutput, RequestOutput
from hardpoint.types.pooling_params import PoolingParams
from hardpoint.types.sampling_params import SamplingParams
from hardpoint.types.stats import IterationStats

_ENGINE_CORE = "hardpoint.engine_core.step:EngineCore"


class LLMEngine(RequestProcessing):
    """An engine that works while `step` is called.

    The constructor returns once the model can serve; it raises what stopped the start. One
    thread uses the object. When it is dropped, or at the end of the program, its engine core ends.

    multiprocess_mode  engine core in a process of its own; False: in this one
    engine_process     an engine core that was started before the configuration was ready
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Any] | None = None,
        log_stats: bool = False,
        aggregate_engine_logging: bool = False,
        usage_context: Any = None,
        stat_loggers: list[StatLoggerFactory] | None = None,
        mm_registry: Any = None,
        use_cached_outputs: bool = False,
        multiprocess_mode: bool = False,
        engine_process: EngineProcess | None = None,
    ) -> None:
        parallel = vllm_config.parallel_config
        if parallel.data_parallel_size > 1:
            raise no_replicas("LLM and LLMEngine")
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        factories = [*(stat_loggers or []), *load_stat_logger_plugin_factories()]
        self.log_stats = log_stats or bool(factories)
        # The ranks of a launcher plan the same steps only if each plans in the script's own process.
        if multiprocess_mode and parallel.distributed_executor_backend != "external_launcher":
            self._start_process(vllm_config, executor_class, engine_process)
        else:
            self._start_here(vllm_config, executor_class)
        self.logger_manager: StatLoggerManager | None = None
        if self.log_stats:
            self.logger_manager = start_stat_loggers(vllm_config, factories, log_stats, aggregate_engine_logging)
            weakref.finalize(self, self.logger_manager.stop)

    def _start_process(
        self, vllm_config: VllmConfig, executor_class: type[Any] | None, process: EngineProcess | None
    ) -> None:
        process = process or EngineProcess(preload_for(vllm_config.parallel_config))
        try:
            process.begin(vllm_config, executor_class, self.log_stats)
            self.prepare_processing()  # While the model loads.
            ready = process.wait_ready()
            self.engine_core: SyncClient = SyncEngineCoreClient(process)
        except BaseException:
            process.abandon()
            raise
        note_ready(vllm_config, ready)
        self._tasks = tuple(ready.supported_tasks)

    def _start_here(self, vllm_config: VllmConfig, executor_class: type[Any] | None) -> None:
        boot(Role.ENGINE_CORE)
        self.prepare_processing()
        executor_class = executor_class or Executor.get_class(vllm_config)
        self.engine_core = InProcessClient(lambda: load_ref(_ENGINE_CORE)(vllm_config, executor_class, self.log_stats))
        self._tasks = tuple(self.engine_core.call_utility("get_supported_tasks"))

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: VllmConfig,
        usage_context: Any = None,
        stat_loggers: list[StatLoggerFactory] | None = None,
        disable_log_stats: bool = False,
        engine_process: EngineProcess | None = None,
    ) -> LLMEngine:
        """Build from a finished configuration."""
        return cls(
            vllm_config,
            log_stats=not disable_log_stats,
            usage_context=usage_context,
            stat_loggers=stat_loggers,
            multiprocess_mode=envs.VLLM_ENABLE_V1_MULTIPROCESSING,
            engine_process=engine_process,
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: Any = None,
        stat_loggers: list[StatLoggerFactory] | None = None,
        enable_multiprocessing: bool = False,
    ) -> LLMEngine:
        """Build from engine arguments.

        The engine core's process, if there is one, starts while they are turned into a configuration.
        """
        if is_remote(engine_args):
            raise no_remote_engine()
        multiprocess = enable_multiprocessing or envs.VLLM_ENABLE_V1_MULTIPROCESSING
        if engine_args.data_parallel_size > 1:
            raise no_replicas("LLM and LLMEngine")
        multiprocess = multiprocess and engine_args.distributed_executor_backend != "external_launcher"
        process = EngineProcess(preload_for(engine_args)) if multiprocess else None
        try:
            vllm_config = engine_args.create_engine_config(usage_context)
        except BaseException:
            if process is not None:
                process.abandon()
            raise
        return cls(
            vllm_config,
            log_stats=not engine_args.disable_log_stats,
            usage_context=usage_context,
            stat_loggers=stat_loggers,
            multiprocess_mode=multiprocess,
            engine_process=process,
        )

    # State.

    def has_unfinished_requests(self) -> bool:
        """Whether any request has not ended."""
        return self.output_processor.has_unfinished_requests()

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can do, such as `generate`."""
        return self._tasks

    # Requests.

    def add_request(
        self,
        request_id: str,
        prompt: EngineCoreRequest | Any,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        session_id: str | None = None,
        prompt_text: str | None = None,
        kv_hints: Any = None,
    ) -> str:
        """Check and queue one request; returns its id. Raises VLLMValidationError or EngineDeadError."""
        if isinstance(prompt, EngineCoreRequest):
            text, request = prompt_text, prompt
        else:
            text, request = self.input_processor.process_inputs(
                request_id,
                prompt,
                params,
                arrival_time=time.time() if arrival_time is None else arrival_time,
                lora_request=lora_request,
                tokenization_kwargs=tokenization_kwargs,
                trace_headers=trace_headers,
                priority=priority,
                session_id=session_id,
                kv_hints=kv_hints,
            )
            text = prompt_text or text
        children = sequences(request)
        for child, parent, index in children:
            self.output_processor.add_request(child, text, parent, index)
        try:
            for child, _, _ in children:
                self.engine_core.add_request(child)
        except BaseException:
            # Nobody will read it: it must not count as running for ever.
            with contextlib.suppress(VLLMValidationError):
                self.abort_request([request.request_id], internal=True)
            raise
        return request_id

    def abort_request(self, request_ids: list[str], internal: bool = False) -> None:
        """Stop requests; unknown ids are ignored.

        internal  the ids are the engine's own, not those given to `add_request`
        """
        self.engine_core.abort_requests(self.output_processor.abort_requests(request_ids, internal))

    def step(self) -> list[RequestOutput | PoolingRequestOutput[Any]]:
        """Wait for one step of the engine core; returns finished and partial outputs, none with nothing to do."""
        if not self.has_unfinished_requests():
            return []
        outputs = self.engine_core.get_output()
        stats = IterationStats() if self.log_stats and outputs.outputs else None
        done = self.output_processor.process_outputs(outputs.outputs, outputs.timestamp, stats)
        self.engine_core.abort_requests(done.reqs_to_abort)
        if self.logger_manager is not None and (stats is not None or outputs.scheduler_stats is not None):
            media = self.input_processor.media
            self.logger_manager.record(
                outputs.scheduler_stats,
                stats,
                mm_cache_stats=media.take_stats() if media is not None else None,
                engine_idx=outputs.engine_index,
            )
        return list(done.request_outputs)

    # Calls.

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker, by name or as a function that gets the worker.

        timeout  seconds until TimeoutError; None waits without end
        A function crosses to another process only with VLLM_ALLOW_INSECURE_SERIALIZATION=1.
        """
        return self.engine_core.call_utility("collective_rpc", method, timeout, tuple(args), kwargs, timeout_s=timeout)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call a function with every worker's model; crosses processes as `collective_rpc` says."""
        return self.engine_core.call_utility("apply_model", func)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prefixes; False if running requests kept some."""
        return self.engine_core.call_utility("reset_prefix_cache", reset_running_requests, reset_connector)

    def reset_mm_cache(self) -> None:
        """Drop cached media, here and in the engine."""
        if self.input_processor.media is not None:
            self.input_processor.media.reset()
        self.engine_core.call_utility("reset_mm_cache")

    def reset_encoder_cache(self) -> None:
        """Drop cached encoder outputs."""
        self.engine_core.call_utility("reset_encoder_cache")

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Begin profiling on every worker. Raises ValueError unless a profiler is configured."""
        if delay_iterations is not None or max_iterations is not None:
            raise NotImplementedError("profiling by iterations is not supported by this version")
        self.engine_core.call_utility("profile", True, profile_prefix)

    def stop_profile(self) -> None:
        """End profiling."""
        self.engine_core.call_utility("profile", False)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back. Raises NotImplementedError where the engine cannot."""
        self.engine_core.call_utility("sleep", level, mode)

    def release_kv_cache_memory(self) -> None:
        """Refused: there is no sleep mode yet."""
        raise NotImplementedError("sleep mode is not supported by this version")

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Undo `sleep`. Raises NotImplementedError where the engine cannot."""
        return self.engine_core.call_utility("wake_up", tags)

    def is_sleeping(self) -> bool:
        """Whether the engine has given its memory back for a while."""
        return self.engine_core.call_utility("is_sleeping")

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter. Raises NotImplementedError where the engine cannot."""
        return self.engine_core.call_utility("add_lora", lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter. Raises NotImplementedError where the engine cannot."""
        return self.engine_core.call_utility("remove_lora", lora_id)

    def list_loras(self) -> set[int]:
        """Ids of the loaded adapters."""
        return self.engine_core.call_utility("list_loras")

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter resident. Raises NotImplementedError where the engine cannot."""
        return self.engine_core.call_utility("pin_lora", lora_id)

    def set_weight_version(self, weight_version: str) -> None:
        """Refused: weights have no versions yet."""
        raise NotImplementedError("weight versions are not supported by this version")

    def get_weight_version(self) -> str:
        """Refused: weights have no versions yet."""
        raise NotImplementedError("weight versions are not supported by this version")

    def get_ledger(self) -> list[dict[str, Any]]:
        """The ledger of all processes, oldest entry first."""
        ledger.merge(self.engine_core.call_utility("get_ledger"))
        return [entry.to_dict() for entry in sorted(ledger.entries(), key=lambda entry: entry.time)]

    def do_log_stats(self) -> None:
        """Let the stat loggers write now."""
        if self.logger_manager is not None:
            self.logger_manager.log()

    def get_metrics(self) -> list[Any]:
        """A snapshot of the Prometheus metrics. Raises ValueError when statistics are off."""
        if not self.log_stats:
            raise ValueError("statistics are off: build the engine with disable_log_stats=False")
        return get_metrics_snapshot()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine core; a second time does nothing."""
        if self.logger_manager is not None:
            self.logger_manager.stop()
        self.engine_core.shutdown(timeout)
