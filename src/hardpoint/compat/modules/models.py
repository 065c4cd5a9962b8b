"""Models, layers, loaders and attention."""

from __future__ import annotations

from hardpoint.compat.rows import (
    CONFIG,
    CONNECTORS,
    CONTRACTS,
    FRONT_END,
    IR,
    MAMBA,
    MODELS,
    MOE,
    QUANT,
    RL,
    SPECULATION,
    TOWER_ADAPTERS,
    TRITON,
    VISION_LAYERS,
    WORKER,
    Entry,
    Waits,
    names_from,
)

_LAYERS = "hardpoint.worker.layers"
_LOADING = f"{WORKER}.models.loading"
_LINEAR = names_from(
    f"{_LAYERS}.linear",
    "ColumnParallelLinear LinearBase MergedColumnParallelLinear QKVParallelLinear ReplicatedLinear RowParallelLinear "
    "UnquantizedLinearMethod",
) | names_from(f"{CONTRACTS}.quantization", "LinearMethodBase")
_MODEL_CONTRACTS = names_from(
    f"{CONTRACTS}.model",
    "HasInnerState HasNoOps IsAttentionFree IsHybrid MixtureOfExperts SupportsCrossEncoding SupportsLoRA SupportsMRoPE "
    "MultiModalEmbeddings SupportsMultiModal SupportsPP SupportsQuant SupportsTranscription has_inner_state has_noops "
    "is_attention_free is_hybrid is_mixture_of_experts supports_cross_encoding supports_lora supports_mrope "
    "supports_multimodal supports_pp supports_transcription",
)
_MODEL_BASES = names_from(
    f"{CONTRACTS}.model",
    "VllmModel VllmModelForPooling VllmModelForTextGeneration attn_type default_pooling_type is_pooling_model "
    "is_text_generation_model is_vllm_model",
)
_ATTENTION = {
    "Attention": f"{_LAYERS}.attention:Attention",
    "AttentionType": f"{CONTRACTS}.attention_backend:AttentionType",
    "AttentionBackend": f"{CONTRACTS}.attention_backend:AttentionBackend",
    "AttentionMetadata": f"{CONTRACTS}.attention_backend:AttentionMetadata",
    "EncoderOnlyAttention": f"{_LAYERS}.encoder_attention:EncoderOnlyAttention",
}
_ATTENTION_WAITS = {
    "MLAAttention": MODELS,
    "MMEncoderAttention": VISION_LAYERS,
    "CrossAttention": MODELS,
    "ChunkedLocalAttention": MODELS,
}
_QUANT = names_from(
    f"{WORKER}.quantization.registry", "QUANTIZATION_METHODS get_quantization_config register_quantization_config"
) | names_from(f"{CONTRACTS}.quantization", "QuantizationConfig")
_LOADERS = (
    names_from(f"{WORKER}.loaders.registry", "get_model_loader register_model_loader")
    | names_from(f"{WORKER}.loaders.building", "get_model")
    | names_from(f"{CONTRACTS}.model_loader", "BaseModelLoader")
)
_PARALLEL = f"{WORKER}.distributed.parallel_state"
_POOLING = f"{WORKER}.pooling"
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

