"""Llama and what is built like it."""

from __future__ import annotations

from typing import Any

from torch import nn

from hardpoint.config.sections import CacheConfig, VllmConfig
from hardpoint.contracts.attention_backend import AttentionType
from hardpoint.contracts.quantization import QuantizationConfig
from hardpoint.errors import ModelFileError
from hardpoint.worker.layers.logits_processor import LogitsProcessor
from hardpoint.worker.models.causal_lm import DecoderForCausalLM
from hardpoint.worker.models.decoder import (
    DecoderAttention,
    DecoderLayer,
    DecoderModel,
    GatedMLP,
    kv_heads_of,
    positions_of,
)


class LlamaMLP(GatedMLP):
    """silu(gate) * up, then down."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        quant_config: QuantizationConfig | None = None,
        bias: bool = False,
        prefix: str = "",
        reduce_results: bool = True,
        disable_tp: bool = False,
    ) -> None:
        if hidden_act not in ("silu", "swish"):
            raise ModelFileError(
                f"the model wants the activation {hidden_act!r}; Llama's is 'silu'", code="model-activation"
            )
        super().__init__(
            hidden_size,
            intermediate_size,
            hidden_act,
            quant_config,
            reduce_results,
            prefix,
            bias=bias,
            disable_tp=disable_tp,
        )


class LlamaAttention(DecoderAttention):
    """Grouped-query attention with rotary positions.

    num_heads, num_kv_heads  heads in all; this rank computes its share
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        max_position_embeddings: int = 8192,
        quant_config: QuantizationConfig | None = None,
        bias: bool = False,
        bias_o_proj: bool = False,
        cache_config: CacheConfig | None = None,
        prefix: str = "",
        attn_type: str = AttentionType.DECODER,
    ) -> None:
        super().__init__(
            config,
            hidden_size,
            num_heads,
            num_kv_heads,
            max_position_embeddings=max_position_embeddings,
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=prefix,
            bias=bias,
            bias_o_proj=bias_o_proj,
            attn_type=attn_type,
        )


class LlamaDecoderLayer(DecoderLayer):
    """Attention and MLP, each behind a norm; the residual stream is handed from layer to layer."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: Any = None) -> None:
        super().__init__(
            config or vllm_config.model_config.hf_text_config,
            vllm_config.cache_config,
            self.get_quant_config(vllm_config),
            prefix,
        )

    def get_quant_config(self, vllm_config: VllmConfig) -> QuantizationConfig | None:
        """The quantisation settings of this layer."""
        return vllm_config.quant_config

    def _make_attention(
        self, config: Any, cache_config: CacheConfig | None, quant_config: QuantizationConfig | None, prefix: str
    ) -> nn.Module:
        bias = bool(getattr(config, "attention_bias", False) or getattr(config, "bias", False))
        return LlamaAttention(
            config=config,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=kv_heads_of(config),
            max_position_embeddings=positions_of(config),
            quant_config=quant_config,
            bias=bool(getattr(config, "qkv_bias", bias)),
            bias_o_proj=bias,
            cache_config=cache_config,
            prefix=prefix,
            attn_type=AttentionType.DECODER,
        )

    def _make_mlp(self, config: Any, quant_config: QuantizationConfig | None, prefix: str) -> nn.Module:
        return LlamaMLP(
            config.hidden_size,
            config.intermediate_size,
            getattr(config, "hidden_act", "silu"),
            quant_config=quant_config,
            bias=bool(getattr(config, "mlp_bias", False)),
            prefix=prefix,
        )


class LlamaModel(DecoderModel):
    """Embeddings, the stack of layers, the last norm."""

    def __init__(
        self, *, vllm_config: VllmConfig, prefix: str = "", layer_type: type[nn.Module] = LlamaDecoderLayer
    ) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, decoder_layer_type=layer_type)

    def _make_layer(self, layer_type: type[nn.Module], vllm_config: VllmConfig, prefix: str) -> nn.Module:
        return layer_type(vllm_config=vllm_config, prefix=prefix)


class LlamaForCausalLM(DecoderForCausalLM):
    """Llama with its output head."""

    def __init__(
        self, *, vllm_config: VllmConfig, prefix: str = "", layer_type: type[nn.Module] = LlamaDecoderLayer
    ) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=layer_type)

    def _init_model(  # type: ignore[override]  # vLLM's signature, for those who override it
        self, vllm_config: VllmConfig, prefix: str = "", layer_type: type[nn.Module] = LlamaDecoderLayer
    ) -> Any:
        return LlamaModel(vllm_config=vllm_config, prefix=prefix, layer_type=layer_type)

    def _make_logits_processor(self, config: Any) -> LogitsProcessor:
        return LogitsProcessor(config.vocab_size, scale=getattr(config, "logit_scale", 1.0))


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral: Llama whose attention may have a window."""
