"""Allocates the KV cache by the engine core's plan and cuts each layer's tensor out of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardpoint.contracts.attention_backend import AttentionBackend, AttentionLayerBase
from hardpoint.contracts.kv_cache import AttentionSpec, KVCacheConfig, KVCacheSpec, spec_of_layer
from hardpoint.errors import ConfigError


def allocate_kv_cache(
    plan: KVCacheConfig, layers: Mapping[str, AttentionLayerBase], cache_dtype: str, device: torch.device
) -> dict[str, Tensor]:
    """One tensor per layer, in the shape its backend works with.

    Layers that share memory in the plan share it here. Raises ValueError for a plan that names unknown layers.
    """
    specs = {name: spec_of_layer(group, name) for group in plan.kv_cache_groups for name in group.layer_names}
    caches: dict[str, Tensor] = {}
    for part in plan.kv_cache_tensors:
        memory = _zeros(part.offset + part.size, device)
        for index, name in enumerate(part.layers):
            if name not in layers:
                raise ValueError(f"the KV cache plan names the layer {name!r}, which the model does not have")
            start = part.offset + index * part.layer_stride
            backend = layers[name].get_attn_backend()
            caches[name] = _view(memory, start, part.block_stride, plan.num_blocks, specs[name], backend, cache_dtype)
    return caches


def _zeros(size_bytes: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        # Unlike torch's, numpy's zeros take no memory before they are written.
        try:
            return torch.from_numpy(np.zeros(size_bytes, np.uint8))
        except (MemoryError, ValueError):
            raise ConfigError(
                f"a part of the KV cache, {size_bytes / 2**30:.2f} GiB, is more than this machine can allocate",
                code="kv-memory",
                fix="lower --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE or --num-gpu-blocks-override",
            ) from None
    return torch.zeros(size_bytes, dtype=torch.uint8, device=device)


def _view(
    memory: Tensor,
    start_bytes: int,
    block_stride_bytes: int,
    num_blocks: int,
    spec: KVCacheSpec,
    backend: type[AttentionBackend],
    cache_dtype: str,
) -> Tensor:
    """A layer's blocks inside `memory` [bytes], in the backend's shape and order."""
    assert isinstance(spec, AttentionSpec), f"{type(spec).__name__} is not allocated by this worker"
    dtype: torch.dtype = getattr(torch, spec.dtype)
    shape = backend.get_kv_cache_shape(num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size, cache_dtype)
    order = _stride_order(backend, len(shape))
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order[1:]):
        strides[dim] = step
        step *= shape[dim]
    strides[order[0]] = block_stride_bytes // dtype.itemsize
    if shape[order[0]] != num_blocks or step > strides[order[0]]:
        raise ValueError(f"{backend.__name__} keeps {step} numbers in a block; the plan has {strides[order[0]]}")
    return memory.view(dtype).as_strided(shape, strides, start_bytes // dtype.itemsize)


def _stride_order(backend: Any, num_dims: int) -> tuple[int, ...]:
    order = tuple(backend.get_kv_cache_stride_order())
    return order if len(order) == num_dims else tuple(range(num_dims))
