"""Read what a model's files state: architecture, sizes, rope, token ids, sampling defaults. No transformers here."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardpoint.config.fallback import FALLBACK, choose_fallback
from hardpoint.config.gguf_facts import facts_of, generation_of
from hardpoint.config.gguf_file import GGUFFile
from hardpoint.config.hf_config import HFConfig, complete, merge_overrides, text_part
from hardpoint.config.model_files import model_kind
from hardpoint.config.model_hooks import as_registered
from hardpoint.config.pooling import choose_runner
from hardpoint.config.sections import ModelClass, ModelConfig
from hardpoint.errors import ConfigError, ModelFileError
from hardpoint.extensions.refs import parse_ref
from hardpoint.extensions.registry import registry
from hardpoint.log import init_logger

__all__ = ["Facts", "HFConfig", "choose_model_class", "read_facts", "read_json", "text_part"]

logger = init_logger(__name__)

MAX_JSON_BYTES = 64 << 20
_COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_OPTIONAL_COUNTS = (
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
)
# Their max_position_embeddings already is the scaled length.
_SCALED_LENGTH = {"default", "su", "longrope", "llama3", "proportional"}


@dataclass(frozen=True, slots=True)
class Facts:
    """What the files state, before any override.

    kind          "gguf" or "folder"
    values        contents of config.json, or what stands for it
    generation    contents of generation_config.json, or what stands for it
    """

    kind: str
    values: dict[str, Any]
    generation: dict[str, Any]


def read_facts(path: Path) -> Facts:
    """Read the files at `path`, a folder or a .gguf file. Raises `ModelFileError` naming file and field."""
    kind = model_kind(path)
    if kind == "gguf":
        file = GGUFFile.open(path)
        return Facts(kind, facts_of(file), generation_of(file))
    return Facts(kind, read_json(path / "config.json"), read_generation(path))


def read_generation(folder: Path) -> dict[str, Any]:
    """Read a folder's generation_config.json; nothing where there is none."""
    file = folder / "generation_config.json"
    return read_json(file) if file.exists() else {}


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from an untrusted file. Raises `ModelFileError` with path and reason."""
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ModelFileError(f"{file} is larger than {MAX_JSON_BYTES >> 20} MiB", code="model-json")
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ModelFileError(f"{file} cannot be read: {problem.strerror}", code="model-json") from None
    except (ValueError, RecursionError) as problem:
        raise ModelFileError(f"{file} is not JSON: {problem}", code="model-json") from None
    if not isinstance(found, dict):
        raise ModelFileError(f"{file} holds no JSON object", code="model-json")
    return found


def build_hf_config(facts: Facts, overrides: Any, origin: Path) -> HFConfig:
    """Apply `--hf-overrides` (a dict, or a function over the facts) and check the result.

    Raises `ConfigError` for a bad override, `ModelFileError` for impossible values in the file.
    """
    values = complete(as_registered(facts.values))
    if isinstance(overrides, dict) and overrides:
        _override(values, overrides)
        values = complete(values)
    config = HFConfig(values)
    if not (isinstance(overrides, dict) or callable(overrides)):
        raise ConfigError(f"hf_overrides is {overrides!r}: expected a mapping or a function", code="config-value")
    if callable(overrides):
        config = overrides(config)
        if not isinstance(config, HFConfig):
            raise ConfigError("the hf_overrides function must return the config it was given", code="config-value")
    _check_facts(config, origin)
    return config


def _override(values: dict[str, Any], overrides: dict[str, Any]) -> None:
    changed = overrides.get("architectures", values.get("architectures")) or []
    ours = all(_is_built_in(name) for name in changed if isinstance(name, str))
    # Both spellings of the rope settings are filled in: the one that is overridden must win.
    for given, other in (("rope_scaling", "rope_parameters"), ("rope_parameters", "rope_scaling")):
        if given in overrides:
            values[other] = None
    if "rope_theta" in overrides:
        for name in ("rope_parameters", "rope_scaling"):
            if isinstance(values.get(name), dict):
                values[name] = {key: item for key, item in values[name].items() if key != "rope_theta"}
    # A plugin's model may read keys that nobody else knows.
    for key in merge_overrides(values, overrides, strict=ours):
        logger.warning("--hf-overrides sets %r, which the model's config does not have", key)


def _is_built_in(architecture: str) -> bool:
    entry = registry("models").get(architecture)
    return entry is None or entry.built_in


def _check_facts(config: HFConfig, origin: Path) -> None:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not all(isinstance(a, str) for a in architectures):
        raise ModelFileError(
            f"{origin}: the config names no model class in 'architectures'",
            code="model-facts",
            fix="""name one with --hf-overrides '{"architectures": ["..."]}'""",
        )
    text = text_part(config)
    # A plugin's model may say that it has no layers that keep something.
    least = {"num_hidden_layers": 1 if all(map(_is_built_in, architectures)) else 0}
    for name in (*_COUNTS, *_OPTIONAL_COUNTS):
        value = text.get(name) if isinstance(text, HFConfig) else getattr(text, name, None)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not least.get(name, 1) <= value < 1 << 31:
            raise ModelFileError(
                f"{origin}: {name!r} in the model's config is {value!r}, expected a positive number", code="model-facts"
            )


def choose_model_class(model: ModelConfig) -> ModelClass:
    """Choose the class that serves a model: the first its config names that something here can run.

    A plugin's class is looked at by a child process. `model_class_overrides` are registered in this process; the
    model's own code (`auto_map`) is never run. Raises `ConfigError` naming what is supported, why a class cannot be
    imported, or what it lacks for what it is to be run for.
    """
    for reference in model.model_class_overrides.values():
        parse_ref(reference)
    facts, models = model.hf_config, model.registry
    auto_map = facts.get("auto_map") if isinstance(facts, HFConfig) else None
    fallback = choose_fallback(model)
    if auto_map and not fallback and not models.candidates(model.architectures):
        raise _only_own_code(model, sorted(registry("models").names()))
    name, found = models.choose([FALLBACK] if fallback else model.architectures, model)
    entry = registry("models").entry(name)
    if auto_map and entry.built_in:
        # Who asks for that code must see that it is not what answers.
        level = logging.WARNING if model.trust_remote_code else logging.INFO
        logger.log(level, "%s carries code of its own, which is not run: %s is used", model.model, name)
    model.chosen_runner, model.convert_type = choose_runner(model, entry, found)
    if not entry.built_in:
        logger.info("model class %s is %s [from %s]", name, found.path, entry.origin.label)
    return ModelClass(
        architecture=name,
        target=entry.target,
        path=found.path,
        owner=entry.origin.label,
        by_plugin=entry.built_in or bool(entry.origin.entry_point),
        info=found.info.to_dict(),
    )


def _only_own_code(model: ModelConfig, supported: list[str]) -> ConfigError:
    listed = ", ".join(model.architectures)
    return ConfigError(
        f"{model.model}: {listed} is implemented only by code in the model's repository, which is never run: "
        "--trust-remote-code does not change that",
        code="model-remote-code",
        fix=f"use a model with one of these classes, or a plugin that registers {listed}: {', '.join(supported)}",
    )


def derived_max_model_len(text_config: Any) -> int | None:
    """Return the tokens of context that the model was made for, rope scaling included; None if it does not say."""
    lengths = [getattr(text_config, name, None) for name in _LENGTHS]
    stated = [length for length in lengths if isinstance(length, int) and length > 0]
    if not stated:
        return None
    length = min(stated)
    rope = getattr(text_config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in rope.values()) or rope.get("rope_type", "default") in _SCALED_LENGTH:
        return length
    factor = rope.get("factor", 1.0)
    original = rope.get("original_max_position_embeddings")
    return int((original or length) * factor) if isinstance(factor, (int, float)) else length
