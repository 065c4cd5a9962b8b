"""Steps in which every request has one token, replayed as device graphs.

A graph repeats a recorded sequence of kernels without Python between them. It reads and writes the very memory it was
captured with: so the inputs of a step are copied into tensors that stay, and a batch is filled up to the next captured
size with rows that belong to nobody, one token at position 0 each, whose key and value go to block 0.

Captured with CUDA's graphs, which nobody has run here; the rest is tested on a processor with a stand-in for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hardpoint.config.sections import CUDAGraphMode, VllmConfig
from hardpoint.contracts.attention_backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata
from hardpoint.errors import ConfigError
from hardpoint.log import init_logger
from hardpoint.worker.batch import BlockTable

logger = init_logger(__name__)

# Runs before a capture, in which kernels are compiled and libraries allocate what they keep.
_WARM_UPS = 2

# Computes a step: ids [tokens], positions [tokens], each group's metadata and what it was built from -> hidden states.
Forward = Callable[[Tensor, Tensor, list[Any], list[CommonAttentionMetadata]], Tensor]
# Records what a call does; gives what repeats it, and the tensor that it writes each time.
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


class CudaCapture:
    """Captures with CUDA graphs, which share one pool of memory: only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Run a few times on a stream beside the current one, then capture."""
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = run()
        return graph.replay, out


class DecodeGraphs:
    """The graphs of one model, one for each of some numbers of requests."""

    def __init__(
        self,
        config: VllmConfig,
        builders: Sequence[AttentionMetadataBuilder[Any]],
        tables: Sequence[BlockTable],
        device: torch.device,
        forward: Forward,
        capture: Capture,
    ) -> None:
        _require_support(config, builders)
        sizes = config.compilation_config.cudagraph_capture_sizes or []
        most = max(sizes)
        self._ids = torch.zeros(most, dtype=torch.int32, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._lengths = torch.ones(most, dtype=torch.int32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32)
        self._starts_on_device = self._starts.to(device)
        # In the formats that backends compute with: a copy that a builder makes would not be written again.
        self._slots = [torch.zeros(most, dtype=torch.int64, device=device) for _ in tables]
        self._blocks = [torch.zeros(most, table.ids.shape[1], dtype=torch.int64, device=device) for table in tables]
        self._longest = config.model_config.max_model_len or 1
        self._graphs: dict[int, tuple[Callable[[], None], Tensor]] = {}
        # The largest first: what it takes is enough for the others.
        for size in sorted(sizes, reverse=True):
            common = self._common(size)
            built = [builder.build_for_cudagraph_capture(part) for builder, part in zip(builders, common, strict=True)]
            ids, positions = self._ids[:size], self._positions[:size]
            self._graphs[size] = capture(partial(forward, ids, positions, built, common))
        self._sizes = sorted(sizes)
        logger.info("device graphs are captured for steps of %s requests", ", ".join(map(str, self._sizes)))

    def _common(self, size: int) -> list[CommonAttentionMetadata]:
        return [
            CommonAttentionMetadata(
                query_start_loc=self._starts_on_device[: size + 1],
                query_start_loc_cpu=self._starts[: size + 1],
                seq_lens=self._lengths[:size],
                num_reqs=size,
                num_actual_tokens=size,
                max_query_len=1,
                max_seq_len=self._longest,
                block_table_tensor=blocks[:size],
                slot_mapping=slots[:size],
                positions=self._positions[:size],
                seq_lens_cpu_upper_bound=torch.full((size,), self._longest, dtype=torch.int32),
            )
            for blocks, slots in zip(self._blocks, self._slots, strict=True)
        ]

    def run(self, ids: Tensor, positions: Tensor, common: Sequence[CommonAttentionMetadata]) -> Tensor | None:
        """The hidden states [requests, hidden] of a step, valid until the next; None when no graph is for it."""
        step = common[0]
        count = step.num_reqs
        size = next((size for size in self._sizes if size >= count), None)
        if size is None or step.max_query_len != 1 or step.num_actual_tokens != count:
            return None
        self._fill(self._ids, ids, count, size, 0)
        self._fill(self._positions, positions, count, size, 0)
        self._fill(self._lengths, step.seq_lens, count, size, 1)
        for slots, blocks, part in zip(self._slots, self._blocks, common, strict=True):
            self._fill(slots, part.slot_mapping.clamp(min=0), count, size, 0)
            blocks[:size].zero_()
            table = part.block_table_tensor[:count]
            blocks[:count, : table.shape[1]].copy_(table)
        replay, out = self._graphs[size]
        replay()
        return out[:count]

    @staticmethod
    def _fill(room: Tensor, values: Tensor, count: int, size: int, rest: int) -> None:
        room[:count].copy_(values[:count])
        room[count:size].fill_(rest)


def wants_graphs(config: VllmConfig) -> bool:
    """Whether steps are to be replayed."""
    mode = config.compilation_config.cudagraph_mode
    return mode is not None and mode != CUDAGraphMode.NONE


def _require_support(config: VllmConfig, builders: Sequence[AttentionMetadataBuilder[Any]]) -> None:
    for builder in builders:
        spec: Any = builder.kv_cache_spec
        if type(builder).get_cudagraph_support(config, spec) is AttentionCGSupport.NEVER:
            raise ConfigError(
                f"compilation_config.cudagraph_mode asks for device graphs, and steps that {type(builder).__name__} "
                "prepares cannot be replayed from one",
                code="config-graphs",
                fix="use a backend that can, such as --attention-backend TRITON_ATTN, or leave the mode out",
            )
