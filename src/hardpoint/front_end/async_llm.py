"""AsyncLLM: the engine for code on an event loop, with vLLM's methods."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, NoReturn

from hardpoint.config.engine_args import AsyncEngineArgs
from hardpoint.config.sections import VllmConfig
from hardpoint.contracts.stat_logger import StatLoggerFactory
from hardpoint.env import envs
from hardpoint.errors import AdmissionError, ConfigError, EngineDeadError, EngineGenerateError, VLLMValidationError
from hardpoint.extensions.groups import load_stat_logger_plugin_factories
from hardpoint.extensions.ledger import ledger
from hardpoint.front_end.engine_calls import EngineCalls
from hardpoint.front_end.engine_handle import EngineHandle
from hardpoint.front_end.engine_process import EngineProcess
from hardpoint.front_end.observability.loggers import StatLoggerManager
from hardpoint.front_end.outputs import RequestOutputCollector
from hardpoint.front_end.pooling import wait_for_result, with_task
from hardpoint.front_end.remote_engine import RemoteEngine, is_remote
from hardpoint.front_end.replicas import EngineClientCore, EngineReplicas, connect, engine_of
from hardpoint.front_end.request_ends import RequestEnd, logged
from hardpoint.front_end.request_processing import RequestProcessing
from hardpoint.front_end.sequences import note_ready, sequences, start_stat_loggers
from hardpoint.front_end.turns import Turn
from hardpoint.log import init_logger
from hardpoint.types.lora_request import LoRARequest
from hardpoint.types.messages import EngineCoreOutputs, EngineCoreRequest
from hardpoint.types.outputs import PoolingRequestOutput, RequestOutput
from hardpoint.types.pooling_params import PoolingParams
from hardpoint.types.sampling_params import SamplingParams
from hardpoint.types.stats import IterationStats

logger = init_logger(__name__)
_DRAIN_POLL_S = 0.05


class AsyncLLM(RequestProcessing, EngineCalls):
    """An engine whose core runs in a process of its own.

    The constructor returns once the model can serve; it raises what stopped the start. Use the
    object from one event loop, and call `shutdown` at the end (an object that is dropped ends
    its engine core too).

    executor_class  an out-of-tree executor; None: by the configuration
    stat_loggers    factories of further stat loggers, called with the config and an engine index
    engine_process  an engine core that was started before the configuration was ready, or is elsewhere
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Any] | None = None,
        log_stats: bool = True,
        usage_context: Any = None,
        mm_registry: Any = None,
        log_requests: bool = True,
        start_engine_loop: bool = True,
        stat_loggers: list[StatLoggerFactory] | None = None,
        aggregate_engine_logging: bool = False,
        client_addresses: dict[str, Any] | None = None,
        client_count: int = 1,
        client_index: int = 0,
        profiler: Any = None,
        engine_process: EngineHandle | None = None,
    ) -> None:
        if client_addresses is not None:
            raise NotImplementedError("several API servers for one engine are started by serve --api-server-count")
        if profiler is not None:
            raise NotImplementedError("profiling the front end is not supported by this version")
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.log_requests = log_requests
        factories = [*(stat_loggers or []), *load_stat_logger_plugin_factories()]
        # A plugin that wants numbers gets them, whatever the flag says.
        self.log_stats = log_stats or bool(factories)
        process = engine_process or _own_engine(vllm_config)
        try:
            _refuse_launched_ranks(vllm_config)
            process.begin(vllm_config, executor_class, self.log_stats)
            self.prepare_processing()  # While the model loads.
            self._ready = process.wait_ready()
            note_ready(vllm_config, self._ready)
            self.engine_core = connect(process, client_index)
            self.logger_manager = (
                start_stat_loggers(vllm_config, factories, log_stats, aggregate_engine_logging, client_count)
                if self.log_stats
                else None
            )
        except BaseException:
            process.abandon()
            raise
        self._client_count = client_count
        self._output_task: asyncio.Task[None] | None = None
        # Why no request is taken any more.
        self._closed: Exception | None = None
        # The tasks that read outputs hold the client, not this object.
        self._finalizer = weakref.finalize(self, _end, self.engine_core, self.logger_manager)

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: VllmConfig,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: list[StatLoggerFactory] | None = None,
        enable_log_requests: bool = False,
        aggregate_engine_logging: bool = False,
        disable_log_stats: bool = False,
        client_addresses: dict[str, Any] | None = None,
        client_count: int = 1,
        client_index: int = 0,
        engine_process: EngineHandle | None = None,
    ) -> AsyncLLM:
        """Build from a finished configuration."""
        return cls(
            vllm_config,
            None,
            log_stats=not disable_log_stats,
            usage_context=usage_context,
            log_requests=enable_log_requests,
            start_engine_loop=start_engine_loop,
            stat_loggers=stat_loggers,
            aggregate_engine_logging=aggregate_engine_logging,
            client_addresses=client_addresses,
            client_count=client_count,
            client_index=client_index,
            engine_process=engine_process,
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: AsyncEngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: list[StatLoggerFactory] | None = None,
    ) -> AsyncLLM:
        """Build from engine arguments; the engine core starts while they are turned into a configuration.

        With data_parallel_size_local=0 it is elsewhere, started with `serve --headless`.
        """
        remote = is_remote(engine_args)
        process = RemoteEngine(engine_args) if remote else engine_of(engine_args)
        try:
            vllm_config = engine_args.create_engine_config(usage_context)
        except BaseException:
            process.abandon()
            raise
        return cls.from_vllm_config(
            vllm_config,
            start_engine_loop,
            usage_context,
            stat_loggers,
            enable_log_requests=engine_args.enable_log_requests,
            disable_log_stats=engine_args.disable_log_stats,
            aggregate_engine_logging=bool(engine_args.aggregate_engine_logging),
            engine_process=process,
        )

    # State.

    @property
    def is_running(self) -> bool:
        """Whether outputs are being read (before the first request: whether they could be)."""
        return not self.is_stopped and (self._output_task is None or not self._output_task.done())

    @property
    def is_stopped(self) -> bool:
        """Whether the engine has ended."""
        return self.engine_core.dead_error is not None

    @property
    def errored(self) -> bool:
        """Whether the engine has ended by itself."""
        return self.is_stopped and not self.engine_core.process.stopped

    @property
    def dead_error(self) -> BaseException:
        """That error."""
        return self.engine_core.dead_error or EngineDeadError()

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine has ended."""
        if self.is_stopped:
            raise self.dead_error.with_traceback(None)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can do, such as `generate`."""
        return tuple(self._ready.supported_tasks)

    def get_num_queued_tokens(self) -> int:
        """Prompt tokens of requests that wait for their first token."""
        return self.output_processor.num_queued_tokens()

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Raise AdmissionError when a queue limit does not allow `n` more sequences."""
        limits = self.vllm_config.scheduler_config
        if limits.max_num_queued_reqs is not None:
            running = self.get_num_unfinished_requests()
            if running + n > limits.max_num_queued_reqs:
                what = f"{running} requests are in flight and {n} more would exceed {limits.max_num_queued_reqs}"
                self._turn_away("max_num_queued_reqs", what)
        if limits.max_num_queued_tokens is not None:
            queued = self.get_num_queued_tokens()
            if queued > limits.max_num_queued_tokens:
                what = f"{queued} prompt tokens wait to be computed, over the limit of {limits.max_num_queued_tokens}"
                self._turn_away("max_num_queued_tokens", what)

    def _turn_away(self, reason: str, what: str) -> NoReturn:
        if self.logger_manager is not None:
            self.logger_manager.record_admission_rejection(reason)
        raise AdmissionError(f"the server is busy: {what}; try again later", reason=reason)

    # Requests.

    async def add_request(
        self,
        request_id: str,
        prompt: EngineCoreRequest | Any,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        prompt_text: str | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        kv_hints: Any = None,
    ) -> RequestOutputCollector:
        """Check and send one request; its outputs arrive in the collector that is returned.

        Raises VLLMValidationError, AdmissionError or EngineDeadError.
        """
        await self.check_health()
        if self._closed is not None:
            raise self._closed.with_traceback(None)
        if isinstance(prompt, AsyncGenerator):
            raise VLLMValidationError("streamed input is not supported by this version", parameter="prompt")
        self.check_admission(getattr(params, "n", 1), request_id)
        if isinstance(prompt, EngineCoreRequest):
            text, request = prompt_text, prompt
        else:
            text, request = self.input_processor.process_inputs(
                request_id,
                prompt,
                params,
                arrival_time=arrival_time,
                lora_request=lora_request,
                tokenization_kwargs=tokenization_kwargs,
                trace_headers=trace_headers,
                priority=priority,
                data_parallel_rank=data_parallel_rank,
                session_id=session_id,
                kv_hints=kv_hints,
                reasoning_ended=reasoning_ended,
                reasoning_parser_kwargs=reasoning_parser_kwargs,
            )
            text = prompt_text or text
        queue = RequestOutputCollector(request.params.output_kind, request.request_id)
        self._start_reading()
        children = sequences(request)
        for child, parent, index in children:
            self.output_processor.add_request(child, text, parent, index, queue)
        try:
            for child, _, _ in children:
                await self.engine_core.add_request_async(child)
        except BaseException:
            # Nobody will read it: it must not count as running for ever.
            ids = self.output_processor.abort_requests([queue.request_id], internal=True)
            with contextlib.suppress(VLLMValidationError):
                await self.engine_core.abort_requests_async(ids)
            raise
        return queue

    async def generate(
        self,
        prompt: EngineCoreRequest | Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request and yield its outputs; the last one has `finished` set.

        Closing the generator, or cancelling the task that reads it, aborts the request. Raises
        VLLMValidationError, AdmissionError, EngineGenerateError for this request alone, or
        EngineDeadError.
        """
        queue: RequestOutputCollector | None = None
        end = RequestEnd(getattr(sampling_params, "output_kind", None))
        with logged(self.log_requests, request_id, end):
            try:
                queue = await self.add_request(
                    request_id,
                    prompt,
                    sampling_params,
                    lora_request=lora_request,
                    tokenization_kwargs=tokenization_kwargs,
                    trace_headers=trace_headers,
                    priority=priority,
                    data_parallel_rank=data_parallel_rank,
                    session_id=session_id,
                    prompt_text=prompt_text,
                    kv_hints=kv_hints,
                    reasoning_ended=reasoning_ended,
                    reasoning_parser_kwargs=reasoning_parser_kwargs,
                )
                finished = False
                deadline = _deadline(self.vllm_config.scheduler_config.request_timeout)
                while not finished:
                    output = await _next_output(queue, deadline)
                    assert isinstance(output, RequestOutput)
                    finished = output.finished
                    end.saw(output)
                    yield output
            except (asyncio.CancelledError, GeneratorExit):
                if queue is not None:
                    await self.abort(queue.request_id, internal=True)
                raise
            except (EngineDeadError, AdmissionError, ValueError):
                raise
            except EngineGenerateError:
                if queue is not None:
                    await self.abort(queue.request_id, internal=True)  # Nothing, unless its time is over.
                raise
            except Exception as error:
                if queue is not None:
                    await self.abort(queue.request_id, internal=True)
                raise EngineGenerateError(f"request {request_id} failed: {error}", code="generate") from error

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
        reasoning_ended: bool | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[Any], None]:
        """Run one pooling request and yield its answer.

        A task that is not given is the model's first. Closing the generator, or cancelling the task that reads it,
        aborts the request. Raises VLLMValidationError, AdmissionError, EngineGenerateError for this request alone,
        or EngineDeadError.
        """
        pooling_params = with_task(pooling_params, self.model_config, tuple(self._ready.supported_tasks))
        queue = await self.add_request(
            request_id,
            prompt,
            pooling_params,
            lora_request=lora_request,
            trace_headers=trace_headers,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
        )
        output, end = None, RequestEnd()
        with logged(self.log_requests, request_id, end):
            try:
                output = await wait_for_result(queue, self.vllm_config.scheduler_config.request_timeout)
                end.saw(output)
            finally:
                if output is None:
                    await self.abort(queue.request_id, internal=True)
        yield output

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Stop one request or several; unknown ids are ignored.

        internal  the ids are the engine's own, not those the callers gave
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await self.engine_core.abort_requests_async(self.output_processor.abort_requests(ids, internal))

    async def fail_requests(self, error: Exception, for_good: bool = False) -> None:
        """End every running request with `error`; `for_good`: and any that comes later, e.g. since the server stops."""
        if for_good:
            self._closed = error
        ids = list(self.output_processor.request_states)
        self.output_processor.propagate_error(error)
        await self.engine_core.abort_requests_async(ids)

    async def wait_for_death(self) -> None:
        """Return once the engine has ended by itself."""
        self._start_reading()
        assert self._output_task is not None
        await asyncio.wait([self._output_task])

    # Reading outputs.

    def _start_reading(self) -> None:
        if self._output_task is None:
            reading = _read_outputs(weakref.ref(self))
            self._output_task = asyncio.create_task(reading, name="engine outputs")

    async def _take(self, outputs: EngineCoreOutputs, turn: Turn) -> None:
        """Turn one step's outputs into answers; others have their turn in between."""
        stats = IterationStats() if self.log_stats and outputs.outputs else None
        size = max(1, envs.VLLM_V1_OUTPUT_PROC_CHUNK_SIZE)
        for start in range(0, len(outputs.outputs), size):
            chunk = outputs.outputs[start : start + size]
            done = self.output_processor.process_outputs(chunk, outputs.timestamp, stats)
            await self.engine_core.abort_requests_async(done.reqs_to_abort)
            await turn.over()
        if self.logger_manager is not None and (stats is not None or outputs.scheduler_stats is not None):
            media = self.input_processor.media
            self.logger_manager.record(
                outputs.scheduler_stats,
                stats,
                mm_cache_stats=media.take_stats() if media is not None else None,
                engine_idx=outputs.engine_index,
            )

    def _end_with(self, error: Exception) -> None:
        if not isinstance(error, EngineDeadError):
            logger.error("outputs cannot be processed any more", exc_info=error)
            error = EngineDeadError(f"outputs cannot be processed any more: {error}", code="engine-outputs")
            self.engine_core.process.fail(error)
        self.output_processor.propagate_error(error)

    async def publish_ledger(self) -> None:
        """Let the other front ends of this engine know what happened in this one."""
        if self._client_count > 1:
            await self._call("add_ledger", ledger.export())

    async def get_ledger(self) -> list[dict[str, Any]]:
        """The ledger of all processes, oldest entry first."""
        await self.publish_ledger()
        return await super().get_ledger()

    # The rest of `EngineClient`; what the engine core answers is in `EngineCalls`.

    async def do_log_stats(self) -> None:
        """Let the stat loggers write now."""
        if self.logger_manager is not None:
            # Off the event loop: a logger may take its time.
            await asyncio.to_thread(self.logger_manager.log)

    async def wait_for_requests_to_drain(self, drain_timeout: int = 300) -> None:
        """Wait until no request runs. Raises TimeoutError past `drain_timeout` seconds."""
        deadline = time.monotonic() + drain_timeout
        while self.get_num_unfinished_requests() and not self.is_stopped:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{self.get_num_unfinished_requests()} requests still run after {drain_timeout} s")
            await asyncio.sleep(_DRAIN_POLL_S)

    async def _call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        await self.check_health()
        self._start_reading()
        return await self.engine_core.call_utility_async(method, *args, timeout_s=timeout_s)

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine; it gets `timeout` seconds to do so by itself. A second time does nothing.

        Requests that still run end with EngineDeadError.
        """
        if self._finalizer.detach():
            _end(self.engine_core, self.logger_manager, timeout)


def _refuse_launched_ranks(vllm_config: VllmConfig) -> None:
    if vllm_config.parallel_config.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            "the external_launcher executor runs the ranks of a script that uses LLM, and no server",
            code="external-launcher",
            fix="use mp, or ray for several machines",
        )


def _own_engine(vllm_config: VllmConfig) -> EngineHandle:
    size = vllm_config.parallel_config.data_parallel_size
    return EngineProcess() if size == 1 else EngineReplicas.start(size)


def _end(core: EngineClientCore, loggers: StatLoggerManager | None, timeout: float | None = None) -> None:
    if loggers is not None:
        loggers.stop()
    core.shutdown(timeout)


def _deadline(limit_s: float | None) -> float | None:
    return None if limit_s is None else asyncio.get_running_loop().time() + limit_s


async def _next_output(
    queue: RequestOutputCollector, deadline: float | None
) -> RequestOutput | PoolingRequestOutput[Any]:
    """The next output. Raises EngineGenerateError past `deadline` (event loop time)."""
    if deadline is None:
        return queue.get_nowait() or await queue.get()
    try:
        async with asyncio.timeout_at(deadline):
            if asyncio.get_running_loop().time() >= deadline:
                raise TimeoutError
            return queue.get_nowait() or await queue.get()
    except TimeoutError:
        raise EngineGenerateError(
            "the request did not end within its time limit",
            code="request-timeout",
            fix="ask for fewer tokens, or raise --request-timeout",
        ) from None


async def _read_outputs(owner: weakref.ref[AsyncLLM]) -> None:
    """Feed the engine core's outputs to their engine, for as long as somebody holds it."""
    engine = owner()
    assert engine is not None
    core = engine.engine_core
    del engine
    turn = Turn()
    while True:
        try:
            outputs = await core.get_output_async()
            engine = owner()
            if engine is None:
                return
            await engine._take(outputs, turn)
        except Exception as error:
            engine = owner()
            if engine is not None:
                engine._end_with(error)
            return
        del engine
