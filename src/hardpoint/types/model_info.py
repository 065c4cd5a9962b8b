"""What the engine needs to know about a model class without importing it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import msgspec


@dataclass(frozen=True)
class ModelInfo:
    """What a model class declares.

    architecture  the class's own name; the rest is explained by the contract of models
    """

    architecture: str
    is_text_generation_model: bool = False
    is_pooling_model: bool = False
    attn_type: str = "decoder"
    default_seq_pooling_type: str = "LAST"
    default_tok_pooling_type: str = "ALL"
    score_type: str = "bi-encoder"
    supports_multimodal: bool = False
    supports_multimodal_raw_input_only: bool = False
    requires_raw_input_tokens: bool = False
    supports_multimodal_encoder_tp_data: bool = False
    supports_pp: bool = False
    has_inner_state: bool = False
    is_attention_free: bool = False
    is_hybrid: bool = False
    has_noops: bool = False
    supports_transcription: bool = False
    supports_transcription_only: bool = False
    supports_lora: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As plain data for a message or a cache file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelInfo:
        """The inverse of `to_dict`; a missing or unknown field, or one of another type, is a ValueError."""
        names = {field.name for field in fields(cls)}
        if set(data) != names:
            raise ValueError(f"a model report must have exactly the fields {sorted(names)}")
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None


@dataclass(frozen=True)
class Inspection:
    """What is known of a model class.

    path     "module:Class" where it is defined
    remarks  what it lacks, in words
    """

    info: ModelInfo
    path: str
    remarks: tuple[str, ...] = ()


def _decoder(architecture: str, lora: bool = True) -> ModelInfo:
    return ModelInfo(architecture, is_text_generation_model=True, supports_pp=True, supports_lora=lora)


def _encoder(architecture: str, score_type: str = "bi-encoder") -> ModelInfo:
    return ModelInfo(
        architecture,
        is_pooling_model=True,
        attn_type="encoder_only",
        default_seq_pooling_type="CLS",
        score_type=score_type,
    )


# Facts about the models we ship, by architecture; a test holds them against the classes.
BUILT_IN_MODEL_INFO: dict[str, ModelInfo] = {
    "LlamaForCausalLM": _decoder("LlamaForCausalLM"),
    "MistralForCausalLM": _decoder("MistralForCausalLM"),
    "Qwen2ForCausalLM": _decoder("Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": _decoder("Qwen3ForCausalLM"),
    "GemmaForCausalLM": _decoder("GemmaForCausalLM"),
    "Gemma2ForCausalLM": _decoder("Gemma2ForCausalLM"),
    "Gemma3ForCausalLM": _decoder("Gemma3ForCausalLM"),
    "Phi3ForCausalLM": _decoder("Phi3ForCausalLM"),
    "OPTForCausalLM": _decoder("OPTForCausalLM"),
    "MixtralForCausalLM": _decoder("MixtralForCausalLM"),
    "Qwen3MoeForCausalLM": _decoder("Qwen3MoeForCausalLM"),
    "GPT2LMHeadModel": _decoder("GPT2LMHeadModel", lora=False),
    "BertModel": _encoder("BertEmbeddingModel"),
    "BertForSequenceClassification": _encoder("BertForSequenceClassification", "cross-encoder"),
    "RobertaModel": _encoder("RobertaEmbeddingModel"),
    "RobertaForSequenceClassification": _encoder("RobertaForSequenceClassification", "cross-encoder"),
    "XLMRobertaModel": _encoder("RobertaEmbeddingModel"),
    "XLMRobertaForSequenceClassification": _encoder("RobertaForSequenceClassification", "cross-encoder"),
    "TransformersForCausalLM": ModelInfo("TransformersForCausalLM", is_text_generation_model=True),
    "LlavaForConditionalGeneration": ModelInfo(
        "LlavaForConditionalGeneration", is_text_generation_model=True, supports_multimodal=True, supports_pp=True
    ),
}

# Where a built-in model class is defined -> references to its processor's info, the processor and its dummy inputs.
_LLAVA = "hardpoint.front_end.multimodal.llava"
BUILT_IN_PROCESSORS: dict[str, tuple[str, str, str]] = {
    "hardpoint.worker.models.llava:LlavaForConditionalGeneration": (
        f"{_LLAVA}:LlavaProcessingInfo", f"{_LLAVA}:LlavaMultiModalProcessor", f"{_LLAVA}:LlavaDummyInputsBuilder",
    ),
}  # fmt: skip
