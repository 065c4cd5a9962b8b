"""What each `vllm...` module is made of: one row per module, as strings.

A row has a home (the module of ours whose names show through), names that live elsewhere,
and names that wait for something we do not have yet. Old paths of earlier releases are rows
like any other, since about a quarter of public plugins still use one.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from hardpoint.compat.parser_modules import REASONING_PARSER_MODULES, TOOL_PARSER_MODULES

API_VERSION = "0.32.0"


@dataclass(frozen=True)
class Waits:
    """A module or name of vLLM's that is not there yet, and what it waits for."""

    what: str


@dataclass(frozen=True)
class Entry:
    """One module of the alias."""

    # Modules of ours, separated by spaces, whose names show through; the first that has a name owns it.
    home: str = ""
    # name -> "module:attribute", or "module" for a module
    names: Mapping[str, str] = field(default_factory=dict)
    waits: Mapping[str, str] = field(default_factory=dict)

    def locate(self, name: str) -> tuple[str | None, str]:
        """Return (owner module, attribute), or (None, what the name waits for or "")."""
        target = self.names.get(name)
        if target is not None:
            owner, _, attribute = target.partition(":")
            return owner, attribute
        if name in self.waits:
            return None, self.waits[name]
        # Dunder names describe the alias module itself, not its home.
        if not self.home or name.startswith("__"):
            return None, ""
        homes = self.home.split()
        owners = (home for home in homes[:-1] if hasattr(importlib.import_module(home), name))
        return next(owners, homes[-1]), name

    def public_names(self) -> list[str]:
        """The names a star import takes."""
        shown = [name for home in self.home.split() for name in vars(importlib.import_module(home)) if name[0] != "_"]
        return sorted({*self.names, *shown})


def _from(module: str, names: str) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names.split()}


_CONFIG = "hardpoint.config"
_CONTRACTS = "hardpoint.contracts"
_LAYERS = "hardpoint.worker.layers"
_TYPES = "hardpoint.types"
_WORKER = "hardpoint.worker"

_SECTIONS = _from(
    f"{_CONFIG}.sections",
    "VllmConfig ModelConfig CacheConfig ParallelConfig SchedulerConfig DeviceConfig LoadConfig LoRAConfig "
    "SpeculativeConfig StructuredOutputsConfig ReasoningConfig ObservabilityConfig LoggingConfig CompilationConfig "
    "CompilationMode CUDAGraphMode PassConfig KVTransferConfig ECTransferConfig PoolerConfig AttentionConfig "
    "KernelConfig KVEventsConfig MultiModalConfig OffloadConfig ProfilerConfig",
)
_CURRENT = _from(
    f"{_CONFIG}.current",
    "get_current_vllm_config get_current_vllm_config_or_none set_current_vllm_config get_layers_from_vllm_config",
)
_PARALLEL = f"{_WORKER}.distributed.parallel_state"
_LOADING = f"{_WORKER}.models.loading"

# What a missing part waits for, in the words a plugin author sees.
VISION_LAYERS = "attention layers for media encoders"
MEDIA_STEPS = "the inner steps of vLLM's media processors"
TOWER_ADAPTERS = "adapters on media encoders"
MOE = "exchangeable expert kernels"
MAMBA = "state-space models"
MODELS = "more model architectures"
CONNECTORS = "KV and encoder-cache connectors"
OFFLOAD = "KV offloading"
SLEEP = "sleep mode"
SPECULATION = "speculative decoding"
QUANT = "more quantisation methods"
IR = "IR operators"
TRITON = "the Triton kernels"
COMPILE = "torch.compile integration"
RL = "weight transfer"


_LINEAR = _from(
    f"{_LAYERS}.linear",
    "ColumnParallelLinear LinearBase MergedColumnParallelLinear QKVParallelLinear ReplicatedLinear RowParallelLinear "
    "UnquantizedLinearMethod",
) | _from(f"{_CONTRACTS}.quantization", "LinearMethodBase")

_MODEL_CONTRACTS = _from(
    f"{_CONTRACTS}.model",
    "HasInnerState HasNoOps IsAttentionFree IsHybrid MixtureOfExperts SupportsCrossEncoding SupportsLoRA SupportsMRoPE "
    "MultiModalEmbeddings SupportsMultiModal SupportsPP SupportsQuant SupportsTranscription has_inner_state has_noops "
    "is_attention_free is_hybrid is_mixture_of_experts supports_cross_encoding supports_lora supports_mrope "
    "supports_multimodal supports_pp supports_transcription",
)
_MODEL_BASES = _from(
    f"{_CONTRACTS}.model",
    "VllmModel VllmModelForPooling VllmModelForTextGeneration attn_type default_pooling_type is_pooling_model "
    "is_text_generation_model is_vllm_model",
)
_MODEL_REGISTRY = {"ModelRegistry": f"{_WORKER}.models.registry:ModelRegistry"}

