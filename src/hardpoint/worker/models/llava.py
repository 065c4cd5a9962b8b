"""LLaVA: a CLIP tower looks at images, a projector turns what it sees into embeddings of a language model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from hardpoint.config.sections import VllmConfig
from hardpoint.contracts.model import IntermediateTensors, SupportsMultiModal, SupportsPP, merge_multimodal_embeddings
from hardpoint.contracts.multimodal import MULTIMODAL_REGISTRY
from hardpoint.errors import ModelFileError
from hardpoint.types.model_info import BUILT_IN_PROCESSORS
from hardpoint.worker.distributed.parallel_state import get_pp_group
from hardpoint.worker.layers.activation import get_act_fn
from hardpoint.worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from hardpoint.worker.models.clip import CLIPVisionModel, hidden_state_number
from hardpoint.worker.models.loading import (
    AutoWeightsLoader,
    StageMissingLayer,
    WeightsMapper,
    init_vllm_registered_model,
    maybe_prefix,
)

# Kinds of language model -> their classes, for checkpoints that do not name one.
_LANGUAGE_MODELS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
_INFO, _PROCESSOR, _DUMMY = BUILT_IN_PROCESSORS["hardpoint.worker.models.llava:LlavaForConditionalGeneration"]


class LlavaMultiModalProjector(nn.Module):
    """Two layers from the tower's channels to the language model's."""

    def __init__(self, vision_size: int, text_size: int, act: str, bias: bool, prefix: str = "") -> None:
        super().__init__()
        self.linear_1 = ColumnParallelLinear(vision_size, text_size, bias=bias, prefix=f"{prefix}.linear_1")
        self.act = get_act_fn(act)
        self.linear_2 = RowParallelLinear(text_size, text_size, bias=bias, prefix=f"{prefix}.linear_2")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, vision channels] -> [tokens, text channels]."""
        x, _ = self.linear_1(x)
        x, _ = self.linear_2(self.act(x))
        return x


@MULTIMODAL_REGISTRY.register_processor(_PROCESSOR, info=_INFO, dummy_inputs=_DUMMY)
class LlavaForConditionalGeneration(nn.Module, SupportsMultiModal, SupportsPP):
    """LLaVA with a CLIP tower; the tower and the projector live on the first pipeline stage."""

    hf_to_vllm_mapper: ClassVar[WeightsMapper] = WeightsMapper(
        orig_to_new_prefix={
            "model.language_model.": "language_model.model.",
            "model.vision_tower.vision_model.": "vision_tower.",
            "model.vision_tower.": "vision_tower.",
            "model.multi_modal_projector.": "multi_modal_projector.",
            "vision_tower.vision_model.": "vision_tower.",
            "lm_head.": "language_model.lm_head.",
        }
    )

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """What stands for an image in a text."""
        if modality == "image":
            return "<image>"
        raise ValueError(f"only images are supported, not {modality}")

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        media = vllm_config.model_config.multimodal_config
        self.takes_images = media is None or media.get_limit_per_prompt("image") > 0
        self.keeps_class_token = _select_strategy(config) == "full"
        self.vision_tower: nn.Module = StageMissingLayer("vision tower")
        self.multi_modal_projector: nn.Module = StageMissingLayer("projector")
        if self.takes_images and get_pp_group().is_first_rank:
            self._build_tower(config, prefix)
        text = config.text_config
        named = getattr(text, "architectures", None) or [_language_model(text)]
        self.language_model = init_vllm_registered_model(
            vllm_config, hf_config=text, architectures=named, prefix=maybe_prefix(prefix, "language_model")
        )
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors  # type: ignore[assignment]

    def _build_tower(self, config: Any, prefix: str) -> None:
        vision = config.vision_config
        if vision.model_type != "clip_vision_model":
            raise ModelFileError(
                f"the vision tower is a {vision.model_type!r}: only CLIP's (clip_vision_model) is supported",
                code="model-architecture",
            )
        layers = config.vision_feature_layer
        listed = layers if isinstance(layers, list) else [layers]
        wanted = [hidden_state_number(layer, vision.num_hidden_layers) for layer in listed]
        self.vision_tower = CLIPVisionModel(vision, wanted, maybe_prefix(prefix, "vision_tower"))
        self.multi_modal_projector = LlavaMultiModalProjector(
            vision.hidden_size * len(wanted),
            config.text_config.hidden_size,
            config.projector_hidden_act,
            bool(config.multimodal_projector_bias),
            maybe_prefix(prefix, "multi_modal_projector"),
        )

    def get_language_model(self) -> nn.Module:
        """The part that generates text."""
        return self.language_model

    def embed_multimodal(self, **kwargs: Any) -> Sequence[torch.Tensor]:
        """Images [images, channels, height, width] as `pixel_values` -> per image [tokens, hidden].

        ValueError for images of another size than the tower's.
        """
        pixels = kwargs.get("pixel_values")
        if pixels is None:
            return []
        states = self.vision_tower(pixels)
        seen = torch.cat(states, dim=-1)
        if not self.keeps_class_token:
            seen = seen[:, 1:]
        images, tokens = seen.shape[:2]
        projected = self.multi_modal_projector(seen.reshape(images * tokens, -1))
        return list(projected.view(images, tokens, -1))

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Sequence[torch.Tensor] | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[tokens] ids -> [tokens, hidden], with the media's embeddings where `is_multimodal` [tokens] says so."""
        if multimodal_embeddings is None or is_multimodal is None:
            return self.language_model.embed_input_ids(input_ids)  # type: ignore[operator]
        # The placeholder may have no embedding of its own.
        texts = self.language_model.embed_input_ids(input_ids.masked_fill(is_multimodal, 0))  # type: ignore[operator]
        return merge_multimodal_embeddings(texts, multimodal_embeddings, is_multimodal)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | IntermediateTensors:
        """[tokens] ids (or their embeddings) and [tokens] positions -> [tokens, hidden]."""
        return self.language_model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[rows, hidden] -> [rows, vocabulary]."""
        return self.language_model.compute_logits(hidden_states)  # type: ignore[operator]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint's weights; returns the names of the parameters loaded."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


def _select_strategy(config: Any) -> str:
    strategy = config.vision_feature_select_strategy
    if strategy not in ("default", "full"):
        raise ModelFileError(
            f"vision_feature_select_strategy is {strategy!r}: expected default or full", code="model-facts"
        )
    return str(strategy)


def _language_model(text: Any) -> str:
    kind = getattr(text, "model_type", None)
    if kind not in _LANGUAGE_MODELS:
        raise ModelFileError(
            f"the language model is a {kind!r}: supported are {', '.join(_LANGUAGE_MODELS)}",
            code="model-architecture",
        )
    return _LANGUAGE_MODELS[kind]
