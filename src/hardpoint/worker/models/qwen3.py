"""Qwen 3: Qwen 2 with norms on query and key heads instead of biases."""

from __future__ import annotations

from typing import Any

from torch import nn

from hardpoint.config.sections import CacheConfig, VllmConfig
from hardpoint.contracts.quantization import QuantizationConfig
from hardpoint.worker.layers.layernorm import RMSNorm
from hardpoint.worker.models.compilation import support_torch_compile
from hardpoint.worker.models.decoder import DecoderAttention, DecoderForCausalLM, GatedMLP, kv_heads_of
from hardpoint.worker.models.qwen2 import Qwen2DecoderLayer, Qwen2Model

Qwen3MLP = GatedMLP
Qwen3Attention = DecoderAttention


class Qwen3DecoderLayer(Qwen2DecoderLayer):
    """One layer."""

    def _make_attention(
        self, config: Any, cache_config: CacheConfig | None, quant_config: QuantizationConfig | None, prefix: str
    ) -> nn.Module:
        bias = bool(getattr(config, "attention_bias", False))
        return DecoderAttention(
            config,
            config.hidden_size,
            config.num_attention_heads,
            kv_heads_of(config),
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=prefix,
            bias=bias,
            bias_o_proj=bias,
            norm=RMSNorm,
        )


@support_torch_compile
class Qwen3Model(Qwen2Model):
    """The stack of layers."""

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        prefix: str = "",
        decoder_layer_type: type[nn.Module] = Qwen3DecoderLayer,
    ) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, decoder_layer_type=decoder_layer_type)


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen 3 with its output head."""

    model_type = Qwen3Model
