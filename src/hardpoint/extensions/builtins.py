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
        "BertModel": "hardpoint.worker.models.bert:BertEmbeddingModel",
        "BertForSequenceClassification": "hardpoint.worker.models.bert:BertForSequenceClassification",
        "RobertaModel": "hardpoint.worker.models.bert:RobertaEmbeddingModel",
        "RobertaForSequenceClassification": "hardpoint.worker.models.bert:RobertaForSequenceClassification",
        "XLMRobertaModel": "hardpoint.worker.models.bert:RobertaEmbeddingModel",
        "XLMRobertaForSequenceClassification": "hardpoint.worker.models.bert:RobertaForSequenceClassification",
        "LlavaForConditionalGeneration": "hardpoint.worker.models.llava:LlavaForConditionalGeneration",
        "TransformersForCausalLM": "hardpoint.worker.models.transformers_backend:TransformersForCausalLM",
    },
    "attention_backends": {
        "CPU_ATTN": "hardpoint.worker.attention.cpu:CPUAttentionBackend",
        "TORCH_SDPA": "hardpoint.worker.attention.sdpa:TorchSDPABackend",
        "FLEX_ATTENTION": "hardpoint.worker.attention.flex:FlexAttentionBackend",
        "TRITON_ATTN": "hardpoint.worker.attention.triton:TritonAttentionBackend",
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
    "tool_parsers": {
        "deepseek_v3": "hardpoint.front_end.parsers.tool_formats:DeepSeekV3ToolParser",
        "deepseek_v31": "hardpoint.front_end.parsers.tool_formats:DeepSeekV31ToolParser",
        "deepseek_v32": "hardpoint.front_end.parsers.tool_formats:DeepSeekV32ToolParser",
        "ernie45": "hardpoint.front_end.parsers.tool_formats:Ernie45ToolParser",
        "glm45": "hardpoint.front_end.parsers.tool_formats:Glm4MoeModelToolParser",
        "glm47": "hardpoint.front_end.parsers.tool_formats:Glm47MoeModelToolParser",
        "granite": "hardpoint.front_end.parsers.tool_formats:GraniteToolParser",
        "granite-20b-fc": "hardpoint.front_end.parsers.tool_formats:Granite20bFCToolParser",
        "hermes": "hardpoint.front_end.parsers.tool_formats:Hermes2ProToolParser",
        "hunyuan_a13b": "hardpoint.front_end.parsers.tool_formats:HunyuanA13BToolParser",
        "internlm": "hardpoint.front_end.parsers.tool_formats:Internlm2ToolParser",
        "jamba": "hardpoint.front_end.parsers.tool_formats:JambaToolParser",
        "kimi_k2": "hardpoint.front_end.parsers.tool_formats:KimiK2ToolParser",
        "llama3_json": "hardpoint.front_end.parsers.tool_formats:Llama3JsonToolParser",
        "llama4_json": "hardpoint.front_end.parsers.tool_formats:Llama3JsonToolParser",
        "llama4_pythonic": "hardpoint.front_end.parsers.tool_formats:Llama4PythonicToolParser",
        "longcat": "hardpoint.front_end.parsers.tool_formats:LongcatFlashToolParser",
        "minimax": "hardpoint.front_end.parsers.tool_formats:MinimaxToolParser",
        "minimax_m2": "hardpoint.front_end.parsers.tool_formats:MinimaxM2ToolParser",
        "mistral": "hardpoint.front_end.parsers.tool_formats:MistralToolParser",
        "olmo3": "hardpoint.front_end.parsers.tool_formats:Olmo3PythonicToolParser",
        "openai": "hardpoint.front_end.parsers.tool_formats:OpenAIToolParser",
        "phi4_mini_json": "hardpoint.front_end.parsers.tool_formats:Phi4MiniJsonToolParser",
        "pythonic": "hardpoint.front_end.parsers.tool_formats:PythonicToolParser",
        "qwen3_coder": "hardpoint.front_end.parsers.tool_formats:Qwen3CoderToolParser",
        "qwen3_xml": "hardpoint.front_end.parsers.tool_formats:Qwen3XMLToolParser",
        "seed_oss": "hardpoint.front_end.parsers.tool_formats:SeedOssToolParser",
        "step3": "hardpoint.front_end.parsers.tool_formats:Step3ToolParser",
        "step3p5": "hardpoint.front_end.parsers.tool_formats:Step3p5ToolParser",
        "xlam": "hardpoint.front_end.parsers.tool_formats:xLAMToolParser",
    },
    "reasoning_parsers": {
        "deepseek_r1": "hardpoint.front_end.parsers.reasoning_formats:DeepSeekR1ReasoningParser",
        "deepseek_v3": "hardpoint.front_end.parsers.reasoning_formats:DeepSeekV3ReasoningParser",
        "ernie45": "hardpoint.front_end.parsers.reasoning_formats:Ernie45ReasoningParser",
        "glm45": "hardpoint.front_end.parsers.reasoning_formats:Glm4MoeModelReasoningParser",
        "granite": "hardpoint.front_end.parsers.reasoning_formats:GraniteReasoningParser",
        "holo2": "hardpoint.front_end.parsers.reasoning_formats:Holo2ReasoningParser",
        "hunyuan_a13b": "hardpoint.front_end.parsers.reasoning_formats:HunyuanA13BReasoningParser",
        "identity": "hardpoint.front_end.parsers.reasoning_formats:IdentityReasoningParser",
        "kimi_k2": "hardpoint.front_end.parsers.reasoning_formats:KimiK2ReasoningParser",
        "minimax_m2": "hardpoint.front_end.parsers.reasoning_formats:MiniMaxM2ReasoningParser",
        "minimax_m2_append_think": "hardpoint.front_end.parsers.reasoning_formats:MiniMaxM2AppendThinkReasoningParser",
        "mistral": "hardpoint.front_end.parsers.reasoning_formats:MistralReasoningParser",
        "nemotron_v3": "hardpoint.front_end.parsers.reasoning_formats:NemotronV3ReasoningParser",
        "olmo3": "hardpoint.front_end.parsers.reasoning_formats:Olmo3ReasoningParser",
        "openai_gptoss": "hardpoint.front_end.parsers.reasoning_formats:GptOssReasoningParser",
        "qwen3": "hardpoint.front_end.parsers.reasoning_formats:Qwen3ReasoningParser",
        "seed_oss": "hardpoint.front_end.parsers.reasoning_formats:SeedOSSReasoningParser",
        "step3": "hardpoint.front_end.parsers.reasoning_formats:Step3ReasoningParser",
        "step3p5": "hardpoint.front_end.parsers.reasoning_formats:Step3p5ReasoningParser",
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
