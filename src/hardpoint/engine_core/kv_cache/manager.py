"""The scheduler's view of the KV cache: prefix hits, slots for new tokens, and what is free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hardpoint.contracts.kv_cache import KVCacheConfig
from hardpoint.engine_core.kv_cache.block_pool import BlockPool, KVCacheBlock
from hardpoint.engine_core.kv_cache.residency import BlockResidency, EvictionEvent
from hardpoint.engine_core.kv_cache.tables import make_tables
from hardpoint.engine_core.request import Request
from hardpoint.types.stats import PrefixCacheStats


@dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """Blocks per KV cache group."""

    blocks: tuple[Sequence[KVCacheBlock], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Ids per group, as a worker's block table takes them."""
        return tuple([block.block_id for block in group] for group in self.blocks)

    def is_empty(self) -> bool:
        """Whether no group has a block."""
        return not any(self.blocks)


class KVCacheManager:
    """Gives requests their blocks.

    max_model_len    tokens of the longest sequence
    max_step_tokens  tokens of the largest step
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        max_step_tokens: int,
        enable_caching: bool = True,
        log_stats: bool = False,
        residency: BlockResidency | None = None,
    ) -> None:
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.max_model_len = max_model_len
        self.log_stats = log_stats
        # A model whose layers store nothing, or something that cannot be shared, has no prefix cache.
        self.enable_caching = enable_caching and bool(specs) and all(spec.prefix_cacheable for spec in specs)
        self.block_size = specs[0].block_size if specs else 1
        if any(spec.block_size != self.block_size for spec in specs):
            raise ValueError("KV cache groups with different block sizes are not supported")
        self.residency = residency
        self.block_pool = BlockPool(kv_cache_config.num_blocks, self.enable_caching, residency)
        self._groups = tuple(make_tables(self.block_pool, i, spec, max_step_tokens) for i, spec in enumerate(specs))
        self._no_blocks = KVCacheBlocks(tuple([] for _ in specs))
        self._stats = PrefixCacheStats()

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0..1."""
        return self.block_pool.get_usage()

    @property
    def empty_kv_cache_blocks(self) -> KVCacheBlocks:
        """No block in any group."""
        return self._no_blocks

    def max_request_tokens(self) -> int:
        """Length of the longest sequence the whole pool can hold, at most `max_model_len`."""
        if self._fits(self.max_model_len):
            return self.max_model_len
        fits, too_long = 0, self.max_model_len
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            fits, too_long = (middle, too_long) if self._fits(middle) else (fits, middle)
        return fits

    def _fits(self, num_tokens: int) -> bool:
        return sum(group.most_blocks_held(num_tokens) for group in self._groups) <= self.block_pool.num_usable_blocks

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """Cached blocks of a request's prefix, and the tokens they hold.

        Always leaves one token to compute: without it there would be no logits.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self._no_blocks, 0
        num_blocks = (request.num_tokens - 1) // self.block_size
        hits: list[list[KVCacheBlock]] = []
        # A shorter hit in one group shortens the others, whose hit may then be shorter still.
        settled = False
        while not settled:
            hits = [group.find_hit(request.block_hashes, num_blocks) for group in self._groups]
            shortest = min(len(hit) for hit in hits)
            settled = all(len(hit) == shortest for hit in hits)
            num_blocks = shortest
        return KVCacheBlocks(tuple(hits)), num_blocks * self.block_size

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
    ) -> KVCacheBlocks | None:
        """Make room for the next tokens of a request; None when too few blocks are free, and nothing has changed.

        num_new_tokens           tokens to compute in this step
        num_new_computed_tokens  tokens of `new_computed_blocks`, a prefix hit of a request without blocks
        num_lookahead_tokens     further slots, for draft tokens
        full_sequence_must_fit   refuse unless all the request's present tokens would fit
        reserved_blocks          free blocks to leave alone
        Returns the blocks added after the hit.
        """
        computed = request.num_computed_tokens + num_new_computed_tokens
        num_tokens = computed + num_new_tokens
        num_slots = min(num_tokens + num_lookahead_tokens, self.max_model_len)
        added: KVCacheBlocks | None = self._no_blocks
        if new_computed_blocks is not None:
            total = request.num_tokens if full_sequence_must_fit else 0
            added = self._start(request.request_id, new_computed_blocks.blocks, num_slots, total, reserved_blocks)
        elif not self._has_room(request.request_id, num_slots):
            added = self._grow(request, num_slots, reserved_blocks)
        if added is not None and self.enable_caching:
            # Draft tokens may be rejected: only tokens that are certain name a block.
            certain = min(num_tokens, request.num_tokens)
            for group in self._groups:
                group.cache_full_blocks(request, certain)
        return added

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks of a request's first `num_tokens` tokens findable; it must have its blocks."""
        if self.enable_caching:
            for group in self._groups:
                group.cache_full_blocks(request, num_tokens)

    def _has_room(self, request_id: str, num_slots: int) -> bool:
        """Whether a request's blocks have place for `num_slots` tokens already: true in most steps."""
        for group in self._groups:  # noqa: SIM110 - a generator costs more than the loop
            if not group.has_room(request_id, num_slots):
                return False
        return True

    def _start(
        self,
        request_id: str,
        hits: tuple[Sequence[KVCacheBlock], ...],
        num_slots: int,
        num_tokens_in_full: int,
        reserved_blocks: int,
    ) -> KVCacheBlocks | None:
        """Begin a request's tables with a hit; None unless `num_tokens_in_full` tokens would fit too."""
        available = self.block_pool.get_num_free_blocks() - reserved_blocks - _num_revived(hits)
        missing = [
            group.num_missing(request_id, num_slots, len(hit)) for group, hit in zip(self._groups, hits, strict=True)
        ]
        in_full = sum(
            max(0, group.most_blocks_held(num_tokens_in_full) - sum(not block.is_null for block in hit))
            for group, hit in zip(self._groups, hits, strict=True)
        )
        if max(sum(missing), in_full) > available:
            return None
        for group, hit in zip(self._groups, hits, strict=True):
            group.start(request_id, hit)
        return self._extend(request_id, missing)

    def _grow(self, request: Request, num_slots: int, reserved_blocks: int) -> KVCacheBlocks | None:
        request_id = request.request_id
        for group in self._groups:
            group.drop_unneeded(request_id, request.num_computed_tokens)
        missing = [group.num_missing(request_id, num_slots) for group in self._groups]
        if sum(missing) > self.block_pool.get_num_free_blocks() - reserved_blocks:
            return None
        return self._extend(request_id, missing)

    def _extend(self, request_id: str, missing: list[int]) -> KVCacheBlocks:
        groups = zip(self._groups, missing, strict=True)
        return KVCacheBlocks(tuple(group.extend(request_id, count) for group, count in groups))

    def record_lookup(self, request: Request, num_hit_tokens: int) -> None:
        """Count the prefix lookup of a request that was admitted."""
        if self.log_stats and self.enable_caching:
            self._stats.record(request.num_tokens, num_hit_tokens, preempted=request.num_preemptions > 0)

    def free(self, request: Request) -> None:
        """Give back all blocks of a request."""
        for group in self._groups:
            group.free(request.request_id)

    def uncache(self, request: Request, num_tokens: int = 0) -> None:
        """Make sure that nobody finds what only this request has written, e.g. because it holds NaN.

        num_tokens  first tokens whose blocks may be found all the same
        """
        first = num_tokens // self.block_size
        for group in self._groups:
            blocks = group.blocks(request.request_id)[first:]
            self.block_pool.uncache(block for block in blocks if block.ref_cnt == 1)

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """All blocks of a request."""
        return KVCacheBlocks(tuple(group.blocks(request_id) for group in self._groups))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The same as ids."""
        return self.get_blocks(request_id).get_block_ids()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False when some are in use."""
        if not self.block_pool.reset_prefix_cache():
            return False
        if self.log_stats:
            self._stats.reset = True
        return True

    def make_prefix_cache_stats(self) -> PrefixCacheStats:
        """The lookups since the last call."""
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats

    def take_eviction_events(self) -> list[EvictionEvent]:
        """The sampled evictions since the last call."""
        return self.residency.take_events() if self.residency is not None else []


def _num_revived(hits: tuple[Sequence[KVCacheBlock], ...]) -> int:
    """Free blocks that a hit takes out of the free list."""
    return sum(block.ref_cnt == 0 and not block.is_null for hit in hits for block in hit)
