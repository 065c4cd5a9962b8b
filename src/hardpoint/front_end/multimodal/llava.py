"""LLaVA's processor: CLIP's preparation of images, and as many placeholder tokens as the tower has patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from hardpoint.config.model_facts import read_json
from hardpoint.contracts.multimodal import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    MultiModalDataItems,
    PromptReplacement,
    PromptUpdate,
)
from hardpoint.errors import ConfigError, ModelFileError
from hardpoint.front_end.multimodal.images import ClipImageProcessor, pillow
from hardpoint.types.multimodal import MultiModalFieldConfig, MultiModalKwargsItems

PLACEHOLDER = "<image>"
# Kinds of image processors that prepare images as CLIP's does.
_KINDS = ("CLIPImageProcessor", "CLIPFeatureExtractor", "LlavaImageProcessor", "CLIPImageProcessorPil")


class LlavaProcessingInfo(BaseProcessingInfo):
    """Sizes of LLaVA's images."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Any number of images."""
        return {"image": None}

    def get_num_image_tokens(self) -> int:
        """Tokens of an image: one per patch, and the class token where the model keeps it."""
        config = self.get_hf_config()
        vision = config.vision_config
        if getattr(vision, "model_type", None) != "clip_vision_model":
            raise ConfigError(
                f"the vision tower is a {getattr(vision, 'model_type', None)!r}: only CLIP's is supported",
                code="model-architecture",
            )
        size, patch = vision.image_size, vision.patch_size
        if not all(isinstance(side, int) and 0 < side < 1 << 15 for side in (size, patch)) or patch > size:
            raise ModelFileError(f"the vision tower has images of {size!r} in patches of {patch!r}", code="model-facts")
        patches = (size // patch) ** 2
        return patches + (config.vision_feature_select_strategy == "full")

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """All images are alike."""
        return {"image": self.get_num_image_tokens()}

    def get_image_processor(self, **kwargs: Any) -> ClipImageProcessor:
        """The preparation of images. ValueError for options that are not known or do not fit the tower."""
        merged = self.ctx.get_merged_mm_kwargs(kwargs)
        unknown = sorted(merged.keys() - ClipImageProcessor.DEFAULTS.keys())
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not known; known are {', '.join(ClipImageProcessor.DEFAULTS)}")
        vision = self.get_hf_config().vision_config
        side = vision.image_size
        own = _stated(self.ctx.model_config.local_path)
        usual = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
        processor = ClipImageProcessor({**usual, **own, **merged})
        if processor.output_size() != (side, side):
            raise ValueError(
                f"the processor makes images of {processor.output_size() or 'any size'}, and the vision tower takes "
                f"{side} x {side}"
            )
        return processor

    def validate_mm_processor_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse options the processor does not have."""
        self.get_image_processor(**kwargs)


@lru_cache(maxsize=8)
def _stated(folder: str) -> dict[str, Any]:
    """What a checkpoint says of its image processor, as far as it concerns us."""
    stated: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        file = Path(folder) / name
        if file.is_file():
            found = read_json(file)
            stated = found.get("image_processor", found if name.startswith("pre") else {})
            if isinstance(stated, dict) and stated:
                break
    if not isinstance(stated, dict):
        raise ModelFileError(f"{folder}: the image processor's settings are no object", code="model-facts")
    kind = stated.get("image_processor_type", _KINDS[0])
    if str(kind).removesuffix("Fast") not in _KINDS:
        raise ConfigError(
            f"{folder}: images are prepared by {kind}: only {_KINDS[0]} is supported", code="model-architecture"
        )
    return {key: stated[key] for key in ClipImageProcessor.DEFAULTS if key in stated}


class LlavaDummyInputsBuilder(BaseDummyInputsBuilder):
    """Grey images."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """A placeholder per image."""
        return PLACEHOLDER * mm_counts.get("image", 0)

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        """Images of the tower's size."""
        side = self.info.get_hf_config().vision_config.image_size
        return {"image": [pillow().new("RGB", (side, side), (128, 128, 128))] * mm_counts.get("image", 0)}


class LlavaMultiModalProcessor(BaseMultiModalProcessor):
    """Arrays and placeholders of LLaVA."""

    info: LlavaProcessingInfo

    def process_items(
        self, mm_items: MultiModalDataItems, hf_processor_mm_kwargs: Mapping[str, Any]
    ) -> MultiModalKwargsItems:
        """Prepare images."""
        processor = self.info.get_image_processor(**hf_processor_mm_kwargs)
        images: list[Any] = list(mm_items.get("image", ()))
        made = {"pixel_values": np.stack([processor(image) for image in images])} if images else {}
        return MultiModalKwargsItems.from_hf_inputs(made, self._get_mm_fields_config(made, hf_processor_mm_kwargs))

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, Any]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {"pixel_values": MultiModalFieldConfig.batched("image")}

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, Any],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        token = self.info.get_hf_config().image_token_index
        return [PromptReplacement("image", [token], [token] * self.info.get_num_image_tokens())]
