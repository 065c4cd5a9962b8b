"""Which backends there are, which of them can be used here, and the objects of those in use."""

from __future__ import annotations

import importlib.util
import threading
from typing import TYPE_CHECKING

from hardpoint.contracts.structured_output import StructuredOutputBackend
from hardpoint.engine_core.structured.vocabulary import GrammarTokenizer
from hardpoint.errors import ConfigError, PluginError
from hardpoint.extensions.registry import registry

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

_KEY = "structured_output_backends"
AUTO = "auto"


def backend_class(name: str) -> type[StructuredOutputBackend]:
    """The class of a backend; what importing it raises, or PluginError when it is no backend."""
    found = registry(_KEY).load(name)
    if not (isinstance(found, type) and issubclass(found, StructuredOutputBackend)):
        raise PluginError(
            f"{_KEY} entry {name!r} is not a StructuredOutputBackend",
            code="structured-output-backend",
            origin=registry(_KEY).entry(name).origin.label,
            fix="derive it from hardpoint.contracts.structured_output:StructuredOutputBackend",
        )
    return found


def is_plugin(name: str) -> bool:
    """Whether a backend is not ours."""
    return not registry(_KEY).entry(name).built_in


def plugin_ref(name: str) -> str:
    """Where a plugin's backend is; empty for one of ours."""
    return registry(_KEY).entry(name).target if is_plugin(name) else ""


def know_plugin(name: str, ref: str) -> None:
    """Take in a backend that another process has from a plugin, unless the plugins here have registered it."""
    if name not in registry(_KEY):
        registry(_KEY).register(name, ref)


def missing_package(kind: type[StructuredOutputBackend]) -> str:
    """The package that a backend needs and that is not installed; empty when all is there."""
    package = kind.requires
    return package if package and importlib.util.find_spec(package) is None else ""


def usable_backends(chosen: str) -> list[str]:
    """The backends to ask, in order: the chosen one, or for `auto` all of ours whose package is here.

    Raises ConfigError for a chosen one that is not known or lacks its package.
    """
    if chosen == AUTO:
        ours = [name for name in registry(_KEY).names() if not is_plugin(name)]
        return [name for name in ours if not missing_package(backend_class(name))]
    if chosen not in registry(_KEY):
        known = ", ".join([AUTO, *registry(_KEY).names()])
        raise ConfigError(
            f"structured output backend {chosen!r} is not known",
            code="structured-output-backend",
            origin="--structured-outputs-config.backend",
            fix=f"use one of {known}",
        )
    kind = backend_class(chosen)
    package = missing_package(kind)
    if package:
        raise ConfigError(
            f"structured output backend {chosen!r} needs the package {package}, which is not installed",
            code="structured-output-package",
            origin="--structured-outputs-config.backend",
            fix=f"pip install {kind.install or package!r}",
        )
    return [chosen]


class Backends:
    """The backend objects of one process, made when first needed. Use from any thread."""

    def __init__(self, vllm_config: VllmConfig, tokenizer: GrammarTokenizer) -> None:
        self._vllm_config = vllm_config
        self.tokenizer = tokenizer
        self._made: dict[str, StructuredOutputBackend] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> StructuredOutputBackend:
        """The backend of this name; what making it raises."""
        with self._lock:
            if name not in self._made:
                kind = backend_class(name)
                self._made[name] = kind(self._vllm_config, self.tokenizer, len(self.tokenizer))
            return self._made[name]

    def destroy(self) -> None:
        """Let all of them release what they hold."""
        for backend in self._made.values():
            backend.destroy()
