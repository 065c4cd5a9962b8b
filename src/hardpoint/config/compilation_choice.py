"""Whether a model is compiled by torch.compile, and which custom ops are on by default then."""

from __future__ import annotations

import os
import shutil
from typing import Any

from hardpoint.config.sections import CompilationConfig, CompilationMode, VllmConfig
from hardpoint.errors import ConfigError

_BACKENDS = ("", "inductor", "eager")
_COMPILED = (CompilationMode.STOCK_TORCH_COMPILE, CompilationMode.VLLM_COMPILE)
# What only vLLM's own compiler would read: its default, and what it is about.
_UNREAD: dict[str, tuple[Any, ...]] = {
    "splitting_ops": (None, []),
    "compile_ranges_endpoints": (None, []),
    "use_inductor_graph_partition": (None, False),
    "debug_dump_path": (None,),
    "cache_dir": ("",),
}


def choose_compilation(config: VllmConfig, platform: Any) -> None:
    """Settle `compilation_config.mode` and the base of `custom_ops`.

    Nothing is compiled on a processor unless the user asks; on a GPU models are, except with --enforce-eager or -O0.
    Raises ConfigError for a mode or an option that this version cannot honour, or without a C++ compiler.
    """
    compilation = config.compilation_config
    compilation.check_custom_ops()
    if compilation.mode is None:
        wanted = platform.compiles_by_default() and config.optimization_level > 0 and config.model_config is not None
        compilation.mode = CompilationMode.VLLM_COMPILE if wanted else CompilationMode.NONE
    if config.model_config is not None and config.model_config.enforce_eager:
        compilation.mode = CompilationMode.NONE
    if compilation.mode != CompilationMode.NONE:
        _check(compilation, platform)
    if not {"all", "none"} & set(compilation.custom_ops):
        compiled = compilation.mode != CompilationMode.NONE and compilation.backend in ("", "inductor")
        compilation.custom_ops = [*compilation.custom_ops, "none" if compiled else "all"]


def _check(compilation: CompilationConfig, platform: Any) -> None:
    if compilation.mode not in _COMPILED:
        raise _refused("mode", compilation.mode.name, "modes are NONE, STOCK_TORCH_COMPILE and VLLM_COMPILE")
    if compilation.backend not in _BACKENDS:
        raise _refused("backend", compilation.backend, "backends are inductor and eager")
    for name, allowed in _UNREAD.items():
        value = getattr(compilation, name)
        if value not in allowed:
            raise _refused(name, value, "models are compiled by torch.compile as it is")
    if compilation.backend != "eager" and platform.device_type == "cpu" and find_compiler() is None:
        raise ConfigError(
            "compilation_config.mode asks for compiled models, and Inductor finds no C++ compiler",
            code="config-compilation",
            fix="install g++ or clang++, name one in CXX, or leave the mode at NONE",
        )


def find_compiler() -> str | None:
    """The C++ compiler that Inductor would call."""
    named = os.environ.get("CXX")
    return next((found for name in (named, "g++", "clang++", "c++") if name and (found := shutil.which(name))), None)


def _refused(name: str, value: Any, why: str) -> ConfigError:
    return ConfigError(
        f"compilation_config.{name} is {value!r}: {why}", code="config-unsupported", fix="leave it at its default"
    )
