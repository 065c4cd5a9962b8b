"""Sections of features on top of plain generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from hardpoint.config.sections.base import NonNegative, Options, Positive, Section

MMCacheType = Literal["lru", "shm"]
MMHasherAlgorithm = Literal["blake3", "sha256", "sha512"]
MMEncoderTPMode = Literal["weights", "data"]
SequencePooling = Literal["CLS", "LAST", "MEAN"]
TokenPooling = Literal["ALL", "STEP"]
_MANY = 999


@dataclass
class SpeculativeConfig(Section):
    """Draft tokens: method, draft model and limits."""

    enforce_eager: bool | None = None
    num_speculative_tokens: Positive | None = None
    model: str | None = None
    method: str | None = None
    draft_tensor_parallel_size: Positive | None = None
    quantization: str | None = None
    attention_backend: str | None = None
    kv_cache_dtype: str | None = None
    max_model_len: Positive | None = None
    revision: str | None = None
    code_revision: str | None = None
    disable_padded_drafter_batch: bool = False
    use_local_argmax_reduction: bool = False
    use_heterogeneous_vocab: bool = False
    prompt_lookup_max: Positive | None = None
    prompt_lookup_min: Positive | None = None
    parallel_drafting: bool = False
    target_model_config: Any = None
    target_parallel_config: Any = None
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None
    draft_model_config: Any = None
    draft_parallel_config: Any = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    draft_load_config: Any = None
    rejection_sample_method: Literal["standard", "synthetic", "block"] = "standard"
    synthetic_acceptance_rates: list[float] | None = None
    synthetic_acceptance_length: float | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"


@dataclass
class StructuredOutputsConfig(Section):
    """Grammar constraints and the reasoning part they leave out.

    The last five are ours. `compile_timeout_s` None: VLLM_REGEX_COMPILATION_TIMEOUT_S.
    """

    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    reasoning_parser: str = ""
    reasoning_parser_plugin: str = ""
    enable_in_reasoning: bool = False
    max_spec_bytes: Positive = 512 << 10
    max_spec_depth: Positive = 100
    max_choices: Positive = 10_000
    compile_timeout_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    max_compile_memory_mb: Positive = 2048


@dataclass
class ReasoningConfig(Section):
    """Delimiters of the thinking budget."""

    reasoning_parser: str = ""
    reasoning_start_str: str = ""
    reasoning_end_str: str = ""


@dataclass
class PoolerConfig(Section):
    """How hidden states become one result."""

    task: str | None = None
    pooling_type: Literal["CLS", "LAST", "MEAN", "ALL", "STEP"] | None = None
    seq_pooling_type: SequencePooling | None = None
    tok_pooling_type: TokenPooling | None = None
    use_activation: bool | None = None
    enable_flash_late_interaction: bool = True
    dimensions: Positive | None = None
    enable_chunked_processing: bool = False
    max_embed_len: Positive | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pooling_type == "ALL" or self.pooling_type == "STEP":
            self.tok_pooling_type = self.tok_pooling_type or self.pooling_type
        elif self.pooling_type is not None:
            self.seq_pooling_type = self.seq_pooling_type or self.pooling_type


@dataclass
class MultiModalConfig(Section):
    """Images, sound and video in prompts."""

    language_model_only: bool = False
    limit_per_prompt: Options = field(default_factory=dict)
    enable_mm_embeds: bool = False
    media_io_kwargs: dict[str, Options] = field(default_factory=dict)
    mm_processor_kwargs: Options | None = None
    mm_processor_cache_gb: Annotated[float, msgspec.Meta(ge=0)] = 4
    mm_processor_cache_type: MMCacheType = "lru"
    mm_hasher_algorithm: MMHasherAlgorithm = "blake3"
    mm_encoder_only: bool = False
    mm_encoder_tp_mode: MMEncoderTPMode = "weights"
    mm_encoder_attn_backend: str | None = None
    interleave_mm_strings: bool = False
    skip_mm_profiling: bool = False
    mm_tensor_ipc: Literal["direct_rpc", "torch_shm"] = "direct_rpc"

    def get_limit_per_prompt(self, modality: str) -> int:
        """Most items of a modality in one prompt; 999 where nothing is said."""
        if self.language_model_only:
            return 0
        stated = self.limit_per_prompt.get(modality, _MANY)
        return int(stated.get("count", _MANY) if isinstance(stated, dict) else stated)


@dataclass
class WatermarkConfig(Section):
    """A watermark in sampled text."""

    key: NonNegative
    algorithm: Literal["gumbel", "dual_key_gumbel"] = "gumbel"
    alpha: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    context_width: Positive = 4
    deduplicate_contexts: Literal["none", "single_turn", "all"] = "single_turn"
    prf: Literal["philox"] = "philox"


@dataclass
class AuxOutputConfig(Section):
    """Capture of expert ids; `max_bytes` None = no limit."""

    enable_return_routed_experts: bool = False
    max_bytes: Positive | None = None


@dataclass
class DiffusionConfig(Section):
    """Diffusion language models."""

    canvas_length: Positive | None = None
    max_denoising_steps: Positive | None = None


@dataclass
class EngramConfig(Section):
    """N-gram embedding tables."""

    cpu_offload: bool = False
    embedding_across_dp: bool = False
    dp_shared_memory: bool = False
    use_thp: bool = False


@dataclass
class SpeechToTextConfig(Section):
    """Audio windows; lengths in seconds."""

    sample_rate: float = 16_000
    max_audio_clip_s: int | None = 30
    overlap_chunk_second: int = 1
    min_energy_split_window_size: int | None = 1600
