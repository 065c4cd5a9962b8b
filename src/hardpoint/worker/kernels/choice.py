"""Where the CPU kernels apply: built-in layers that nobody replaced or patched, on a processor, in float32."""

from __future__ import annotations

import sys
from typing import Any

import torch

from hardpoint import platforms
from hardpoint.config.current import get_current_vllm_config_or_none
from hardpoint.config.sections import VllmConfig
from hardpoint.contracts.custom_op import maybe_get_oot_by_class
from hardpoint.log import init_logger
from hardpoint.worker.kernels.library import Library, kernels
from hardpoint.worker.layers import linear, logits_processor, vocab_parallel_embedding
from hardpoint.worker.layers.fused_moe import FusedMoE, GateLinear, UnquantizedFusedMoEMethod

logger = init_logger(__name__)

_LINEAR = (
    linear.ReplicatedLinear,
    linear.ColumnParallelLinear,
    linear.MergedColumnParallelLinear,
    linear.QKVParallelLinear,
    linear.RowParallelLinear,
    GateLinear,
)
_EMBEDDING = (
    vocab_parallel_embedding.VocabParallelEmbedding,
    vocab_parallel_embedding.ParallelLMHead,
    logits_processor.LogitsProcessor,
)


def library_for_linear(layer: Any) -> Library | None:
    """The kernels to compute a linear layer with; None when torch is to."""
    if type(layer) not in _LINEAR:
        return None
    if patched(type(layer)) or patched(linear.UnquantizedLinearMethod):
        return None
    return _library(layer.params_dtype)


def library_for_experts(layer: Any) -> Library | None:
    """The kernels to compute a layer of experts with; None when torch is to."""
    if type(layer) is not FusedMoE or patched(FusedMoE) or patched(UnquantizedFusedMoEMethod):
        return None
    return _library(layer.params_dtype)


def library_for_embedding(layer: Any) -> Library | None:
    """The kernels to look embeddings up and compute logits with; None when torch is to.

    The two may share their weights, so both stay in torch when one of them was replaced.
    """
    if type(layer) not in _EMBEDDING[:2]:
        return None
    touched = [cls for cls in _EMBEDDING if maybe_get_oot_by_class(cls) is not cls or patched(cls)]
    if touched or patched(vocab_parallel_embedding.UnquantizedEmbeddingMethod):
        return None
    return _library(layer.params_dtype)


def patched(cls: type) -> bool:
    """Whether a method of a class of ours, or of its bases, is not the one that was written there."""
    for base in cls.__mro__:
        if not base.__module__.startswith("hardpoint.worker.layers."):
            continue
        file = sys.modules[base.__module__].__file__
        for value in vars(base).values():
            function = getattr(value, "__func__", value)
            if callable(function) and not isinstance(function, type):
                code = getattr(function, "__code__", None)
                if code is None or code.co_filename != file:
                    return True
    return False


def _library(dtype: torch.dtype) -> Library | None:
    config = get_current_vllm_config_or_none()
    reason = "there is no configuration" if config is None else _reason_for_torch(config, dtype)
    if reason:
        logger.info_once("quantised layers are dequantised and compute in torch: %s", reason)
        return None
    library = kernels()
    if library is not None:
        logger.info_once(
            "quantised layers keep their weights as stored and compute in the CPU kernels (%s, %d threads)",
            library.isa,
            library.threads,
        )
    return library


def _reason_for_torch(config: VllmConfig, dtype: torch.dtype) -> str:
    """Why the kernels do not apply; empty when they do."""
    if config.kernel_config.linear_backend != "auto":
        return "--dtype asks for exact arithmetic in that type"
    if dtype is not torch.float32:
        return f"the kernels compute in float32, not in {str(dtype).removeprefix('torch.')}"
    if platforms.current_platform.device_type != "cpu":
        return "the device is not a processor"
    if config.load_config.load_format != "gguf":
        return f"load format {config.load_config.load_format!r} does not read them from a GGUF file"
    if config.compilation_config.mode:
        return "the model is compiled"
    return ""
