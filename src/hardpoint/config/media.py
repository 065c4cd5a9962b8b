"""What prompts may hold besides text: from flags, and from what the model class declares."""

from __future__ import annotations

from typing import Any

from hardpoint.config.sections import MultiModalConfig, VllmConfig
from hardpoint.errors import ConfigError
from hardpoint.extensions.refs import load_ref
from hardpoint.log import init_logger

logger = init_logger(__name__)

# Arguments of the engine -> fields of the section.
_ARGUMENTS = {
    "language_model_only": "language_model_only",
    "limit_mm_per_prompt": "limit_per_prompt",
    "media_io_kwargs": "media_io_kwargs",
    "mm_processor_kwargs": "mm_processor_kwargs",
    "mm_processor_cache_gb": "mm_processor_cache_gb",
    "mm_hasher_algorithm": "mm_hasher_algorithm",
    "interleave_mm_strings": "interleave_mm_strings",
}
_IMAGE_OPTIONS = ("image_mode", "rgba_background_color")


def media_section(args: Any) -> MultiModalConfig:
    """The section that engine arguments ask for. Raises `ConfigError` naming the flag that makes no sense."""
    given = {field: getattr(args, name) for name, field in _ARGUMENTS.items()}
    section = MultiModalConfig(**{field: value for field, value in given.items() if value is not None})
    _check_limits(section.limit_per_prompt)
    for modality, options in section.media_io_kwargs.items():
        unknown = sorted(options.keys() - set(_IMAGE_OPTIONS)) if modality == "image" else [modality]
        if unknown:
            raise ConfigError(
                f"--media-io-kwargs has {unknown[0]!r}: known are those of image, {', '.join(_IMAGE_OPTIONS)}",
                code="config-media",
            )
    return section


def _check_limits(limits: dict[str, Any]) -> None:
    for modality, limit in limits.items():
        count = limit.get("count") if isinstance(limit, dict) else limit
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ConfigError(
                f"--limit-mm-per-prompt {modality} is {limit!r}: expected a number, or an object with a count",
                code="config-media",
            )


def settle_media(config: VllmConfig, platform: Any) -> None:
    """Keep the media section for a model that takes media, and make room for its largest item.

    Raises `ConfigError` when the model's processor cannot be made, or not with its options.
    """
    model, scheduler = config.model_config, config.scheduler_config
    section = model.multimodal_config
    if not model.declares("supports_multimodal"):
        if section is not None and section != MultiModalConfig():
            logger.warning_once("the model takes no media: the options for media have no effect")
        model.multimodal_config = None
        return
    if section is None:
        section = model.multimodal_config = MultiModalConfig()
    scheduler.is_multimodal_model = True
    if section.language_model_only or config.is_settled:
        return
    largest = _largest_item(model)
    scheduler.max_num_encoder_input_tokens = max(scheduler.max_num_encoder_input_tokens, largest)
    scheduler.encoder_cache_size = max(scheduler.encoder_cache_size, largest)
    budget = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    if scheduler.disable_chunked_mm_input and largest > budget:
        raise ConfigError(
            f"--disable-chunked-mm-input: an item of {largest} tokens does not fit into a step of {budget}",
            code="config-media",
            fix="raise --max-num-batched-tokens, or let items be split",
        )


def _largest_item(model: Any) -> int:
    """Tokens of the largest item, 0 where the processor does not say."""
    registry = load_ref("hardpoint.contracts.multimodal:MULTIMODAL_REGISTRY")
    info = registry.create_processor(model).info
    try:
        info.validate_mm_processor_kwargs(model.multimodal_config.mm_processor_kwargs or {})
    except ValueError as error:
        raise ConfigError(f"--mm-processor-kwargs: {error}", code="config-media") from None
    counts = {modality: 1 for modality, limit in info.get_allowed_mm_limits().items() if limit}
    sizes = info.get_mm_max_tokens_per_item(model.max_model_len or 0, counts) or {}
    return max(sizes.values(), default=0)
