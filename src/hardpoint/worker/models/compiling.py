"""Compiles a loaded model with torch.compile: what its author marked, up to what has to stay outside.

Attention reads the step's metadata and writes the cache, quantised layers call kernels, and ranks wait for each
other: the graph is cut around these. Verified with Inductor on a processor; on GPUs not verified.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hardpoint.config.sections import CompilationMode, VllmConfig
from hardpoint.contracts.attention_backend import AttentionLayerBase
from hardpoint.contracts.quantization import QuantizeMethodBase
from hardpoint.env import envs
from hardpoint.log import init_logger
from hardpoint.worker.distributed.parallel_state import get_pp_group, get_tp_group
from hardpoint.worker.layers.linear import UnquantizedLinearMethod
from hardpoint.worker.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

logger = init_logger(__name__)

_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "gather", "broadcast")
# Layers of one kind share a piece of code, and each that differs in something needs a version of its own.
_MOST_VERSIONS = 64


def compile_model(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Replace the forward of marked parts by a compiled one, if the configuration says so.

    They are compiled when they are first called: by the worker, before it serves.
    """
    config = vllm_config.compilation_config
    if config.mode in (None, CompilationMode.NONE):
        return
    marked = [part for part in model.modules() if _is_marked(part, vllm_config)]
    if not marked:
        logger.warning("%s is not marked with support_torch_compile: nothing is compiled", type(model).__name__)
        return
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_VERSIONS)
    for part in model.modules():
        if _stays_outside(part):
            part.forward = torch.compiler.disable(part.forward)
    _keep_collectives_outside()
    backend = config.backend or "inductor"
    options = dict(config.inductor_compile_config)
    if envs.VLLM_DISABLE_COMPILE_CACHE:
        options["fx_graph_cache"] = False
    for part in marked:
        part.forward = torch.compile(
            part.forward, dynamic=True, backend=backend, options=(options or None) if backend == "inductor" else None
        )
    names = ", ".join(sorted({type(part).__name__ for part in marked}))
    logger.info("%s is compiled with the backend %s", names, backend)


def _is_marked(part: nn.Module, vllm_config: VllmConfig) -> bool:
    cls: Any = type(part)
    if not hasattr(cls, "_compile_dynamic_arg_dims") or getattr(cls, "_ignore_compile", False):
        return False
    condition = cls._compile_enable_if
    return condition is None or bool(condition(vllm_config))


def _stays_outside(part: nn.Module) -> bool:
    method = getattr(part, "quant_method", None)
    calls_kernels = isinstance(method, QuantizeMethodBase) and type(method) not in (
        UnquantizedLinearMethod,
        UnquantizedEmbeddingMethod,
    )
    return calls_kernels or isinstance(part, AttentionLayerBase)


def _keep_collectives_outside() -> None:
    for group in (get_tp_group(), get_pp_group()):
        for name in _COLLECTIVES if group.world_size > 1 else ():
            setattr(group, name, torch.compiler.disable(getattr(group, name)))
