"""Whether the package `transformers` has a model that we have not. Its source is read for that; nothing is imported."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

from hardpoint.config.sections import ModelConfig
from hardpoint.errors import ConfigError
from hardpoint.extensions.loading import absent_plugins
from hardpoint.log import init_logger

logger = init_logger(__name__)

# The class that runs a model of transformers through our attention.
FALLBACK = "TransformersForCausalLM"

_TABLE = Path("models", "auto", "modeling_auto.py")
_CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_INSTALL = "pip install 'hardpoint[transformers]'"


def choose_fallback(model: ModelConfig) -> bool:
    """Whether transformers' own implementation serves a model.

    With `--model-impl transformers` it does; with `auto`, where no class of ours or of a plugin does, and the log
    says so. Raises `ConfigError` when it is asked for and cannot be had.
    """
    wanted = model.model_impl
    if wanted not in ("auto", "transformers"):
        return False
    if wanted == "auto" and (model.quantization is not None or model.registry.candidates(model.architectures)):
        return False
    if FALLBACK in model.architectures[:1]:
        return True
    why_not = _why_not(model)
    if wanted == "transformers":
        if why_not:
            raise ConfigError(
                f"--model-impl transformers: {why_not}", code="model-impl", fix="leave --model-impl at auto"
            )
        logger.info("%s is run by transformers, as --model-impl asks", model.architecture)
        return True
    if why_not:
        logger.info("%s is not run by transformers either: %s", model.architecture, why_not)
        return False
    absent = absent_plugins()
    missing = f". Plugins that are not loaded in this process: {'; '.join(absent)}" if absent else ""
    logger.warning(
        "%s has no implementation here and no plugin registers one: transformers' own is run through our attention, "
        "which is slower%s", model.architecture, missing,
    )  # fmt: skip
    return True


def _why_not(model: ModelConfig) -> str:
    if model.quantization is not None:
        return "quantised models cannot be run by transformers here"
    if _place() is None:
        return f"the package transformers is not installed ({_INSTALL})"
    if not causal_models() & set(model.architectures):
        return f"transformers has no model {', '.join(model.architectures)} that generates text"
    return ""


def _place() -> Path | None:
    """Where transformers is installed."""
    try:
        spec = importlib.util.find_spec("transformers")
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


@cache
def causal_models() -> frozenset[str]:
    """The classes of transformers that generate text."""
    place = _place()
    if place is None:
        return frozenset()
    try:
        tree = ast.parse((place / _TABLE).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as problem:
        logger.warning("the list of models of transformers cannot be read: %s", problem)
        return frozenset()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == _CAUSAL for target in targets):
            words = (word.value for word in ast.walk(node) if isinstance(word, ast.Constant))
            return frozenset(word for word in words if isinstance(word, str))
    return frozenset()
