"""The current configuration is that of the innermost block."""

from __future__ import annotations

import pytest

from hardpoint.config.current import (
    get_current_model_prefix,
    get_current_vllm_config,
    get_current_vllm_config_or_none,
    get_layers_from_vllm_config,
    set_current_vllm_config,
)
from hardpoint.config.sections import VllmConfig


def test_blocks_nest():
    outer, inner = VllmConfig(), VllmConfig()
    assert get_current_vllm_config_or_none() is None
    with pytest.raises(AssertionError, match="no current vLLM config"):
        get_current_vllm_config()
    with set_current_vllm_config(outer, prefix="model"):
        with set_current_vllm_config(inner):
            assert get_current_vllm_config() is inner
        assert get_current_vllm_config() is outer
        assert get_current_model_prefix() == "model"
    assert get_current_vllm_config_or_none() is None


def test_layers_by_kind():
    config = VllmConfig()
    config.compilation_config.static_forward_context.update(a=1, b="x", c=2)
    assert get_layers_from_vllm_config(config, int) == {"a": 1, "c": 2}
    assert get_layers_from_vllm_config(config, int, ["c"]) == {"c": 2}
