"""Gemma: Llama's shape with Gemma's norms, scaled embeddings and a gelu gate."""

from __future__ import annotations

from typing import Any

from torch import nn

from hardpoint.config.sections import CacheConfig, VllmConfig
from hardpoint.contracts.quantization import QuantizationConfig
from hardpoint.worker.layers.layernorm import GemmaRMSNorm
from hardpoint.worker.models.compilation import support_torch_compile
from hardpoint.worker.models.decoder import (
    DecoderAttention,
    DecoderForCausalLM,
    DecoderLayer,
    DecoderModel,
    GatedMLP,
    kv_heads_of,
    norm_eps_of,
)

GemmaMLP = GatedMLP
GemmaAttention = DecoderAttention


class GemmaDecoderLayer(DecoderLayer):
    """One layer."""

    def __init__(
        self,
        config: Any,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        bias = bool(getattr(config, "attention_bias", False))
        self.hidden_size = config.hidden_size
        self.self_attn = DecoderAttention(
            config,
            config.hidden_size,
            config.num_attention_heads,
            kv_heads_of(config),
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.self_attn",
            bias=bias,
            bias_o_proj=bias,
        )
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, config.hidden_activation, quant_config, prefix=f"{prefix}.mlp"
        )
        self.input_layernorm = GemmaRMSNorm(config.hidden_size, eps=norm_eps_of(config))
        self.post_attention_layernorm = GemmaRMSNorm(config.hidden_size, eps=norm_eps_of(config))


@support_torch_compile
class GemmaModel(DecoderModel):
    """The stack of layers."""

    def __init__(
        self, *, vllm_config: VllmConfig, prefix: str = "", decoder_layer_type: type[nn.Module] = GemmaDecoderLayer
    ) -> None:
        config = vllm_config.model_config.hf_text_config
        super().__init__(
            vllm_config=vllm_config,
            prefix=prefix,
            make_layer=lambda prefix: decoder_layer_type(
                config=config,
                cache_config=vllm_config.cache_config,
                quant_config=vllm_config.quant_config,
                prefix=prefix,
            ),
            norm=GemmaRMSNorm,
            embedding_scale=config.hidden_size**0.5,
        )


class GemmaForCausalLM(DecoderForCausalLM):
    """Gemma with its output head."""

    model_type = GemmaModel