_ATTENTION = {
    "Attention": f"{_LAYERS}.attention:Attention",
    "AttentionType": f"{_CONTRACTS}.attention_backend:AttentionType",
    "AttentionBackend": f"{_CONTRACTS}.attention_backend:AttentionBackend",
    "AttentionMetadata": f"{_CONTRACTS}.attention_backend:AttentionMetadata",
    "EncoderOnlyAttention": f"{_LAYERS}.encoder_attention:EncoderOnlyAttention",
}
# Its name and place until backends had a registry.
_OLD_BACKEND_ENUM = {"_Backend": f"{_WORKER}.attention.registry:AttentionBackendEnum"}
_ATTENTION_WAITS = {
    "MLAAttention": MODELS,
    "MMEncoderAttention": VISION_LAYERS,
    "CrossAttention": MODELS,
    "ChunkedLocalAttention": MODELS,
}

_LOGITS_V1 = _from(
    f"{_CONTRACTS}.logits_processor",
    "AdapterLogitsProcessor BatchUpdate MoveDirectionality RequestLogitsProcessor process_dict_updates",
) | {
    "LogitsProcessor": f"{_CONTRACTS}.logits_processor:LogitsProcessorV1",
    "LOGITSPROCS_GROUP": "hardpoint.compat.adapters:LOGITSPROCS_GROUP",
}
_LOGITS_V2 = _from(f"{_CONTRACTS}.logits_processor", "LogitsContext LogitsProcRequestState") | {
    "LogitsProcessor": f"{_CONTRACTS}.logits_processor:LogitsProcessorV2",
    "LOGITSPROCS_GROUP": "hardpoint.compat.adapters:LOGITSPROCS_GROUP",
}

_QUANT = _from(
    f"{_WORKER}.quantization.registry", "QUANTIZATION_METHODS get_quantization_config register_quantization_config"
) | _from(f"{_CONTRACTS}.quantization", "QuantizationConfig")

_LOADERS = (
    _from(f"{_WORKER}.loaders.registry", "get_model_loader register_model_loader")
    | _from(f"{_WORKER}.loaders.building", "get_model")
    | _from(f"{_CONTRACTS}.model_loader", "BaseModelLoader")
)
_PROTOCOL = f"{_TYPES}.answers " + " ".join(
    f"hardpoint.front_end.server.protocol.{part}" for part in ("base", "chat", "completions", "models", "tokenize")
)

_POOLING = f"{_WORKER}.pooling"
_POOLERS = f"{_POOLING}.poolers {_POOLING}.methods {_POOLING}.activations"
# Where poolers were and are; one module of ours has them all.
POOLER_MODULES = [
    "abstract",
    "common",
    "special",
    "activations",
    "heads",
    "methods",
    *(f"{kind}{part}" for kind in ("seqwise", "tokwise") for part in ("", ".heads", ".methods", ".poolers")),
]

_APP = _from("hardpoint.front_end.server.app", "build_app init_app_state")

_INPUTS = _from(f"{_TYPES}.prompts", "PromptType SingletonPrompt TextPrompt TokensPrompt EmbedsPrompt DataPrompt")
_OUTPUTS = f"{_TYPES}.outputs"
_SCHED_STATS = f"{_TYPES}.stats"


_PARSERS = "hardpoint.front_end.parsers"
_TOOL_PARSERS = _from("hardpoint.extensions.parser_managers", "ToolParserManager") | _from(
    f"{_CONTRACTS}.tool_parser", "ToolParser"
)
_REASONING_PARSERS = _from("hardpoint.extensions.parser_managers", "ReasoningParserManager") | _from(
    f"{_CONTRACTS}.reasoning_parser", "ReasoningParser"
)
_TOOL_TEXTS = _from(f"{_PARSERS}.tool_facts", "find_tool_name find_tool_properties partial_tag_overlap")


def _parser_paths() -> dict[str, Entry | Waits]:
    """The parsers' modules, which have moved more than once."""
    rows: dict[str, Entry | Waits] = {
        "vllm.reasoning": Entry(f"{_PARSERS}.reasoning_formats", names=_REASONING_PARSERS),
        "vllm.reasoning.abs_reasoning_parsers": Entry(names=_REASONING_PARSERS),
        "vllm.reasoning.basic_parsers": Entry(
            names=_from(f"{_PARSERS}.reasoning_formats", "BaseThinkingReasoningParser")
        ),
        "vllm.parser": Entry(),
        "vllm.parser.engine": Entry(),
        "vllm.parser.engine.adapters": Entry("hardpoint.compat.parser_engines"),
        "vllm.parser.qwen3": Entry(names=_from("hardpoint.compat.parser_engines", "Qwen3Parser")),
        "vllm.entrypoints.generate.base": Entry(),
        "vllm.entrypoints.generate": Entry(),
        "vllm.entrypoints.generate.base.protocol": Entry(_PROTOCOL),
    }
    for name in REASONING_PARSER_MODULES:
        rows[f"vllm.reasoning.{name}"] = Entry(f"{_PARSERS}.reasoning_formats", names=_REASONING_PARSERS)
    for folder in ("vllm.tool_parsers", "vllm.entrypoints.openai.tool_parsers"):
        rows[folder] = Entry(f"{_PARSERS}.tool_formats", names=_TOOL_PARSERS)
        rows[f"{folder}.abstract_tool_parser"] = Entry(f"{_CONTRACTS}.tool_parser", names=_TOOL_PARSERS)
        rows[f"{folder}.utils"] = Entry(names=_TOOL_TEXTS)
        for name in TOOL_PARSER_MODULES:
            rows[f"{folder}.{name}"] = Entry(f"{_PARSERS}.tool_formats", names=_TOOL_PARSERS)
    return rows


