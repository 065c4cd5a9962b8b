"""Qwen 2 and 2.5: Llama's shape with biases on the query, key and value projections."""

from __future__ import annotations

from typing import Any

from torch import nn

from hardpoint.config.sections import CacheConfig, VllmConfig
from hardpoint.contracts.quantization import QuantizationConfig
from hardpoint.worker.models.compilation import support_torch_compile
from hardpoint.worker.models.decoder import (
    DecoderAttention,
    DecoderForCausalLM,
    DecoderLayer,
    DecoderModel,
    GatedMLP,
    kv_heads_of,
)

Qwen2MLP = GatedMLP
Qwen2Attention = DecoderAttention


class Qwen2DecoderLayer(DecoderLayer):
    """One layer."""

    def __init__(
        self,
        config: Any,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self.self_attn = self._make_attention(config, cache_config, quant_config, f"{prefix}.self_attn")
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, quant_config, prefix=f"{prefix}.mlp"
        )
        self._make_norms(config)

    def _make_attention(
        self, config: Any, cache_config: CacheConfig | None, quant_config: QuantizationConfig | None, prefix: str
    ) -> nn.Module:
        return DecoderAttention(
            config,
            config.hidden_size,
            config.num_attention_heads,
            kv_heads_of(config),
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=prefix,
            bias=True,
        )


@support_torch_compile
class Qwen2Model(DecoderModel):
    """The stack of layers."""

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        prefix: str = "",
        decoder_layer_type: type[nn.Module] = Qwen2DecoderLayer,
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
        )


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Qwen 2 with its output head."""

    model_type = Qwen2Model
