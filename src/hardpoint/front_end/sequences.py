"""What both engine front ends, async and plain, do with requests and with a started engine core."""

from __future__ import annotations

from copy import copy

from hardpoint.config.draft import writing
from hardpoint.config.sections import VllmConfig
from hardpoint.contracts.stat_logger import StatLoggerFactory
from hardpoint.front_end.observability.loggers import StatLoggerManager
from hardpoint.front_end.parallel_sampling import ParentRequest
from hardpoint.types.messages import EngineCoreRequest, Ready
from hardpoint.types.sampling_params import SamplingParams


def sequences(request: EngineCoreRequest) -> list[tuple[EngineCoreRequest, ParentRequest | None, int]]:
    """The sequences of a request: itself, or one per output when n > 1."""
    params = request.params
    n = getattr(params, "n", 1)
    if n == 1:
        return [(request, None, 0)]
    assert isinstance(params, SamplingParams)
    parent = ParentRequest(request.request_id, params, request.external_req_id)
    children: list[tuple[EngineCoreRequest, ParentRequest | None, int]] = []
    for index in range(n):
        child = copy(request)
        child.request_id, child.sampling_params = parent.get_child_info(index)
        children.append((child, parent, index))
    return children


def note_ready(vllm_config: VllmConfig, ready: Ready) -> None:
    """Take over what the engine core decided: the size of the KV cache and the longest sequence."""
    cache = vllm_config.cache_config
    with writing(vllm_config, "engine core ready"):
        cache.num_gpu_blocks = ready.num_gpu_blocks
        cache.block_size = ready.block_size
        cache.kv_cache_size_tokens = ready.kv_cache_size_tokens
        if ready.max_model_len:
            vllm_config.model_config.max_model_len = ready.max_model_len


def start_stat_loggers(
    vllm_config: VllmConfig,
    factories: list[StatLoggerFactory],
    defaults: bool,
    aggregate: bool,
    client_count: int = 1,
) -> StatLoggerManager:
    """The stat loggers of a started engine, writing already.

    factories     the caller's and the plugins'
    defaults      the console logger too
    client_count  front ends of this engine, each with loggers of its own
    """
    manager = StatLoggerManager(
        vllm_config,
        list(range(vllm_config.parallel_config.data_parallel_size)),
        custom_stat_loggers=factories,
        enable_default_loggers=defaults,
        aggregate_engine_logging=aggregate,
        client_count=client_count,
    )
    manager.log_engine_initialized()
    manager.start()
    return manager
