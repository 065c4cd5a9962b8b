"""Which modes of compilation are accepted, what they mean for custom ops, and what is refused."""

from __future__ import annotations

import pytest

from hardpoint.config import compilation_choice
from hardpoint.config.compilation_choice import choose_compilation
from hardpoint.config.sections import CompilationConfig, CompilationMode, ModelConfig, VllmConfig
from hardpoint.errors import ConfigError
from hardpoint.platforms.cpu import CpuPlatform
from hardpoint.platforms.cuda import CudaPlatform


class Draft:
    """The parts of a configuration that the step reads."""

    def __init__(self, compilation, enforce_eager=False, level=2):
        self.compilation_config = CompilationConfig(**compilation)
        self.model_config = ModelConfig.__new__(ModelConfig)
        self.model_config.__dict__["enforce_eager"] = enforce_eager
        self.optimization_level = level


def chosen(platform=CpuPlatform, enforce_eager=False, level=2, **compilation):
    draft = Draft(compilation, enforce_eager, level)
    choose_compilation(draft, platform)
    return draft.compilation_config.mode, draft.compilation_config.custom_ops


@pytest.mark.parametrize(
    ("arguments", "mode", "ops"),
    [
        ({}, "NONE", ["all"]),
        ({"mode": 3}, "VLLM_COMPILE", ["none"]),
        ({"mode": "stock_torch_compile"}, "STOCK_TORCH_COMPILE", ["none"]),
        ({"mode": 3, "backend": "eager"}, "VLLM_COMPILE", ["all"]),
        ({"mode": 3, "custom_ops": ["all", "-rms_norm"]}, "VLLM_COMPILE", ["all", "-rms_norm"]),
        ({"mode": 3, "enforce_eager": True}, "NONE", ["all"]),
        ({"platform": CudaPlatform}, "VLLM_COMPILE", ["none"]),
        ({"platform": CudaPlatform, "level": 0}, "NONE", ["all"]),
        ({"platform": CudaPlatform, "enforce_eager": True}, "NONE", ["all"]),
    ],
)
def test_mode_and_custom_ops(arguments, mode, ops):
    assert chosen(**arguments) == (CompilationMode[mode], ops)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": 2}, "compilation_config.mode is 'DYNAMO_TRACE_ONCE'"),
        ({"mode": 3, "backend": "openxla"}, "compilation_config.backend is 'openxla'"),
        ({"mode": 3, "splitting_ops": ["attention"]}, "compilation_config.splitting_ops"),
    ],
)
def test_what_cannot_be_honoured_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        chosen(**arguments)


def test_inductor_needs_a_compiler(monkeypatch):
    assert compilation_choice.find_compiler()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"finds no C\+\+ compiler.*CXX"):
        chosen(mode=3)
    assert chosen(mode=3, backend="eager")[0] is CompilationMode.VLLM_COMPILE


def test_a_configuration_without_a_model_compiles_nothing():
    assert VllmConfig().compilation_config.mode is CompilationMode.NONE
