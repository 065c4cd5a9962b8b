"""The model section: what is served, and the facts that the model's files state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from hardpoint.config.sections.base import Options, Positive, Section, derived
from hardpoint.config.sections.features import MultiModalConfig, PoolerConfig
from hardpoint.env import envs
from hardpoint.errors import ConfigError
from hardpoint.extensions.refs import load_ref

if TYPE_CHECKING:
    from hardpoint.config.sections.parallel import ParallelConfig

RunnerOption = Literal["auto", "generate", "pooling", "draft"]
ConvertOption = Literal["auto", "none", "embed", "classify"]
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
ModelImpl = Literal["auto", "vllm", "transformers", "terratorch"]
MaxLength = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]

DEFAULT_MODEL = "smollm2-135m-instruct"
# Sampling fields a generation_config.json may set -> their names in SamplingParams.
SAMPLING_DEFAULTS = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass
class ModelClass(Section):
    """Ours: the class that the front end chose for the model; the workers build this one and no other.

    architecture  the name it is registered under
    target        what it is registered as, "module:Class"
    path          "module:Class" where it is defined
    owner         who registered it, in words
    by_plugin     whether every process that loads the same plugins knows it
    info          the fields of `types.model_info.ModelInfo`
    """

    architecture: str = ""
    target: str = ""
    path: str = ""
    owner: str = ""
    by_plugin: bool = True
    info: Options = field(default_factory=dict)


@dataclass
class ModelConfig(Section):
    """The model, its tokenizer and what its files say.

    model           what the user asked for: a path, a catalogue name or a repository id
    dtype           "auto" or a name such as "float32"; a torch.dtype in worker processes
    max_model_len   tokens of context; None = the model's, -1 = as many as fit
    hf_config       facts under Hugging Face names, also for GGUF files; hf_text_config is its text part
    chosen_runner   ours: what the model is run for; empty until it is chosen
    convert_type    the adapter that makes it that: none, embed or classify
    original_max_model_len  what was asked for, before the model's own limit: -1 leaves it to memory
    requested_dtype ours: the number format that was asked for, "auto" included
    local_path      ours: the folder or .gguf file on this machine
    tokenizer_path  ours: the folder or .gguf file with the tokenizer
    generation_defaults  ours: contents of generation_config.json as far as --generation-config lets it in
    model_class     ours: the class that serves the model; None until it is chosen
    """

    model: str = DEFAULT_MODEL
    model_weights: str = ""
    runner: RunnerOption = "auto"
    convert: ConvertOption = "auto"
    tokenizer: str | None = None
    tokenizer_mode: str = "auto"
    trust_remote_code: bool = False
    dtype: Any = "auto"
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] = 0
    hf_config: Any = None
    hf_text_config: Any = None
    hf_config_path: str | None = None
    allowed_local_media_path: str = ""
    allowed_media_domains: list[str] | None = None
    revision: str | None = None
    code_revision: str | None = None
    tokenizer_revision: str | None = None
    max_model_len: MaxLength | None = None
    spec_target_max_model_len: int | None = None
    quantization: str | None = None
    quantization_config: Options | None = None
    allow_deprecated_quantization: bool = False
    enforce_eager: bool = False
    return_sampling_mask: bool = False
    max_logprobs: MaxLength = 20
    logprobs_mode: LogprobsMode = "raw_logprobs"
    use_fp64_gumbel: bool = False
    enable_trace_replay: bool = False
    disable_sliding_window: bool = False
    skip_tokenizer_init: bool = False
    enable_prompt_embeds: bool = False
    served_model_name: str | list[str] | None = None
    config_format: str = "auto"
    hf_token: bool | str | None = field(default=None, repr=False)
    hf_overrides: Any = field(default_factory=dict)
    model_class_overrides: dict[str, str] = field(default_factory=dict)
    generation_config: str = "auto"
    override_generation_config: Options = field(default_factory=dict)
    enable_sleep_mode: bool = False
    sleep_mode_backend: str = "cumem"
    model_impl: ModelImpl = "auto"
    logits_processors: list[Any] | None = None
    io_processor_plugin: str | None = None
    renderer_num_workers: Positive = 1
    pooler_config: PoolerConfig | None = None
    multimodal_config: MultiModalConfig | None = None

    is_submodel_config: bool = derived(False)
    chosen_runner: str = derived("")
    convert_type: str = derived("none")
    original_max_model_len: int | None = derived()
    requested_dtype: str = derived("auto")
    local_path: str = derived("")
    tokenizer_path: str = derived("")
    generation_defaults: Options = field(default_factory=dict, init=False)
    model_class: ModelClass | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer is None:
            self.tokenizer = self.model
        if self.tokenizer_revision is None:
            self.tokenizer_revision = self.revision
        # A torch.dtype prints as "torch.float16"; its name is all that crosses processes.
        self.dtype = str(self.dtype).removeprefix("torch.")
        self.original_max_model_len = self.max_model_len
        self.requested_dtype = self.dtype

    # -- architecture ------------------------------------------------------------------------------

    @property
    def architectures(self) -> list[str]:
        """The class names that the model's config states."""
        return list(getattr(self.hf_config, "architectures", None) or [])

    @property
    def architecture(self) -> str:
        """The one that is served."""
        return self.architectures[0] if self.architectures else ""

    @property
    def registry(self) -> Any:
        """The model registry under vLLM's interface, with `model_class_overrides` applied."""
        models = load_ref("hardpoint.worker.models.registry:ModelRegistry")
        models.register_overrides(self.model_class_overrides)
        return models

    def declares(self, ability: str) -> bool:
        """Whether the chosen class declares an ability, a field of `ModelInfo`; False until it is chosen."""
        return self.model_class is not None and bool(self.model_class.info.get(ability))

    @property
    def runner_type(self) -> str:
        """`generate`, `pooling` or `draft`; until the model is known, auto means generate."""
        return self.chosen_runner or ("generate" if self.runner == "auto" else self.runner)

    # -- sizes -------------------------------------------------------------------------------------

    def get_hidden_size(self) -> int:
        """Width of the residual stream."""
        return getattr(self.hf_text_config, "hidden_size", 0)

    def get_inputs_embeds_size(self) -> int:
        """Width of token embeddings."""
        return getattr(self.hf_text_config, "hidden_size_per_layer_input", None) or self.get_hidden_size()

    @property
    def embedding_size(self) -> int:
        """Width of a pooled embedding."""
        return self.get_hidden_size()

    def get_vocab_size(self) -> int:
        """Rows of the embedding matrix; may exceed the tokenizer's vocabulary."""
        return getattr(self.hf_text_config, "vocab_size", 0)

    def get_head_size(self) -> int:
        """Width of one attention head."""
        head_dim = getattr(self.hf_text_config, "head_dim", None)
        return head_dim or self.get_hidden_size() // max(1, self._total_heads())

    def _total_heads(self) -> int:
        return getattr(self.hf_text_config, "num_attention_heads", 0)

    def get_total_num_kv_heads(self) -> int:
        """KV heads of a layer, over all ranks."""
        return getattr(self.hf_text_config, "num_key_value_heads", None) or self._total_heads()

    def get_num_kv_heads(self, parallel_config: ParallelConfig) -> int:
        """KV heads of a layer on one rank; at least one, then shared by several ranks."""
        return max(1, self.get_total_num_kv_heads() // parallel_config.tensor_parallel_size)

    def get_num_attention_heads(self, parallel_config: ParallelConfig) -> int:
        """Query heads of a layer on one rank."""
        return self._total_heads() // parallel_config.tensor_parallel_size

    def get_total_num_hidden_layers(self) -> int:
        """Layers over all pipeline stages."""
        return getattr(self.hf_text_config, "num_hidden_layers", 0)

    def get_layers_start_end_indices(self, parallel_config: ParallelConfig) -> tuple[int, int]:
        """First layer and the one past the last on this rank's pipeline stage."""
        stages = parallel_config.pipeline_parallel_size
        stage = (parallel_config.rank // parallel_config.tensor_parallel_size) % stages
        return stage_layers(self.get_total_num_hidden_layers(), stage, stages)

    def get_num_layers(self, parallel_config: ParallelConfig) -> int:
        """Layers on this rank's pipeline stage."""
        start, end = self.get_layers_start_end_indices(parallel_config)
        return end - start

    def get_num_layers_by_block_type(self, parallel_config: ParallelConfig, block_type: str = "attention") -> int:
        """Layers of one kind on this rank's pipeline stage."""
        start, end = self.get_layers_start_end_indices(parallel_config)
        kinds = getattr(self.hf_text_config, "layers_block_type", None)
        if kinds is None:
            return end - start if block_type == "attention" else 0
        return sum(kind == block_type for kind in kinds[start:end])

    def get_sliding_window(self) -> int | None:
        """Width of the attention window in tokens; None for full attention, or if only some layers have it."""
        if getattr(self.hf_text_config, "use_sliding_window", True) is False:
            return None
        if "full_attention" in (getattr(self.hf_text_config, "layer_types", None) or ()):
            return None
        return getattr(self.hf_text_config, "sliding_window", None)

    def get_num_experts(self) -> int:
        """Experts of a layer, 0 for a dense model."""
        for name in _EXPERT_FIELDS:
            count = getattr(self.hf_text_config, name, None)
            if count:
                return count[0] if isinstance(count, list) else count
        return 0

    # -- kinds of model ----------------------------------------------------------------------------

    @property
    def head_dtype(self) -> Any:
        """Number format of the output head."""
        return self.dtype

    @property
    def attn_type(self) -> str:
        """`decoder`, or `encoder_only` for models that look both ways."""
        if getattr(self.hf_config, "is_causal", True) is False:
            return "encoder_only"
        declared = self.model_class.info.get("attn_type") if self.model_class is not None else None
        return "encoder_only" if declared in ("encoder_only", "encoder") else "decoder"

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has a separate encoder."""
        return bool(getattr(self.hf_config, "is_encoder_decoder", False))

    @property
    def is_multimodal_model(self) -> bool:
        """Whether prompts may hold media."""
        return self.multimodal_config is not None

    @property
    def is_attention_free(self) -> bool:
        """Whether no layer attends."""
        return bool(getattr(self.hf_config, "attention_free", False)) or self.declares("is_attention_free")

    @property
    def is_hybrid(self) -> bool:
        """Whether attention and state-space layers are mixed."""
        return len(set(getattr(self.hf_text_config, "layers_block_type", None) or ())) > 1 or self.declares("is_hybrid")

    @property
    def is_moe(self) -> bool:
        """Whether layers have experts."""
        return self.get_num_experts() > 0

    @property
    def is_quantized(self) -> bool:
        """Whether weights are stored in a quantised form."""
        return self.quantization is not None

    @property
    def use_mla(self) -> bool:
        """Whether attention uses latent KV."""
        return getattr(self.hf_text_config, "kv_lora_rank", None) is not None

    @property
    def uses_mrope(self) -> bool:
        """Whether positions have several axes."""
        return "mrope_section" in (getattr(self.hf_text_config, "rope_parameters", None) or {})

    @property
    def uses_alibi(self) -> bool:
        """Whether positions are attention biases."""
        return bool(getattr(self.hf_text_config, "alibi", False))

    @property
    def is_pp_supported(self) -> bool:
        """Whether the model can be cut into pipeline stages."""
        return self.declares("supports_pp")

    @property
    def is_chunked_prefill_supported(self) -> bool:
        """Whether a prompt may be computed over several steps."""
        return self.attn_type == "decoder" and not self.is_encoder_decoder

    @property
    def is_prefix_caching_supported(self) -> bool:
        """Whether cached blocks of one prompt serve another."""
        return self.is_chunked_prefill_supported and not self.is_attention_free

    @property
    def is_matryoshka(self) -> bool:
        """Whether embeddings may be shortened."""
        return bool(
            getattr(self.hf_config, "matryoshka_dimensions", None) or getattr(self.hf_config, "is_matryoshka", False)
        )

    @property
    def score_type(self) -> str:
        """How two texts are compared by this model."""
        declared = self.model_class.info.get("score_type", "bi-encoder") if self.model_class is not None else ""
        if declared and declared != "bi-encoder":
            return str(declared)
        classifies = self.convert_type == "classify" or self.architecture.endswith("ForSequenceClassification")
        return "cross-encoder" if classifies else "bi-encoder"

    # -- request defaults --------------------------------------------------------------------------

    def try_get_generation_config(self) -> dict[str, Any]:
        """Return the contents of generation_config.json that apply."""
        return dict(self.generation_defaults)

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """Return the sampling defaults that replace the server's own, under SamplingParams' names."""
        merged = {**self.generation_defaults, **self.override_generation_config}
        return {ours: merged[theirs] for theirs, ours in SAMPLING_DEFAULTS.items() if merged.get(theirs) is not None}

    def get_pooling_task(self, supported_tasks: tuple[str, ...]) -> str | None:
        """Return the pooling task that is served by default."""
        if self.pooler_config is not None and self.pooler_config.task is not None:
            return self.pooler_config.task
        order = ("embed", "classify", "token_embed", "token_classify", "plugin", "embed&token_classify")
        return next((task for task in order if task in supported_tasks), None)

    def get_multimodal_config(self) -> MultiModalConfig:
        """Return the media section; ConfigError (a ValueError) when the model takes no media."""
        if self.multimodal_config is None:
            raise ConfigError(f"{self.model} takes no media", code="config-value")
        return self.multimodal_config

    def verify_with_parallel_config(self, parallel_config: ParallelConfig) -> None:
        """Hold head and layer counts against the number of ranks; raises `ConfigError`."""
        ranks = parallel_config.tensor_parallel_size
        if ranks > 1:
            self._check_tensor_parallel(ranks)
        layers, stages = self.get_total_num_hidden_layers(), parallel_config.pipeline_parallel_size
        if stages > max(1, layers):
            raise ConfigError(
                f"parallel_config.pipeline_parallel_size is {stages}: the model has only {layers} layers",
                code="config-value",
            )

    def _check_tensor_parallel(self, ranks: int) -> None:
        """Refuse a number of ranks that does not split every layer evenly, naming those that do."""
        uneven = self._uneven_parts(ranks)
        if not uneven:
            return
        fitting = [str(size) for size in range(1, self._total_heads() + 1) if not self._uneven_parts(size)]
        raise ConfigError(
            f"parallel_config.tensor_parallel_size is {ranks}: it must divide the {', the '.join(uneven)}",
            code="config-value",
            fix=f"this model can be split over {' or '.join(fitting)} ranks",
        )

    def _uneven_parts(self, ranks: int) -> list[str]:
        heads, shared = self._total_heads(), self.get_total_num_kv_heads()
        uneven = [f"{heads} attention heads"] if heads % ranks else []
        # With more ranks than key/value heads each of these is held by several ranks.
        if shared and shared % ranks and ranks % shared:
            uneven.append(f"{shared} key/value heads")
        for name, what in _SPLIT_SIZES.items():
            size = getattr(self.hf_text_config, name, None)
            if isinstance(size, int) and size % ranks:
                uneven.append(f"{size} {what}")
        return uneven


# Fields of a model's config whose numbers are split over tensor-parallel ranks, besides heads.
_SPLIT_SIZES = {
    "intermediate_size": "channels of an MLP",
    "ffn_dim": "channels of an MLP",
    "n_inner": "channels of an MLP",
    "moe_intermediate_size": "channels of an expert",
}


def stage_layers(layers: int, stage: int, stages: int) -> tuple[int, int]:
    """Cut `layers` into `stages` runs, the last ones shorter; VLLM_PP_LAYER_PARTITION overrides.

    Returns first layer and the one past the last of `stage`. Raises ConfigError for a bad partition.
    """
    given = envs.VLLM_PP_LAYER_PARTITION
    if given:
        sizes = [int(part) if part.strip().isdigit() else -1 for part in given.split(",")]
        if len(sizes) != stages or sum(sizes) != layers or min(sizes) < 0:
            raise ConfigError(
                f"VLLM_PP_LAYER_PARTITION={given!r} does not split {layers} layers into {stages} stages",
                code="env-value",
            )
    else:
        sizes = [layers // stages] * stages
        # The first stage also embeds and the last also samples: give spare layers to those between.
        for extra in range(layers % stages):
            sizes[-(extra + 2) if stages > 1 else 0] += 1
    return sum(sizes[:stage]), sum(sizes[: stage + 1])
