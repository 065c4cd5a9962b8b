"""Qwen 3: Qwen 2 with norms on query and key heads instead of biases."""

from __future__ import annotations

from typing import Any

from hardpoint.worker.layers.layernorm import RMSNorm
from hardpoint.worker.models.causal_lm import DecoderForCausalLM
from hardpoint.worker.models.decoder import DecoderAttention, DecoderLayer, DecoderModel, GatedMLP

Qwen3MLP = GatedMLP
Qwen3Attention = DecoderAttention


class Qwen3DecoderLayer(DecoderLayer):
    """One layer."""

    def _attention_options(self, config: Any) -> dict[str, Any]:
        return {**super()._attention_options(config), "norm": RMSNorm}


class Qwen3Model(DecoderModel):
    """The stack of layers."""

    layer_type = Qwen3DecoderLayer


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen 3 with its output head."""

    stack_type = Qwen3Model
