"""Which number format the KV cache gets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hardpoint.config.cache_dtype import choose_cache_dtype
from hardpoint.errors import ConfigError


def chosen(asked, quantization=None, backend="auto", settled=False):
    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=asked),
        model_config=SimpleNamespace(quantization=quantization),
        kernel_config=SimpleNamespace(linear_backend=backend),
        is_settled=settled,
    )
    choose_cache_dtype(config, SimpleNamespace(device_type="cpu"))
    return config.cache_config.cache_dtype


def test_auto_is_the_models_own_unless_activations_are_rounded(monkeypatch):
    monkeypatch.delenv("HARDPOINT_CPU_KERNELS", raising=False)
    assert chosen("auto") == "auto"
    assert chosen("auto", "gguf") == "float16"
    assert chosen("auto", "gguf", backend="torch") == "auto"
    assert chosen("auto", "gguf", settled=True) == "auto"
    monkeypatch.setenv("HARDPOINT_CPU_KERNELS", "off")
    assert chosen("auto", "gguf") == "auto"


@pytest.mark.parametrize(
    ("asked", "name"), [("int8", "int8_per_token_head"), ("bfloat16", "bfloat16"), ("float32", "float32")]
)
def test_a_named_format_is_taken(asked, name):
    assert chosen(asked, "gguf") == name


def test_an_unknown_format_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'float15'.*float16"):
        chosen("float15")
