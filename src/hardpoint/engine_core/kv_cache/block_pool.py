"""The blocks of the KV cache: which are free, who uses them, and which can be found by hash."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hardpoint.engine_core.kv_cache.residency import BlockResidency
from hardpoint.log import init_logger

logger = init_logger(__name__)

# A block hash followed by the number of its group.
BlockKey = bytes


class KVCacheBlock:
    """One block. While `ref_cnt` is 0 it is in the free list, still findable by `key` until it is reused."""

    __slots__ = ("block_id", "is_null", "key", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.key: BlockKey | None = None
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None
        self.is_null = False

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, cached={self.key is not None})"


class FreeBlockList:
    """Free blocks, least recently used first; every operation takes constant time."""

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-2)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self.num_blocks = 0
        for block in blocks:
            self.append(block)

    def append(self, block: KVCacheBlock) -> None:
        """Add at the end: the last to be reused."""
        last = self._tail.prev_free
        assert last is not None
        last.next_free = block
        block.prev_free = last
        block.next_free = self._tail
        self._tail.prev_free = block
        self.num_blocks += 1

    def prepend(self, block: KVCacheBlock) -> None:
        """Add at the beginning: the next to be reused."""
        first = self._head.next_free
        assert first is not None
        first.prev_free = block
        block.next_free = first
        block.prev_free = self._head
        self._head.next_free = block
        self.num_blocks += 1

    def remove(self, block: KVCacheBlock) -> None:
        """Take out a block wherever it is."""
        before, after = block.prev_free, block.next_free
        assert before is not None, f"{block} is not free"
        assert after is not None, f"{block} is not free"
        before.next_free = after
        after.prev_free = before
        block.prev_free = block.next_free = None
        self.num_blocks -= 1

    def popleft(self) -> KVCacheBlock:
        """Take out the block that was unused longest; IndexError when there is none."""
        block = self._head.next_free
        assert block is not None
        if block is self._tail:
            raise IndexError("no free block")
        self.remove(block)
        return block

    def blocks(self) -> list[KVCacheBlock]:
        """All free blocks in order of reuse."""
        found, block = [], self._head.next_free
        while block is not None and block is not self._tail:
            found.append(block)
            block = block.next_free
        return found


class BlockPool:
    """Gives out blocks, counts their users, and remembers full ones by hash until they are reused.

    `num_blocks` includes block 0, the null block: it stands for a block that is not kept and
    is never given out.
    """

    def __init__(self, num_blocks: int, enable_caching: bool, residency: BlockResidency | None = None) -> None:
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self._free = FreeBlockList(self.blocks)
        self._cached: dict[BlockKey, KVCacheBlock] = {}
        self._residency = residency
        self.null_block = self._free.popleft()
        self.null_block.is_null = True

    @property
    def num_gpu_blocks(self) -> int:
        """`num_blocks` under the name that schedulers from outside read."""
        return self.num_blocks

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can be given out."""
        return self.num_blocks - 1

    def get_num_free_blocks(self) -> int:
        """Blocks nobody uses, cached ones included."""
        return self._free.num_blocks

    def get_usage(self) -> float:
        """Share of the usable blocks that are in use, 0..1."""
        usable = self.num_usable_blocks
        return 1.0 - self._free.num_blocks / usable if usable else 0.0

    def get_cached_block(self, key: BlockKey) -> KVCacheBlock | None:
        """The block with this content, in use or free."""
        return self._cached.get(key)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks out of the free list, forgetting what they held; ValueError when there are too few."""
        if num_blocks > self._free.num_blocks:
            raise ValueError(f"{num_blocks} blocks asked for, {self._free.num_blocks} are free")
        taken = []
        for _ in range(num_blocks):
            block = self._free.popleft()
            self._forget(block)
            block.ref_cnt = 1
            taken.append(block)
        if self._residency is not None:
            self._residency.allocated(block.block_id for block in taken)
        return taken

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add a user to cached blocks; the null block has none."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self._free.remove(block)
            block.ref_cnt += 1
        if self._residency is not None:
            self._residency.accessed(block.block_id for block in blocks)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Take a user from each; those without users become free, the first to be reused first.

        Blocks that nobody can find are reused before all others: they keep nothing worth keeping from being found,
        and their memory is in use already, which that of a block never given out need not be.
        """
        for block in ordered_blocks:
            if block.is_null:
                continue
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, f"{block} freed too often"
            if block.ref_cnt == 0:
                (self._free.append if block.key is not None else self._free.prepend)(block)

    def cache_block(self, block: KVCacheBlock, key: BlockKey) -> None:
        """Make a full block findable. Of two blocks with the same content, one that is in use is found."""
        if block.key is not None:
            return
        known = self._cached.get(key)
        if known is not None:
            if known.ref_cnt:
                return
            known.key = None  # Free already, so it would be gone sooner.
        self._cached[key] = block
        block.key = key

    def uncache(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Make blocks unfindable, e.g. because what they hold is wrong."""
        for block in blocks:
            if block.key is not None:
                del self._cached[block.key]
                block.key = None

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False when some are in use."""
        in_use = self.num_usable_blocks - self._free.num_blocks
        if in_use:
            logger.warning("The prefix cache was not reset: %d blocks are in use.", in_use)
            return False
        self.uncache(self.blocks)
        if self._residency is not None:
            self._residency.reset()
        return True

    def _forget(self, block: KVCacheBlock) -> None:
        if block.key is not None:
            del self._cached[block.key]
            block.key = None
            if self._residency is not None:
                self._residency.evicted(block.block_id)