MODULES: dict[str, Entry | Waits] = {
    # Models.
    "vllm.model_executor": Entry(names=names_from(f"{WORKER}.sampling.metadata", "SamplingMetadata")),
    "vllm.model_executor.models": Entry(
        names=names_from(f"{WORKER}.models.registry", "ModelRegistry") | _MODEL_CONTRACTS | _MODEL_BASES
    ),
    "vllm.model_executor.models.registry": Entry(f"{WORKER}.models.registry"),
    "vllm.model_executor.models.interfaces": Entry(
        names=_MODEL_CONTRACTS,
        waits={
            "SupportsMambaPrefixCaching": MAMBA,
            "SupportsEagle": SPECULATION,
            "SupportsEagle3": SPECULATION,
        },
    ),
    "vllm.model_executor.models.interfaces_base": Entry(names=_MODEL_BASES),
    "vllm.model_executor.models.llama": Entry(f"{WORKER}.models.llama"),
    "vllm.model_executor.models.utils": Entry(_LOADING),
    "vllm.model_executor.models.adapters": Entry(
        names=names_from(f"{_POOLING}.adapters", "as_embedding_model as_seq_cls_model")
    ),
    "vllm.model_executor.models.bert": Entry(f"{WORKER}.models.bert"),
    "vllm.model_executor.models.roberta": Entry(f"{WORKER}.models.bert"),
    "vllm.model_executor.models.config": Entry(f"{CONFIG}.model_hooks"),
    "vllm.model_executor.models.module_mapping": Waits(TOWER_ADAPTERS),
    "vllm.model_executor.models.llava": Entry(
        f"{WORKER}.models.llava",
        names=names_from(
            f"{FRONT_END}.multimodal.llava",
            "LlavaDummyInputsBuilder LlavaMultiModalProcessor LlavaProcessingInfo",
        ),
    ),
    "vllm.model_executor.models.clip": Entry(f"{WORKER}.models.clip"),
    "vllm.model_executor.models.mistral": Entry(names=names_from(f"{WORKER}.models.llama", "MistralForCausalLM")),
    "vllm.model_executor.models.transformers": Entry(f"{WORKER}.models.transformers_backend"),
    **{
        f"vllm.model_executor.models.{module}": Entry(f"{WORKER}.models.{module}")
        for module in ["gemma", "gemma2", "gemma3", "gpt2", "mixtral", "opt", "phi3", "qwen2", "qwen3", "qwen3_moe"]
    },
    "vllm.model_executor.models.lfm2": Waits(MAMBA),
    "vllm.model_executor.utils": Entry(f"{_LAYERS}.parameters"),
    "vllm.model_executor.parameter": Waits(QUANT),
    "vllm.model_executor.pooling_metadata": Entry(
        f"{_POOLING}.metadata", waits={"PoolingTensors": "the pooling tensors of vLLM's first engine"}
    ),
    "vllm.model_executor.sampling_metadata": Entry(f"{WORKER}.sampling.metadata"),
    "vllm.model_executor.custom_op": Entry(f"{CONTRACTS}.custom_op"),
    "vllm.model_executor.guided_decoding": Waits("the logits processors of vLLM's first engine"),
    # Layers.
    "vllm.model_executor.layers": Entry(),
    "vllm.model_executor.layers.linear": Entry(f"{_LAYERS}.linear", names=_LINEAR),
    "vllm.model_executor.layers.vocab_parallel_embedding": Entry(f"{_LAYERS}.vocab_parallel_embedding"),
    "vllm.model_executor.layers.layernorm": Entry(f"{_LAYERS}.layernorm"),
    "vllm.model_executor.layers.activation": Entry(f"{_LAYERS}.activation"),
    "vllm.model_executor.layers.rotary_embedding": Entry(f"{_LAYERS}.rotary_embedding"),
    "vllm.model_executor.layers.rotary_embedding.base": Entry(f"{_LAYERS}.rotary_embedding"),
    "vllm.model_executor.layers.logits_processor": Entry(f"{_LAYERS}.logits_processor"),
    "vllm.model_executor.layers.sampler": Entry(f"{WORKER}.sampling.sampler"),
    "vllm.model_executor.layers.attention": Entry(names=_ATTENTION, waits=_ATTENTION_WAITS),
    "vllm.model_executor.layers.attention.attention": Entry(names=_ATTENTION),
    "vllm.model_executor.layers.attention_layer_base": Entry(
        names=names_from(f"{CONTRACTS}.attention_backend", "AttentionLayerBase")
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
    "vllm.model_executor.layers.quantization.base_config": Entry(f"{CONTRACTS}.quantization"),
    "vllm.model_executor.layers.quantization.gguf": Entry(f"{WORKER}.quantization.gguf"),
    "vllm.model_executor.layers.quantization.kv_cache": Waits("KV cache dtypes"),
    "vllm.model_executor.layers.quantization.fp8": Entry(
        names={"Fp8Config": "hardpoint.compat.absent:Fp8Config"},
        waits=dict.fromkeys(("Fp8LinearMethod", "Fp8MoEMethod", "Fp8KVCacheMethod"), QUANT),
    ),
    "vllm.model_executor.layers.quantization.utils": Waits(QUANT),
    "vllm.model_executor.model_loader": Entry(names=_LOADERS),
    "vllm.model_executor.model_loader.base_loader": Entry(f"{CONTRACTS}.model_loader"),
    "vllm.model_executor.model_loader.weight_utils": Entry(f"{_LAYERS}.parameters {_LOADING}"),
    "vllm.model_executor.model_loader.default_loader": Entry(f"{WORKER}.loaders.default"),
    "vllm.model_executor.model_loader.utils": Entry(
        names=names_from(f"{WORKER}.models.building", "initialize_model")
        | names_from(f"{WORKER}.models.registry", "get_model_architecture")
        | names_from(f"{WORKER}.loaders.building", "process_weights_after_loading set_default_torch_dtype")
    ),
    "vllm.compilation": Entry(),
    "vllm.compilation.decorators": Entry(f"{WORKER}.models.compilation"),
    "vllm.distributed": Entry(_PARALLEL),
    "vllm.distributed.parallel_state": Entry(_PARALLEL),
    "vllm.distributed.communication_op": Entry(_PARALLEL),
    "vllm.distributed.utils": Entry(
        names=names_from(_PARALLEL, "divide get_pp_indices split_tensor_along_last_dim"),
    ),
    "vllm.distributed.device_communicators": Entry(),
    "vllm.distributed.device_communicators.base_device_communicator": Entry(f"{CONTRACTS}.device_communicator"),
    "vllm.distributed.device_communicators.cpu_communicator": Entry(f"{WORKER}.distributed.communicators"),
    "vllm.distributed.device_communicators.cuda_communicator": Entry(f"{WORKER}.distributed.communicators"),
    "vllm.distributed.kv_transfer": Waits(CONNECTORS),
    "vllm.distributed.ec_transfer": Waits(CONNECTORS),
    "vllm.distributed.kv_events": Waits(CONNECTORS),
    "vllm.distributed.weight_transfer": Waits(RL),
    "vllm.ir": Waits(IR),
    "vllm.triton_utils": Waits(TRITON),
    "vllm._custom_ops": Entry("hardpoint.compat.custom_ops"),
    # Attention.
    "vllm.attention": Entry(names=_ATTENTION),
    "vllm.attention.layer": Entry(names=_ATTENTION),
    "vllm.attention.backends": Entry(),
    "vllm.attention.backends.abstract": Entry(f"{CONTRACTS}.attention_backend"),
    "vllm.attention.backends.registry": Entry(f"{WORKER}.attention.registry"),
    "vllm.attention.selector": Entry(f"{WORKER}.attention.selector"),
    "vllm.v1.attention": Entry(),
    "vllm.v1.attention.backend": Entry(f"{CONTRACTS}.attention_backend", waits={"MLAAttentionImpl": MODELS}),
    "vllm.v1.attention.selector": Entry(
        f"{WORKER}.attention.selector", names=names_from(f"{CONTRACTS}.attention_backend", "AttentionSelectorConfig")
    ),
    "vllm.v1.attention.backends": Entry(),
    "vllm.v1.attention.backends.registry": Entry(f"{WORKER}.attention.registry"),
    "vllm.v1.attention.backends.cpu_attn": Entry(
        f"{WORKER}.attention.cpu", names={"CPUAttentionBackendImpl": f"{WORKER}.attention.cpu:CPUAttentionImpl"}
    ),
    "vllm.v1.attention.backends.utils": Waits(MODELS),
    "vllm.v1.kv_cache_interface": Entry(
        f"{CONTRACTS}.kv_cache", waits={"MLAAttentionSpec": MODELS, "MambaSpec": MAMBA}
    ),
    "vllm.v1.kv_cache_spec_registry": Waits(MODELS),
}