MODULES: dict[str, Entry | Waits] = {
    # -- user-level names and the loader -------------------------------------------------------------------------------
    "vllm": Entry(
        names=_MODEL_REGISTRY
        | _from("hardpoint.llm", "LLM")
        | _from(f"{_TYPES}.sampling_params", "SamplingParams")
        | _from(f"{_TYPES}.pooling_params", "PoolingParams")
        | _from(f"{_CONFIG}.engine_args", "EngineArgs AsyncEngineArgs")
        | _from(_OUTPUTS, "CompletionOutput RequestOutput PoolingRequestOutput")
        | _from("hardpoint.front_end.llm_engine", "LLMEngine")
        | {
            "AsyncLLMEngine": "hardpoint.front_end.async_llm:AsyncLLM",
            "PromptType": f"{_TYPES}.prompts:PromptType",
            "TextPrompt": f"{_TYPES}.prompts:TextPrompt",
            "TokensPrompt": f"{_TYPES}.prompts:TokensPrompt",
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
        names=_from(
            "hardpoint.compat.adapters",
            "DEFAULT_PLUGINS_GROUP IO_PROCESSOR_PLUGINS_GROUP PLATFORM_PLUGINS_GROUP STAT_LOGGER_PLUGINS_GROUP "
            "ENDPOINT_PLUGINS_GROUP",
        )
        | _from("hardpoint.extensions.boot", "load_general_plugins")
        | _from("hardpoint.extensions.loading", "load_plugins_by_group")
        | _from("hardpoint.extensions.groups", "load_endpoint_plugins")
    ),
    "vllm.plugins.endpoint_plugins": Entry(),
    "vllm.plugins.endpoint_plugins.interface": Entry(
        names=_from(f"{_CONTRACTS}.endpoint_plugin", "EndpointPlugin")
        | _from("hardpoint.front_end.server.endpoints", "attach_endpoint_plugins init_endpoint_plugins_state")
    ),
    "vllm.plugins.io_processors": Entry(
        names=_from("hardpoint.front_end.io_processors", "get_io_processor has_io_processor")
    ),
    "vllm.plugins.io_processors.interface": Entry(names=_from(f"{_CONTRACTS}.io_processor", "IOProcessor")),
    "vllm.plugins.lora_resolvers": Entry(),
    "vllm.plugins.lora_resolvers.filesystem_resolver": Entry("hardpoint.extensions.lora_resolvers"),
    "vllm.plugins.lora_resolvers.hf_hub_resolver": Entry("hardpoint.extensions.lora_resolvers"),
    "vllm.logger": Entry("hardpoint.log"),
    "vllm.envs": Entry("hardpoint.env"),
    "vllm.exceptions": Entry(names=_from("hardpoint.errors", "VLLMValidationError")),
    "vllm.tasks": Entry(f"{_TYPES}.tasks"),
    "vllm.tracing": Entry("hardpoint.compat.adapters", waits={"init_tracer": "tracing"}),
    # -- configuration -------------------------------------------------------------------------------------------------
    "vllm.config": Entry(f"{_CONFIG}.sections", names=_CURRENT),
    "vllm.config.vllm": Entry(f"{_CONFIG}.sections.vllm", names=_CURRENT),
    "vllm.config.model": Entry(f"{_CONFIG}.sections.model"),
    "vllm.config.cache": Entry(
        f"{_CONFIG}.sections.cache",
        waits={"register_kv_cache_dtype": "KV cache dtypes", "KV_CACHE_DTYPES": "KV cache dtypes"},
    ),
    "vllm.config.parallel": Entry(f"{_CONFIG}.sections.parallel"),
    "vllm.config.scheduler": Entry(f"{_CONFIG}.sections.scheduler"),
    "vllm.config.compilation": Entry(f"{_CONFIG}.sections.compilation"),
    "vllm.config.load": Entry(f"{_CONFIG}.sections.load"),
    "vllm.config.lora": Entry(names=_from(f"{_CONFIG}.sections", "LoRAConfig")),
    "vllm.config.multimodal": Entry(
        names=_from(f"{_CONFIG}.sections", "MultiModalConfig")
        | _from(f"{_CONTRACTS}.multimodal", "MultiModalDummyOptions")
    ),
    "vllm.config.kv_transfer": Entry(names=_from(f"{_CONFIG}.sections", "KVTransferConfig")),
    "vllm.config.pooler": Entry(names=_from(f"{_CONFIG}.sections", "PoolerConfig")),
    "vllm.config.observability": Entry(f"{_CONFIG}.sections.observability"),
    **{
        f"vllm.config.{module}": Entry(names=_from(f"{_CONFIG}.sections", name))
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
    "vllm.engine.arg_utils": Entry(f"{_CONFIG}.engine_args"),
    "vllm.engine.protocol": Entry(f"{_CONTRACTS}.engine_client"),
    "vllm.engine.async_llm_engine": Entry(names={"AsyncLLMEngine": "hardpoint.front_end.async_llm:AsyncLLM"}),
    "vllm.engine.llm_engine": Entry("hardpoint.front_end.llm_engine"),
    # -- plain data ----------------------------------------------------------------------------------------------------
    "vllm.sampling_params": Entry(f"{_TYPES}.sampling_params"),
    "vllm.pooling_params": Entry(f"{_TYPES}.pooling_params"),
    "vllm.outputs": Entry(_OUTPUTS),
    "vllm.logprobs": Entry(f"{_TYPES}.logprobs"),
    "vllm.inputs": Entry(
        names=_INPUTS | _from(f"{_TYPES}.multimodal", "MultiModalDataDict MultiModalUUIDDict mm_input")
    ),
    "vllm.inputs.data": Entry(names=_INPUTS),
    "vllm.sequence": Entry(
        names=_from(f"{_CONTRACTS}.model", "IntermediateTensors")
        | _from(f"{_WORKER}.sampling.sampler", "SamplerOutput")
        | _from(f"{_TYPES}.logprobs", "Logprob PromptLogprobs SampleLogprobs")
    ),
    "vllm.lora": Entry(),
    "vllm.lora.request": Entry(f"{_TYPES}.lora_request"),
    "vllm.lora.resolver": Entry(f"{_CONTRACTS}.lora_resolver"),
    "vllm.forward_context": Entry(f"{_WORKER}.forward_context"),
    # -- models --------------------------------------------------------------------------------------------------------
    "vllm.model_executor": Entry(names=_from(f"{_WORKER}.sampling.metadata", "SamplingMetadata")),
    "vllm.model_executor.models": Entry(names=_MODEL_REGISTRY | _MODEL_CONTRACTS | _MODEL_BASES),
    "vllm.model_executor.models.registry": Entry(f"{_WORKER}.models.registry"),
    "vllm.model_executor.models.interfaces": Entry(
        names=_MODEL_CONTRACTS,
        waits={
            "SupportsMambaPrefixCaching": MAMBA,
            "SupportsEagle": SPECULATION,
            "SupportsEagle3": SPECULATION,
        },
    ),
    "vllm.model_executor.models.interfaces_base": Entry(names=_MODEL_BASES),
    "vllm.model_executor.models.llama": Entry(f"{_WORKER}.models.llama"),
    "vllm.model_executor.models.utils": Entry(_LOADING),
    "vllm.model_executor.models.adapters": Entry(
        names=_from(f"{_POOLING}.adapters", "as_embedding_model as_seq_cls_model")
    ),
    "vllm.model_executor.models.bert": Entry(f"{_WORKER}.models.bert"),
    "vllm.model_executor.models.roberta": Entry(f"{_WORKER}.models.bert"),
    "vllm.model_executor.models.config": Entry(f"{_CONFIG}.model_hooks"),
    "vllm.model_executor.models.module_mapping": Waits(TOWER_ADAPTERS),
    "vllm.model_executor.models.llava": Entry(
        f"{_WORKER}.models.llava",
        names=_from(
            "hardpoint.front_end.multimodal.llava",
            "LlavaDummyInputsBuilder LlavaMultiModalProcessor LlavaProcessingInfo",
        ),
    ),
    "vllm.model_executor.models.clip": Entry(f"{_WORKER}.models.clip"),
    "vllm.model_executor.models.mistral": Entry(names=_from(f"{_WORKER}.models.llama", "MistralForCausalLM")),
    "vllm.model_executor.models.transformers": Entry(f"{_WORKER}.models.transformers_backend"),
    **{
        f"vllm.model_executor.models.{module}": Entry(f"{_WORKER}.models.{module}")
        for module in ["gemma", "gemma2", "gemma3", "gpt2", "mixtral", "opt", "phi3", "qwen2", "qwen3", "qwen3_moe"]
    },
    "vllm.model_executor.models.lfm2": Waits(MAMBA),
    "vllm.model_executor.utils": Entry(f"{_LAYERS}.parameters"),
    "vllm.model_executor.parameter": Waits(QUANT),
    "vllm.model_executor.pooling_metadata": Entry(
        f"{_POOLING}.metadata", waits={"PoolingTensors": "the pooling tensors of vLLM's first engine"}
    ),
    "vllm.model_executor.sampling_metadata": Entry(f"{_WORKER}.sampling.metadata"),
    "vllm.model_executor.custom_op": Entry(f"{_CONTRACTS}.custom_op"),
    # -- layers --------------------------------------------------------------------------------------------------------
    "vllm.model_executor.layers": Entry(),
    "vllm.model_executor.layers.linear": Entry(f"{_LAYERS}.linear", names=_LINEAR),
    "vllm.model_executor.layers.vocab_parallel_embedding": Entry(f"{_LAYERS}.vocab_parallel_embedding"),
    "vllm.model_executor.layers.layernorm": Entry(f"{_LAYERS}.layernorm"),
    "vllm.model_executor.layers.activation": Entry(f"{_LAYERS}.activation"),
    "vllm.model_executor.layers.rotary_embedding": Entry(f"{_LAYERS}.rotary_embedding"),
    "vllm.model_executor.layers.rotary_embedding.base": Entry(f"{_LAYERS}.rotary_embedding"),
    "vllm.model_executor.layers.logits_processor": Entry(f"{_LAYERS}.logits_processor"),
    "vllm.model_executor.layers.sampler": Entry(f"{_WORKER}.sampling.sampler"),
    "vllm.model_executor.layers.attention": Entry(names=_ATTENTION, waits=_ATTENTION_WAITS),
    "vllm.model_executor.layers.attention.attention": Entry(names=_ATTENTION),
    "vllm.model_executor.layers.attention_layer_base": Entry(
        names=_from(f"{_CONTRACTS}.attention_backend", "AttentionLayerBase")
    ),
    "vllm.model_executor.layers.fused_moe": Entry(
        f"{_LAYERS}.fused_moe",
        waits=dict.fromkeys(["FusedMoEConfig", "MoERunner", "RoutedExperts", "SharedExperts"], MOE),
    ),
    "vllm.model_executor.layers.fused_moe.layer": Entry(f"{_LAYERS}.fused_moe.layer {_LAYERS}.fused_moe.method"),
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base": Entry(f"{_LAYERS}.fused_moe.method"),
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method": Entry(f"{_LAYERS}.fused_moe.method"),
    "vllm.model_executor.layers.fused_moe.shared_fused_moe": Entry(f"{_LAYERS}.fused_moe"),
    "vllm.model_executor.layers.fused_moe.routing_simulator": Entry(f"{_LAYERS}.fused_moe.simulation"),
    "vllm.model_executor.layers.fused_moe.router": Entry(),
    "vllm.model_executor.layers.fused_moe.router.gate_linear": Entry(f"{_LAYERS}.fused_moe.gate"),
    "vllm.model_executor.layers.fused_moe.router.routing_simulator_router": Entry(f"{_LAYERS}.fused_moe.simulation"),
    "vllm.model_executor.layers.mamba": Waits(MAMBA),
    "vllm.model_executor.layers.pooler": Entry(_POOLERS),
    **{f"vllm.model_executor.layers.pooler.{module}": Entry(_POOLERS) for module in POOLER_MODULES},
    "vllm.model_executor.layers.quantization": Entry(names=_QUANT),
    "vllm.model_executor.layers.quantization.base_config": Entry(f"{_CONTRACTS}.quantization"),
    "vllm.model_executor.layers.quantization.gguf": Entry(f"{_WORKER}.quantization.gguf"),
    "vllm.model_executor.layers.quantization.kv_cache": Waits("KV cache dtypes"),
    "vllm.model_executor.layers.quantization.fp8": Entry(
        names={"Fp8Config": "hardpoint.compat.absent:Fp8Config"},
        waits=dict.fromkeys(("Fp8LinearMethod", "Fp8MoEMethod", "Fp8KVCacheMethod"), QUANT),
    ),
    "vllm.model_executor.layers.quantization.utils": Waits(QUANT),
    "vllm.model_executor.model_loader": Entry(names=_LOADERS),
    "vllm.model_executor.model_loader.base_loader": Entry(f"{_CONTRACTS}.model_loader"),
    "vllm.model_executor.model_loader.weight_utils": Entry(f"{_LAYERS}.parameters {_LOADING}"),
    "vllm.model_executor.model_loader.default_loader": Entry(f"{_WORKER}.loaders.default"),
    "vllm.model_executor.model_loader.utils": Entry(
        names=_from(f"{_WORKER}.models.building", "initialize_model")
        | _from(f"{_WORKER}.models.registry", "get_model_architecture")
        | _from(f"{_WORKER}.loaders.building", "process_weights_after_loading set_default_torch_dtype")
    ),
    "vllm.compilation": Entry(),
    "vllm.compilation.decorators": Entry(f"{_WORKER}.models.compilation"),
    "vllm.distributed": Entry(_PARALLEL),
    "vllm.distributed.parallel_state": Entry(_PARALLEL),
    "vllm.distributed.communication_op": Entry(_PARALLEL),
    "vllm.distributed.utils": Entry(
        names=_from(_PARALLEL, "divide get_pp_indices split_tensor_along_last_dim"),
    ),
    "vllm.distributed.device_communicators": Entry(),
    "vllm.distributed.device_communicators.base_device_communicator": Entry(f"{_CONTRACTS}.device_communicator"),
    "vllm.distributed.device_communicators.cpu_communicator": Entry(f"{_WORKER}.distributed.communicators"),
    "vllm.distributed.device_communicators.cuda_communicator": Entry(f"{_WORKER}.distributed.communicators"),
    "vllm.distributed.kv_transfer": Waits(CONNECTORS),
    "vllm.distributed.ec_transfer": Waits(CONNECTORS),
    "vllm.distributed.kv_events": Waits(CONNECTORS),
    "vllm.distributed.weight_transfer": Waits(RL),
    "vllm.ir": Waits(IR),
    "vllm.triton_utils": Waits(TRITON),
    "vllm._custom_ops": Entry("hardpoint.compat.custom_ops"),
    # -- attention -----------------------------------------------------------------------------------------------------
    "vllm.attention": Entry(names=_ATTENTION),
    "vllm.attention.layer": Entry(names=_ATTENTION),
    "vllm.attention.backends": Entry(),
    "vllm.attention.backends.abstract": Entry(f"{_CONTRACTS}.attention_backend"),
    "vllm.attention.backends.registry": Entry(f"{_WORKER}.attention.registry"),
    "vllm.attention.selector": Entry(f"{_WORKER}.attention.selector"),
    "vllm.v1.attention": Entry(),
    "vllm.v1.attention.backend": Entry(f"{_CONTRACTS}.attention_backend", waits={"MLAAttentionImpl": MODELS}),
    "vllm.v1.attention.selector": Entry(
        f"{_WORKER}.attention.selector", names=_from(f"{_CONTRACTS}.attention_backend", "AttentionSelectorConfig")
    ),
    "vllm.v1.attention.backends": Entry(),
    "vllm.v1.attention.backends.registry": Entry(f"{_WORKER}.attention.registry"),
    "vllm.v1.attention.backends.cpu_attn": Entry(
        f"{_WORKER}.attention.cpu", names={"CPUAttentionBackendImpl": f"{_WORKER}.attention.cpu:CPUAttentionImpl"}
    ),
    "vllm.v1.attention.backends.utils": Waits(MODELS),
    "vllm.v1.kv_cache_interface": Entry(
        f"{_CONTRACTS}.kv_cache", waits={"MLAAttentionSpec": MODELS, "MambaSpec": MAMBA}
    ),
    "vllm.v1.kv_cache_spec_registry": Waits(MODELS),
    # -- engine, scheduler, workers ------------------------------------------------------------------------------------
    "vllm.v1": Entry(),
    "vllm.v1.engine": Entry(f"{_TYPES}.messages", names=_from(f"{_TYPES}.finish", "FinishReason")),
    "vllm.v1.engine.async_llm": Entry("hardpoint.front_end.async_llm"),
    "vllm.v1.engine.llm_engine": Entry("hardpoint.front_end.llm_engine"),
    "vllm.v1.engine.core": Entry("hardpoint.engine_core.step"),
    "vllm.v1.engine.input_processor": Entry(names=_from("hardpoint.front_end.inputs", "InputProcessor")),
    "vllm.v1.engine.processor": Entry(names={"Processor": "hardpoint.front_end.inputs:InputProcessor"}),
    "vllm.v1.engine.output_processor": Entry(
        names=_from("hardpoint.front_end.outputs", "OutputProcessor OutputProcessorOutput RequestOutputCollector")
    ),
    "vllm.v1.engine.exceptions": Entry(names=_from("hardpoint.errors", "EngineDeadError EngineGenerateError")),
    "vllm.v1.request": Entry("hardpoint.engine_core.request", names=_from(f"{_TYPES}.finish", "RequestStatus")),
    "vllm.v1.outputs": Entry(
        f"{_TYPES}.schedule {_TYPES}.logprobs", names=_from(f"{_WORKER}.sampling.sampler", "SamplerOutput")
    ),
    "vllm.v1.core": Entry(),
    "vllm.v1.core.kv_cache_manager": Entry(
        names=_from("hardpoint.engine_core.kv_cache.manager", "KVCacheBlocks KVCacheManager")
    ),
    "vllm.v1.core.block_pool": Entry("hardpoint.engine_core.kv_cache.block_pool"),
    "vllm.v1.core.sched": Entry(),
    "vllm.v1.core.sched.request_queue": Entry("hardpoint.engine_core.scheduler.queues"),
    "vllm.v1.core.sched.interface": Entry(f"{_CONTRACTS}.scheduler"),
    "vllm.v1.core.sched.scheduler": Entry("hardpoint.engine_core.scheduler.default"),
    "vllm.v1.core.sched.async_scheduler": Entry("hardpoint.engine_core.scheduler.async_scheduler"),
    "vllm.v1.core.sched.output": Entry(f"{_TYPES}.schedule"),
    "vllm.v1.executor": Entry(names=_from(f"{_CONTRACTS}.executor", "Executor")),
    "vllm.v1.executor.abstract": Entry(f"{_CONTRACTS}.executor"),
    "vllm.v1.executor.uniproc_executor": Entry(
        "hardpoint.engine_core.executors.uni",
        names={"ExecutorWithExternalLauncher": "hardpoint.engine_core.executors.external:ExternalLauncherExecutor"},
    ),
    "vllm.v1.executor.multiproc_executor": Entry("hardpoint.engine_core.executors.mp"),
    "vllm.v1.executor.ray_executor": Entry(
        names={"RayDistributedExecutor": "hardpoint.engine_core.executors.ray_actors:RayExecutor"}
    ),
    "vllm.executor": Entry(),
    "vllm.executor.executor_base": Entry(names={"ExecutorBase": f"{_CONTRACTS}.executor:Executor"}),
    "vllm.executor.uniproc_executor": Entry("hardpoint.engine_core.executors.uni"),
    "vllm.v1.worker": Entry(),
    "vllm.v1.worker.worker_base": Entry(f"{_CONTRACTS}.worker"),
    "vllm.v1.worker.gpu_worker": Entry(f"{_WORKER}.device_worker"),
    "vllm.v1.worker.cpu_worker": Entry(names={"CPUWorker": f"{_WORKER}.device_worker:Worker"}),
    "vllm.v1.worker.gpu_model_runner": Entry(names={"GPUModelRunner": f"{_WORKER}.runner:ModelRunner"}),
    "vllm.v1.worker.cpu_model_runner": Entry(names={"CPUModelRunner": f"{_WORKER}.runner:ModelRunner"}),
    "vllm.v1.worker.gpu": Entry(),
    "vllm.v1.worker.gpu.buffer_utils": Entry(f"{_WORKER}.sampling.buffers"),
    "vllm.v1.worker.gpu.sample": Entry(),
    "vllm.v1.worker.gpu.sample.logits_processor": Entry(names=_LOGITS_V2),
    "vllm.v1.worker.gpu.sample.logits_processor.interface": Entry(names=_LOGITS_V2),
    "vllm.worker": Entry(),
    "vllm.worker.worker_base": Entry(f"{_CONTRACTS}.worker"),
    "vllm.worker.enc_dec_model_runner": Waits("encoder-decoder models"),
    # -- statistics ----------------------------------------------------------------------------------------------------
    "vllm.v1.metrics": Entry(),
    "vllm.v1.metrics.loggers": Entry(
        "hardpoint.front_end.observability.loggers",
        names=_from(f"{_CONTRACTS}.stat_logger", "AggregateStatLoggerBase StatLoggerBase StatLoggerFactory"),
    ),
    "vllm.v1.metrics.stats": Entry(_SCHED_STATS),
    # -- sampling ------------------------------------------------------------------------------------------------------
    "vllm.logits_process": Entry(names={"LogitsProcessor": f"{_CONTRACTS}.logits_processor:RequestLogitsProcessor"}),
    "vllm.v1.sample": Entry(),
    "vllm.v1.sample.sampler": Entry(f"{_WORKER}.sampling.sampler"),
    "vllm.v1.sample.metadata": Entry(f"{_WORKER}.sampling.metadata"),
    "vllm.v1.sample.logits_processor": Entry(names=_LOGITS_V1),
    "vllm.v1.sample.logits_processor.interface": Entry(names=_LOGITS_V1),
    "vllm.v1.sample.logits_processor.builtin": Entry(names=_LOGITS_V1),
    # -- platforms -----------------------------------------------------------------------------------------------------
    "vllm.platforms": Entry(
        "hardpoint.platforms",
        names=_from(f"{_CONTRACTS}.platform", "CpuArchEnum Platform PlatformEnum") | _OLD_BACKEND_ENUM,
    ),
    "vllm.platforms.interface": Entry(f"{_CONTRACTS}.platform", names=_OLD_BACKEND_ENUM),
    "vllm.platforms.cpu": Entry("hardpoint.platforms.cpu"),
    "vllm.platforms.cuda": Entry("hardpoint.platforms.cuda"),
    # -- front end -----------------------------------------------------------------------------------------------------
    "vllm.entrypoints": Entry(),
    "vllm.entrypoints.llm": Entry(names=_from("hardpoint.llm", "LLM")),
    "vllm.entrypoints.chat_utils": Entry("hardpoint.compat.adapters"),
    "vllm.entrypoints.openai": Entry(),
    "vllm.entrypoints.openai.api_server": Entry(names=_APP),
    "vllm.entrypoints.launchers": Entry(),
    "vllm.entrypoints.launchers.app": Entry(names=_APP),
    "vllm.entrypoints.openai.protocol": Entry(_PROTOCOL),
    "vllm.entrypoints.openai.engine": Entry(),
    "vllm.entrypoints.openai.engine.protocol": Entry(_PROTOCOL),
    "vllm.entrypoints.openai.chat_completion": Entry(),
    "vllm.entrypoints.openai.chat_completion.protocol": Entry(_PROTOCOL),
    "vllm.entrypoints.openai.chat_completion.serving": Entry(
        names={"OpenAIServingChat": "hardpoint.front_end.server.serving.chat:ChatService"}
    ),
    "vllm.entrypoints.openai.completion": Entry(),
    "vllm.entrypoints.openai.completion.protocol": Entry(_PROTOCOL),
    "vllm.entrypoints.openai.responses": Entry(),
    "vllm.entrypoints.openai.responses.protocol": Entry(
        names=_from("hardpoint.front_end.server.protocol.responses", "ResponsesRequest")
    ),
    "vllm.entrypoints.pooling": Entry(),
    **{
        f"vllm.entrypoints.pooling.{module}": Entry(place)
        for folder in ("base", "pooling", "embed", "classify", "score", "scoring")
        for module, place in ((folder, ""), (f"{folder}.protocol", "hardpoint.front_end.server.protocol.pooling"))
    },
    "vllm.entrypoints.serve": Entry(),
    "vllm.entrypoints.serve.engine": Entry(),
    "vllm.entrypoints.serve.engine.protocol": Entry(_PROTOCOL),
    "vllm.tokenizers": Entry("hardpoint.front_end.tokenizers"),
    "vllm.tokenizers.detokenizer_utils": Entry("hardpoint.compat.adapters"),
    "vllm.transformers_utils": Entry(),
    "vllm.transformers_utils.tokenizer": Entry(
        "hardpoint.compat.adapters", names={"AnyTokenizer": "hardpoint.front_end.tokenizers:TokenizerLike"}
    ),
    "vllm.transformers_utils.tokenizer_base": Entry(
        names={"TokenizerBase": "hardpoint.front_end.tokenizers:TokenizerLike"}
    ),
    "vllm.transformers_utils.detokenizer_utils": Entry("hardpoint.compat.adapters"),
    "vllm.transformers_utils.config_parser_base": Waits("Hugging Face configuration parsers"),
    "vllm.transformers_utils.config": Entry(
        names={"_CONFIG_REGISTRY": f"{_CONFIG}.model_hooks:CONFIG_REGISTRY"},
        waits=dict.fromkeys(("register_config_parser", "get_config"), "Hugging Face configuration parsers"),
    ),
    "vllm.renderers": Entry(names={"BaseRenderer": "hardpoint.front_end.inputs:InputProcessor"}),
    "vllm.multimodal": Entry(
        names=_from(f"{_CONTRACTS}.multimodal", "MULTIMODAL_REGISTRY MultiModalRegistry")
        | _from(
            f"{_TYPES}.multimodal", "MultiModalDataDict MultiModalKwargsItem MultiModalKwargsItems MultiModalUUIDDict"
        )
    ),
    "vllm.multimodal.registry": Entry(f"{_CONTRACTS}.multimodal"),
    "vllm.multimodal.inputs": Entry(f"{_TYPES}.multimodal"),
    "vllm.multimodal.parse": Entry(
        names=_from(
            f"{_CONTRACTS}.multimodal",
            "ImageProcessorItems ImageSize ModalityDataItems MultiModalDataItems MultiModalDataParser",
        )
    ),
    "vllm.multimodal.processing": Entry(f"{_CONTRACTS}.multimodal {_CONTRACTS}.prompt_updates"),
    "vllm.multimodal.processing.processor": Entry(
        f"{_CONTRACTS}.multimodal {_CONTRACTS}.prompt_updates",
        waits=dict.fromkeys(
            ("HFMultiModalInputs", "MultiModalProcessingResult", "MultiModalPromptUpdates", "PlaceholderFeaturesInfo"),
            MEDIA_STEPS,
        ),
    ),
    "vllm.multimodal.processing.context": Entry(f"{_CONTRACTS}.multimodal"),
    "vllm.multimodal.processing.dummy_inputs": Entry(f"{_CONTRACTS}.multimodal"),
    "vllm.multimodal.profiling": Entry(
        names=_from(f"{_CONTRACTS}.multimodal", "BaseDummyInputsBuilder ProcessorInputs")
    ),
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
    "vllm.model_executor.guided_decoding": Waits("the logits processors of vLLM's first engine"),
    "vllm.v1.spec_decode": Waits(SPECULATION),
    "vllm.v1.pool": Entry(),
    "vllm.v1.pool.metadata": Entry(f"{_POOLING}.metadata"),
    "vllm.v1.pool.late_interaction": Waits("late interaction inside the engine"),
    **_parser_paths(),
    # -- helpers -------------------------------------------------------------------------------------------------------
    "vllm.utils": Entry(
        "hardpoint.compat.adapters",
        names=_from("hardpoint.extensions.refs", "resolve_obj_by_qualname")
        | _from("hardpoint.config.arguments", "FlexibleArgumentParser")
        | _from("hardpoint.compat.torch_helpers", "async_tensor_h2d direct_register_custom_op"),
    ),
    "vllm.utils.argparse_utils": Entry(names=_from("hardpoint.config.arguments", "FlexibleArgumentParser")),
    "vllm.utils.import_utils": Entry(
        names=_from("hardpoint.extensions.refs", "resolve_obj_by_qualname")
        | _from("hardpoint.compat.adapters", "import_from_path import_plugin"),
    ),
    "vllm.utils.torch_utils": Entry("hardpoint.compat.torch_helpers"),
    "vllm.utils.deep_gemm": Entry(
        "hardpoint.compat.absent",
        waits=dict.fromkeys(
            ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "per_block_cast_to_fp8"), "GPU kernels"
        ),
    ),
}


def entry(module: str) -> Entry | Waits | None:
    """The row of a `vllm...` module; below a waiting module everything waits for the same."""
    row = MODULES.get(module)
    if row is not None:
        return row
    parent = module.rpartition(".")[0]
    while parent:
        above = MODULES.get(parent)
        if isinstance(above, Waits):
            return above
        parent = parent.rpartition(".")[0]
    return None


@cache
def known() -> frozenset[str]:
    """Every module path that can be imported."""
    return frozenset(name for name, row in MODULES.items() if isinstance(row, Entry))


def submodules(module: str) -> Iterable[str]:
    """Module paths right below `module` that can be imported."""
    return (name for name in known() if name.rpartition(".")[0] == module)
