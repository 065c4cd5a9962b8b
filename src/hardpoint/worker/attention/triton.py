"""Attention by a Triton kernel of our own over the paged cache: all requests of a step in one launch.

For CUDA devices. On a processor the kernel runs in Triton's interpreter (TRITON_INTERPRET=1), which is for tests.
Verified in the interpreter only.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch

from hardpoint import platforms
from hardpoint.contracts.attention_backend import AttentionCGSupport, CommonAttentionMetadata
from hardpoint.extensions.refs import load_ref
from hardpoint.worker.attention.paged import PagedBackend, PagedImpl, PagedMetadata, PagedMetadataBuilder

_KERNEL = "hardpoint.worker.attention.triton_kernel:paged_attention"
# Rows (query tokens times heads of a group) that one program computes, at least.
_ROWS = 16
_KEYS = 32


class TritonAttentionBackend(PagedBackend):
    """TRITON_ATTN."""

    @staticmethod
    def get_name() -> str:
        """TRITON_ATTN."""
        return "TRITON_ATTN"

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        """The arithmetic."""
        return TritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TritonMetadataBuilder]:
        """The step's preparation."""
        return TritonMetadataBuilder

    @classmethod
    def supports_sink(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_combination(cls, **facts: Any) -> str | None:
        """Refuse where kernels can be neither compiled nor interpreted."""
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        if platforms.current_platform.compiles_triton() or _interprets():
            return None
        return "Triton compiles for GPUs; on a processor set TRITON_INTERPRET=1 to run its slow interpreter"


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")


@dataclass
class TritonMetadata(PagedMetadata):
    """A step, cut for the kernel.

    tiles           [programs, 2] int32: a request, and the first of its rows that a program computes
    queries_a_tile  rows of a program
    """

    tiles: torch.Tensor
    queries_a_tile: int


class TritonMetadataBuilder(PagedMetadataBuilder):
    """Prepares a step."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TritonMetadata:
        """Return the step's metadata."""
        step = super().build(common_prefix_len, common_attn_metadata, fast_build)
        size = 1 if common_attn_metadata.max_query_len == 1 else _ROWS
        tiles = [(i, row) for i, first, last, _ in step.spans() for row in range(0, last - first, size)]
        return TritonMetadata(
            **vars(step),
            tiles=torch.tensor(tiles, dtype=torch.int32).to(step.slots.device).view(-1, 2),
            queries_a_tile=size,
        )


class TritonAttentionImpl(PagedImpl):
    """One layer."""

    backend = TritonAttentionBackend

    def attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: PagedMetadata, output: torch.Tensor
    ) -> None:
        """Launch the kernel once."""
        assert isinstance(metadata, TritonMetadata)
        if self.slopes is not None:
            # Once: a device graph could not copy them from the host.
            self.slopes = self.slopes.to(query.device)
        # Imported late: the interpreter is chosen when the kernel is defined.
        load_ref(_KERNEL)(
            query,
            kv_cache,
            metadata,
            output,
            scale=self.scale,
            window=self.sliding_window or 0,
            soft_cap=self.soft_cap or 0.0,
            slopes=self.slopes,
            sinks=None if self.sinks is None else self.sinks.detach().float(),
            rows=max(_ROWS, _power_of_two(metadata.queries_a_tile * self.group)),
            keys=_KEYS,
        )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
