"""Gemma 3, the text part: Gemma 2 with norms on query and key heads and rotary settings per kind of layer."""

from __future__ import annotations

from typing import Any

from hardpoint.worker.layers.layernorm import GemmaRMSNorm
from hardpoint.worker.models.decoder import DecoderAttention, GatedMLP
from hardpoint.worker.models.gemma2 import Gemma2DecoderLayer, Gemma2ForCausalLM, Gemma2Model
from hardpoint.worker.models.loading import WeightsMapper

Gemma3MLP = GatedMLP
Gemma3Attention = DecoderAttention


class Gemma3DecoderLayer(Gemma2DecoderLayer):
    """One layer."""

    def _attention_options(self, config: Any) -> dict[str, Any]:
        return {**super()._attention_options(config), "norm": GemmaRMSNorm}


class Gemma3Model(Gemma2Model):
    """The stack of layers."""

    layer_type = Gemma3DecoderLayer


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 3 with its output head; of a checkpoint that also sees, the text part is loaded."""

    stack_type = Gemma3Model
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "model.vision_tower.": None,
            "model.multi_modal_projector.": None,
            "vision_tower.": None,
            "multi_modal_projector.": None,
            "model.language_model.": "model.",
            "language_model.model.": "model.",
            "language_model.lm_head.": "lm_head.",
        }
    )
