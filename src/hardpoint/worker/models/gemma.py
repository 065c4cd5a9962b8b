"""Gemma: Llama's shape with Gemma's norms, scaled embeddings and a gelu gate."""

from __future__ import annotations

from hardpoint.worker.layers.layernorm import GemmaRMSNorm
from hardpoint.worker.models.causal_lm import DecoderForCausalLM
from hardpoint.worker.models.decoder import DecoderAttention, DecoderLayer, DecoderModel, GatedMLP

GemmaMLP = GatedMLP
GemmaAttention = DecoderAttention


class GemmaDecoderLayer(DecoderLayer):
    """One layer."""

    norm_type = GemmaRMSNorm
    activation_field = "hidden_activation"


class GemmaModel(DecoderModel):
    """The stack of layers."""

    layer_type = GemmaDecoderLayer
    norm_type = GemmaRMSNorm
    scales_embeddings = True


class GemmaForCausalLM(DecoderForCausalLM):
    """Gemma with its output head."""

    stack_type = GemmaModel
