"""Names that plugins compare with or ask about although what they stand for is not there."""

from __future__ import annotations

from typing import Any

from hardpoint.errors import ConfigError


class Fp8Config:
    """Settings of FP8 checkpoints: no quantisation object is one, and none can be made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError("FP8 weights are not supported yet", code="config-quantization")


def is_deep_gemm_e8m0_used() -> bool:
    """Whether DeepGEMM's scales are powers of two: there is no DeepGEMM."""
    return False


def is_deep_gemm_supported() -> bool:
    """Whether DeepGEMM can be used: never."""
    return False


def has_deep_gemm() -> bool:
    """Whether DeepGEMM is installed for us: never."""
    return False
