"""Whether steps are replayed as device graphs, and for which numbers of requests."""

from __future__ import annotations

from typing import Any

from hardpoint.config.sections import CUDAGraphMode, VllmConfig
from hardpoint.errors import ConfigError

# Up to this many requests by default: 1, 2, 4, then every eighth.
_MOST = 256
_ASKS = (None, CUDAGraphMode.NONE)


def choose_graphs(config: VllmConfig, platform: Any) -> None:
    """Settle `cudagraph_mode` and `cudagraph_capture_sizes`.

    Nothing is captured unless the user asks. Raises ConfigError for a mode that there is not, sizes that cannot be,
    and where there is no device with graphs.
    """
    compilation = config.compilation_config
    sizes, most = compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size
    if config.model_config is None:
        return
    if config.model_config.enforce_eager or compilation.cudagraph_mode in _ASKS:
        if compilation.cudagraph_mode in _ASKS and (sizes is not None or most is not None):
            raise _refused("sizes of graphs are given, and none are captured", "set cudagraph_mode to FULL_DECODE_ONLY")
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        return
    mode = compilation.cudagraph_mode
    if mode != CUDAGraphMode.FULL_DECODE_ONLY:
        raise _refused(f"cudagraph_mode is {mode.name}", "whole steps of decoding can be captured: FULL_DECODE_ONLY")
    # Capturing is CUDA's; another platform's graphs are its worker's affair.
    if platform.device_type != "cuda" or not platform.support_static_graph_mode():
        raise _refused("cudagraph_mode asks for device graphs, which this platform does not have", "leave it out")
    if config.model_config.runner_type == "pooling":
        raise _refused("cudagraph_mode asks for device graphs of decoding, and this model pools", "leave it out")
    if config.parallel_config.world_size > 1:
        raise _refused("cudagraph_mode asks for device graphs, which one rank only can capture", "leave it out")
    compilation.cudagraph_capture_sizes = _sizes(sizes, most, config.scheduler_config.max_num_seqs)


def _sizes(given: list[int] | None, most: int | None, requests: int) -> list[int]:
    """The sizes to capture, in order."""
    if given is None:
        limit = min(most if most is not None else _MOST, requests)
        return sorted({size for size in (1, 2, 4, *range(8, limit + 1, 8), limit) if 0 < size <= limit})
    if most is not None:
        raise _refused("both the sizes of graphs and the largest one are given", "give one of the two")
    if not given or any(type(size) is not int or not 0 < size <= requests for size in given):
        raise _refused(f"cudagraph_capture_sizes is {given}", f"give numbers of requests from 1 to {requests}")
    return sorted(set(given))


def _refused(what: str, fix: str) -> ConfigError:
    return ConfigError(f"compilation_config: {what}", code="config-graphs", fix=fix)
