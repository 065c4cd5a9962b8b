"""Gemma 3, the text part: Gemma 2 with norms on query and key heads and rotary settings per kind of layer."""

from __future__ import annotations

from torch import nn

from hardpoint.config.sections import VllmConfig
from hardpoint.worker.layers.layernorm import GemmaRMSNorm
from hardpoint.worker.models.compilation import support_torch_compile
from hardpoint.worker.models.decoder import DecoderAttention, GatedMLP
from hardpoint.worker.models.gemma2 import Gemma2DecoderLayer, Gemma2ForCausalLM, Gemma2Model
from hardpoint.worker.models.loading import WeightsMapper

Gemma3MLP = GatedMLP
Gemma3Attention = DecoderAttention


class Gemma3DecoderLayer(Gemma2DecoderLayer):
    """One layer."""

    head_norm = GemmaRMSNorm


@support_torch_compile
class Gemma3Model(Gemma2Model):
    """The stack of layers."""

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        prefix: str = "",
        decoder_layer_type: type[nn.Module] = Gemma3DecoderLayer,
    ) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, decoder_layer_type=decoder_layer_type)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 3 with its output head; of a checkpoint that also sees, the text part is loaded."""

    model_type = Gemma3Model
    checkpoint_mapper = WeightsMapper(
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
