"""Engine, scheduler, executors, workers, sampling and statistics."""

from __future__ import annotations

from hardpoint.compat.rows import (
    CONTRACTS,
    FRONT_END,
    OFFLOAD,
    SLEEP,
    SPECULATION,
    TYPES,
    WORKER,
    Entry,
    Waits,
    names_from,
)

_LOGITS_V1 = names_from(
    f"{CONTRACTS}.logits_processor",
    "AdapterLogitsProcessor BatchUpdate MoveDirectionality RequestLogitsProcessor process_dict_updates",
) | {
    "LogitsProcessor": f"{CONTRACTS}.logits_processor:LogitsProcessorV1",
    "LOGITSPROCS_GROUP": "hardpoint.compat.adapters:LOGITSPROCS_GROUP",
}
_LOGITS_V2 = names_from(f"{CONTRACTS}.logits_processor", "LogitsContext LogitsProcRequestState") | {
    "LogitsProcessor": f"{CONTRACTS}.logits_processor:LogitsProcessorV2",
    "LOGITSPROCS_GROUP": "hardpoint.compat.adapters:LOGITSPROCS_GROUP",
}

MODULES: dict[str, Entry | Waits] = {
    # Engine, scheduler, workers.
    "vllm.v1": Entry(),
    "vllm.v1.engine": Entry(f"{TYPES}.messages", names=names_from(f"{TYPES}.finish", "FinishReason")),
    "vllm.v1.engine.async_llm": Entry(f"{FRONT_END}.async_llm"),
    "vllm.v1.engine.llm_engine": Entry(f"{FRONT_END}.llm_engine"),
    "vllm.v1.engine.core": Entry("hardpoint.engine_core.step"),
    "vllm.v1.engine.input_processor": Entry(names=names_from(f"{FRONT_END}.inputs", "InputProcessor")),
    "vllm.v1.engine.processor": Entry(names={"Processor": f"{FRONT_END}.inputs:InputProcessor"}),
    "vllm.v1.engine.output_processor": Entry(
        names=names_from(f"{FRONT_END}.outputs", "OutputProcessor OutputProcessorOutput RequestOutputCollector")
    ),
    "vllm.v1.engine.exceptions": Entry(names=names_from("hardpoint.errors", "EngineDeadError EngineGenerateError")),
    "vllm.v1.request": Entry("hardpoint.engine_core.request", names=names_from(f"{TYPES}.finish", "RequestStatus")),
    "vllm.v1.outputs": Entry(
        f"{TYPES}.schedule {TYPES}.logprobs", names=names_from(f"{WORKER}.sampling.sampler", "SamplerOutput")
    ),
    "vllm.v1.core": Entry(),
    "vllm.v1.core.kv_cache_manager": Entry(
        names=names_from("hardpoint.engine_core.kv_cache.manager", "KVCacheBlocks KVCacheManager")
    ),
    "vllm.v1.core.block_pool": Entry("hardpoint.engine_core.kv_cache.block_pool"),
    "vllm.v1.core.sched": Entry(),
    "vllm.v1.core.sched.request_queue": Entry("hardpoint.engine_core.scheduler.queues"),
    "vllm.v1.core.sched.interface": Entry(f"{CONTRACTS}.scheduler"),
    "vllm.v1.core.sched.scheduler": Entry("hardpoint.engine_core.scheduler.default"),
    "vllm.v1.core.sched.async_scheduler": Entry("hardpoint.engine_core.scheduler.async_scheduler"),
    "vllm.v1.core.sched.output": Entry(f"{TYPES}.schedule"),
    "vllm.v1.executor": Entry(names=names_from(f"{CONTRACTS}.executor", "Executor")),
    "vllm.v1.executor.abstract": Entry(f"{CONTRACTS}.executor"),
    "vllm.v1.executor.uniproc_executor": Entry(
        "hardpoint.engine_core.executors.uni",
        names={"ExecutorWithExternalLauncher": "hardpoint.engine_core.executors.external:ExternalLauncherExecutor"},
    ),
    "vllm.v1.executor.multiproc_executor": Entry("hardpoint.engine_core.executors.mp"),
    "vllm.v1.executor.ray_executor": Entry(
        names={"RayDistributedExecutor": "hardpoint.engine_core.executors.ray_actors:RayExecutor"}
    ),
    "vllm.executor": Entry(),
    "vllm.executor.executor_base": Entry(names={"ExecutorBase": f"{CONTRACTS}.executor:Executor"}),
    "vllm.executor.uniproc_executor": Entry("hardpoint.engine_core.executors.uni"),
    "vllm.v1.worker": Entry(),
    "vllm.v1.worker.worker_base": Entry(f"{CONTRACTS}.worker"),
    "vllm.v1.worker.gpu_worker": Entry(f"{WORKER}.device_worker"),
    "vllm.v1.worker.cpu_worker": Entry(names={"CPUWorker": f"{WORKER}.device_worker:Worker"}),
    "vllm.v1.worker.gpu_model_runner": Entry(names={"GPUModelRunner": f"{WORKER}.runner:ModelRunner"}),
    "vllm.v1.worker.cpu_model_runner": Entry(names={"CPUModelRunner": f"{WORKER}.runner:ModelRunner"}),
    "vllm.v1.worker.gpu": Entry(),
    "vllm.v1.worker.gpu.buffer_utils": Entry(f"{WORKER}.sampling.buffers"),
    "vllm.v1.worker.gpu.sample": Entry(),
    "vllm.v1.worker.gpu.sample.logits_processor": Entry(names=_LOGITS_V2),
    "vllm.v1.worker.gpu.sample.logits_processor.interface": Entry(names=_LOGITS_V2),
    "vllm.worker": Entry(),
    "vllm.worker.worker_base": Entry(f"{CONTRACTS}.worker"),
    "vllm.worker.enc_dec_model_runner": Waits("encoder-decoder models"),
    "vllm.device_allocator": Waits(SLEEP),
    "vllm.v1.kv_offload": Waits(OFFLOAD),
    "vllm.v1.structured_output": Entry(
        names={"StructuredOutputManager": "hardpoint.engine_core.structured.manager:StructuredOutputManager"}
    ),
    "vllm.v1.structured_output.backend_types": Entry(
        "hardpoint.contracts.structured_output",
        names={
            name: f"hardpoint.contracts.structured_output:{name}"
            for name in ("StructuredOutputBackend", "StructuredOutputGrammar", "StructuredOutputOptions")
        },
    ),
    "vllm.v1.structured_output.request": Entry(
        names={"StructuredOutputRequest": "hardpoint.engine_core.structured.request:StructuredOutputRequest"}
    ),
    "vllm.v1.spec_decode": Waits(SPECULATION),
    "vllm.v1.pool": Entry(),
    "vllm.v1.pool.metadata": Entry(f"{WORKER}.pooling.metadata"),
    "vllm.v1.pool.late_interaction": Waits("late interaction inside the engine"),
    # Statistics.
    "vllm.v1.metrics": Entry(),
    "vllm.v1.metrics.loggers": Entry(
        f"{FRONT_END}.observability.loggers",
        names=names_from(f"{CONTRACTS}.stat_logger", "AggregateStatLoggerBase StatLoggerBase StatLoggerFactory"),
    ),
    "vllm.v1.metrics.stats": Entry(f"{TYPES}.stats"),
    # Sampling.
    "vllm.logits_process": Entry(names={"LogitsProcessor": f"{CONTRACTS}.logits_processor:RequestLogitsProcessor"}),
    "vllm.v1.sample": Entry(),
    "vllm.v1.sample.sampler": Entry(f"{WORKER}.sampling.sampler"),
    "vllm.v1.sample.metadata": Entry(f"{WORKER}.sampling.metadata"),
    "vllm.v1.sample.logits_processor": Entry(names=_LOGITS_V1),
    "vllm.v1.sample.logits_processor.interface": Entry(names=_LOGITS_V1),
    "vllm.v1.sample.logits_processor.builtin": Entry(names=_LOGITS_V1),
}
