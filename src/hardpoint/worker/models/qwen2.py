"""Qwen 2 and 2.5: Llama's shape with biases on the query, key and value projections."""

from __future__ import annotations

from typing import Any

from hardpoint.worker.models.causal_lm import DecoderForCausalLM
from hardpoint.worker.models.decoder import DecoderAttention, DecoderLayer, DecoderModel, GatedMLP

Qwen2MLP = GatedMLP
Qwen2Attention = DecoderAttention


class Qwen2DecoderLayer(DecoderLayer):
    """One layer."""

    def _attention_options(self, config: Any) -> dict[str, Any]:
        return {"bias": True}


class Qwen2Model(DecoderModel):
    """The stack of layers."""

    layer_type = Qwen2DecoderLayer


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Qwen 2 with its output head."""

    stack_type = Qwen2Model
