"""The suite for attention backends: facts, then arithmetic over scattered blocks against attention written out."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from hardpoint.config.current import set_current_vllm_config
from hardpoint.contracts.attention_backend import (
    AttentionBackend,
    AttentionImplBase,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from hardpoint.contracts.kv_cache import FullAttentionSpec
from hardpoint.testing.failures import explained, require, require_class
from hardpoint.testing.tiny_config import tiny_vllm_config

_BLOCKS, _KV_HEADS, _GROUP = 48, 2, 2
_CLOSE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
# Each sequence: its tokens, and after how many of them a step ends.
_SEQUENCES = ((37, (20, 36, 37)), (5, (4, 5)), (1, (1,)), (50, (16, 48, 50)))


def check_attention_backend(cls: Any, device: str = "cpu", dtype: torch.dtype | None = None) -> None:
    """Hold the backend's facts against each other, and its results against attention by its definition.

    device  where to compute    dtype  of queries, keys and values; the first one the backend supports unless given
    """
    subject = require_class(cls, AttentionBackend)
    _check_facts(cls, subject)
    chosen = dtype or next(iter(cls.supported_dtypes), torch.float32)
    require(cls.supports_dtype(chosen), subject, f"it does not support {chosen}", "pass a dtype that it supports")
    for block_size in _block_sizes(cls):
        _check_numbers(cls, subject, torch.device(device), chosen, block_size)


def _check_facts(cls: Any, subject: str) -> None:
    with explained(subject, "reading its facts", "they are static methods and class methods without state"):
        name, impl, builder = cls.get_name(), cls.get_impl_cls(), cls.get_builder_cls()
        shape = tuple(cls.get_kv_cache_shape(7, 16, 2, 64))
        order = tuple(cls.get_kv_cache_stride_order())
    require(isinstance(name, str) and name.isidentifier(), subject, f"get_name gives {name!r}", "return MY_ATTN")
    require_class(impl, AttentionImplBase)
    require_class(builder, AttentionMetadataBuilder)
    require(
        sorted(order) == list(range(len(shape))),
        subject,
        f"get_kv_cache_stride_order gives {order} for a cache of {len(shape)} dimensions",
        "return each dimension of get_kv_cache_shape once",
    )
    require(
        shape[order[0]] == 7 and shape.count(7) == 1,
        subject,
        f"a cache of 7 blocks has the shape {shape} in memory order {order}, which does not begin with the blocks",
        "let blocks come first in get_kv_cache_stride_order: a block's bytes lie together, so that it can be moved",
    )
    numbers = list(cls.get_supported_head_sizes())
    require(all(isinstance(n, int) for n in numbers), subject, f"get_supported_head_sizes gives {numbers}", "list ints")
    size = cls.get_preferred_block_size(16)
    require(
        isinstance(size, int) and cls.supports_block_size(size),
        subject,
        f"get_preferred_block_size(16) gives {size!r}, which supports_block_size refuses",
        "return a size that the kernels take",
    )


def _block_sizes(cls: Any) -> list[int]:
    return sorted({size for size in (8, 16, cls.get_preferred_block_size(16)) if cls.supports_block_size(size)})


def _head_size(cls: Any) -> int:
    return next(iter(cls.get_supported_head_sizes()), 16)


class _Layer:
    """What an implementation may read from its layer."""

    layer_name = "layer"

    def __init__(self, kv_cache: torch.Tensor) -> None:
        self.kv_cache = kv_cache


class _Case:
    """Random sequences with blocks in no order, and a cache full of what must not be read."""

    def __init__(self, cls: Any, subject: str, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        self.cls, self.subject, self.device, self.block_size = cls, subject, device, block_size
        self.head_size, heads = _head_size(cls), _KV_HEADS * _GROUP
        generator = torch.Generator().manual_seed(block_size)
        lengths = [length for length, _ in _SEQUENCES]

        def numbers(length: int, count: int) -> torch.Tensor:
            return torch.randn(length, count, self.head_size, generator=generator).to(device, dtype)

        self.query = [numbers(length, heads) for length in lengths]
        self.key = [numbers(length, _KV_HEADS) for length in lengths]
        self.value = [numbers(length, _KV_HEADS) for length in lengths]
        free = (torch.randperm(_BLOCKS - 1, generator=generator) + 1).tolist()
        self.blocks = [[free.pop() for _ in range(-(-length // block_size))] for length in lengths]
        self.scale = self.head_size**-0.5
        shape = cls.get_kv_cache_shape(_BLOCKS, block_size, _KV_HEADS, self.head_size)
        order = cls.get_kv_cache_stride_order()
        memory = torch.full([shape[dim] for dim in order], float("nan"), dtype=dtype, device=device)
        self.layer = _Layer(memory.permute([order.index(dim) for dim in range(len(order))]))
        config = tiny_vllm_config(block_size=block_size)
        spec = FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=_KV_HEADS,
            head_size=self.head_size,
            dtype=str(dtype).removeprefix("torch."),
        )
        with (
            explained(subject, "building its parts", "see the constructors of the contract"),
            set_current_vllm_config(config),
        ):
            self.builder = cls.get_builder_cls()(spec, ["layer"], config, device)
            self.impl = cls.get_impl_cls()(heads, self.head_size, self.scale, _KV_HEADS)
            self.impl.process_weights_after_loading(dtype)

    def step(self, spans: dict[int, tuple[int, int]]) -> list[torch.Tensor]:
        """Compute tokens `first` to `last` of some sequences in one step."""
        common, slots = self._metadata(spans)
        rows = [
            torch.cat([part[i][first:last] for i, (first, last) in spans.items()])
            for part in (self.query, self.key, self.value)
        ]
        output = torch.full_like(rows[0], float("nan"))
        with explained(self.subject, "computing a step", "see AttentionImpl.forward"), torch.no_grad():
            metadata = self.builder.build(0, common)
            self.impl.prepare_for_batch(metadata)
            if not self.cls.forward_includes_kv_cache_update:
                self.impl.do_kv_cache_update(self.layer, rows[1], rows[2], self.layer.kv_cache, slots)
            self.impl.forward(self.layer, *rows, self.layer.kv_cache, metadata, output=output)
        return list(output.split([last - first for first, last in spans.values()]))

    def _metadata(self, spans: dict[int, tuple[int, int]]) -> tuple[CommonAttentionMetadata, torch.Tensor]:
        counts = [last - first for first, last in spans.values()]
        starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        lengths = torch.tensor([last for _, last in spans.values()], dtype=torch.int32)
        table = torch.zeros(len(spans), max(len(self.blocks[i]) for i in spans), dtype=torch.int32)
        slots = []
        for row, (i, (first, last)) in enumerate(spans.items()):
            table[row, : len(self.blocks[i])] = torch.tensor(self.blocks[i], dtype=torch.int32)
            size = self.block_size
            slots += [self.blocks[i][place // size] * size + place % size for place in range(first, last)]
        slot_mapping = torch.tensor(slots, dtype=torch.int64, device=self.device)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(self.device),
            num_reqs=len(spans),
            num_actual_tokens=sum(counts),
            max_query_len=max(counts),
            max_seq_len=int(lengths.max()),
            block_table_tensor=table.to(self.device),
            slot_mapping=slot_mapping,
        )
        return common, slot_mapping

    def expected(self, i: int, first: int, last: int) -> torch.Tensor:
        """The same by the definition, in float64."""
        query, key, value = (part[i].double().cpu() for part in (self.query, self.key, self.value))
        out = torch.empty(last - first, query.shape[1], self.head_size, dtype=torch.float64)
        for row, place in enumerate(range(first, last)):
            for head in range(query.shape[1]):
                keys, values = key[: place + 1, head // _GROUP], value[: place + 1, head // _GROUP]
                out[row, head] = ((keys @ query[place, head]) * self.scale).softmax(0) @ values
        return out


def _check_numbers(cls: Any, subject: str, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
    case = _Case(cls, subject, device, dtype, block_size)
    done = [0] * len(_SEQUENCES)
    for step in range(max(len(ends) for _, ends in _SEQUENCES)):
        spans = {i: (done[i], ends[step]) for i, (_, ends) in enumerate(_SEQUENCES) if step < len(ends)}
        for (i, (first, last)), found in zip(spans.items(), case.step(spans), strict=True):
            far = float((found.double().cpu() - case.expected(i, first, last)).abs().max())
            kind = "a prompt" if first == 0 else "a decoding request" if last - first == 1 else "a prompt's next chunk"
            what = f"{kind} of tokens {first} to {last} in blocks of {block_size} differs by {far:.3g}"
            fix = "attend to the request's own tokens up to and with the query, found through its block table"
            require(far < _CLOSE.get(dtype, 5e-2), subject, what, fix)
            done[i] = last
