"""Whether a model generates or pools, and how it pools."""

from __future__ import annotations

from pathlib import Path

from hardpoint.config.sections import ModelConfig, PoolerConfig, VllmConfig
from hardpoint.config.sentence_transformers import SentenceModel, read_sentence_model
from hardpoint.errors import ConfigError
from hardpoint.extensions.registry import Entry, registry
from hardpoint.log import init_logger
from hardpoint.types.model_info import Inspection

logger = init_logger(__name__)

# Endings of architectures that are not registered themselves -> what makes a registered one of them.
_CONVERTS = {
    "ForTextEncoding": "embed",
    "EmbeddingModel": "embed",
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "classify",
    "ForRewardModel": "embed",
    "RewardModel": "embed",
    "Model": "embed",
}

_OFFSET_POSITIONS = {"roberta", "xlm-roberta", "camembert"}


def choose_runner(model: ModelConfig, entry: Entry, found: Inspection) -> tuple[str, str]:
    """What a model is run for and the adapter for that: (`generate` or `pooling`; `none`, `embed` or `classify`).

    entry, found  its class and what that declares
    Raises `ConfigError` for a class that cannot do what was asked, or nothing at all.
    """
    runner = model.runner if model.runner != "auto" else _runner_of(model, entry, found)
    if runner == "generate":
        return _check_generation(model, entry, found)
    if found.info.is_pooling_model:
        if model.convert not in ("auto", "none"):
            logger.info("--convert %s is not needed: %s pools by itself", model.convert, entry.name)
        return runner, "none"
    convert = model.convert if model.convert != "auto" else _convert_of(model)
    if convert == "none" or not found.info.is_text_generation_model:
        raise _unable(entry, found, "pooling", "it does not declare is_pooling_model")
    if entry.built_in and getattr(model.hf_config, "is_causal", True) is False:
        raise ConfigError(
            f"{model.model} attends in both directions (is_causal), which {entry.name} cannot do here",
            code="model-runner",
        )
    return runner, convert


def _runner_of(model: ModelConfig, entry: Entry, found: Inspection) -> str:
    if model.convert in ("embed", "classify") or (found.info.is_pooling_model and entry.name in model.architectures):
        return "pooling"
    if model.convert == "none" and found.info.is_text_generation_model:
        return "generate"
    sentence = _sentence_model(model)
    if sentence is not None and sentence.pooling:
        return "pooling"
    # A class that is registered under the very name does what it declares; else the name says what is meant.
    known = registry("models")
    if any(name in known for name in model.architectures) and found.info.is_text_generation_model:
        return "generate"
    return "pooling" if _ending(model) is not None else "generate"


def _ending(model: ModelConfig) -> str | None:
    name = model.architecture
    if name.endswith(("LMHeadModel", "ChatModel")):
        return None
    return next((ending for ending in _CONVERTS if name.endswith(ending)), None)


def _convert_of(model: ModelConfig) -> str:
    ending = _ending(model)
    return "embed" if ending is None else _CONVERTS[ending]


def _check_generation(model: ModelConfig, entry: Entry, found: Inspection) -> tuple[str, str]:
    if model.convert not in ("auto", "none"):
        raise ConfigError(
            f"--convert {model.convert} makes a pooling model, and --runner is generate",
            code="config-value",
            fix="leave one of them out",
        )
    if not found.info.is_text_generation_model:
        raise _unable(entry, found, "generate", "it does not say that it generates text")
    return "generate", "none"


def _unable(entry: Entry, found: Inspection, runner: str, why: str) -> ConfigError:
    pools = found.info.is_pooling_model and runner == "generate"
    lacks = "; ".join(found.remarks) or ("it is a pooling model and has no compute_logits" if pools else why)
    return ConfigError(
        f"model class {entry.name} ({found.path}) does not support --runner {runner}: {lacks}",
        code="model-runner",
        origin=entry.origin.label,
        fix="it is a pooling model: leave --runner out" if pools else f"mend {found.path}",
    )


def _sentence_model(model: ModelConfig) -> SentenceModel | None:
    place = Path(model.local_path) if model.local_path else None
    return read_sentence_model(place) if place is not None and place.is_dir() else None


def settle_pooling(config: VllmConfig) -> None:
    """Fill in how a pooling model pools, and switch off what its attention does not allow.

    What the user says wins over the model's sentence-transformers files, and these over what its class declares.
    """
    model = config.model_config
    config.scheduler_config.runner_type = model.runner_type  # type: ignore[assignment]
    if model.runner_type != "pooling":
        _refuse_pooling_settings(model)
        return
    pooler = model.pooler_config = model.pooler_config or PoolerConfig()
    info = model.model_class.info if model.model_class is not None else {}
    sentence = _sentence_model(model) if pooler.seq_pooling_type is None or pooler.use_activation is None else None
    if sentence is not None and sentence.pooling:
        pooler.seq_pooling_type = pooler.seq_pooling_type or sentence.pooling  # type: ignore[assignment]
        if pooler.use_activation is None and model.convert_type != "classify":
            pooler.use_activation = sentence.normalize
    if pooler.seq_pooling_type is None:
        pooler.seq_pooling_type = info.get("default_seq_pooling_type", "LAST")
    if pooler.tok_pooling_type is None:
        pooler.tok_pooling_type = info.get("default_tok_pooling_type", "ALL")
    if pooler.enable_chunked_processing or pooler.max_embed_len is not None:
        raise ConfigError(
            "pooler_config.enable_chunked_processing: inputs beyond the context are not split and joined",
            code="config-unsupported",
            fix="leave it and max_embed_len out, and cut inputs with truncate_prompt_tokens",
        )
    _bound_steps(config)


def _bound_steps(config: VllmConfig) -> None:
    """A model that looks both ways needs a prompt whole in one step, and nothing cached of others."""
    model, scheduler = config.model_config, config.scheduler_config
    if model.is_chunked_prefill_supported:
        return
    scheduler.enable_chunked_prefill = False
    config.cache_config.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = max(scheduler.max_num_batched_tokens, model.max_model_len or 1)


def _refuse_pooling_settings(model: ModelConfig) -> None:
    if model.pooler_config is not None:
        raise ConfigError(
            "model_config.pooler_config is set, and the model generates text",
            code="config-value",
            fix="add --runner pooling, or leave --pooler-config out",
        )
    if model.io_processor_plugin:
        raise ConfigError(
            f"model_config.io_processor_plugin is {model.io_processor_plugin!r}, and the model generates text",
            code="config-value",
            fix="add --runner pooling, or leave --io-processor-plugin out",
        )


def longest_input(model: ModelConfig) -> int | None:
    """Tokens that a pooling model takes by what its files say beside the usual; None where they do not."""
    if model.runner_type != "pooling":
        return None
    sentence = _sentence_model(model)
    limits = [sentence.max_seq_length] if sentence is not None else []
    config = model.hf_config
    if getattr(config, "model_type", None) in _OFFSET_POSITIONS:
        # Positions are counted from behind the padding's.
        limits.append(config.max_position_embeddings - getattr(config, "pad_token_id", 1) - 1)
    return min((limit for limit in limits if limit is not None), default=None)
