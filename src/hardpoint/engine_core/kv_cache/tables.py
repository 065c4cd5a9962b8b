"""Block tables: which blocks each request holds in one group of layers."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.contracts.kv_cache import KVCacheSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs
from hardpoint.engine_core.kv_cache.block_pool import BlockPool, KVCacheBlock
from hardpoint.engine_core.request import BlockHash, Request


def _ceil_div(amount: int, unit: int) -> int:
    return -(-amount // unit)


class BlockTables:
    """Tables of a group whose layers attend to the whole sequence: block i holds tokens [i*size, (i+1)*size)."""

    def __init__(self, pool: BlockPool, group_id: int, block_size: int) -> None:
        self.block_size = block_size
        self._pool = pool
        self._key_suffix = group_id.to_bytes(4, "little")
        self._tables: dict[str, list[KVCacheBlock]] = {}
        # Leading blocks of each table that are cached already.
        self._num_cached: dict[str, int] = {}

    def blocks(self, request_id: str) -> list[KVCacheBlock]:
        """The blocks a request holds; an empty list for one that holds none."""
        return self._tables.get(request_id, [])

    def most_blocks_held(self, num_tokens: int) -> int:
        """Blocks a sequence of `num_tokens` holds at most at once."""
        return _ceil_div(num_tokens, self.block_size)

    def find_hit(self, block_hashes: Sequence[BlockHash], max_blocks: int) -> list[KVCacheBlock]:
        """The longest run of cached blocks from the start, at most `max_blocks`."""
        hit: list[KVCacheBlock] = []
        for block_hash in block_hashes[:max_blocks]:
            block = self._pool.get_cached_block(block_hash + self._key_suffix)
            if block is None:
                break
            hit.append(block)
        return hit

    def has_room(self, request_id: str, num_tokens: int) -> bool:
        """Whether a request's blocks have place for `num_tokens`; it must hold a table."""
        return num_tokens <= len(self._tables[request_id]) * self.block_size

    def num_missing(self, request_id: str, num_tokens: int, num_hit_blocks: int = 0) -> int:
        """Blocks to add to a table (or to a hit, for a new request) so that `num_tokens` have a place."""
        held = len(self._tables.get(request_id, ())) or num_hit_blocks
        return max(0, _ceil_div(num_tokens, self.block_size) - held)

    def start(self, request_id: str, hit: Sequence[KVCacheBlock]) -> None:
        """Begin a table with cached blocks."""
        assert request_id not in self._tables, f"{request_id} holds blocks already"
        self._pool.touch(hit)
        self._tables[request_id] = list(hit)
        self._num_cached[request_id] = len(hit)

    def extend(self, request_id: str, num_blocks: int) -> list[KVCacheBlock]:
        """Add blocks at the end of a table."""
        if not num_blocks:
            return []
        new = self._pool.get_new_blocks(num_blocks)
        self._tables[request_id].extend(new)
        return new

    def cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the blocks that the first `num_tokens` tokens fill findable."""
        done = self._num_cached[request.request_id]
        full = num_tokens // self.block_size
        if full <= done:
            return
        table = self._tables[request.request_id]
        for index in range(done, full):
            if not table[index].is_null:
                self._pool.cache_block(table[index], request.block_hashes[index] + self._key_suffix)
        self._num_cached[request.request_id] = full

    def drop_unneeded(self, request_id: str, num_computed_tokens: int) -> None:
        """Give back blocks that no later token attends to: none here."""

    def free(self, request_id: str) -> None:
        """Give back a request's blocks; its last ones are reused first, since fewer requests share them."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            del self._num_cached[request_id]
            self._pool.free_blocks(reversed(table))


class SlidingWindowTables(BlockTables):
    """Tables of a group whose layers attend to the last `window` tokens; older blocks become the null block."""

    def __init__(self, pool: BlockPool, group_id: int, spec: SlidingWindowSpec, max_step_tokens: int) -> None:
        super().__init__(pool, group_id, spec.block_size)
        self._spec = spec
        self._kept_tokens = spec.sliding_window - 1 + spec.extra_retained_tokens
        self._max_step_tokens = max_step_tokens

    def most_blocks_held(self, num_tokens: int) -> int:
        """Blocks of the window and of one step's tokens."""
        return self._spec.blocks_held(num_tokens, self._max_step_tokens)

    def find_hit(self, block_hashes: Sequence[BlockHash], max_blocks: int) -> list[KVCacheBlock]:
        """The longest prefix whose last window is cached; null blocks stand for what lies before."""
        wanted = max(1, _ceil_div(self._kept_tokens, self.block_size))
        run: list[KVCacheBlock] = []
        for index in range(min(max_blocks, len(block_hashes)) - 1, -1, -1):
            block = self._pool.get_cached_block(block_hashes[index] + self._key_suffix)
            if block is None:
                run = []
                continue
            run.append(block)
            if len(run) == wanted:
                return [self._pool.null_block] * index + run[::-1]
        return run[::-1]

    def drop_unneeded(self, request_id: str, num_computed_tokens: int) -> None:
        """Give back the blocks before the window of the next token."""
        table = self._tables.get(request_id)
        if table is None:
            return
        num_unneeded = max(0, num_computed_tokens - self._kept_tokens) // self.block_size
        dropped = []
        for index in range(min(num_unneeded, len(table)) - 1, -1, -1):
            if table[index].is_null:
                break
            dropped.append(table[index])
            table[index] = self._pool.null_block
        self._pool.free_blocks(dropped)


def make_tables(pool: BlockPool, group_id: int, spec: KVCacheSpec, max_step_tokens: int) -> BlockTables:
    """The tables for a group's spec."""
    layer = next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    if isinstance(layer, SlidingWindowSpec):
        return SlidingWindowTables(pool, group_id, layer, max_step_tokens)
    return BlockTables(pool, group_id, spec.block_size)
