"""What a script, a plugin or a configuration imports: `vllm`, its sections, its plain data, helpers and platforms."""

from __future__ import annotations

from hardpoint.compat.rows import CONFIG, CONTRACTS, FRONT_END, TYPES, WORKER, Entry, Waits, names_from

# Its name until backends had a registry.
_OLD_BACKEND_ENUM = {"_Backend": f"{WORKER}.attention.registry:AttentionBackendEnum"}
_CURRENT = names_from(
    f"{CONFIG}.current",
    "get_current_vllm_config get_current_vllm_config_or_none set_current_vllm_config get_layers_from_vllm_config",
)
_INPUTS = names_from(f"{TYPES}.prompts", "PromptType SingletonPrompt TextPrompt TokensPrompt EmbedsPrompt DataPrompt")

MODULES: dict[str, Entry | Waits] = {
    # User-level names and the loader.
    "vllm": Entry(
        names=names_from(f"{WORKER}.models.registry", "ModelRegistry")
        | names_from("hardpoint.llm", "LLM")
        | names_from(f"{TYPES}.sampling_params", "SamplingParams")
        | names_from(f"{TYPES}.pooling_params", "PoolingParams")
        | names_from(f"{CONFIG}.engine_args", "EngineArgs AsyncEngineArgs")
        | names_from(f"{TYPES}.outputs", "CompletionOutput RequestOutput PoolingRequestOutput")
        | names_from(f"{FRONT_END}.llm_engine", "LLMEngine")
        | {
            "AsyncLLMEngine": f"{FRONT_END}.async_llm:AsyncLLM",
            "PromptType": f"{TYPES}.prompts:PromptType",
            "TextPrompt": f"{TYPES}.prompts:TextPrompt",
            "TokensPrompt": f"{TYPES}.prompts:TokensPrompt",
            "__version__": "hardpoint.compat.table:API_VERSION",
            "__version_tuple__": "hardpoint.compat.adapters:VERSION_TUPLE",
        },
    ),
    "vllm.version": Entry(
        names={
            "__version__": "hardpoint.compat.table:API_VERSION",
            "__version_tuple__": "hardpoint.compat.adapters:VERSION_TUPLE",
        }
    ),
    "vllm.plugins": Entry(
        names=names_from(
            "hardpoint.compat.adapters",
            "DEFAULT_PLUGINS_GROUP IO_PROCESSOR_PLUGINS_GROUP PLATFORM_PLUGINS_GROUP STAT_LOGGER_PLUGINS_GROUP "
            "ENDPOINT_PLUGINS_GROUP",
        )
        | names_from("hardpoint.extensions.boot", "load_general_plugins")
        | names_from("hardpoint.extensions.loading", "load_plugins_by_group")
        | names_from("hardpoint.extensions.groups", "load_endpoint_plugins")
    ),
    "vllm.plugins.endpoint_plugins": Entry(),
    "vllm.plugins.endpoint_plugins.interface": Entry(
        names=names_from(f"{CONTRACTS}.endpoint_plugin", "EndpointPlugin")
        | names_from(f"{FRONT_END}.server.endpoints", "attach_endpoint_plugins init_endpoint_plugins_state")
    ),
    "vllm.plugins.io_processors": Entry(
        names=names_from(f"{FRONT_END}.io_processors", "get_io_processor has_io_processor")
    ),
    "vllm.plugins.io_processors.interface": Entry(names=names_from(f"{CONTRACTS}.io_processor", "IOProcessor")),
    "vllm.plugins.lora_resolvers": Entry(),
    "vllm.plugins.lora_resolvers.filesystem_resolver": Entry("hardpoint.extensions.lora_resolvers"),
    "vllm.plugins.lora_resolvers.hf_hub_resolver": Entry("hardpoint.extensions.lora_resolvers"),
    "vllm.logger": Entry("hardpoint.log"),
    "vllm.envs": Entry("hardpoint.env"),
    "vllm.exceptions": Entry(names=names_from("hardpoint.errors", "VLLMValidationError")),
    "vllm.tasks": Entry(f"{TYPES}.tasks"),
    "vllm.tracing": Entry("hardpoint.compat.adapters", waits={"init_tracer": "tracing"}),
    # Configuration.
    "vllm.config": Entry(f"{CONFIG}.sections", names=_CURRENT),
    "vllm.config.vllm": Entry(f"{CONFIG}.sections.vllm", names=_CURRENT),
    "vllm.config.model": Entry(f"{CONFIG}.sections.model"),
    "vllm.config.cache": Entry(
        f"{CONFIG}.sections.cache",
        waits={"register_kv_cache_dtype": "KV cache dtypes", "KV_CACHE_DTYPES": "KV cache dtypes"},
    ),
    "vllm.config.parallel": Entry(f"{CONFIG}.sections.parallel"),
    "vllm.config.scheduler": Entry(f"{CONFIG}.sections.scheduler"),
    "vllm.config.compilation": Entry(f"{CONFIG}.sections.compilation"),
    "vllm.config.load": Entry(f"{CONFIG}.sections.load"),
    "vllm.config.lora": Entry(names=names_from(f"{CONFIG}.sections", "LoRAConfig")),
    "vllm.config.multimodal": Entry(
        names=names_from(f"{CONFIG}.sections", "MultiModalConfig")
        | names_from(f"{CONTRACTS}.multimodal", "MultiModalDummyOptions")
    ),
    "vllm.config.kv_transfer": Entry(names=names_from(f"{CONFIG}.sections", "KVTransferConfig")),
    "vllm.config.pooler": Entry(names=names_from(f"{CONFIG}.sections", "PoolerConfig")),
    "vllm.config.observability": Entry(f"{CONFIG}.sections.observability"),
    **{
        f"vllm.config.{module}": Entry(names=names_from(f"{CONFIG}.sections", name))
        for module, name in (
            ("attention", "AttentionConfig"),
            ("device", "DeviceConfig"),
            ("ec_transfer", "ECTransferConfig"),
            ("kernel", "KernelConfig"),
            ("kv_events", "KVEventsConfig"),
            ("offload", "OffloadConfig"),
            ("profiler", "ProfilerConfig"),
            ("reasoning", "ReasoningConfig"),
            ("speculative", "SpeculativeConfig"),
            ("structured_outputs", "StructuredOutputsConfig"),
        )
    },
    "vllm.engine": Entry(),
    "vllm.engine.arg_utils": Entry(f"{CONFIG}.engine_args"),
    "vllm.engine.protocol": Entry(f"{CONTRACTS}.engine_client"),
    "vllm.engine.async_llm_engine": Entry(names={"AsyncLLMEngine": f"{FRONT_END}.async_llm:AsyncLLM"}),
    "vllm.engine.llm_engine": Entry(f"{FRONT_END}.llm_engine"),
    # Plain data.
    "vllm.sampling_params": Entry(f"{TYPES}.sampling_params"),
    "vllm.pooling_params": Entry(f"{TYPES}.pooling_params"),
    "vllm.outputs": Entry(f"{TYPES}.outputs"),
    "vllm.logprobs": Entry(f"{TYPES}.logprobs"),
    "vllm.inputs": Entry(
        names=_INPUTS | names_from(f"{TYPES}.multimodal", "MultiModalDataDict MultiModalUUIDDict mm_input")
    ),
    "vllm.inputs.data": Entry(names=_INPUTS),
    "vllm.sequence": Entry(
        names=names_from(f"{CONTRACTS}.model", "IntermediateTensors")
        | names_from(f"{WORKER}.sampling.sampler", "SamplerOutput")
        | names_from(f"{TYPES}.logprobs", "Logprob PromptLogprobs SampleLogprobs")
    ),
    "vllm.lora": Entry(),
    "vllm.lora.request": Entry(f"{TYPES}.lora_request"),
    "vllm.lora.resolver": Entry(f"{CONTRACTS}.lora_resolver"),
    "vllm.forward_context": Entry(f"{WORKER}.forward_context"),
    # Platforms.
    "vllm.platforms": Entry(
        "hardpoint.platforms",
        names=names_from(f"{CONTRACTS}.platform", "CpuArchEnum Platform PlatformEnum") | _OLD_BACKEND_ENUM,
    ),
    "vllm.platforms.interface": Entry(f"{CONTRACTS}.platform", names=_OLD_BACKEND_ENUM),
    "vllm.platforms.cpu": Entry("hardpoint.platforms.cpu"),
    "vllm.platforms.cuda": Entry("hardpoint.platforms.cuda"),
    # Helpers.
    "vllm.utils": Entry(
        "hardpoint.compat.adapters",
        names=names_from("hardpoint.extensions.refs", "resolve_obj_by_qualname")
        | names_from("hardpoint.config.arguments", "FlexibleArgumentParser")
        | names_from("hardpoint.compat.torch_helpers", "async_tensor_h2d direct_register_custom_op"),
    ),
    "vllm.utils.argparse_utils": Entry(names=names_from("hardpoint.config.arguments", "FlexibleArgumentParser")),
    "vllm.utils.import_utils": Entry(
        names=names_from("hardpoint.extensions.refs", "resolve_obj_by_qualname")
        | names_from("hardpoint.compat.adapters", "import_from_path import_plugin"),
    ),
    "vllm.utils.torch_utils": Entry("hardpoint.compat.torch_helpers"),
    "vllm.utils.deep_gemm": Entry(
        "hardpoint.compat.absent",
        waits=dict.fromkeys(
            ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "per_block_cast_to_fp8"), "GPU kernels"
        ),
    ),
}
