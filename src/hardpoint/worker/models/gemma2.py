"""Gemma 2: norms before and after both halves of a layer, capped scores and logits, every other layer windowed."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from hardpoint.config.sections import CacheConfig, VllmConfig
from hardpoint.contracts.quantization import QuantizationConfig
from hardpoint.worker.layers.layernorm import GemmaRMSNorm
from hardpoint.worker.models.compilation import support_torch_compile
from hardpoint.worker.models.decoder import (
    DecoderAttention,
    DecoderForCausalLM,
    DecoderModel,
    GatedMLP,
    kv_heads_of,
    norm_eps_of,
)

Gemma2MLP = GatedMLP
Gemma2Attention = DecoderAttention


class Gemma2DecoderLayer(nn.Module):
    """One layer."""

    # Norms on query and key heads, which later models have.
    head_norm: ClassVar[type[nn.Module] | None] = None

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
            scaling=config.query_pre_attn_scalar**-0.5,
            logits_soft_cap=getattr(config, "attn_logit_softcapping", None),
            norm=self.head_norm,
        )
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, config.hidden_activation, quant_config, prefix=f"{prefix}.mlp"
        )
        hidden, eps = config.hidden_size, norm_eps_of(config)
        self.input_layernorm = GemmaRMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = GemmaRMSNorm(hidden, eps=eps)
        self.pre_feedforward_layernorm = GemmaRMSNorm(hidden, eps=eps)
        self.post_feedforward_layernorm = GemmaRMSNorm(hidden, eps=eps)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens], [tokens, hidden] twice -> this layer's contribution and the residual stream before it."""
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states, residual = self.pre_feedforward_layernorm(hidden_states, residual)
        return self.post_feedforward_layernorm(self.mlp(hidden_states)), residual


@support_torch_compile
class Gemma2Model(DecoderModel):
    """The stack of layers."""

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        prefix: str = "",
        decoder_layer_type: type[nn.Module] = Gemma2DecoderLayer,
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


class Gemma2ForCausalLM(DecoderForCausalLM):
    """Gemma 2 with its output head."""

    model_type = Gemma2Model

    @staticmethod
    def _soft_cap(config: Any) -> float | None:
        return getattr(config, "final_logit_softcapping", None)
