"""What we ship in each row, as reference strings. Nothing registers itself by being imported."""

from __future__ import annotations

# registry key -> entry name -> "module:Name"
BUILTINS: dict[str, dict[str, str]] = {
    "models": {
        "LlamaForCausalLM": "hardpoint.worker.models.llama:LlamaForCausalLM",
        "MistralForCausalLM": "hardpoint.worker.models.llama:MistralForCausalLM",
        "Qwen2ForCausalLM": "hardpoint.worker.models.qwen2:Qwen2ForCausalLM",
        "Qwen3ForCausalLM": "hardpoint.worker.models.qwen3:Qwen3ForCausalLM",
        "GemmaForCausalLM": "hardpoint.worker.models.gemma:GemmaForCausalLM",
        "Gemma2ForCausalLM": "hardpoint.worker.models.gemma2:Gemma2ForCausalLM",
        "Gemma3ForCausalLM": "hardpoint.worker.models.gemma3:Gemma3ForCausalLM",
        "Phi3ForCausalLM": "hardpoint.worker.models.phi3:Phi3ForCausalLM",
        "OPTForCausalLM": "hardpoint.worker.models.opt:OPTForCausalLM",
        "MixtralForCausalLM": "hardpoint.worker.models.mixtral:MixtralForCausalLM",
        "Qwen3MoeForCausalLM": "hardpoint.worker.models.qwen3_moe:Qwen3MoeForCausalLM",
        "GPT2LMHeadModel": "hardpoint.worker.models.gpt2:GPT2LMHeadModel",
    },
    "attention_backends": {
        "CPU_ATTN": "hardpoint.worker.attention.cpu:CPUAttentionBackend",
    },
    "quantization_methods": {
        "gguf": "hardpoint.worker.quantization.gguf:GGUFConfig",
    },
    "model_loaders": {
        "auto": "hardpoint.worker.loaders.default:DefaultModelLoader",
        "hf": "hardpoint.worker.loaders.default:DefaultModelLoader",
        "safetensors": "hardpoint.worker.loaders.default:DefaultModelLoader",
        "gguf": "hardpoint.worker.loaders.gguf:GGUFModelLoader",
        "dummy": "hardpoint.worker.loaders.dummy:DummyModelLoader",
    },
    # `auto` asks them in this order.
    "structured_output_backends": {
        "guidance": "hardpoint.engine_core.structured.guidance:GuidanceBackend",
        "xgrammar": "hardpoint.engine_core.structured.xgrammar_backend:XgrammarBackend",
        "outlines": "hardpoint.engine_core.structured.outlines_backend:OutlinesBackend",
        "lm-format-enforcer": "hardpoint.engine_core.structured.format_enforcer:FormatEnforcerBackend",
    },
}

# entry-point group -> entry name -> "module:Name"; listed, filtered and called like installed ones
BUILTIN_ENTRY_POINTS: dict[str, dict[str, str]] = {
    "vllm.general_plugins": {
        "lora_filesystem_resolver": "hardpoint.extensions.lora_resolvers:register_filesystem_resolver",
        "lora_hf_hub_resolver": "hardpoint.extensions.lora_resolvers:register_hf_hub_resolver",
    },
}

# platform name -> "module:detector", asked in this order
BUILTIN_PLATFORMS: dict[str, str] = {
    "cuda": "hardpoint.platforms.detect:cuda_platform",
    "cpu": "hardpoint.platforms.detect:cpu_platform",
}
