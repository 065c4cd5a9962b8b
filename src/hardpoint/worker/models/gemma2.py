"""Gemma 2: norms before and after both halves of a layer, capped scores and logits, every other layer windowed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hardpoint.config.sections import CacheConfig
from hardpoint.contracts.quantization import QuantizationConfig
from hardpoint.worker.layers.logits_processor import LogitsProcessor
from hardpoint.worker.models.causal_lm import DecoderForCausalLM
from hardpoint.worker.models.decoder import DecoderAttention, GatedMLP, add_and_norm
from hardpoint.worker.models.gemma import GemmaDecoderLayer, GemmaModel

Gemma2MLP = GatedMLP
Gemma2Attention = DecoderAttention


class Gemma2DecoderLayer(GemmaDecoderLayer):
    """One layer."""

    mlp: nn.Module

    def __init__(
        self,
        config: Any,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(config, cache_config, quant_config, prefix)
        self.pre_feedforward_layernorm = self._make_norm(config)
        self.post_feedforward_layernorm = self._make_norm(config)

    def _attention_options(self, config: Any) -> dict[str, Any]:
        return {
            **super()._attention_options(config),
            "scaling": config.query_pre_attn_scalar**-0.5,
            "logits_soft_cap": getattr(config, "attn_logit_softcapping", None),
        }

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens], [tokens, hidden] twice -> this layer's contribution and the residual stream before it."""
        hidden_states, residual = add_and_norm(self.input_layernorm, hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states, residual = add_and_norm(self.pre_feedforward_layernorm, hidden_states, residual)
        return self.post_feedforward_layernorm(self.mlp(hidden_states)), residual


class Gemma2Model(GemmaModel):
    """The stack of layers."""

    layer_type = Gemma2DecoderLayer


class Gemma2ForCausalLM(DecoderForCausalLM):
    """Gemma 2 with its output head."""

    stack_type = Gemma2Model

    def _make_logits_processor(self, config: Any) -> LogitsProcessor:
        return LogitsProcessor(config.vocab_size, soft_cap=getattr(config, "final_logit_softcapping", None))
