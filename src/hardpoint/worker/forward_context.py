"""What a layer may know about the step it is computing, without being passed it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hardpoint.config.sections import VllmConfig
from hardpoint.contracts.attention_backend import AttentionMetadata


class BatchDescriptor(NamedTuple):
    """The shape of a step, as device graphs are keyed by it."""

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0


@dataclass
class ForwardContext:
    """One forward pass.

    no_compile_layers  layer name -> layer
    attn_metadata      layer name -> the step's metadata; None in a profiling run
    slot_mapping       layer name -> [tokens] cache slots
    """

    no_compile_layers: dict[str, Any]
    attn_metadata: dict[str, AttentionMetadata] | list[dict[str, AttentionMetadata]] | None
    slot_mapping: dict[str, torch.Tensor] | list[dict[str, torch.Tensor]] = field(default_factory=dict)
    dp_metadata: Any = None
    cudagraph_runtime_mode: Any = None
    batch_descriptor: BatchDescriptor | None = None
    ubatch_slices: Any = None
    is_padding: torch.Tensor | None = None
    skip_compiled: bool = False
    all_moe_layers: list[str] | None = None
    moe_layer_index: int = 0
    additional_kwargs: dict[str, Any] = field(default_factory=dict)


_current: ForwardContext | None = None


def get_forward_context() -> ForwardContext:
    """The pass being computed; AssertionError outside of one."""
    assert _current is not None, "no forward context: call the model inside set_forward_context()"
    return _current


def is_forward_context_available() -> bool:
    """Whether a pass is being computed."""
    return _current is not None


def create_forward_context(
    attn_metadata: dict[str, AttentionMetadata] | list[dict[str, AttentionMetadata]] | None,
    vllm_config: VllmConfig,
    *,
    slot_mapping: dict[str, torch.Tensor] | list[dict[str, torch.Tensor]] | None = None,
    **more: Any,
) -> ForwardContext:
    """Describe a pass of the model that was built with `vllm_config`."""
    layers = vllm_config.compilation_config.static_forward_context
    return ForwardContext(layers, attn_metadata, slot_mapping or {}, **more)


@contextmanager
def override_forward_context(context: ForwardContext | None) -> Iterator[None]:
    """Make `context` the current one for a while."""
    global _current  # noqa: PLW0603 - layers are called by the model, which cannot pass it on
    before = _current
    _current = context
    try:
        yield
    finally:
        _current = before


@contextmanager
def set_forward_context(
    attn_metadata: dict[str, AttentionMetadata] | list[dict[str, AttentionMetadata]] | None,
    vllm_config: VllmConfig,
    num_tokens: int | None = None,
    num_tokens_across_dp: torch.Tensor | None = None,
    cudagraph_runtime_mode: Any = None,
    batch_descriptor: BatchDescriptor | None = None,
    ubatch_slices: Any = None,
    slot_mapping: dict[str, torch.Tensor] | list[dict[str, torch.Tensor]] | None = None,
    skip_compiled: bool = False,
) -> Iterator[ForwardContext]:
    """Run a forward pass inside this: attention layers take their metadata from it.

    attn_metadata  layer name -> metadata made by the layer's builder; None in a profiling run
    num_tokens, num_tokens_across_dp  rows here and on the other data-parallel ranks
    """
    context = create_forward_context(
        attn_metadata,
        vllm_config,
        slot_mapping=slot_mapping,
        cudagraph_runtime_mode=cudagraph_runtime_mode,
        batch_descriptor=batch_descriptor,
        ubatch_slices=ubatch_slices,
        skip_compiled=skip_compiled,
    )
    with override_forward_context(context):
        yield context
